"""Trainers whose commits get no answer, and whose versions appear later, at the worst moment.

The store's own rules are in tests/python/checkpoint/test_open_commits.py. Does not cover: several
ranks (tests/train/train_outages.py); S3 (tests/train/train_s3.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.checkpoint import POLICIES, Rows, Store, Table
from petps.checkpoint.files import Files
from petps.checkpoint.shares import write_share
from petps.errors import AlreadyExists, FailedPrecondition, IoError, PetpsError
from petps.train import ArrayTable, Every, Links, LoneTables, RankedOutput, TrainerOutput, behind
from petps.train import ranks as ranks_module
from petps.train.tracker import Tracker

KEYS = 8
EVERY = 10


class Late:
    """Files of which the states get no answer while it is on. appear() creates the first of them.

    is_done: they exist at once.
    """

    def __init__(self, files: Files, *, is_done: bool = False) -> None:
        self.is_on, self.is_done = False, is_done
        self.state: tuple[str, bytes] | None = None
        self._create = files.create
        files.create = self.create  # type: ignore[method-assign]

    def create(self, path: str, content: bytes) -> None:
        if not self.is_on or not path.startswith("states/"):
            self._create(path, content)
            return
        self.state = self.state or (path, content)
        if self.is_done:
            with contextlib.suppress(AlreadyExists):
                self._create(path, content)
        raise IoError("no answer")

    def appear(self) -> None:
        self.is_on = False
        state, self.state = self.state, None
        if state is not None:
            with contextlib.suppress(AlreadyExists):
                self._create(*state)


class Training:
    """A training that sets one row in each step; a version is due after every tenth."""

    def __init__(self, folder: Path, name: str = "first") -> None:
        place = folder / "store"
        if not place.exists():
            Store.create(place, "m", [Table.of("items", 2)])
        self.store = Store.open(place)
        self.late = Late(self.store.files)
        self.rows = np.zeros((KEYS, 2), np.float32)
        tracker = Tracker()
        self.table = ArrayTable(tracker, "items", self.rows)
        self.written: list[int] = []
        self.output = RankedOutput(
            LoneTables(tracker, [self.table]), Links.alone(), store=self.store,
            policy=POLICIES["consecutive"](), checkpoint=Every(steps=EVERY),
            staging=folder / name, give_up_after=600,
            on_version=lambda written: self.written.append(written.step),
        )  # fmt: skip
        self.output.restore()

    def train(self, steps: Iterable[int], offset: int = 0) -> None:
        for step in steps:
            values = np.full((1, 2), step + offset, np.float32)
            self.table.update(np.array([step % KEYS]), values)
            self.output.after(step)
            self.output.wait()

    def check(self, newest: int) -> None:
        """Assert that the store's newest version has this number and the training's rows."""
        found = Store.open(self.store.name)
        assert found.state.newest_version == newest
        assert found.verify() == []
        rows = found.restore()["items"]
        held = np.zeros((KEYS, 2), np.float32)
        held[rows.keys.astype(int)] = rows.columns["row"].view(np.float32)
        np.testing.assert_array_equal(held, self.rows)


def train_to_open_version(folder: Path) -> Training:
    """Return a training of 20 steps: version 10 exists, and the commit of 20 had no answer."""
    training = Training(folder)
    training.train(range(1, 20))
    training.late.is_on = True
    training.train([20])
    training.late.is_on = False
    return training


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "FIRST_PAUSE_SECONDS", 0.0)


def before(
    monkeypatch: pytest.MonkeyPatch, name: str, happens: Callable[[], Any], *, after: bool = False
) -> None:
    """Let something happen once, before or after a function that ranks.py calls."""
    call = getattr(ranks_module, name)
    left = [happens]

    def called(*arguments: Any, **options: Any) -> Any:
        if left and not after:
            left.pop()()
        result = call(*arguments, **options)
        if left and after:
            left.pop()()
        return result

    monkeypatch.setattr(ranks_module, name, called)


@pytest.mark.parametrize("is_known", [False, True])
def test_the_last_version_appears_while_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    training = train_to_open_version(tmp_path)

    def appear() -> None:
        training.late.appear()
        if is_known:
            training.store.refresh()

    before(monkeypatch, "commit_shares", appear)
    training.output.close()
    training.check(20)
    assert training.written == [10, 20]
    assert training.store.files.list("shares") == {}


def test_the_last_version_appears_after_a_second_try_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share of the second try is in the store, and that of the first one was committed."""
    training = train_to_open_version(tmp_path)
    training.late.is_on = True
    tries: list[int] = []
    fail = behind.Attempts.fail

    def failed(attempts: behind.Attempts) -> bool:
        tries.append(1)
        if len(tries) == 2:
            training.late.appear()
        return fail(attempts)

    monkeypatch.setattr(behind.Attempts, "fail", failed)
    training.output.close()
    assert len(tries) == 2
    training.check(20)
    assert training.store.files.list("shares") == {}


def test_a_version_of_a_killed_training_appears_while_the_next_one_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = train_to_open_version(tmp_path)
    killed.output.__exit__(RuntimeError, RuntimeError("killed"), None)
    load = ArrayTable.load_pieces

    def late(self: ArrayTable, pieces: Any) -> None:
        load(self, pieces)
        killed.late.appear()

    monkeypatch.setattr(ArrayTable, "load_pieces", late)
    with pytest.raises(FailedPrecondition, match="version 10 was the newest when"):
        Training(tmp_path, "second")
    training = Training(tmp_path, "third")
    np.testing.assert_array_equal(training.rows, killed.rows)
    training.train(range(21, 31))
    training.output.close()
    training.check(30)


def test_a_try_that_fails_leaves_the_files_of_the_open_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share of the second try cannot be written; then the first one's state appears."""
    training = train_to_open_version(tmp_path)
    write = training.store.files.write
    refused: list[str] = []

    def refuse(path: str, pieces: Any) -> None:
        if path.startswith("data/") and not refused:
            refused.append(path)
            raise IoError("no answer")
        write(path, pieces)

    monkeypatch.setattr(training.store.files, "write", refuse)
    before(monkeypatch, "discard_share", training.late.appear, after=True)
    training.output.close()
    assert refused
    training.check(20)


@pytest.mark.parametrize("appears_in", ["write_share", "commit_shares"])
def test_a_version_appears_while_the_next_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appears_in: str
) -> None:
    training = train_to_open_version(tmp_path)
    write = training.store.files.write

    def appear_at(path: str, pieces: Any) -> None:
        if path.startswith("data/"):
            training.late.appear()
        write(path, pieces)

    if appears_in == "write_share":
        monkeypatch.setattr(training.store.files, "write", appear_at)
    else:
        before(monkeypatch, "commit_shares", training.late.appear)
    training.train(range(21, 41))
    training.output.close()
    training.check(40)
    assert training.written[0] == 10
    assert training.written[-1] == 40


def test_a_first_version_that_appears_is_continued(tmp_path: Path) -> None:
    """It is a base. What changed since is tracked, although the trainer took it for failed."""
    training = Training(tmp_path)
    training.late.is_on = True
    training.train(range(1, EVERY + 1))
    training.late.appear()
    training.store.refresh()
    training.train(range(EVERY + 1, 2 * EVERY + 1))
    training.output.close()
    training.check(2 * EVERY)
    kinds = [entry.kind for entry in Store.open(training.store.name).state.versions()]
    assert kinds[0] == "base"
    assert set(kinds[1:]) == {"delta"}


def test_the_first_version_of_a_killed_training_does_not_appear_in_the_next(
    tmp_path: Path,
) -> None:
    killed = Training(tmp_path)
    killed.late.is_on = True
    killed.train(range(1, EVERY + 1), offset=100)
    killed.output.__exit__(RuntimeError, RuntimeError("killed"), None)
    training = Training(tmp_path, "second")
    killed.late.appear()
    training.train(range(1, 2 * EVERY + 1))
    training.output.close()
    training.check(2 * EVERY)


def test_a_share_of_a_process_that_was_cut_off_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces the share of the process that has its rank now, just before the commit."""
    training = Training(tmp_path)
    training.train(range(1, EVERY + 1))

    def replace_share() -> None:
        table = Table.of("items", 2)
        rows = Rows.of(table, [3], {"row": np.full((1, 2), 666, np.float32)})
        write_share(
            Store.open(training.store.name), 2 * EVERY, {"items": rows}, rank=0, ranks=1,
            kind="delta", replace_own=True,
        )  # fmt: skip

    before(monkeypatch, "commit_shares", replace_share)
    training.train(range(EVERY + 1, 2 * EVERY + 1))
    training.output.close()
    training.check(2 * EVERY)


@pytest.mark.parametrize("is_done", [False, True])
def test_a_plain_loop_restores_while_a_commit_is_open(tmp_path: Path, is_done: bool) -> None:
    store = Store.create(tmp_path / "store", "m", [Table.of("items", 2)])
    late = Late(store.files, is_done=is_done)
    tracker, rows = Tracker(), np.zeros((KEYS, 2), np.float32)
    table = ArrayTable(tracker, "items", rows)
    output = TrainerOutput(tracker, [table], store=store, policy=POLICIES["consecutive"]())

    def update(key: int, value: float) -> None:
        table.update(np.array([key]), np.full((1, 2), value, np.float32))

    late.is_on = True
    update(0, 1)
    with pytest.raises(IoError):
        output.checkpoint(1)
    late.appear()
    store.refresh()
    for version in (1, 2):
        update(version, version)
        with contextlib.suppress(PetpsError):
            output.checkpoint(version)
    assert store.state.newest_version == 2, "a delta above the base that appeared"
    late.is_on = True
    update(1, 666)  # a step that is to be undone
    with pytest.raises(IoError):
        output.checkpoint(3)
    late.is_on = False
    if is_done:
        with pytest.raises(FailedPrecondition, match="version 2 was the newest when"):
            output.restore(2)
        assert store.rollback(2) == [3]
    output.restore(2)
    late.appear()
    assert rows[1, 0] == 1
    update(5, 5)
    output.checkpoint(4)
    found = Store.open(tmp_path / "store")
    held = found.restore()["items"].columns["row"].view(np.float32)
    np.testing.assert_array_equal(held, rows)
    assert found.verify() == []


def test_a_second_training_is_refused_and_stays_refused(tmp_path: Path) -> None:
    """A delta of one training above a version of another would have rows of both."""
    Store.create(tmp_path / "store", "m", [Table.of("items", 2)])
    outputs, tables = [], []
    for _ in range(2):
        tracker, rows = Tracker(), np.zeros((KEYS, 2), np.float32)
        tables.append(ArrayTable(tracker, "items", rows))
        outputs.append(
            TrainerOutput(
                tracker, tables[-1:], store=Store.open(tmp_path / "store"),
                policy=POLICIES["consecutive"](),
            )
        )  # fmt: skip
    first, second = outputs
    tables[0].update(np.array([0]), np.full((1, 2), 1, np.float32))
    first.checkpoint(1)
    second._store.refresh()  # type: ignore[union-attr]
    second.restore(1)
    first._store.refresh()  # type: ignore[union-attr]
    tables[0].update(np.array([1]), np.full((1, 2), 2, np.float32))
    first.checkpoint(2)
    tables[1].update(np.array([2]), np.full((1, 2), 666, np.float32))
    for _ in range(3):
        with pytest.raises(FailedPrecondition, match=r"another writer|not this training's"):
            second.checkpoint(3)
    found = Store.open(tmp_path / "store")
    assert [entry.version for entry in found.state.versions()] == [1, 2]
    second.restore(2)
    second.checkpoint(3)
    with pytest.raises(FailedPrecondition, match="another writer"):
        first.checkpoint(4)


def test_a_second_training_with_ranks_is_refused(tmp_path: Path) -> None:
    first, second = Training(tmp_path), Training(tmp_path, "second")
    first.train(range(1, 2 * EVERY + 1))
    with pytest.raises(PetpsError, match="not this training's"):
        second.train(range(2 * EVERY + 1, 4 * EVERY))
    with contextlib.suppress(PetpsError):
        second.output.close()
    first.output.close()
    first.check(2 * EVERY)
