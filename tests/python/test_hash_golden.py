"""The two hashes of a key, computed by another implementation than the native one.

The expected numbers are read from tests/native/base/base_test.cc.
"""

from __future__ import annotations

import re
from pathlib import Path

import xxhash

ROOT = Path(__file__).resolve().parents[2]
SEEDS = {"partition_hash": 0, "index_hash": 0x9E3779B97F4A7C15}


def test_golden_values_of_the_native_tests_are_xxh3() -> None:
    text = (ROOT / "tests/native/base/base_test.cc").read_text()
    golden = re.findall(r"(\w+_hash)\((0x[0-9A-F]+)u\), (0x[0-9A-F]+)u\)", text)
    assert len(golden) == 14
    for name, key, value in golden:
        key_bytes = int(key, 16).to_bytes(8, "little")
        assert xxhash.xxh3_64_intdigest(key_bytes, SEEDS[name]) == int(value, 16), (name, key)


def test_seeds_are_those_of_the_header() -> None:
    text = (ROOT / "native/base/hash.h").read_text()
    found = dict(re.findall(r"uint64_t k(\w+)Seed = (0x[0-9A-F]+|0)u?;", text))
    assert int(found["Partition"], 16) == SEEDS["partition_hash"]
    assert int(found["Index"], 16) == SEEDS["index_hash"]
