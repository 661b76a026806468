"""A base: it reads as it was written, it names damage, and an unfinished one does not exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from petps.checkpoint import Base, BaseFolder, BaseWriter
from petps.checkpoint.base import MANIFEST, _manifest_checksum
from petps.delta import TableSchema
from petps.delta.schema import partition_of
from petps.errors import (
    AlreadyExists,
    DataLoss,
    InvalidArgument,
    NotFound,
    PetpsError,
    Unimplemented,
)

SCHEMA = TableSchema("user", "f32", 4)
P = 4
Keys = npt.NDArray[np.uint64]


def writer(folder: Path, **options: Any) -> BaseWriter:
    values: dict[str, Any] = {
        "model": "m",
        "instance": "m@1",
        "partitions": P,
        "positions": {0: (7, 3), 2: (7, 9)},
        "version": 5,
        **options,
    }
    return BaseWriter(folder, **values)


def row_of(key: int) -> bytes:
    return key.to_bytes(8, "little") * 2


def rows_of(keys: Keys) -> tuple[npt.NDArray[np.uint8], None]:
    stored = b"".join(row_of(key) for key in keys.tolist())
    return np.frombuffer(stored, np.uint8).reshape(-1, SCHEMA.row_bytes), None


def written(folder: Path, keys: Keys, **options: Any) -> Base:
    base = writer(folder, **options)
    assert base.add_table(SCHEMA, keys, rows_of) == len(keys)
    return Base(base.commit())


@pytest.mark.parametrize(
    ("n", "chunk_bytes"), [(0, 1), (1, 1), (7, 1), (300, 500), (1000, 1 << 20)]
)
def test_round_trip(tmp_path: Path, n: int, chunk_bytes: int) -> None:
    keys = np.random.default_rng(n).integers(0, 1 << 64, n, dtype=np.uint64)
    base = written(tmp_path / "b", keys, chunk_bytes=chunk_bytes)
    assert (base.model, base.version, base.partitions, base.rows("user")) == ("m", 5, P, n)
    assert base.schemas() == {"user": SCHEMA}
    assert [base.position(p) for p in range(P)] == [(7, 3), (0, 0), (7, 9), (0, 0)]
    found: list[int] = []
    for partition in range(P):
        mine: list[int] = []
        for chunk_keys, rows in base.chunks("user", [partition]):
            assert rows.shape == (len(chunk_keys), SCHEMA.row_bytes)
            assert len(chunk_keys) * 24 <= max(chunk_bytes, 24)
            assert (partition_of(chunk_keys, P) == partition).all()
            for key, row in zip(chunk_keys.tolist(), rows, strict=True):
                assert row.tobytes() == row_of(key)
            mine += chunk_keys.tolist()
        assert mine == sorted(mine)
        found += mine
    assert sorted(found) == sorted(keys.tolist())
    assert sum(len(k) for k, _ in base.chunks("user")) == n


def test_rows_that_went_meanwhile_are_left_out(tmp_path: Path) -> None:
    base = writer(tmp_path)

    def some(keys: Keys) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        return rows_of(keys)[0], keys % 3 == 0

    done: list[int] = []
    rows = base.add_table(SCHEMA, np.arange(100, dtype=np.uint64), some, progress=done.append)
    assert rows == 34
    assert sum(done) == 100
    found = [key for keys, _ in Base(base.commit()).chunks("user") for key in keys.tolist()]
    assert sorted(found) == list(range(0, 100, 3))


def test_without_its_manifest_there_is_no_base(tmp_path: Path) -> None:
    base = writer(tmp_path / "b")
    base.add_table(SCHEMA, np.arange(10, dtype=np.uint64), rows_of)
    with pytest.raises(NotFound, match=r"holds no base: there is no manifest\.json"):
        Base(tmp_path / "b")
    assert BaseFolder(tmp_path).of_model("m") == []
    base.commit()
    assert len(BaseFolder(tmp_path).of_model("m")) == 1
    with pytest.raises(AlreadyExists, match="holds a base already: name a new folder"):
        writer(tmp_path / "b")


def test_a_key_stands_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="table user: a key appears twice"):
        writer(tmp_path).add_table(SCHEMA, np.array([4, 4], dtype=np.uint64), rows_of)
    base = writer(tmp_path)
    base.add_table(SCHEMA, np.arange(3, dtype=np.uint64), rows_of)
    with pytest.raises(AlreadyExists, match="table user is in the base already"):
        base.add_table(SCHEMA, np.arange(3, dtype=np.uint64), rows_of)


def test_newest_first_and_damaged_ones_passed_over(tmp_path: Path) -> None:
    for name, version, model in (("a", 3, "m"), ("b", 9, "m"), ("c", 5, "m"), ("d", 99, "other")):
        writer(tmp_path / name, version=version, model=model).commit()
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / MANIFEST).write_text("{")
    bases = BaseFolder(tmp_path)
    assert [base.version for base in bases.of_model("m")] == [9, 5, 3]
    assert bases.open("c").version == 5
    assert bases.open(str(tmp_path / "a")).version == 3
    assert bases.open(f"file://{tmp_path}/d").model == "other"


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_chunk_cut_or_altered_is_named(tmp_path: Path, cut: int) -> None:
    base = written(tmp_path, np.arange(100, dtype=np.uint64))
    (path, *_) = sorted(tmp_path.glob("*.arrow"))
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    with pytest.raises(DataLoss, match=rf"{path.name} does not fit its checksum"):
        list(base.chunks("user"))
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataLoss, match="does not fit its checksum: restore it or take another"):
        list(base.chunks("user"))
    path.unlink()
    with pytest.raises(DataLoss, match=rf"{path.name} can't be read"):
        list(base.chunks("user"))
    with pytest.raises(NotFound, match="has no table 'item'; it has: user"):
        list(base.chunks("item"))


def resealed(path: Path, **changes: Any) -> None:
    """Write the manifest again with other values and a checksum that matches."""
    values = json.loads(path.read_text())
    values.update(changes)
    values["checksum"] = _manifest_checksum(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("changes", "error", "what"),
    [
        ({"format": "petps-base-2"}, Unimplemented, "has format 2, this release reads 1: upgrade"),
        ({"format": "other-1"}, DataLoss, "is not the manifest of a petps base"),
        ({"version": -1}, DataLoss, "version: Input should be greater"),
        ({"partitions": 5000}, DataLoss, "partitions: Input should be less"),
        ({"tables": 3}, DataLoss, "tables: Input should be a valid list"),
        ({"model": None}, DataLoss, "model: Input should be a valid string"),
    ],
)
def test_a_wrong_manifest_is_named(
    tmp_path: Path, changes: dict[str, Any], error: type[PetpsError], what: str
) -> None:
    written(tmp_path, np.arange(10, dtype=np.uint64))
    resealed(tmp_path / MANIFEST, **changes)
    with pytest.raises(error, match=what):
        Base(tmp_path)


def test_file_names_stay_in_the_folder(tmp_path: Path) -> None:
    base = written(tmp_path / "b", np.arange(10, dtype=np.uint64))
    tables = [table.model_dump() for table in base.manifest.tables]
    tables[0]["files"][0]["file"] = "../secret"
    resealed(tmp_path / "b" / MANIFEST, tables=tables)
    with pytest.raises(DataLoss, match=r"'\.\./secret' leaves the folder"):
        list(Base(tmp_path / "b").chunks("user"))


@pytest.mark.parametrize("seed", range(4))
def test_mutated_manifests_give_a_clear_error(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    written(tmp_path, np.arange(10, dtype=np.uint64))
    path = tmp_path / MANIFEST
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
        if bytes(data) == whole or _means_the_same(bytes(data), whole):
            continue
        with pytest.raises(PetpsError):
            Base(tmp_path)


def _means_the_same(data: bytes, whole: bytes) -> bool:
    try:
        return bool(json.loads(data) == json.loads(whole))
    except ValueError:
        return False
