"""A base returns the rows that were written, names damage, and exists only once it is finished."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from petps.checkpoint import (
    Base,
    BaseFolder,
    BaseInfo,
    Rows,
    Store,
    Table,
    list_positions,
    split_by_partition,
    write_base,
)
from petps.checkpoint.files import LocalFiles
from petps.checkpoint.published import BASE_PART, Published
from petps.checkpoint.reader import READ_THREADS, Reader
from petps.checkpoint.state import Chunk
from petps.checkpoint.store import BASE, DELTA
from petps.delta import Position, TableSchema
from petps.delta.schema import partition_of
from petps.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    IoError,
    NotFound,
    PetpsError,
    Unimplemented,
)

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
SCHEMA = TableSchema("user", "f32", 4)
P = 4
Keys = npt.NDArray[np.uint64]
Stored = npt.NDArray[np.uint8]


def row_of(key: int) -> bytes:
    return key.to_bytes(8, "little") * 2


def rows_of(keys: Keys) -> tuple[Stored, None]:
    stored = b"".join(row_of(key) for key in keys.tolist())
    return np.frombuffer(stored, np.uint8).reshape(-1, SCHEMA.row_bytes), None


def write(
    folder: Path,
    rows: Keys | range | Mapping[TableSchema, Generator[Rows]],
    chunk_bytes: int = 1 << 20,
    model: str = "m",
    **options: Any,
) -> Base:
    """Write a base: of rows, or of these keys in table user."""
    positions = list_positions({0: (7, 3), 2: (7, 9)})
    right = {"instance": "m@1", "version": 5, "partitions": P, "positions": positions}
    info = BaseInfo(**{**right, **options})
    if not isinstance(rows, Mapping):
        keys = np.array(rows, np.uint64)
        pieces = split_by_partition(SCHEMA, keys, rows_of, info.partitions, chunk_bytes=chunk_bytes)
        rows = {SCHEMA: pieces}
    write_base(folder, model, info, rows)
    return Base.open(folder)


def read_keys(base: Base, partitions: Sequence[int] | None = None) -> list[int]:
    return [key for keys, _ in base.chunks("user", partitions) for key in keys.tolist()]


@pytest.mark.parametrize(
    ("n", "chunk_bytes"), [(0, 1), (1, 1), (7, 1), (300, 500), (1000, 1 << 20)]
)
def test_round_trip(tmp_path: Path, n: int, chunk_bytes: int) -> None:
    keys = np.random.default_rng(n).integers(0, 1 << 64, n, dtype=np.uint64)
    base = write(tmp_path / "b", keys, chunk_bytes)
    assert (base.model, base.version, base.partitions, base.rows("user")) == ("m", 5, P, n)
    assert base.schemas() == {"user": SCHEMA}
    assert [base.position(p) for p in range(P)] == [(7, 3), (0, 0), (7, 9), (0, 0)]
    by_partition: list[int] = []
    for partition in range(P):
        for chunk_keys, rows in base.chunks("user", [partition]):
            assert rows.shape == (len(chunk_keys), SCHEMA.row_bytes)
            assert len(chunk_keys) * 24 <= max(chunk_bytes, 24)
            assert (partition_of(chunk_keys, P) == partition).all()
            for key, row in zip(chunk_keys.tolist(), rows, strict=True):
                assert row.tobytes() == row_of(key)
        own = read_keys(base, [partition])
        assert own == sorted(own)
        by_partition += own
    assert sorted(by_partition) == sorted(keys.tolist())
    assert len(read_keys(base)) == n


def test_a_base_of_version_0_is_version_1_of_its_store(tmp_path: Path) -> None:
    assert write(tmp_path, range(9), version=0).version == 0
    assert Store.open(tmp_path).state.newest_version == 1


def test_keys_that_are_deleted_meanwhile_are_left_out(tmp_path: Path) -> None:
    def rows_of_thirds(keys: Keys) -> tuple[Stored, npt.NDArray[np.bool_]]:
        return rows_of(keys)[0], keys % 3 == 0

    done: list[int] = []
    keys = np.arange(100, dtype=np.uint64)
    rows = split_by_partition(SCHEMA, keys, rows_of_thirds, P, progress=done.append)
    base = write(tmp_path, {SCHEMA: rows})
    assert base.rows("user") == 34
    assert sum(done) == 100
    assert sorted(read_keys(base)) == list(range(0, 100, 3))


def test_without_a_state_there_is_no_base(tmp_path: Path) -> None:
    """A crash before the commit leaves data files, and the next writer may use the folder."""
    folder = tmp_path / "b"
    write(folder, range(10))
    next((folder / "states").iterdir()).unlink()
    with pytest.raises(NotFound, match=r"neither states/\*\.json nor manifest\.json"):
        Base.open(folder)
    assert BaseFolder(tmp_path).of_model("m") == []
    assert sorted(read_keys(write(folder, range(5)))) == list(range(5))
    assert len(BaseFolder(tmp_path).of_model("m")) == 1


@pytest.mark.parametrize("method", ["write", "create"])
@pytest.mark.parametrize("error", [IoError("the disk is gone"), KeyboardInterrupt()])
def test_a_base_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException
) -> None:
    """write() fails at the position, create() fails after all else was written."""
    real = getattr(LocalFiles, method)

    def fail(files: LocalFiles, path: str, content: Any) -> None:
        if path.startswith(("parts", "states")):
            raise error
        real(files, path, content)

    monkeypatch.setattr(LocalFiles, method, fail)
    with pytest.raises(type(error)):
        write(tmp_path / "new", range(10))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine").write_text("mine")
    with pytest.raises(type(error)):
        write(tmp_path / "kept", range(10))
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        "kept",
        "kept/mine",
    ]


@pytest.mark.parametrize("format_", [1, 2])
def test_a_folder_with_a_base_is_refused(tmp_path: Path, format_: int) -> None:
    folder = tmp_path / "b"
    shutil.copytree(GOLDEN / f"base-{format_}", folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(AlreadyExists, match="holds a base already: name a new folder"):
        write(folder, range(3))
    assert sorted(folder.rglob("*")) == before


def test_of_two_writers_one_fails(tmp_path: Path) -> None:
    def rows_beside_another_writer(keys: Keys) -> tuple[Stored, None]:
        if not (tmp_path / "states").exists():
            write(tmp_path, range(7))
        return rows_of(keys)

    keys = np.arange(3, dtype=np.uint64)
    rows = split_by_partition(SCHEMA, keys, rows_beside_another_writer, P)
    with pytest.raises(FailedPrecondition, match=r"another writer .*; nothing is left of it"):
        write(tmp_path, {SCHEMA: rows})
    assert len(read_keys(Base.open(tmp_path))) == 7


@pytest.mark.parametrize("chunk_bytes", [1, 1000])
def test_a_key_that_appears_twice_is_refused(tmp_path: Path, chunk_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match="table user: a key appears twice"):
        write(tmp_path / "b", np.array([4, 9, 4], np.uint64), chunk_bytes)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([[0, 1]], "a piece has keys of several partitions"),
        ([[4, 5], [5, 8]], "the pieces' keys do not ascend"),
        ([[5], [4]], "the pieces' keys do not ascend"),
        ([[0], [1]], "the pieces' keys do not ascend"),
    ],
    ids=["several-partitions", "twice", "descending", "partitions-descending"],
)
def test_pieces_out_of_order_are_refused(
    tmp_path: Path, pieces: list[list[int]], message: str
) -> None:
    table = Table.of("user", 4)
    keys = np.array([0, 1, 4, 5, 8], np.uint64)
    assert partition_of(keys, 2).tolist() == [1, 0, 0, 0, 0]
    rows = (Rows.of(table, keys, {"row": np.ones((len(keys), 4), np.float32)}) for keys in pieces)
    with pytest.raises(InvalidArgument, match=message):
        write(tmp_path, {SCHEMA: rows}, partitions=2)


def test_bases_are_listed_newest_first_without_damaged_ones(tmp_path: Path) -> None:
    for name, version, model in (("a", 3, "m"), ("b", 9, "m"), ("c", 5, "m"), ("d", 99, "other")):
        write(tmp_path / name, range(3), version=version, model=model)
    shutil.copytree(GOLDEN / "base-1", tmp_path / "old")
    (tmp_path / "e" / "states").mkdir(parents=True)
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "manifest.json").write_text("{")
    bases = BaseFolder(tmp_path)
    assert [base.version for base in bases.of_model("m")] == [9, 5, 3]
    assert [base.version for base in bases.of_model("ranking")] == [12]
    assert bases.open("c").version == 5
    assert bases.open(str(tmp_path / "a")).version == 3
    assert bases.open(f"file://{tmp_path}/d").model == "other"
    assert bases.open("old").instance == "ranking@1"


def test_a_location_may_name_a_version_of_a_store(tmp_path: Path) -> None:
    """A trainer with a checkpoint store need not write its rows a second time."""
    table = Table.of("user", 4)
    store = Store.create(tmp_path / "s#1", "m", [table])

    def parts(version: int) -> Mapping[str, bytes]:
        return Published(Position(3, (version,) * P, 10 * version), {}).parts()

    for version, keys in ((1, range(50)), (2, range(40, 60)), (3, range(5))):
        rows = Rows.of(table, list(keys), {"row": np.full((len(keys), 4), version, np.float32)})
        stored = {} if version == 3 else parts(version)
        store.write(version, {"user": rows}, kind=BASE if version == 1 else DELTA, parts=stored)
    bases = BaseFolder(tmp_path)
    first, second = bases.open("s#1#1"), bases.open(f"file://{tmp_path}/s#1#2")
    assert (first.version, first.position(0)) == (10, (3, 1))
    assert (second.version, second.position(0)) == (20, (3, 2))
    assert (len(read_keys(first)), len(read_keys(second))) == (50, 60)
    assert bases.open("s#1").version == 20  # the newest with a position
    with pytest.raises(NotFound, match="version 3 has no position in a log"):
        bases.open("s#1#3")
    with pytest.raises(NotFound, match="there is no version 4 in the store"):
        bases.open("s#1#4")


@pytest.mark.parametrize("format_", [1, 2])
@pytest.mark.parametrize("damage", ["cut", "altered", "missing"])
def test_a_damaged_chunk_is_named(tmp_path: Path, format_: int, damage: str) -> None:
    shutil.copytree(GOLDEN / f"base-{format_}", tmp_path / "b")
    base = Base.open(tmp_path / "b")
    (path, *_) = sorted((tmp_path / "b").glob("data/*" if format_ == 2 else "user*.arrow"))
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        at = 300  # in a chunk of table user
        path.write_bytes(
            whole[:at] if damage == "cut" else whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        )
    with pytest.raises(DataLoss, match=rf"{path.name}.*restore the file from a copy"):
        read_keys(base)
    with pytest.raises(NotFound, match="has no table 'other'; it has: user, item"):
        list(base.chunks("other"))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"instance": None}, "instance: Input should be a valid string"),
        ({"version": -1}, "version: Input should be greater"),
        ({"partitions": 5000}, "partitions: Input should be less"),
        ({"positions": [{"partition": 0, "run": 1, "seq": -4}]}, r"positions\.0\.seq: Input"),
    ],
)
def test_a_wrong_position_is_named(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    right = {"instance": "m", "version": 1, "partitions": 2, "positions": []}
    text = json.dumps({**right, **changes}).encode()
    table = Table.of("user", 4)
    rows = Rows.of(table, [1], {"row": np.ones((1, 4), np.float32)})
    store = Store.create(tmp_path, "m", [table])
    store.write(1, {"user": rows}, kind=BASE, parts={BASE_PART: text})
    with pytest.raises(DataLoss, match=rf"part petps\.base: .*{error}"):
        Base.open(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    (state,) = (tmp_path / "states").iterdir()
    state.write_bytes(state.read_bytes().replace(b"petps-store-2", b"petps-store-3"))
    with pytest.raises(Unimplemented, match="has format 3, this release reads 2: upgrade"):
        Base.open(tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_a_mutated_state_gives_a_clear_error(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    write(tmp_path, range(3))
    (path,) = (tmp_path / "states").iterdir()
    whole = path.read_bytes()
    for _ in range(100):
        data = bytearray(whole)
        data[int(rng.integers(0, len(data)))] ^= int(rng.integers(1, 256))
        path.write_bytes(data)
        with pytest.raises(PetpsError):
            Base.open(tmp_path)


class Reads:
    """Counts the chunks that are read, and those that are in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chunks: list[Chunk] = []
        self._rows: list[weakref.ref[Stored]] = []
        read = Reader.read

        def count(
            reader: Reader, chunks: Sequence[Chunk], tables: Mapping[str, Table]
        ) -> list[Rows]:
            rows = read(reader, chunks, tables)
            self.chunks += chunks
            self._rows += [weakref.ref(piece.columns["row"]) for piece in rows]
            return rows

        monkeypatch.setattr(Reader, "read", count)

    @property
    def in_memory(self) -> int:
        return sum(rows() is not None for rows in self._rows)


def test_a_reader_holds_few_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write(tmp_path, range(2000), chunk_bytes=240, partitions=8)
    reads = Reads(monkeypatch)
    most = 0
    for _ in base.chunks("user"):
        most = max(most, reads.in_memory)
    assert len(reads.chunks) > 150
    assert 0 < most <= READ_THREADS + 1


def test_a_reader_of_one_partition_reads_only_its_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write(tmp_path, range(2000), chunk_bytes=240, partitions=8)
    reads = Reads(monkeypatch)
    keys = read_keys(base, [5])
    assert {partition_of(np.array(keys, np.uint64), 8).tolist()[0]} == {5}
    assert sum(chunk.rows for chunk in reads.chunks) == len(keys) < 2000 / 4


# ---- golden ----

USER, ITEM = TableSchema("user", "f32", 4), TableSchema("item", "int8", 3)
GOLDEN_KEYS = {
    USER: np.array([*range(20), 1 << 63, (1 << 64) - 1], np.uint64),
    ITEM: np.arange(5, 15, dtype=np.uint64) * np.uint64(1_000_003),
}


def golden_rows(schema: TableSchema, keys: Keys) -> Stored:
    """Return the rows from which both golden bases were written."""
    scale = np.float32(1.0 if schema == USER else 0.5)
    values = (keys.astype(np.float32)[:, None] % 1000) * scale
    return schema.encode((values + np.arange(schema.dim)).astype(np.float32))


@pytest.mark.parametrize("format_", [1, 2])
def test_a_golden_base_is_read(format_: int) -> None:
    """Format 1 is the folder that older releases wrote; no code writes it any more."""
    base = Base.open(GOLDEN / f"base-{format_}")
    assert (base.model, base.instance, base.version) == ("ranking", "ranking@1", 12)
    assert (base.partitions, base.dense) == (4, "weights/12.npz")
    assert [base.position(p) for p in range(4)] == [(7, 81), (7, 90), (0, 0), (6, 2)]
    assert base.schemas() == {"user": USER, "item": ITEM}
    for schema, keys in GOLDEN_KEYS.items():
        assert base.rows(schema.name) == len(keys)
        for partition in range(4):
            own = np.sort(keys[partition_of(keys, 4) == partition])
            rows = {
                int(key): row.tobytes()
                for part, stored in base.chunks(schema.name, [partition])
                for key, row in zip(part, stored, strict=True)
            }
            assert list(rows) == own.tolist()
            assert b"".join(rows.values()) == golden_rows(schema, own).tobytes()


def test_the_writer_writes_the_golden_chunks(tmp_path: Path) -> None:
    tables = {
        schema: split_by_partition(
            schema,
            keys,
            lambda part, schema=schema: (golden_rows(schema, part), None),  # type: ignore[misc]
            4,
            chunk_bytes=100,
        )
        for schema, keys in GOLDEN_KEYS.items()
    }
    write(
        tmp_path,
        tables,
        model="ranking",
        instance="ranking@1",
        positions=list_positions({0: (7, 81), 1: (7, 90), 3: (6, 2)}),
        version=12,
        dense="weights/12.npz",
    )
    for folder in ("data", "parts"):
        (written,), (golden,) = (
            [path.read_bytes() for path in (root / folder).iterdir()]
            for root in (tmp_path, GOLDEN / "base-2")
        )
        assert written == golden
