"""Row codecs, the partition function and the checksum, called from Python."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from petps import _native
from petps.errors import InvalidArgument

SEED = 20261


@pytest.mark.parametrize("dim", [1, 3, 16, 129])
def test_f32_is_exact_and_other_dtypes_are_close(dim: int) -> None:
    print(f"seed {SEED}")
    rows = np.random.default_rng(SEED).standard_normal((50, dim)).astype(np.float32)
    span = rows.max(axis=1, keepdims=True) - rows.min(axis=1, keepdims=True)
    limits = {
        "f32": 0.0,
        "f16": np.abs(rows) / 1024,
        "bf16": np.abs(rows) / 128,
        "int8": span / 254,
    }
    for dtype, limit in limits.items():
        stored = _native.encode_rows(dtype, rows)
        assert stored.shape == (50, _native.row_bytes(dtype, dim))
        decoded = _native.decode_rows(dtype, dim, stored)
        assert decoded.dtype == np.float32
        assert (np.abs(decoded - rows) <= limit + 1e-7).all(), dtype


def test_invalid_arguments_are_refused() -> None:
    rows = np.zeros((2, 4), np.float32)
    with pytest.raises(InvalidArgument, match=r"dtype 'f8' is unknown.*int8"):
        _native.encode_rows("f8", rows)
    with pytest.raises(
        InvalidArgument, match=r"a stored f16 row of dim 4 has 8 bytes, got uint8\[2, 9\]"
    ):
        _native.decode_rows("f16", 4, np.zeros((2, 9), np.uint8))
    with pytest.raises(InvalidArgument, match=r"dim 4097 is outside 1..4096"):
        _native.row_bytes("f32", 4097)
    with pytest.raises(InvalidArgument, match="dim 0"):
        _native.encode_rows("f32", np.zeros((2, 0), np.float32))


def test_first_not_finite_returns_the_index_of_the_row() -> None:
    rows = np.zeros((5, 3), np.float32)
    assert _native.first_not_finite(rows) == 5
    rows[3, 2] = np.inf
    assert _native.first_not_finite(rows) == 3
    rows[1, 0] = np.nan
    assert _native.first_not_finite(rows) == 1


def test_the_partition_is_xxh3_of_the_keys_bytes() -> None:
    keys = np.array([0, 1, 2**63, 2**64 - 1, 1234567], np.uint64)
    expected = [xxhash.xxh3_64_intdigest(int(key).to_bytes(8, "little")) % 7 for key in keys]
    assert _native.partition_of(keys, 7).tolist() == expected
    for partitions in (0, 1025):
        with pytest.raises(InvalidArgument, match=f"partitions {partitions} is outside 1..1024"):
            _native.partition_of(keys, partitions)


def test_crc32c_check_value() -> None:
    assert _native.crc32c(b"123456789") == 0xE3069283
    assert _native.crc32c(b"6789", _native.crc32c(b"12345")) == 0xE3069283
    with pytest.raises(InvalidArgument, match="contiguous"):
        _native.crc32c(memoryview(bytes(8))[::2])


def test_formats_and_cpu_features() -> None:
    assert _native.formats() == {"pool": 4, "wire": 1}
    assert isinstance(_native.cpu_features()["avx2"], bool)
