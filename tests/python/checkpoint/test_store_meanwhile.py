"""Writers, readers and purges that work on one store in parallel, and states that fail.

Does not cover: crashes (test_store_crash.py).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from petps.checkpoint import Checkpointer, Rows, Store, Table, state_files
from petps.checkpoint.files import Files
from petps.checkpoint.policy import Merged, TwoD
from petps.checkpoint.reader import READ_THREADS
from petps.checkpoint.shares import commit_shares, write_share
from petps.checkpoint.state import State
from petps.checkpoint.store import BASE, DELTA
from petps.delta.files import sync_folder
from petps.errors import FailedPrecondition, InvalidArgument, IoError, NotFound
from tests.python.checkpoint.replay import Replay, assert_same, write_versions
from tests.python.checkpoint.test_store import TABLES, steps


def _one(value: float, *keys: int) -> dict[str, Rows]:
    table = Table.of("items", 2)
    return {"items": Rows.of(table, list(keys), {"row": np.full((len(keys), 2), value, "f4")})}


def test_a_writer_that_is_many_states_behind_is_refused(tmp_path: Path) -> None:
    """The state that it would create was created by another writer, and removed, long ago."""
    store = Store.create(tmp_path, "m", [Table.of("items", 2)])
    store.write(1, _one(1, 1, 2, 3), kind=BASE)
    behind = Store.open(tmp_path)
    for version in range(2, 20):
        store.write(version, _one(version, 2), kind=DELTA)
    with pytest.raises(FailedPrecondition, match="another writer made state"):
        behind.write(30, _one(30, 1), kind=BASE)
    again = Store.open(tmp_path)
    assert again.state.versions()[-1].version == 19
    assert again.state.number == store.state.number
    assert again.verify() == []
    behind.refresh()
    behind.write(30, _one(30, 1), kind=BASE)


def test_purge_by_a_writer_that_is_behind_removes_no_named_file(tmp_path: Path) -> None:
    store = Store.create(tmp_path, "m", [Table.of("items", 2)])
    store.write(1, _one(1, 1, 2), kind=BASE)
    behind = Store.open(tmp_path)
    store.write(2, _one(2, 2), kind=DELTA)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            os.utime(path, (1, 1))
    assert behind.purge(100) == []
    assert Store.open(tmp_path).verify() == []
    assert Store.open(tmp_path).restore(2)["items"].keys.tolist() == [1, 2]


def test_a_late_refresh_does_not_undo_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path, "m", [Table.of("items", 2)])
    store.write(1, _one(1, 1, 2), kind=BASE)
    read = state_files.load

    def slowly(files: Files) -> State:
        found = read(files)
        monkeypatch.undo()
        store.write(2, _one(2, 2), kind=DELTA)  # after the load and before its result is used
        return found

    monkeypatch.setattr("petps.checkpoint.store.load", slowly)
    store.refresh()
    store.write(3, _one(3, 2), kind=DELTA)
    assert [entry.version for entry in store.state.versions()] == [1, 2, 3]


def test_a_restore_continues_however_often_chunks_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = Replay(TABLES, steps(31, 12), deletes=0.1)
    store = Store.create(tmp_path, "m", list(TABLES.values()))
    writer = Checkpointer(store, TwoD(ratio=0.0, resets=False), replay)
    write_versions(writer, replay, range(1, 4))
    reader = Store.open(tmp_path)
    read = reader.reader.read
    tries: list[int] = []

    def beside(*arguments: object) -> object:
        if len(tries) < 8:
            for _ in range(4):
                version = 4 + len(tries)
                write_versions(writer, replay, [version])
                tries.append(version)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(reader.reader, "read", beside)
    assert_same(reader.restore(3)["items"], replay.at("items", 3))
    assert len(tries) == 8, "it was read at once"


def test_a_lineage_resets_even_if_purge_dropped_its_base(tmp_path: Path) -> None:
    store = Store.create(tmp_path, "m", [Table.of("items", 2)])
    policy = TwoD()
    store.write(1, _one(1, 1, 2), kind=BASE)
    for version in range(2, 6):
        store.write(version, _one(version, 2), kind=DELTA)
        store.restore()
    store.reader.read_seconds = 1e6  # a restore is slow
    assert policy.kind(store) == BASE
    store.purge(2)
    assert policy.kind(store) == BASE
    assert policy.kind(Store.open(tmp_path)) == DELTA  # this object has read nothing yet


def test_versions_without_rows_give_no_read_rate(tmp_path: Path) -> None:
    store = Store.create(tmp_path, "m", [Table.of("items", 2)])
    store.write(1, {"items": []}, kind=BASE)
    store.write(2, {}, kind=DELTA)
    store.restore()
    assert (store.state.lineage.chunks, store.reader.read_bytes) == ((), 0)
    assert store.reader.read_seconds > 0
    assert TwoD().kind(store) == DELTA


def test_parallel_reads_count_their_time_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path, "m", [Table.of("items", 2)])
    store.write(1, {"items": [_one(1, key)["items"] for key in range(READ_THREADS)]}, kind=BASE)
    chunks = store.state.lineage.chunks
    read_into = store.files.read_into
    together = threading.Barrier(READ_THREADS)
    least = 0.05

    def slow(path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        together.wait(60)
        time.sleep(least)
        read_into(path, pieces)

    monkeypatch.setattr(store.files, "read_into", slow)
    began = time.monotonic()
    reads = list(store.reader.read_ahead([[chunk] for chunk in chunks], store.tables_of()))
    took = time.monotonic() - began
    assert len(reads) == READ_THREADS
    assert store.reader.read_bytes == sum(chunk.length for chunk in chunks)
    assert least <= store.reader.read_seconds <= took


def test_ending_a_read_ahead_early_waits_for_no_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may do it inside the start of a thread: a join would deadlock."""
    store = Store.create(tmp_path, "m", [Table.of("items", 2)])
    store.write(1, {"items": [_one(1, key)["items"] for key in range(READ_THREADS + 1)]}, kind=BASE)
    chunks = store.state.lineage.chunks
    read_into = store.files.read_into
    others_may_read = threading.Event()

    def blocked(path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        if pieces[0][0] != chunks[0].offset:
            assert others_may_read.wait(60)
        read_into(path, pieces)

    monkeypatch.setattr(store.files, "read_into", blocked)
    reads = store.reader.read_ahead([[chunk] for chunk in chunks], store.tables_of())
    next(reads)
    end = threading.Thread(target=reads.close)
    end.start()
    end.join(20)
    is_waiting = end.is_alive()
    others_may_read.set()
    assert not is_waiting


def test_a_commit_fails_if_the_other_writers_state_is_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path, "m", [Table.of("items", 2)])
    store.write(1, _one(1, 1, 2), kind=BASE)
    behind = Store.open(tmp_path)
    store.write(2, _one(2, 2), kind=DELTA)
    read = behind.files.read

    def late(path: str) -> bytes:
        monkeypatch.undo()
        for version in range(3, 12):
            store.write(version, _one(version, 2), kind=DELTA)
        assert not (tmp_path / path).exists()
        return read(path)

    monkeypatch.setattr(behind.files, "read", late)
    with pytest.raises(FailedPrecondition, match="another writer made state"):
        behind.write(30, _one(30, 1), kind=DELTA)
    assert Store.open(tmp_path).state.versions()[-1].version == 11


def test_a_state_written_in_spite_of_an_error_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path, "m", [Table.of("items", 2)])
    store.write(1, _one(1, 1, 2), kind=BASE)
    create = store.files.create

    tries: list[str] = []

    def failing(path: str, content: bytes) -> None:
        tries.append(path)
        if len(tries) == 1:
            create(path, content)
            raise IoError("the answer is lost")
        create(path, content)

    monkeypatch.setattr(store.files, "create", failing)
    store.write(2, _one(2, 2), kind=DELTA)
    assert len(tries) == 2
    assert not store.may_have_committed
    assert [entry.version for entry in Store.open(tmp_path).state.versions()] == [1, 2]


def test_a_state_is_durable_once_its_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file exists, but the folder cannot be synced: the version may be lost with the power."""
    store = Store.create(tmp_path, "m", [Table.of("items", 2)])
    store.write(1, _one(1, 1, 2), kind=BASE)
    failures = iter([True, True, False])

    def sync(folder: Path) -> None:
        if folder.name == "states" and next(failures, False):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync_folder(folder)

    monkeypatch.setattr("petps.delta.files.sync_folder", sync)
    monkeypatch.setattr("petps.checkpoint.files.sync_folder", sync)
    with pytest.raises(IoError, match="Input/output error"):
        store.write(2, _one(2, 2), kind=DELTA)
    is_open = [store.may_have_committed]
    store.write(2, _one(9, 2), kind=DELTA)
    assert [*is_open, store.may_have_committed] == [True, False]
    found = Store.open(tmp_path)
    assert [entry.version for entry in found.state.versions()] == [1, 2]
    assert found.restore(2)["items"].columns["row"].view("f4").tolist() == [[1, 1], [9, 9]]


def test_a_retried_create_finds_its_own_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of an object store retries a put whose reply was lost."""
    store = Store.create(tmp_path, "m", [Table.of("items", 2)])
    create = store.files.create

    def repeated(path: str, content: bytes) -> None:
        create(path, content)
        create(path, content)

    monkeypatch.setattr(store.files, "create", repeated)
    store.write(1, _one(1, 1, 2), kind=BASE)
    assert Store.open(tmp_path).restore()["items"].keys.tolist() == [1, 2]


def test_values_of_deleted_rows_are_ignored(tmp_path: Path) -> None:
    table = Table.of("items", 2, "adaptive4")
    values = np.ones((3, 2), np.float32)
    values[1] = np.nan
    rows = Rows.of(table, [1, 2, 3], {"row": values}, np.array([False, True, False]))
    assert rows.deleted is not None
    with pytest.raises(InvalidArgument, match="not finite"):
        Rows.of(table, [1, 2, 3], {"row": values})


def test_policies_see_all_chunks_of_a_version(tmp_path: Path) -> None:
    """A version's chunks from several ranks are split and measured like those of one writer."""
    ended, measured = [], []
    for ranks in (1, 3):
        store = Store.create(tmp_path / str(ranks), "m", [Table.of("items", 2)])
        everything = np.arange(300)
        for version in range(1, 4):
            keys = everything if version == 1 else everything[::2]
            for rank in range(ranks):
                own = [int(key) for key in keys if key // 2 % ranks == rank]
                write_share(
                    store,
                    version,
                    _one(version, *own),
                    rank=rank,
                    ranks=ranks,
                    kind=BASE if version == 1 else DELTA,
                )
            commit_shares(store, version)
        merged = Merged()
        merged.measure(store)
        measured.append(merged.duplication)
        TwoD(resets=False).arrange(store)
        ended.append(sum(c.rows for c in store.state.lineage.chunks if not c.is_open))
    assert ended == [150, 150]
    assert measured == [1.0, 1.0]


def test_a_reader_does_not_mix_two_versions_of_one_number(
    tmp_path: Path,
) -> None:
    store = Store.create(tmp_path, "m", [Table.of("items", 2)])
    store.write(1, _one(0, 1), kind=BASE)

    def chunks(value: float) -> dict[str, list[Rows]]:
        return {"items": [_one(value, key, key + 1)["items"] for key in range(0, 60, 2)]}

    old = store.write(2, chunks(1), kind=BASE)
    files = {chunk.file for chunk in store.state.lineage_of(2).chunks_of(2)}
    reader = Store.open(tmp_path)
    pieces = reader.pieces("items", 2)
    next(pieces)
    store.rollback(1)
    assert store.write(2, chunks(2), kind=BASE).created_ns != old.created_ns
    for file in files:
        (tmp_path / file).unlink(missing_ok=True)
    with pytest.raises(NotFound, match="was rolled back, and another version is 2 now"):
        list(pieces)
    assert {float(rows.columns["row"].view("f4")[0, 0]) for rows in reader.pieces("items", 2)} == {
        2.0
    }
