"""Backups that are killed, or whose store fails, at every operation of the store.

A life is a pool that changes while it is backed up, increments and full backups, and a deletion of
old backups. It is repeated for each operation of the store and each way to end there. Afterwards
every listed backup is whole, a restore of each one equals the model, and the next backup is right.
The pool is that of a killed process, and has what it would have without the backup.

The model is a dict of the rows. PETPS_TEST_SCALE=4 tries every way at every operation; otherwise
each operation gets one of them, which depends on the seed. Does not cover pushes during a backup
(tests/python/server/test_backups.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import petps
from petps import _native
from petps.checkpoint import Store
from petps.checkpoint import store as store_room
from petps.errors import IoError, NotFound, PetpsError
from petps.pool import backup
from petps.pool.backup_info import BackupInfo
from petps.pool.restore import list_backups, restore
from tests.python.checkpoint.memory import Crash, MemoryFiles
from tests.seed import SEED

URL = "memory://backups"
KEYS = 40
DIMS = {"fed": 2, "pushed": 3}
PARTITIONS = 2
BACKUPS = 3
PARTS = 4  # tests that share the operations, so that none is long
WAYS = ("killed", "torn", "refused", "late")
# How many of the ways each operation gets.
WAYS_EACH = min(len(WAYS), max(1, round(float(os.environ.get("PETPS_TEST_SCALE", "1")))))
Model = dict[str, dict[int, bytes]]


class Faults(MemoryFiles):
    """Files in memory that end operation ``at`` in one of the WAYS.

    killed, torn: The process is killed before the operation, or in its middle. Every later one is
    refused, because a dead process has none.
    refused, late: The operation fails; it is not done, or it is.
    """

    def __init__(self, way: str = "", at: int = 0) -> None:
        super().__init__()
        self.way, self.at = way, at
        if way in ("killed", "torn"):
            self.crash_at, self.torn = at, way == "torn"

    def _step(self) -> bool:
        if self.crash_at and self.operations >= self.crash_at:
            raise Crash
        is_whole = super()._step()
        if self.way == "refused" and self.operations == self.at:
            raise IoError("memory: refused")
        return is_whole

    def _end(self) -> None:
        if self.way == "late" and self.operations == self.at:
            raise IoError("memory: done, but the answer was lost")

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        super().write(path, pieces)
        self._end()

    def create(self, path: str, content: bytes) -> None:
        super().create(path, content)
        self._end()

    def remove(self, path: str) -> None:
        super().remove(path)
        self._end()


def copy_of(model: Model) -> Model:
    return {name: dict(rows) for name, rows in model.items()}


def rows_of(pool: petps.Pool) -> Model:
    return {
        name: {
            key: row.tobytes()
            for keys, rows in pool.scan(name)
            for key, row in zip(keys.tolist(), rows, strict=True)
        }
        for name in DIMS
    }


class Life:
    """An open pool, its store and its model. The deltas stand in for ingest, as one thread.

    models: by version, the rows of each backup that was acknowledged and is not dropped.
    trying: the rows at the hold of the last backup, which may exist without being acknowledged.
    """

    def __init__(self, path: Path, files: Faults) -> None:
        self.path, self.files = path, files
        self.open = petps.open(path)
        self.rng = np.random.default_rng(SEED)
        self.number = 0
        self.model: Model = {name: {} for name in DIMS}
        self.models: dict[int, Model] = {}
        self.trying: Model = {}
        self.optional: dict[int, Model] = {}  # backups that may have been dropped
        self.is_held = False

    def change(self, count: int = 5) -> None:
        """Apply a version of deltas."""
        self._apply(*self._new_rows("fed", count))

    def push(self, count: int = 5) -> None:
        """Push rows, and erase a few."""
        keys, rows, deleted = self._new_rows("pushed", count)
        self.open.push("pushed", keys[~deleted], rows[~deleted])
        self.open.erase("pushed", keys[deleted])

    def empty(self) -> None:
        """Delete all rows: the next backup must know each key that the last one has."""
        keys = np.array(list(self.model["fed"]), np.uint64)
        self._apply(keys, np.zeros((len(keys), DIMS["fed"]), np.float32), np.ones(len(keys), bool))
        self.open.erase("pushed", np.array(list(self.model["pushed"]), np.uint64))
        self.model = {name: {} for name in DIMS}

    def _new_rows(self, name: str, count: int) -> tuple[Any, Any, Any]:
        keys = self.rng.choice(KEYS, count, replace=False).astype(np.uint64)
        rows = self.rng.standard_normal((count, DIMS[name]), dtype=np.float32)
        deleted = self.rng.random(count) < 0.2
        for key, row, is_deleted in zip(keys.tolist(), rows, deleted.tolist(), strict=True):
            if is_deleted:
                self.model[name].pop(key, None)
            else:
                self.model[name][key] = row.tobytes()
        return keys, rows, deleted

    def _apply(self, keys: Any, rows: Any, deleted: Any) -> None:
        """Apply to the table of deltas, and record the progress that covers it."""
        self.number += 1
        self.open.table("fed").apply(keys, rows.view(np.uint8), deleted, self.number)
        at = self.number
        self.open.native.record_all_progress(
            [
                _native.Progress(instance=1, partition=p, run=1, seq=at, offset=at, version=at)
                for p in range(PARTITIONS)
            ]
        )

    def back_up(self, *, full: bool = False) -> None:
        @contextlib.contextmanager
        def hold(_: Callable[[], bool]) -> Iterator[Callable[[], None]]:
            self.is_held = True
            self.trying = copy_of(self.model)
            yield lambda: None
            self.is_held = False

        def goes_on() -> bool:
            if not self.is_held:
                self.change()
            return True

        instance = self.open.backed_up(None)
        try:
            report = backup.back_up(
                self.open.native, instance, URL, full=full, hold=hold, goes_on=goes_on
            )
        finally:
            self.is_held = False
        self.models[report["version"]] = self.trying

    def drop_old(self) -> None:
        """Keep the newest two, as [backup] keep does."""
        for version in sorted(self.models)[:-2]:
            self.optional[version] = self.models.pop(version)
        Store.open(URL).drop_all_but(set(self.models))

    def kill(self) -> None:
        """Go on with the file as a kill of the process leaves it. Check it."""
        left = self.path.with_name("left")
        left.mkdir(exist_ok=True)
        for file in self.path.parent.iterdir():
            if file.name.startswith(self.path.name):
                shutil.copy(file, left)
        self.open.close()
        for file in left.iterdir():
            shutil.move(file, self.path.parent / file.name)
        self.open = petps.open(self.path)
        assert not self.open.native.info().was_clean
        assert self.open.verify().clean
        assert rows_of(self.open) == self.model


def live(life: Life, after_failure: Callable[[Life], None] | None = None) -> None:
    """Live. A failed call is checked and repeated, if ``after_failure`` is given."""

    def attempt(call: Callable[[], None]) -> None:
        try:
            call()
        except PetpsError:
            if after_failure is None:
                raise
            after_failure(life)
            call()

    life.change(30)
    life.push(30)
    for number in range(BACKUPS):
        attempt(lambda: life.back_up(full=number == BACKUPS - 1))  # noqa: B023
        life.push()
    attempt(life.drop_old)


def check_listed(life: Life, restored_least: int = 0) -> None:
    """Check that the store lists what it must, and that backups restore to their models.

    restored_least: The first version to restore.
    """
    try:
        listed = [entry["version"] for entry in list_backups(URL)]
    except NotFound:  # killed before the first version
        listed = []
    known = life.optional | life.models
    unknown = set(listed) - set(known)
    assert set(life.models) <= set(listed)
    assert len(unknown) <= 1
    assert all(version > max(known, default=0) for version in unknown)
    for version in (version for version in listed if version >= restored_least):
        restored = life.path.with_name("restored")
        restore(URL, restored, version=version)
        with petps.open(restored) as opened:
            assert opened.verify().clean
            assert rows_of(opened) == known.get(version, life.trying), version
        restored.unlink()
    life.models |= dict.fromkeys(unknown, life.trying)


def check_newest(life: Life) -> None:
    """Check the list, and the newest backup, acknowledged or not."""
    check_listed(life, max(life.models, default=0))


def check_next(life: Life) -> None:
    """Check that the next backup is right, and that nothing is left of the one that ended early."""
    life.empty()
    life.back_up()
    life.push()
    life.change()
    life.back_up()
    check_listed(life)
    store = Store.open(URL)
    assert store.verify() == []
    assert list_backups(URL)[-1]["version"] == max(life.models)
    entries = store.state.versions()
    assert all(BackupInfo.is_in(entry) for entry in entries)
    store.purge(len(entries))
    named = store.state.files() | set(store.state.trash)
    assert {path for path in life.files.held if not path.startswith("states/")} <= named


@pytest.fixture(autouse=True)
def many_increments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let backups have many passes, and be full only if a test says so."""
    monkeypatch.setattr(backup, "SETTLED_BYTES", 0)
    monkeypatch.setattr(backup, "FULL_SHARE", 1e9)


@pytest.fixture(scope="module")
def empty_pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("empty") / "pool"
    with petps.create(path, durability="process") as pool:
        pool.create_model("default", PARTITIONS)
        pool.create_table("fed", dim=DIMS["fed"], capacity=200, feed="delta")
        pool.create_table("pushed", dim=DIMS["pushed"], capacity=200)
    return path


class Lives:
    """Begins lives, each with a copy of the empty pool."""

    def __init__(self, empty: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._empty, self._folder, self._monkeypatch = empty, folder, monkeypatch

    @contextlib.contextmanager
    def begin(self, way: str = "", at: int = 0) -> Iterator[Life]:
        files = Faults(way, at)
        self._monkeypatch.setattr(store_room, "open_files", lambda _: files)
        folder = self._folder / "life"
        folder.mkdir()
        shutil.copy(self._empty, folder / "pool")
        life = Life(folder / "pool", files)
        try:
            yield life
        finally:
            life.open.close()
            shutil.rmtree(folder)


@pytest.fixture
def lives(empty_pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lives:
    return Lives(empty_pool, tmp_path, monkeypatch)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("turn", range(WAYS_EACH))
def test_a_backup_that_ends_at_any_operation(lives: Lives, turn: int, part: int) -> None:
    with lives.begin() as life:
        live(life)
        count = life.files.operations
        check_next(life)
    assert count > 6 * BACKUPS
    for at in range(1 + part, count + 1, PARTS):
        way = WAYS[(at + turn + SEED) % len(WAYS)]
        with lives.begin(way, at) as life:
            if way in ("killed", "torn"):
                with pytest.raises(Crash):
                    live(life)
                life.files.crash_at = 0
                life.kill()
                check_newest(life)
            else:
                live(life, check_newest)
            check_next(life)
    print(f"part {part + 1} of {count} operations, way {turn + 1} of {len(WAYS)}")


def test_a_backup_writes_nothing_to_the_pool(lives: Lives) -> None:
    """So a power cut or a kill during one leaves what it would leave without one."""
    with lives.begin() as life:
        life.change(30)
        life.push(30)
        before = life.path.read_bytes()
        instance = life.open.backed_up(None)
        for _ in range(2):
            backup.back_up(life.open.native, instance, URL, full=True)
            assert life.path.read_bytes() == before
