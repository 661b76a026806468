"""A base that several processes write is, chunk by chunk, the base that one process writes.

The model is a dict to which rows are written one after the other. Does not cover Ray, which
tests/train/train_load_on_ray.py does.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from petps.checkpoint import Base, BaseInfo, Store, Table, split_by_partition, write_base
from petps.checkpoint import bulk as bulk_module
from petps.checkpoint import spills as spills_module
from petps.checkpoint import store as store_module
from petps.checkpoint.bulk import NewBase, plan_parts, write_part
from petps.checkpoint.chunk import ROW, Bytes, Keys
from petps.checkpoint.commit import create_state
from petps.checkpoint.files import Files, LocalFiles
from petps.checkpoint.spills import Spill, merge_spills, record_bytes, write_spill
from petps.checkpoint.state import Chunk, State
from petps.checkpoint.state_files import new_name
from petps.delta import TableSchema
from petps.delta.schema import partition_of
from petps.errors import AlreadyExists, DataLoss, FailedPrecondition, IoError, NotFound
from tests.seed import SEED

DIM = 4
ITEMS = Table.of("items", DIM)


def draw(random: np.random.Generator, count: int, distinct: int) -> tuple[Keys, Bytes]:
    """Return keys of which many repeat, some of them the lowest and the highest, and rows."""
    keys = random.integers(0, distinct, count).astype(np.uint64)
    keys *= np.uint64(0x9E3779B97F4A7C15)
    keys[random.random(count) < 0.01] = np.uint64((1 << 64) - 1)
    return keys, random.integers(0, 256, (count, ITEMS.width)).astype(np.uint8)


def write_spills(base: NewBase, keys: Keys, rows: Bytes, step: int) -> list[Spill]:
    return [
        write_spill(
            base.files,
            f"data/{base.prefix}{new_name()}.spill",
            ITEMS,
            keys[start : start + step],
            rows[start : start + step],
            base.partitions,
        )
        for start in range(0, len(keys), step)
    ]


def write_parts(base: NewBase, spills: list[Spill]) -> list[list[Chunk]]:
    plans = plan_parts(base.files, base.prefix, ITEMS, spills, base.partitions)
    return [write_part(plan) for plan in plans]


def load(folder: Path, keys: Keys, rows: Bytes, partitions: int, step: int) -> Store:
    base = NewBase(folder, "m", [ITEMS], partitions)
    base.commit({"items": write_parts(base, write_spills(base, keys, rows, step))})
    return Store.open(folder)


def load_at_once(folder: Path, keys: Keys, rows: Bytes, partitions: int, chunk_bytes: int) -> Store:
    newest = {int(key): row for key, row in zip(keys, rows, strict=True)}
    distinct = np.array(list(newest), np.uint64)
    schema = TableSchema("items", "f32", DIM)

    def rows_of(wanted: Keys) -> tuple[Bytes, None]:
        return np.array([newest[int(key)] for key in wanted], np.uint8), None

    pieces = split_by_partition(schema, distinct, rows_of, partitions, chunk_bytes=chunk_bytes)
    info = BaseInfo(instance="m", version=0, partitions=partitions)
    write_base(folder, "m", info, {schema: pieces})
    return Store.open(folder)


def facts(store: Store) -> list[tuple[object, ...]]:
    return [
        (chunk.table, chunk.rows, chunk.min_key, chunk.max_key, chunk.checksum, chunk.length)
        for chunk in store.state.lineage.chunks
    ]


@pytest.mark.parametrize("partitions", [1, 3, 64])
@pytest.mark.parametrize("step", [50, 999, 100_000])
def test_the_chunks_are_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitions: int, step: int
) -> None:
    random = np.random.default_rng(SEED)
    keys, rows = draw(random, 3000, 1500)
    # Windows of a few records of each spill, chunks of 200 rows, and several parts.
    monkeypatch.setattr(spills_module, "WINDOW_BYTES", record_bytes(ITEMS) * 300)
    chunk_bytes = record_bytes(ITEMS) * 200
    monkeypatch.setattr("petps.checkpoint.bundle.CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(bulk_module, "PART_BYTES", record_bytes(ITEMS) * 400)
    store = load(tmp_path / "bulk", keys, rows, partitions, step)
    assert store.verify() == []
    expected = load_at_once(tmp_path / "once", keys, rows, partitions, chunk_bytes)
    assert facts(store) == facts(expected)
    assert store.part(1, "petps.base") == expected.part(1, "petps.base")
    names = {path.name for path in (tmp_path / "bulk/data").iterdir()}
    assert names == {chunk.file.removeprefix("data/") for chunk in store.state.lineage.chunks}
    base = Base.open(tmp_path / "bulk")
    for partition in range(partitions):
        for own, _ in base.chunks("items", [partition]):
            assert (partition_of(own, partitions) == partition).all()


def test_a_partition_of_whole_chunks_has_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petps.checkpoint.bundle.CHUNK_BYTES", record_bytes(ITEMS) * 100)
    keys = np.arange(300, dtype=np.uint64)
    store = load(tmp_path / "bulk", keys, np.zeros((300, ITEMS.width), np.uint8), 1, 300)
    assert [chunk.rows for chunk in store.state.lineage.chunks] == [100, 100, 100]


def test_a_table_without_rows(tmp_path: Path) -> None:
    empty = np.empty(0, np.uint64), np.empty((0, ITEMS.width), np.uint8)
    store = load(tmp_path / "bulk", *empty, 8, 10)
    assert (facts(store), store.verify()) == ([], [])
    assert len(store.restore()["items"]) == 0


def test_memory_does_not_grow_with_the_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = 1 << 20
    monkeypatch.setattr(spills_module, "WINDOW_BYTES", window)
    monkeypatch.setattr("petps.checkpoint.bundle.CHUNK_BYTES", window // 4)
    base = NewBase(tmp_path / "bulk", "m", [ITEMS], 1)
    random = np.random.default_rng(SEED)
    spills = []
    for _ in range(40):
        keys, rows = draw(random, window // record_bytes(ITEMS), 1 << 40)
        spills += write_spills(base, keys, rows, len(keys))
    tracemalloc.start()
    try:
        count = sum(len(rows) for rows in merge_spills(base.files, ITEMS, spills, 0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count > 39 * window / record_bytes(ITEMS)
    assert peak < 8 * window


def test_a_run_that_changed_is_refused(tmp_path: Path) -> None:
    base = NewBase(tmp_path / "bulk", "m", [ITEMS], 2)
    keys, rows = draw(np.random.default_rng(SEED), 500, 1 << 40)
    spills = write_spills(base, keys, rows, 250)
    path = tmp_path / "bulk" / spills[1].file
    content = bytearray(path.read_bytes())
    content[100 * record_bytes(ITEMS) + 12] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataLoss, match=r"\.spill does not fit its checksum: check the disk"):
        write_parts(base, spills)
    path.write_bytes(content[:1000])
    with pytest.raises(DataLoss, match="ends too early"):
        write_parts(base, spills)
    path.unlink()
    with pytest.raises(NotFound, match="does not exist"):
        write_parts(base, spills)
    base.discard()
    assert list((tmp_path / "bulk/data").iterdir()) == []
    with pytest.raises(NotFound):
        Store.open(tmp_path / "bulk")


def test_no_state_names_a_bundle_that_was_cut(tmp_path: Path) -> None:
    base = NewBase(tmp_path / "bulk", "m", [ITEMS], 2)
    keys, rows = draw(np.random.default_rng(SEED), 500, 1 << 40)
    chunks = write_parts(base, write_spills(base, keys, rows, 250))
    path = tmp_path / "bulk" / chunks[0][0].file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataLoss, match="is gone or cut: load again"):
        base.commit({"items": chunks})
    path.unlink()
    with pytest.raises(DataLoss, match="is gone or cut: load again"):
        base.commit({"items": chunks})


def test_what_a_dead_worker_left_is_removed_and_other_files_stay(tmp_path: Path) -> None:
    base = NewBase(tmp_path / "bulk", "m", [ITEMS], 2)
    keys, rows = draw(np.random.default_rng(SEED), 500, 1 << 40)
    chunks = write_parts(base, write_spills(base, keys, rows, 250))
    data = tmp_path / "bulk/data"
    (data / f"{base.prefix}half.chunks").write_bytes(b"half")
    (data / "other.chunks").write_bytes(b"of another load")
    base.commit({"items": chunks})
    left = {f"data/{path.name}" for path in data.iterdir()}
    assert left == {chunks[0][0].file, "data/other.chunks"}


def test_the_faster_of_two_loads_wins(tmp_path: Path) -> None:
    bases = [NewBase(tmp_path / "bulk", "m", [ITEMS], 2) for _ in range(2)]
    keys, rows = draw(np.random.default_rng(SEED), 500, 1 << 40)
    parts = [write_parts(base, write_spills(base, keys, rows, 250)) for base in bases]
    bases[0].commit({"items": parts[0]})
    with pytest.raises(FailedPrecondition, match="another writer made state 1 first"):
        bases[1].commit({"items": parts[1]})
    bases[1].discard()
    bases[0].discard()  # what exists stays
    store = Store.open(tmp_path / "bulk")
    assert store.verify() == []
    assert len(list((tmp_path / "bulk/data").iterdir())) == 1
    with pytest.raises(AlreadyExists, match="holds a checkpoint store already"):
        NewBase(tmp_path / "bulk", "m", [ITEMS], 2)


def test_a_trainers_store_that_appears_meanwhile_is_left_alone(tmp_path: Path) -> None:
    base = NewBase(tmp_path / "bulk", "m", [ITEMS], 2)
    keys, rows = draw(np.random.default_rng(SEED), 500, 1 << 40)
    parts = write_parts(base, write_spills(base, keys, rows, 250))
    Store.create(tmp_path / "bulk", "ctr", [Table.of("users", 2 * DIM)])
    with pytest.raises(FailedPrecondition, match="another writer made state 1 first"):
        base.commit({"items": parts})
    base.discard()
    store = Store.open(tmp_path / "bulk")
    assert (store.state.model, list(store.state.tables)) == ("ctr", ["users"])
    assert not store.state.versions()


def test_a_spill_that_cannot_be_removed_costs_no_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = NewBase(tmp_path / "bulk", "m", [ITEMS], 2)
    keys, rows = draw(np.random.default_rng(SEED), 500, 1 << 40)
    spills = write_spills(base, keys, rows, 250)
    parts = write_parts(base, spills)
    remove = LocalFiles.remove

    def refuse(files: LocalFiles, path: str) -> None:
        if path == spills[0].file:
            raise IoError("access denied")
        remove(files, path)

    monkeypatch.setattr(LocalFiles, "remove", refuse)
    base.commit({"items": parts})
    assert base.left == 1
    assert Store.open(tmp_path / "bulk").verify() == []
    assert len(list((tmp_path / "bulk/data").iterdir())) == 2


def test_ctrl_c_during_the_commit_removes_nothing_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request may be on its way, and the base appear later."""
    base = NewBase(tmp_path / "bulk", "m", [ITEMS], 2)
    keys, rows = draw(np.random.default_rng(SEED), 500, 1 << 40)
    parts = write_parts(base, write_spills(base, keys, rows, 250))
    late: list[tuple[Files, State]] = []

    def interrupt(files: Files, state: State) -> None:
        late.append((files, state))
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module, "create_state", interrupt)
    with pytest.raises(KeyboardInterrupt):
        base.commit({"items": parts})
    base.discard()
    create_state(*late[0])
    assert Store.open(tmp_path / "bulk").verify() == []


def test_a_folder_that_this_machine_does_not_see_is_named(tmp_path: Path) -> None:
    base = NewBase(tmp_path / "bulk", "m", [ITEMS], 2)
    keys, rows = draw(np.random.default_rng(SEED), 500, 1 << 40)
    (spill,) = write_spills(base, keys, rows, 500)
    base.check_is_shared(spill)
    (tmp_path / "bulk" / spill.file).unlink()
    with pytest.raises(FailedPrecondition, match="this machine does not see it"):
        base.check_is_shared(spill)


def test_a_base_of_an_older_release_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(AlreadyExists, match="holds a base already: name a new folder"):
        NewBase(tmp_path, "m", [ITEMS], 2)


def test_rows_of_a_run_keep_the_last_of_a_key(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    rows = np.arange(3, dtype=np.uint8)[:, None].repeat(ITEMS.width, axis=1)
    keys = np.array([7, 3, 7], np.uint64)
    spill = write_spill(files, "data/a.spill", ITEMS, keys, rows, 1)
    (merged,) = merge_spills(files, ITEMS, [spill], 0)
    assert merged.keys.tolist() == [3, 7]
    assert merged.columns[ROW][:, 0].tolist() == [1, 2]
