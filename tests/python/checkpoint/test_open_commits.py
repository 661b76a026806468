"""A commit without an answer, beside another process that changes the store: all interleavings.

The store stops answering at each operation of a trainer's write: undone, done but unanswered, or
done later. Another process changes the store before each operation, or after the error. Then the
store answers again and the trainer continues. Does not cover: crashes (test_store_crash.py); S3
itself (test_object_store.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pytest

from petps.checkpoint import POLICIES, Checkpointer, Rows, Store, Table
from petps.checkpoint import commit as commit_module
from petps.checkpoint.store import BASE
from petps.errors import AlreadyExists, FailedPrecondition, InvalidArgument, IoError
from tests.python.checkpoint.memory import MemoryFiles
from tests.python.checkpoint.replay import Replay, check_versions
from tests.python.checkpoint.test_store_crash import TABLES, steps

REPLAY = Replay(TABLES, steps(7, 6), deletes=0.1)


class Recent(MemoryFiles):
    """Files that were all written a moment ago, so that purge does not take them for leftovers."""

    def list(self, folder: str) -> dict[str, float]:
        """See Files."""
        return dict.fromkeys(super().list(folder), 0.0)


class Silent(Recent):
    """Files that stop answering at one operation. It is undone, done, or done by appear().

    beside: called before an operation, in another process.
    """

    def __init__(self, held: dict[str, bytes]) -> None:
        super().__init__(held)
        self.silent_at, self.beside_at = 0, 0
        self.mode = "undone"
        self.is_silent = False
        self.beside: Callable[[], None] = lambda: None
        self.late: tuple[str, bytes] | None = None

    def begin(self, mode: str, silent_at: int, beside_at: int, beside: Callable[[], None]) -> None:
        """Count operations from here on."""
        self.operations = 0
        self.mode, self.silent_at, self.beside_at, self.beside = mode, silent_at, beside_at, beside

    def appear(self) -> None:
        """Do what was asked for late, and answer again."""
        self.is_silent, self.silent_at = False, 0
        if self.late is not None and self.late[0] not in self.held:
            self.held[self.late[0]] = self.late[1]

    def _step(self) -> bool:
        return True  # _ask() counts

    def _ask(self, done: Callable[[], None] = lambda: None, late: object = None) -> None:
        self.operations += 1
        if self.operations == self.beside_at:
            self.beside()
        if self.operations == self.silent_at:
            self.is_silent = True
            if self.mode == "done":
                done()
            elif self.mode == "late" and isinstance(late, tuple):
                self.late = late
        if self.is_silent:
            raise IoError("memory: no answer")

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""
        body = b"".join(bytes(piece) for piece in pieces)
        self._ask(lambda: super(Silent, self).write(path, [body]))
        super().write(path, [body])

    def create(self, path: str, content: bytes) -> None:
        """See Files."""

        def done() -> None:
            if path not in self.held:
                self.held[path] = content

        self._ask(done, (path, content))
        super().create(path, content)

    def read(self, path: str) -> bytes:
        """See Files."""
        self._ask()
        return super().read(path)

    def list(self, folder: str) -> dict[str, float]:
        """See Files."""
        self._ask()
        return super().list(folder)

    def remove(self, path: str) -> None:
        """See Files."""
        self._ask(lambda: super(Silent, self).remove(path))
        super().remove(path)


def keep(other: Store) -> None:
    other.keep(1)


def keep_often(other: Store) -> None:
    for number in range(2 * commit_module.STATES_KEPT + 1):
        other.keep(1, number % 2 == 0)


def reset(other: Store) -> None:
    if other.state.versions()[-1].kind != BASE:
        other.reset()
    other.keep(1)


def purge(other: Store) -> None:
    other.purge(1)


def write(other: Store) -> None:
    """Write version 3, as a trainer that takes itself for the only one."""
    if other.state.newest_version == 2:
        now, REPLAY.now = REPLAY.now, 3
        Checkpointer(other, POLICIES["consecutive"](), REPLAY).write(3, {"dense": b"3"})
        REPLAY.now = now
    other.keep(1)


def keep_newest(other: Store) -> None:
    other.keep(1)
    other.keep(other.state.newest_version)


OTHERS: list[Callable[[Store], None]] = [keep, keep_often, reset, purge, write, keep_newest]


Continued = tuple[int, bool]  # the newest version, and whether a write was refused before it


def again(store: Store, writer: Checkpointer) -> Continued:
    """Write the same version again."""
    return _write(store, writer, 3)


def next_one(store: Store, writer: Checkpointer) -> Continued:
    """Write the next version, without a look at the store."""
    return _write(store, writer, 4)


def informed(store: Store, writer: Checkpointer) -> Continued:
    """Write the next version, as a trainer does that first reads the store."""
    store.refresh()
    return _write(store, writer, 4)


def busy(store: Store, writer: Checkpointer) -> Continued:
    """Write the next version while the other process changes the store once more."""
    store.refresh()
    assert isinstance(store.files, Silent)
    other = Store.open(Recent(store.files.held))
    store.files.begin("undone", 0, 3, lambda: other.keep(other.state.newest_version))
    REPLAY.now = 4
    writer.write(4, {"dense": b"4"})
    return 4, False


def _write(store: Store, writer: Checkpointer, version: int) -> Continued:
    REPLAY.now = version
    try:
        writer.write(version, {"dense": b"%d" % version})
    except (FailedPrecondition, InvalidArgument):
        # Another process built on version 3 or dropped what was below. It exists, so continue.
        assert 3 in [entry.version for entry in store.refresh().versions()]
        if version == 4:
            writer.write(version, {"dense": b"%d" % version})
        return version, True
    return version, False


@pytest.fixture(scope="module")
def begun() -> dict[str, bytes]:
    """Return the files of a store with two versions."""
    files = Recent()
    store = Store.create(files, "m", list(TABLES.values()))
    writer = Checkpointer(store, POLICIES["consecutive"](), REPLAY)
    for version in (1, 2):
        REPLAY.now = version
        writer.write(version, {"dense": b"%d" % version})
    return files.held


def run(
    begun: dict[str, bytes],
    mode: str,
    silent_at: int,
    beside_at: int,
    change: Callable[[Store], None],
    go_on: Callable[[Store, Checkpointer], Continued],
) -> bool:
    """Play one interleaving, and check the store. Return whether the write was over before it."""
    files = Silent(dict(begun))
    store = Store.open(files)
    writer = Checkpointer(store, POLICIES["consecutive"](), REPLAY)
    changed: list[int] = []
    theirs: set[int] = set()  # the versions of another trainer

    def beside() -> None:
        if not changed:
            changed.append(1)
            other = Store.open(Recent(files.held))
            known = other.state.versions()
            change(other)
            theirs.update(
                entry.created_ns
                for entry in other.state.versions()
                if entry.version not in {old.version for old in known}
            )

    files.begin(mode, silent_at, beside_at, beside)
    REPLAY.now = 3
    has_failed = False
    try:
        writer.write(3, {"dense": b"3"})
    except IoError:
        has_failed = True
    except FailedPrecondition:
        assert change is write
    is_over = files.operations < max(silent_at, beside_at)
    files.beside_at = 0
    if beside_at == 0:
        beside()
    files.appear()
    if has_failed and beside_at == -1:
        beside()
    present = {entry.created_ns: entry for entry in Store.open(Recent(files.held)).state.versions()}
    newest, is_refused = go_on(store, writer) if has_failed else (3, False)
    found = Store.open(Recent(files.held))
    assert found.verify() == []
    versions = [entry.version for entry in found.state.versions()]
    assert versions[-1] == newest
    assert change is purge or set(versions) >= {1, 2, newest}
    assert len(set(versions)) == len(versions)
    check_versions(found, REPLAY, versions)
    if changed and change is not purge:
        assert found.state.version(1).kept, "the other process lost its change"
    assert not theirs or go_on in (informed, busy) or not has_failed or is_refused
    for entry in present.values():
        is_same = entry.created_ns in {other.created_ns for other in found.state.versions()}
        is_replaced = go_on in (again, next_one) and entry.version == 3
        assert is_same or (is_replaced and not entry.kept and entry.created_ns not in theirs)
    found.write(9, {}, kind="delta")
    return is_over


@pytest.mark.parametrize("mode", ["undone", "done", "late"])
@pytest.mark.parametrize("go_on", [again, next_one, informed, busy])
def test_a_commit_without_an_answer_beside_another_process(
    begun: dict[str, bytes], mode: str, go_on: Callable[[Store, Checkpointer], Continued]
) -> None:
    operations = 0
    for silent_at in itertools.count(1):
        if run(begun, mode, silent_at, -1, keep, go_on):
            break
        operations = silent_at
    assert operations >= 5  # rows, part, lineage, state, and the listing behind it
    for silent_at, change in itertools.product(range(1, operations + 1), OTHERS):
        for beside_at in range(-1, operations + 1):
            run(begun, mode, silent_at, beside_at, change, go_on)


@pytest.mark.parametrize("change", OTHERS)
def test_a_commit_beside_another_process(
    begun: dict[str, bytes], change: Callable[[Store], None]
) -> None:
    """The store answers each time."""
    for beside_at in itertools.count(1):
        if run(begun, "undone", 0, beside_at, change, again):
            break
    assert beside_at > 4


def _rows(values: Mapping[int, float]) -> dict[str, Rows]:
    table = TABLES["items"]
    columns = {"row": np.array([[value] * 2 for value in values.values()], np.float32)}
    return {"items": Rows.of(table, list(values), columns)}


def _values(store: Store) -> dict[int, float]:
    rows = store.restore()["items"]
    first = rows.columns["row"].view(np.float32)[:, 0]
    return dict(zip(rows.keys.tolist(), first.tolist(), strict=True))


def _store_with_open_version(mode: str) -> tuple[Store, Silent]:
    """Return a store with versions 1 and 2, and 3 open: its row 1 is of an abandoned step."""
    files = Silent({})
    store = Store.create(files, "m", list(TABLES.values()))
    store.write(1, _rows({0: 1, 1: 1}), kind="base")
    store.write(2, _rows({0: 2}), kind="delta")
    files.begin(mode, 3, 0, lambda: None)  # rows and lineage come first
    with pytest.raises(IoError, match="no answer"):
        store.write(3, _rows({1: 666}), kind="delta")
    files.is_silent, files.silent_at = False, 0
    return store, files


def test_a_base_of_other_columns_that_appears_is_replaced() -> None:
    files = Silent({})
    own, stored = Table.of("items", 2), Table.of("items", 2, "f16")
    store = Store.create(files, "m", [own])
    store.write(1, _rows({1: 0.1, 2: 0.1}), kind="base")
    files.begin("late", 3, 0, lambda: None)
    columns = {"row": np.full((2, 2), 0.1, np.float32)}
    with pytest.raises(IoError, match="no answer"):
        store.write(
            2, {"items": Rows.of(stored, [1, 2], columns)}, kind="base", tables={"items": stored}
        )
    files.appear()
    store.write(3, _rows({1: 0.3}), kind="delta")
    found = Store.open(files)
    assert [entry.version for entry in found.state.versions()] == [1, 3]
    assert found.verify() == []
    assert _values(found) == {1: np.float32(0.3), 2: np.float32(0.1)}


@pytest.mark.parametrize("mode", ["done", "late"])
def test_a_version_that_appears_after_a_restore_of_an_older_one(mode: str) -> None:
    """A version that is written above the older one must not have its rows."""
    store, files = _store_with_open_version(mode)
    assert _values(store) == {0: 2, 1: 1}
    files.appear()
    store.write(4, _rows({0: 4}), kind="delta")
    assert _values(Store.open(files)) == {0: 4, 1: 1}


@pytest.mark.parametrize("mode", ["undone", "done", "late"])
def test_a_rollback_closes_an_open_commit(mode: str) -> None:
    store, files = _store_with_open_version(mode)
    assert store.rollback(2) == ([3] if mode == "done" else [])
    files.appear()
    store.refresh()
    store.write(4, _rows({0: 4}), kind="delta")
    assert _values(Store.open(files)) == {0: 4, 1: 1}


@pytest.mark.parametrize("mode", ["undone", "late"])
def test_a_counted_restore_closes_an_open_commit_of_a_killed_trainer(mode: str) -> None:
    _, files = _store_with_open_version(mode)
    store = Store.open(files)
    assert _values(store) == {0: 2, 1: 1}
    store.count_restore(2)
    files.appear()
    store.refresh()
    store.write(4, _rows({0: 4}), kind="delta")
    assert _values(Store.open(files)) == {0: 4, 1: 1}


def test_a_counted_restore_refuses_a_version_that_has_appeared() -> None:
    _, files = _store_with_open_version("late")
    store = Store.open(files)
    store.restore(2)
    files.appear()
    with pytest.raises(FailedPrecondition, match="version 2 was the newest when"):
        store.count_restore(2)
    assert store.state.restores == 0


@pytest.mark.parametrize("is_late", [False, True])
def test_an_empty_store_is_begun_before_a_first_version_can_appear(is_late: bool) -> None:
    files = Silent({})
    store = Store.create(files, "m", list(TABLES.values()))
    files.begin("late", 3, 0, lambda: None)
    with pytest.raises(IoError, match="no answer"):
        store.write(3, _rows({1: 666}), kind="base")
    files.is_silent, files.silent_at = False, 0
    again = Store.open(files)
    if is_late:
        again.begin_empty()
    files.appear()
    assert again.refresh().versions() == [] or not is_late
    if not is_late:
        with pytest.raises(FailedPrecondition, match="version 0 was the newest when"):
            again.begin_empty()


def test_a_restore_is_counted_once_beside_another_process(begun: dict[str, bytes]) -> None:
    for beside_at in range(1, 9):
        files = Silent(dict(begun))
        store = Store.open(files)
        other = Store.open(Recent(files.held))
        files.begin("undone", 0, beside_at, lambda other=other: other.keep(1))  # type: ignore[misc]
        store.count_restore()
        found = Store.open(Recent(files.held)).state
        assert found.restores == 1
        assert found.version(1).kept == (files.operations >= beside_at)


def test_a_store_that_was_not_answered_when_created(begun: dict[str, bytes]) -> None:
    """The state without versions exists, or is created again."""
    tables: Sequence[object] = list(TABLES.values())
    for mode, silent_at in itertools.product(("undone", "done", "late"), range(1, 5)):
        files = Silent({})
        files.begin(mode, silent_at, 0, lambda: None)
        try:
            Store.create(files, "m", tables)  # type: ignore[arg-type]
        except IoError:
            files.appear()
            try:
                Store.create(files, "m", tables)  # type: ignore[arg-type]
            except AlreadyExists:
                assert files.held
        files.appear()
        assert Store.open(files).state.number == 1
