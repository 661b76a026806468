"""Every version of every policy restores bit by bit to the rows of a plain replay.

The tests split, merge, reset, purge, roll back and reopen stores. Does not cover: crashes
(test_store_crash.py), damage (test_store_damage.py), speed (bench).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from petps.checkpoint import POLICIES, Checkpointer, Column, Policy, Rows, Store, Table
from petps.checkpoint.policy import Merged, TwoD, compute_living_volume, find_every, find_stride
from petps.checkpoint.store import BASE, DELTA, DIFFERENCE
from petps.codec import Quantisation
from petps.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from tests.python.checkpoint.conftest import SEALED_CHUNKS
from tests.python.checkpoint.replay import Replay, assert_same, check_versions, write_versions

TABLES = {
    "items": Table("items", (Column("row", "f32", 4), Column("momentum", "f16", 1))),
    "users": Table.of("users", 2),
}
VERSIONS = 30


def steps(seed: int, count: int = VERSIONS) -> list[dict[str, np.ndarray]]:
    """Return skewed changes, with new keys in each, and a table that some versions don't change."""
    rng = np.random.default_rng(seed)
    changes = []
    for number in range(count):
        hot = rng.zipf(1.3, 60).clip(max=400)
        fresh = np.arange(400 + number * 5, 405 + number * 5)
        users = rng.integers(0, 90, 9) if number % 3 else np.empty(0, np.int64)
        changes.append(
            {
                "items": np.unique(np.concatenate([hot, fresh])).astype(np.uint64),
                "users": np.unique(users).astype(np.uint64),
            }
        )
    return changes


def make_policies() -> list[Policy]:
    return [
        *(kind() for kind in POLICIES.values()),
        TwoD(ratio=0.0, resets=False),
        TwoD(ratio=0.2, resets=False, bundles=False),
        TwoD(resets=False, by_range=False, by_bloom=False, by_count=False),
        Merged(stride=2, every=1000),
        Merged(stride=3, every=9),
    ]


def written(folder: Path, policy: Policy, replay: Replay) -> Store:
    """Write all versions of the replay, and arrange after each."""
    store = Store.create(folder, "m", list(replay.tables.values()))
    writer = Checkpointer(store, policy, replay, chunk_bytes=1 << 8)
    write_versions(writer, replay, range(1, len(replay.steps) + 1))
    return store


@pytest.mark.parametrize("number", range(len(make_policies())))
def test_every_version_restores_to_its_rows(tmp_path: Path, number: int) -> None:
    policy = make_policies()[number]
    replay = Replay(TABLES, steps(number), deletes=0.1)
    store = written(tmp_path / "store", policy, replay)
    check_versions(store, replay, list(range(1, VERSIONS + 1)))
    check_versions(Store.open(tmp_path / "store"), replay, list(range(1, VERSIONS + 1)))
    assert store.verify() == []


def test_policies_split_merge_and_reset(tmp_path: Path) -> None:
    """Splits, merges and resets happen, so the test above covers them."""
    replay = Replay(TABLES, steps(1), deletes=0.1)
    two_d = TwoD(ratio=0.05, resets=False)
    store = written(tmp_path / "2d", two_d, replay)
    assert two_d.filters.split > VERSIONS
    assert two_d.filters.by_bloom < two_d.filters.in_range
    assert any(chunk.end for chunk in store.state.lineage.chunks)
    newest = store.state.lineage.chunks_of(VERSIONS)
    loaded = sum(chunk.rows for chunk in newest if chunk.table == "items")
    deltas = sum(chunk.rows for chunk in store.state.versions())
    assert loaded < deltas / 2, "or nothing was gained"
    store = written(tmp_path / "merged", Merged(stride=2, every=1000), replay)
    # The base is version 1: 29 deltas are 16 + 8 + 4 + 1.
    assert sorted({c.layer for c in store.state.lineage.open_delta_chunks()}) == [1, 3, 4, 5]
    store = written(tmp_path / "every", Merged(stride=2, every=9), replay)
    assert [lineage.base_version for lineage in store.state.lineages] == [1, 11, 21]
    store = written(tmp_path / "intermittent", POLICIES["intermittent"](), replay)
    assert len(store.state.lineages) > 1
    store = written(tmp_path / "oneshot", POLICIES["oneshot"](), replay)
    assert len({chunk.first for chunk in store.state.lineage.chunks_of(VERSIONS)}) == 2
    store = written(tmp_path / "full", POLICIES["full"](), replay)
    assert len(store.state.lineages) == VERSIONS


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_quantised_rows_are_never_quantised_again(tmp_path: Path, name: str) -> None:
    """Rows of 4 and 2 bits and state of 8 bits are split and merged as stored, not requantised."""
    chosen = Quantisation("adaptive", 4, bins=20, ratio=0.5)
    tables = {
        "items": Table(
            "items",
            (Column("row", "adaptive4", 16, chosen), Column("momentum", "asymmetric8", 4)),
        ),
        "users": Table.of("users", 7, "symmetric2"),
    }
    replay = Replay(tables, steps(10, 12), deletes=0.1)
    store = written(tmp_path / "store", POLICIES[name](), replay)
    check_versions(store, replay, list(range(1, 13)))
    items = Store.open(tmp_path / "store").state.tables["items"]
    rows = store.restore(12)["items"]
    found = items.columns[0].values(rows.columns["row"])
    assert found.shape == (len(rows), 16)
    exact = Table.of("items", 16)
    replay.tables["items"] = exact
    floats = replay.at("items", 12).columns["row"].view(np.float32).reshape(-1, 16)
    assert np.abs(found - floats).max() <= np.ptp(floats, axis=1).max() / 2
    assert items.width < exact.width / 2


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_purge_keeps_the_remaining_versions_whole(tmp_path: Path, name: str) -> None:
    replay = Replay(TABLES, steps(3), deletes=0.1)
    store = written(tmp_path / "store", POLICIES[name](), replay)
    store.keep(7)
    before = store.stored_bytes()
    gone = store.purge(5)
    stay = [7, *range(VERSIONS - 4, VERSIONS + 1)]
    assert gone == [version for version in range(1, VERSIONS + 1) if version not in stay]
    check_versions(store, replay, stay)
    assert store.stored_bytes() <= before
    writer = Checkpointer(store, POLICIES[name](), replay)
    writer.write(VERSIONS + 1, {"dense": b"%d" % (VERSIONS + 1)})
    writer.arrange()
    replay.steps.append({name: np.empty(0, np.uint64) for name in TABLES})
    check_versions(store, replay, [*stay, VERSIONS + 1])
    assert store.purge(1)
    check_versions(store, replay, [7, VERSIONS + 1])


@pytest.mark.parametrize("policy", [POLICIES["intermittent"](), Merged(stride=2, every=9)])
def test_bases_come_when_they_are_due_whatever_was_purged(policy: Policy, tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(12), deletes=0.1)
    whole = written(tmp_path / "whole", policy, replay)
    expected = [lineage.base_version for lineage in whole.state.lineages]
    assert len(expected) > 2
    store = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    writer = Checkpointer(store, policy, replay, chunk_bytes=1 << 8)
    bases = []
    for version in range(1, VERSIONS + 1):
        replay.now = version
        if writer.write(version).kind == BASE:
            bases.append(version)
        writer.arrange()
        store.purge(1)
    assert bases == expected


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_writing_continues_after_a_rollback(tmp_path: Path, name: str) -> None:
    replay = Replay(TABLES, steps(4), deletes=0.1)
    policy = POLICIES[name]()
    store = written(tmp_path / "store", policy, replay)
    assert store.rollback(17) == list(range(18, VERSIONS + 1))
    check_versions(store, replay, list(range(1, 18)))
    assert store.rollback(17) == []
    # Write another history from there on.
    replay.steps[17:] = steps(5)[:10]
    writer = Checkpointer(store, policy, replay)
    write_versions(writer, replay, range(18, 28))
    check_versions(store, replay, list(range(1, 28)))


@pytest.mark.parametrize("number", range(len(make_policies())))
def test_a_rollback_leaves_the_remaining_versions_their_chunks(tmp_path: Path, number: int) -> None:
    """A version neither loses a chunk nor gets one back that ended at it or before it."""
    replay = Replay(TABLES, steps(14), deletes=0.1)
    store = written(tmp_path / "store", make_policies()[number], replay)

    def places(version: int) -> list[tuple[str, int]]:
        chunks = store.state.lineage_of(version).chunks_of(version)
        return sorted((chunk.file, chunk.offset) for chunk in chunks)

    for newest in range(VERSIONS - 1, 1, -1):
        expected = [places(version) for version in range(1, newest + 1)]
        store.rollback(newest)
        assert [places(version) for version in range(1, newest + 1)] == expected, newest
        # Exactly these chunks continue in the next version.
        assert {chunk for chunk in store.state.lineage.chunks if chunk.is_open} == set(
            store.state.lineage.chunks_of(newest)
        )


def test_rows_that_a_difference_replaced_stay_replaced_after_a_rollback(tmp_path: Path) -> None:
    users = TABLES["users"]

    def rows(values: dict[int, float]) -> dict[str, Rows]:
        filled = np.array([[value, value] for value in values.values()], np.float32)
        return {"users": Rows.of(users, list(values), {"row": filled})}

    store = Store.create(tmp_path / "store", "m", [users])
    store.write(1, rows({1: 1, 2: 1}), kind=BASE)
    store.write(2, rows({1: 2}), kind=DIFFERENCE)
    store.write(3, rows({2: 3}), kind=DIFFERENCE)  # the row of key 1 is that of the base again
    expected = store.restore(3)["users"]
    store.write(4, rows({1: 4, 2: 4}), kind=DIFFERENCE)
    store.rollback(3)
    assert_same(store.restore(3)["users"], expected)
    store.write(4, {}, kind=DELTA)
    assert_same(store.restore(4)["users"], expected)


@pytest.mark.parametrize("number", range(len(make_policies())))
def test_pieces_give_the_rows_of_restore(tmp_path: Path, number: int) -> None:
    """Pieces are in key order; each is at most a base chunk and what was written above it."""
    replay = Replay(TABLES, steps(12), deletes=0.1)
    store = written(tmp_path / "store", make_policies()[number], replay)
    for version in range(1, VERSIONS + 1):
        for table, expected in store.restore(version).items():
            pieces = list(store.pieces(table, version))
            keys = np.concatenate([rows.keys for rows in pieces])
            assert (keys[1:] > keys[:-1]).all()
            for name in expected.columns:
                column = np.concatenate([rows.columns[name] for rows in pieces])
                np.testing.assert_array_equal(column, expected.columns[name])
            np.testing.assert_array_equal(keys, expected.keys)
            base = [
                c
                for c in store.state.lineage_of(version).chunks_of(version)
                if c.layer == 0 and c.table == table
            ]
            assert len(pieces) == max(1, len(base))
    with pytest.raises(NotFound, match="has no table 'other'; it has: items, users"):
        next(store.pieces("other"))


def test_pieces_continue_while_chunks_are_merged(tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(13), deletes=0.1)
    store = written(tmp_path / "store", POLICIES["consecutive"](), replay)
    expected = store.restore()["items"]
    reader = Store.open(tmp_path / "store")
    pieces = reader.pieces("items")
    found = [next(pieces)]
    Merged(stride=2).arrange_all(store)  # removes the files of the chunks that it merges
    store.tidy()
    store.keep(1)
    store.tidy()
    for path in (tmp_path / "store" / "data").iterdir():
        if f"data/{path.name}" not in store.state.files():
            path.unlink()
    found += pieces
    assert len(found) > 2
    np.testing.assert_array_equal(np.concatenate([rows.keys for rows in found]), expected.keys)
    np.testing.assert_array_equal(
        np.concatenate([rows.columns["row"] for rows in found]), expected.columns["row"]
    )


def test_ended_chunks_are_listed_once(tmp_path: Path) -> None:
    """A lineage's file does not grow with ended chunks, and a reopened store knows all of them."""
    replay = Replay(TABLES, steps(5), deletes=0.1)
    store = Store.create(tmp_path / "s", "m", list(TABLES.values()))
    writer = Checkpointer(store, TwoD(ratio=0.0, resets=False), replay)
    listed = []  # ended chunks listed in the lineage's own file, after each version
    for version in range(1, VERSIONS + 1):
        write_versions(writer, replay, [version])
        sealed = {id(chunk) for file in store.state.lineage.sealed for chunk in file.chunks}
        ended = [chunk for chunk in store.state.lineage.chunks if not chunk.is_open]
        listed.append(sum(1 for chunk in ended if id(chunk) not in sealed))
    assert len(ended) > 10 * SEALED_CHUNKS
    assert max(listed) < SEALED_CHUNKS
    kept = list(range(1, VERSIONS + 1))
    changes: list[Callable[[], list[int]]] = [
        list,
        lambda: store.purge(12),
        lambda: store.rollback(VERSIONS - 5),
        lambda: store.purge(2),
    ]
    for change in changes:
        gone = change()
        kept = [version for version in kept if version not in gone]
        again = Store.open(tmp_path / "s")
        assert set(again.state.lineage.chunks) == set(store.state.lineage.chunks)
        assert again.state.files() == store.state.files()
        check_versions(again, replay, kept)
    store.tidy()  # removes the files that are not named any more
    there = {f"lines/{path.name}" for path in (tmp_path / "s" / "lines").iterdir()}
    named = store.state.files() | set(store.state.trash)
    assert there == {path for path in named if path.startswith("lines/")}


def test_the_second_of_two_writers_is_refused(tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(6, 3))
    store = written(tmp_path / "store", POLICIES["consecutive"](), replay)
    other = Store.open(tmp_path / "store")
    rows = Rows.of(TABLES["users"], [1], {"row": np.ones((1, 2), np.float32)})
    store.write(4, {"users": rows}, kind=DELTA)
    with pytest.raises(FailedPrecondition, match="another writer made state"):
        other.write(4, {}, kind=DELTA)
    other.refresh()
    with pytest.raises(InvalidArgument, match="version 4 is not above 4"):
        other.write(4, {}, kind=DELTA)
    other.write(5, {}, kind=DELTA)
    assert [entry.version for entry in Store.open(tmp_path / "store").state.versions()][-2:] == [
        4,
        5,
    ]


def test_a_write_fails_after_a_restore_loads_another_writers_state(tmp_path: Path) -> None:
    """Another writer commits during a write, and a restore in our process loads its state."""
    replay = Replay(TABLES, steps(6, 3))
    store = written(tmp_path / "store", POLICIES["consecutive"](), replay)
    other = Store.open(tmp_path / "store")
    rows = Rows.of(TABLES["users"], [1], {"row": np.ones((1, 2), np.float32)})

    def meanwhile() -> None:
        if len(other.state.versions()) == 3:
            other.write(4, {"users": rows}, kind=DELTA)
            store.refresh()

    with pytest.raises(FailedPrecondition, match="another writer made state"):
        store.write(5, {"users": rows}, kind=DELTA, raise_if_cancelled=meanwhile)
    found = Store.open(tmp_path / "store").state.versions()
    assert [entry.version for entry in found] == [1, 2, 3, 4]


def test_files_are_read_in_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(TABLES, steps(11, 12), deletes=0.1)
    store = written(tmp_path / "store", TwoD(ratio=0.0, resets=False), replay)
    threads: set[int] = set()
    read_into = store._files.read_into

    def seen(*arguments: object) -> None:
        threads.add(threading.get_ident())
        read_into(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("petps.checkpoint.reader.PARALLEL_BYTES", 1)
    monkeypatch.setattr(store._files, "read_into", seen)
    check_versions(store, replay, list(range(1, 13)))
    assert len(threads - {threading.get_ident()}) > 1


def test_readers_continue_while_chunks_are_split(tmp_path: Path) -> None:
    """A reader of an older state finds its files removed, and reads the newer state."""
    replay = Replay(TABLES, steps(7), deletes=0.1)
    store = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    replay.now = 1
    policy = TwoD(ratio=0.0, resets=False)
    writer = Checkpointer(store, policy, replay)
    writer.write(1)
    reader = Store.open(tmp_path / "store")
    done = threading.Event()

    def read() -> int:
        reads = 0
        while not done.is_set():
            version = reader.refresh().versions()[-1].version
            for _ in range(3):
                assert_same(reader.restore(version)["items"], replay.at("items", version))
                reads += 1
        return reads

    with ThreadPoolExecutor(1) as pool:
        reads = pool.submit(read)
        try:
            write_versions(writer, replay, range(2, VERSIONS + 1))
        finally:
            done.set()
    assert reads.result() > 0


def test_a_second_write_is_refused_and_cancel_leaves_nothing(tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(8, 3))
    store = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    replay.now = 1
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Replay):
        def rows(self, table, keys):  # type: ignore[no-untyped-def]
            inside.set()
            go_on.wait(60)
            return super().rows(table, keys)

    slow = Slow(TABLES, replay.steps)
    slow.now = 1
    writer = Checkpointer(store, POLICIES["2d"](), slow, chunk_bytes=64)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(writer.write, 1)
        assert inside.wait(60)
        with pytest.raises(FailedPrecondition, match="is being written"):
            writer.write(1)
        writer.cancel()
        go_on.set()
    with pytest.raises(FailedPrecondition, match="the checkpoint was cancelled"):
        written.result()
    assert Store.open(tmp_path / "store").state.versions() == []
    assert not list((tmp_path / "store").glob("data/*")), "nothing is left of it"
    assert writer.write(1).version == 1


def test_bad_input_is_named(tmp_path: Path) -> None:
    users = TABLES["users"]
    with pytest.raises(NotFound, match="holds no checkpoint store"):
        Store.open(tmp_path / "none")
    store = Store.create(tmp_path / "store", "m", [users])
    with pytest.raises(AlreadyExists, match="holds a checkpoint store already"):
        Store.create(tmp_path / "store", "m", [users])
    one = np.ones((1, 2), np.float32)
    with pytest.raises(FailedPrecondition, match="has no base"):
        store.write(1, {}, kind=DELTA)
    with pytest.raises(InvalidArgument, match="'users' is missing"):
        store.write(1, {}, kind=BASE)
    with pytest.raises(InvalidArgument, match="no table 'items'; it has: users"):
        store.write(1, {"items": Rows.of(users, [1], {"row": one})}, kind=BASE)
    with pytest.raises(InvalidArgument, match="version must be from 1 to"):
        store.write(0, {}, kind=BASE)
    with pytest.raises(InvalidArgument, match="a key appears twice"):
        Rows.of(users, [1, 1], {"row": np.ones((2, 2), np.float32)})
    with pytest.raises(InvalidArgument, match=r"shape \(1, 3\), expected \(n, 2\)"):
        Rows.of(users, [1], {"row": np.ones((1, 3), np.float32)})
    with pytest.raises(InvalidArgument, match="row 0 has a value that is not finite"):
        Rows.of(users, [1], {"row": one * np.nan})
    with pytest.raises(InvalidArgument, match=r"unknown dtype 'adaptive5'; known: .*adaptive4"):
        Column("row", "adaptive5", 2)
    with pytest.raises(InvalidArgument, match="does not make adaptive4"):
        Column("row", "adaptive4", 2, Quantisation("adaptive", 3))
    with pytest.raises(InvalidArgument, match="not negative"):
        Rows.of(users, [-1], {"row": one})
    rows = Rows.of(users, [1], {"row": one})
    with pytest.raises(InvalidArgument, match="the pieces' keys do not ascend"):
        store.write(1, {"users": [rows, rows]}, kind=BASE)
    assert not list((tmp_path / "store").glob("data/*"))
    store.write(1, {"users": Rows.of(users, [1], {"row": one})}, kind=BASE)
    with pytest.raises(NotFound, match="no version 9 in the store; it has only version 1"):
        store.restore(9)
    with pytest.raises(NotFound, match="no part 'dense'"):
        store.part(1, "dense")
    with pytest.raises(InvalidArgument, match="at least the newest"):
        store.purge(0)


def test_strides_and_volumes_of_the_paper() -> None:
    # d = 1: a merged delta is as large as one of its deltas: sum 1/s^i = 1/(s-1).
    assert find_stride(1.0, 1.01) == 2
    assert find_stride(1.0, 0.6) == 3
    with pytest.raises(InvalidArgument, match="no stride up to 64 keeps up"):
        find_stride(0.0, 5.0)  # no rows in common: every layer has as many rows as the first
    # s = 2, d = 0.5: 7 deltas are one of 4, one of 2 and one: 1.5^2 + 1.5 + 1.
    assert compute_living_volume(7, 2, 0.5) == pytest.approx(1.5**2 + 1.5 + 1)
    assert find_every(2, 0.5, 4.75) == 6
    assert find_every(2, 0.5, 4.76) == 9, "10 deltas are 1.5^3 + 1.5"
