"""A version that another process than the trainer writes again as a base (Store.reset).

The stores are compared row by row with a plain replay, also while the trainer writes, rolls back
and purges. Does not cover: the process (test_tend_process.py).
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.checkpoint import POLICIES, Base, Checkpointer, Quantising, Rows, Store, Table, bundle
from petps.checkpoint import commit as commit_module
from petps.checkpoint.commit import CHANGE_TRIES
from petps.checkpoint.policy import LeftToOthers, Merged, Policy, TwoD
from petps.checkpoint.shares import commit_shares, write_share
from petps.checkpoint.store import BASE, DELTA, DIFFERENCE
from petps.errors import FailedPrecondition, IoError, NotFound
from tests.python.checkpoint.replay import Replay, assert_same, check_versions, write_versions
from tests.python.checkpoint.test_store import TABLES, steps
from tests.seed import SEED


def list_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.chunks")}


def kinds_of(store: Store) -> list[list[tuple[int, str]]]:
    return [[(e.version, e.kind) for e in line.versions] for line in store.state.lineages]


def one(value: float, *keys: int) -> dict[str, Rows]:
    table = Table.of("items", 2)
    return {"items": Rows.of(table, list(keys), {"row": np.full((len(keys), 2), value, "f4")})}


class Disturbed(Store):
    """A store in which something happens while a bundle is written."""

    happens: Callable[[], Any] | None = None
    written: frozenset[str] = frozenset()
    """The files of the last bundle."""

    def _write_bundle(self, new_chunks: Any) -> Any:
        chunks = super()._write_bundle(new_chunks)
        self.written = frozenset(chunk.file for chunk in chunks)
        happens, self.happens = self.happens, None
        if happens is not None:
            happens()
        return chunks


POLICIES_OF_A_TRAINER: dict[str, Callable[[], Policy]] = {
    "deltas": POLICIES["consecutive"],
    "differences": POLICIES["oneshot"],
    "split": lambda: TwoD(ratio=0.0, resets=False),
    "merged": lambda: Merged(stride=2, every=1000),
}


@pytest.mark.parametrize("name", POLICIES_OF_A_TRAINER)
def test_a_reset_changes_no_version(tmp_path: Path, name: str) -> None:
    """Two versions are written while the base is, and others after it."""
    replay = Replay(TABLES, steps(SEED, 14), deletes=0.1)
    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    writer = Checkpointer(trainer, POLICIES_OF_A_TRAINER[name](), replay, chunk_bytes=1 << 8)
    write_versions(writer, replay, range(1, 7))
    others = Disturbed.open(tmp_path / "store")
    assert isinstance(others, Disturbed)
    others.happens = lambda: write_versions(writer, replay, [7, 8])
    created = others.state.version(6).created_ns
    entry = others.reset()
    assert (entry.version, entry.kind, entry.created_ns) == (6, BASE, created)
    assert entry.rows == sum(len(replay.at(table, 6)) for table in TABLES)
    check_versions(Store.open(tmp_path / "store"), replay, list(range(1, 9)))
    write_versions(writer, replay, range(9, 13))
    store = Store.open(tmp_path / "store")
    check_versions(store, replay, list(range(1, 13)))
    above = DIFFERENCE if name == "differences" else DELTA
    assert kinds_of(store) == [
        [(1, BASE), *((version, above) for version in range(2, 6))],
        [(6, BASE), *((version, above) for version in range(7, 13))],
    ]
    assert [record[0] for record in store.state.lineage.history] == list(range(6, 13))
    assert store.verify() == []

    for version in range(1, 13):  # a training goes back to any version and continues
        copied = tmp_path / f"copy-{version}"
        shutil.copytree(tmp_path / "store", copied)
        store = Store.open(copied)
        store.rollback(version)
        write_versions(Checkpointer(store, TwoD(ratio=0.0, resets=False), replay), replay,
                       [version + 1, version + 2])  # fmt: skip
        check_versions(Store.open(copied), replay, list(range(1, version + 3)))

    store = Store.open(tmp_path / "store")
    store.purge(6)  # from 7 on: the base stays, and the older lineage goes
    assert [line.base_version for line in store.state.lineages] == [6]
    check_versions(Store.open(tmp_path / "store"), replay, list(range(7, 13)))
    before = list_files(tmp_path / "store")
    store.keep(9)
    store.keep(9, False)
    assert list_files(tmp_path / "store") < before  # what only the older lineage had


def test_quantised_rows_stay_as_they_are_stored(tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(SEED, 8))
    store = Store.create(tmp_path, "m", list(TABLES.values()), Quantising(1))
    writer = Checkpointer(store, POLICIES["consecutive"](), replay)
    write_versions(writer, replay, range(1, 7))
    before = {version: store.restore(version) for version in range(1, 7)}
    assert store.tables_of(6) != store.state.tables
    store.reset()
    assert store.tables_of(6) == store.tables_of(5)
    for version, tables in before.items():
        for name, rows in store.restore(version).items():
            assert_same(rows, tables[name])
    write_versions(writer, replay, [7, 8])
    assert kinds_of(store)[1] == [(6, BASE), (7, DELTA), (8, DELTA)]


def test_a_base_has_chunks_of_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New keys come above those of the old base, so one piece of a restore has them all."""
    replay = Replay(TABLES, steps(SEED, 6))
    store = Store.create(tmp_path, "m", list(TABLES.values()))
    write_versions(Checkpointer(store, POLICIES["consecutive"](), replay), replay, range(1, 7))
    monkeypatch.setattr(bundle, "CHUNK_BYTES", 300)
    store.reset()
    chunks = store.state.lineage.chunks
    assert len(chunks) > 2 * len(TABLES)
    for chunk in chunks:
        assert chunk.rows * (8 + TABLES[chunk.table].width) <= 300
    check_versions(Store.open(tmp_path), replay, list(range(1, 7)))


def test_a_store_without_rows_can_be_reset(tmp_path: Path) -> None:
    store = Store.create(tmp_path, "m", [Table.of("items", 2)])
    store.write(1, {"items": []}, kind=BASE)
    store.write(2, {}, kind=DELTA)
    assert store.reset().rows == 0
    assert kinds_of(Store.open(tmp_path)) == [[(1, BASE)], [(2, BASE)]]


@pytest.mark.parametrize("kind", [DELTA, DIFFERENCE])
def test_a_version_is_added_above_a_base_written_meanwhile(tmp_path: Path, kind: str) -> None:
    trainer = Store.create(tmp_path, "m", [Table.of("items", 2)])
    trainer.write(1, one(1, 1, 2, 3), kind=BASE)
    trainer.write(2, one(2, 1), kind=kind)
    before = trainer.state
    lineage = trainer.write_data(3, one(3, 1, 2), kind=kind)
    Store.open(tmp_path).reset()
    trainer.add(lineage, before)
    store = Store.open(tmp_path)
    assert kinds_of(store) == [[(1, BASE)], [(2, BASE), (3, kind)]]
    assert store.restore(3)["items"].columns["row"].view("f4")[:, 0].tolist() == [3, 3, 1]


def test_shares_are_committed_above_a_base_written_meanwhile(tmp_path: Path) -> None:
    trainer = Store.create(tmp_path, "m", [Table.of("items", 2)])
    trainer.write(1, one(1, 1, 2, 3), kind=BASE)
    trainer.write(2, one(2, 1), kind=DELTA)
    write_share(trainer, 3, one(3, 1), rank=0, ranks=2, kind=DELTA)
    Store.open(tmp_path).reset()
    write_share(Store.open(tmp_path), 3, one(3, 2), rank=1, ranks=2, kind=DELTA)
    commit_shares(trainer, 3)
    store = Store.open(tmp_path)
    assert kinds_of(store) == [[(1, BASE)], [(2, BASE), (3, DELTA)]]
    assert store.restore(3)["items"].columns["row"].view("f4")[:, 0].tolist() == [3, 3, 1]


def test_a_base_is_not_written_again(tmp_path: Path) -> None:
    store = Store.create(tmp_path, "m", [Table.of("items", 2)])
    store.write(1, one(1, 1), kind=BASE)
    with pytest.raises(FailedPrecondition, match=r"version 1 of .* is a base already"):
        store.reset()


def roll_back(store: Store) -> None:
    store.rollback(1)


def roll_back_and_write(store: Store) -> None:
    store.rollback(1)
    store.write(2, one(9, 9), kind=DELTA)


def write_base(store: Store) -> None:
    store.write(3, one(9, 9), kind=BASE)


def reset_too(store: Store) -> None:
    store.reset()


@pytest.mark.parametrize("happens", [roll_back, roll_back_and_write, write_base, reset_too])
def test_a_version_that_is_gone_meanwhile_becomes_no_base(
    tmp_path: Path, happens: Callable[[Store], None]
) -> None:
    trainer = Store.create(tmp_path, "m", [Table.of("items", 2)])
    trainer.write(1, one(1, 1, 2), kind=BASE)
    trainer.write(2, one(2, 1), kind=DELTA)
    others = Disturbed.open(tmp_path)
    assert isinstance(others, Disturbed)
    others.happens = lambda: happens(trainer)
    with pytest.raises(NotFound, match="version 2"):
        others.reset()
    store = Store.open(tmp_path)
    assert kinds_of(store) == kinds_of(trainer)
    assert store.verify() == []
    assert not others.written & list_files(tmp_path)


def test_a_base_whose_commit_fails_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path, "m", [Table.of("items", 2)])
    store.write(1, one(1, 1, 2), kind=BASE)
    store.write(2, one(2, 1), kind=DELTA)

    def failing(path: str, content: bytes) -> None:
        raise IoError("the disk is gone")

    monkeypatch.setattr(store.files, "create", failing)
    with pytest.raises(IoError, match="the disk is gone"):
        store.reset()
    monkeypatch.undo()
    assert kinds_of(Store.open(tmp_path)) == kinds_of(store) == [[(1, BASE), (2, DELTA)]]
    store.reset()
    assert kinds_of(Store.open(tmp_path)) == [[(1, BASE)], [(2, BASE)]]


@pytest.mark.parametrize("number", range(12))
def test_any_order_of_changes_leaves_every_version(tmp_path: Path, number: int) -> None:
    """A trainer and the process beside it write, reset, arrange, roll back and purge."""
    choose = random.Random(SEED + number)
    replay = Replay(TABLES, steps(SEED + number, 60), deletes=0.1)
    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    kinds: list[Policy] = [TwoD(ratio=0.0, resets=False), Merged(stride=2, every=1000)]
    arranging = choose.choice(kinds)
    writer = Checkpointer(
        trainer, POLICIES[choose.choice(["consecutive", "oneshot"])](), replay, chunk_bytes=1 << 8
    )
    others = Disturbed.open(tmp_path / "store")
    assert isinstance(others, Disturbed)
    expected: list[int] = []
    resets = 0

    def write() -> None:
        trainer.refresh()
        version = trainer.state.newest_version + 1 if trainer.state.lineages else 1
        write_versions(writer, replay, [version])
        expected.append(version)

    def reset() -> None:
        nonlocal resets
        others.refresh()
        others.happens = choose.choice([None, write, arrange, keep, roll_back])
        with contextlib.suppress(FailedPrecondition, NotFound):  # a base, or gone by now
            others.reset()
            resets += 1
        others.happens = None

    def arrange() -> None:
        trainer.refresh()
        if arranging.name == "2d":
            arranging.arrange(trainer)
        else:
            arranging.arrange_all(trainer)

    def keep() -> None:
        trainer.keep(choose.choice(expected), choose.random() < 0.3)

    def roll_back() -> None:
        version = choose.choice(expected[-4:])
        trainer.refresh()
        trainer.rollback(version)
        del expected[expected.index(version) + 1 :]

    def purge() -> None:
        trainer.refresh()
        kept = set(choose.sample(expected, max(1, len(expected) // 2)))
        dropped = trainer.drop_all_but(kept)
        expected[:] = [version for version in expected if version not in dropped]

    for _ in range(2):
        write()
    changes = 0
    while changes < 40 or resets < 2:  # resets of a version that is a base already do not count
        change = choose.choices(
            [write, reset, arrange, keep, roll_back, purge], [10, 6, 4, 1, 2, 1]
        )[0]
        change()
        check_versions(Store.open(tmp_path / "store"), replay, expected)
        changes += 1
        assert changes < 400
    assert Store.open(tmp_path / "store").verify() == []


def test_a_trainer_leaves_bases_to_another_process(tmp_path: Path) -> None:
    """It writes one itself when that process has not for PATIENCE versions."""
    replay = Replay(TABLES, steps(SEED, 40))
    store = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    policy = LeftToOthers(Merged(stride=2, every=4))
    writer = Checkpointer(store, policy, replay)
    others = Store.open(tmp_path / "store")
    tending = Merged(stride=2, every=4)

    def write(versions: range) -> list[int]:
        """Return the bases."""
        write_versions(writer, replay, versions)
        entries = [store.state.version(version) for version in versions]
        return [entry.version for entry in entries if entry.kind == BASE]

    assert write(range(1, 6)) == [1]
    assert tending.is_reset_due(store)
    assert write(range(6, 6 + policy.PATIENCE)) == []
    others.refresh()
    others.reset()  # at the last moment
    newest = store.refresh().newest_version
    assert not tending.is_reset_due(store)
    due = newest + 5  # above four deltas
    assert write(range(newest + 1, due + policy.PATIENCE)) == []
    assert write(range(due + policy.PATIENCE, due + policy.PATIENCE + 2)) == [due + policy.PATIENCE]
    check_versions(store, replay, list(range(1, due + policy.PATIENCE + 2)))


@pytest.mark.parametrize("name", ["full", "oneshot", "intermittent", "consecutive"])
def test_other_policies_write_their_bases_themselves(tmp_path: Path, name: str) -> None:
    """A new base would not shorten the differences of a trainer that does not know of it."""
    replay = Replay(TABLES, steps(SEED, 8))
    stores = [
        Store.create(tmp_path / place, "m", list(TABLES.values())) for place in ("own", "left")
    ]
    for store, policy in zip(
        stores, [POLICIES[name](), LeftToOthers(POLICIES[name]())], strict=True
    ):
        write_versions(Checkpointer(store, policy, replay), replay, range(1, 9))
        assert not POLICIES[name]().is_reset_due(store)
    assert kinds_of(stores[0]) == kinds_of(stores[1])


@pytest.mark.parametrize("count", [1, CHANGE_TRIES])
def test_a_base_stays_if_another_state_follows_its_own_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The trainer commits above the state with the base before its writer has seen that it won.

    count: of the tries whose answer this is; the first ones are really refused.
    """
    trainer = Store.create(tmp_path, "m", [Table.of("items", 2)])
    trainer.write(1, one(1, 1, 2), kind=BASE)
    trainer.write(2, one(2, 1), kind=DELTA)
    others = Store.open(tmp_path)
    monkeypatch.setattr(commit_module, "PAUSE_SECONDS", 0.0)
    create, tries = others.files.create, []

    def followed(path: str, content: bytes) -> None:
        tries.append(path)
        if len(tries) < count:
            trainer.keep(1, len(tries) % 2 == 1)  # another state was faster
        create(path, content)
        trainer.refresh()
        trainer.write(3, one(3, 2), kind=DELTA)

    monkeypatch.setattr(others.files, "create", followed)
    assert others.reset().version == 2
    assert len(tries) == count
    store = Store.open(tmp_path)
    assert kinds_of(store) == [[(1, BASE)], [(2, BASE), (3, DELTA)]]
    assert store.verify() == []


def test_bases_written_again_and_again_have_whole_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "CHUNK_BYTES", 600)
    replay = Replay(TABLES, steps(SEED, 20), deletes=0.05)
    store = Store.create(tmp_path, "m", list(TABLES.values()))
    writer = Checkpointer(store, POLICIES["consecutive"](), replay, chunk_bytes=600)
    for version in range(1, 21):
        write_versions(writer, replay, [version])
        if version > 1:
            store.reset()
    check_versions(Store.open(tmp_path), replay, list(range(1, 21)))
    for name, table in TABLES.items():
        rows = [chunk.rows for chunk in store.state.lineage.chunks if chunk.table == name]
        step = 600 // (8 + table.width)
        assert len(rows) == -(-sum(rows) // step)


def test_a_commit_without_an_answer_is_recognised_after_a_reset(tmp_path: Path) -> None:
    """The ranks write the same version again. It exists, with other chunks."""
    trainer = Store.create(tmp_path, "m", [Table.of("items", 2)])
    trainer.write(1, one(1, 1, 2), kind=BASE)

    def share() -> None:
        write_share(
            trainer, 2, one(2, 1), rank=0, ranks=1, kind=DELTA, parts={"reader": b"x"},
            replace_own=True,
        )  # fmt: skip

    share()
    files = {name: trainer.files.read(f"shares/{name}") for name in trainer.files.list("shares")}
    lines = {
        f"lines/{name}": trainer.files.read(f"lines/{name}") for name in trainer.files.list("lines")
    }
    commit_shares(Store.open(tmp_path), 2)
    for name, body in files.items():  # as if the commit's answer had been lost
        trainer.files.create(f"shares/{name}", body)
    for path, body in lines.items():
        if not (tmp_path / path).exists():
            trainer.files.write(path, [body])
    Store.open(tmp_path).reset()
    trainer.refresh()
    share()
    assert commit_shares(trainer, 2).version == 2
    assert kinds_of(Store.open(tmp_path)) == [[(1, BASE)], [(2, BASE)]]
    assert trainer.files.list("shares") == {}


def test_an_open_base_reads_a_version_without_changes_after_a_reset(tmp_path: Path) -> None:
    trainer = Store.create(tmp_path, "m", [Table.of("items", 2)])
    trainer.write(1, one(1, 1, 2), kind=BASE)
    trainer.write(2, {}, kind=DELTA)
    reader = Store.open(tmp_path)
    opened = Base(reader, 2)
    trainer.reset()
    trainer.purge(1)
    trainer.keep(2)  # the next states remove the files
    trainer.keep(2, False)
    assert [keys.tolist() for keys, _ in opened.chunks("items")] == [[1, 2]]


def test_2d_asks_for_a_base_by_bytes(tmp_path: Path) -> None:
    """Waits of the trainer are in its times, but must not make each version a base."""
    replay = Replay(TABLES, steps(SEED, 30))
    store = Store.create(tmp_path, "m", list(TABLES.values()))
    writer = Checkpointer(store, LeftToOthers(TwoD(ratio=0.0)), replay)
    policy, resets = TwoD(ratio=0.0), []
    for version in range(1, 31):
        write_versions(writer, replay, [version])
        store.read(list(store.state.lineage.chunks))  # slow, as far as the policy knows
        store.reader.read_seconds = 1e6
        if policy.is_reset_due(store):
            above = sum(chunk.length for chunk in store.state.lineage.open_delta_chunks())
            assert above > store.state.lineage.base_bytes
            store.reset()
            resets.append(version)
            assert not policy.is_reset_due(store)
    assert 1 < len(resets) < 15
    check_versions(Store.open(tmp_path), replay, list(range(1, 31)))
