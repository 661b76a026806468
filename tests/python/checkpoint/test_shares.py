"""Versions that several ranks write: each is whole or absent, whichever rank crashes when.

Does not cover: ranks on several machines (a store is files; test_store_damage.py has fsspec).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.checkpoint import POLICIES, Checkpointer, Rows, Store, Table
from petps.checkpoint.chunk import Bytes, Keys, Mask
from petps.checkpoint.shares import commit_shares, list_pending_shares, write_share
from petps.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PetpsError,
)
from tests.python.checkpoint.memory import Crash, MemoryFiles
from tests.python.checkpoint.replay import Replay, assert_same
from tests.python.checkpoint.test_store_crash import TABLES, policies, steps

RANKS = 3
VERSIONS = 6


class Part:
    """A Source with one rank's rows: the keys are dealt to the ranks in turn."""

    def __init__(self, whole: Replay, rank: int) -> None:
        self._whole = whole
        self._rank = rank

    def keys(self, table: str, since: int | None) -> Keys:
        """See Source."""
        keys = self._whole.keys(table, since)
        mine: Keys = keys[keys % RANKS == self._rank]
        return mine

    def rows(self, table: str, keys: Keys) -> tuple[Mapping[str, Bytes], Mask | None]:
        """See Source."""
        return self._whole.rows(table, keys)


def together(files: Any, name: str, replay: Replay, version: int, *, again: bool = False) -> None:
    """Write a version with all ranks; each opens the store, as another process would."""
    replay.now = version
    ranks = [
        Checkpointer(Store.open(files), policies()[name], Part(replay, rank))
        for rank in range(RANKS)
    ]
    decision = ranks[0].next()
    for rank, checkpointer in enumerate(ranks):
        checkpointer.share(
            version, decision, rank, RANKS, {f"reader-{rank}": b"%d" % version}, replace_own=again
        )
    ranks[0].commit(version)
    ranks[0].arrange()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_ranks_write_the_same_rows_as_one_process(tmp_path: Path, name: str) -> None:
    replay = Replay(TABLES, steps(21, VERSIONS), deletes=0.1)
    Store.create(tmp_path, "m", list(TABLES.values()))
    for version in range(1, VERSIONS + 1):
        together(tmp_path, name, replay, version)
    store = Store.open(tmp_path)
    assert [entry.version for entry in store.state.versions()] == list(range(1, VERSIONS + 1))
    for version in range(1, VERSIONS + 1):
        assert_same(store.restore(version)["items"], replay.at("items", version))
        for rank in range(RANKS):
            assert store.part(version, f"reader-{rank}") == b"%d" % version
    assert store.verify() == []
    assert list_pending_shares(store) == {}
    first = store.state.versions()[0]
    assert first.rows == len(replay.at("items", 1))


def test_a_version_does_not_exist_before_its_commit(tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(22, VERSIONS), deletes=0.1)
    Store.create(tmp_path, "m", list(TABLES.values()))
    together(tmp_path, "consecutive", replay, 1)
    replay.now = 2
    ranks = [
        Checkpointer(Store.open(tmp_path), policies()["consecutive"], Part(replay, rank))
        for rank in range(RANKS)
    ]
    decision = ranks[0].next()
    with pytest.raises(NotFound, match="no rank has written a share of version 2"):
        ranks[0].commit(2)
    ranks[0].share(2, decision, 0, RANKS)
    ranks[2].share(2, decision, 2, RANKS)
    with pytest.raises(FailedPrecondition, match="of 3 ranks there is no share of rank 1"):
        ranks[0].commit(2)
    store = Store.open(tmp_path)
    assert [entry.version for entry in store.state.versions()] == [1]
    assert list_pending_shares(store) == {2: ([0, 2], 3)}
    with pytest.raises(AlreadyExists, match="rank 2 has written its share of version 2 already"):
        ranks[2].share(2, decision, 2, RANKS)
    ranks[1].share(2, decision, 1, RANKS)
    ranks[0].commit(2)
    assert_same(Store.open(tmp_path).restore(2)["items"], replay.at("items", 2))
    with pytest.raises(NotFound, match="no rank has written a share of version 2"):
        Checkpointer(store, policies()["consecutive"], Part(replay, 0)).commit(2)


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("name", ["consecutive", "2d", "oneshot"])
def test_a_crash_at_every_operation(name: str, torn: bool) -> None:
    """After a crash every version that exists is whole; all ranks restart and continue."""
    replay = Replay(TABLES, steps(23, 3), deletes=0.1)

    def drive(files: MemoryFiles, done: list[int]) -> None:
        for version in range(1, 4):
            together(files, name, replay, version)
            done.append(version)

    whole = MemoryFiles()
    Store.create(whole, "m", list(TABLES.values()))
    start = whole.operations
    drive(whole, [])
    for at in range(start + 1, whole.operations + 1):
        files = MemoryFiles()
        Store.create(files, "m", list(TABLES.values()))
        files.crash_at, files.torn = at, torn
        done: list[int] = []
        with contextlib.suppress(Crash):
            drive(files, done)
            raise AssertionError("it did not crash")
        files.crash_at = 0
        store = Store.open(files)
        there = [entry.version for entry in store.state.versions()]
        assert there[: len(done)] == done
        assert len(there) <= len(done) + 1
        for version in there:
            assert_same(store.restore(version)["items"], replay.at("items", version))
        for version in range(len(there) + 1, 4):
            together(files, name, replay, version, again=True)
        store.refresh()
        for version in range(1, 4):
            assert_same(store.restore(version)["items"], replay.at("items", version))
        assert store.verify() == []
        store.purge(3)
        assert not [path for path in files.held if path.startswith("shares/")]


def test_shares_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    table = Table.of("items", 2)

    def rows(*keys: int) -> dict[str, Rows]:
        return {"items": Rows.of(table, list(keys), {"row": np.ones((len(keys), 2), np.float32)})}

    def refused(match: str, error: type[PetpsError] = FailedPrecondition) -> None:
        with pytest.raises(error, match=match):
            commit_shares(store, 1)
        assert Store.open(tmp_path).state.versions() == []

    store = Store.create(tmp_path, "m", [table])
    base: dict[str, Any] = {"ranks": 2, "kind": "base"}
    with pytest.raises(InvalidArgument, match="rank 2 of 2"):
        write_share(store, 1, rows(1), rank=2, **base)
    write_share(store, 1, rows(1, 5, 9), rank=0, **base)
    write_share(store, 1, rows(2, 5, 8), rank=1, **base)
    refused("key 5 of table items is in the shares of ranks 0 and 1")
    write_share(store, 1, rows(2, 8), rank=1, ranks=3, kind="base", replace_own=True)
    refused("rank 1 wrote a base of 3 ranks, rank 0 a base of 2")
    half = Table.of("items", 2, "f16")
    thin = {"items": Rows.of(half, [2], {"row": np.ones((1, 2), np.float32)})}
    write_share(store, 1, thin, rank=1, tables={"items": half}, replace_own=True, **base)
    refused("or their columns differ")
    for rank in (0, 1):
        own = rows(rank)
        write_share(store, 1, own, rank=rank, parts={"reader": b"x"}, replace_own=True, **base)
    refused("two ranks wrote a part 'reader'")
    write_share(store, 1, rows(1), rank=1, replace_own=True, **base)
    share = tmp_path / "shares" / f"{1:020d}-{1:05d}.json"
    text = share.read_bytes()
    share.write_bytes(text[:-9] + (b"1" if text[-9:-8] == b"0" else b"0") + text[-8:])
    refused("does not fit its checksum", DataLoss)
    share.write_bytes((tmp_path / "shares" / f"{1:020d}-{0:05d}.json").read_bytes())
    refused("is the share of rank 0", DataLoss)
    write_share(store, 1, rows(1), rank=1, replace_own=True, **base)
    commit_shares(store, 1)
    # Ranks that write above different versions.
    behind = Store.open(tmp_path)
    write_share(store, 3, rows(0), rank=0, ranks=2, kind="delta")
    store.write(2, rows(4), kind="delta")
    write_share(store, 3, rows(1), rank=1, ranks=2, kind="delta")
    with pytest.raises(FailedPrecondition, match="rank 0 wrote its share above version 1"):
        commit_shares(store, 3)
    write_share(store, 3, rows(0), rank=0, ranks=2, kind="delta", replace_own=True)
    with pytest.raises(FailedPrecondition, match="rank 0 wrote its share above version 2"):
        commit_shares(behind, 3)
    commit_shares(store, 3)
    assert store.restore()["items"].keys.tolist() == [0, 1, 4]


def test_pieces_of_a_base_that_ranks_wrote(tmp_path: Path) -> None:
    """The chunks of ranks overlap, because keys are dealt to the ranks at random."""
    table = Table.of("items", 2)
    rng = np.random.default_rng(5)
    store = Store.create(tmp_path, "m", [table])
    owner = rng.integers(0, RANKS, 400)
    for rank in range(RANKS):
        keys = np.flatnonzero(owner == rank).astype(np.uint64)
        pieces = (
            Rows.of(table, part, {"row": np.full((len(part), 2), rank, np.float32)})
            for part in np.array_split(keys, 5)
        )
        write_share(store, 1, {"items": pieces}, rank=rank, ranks=RANKS, kind="base")
    commit_shares(store, 1)
    expected = store.restore()["items"]
    found = list(store.pieces("items"))
    assert expected.keys.tolist() == list(range(400))
    assert len(found) > RANKS
    assert np.concatenate([rows.keys for rows in found]).tolist() == list(range(400))
    np.testing.assert_array_equal(
        np.concatenate([rows.columns["row"] for rows in found]), expected.columns["row"]
    )


def test_a_share_from_before_a_rollback_is_refused(tmp_path: Path) -> None:
    table = Table.of("items", 2)

    def rows(key: int) -> dict[str, Rows]:
        return {"items": Rows.of(table, [key], {"row": np.ones((1, 2), np.float32)})}

    store = Store.create(tmp_path, "m", [table])
    store.write(1, rows(1), kind="base")
    store.write(2, rows(2), kind="delta")
    write_share(store, 3, rows(0), rank=0, ranks=2, kind="delta")
    store.rollback(1)
    store.write(2, rows(8), kind="delta")
    write_share(store, 3, rows(5), rank=1, ranks=2, kind="delta")
    with pytest.raises(FailedPrecondition, match="rank 0 wrote its share before the store was rol"):
        commit_shares(store, 3)
    write_share(store, 3, rows(9), rank=0, ranks=2, kind="delta", replace_own=True)
    commit_shares(store, 3)
    assert store.restore()["items"].keys.tolist() == [1, 5, 8, 9]
    assert list((tmp_path / "shares").iterdir()) == []


def test_fewer_ranks_replace_the_shares_of_more(tmp_path: Path) -> None:
    table = Table.of("items", 2)

    def rows(key: int) -> dict[str, Rows]:
        return {"items": Rows.of(table, [key], {"row": np.ones((1, 2), np.float32)})}

    store = Store.create(tmp_path, "m", [table])
    for rank in (1, 2, 3):
        write_share(store, 1, rows(rank), rank=rank, ranks=4, kind="base")
    for rank in (0, 1):
        write_share(store, 1, rows(rank), rank=rank, ranks=2, kind="base", replace_own=True)
    commit_shares(store, 1)
    assert store.restore()["items"].keys.tolist() == [0, 1]


def test_a_share_whose_files_were_purged_is_refused() -> None:
    """A purge that is killed at any removal, an hour after the shares were written."""
    replay = Replay(TABLES, steps(24, 2), deletes=0.1)

    def shared() -> tuple[MemoryFiles, Checkpointer]:
        files = MemoryFiles()
        Store.create(files, "m", list(TABLES.values()))
        together(files, "consecutive", replay, 1)
        replay.now = 2
        for rank in range(RANKS):
            writer = Checkpointer(Store.open(files), policies()["consecutive"], Part(replay, rank))
            writer.share(2, writer.next(), rank, RANKS, {f"reader-{rank}": b"x"})
        return files, writer

    refused = 0
    for count in range(1, 16):
        files, writer = shared()
        files.crash_at = files.operations + count
        with contextlib.suppress(Crash):
            Store.open(files).purge(9)
        files.crash_at = 0
        try:
            writer.commit(2)
        except PetpsError:
            refused += 1
        store = Store.open(files)
        for entry in store.state.versions():
            assert_same(store.restore(entry.version)["items"], replay.at("items", entry.version))
    assert 5 < refused < 16
