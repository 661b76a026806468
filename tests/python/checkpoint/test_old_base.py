"""A base of format 1: a wrong manifest is named, and nothing is written to the folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from petps.checkpoint import Base
from petps.checkpoint.base import open_store
from petps.checkpoint.old_base import MANIFEST
from petps.errors import DataLoss, FailedPrecondition, PetpsError, Unimplemented
from tests.python.checkpoint.test_base import GOLDEN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "base-1", tmp_path / "b")
    return tmp_path / "b"


def seal(path: Path, changes: Mapping[str, Any]) -> None:
    """Write the manifest again with other values and a checksum that matches."""
    values = {**json.loads(path.read_text()), **changes}
    del values["checksum"]
    text = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({**values, "checksum": xxhash.xxh3_64_hexdigest(text)}))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"format": "petps-base-2"}, Unimplemented, "has format 2, this release reads 1: upgrade"),
        ({"format": "other-1"}, DataLoss, "is not the manifest of a petps base"),
        ({"version": -1}, DataLoss, "version: Input should be greater"),
        ({"partitions": 5000}, DataLoss, "partitions: Input should be less"),
        ({"tables": 3}, DataLoss, "tables: Input should be a valid"),
        ({"model": None}, DataLoss, "model: Input should be a valid string"),
    ],
)
def test_a_wrong_manifest_is_named(
    folder: Path, changes: dict[str, Any], error: type[PetpsError], message: str
) -> None:
    seal(folder / MANIFEST, changes)
    with pytest.raises(error, match=message):
        Base.open(folder)


def test_file_names_stay_in_the_folder(folder: Path) -> None:
    tables = json.loads((folder / MANIFEST).read_text())["tables"]
    tables[0]["files"][0]["file"] = "../secret"
    seal(folder / MANIFEST, {"tables": tables})
    with pytest.raises(DataLoss, match=r"'\.\./secret' leaves the folder"):
        Base.open(folder)


def test_a_version_of_0_is_read(folder: Path) -> None:
    seal(folder / MANIFEST, {"version": 0})
    base = Base.open(folder)
    assert (base.version, sum(len(keys) for keys, _ in base.chunks("user"))) == (0, 22)
    assert open_store(folder).state.newest_version == 1


def test_an_old_base_is_verified_and_never_written(folder: Path) -> None:
    store = open_store(folder)
    before = sorted(folder.iterdir())
    assert store.verify() == []
    with pytest.raises(FailedPrecondition, match="is a base of an older release"):
        store.count_restore()
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("seed", range(4))
def test_mutated_manifests_give_a_clear_error(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    path = folder / MANIFEST
    whole = path.read_bytes()
    for _ in range(100):
        data = bytearray(whole)
        at = int(rng.integers(0, len(data)))
        match int(rng.integers(0, 3)):
            case 0:
                data[at] = int(rng.integers(0, 256))
            case 1:
                del data[at:]
            case _:
                data[at:at] = bytes(rng.integers(0, 256, 5, dtype=np.uint8))
        path.write_bytes(data)
        if bytes(data) == whole or _has_equal_values(bytes(data), whole):
            continue
        with pytest.raises(PetpsError):
            Base.open(folder)


def _has_equal_values(data: bytes, whole: bytes) -> bool:
    try:
        return bool(json.loads(data) == json.loads(whole))
    except ValueError:
        return False
