"""Backups of a pool without a server, and pools that are restored from them.

The model is a dict of the rows. Does not cover deltas during a backup: tests/python/server has
them.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import petps
from petps.checkpoint import Column, Rows, Store, Table
from petps.checkpoint.retention import Retention
from petps.checkpoint.state import PARTIAL_PART
from petps.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    IoError,
    NotFound,
    ResourceExhausted,
)
from petps.pool import backup
from petps.pool import restore as restore_room
from petps.pool.backup_info import read_known
from petps.pool.restore import list_backups, restore
from tests.python.server.damaged import damage_row, row_of
from tests.python.small_disk import mount_small_disk
from tests.seed import SEED

Model = dict[str, dict[int, bytes]]
DIMS = {"items": 4, "ads": 7}


class Pool:
    """A pool and its model, changed at random."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.rng = np.random.default_rng(seed)
        self.open = petps.create(path, durability="process")
        self.model: Model = {}
        for name, dim in DIMS.items():
            dtype = "f16" if name == "ads" else "f32"
            self.open.create_table(name, dim=dim, capacity=5000, dtype=dtype, default=0.5)
            self.model[name] = {}

    def change(self, count: int) -> None:
        for name, rows in self.model.items():
            keys = self.rng.integers(0, 4000, count, dtype=np.uint64)
            values = self.rng.integers(-99, 99, (count, DIMS[name])).astype(np.float32)
            self.open.push(name, keys, values)
            for key, row in zip(keys.tolist(), values, strict=True):
                rows[key] = row.tobytes()
            gone = self.rng.choice(list(rows), min(len(rows), count // 4), replace=False)
            self.open.erase(name, gone.astype(np.uint64))
            for key in gone.tolist():
                del rows[key]

    def back_up(self, store: Path, **options: Any) -> dict[str, Any]:
        return self.open.back_up(store, **options)


def rows_of(pool: petps.Pool, model: str | None = None) -> Model:
    return {
        table.name: {
            key: row.tobytes()
            for keys, rows in pool.scan(table.name, model=model)
            for key, row in zip(keys.tolist(), rows, strict=True)
        }
        for table in pool.tables(model)
    }


def check_restored(store: Path, version: int | None, model: Model, path: Path) -> dict[str, Any]:
    report = restore(str(store), path, version=version)
    with petps.open(path) as opened:
        assert opened.verify().clean
        assert rows_of(opened) == model
    path.unlink()
    return report


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    pool = Pool(tmp_path / "pool", SEED)
    yield pool
    if not pool.open.closed:
        pool.open.close()


def copy_of(model: Model) -> Model:
    return {name: dict(rows) for name, rows in model.items()}


@pytest.mark.parametrize("knows", ["file", "store", "damaged"])
def test_each_version_restores_to_its_rows(pool: Pool, tmp_path: Path, knows: str) -> None:
    """Also if the file beside the pool is lost or damaged, so that the store is read instead."""
    store = tmp_path / "store"
    models: dict[int, Model] = {}
    known = tmp_path / "pool.backup.default"
    for round_number in range(6):
        pool.change(3000 if round_number == 0 else 30)
        report = pool.back_up(store)
        assert report["kind"] == ("full" if round_number == 0 else "increment")
        models[report["version"]] = copy_of(pool.model)
        assert known.stat().st_mode & 0o777 == 0o600
        if knows == "store":
            known.unlink()
        elif knows == "damaged":
            content = bytearray(known.read_bytes())
            content[len(content) // 2] ^= 1
            known.write_bytes(content)
    for version, model in models.items():
        check_restored(store, version, model, tmp_path / "restored")
    report = check_restored(store, None, pool.model, tmp_path / "restored")
    assert report["version"] == max(models)
    assert Store.open(store).verify() == []


def test_a_restored_pool_is_as_the_first(pool: Pool, tmp_path: Path) -> None:
    pool.open.create_table("aged", dim=2, capacity=10, expire_after=3600)
    pool.open.push("aged", [1, 2], np.ones((2, 2), np.float32))
    pool.open.native.tick(pool.open.table("aged").id, 10**18)
    pool.open.push("aged", [2], np.ones((1, 2), np.float32))
    pool.open.grow("items", 9000)
    pool.open.switch_alias("live", "default@0")
    pool.change(300)
    pool.back_up(tmp_path / "store")
    restore(str(tmp_path / "store"), tmp_path / "restored")
    with petps.open(tmp_path / "restored") as opened:
        assert opened.tables() == pool.open.tables()
        assert opened.native.aliases() == pool.open.native.aliases()
        assert opened.status()["pool"]["durability"] == "process"
        for name in (*DIMS, "aged"):
            mine, theirs = pool.open.table(name), opened.table(name)
            assert np.array_equal(mine.default_row(), theirs.default_row())
            keys = np.sort(mine.keys())
            assert np.array_equal(np.sort(theirs.keys()), keys)
            stamps = np.empty((2, len(keys)), np.uint32)
            for table, out in ((mine, stamps[0]), (theirs, stamps[1])):
                table.pull(keys, np.empty((len(keys), table.row_bytes), np.uint8), None, out)
            assert np.array_equal(stamps[0], stamps[1])
        clocks = [p.native.clocks(p.table("aged").id) for p in (pool.open, opened)]
        assert clocks[0] == clocks[1]
        assert clocks[0][0][1] == 10**18


def test_an_increment_is_as_large_as_the_changes(pool: Pool, tmp_path: Path) -> None:
    keys = np.arange(4000, dtype=np.uint64)
    pool.open.push("items", keys, np.ones((4000, 4), np.float32))
    pool.back_up(tmp_path / "store")
    sizes = []
    for count in (0, 100, 400):
        pool.open.push("items", keys[:count], np.full((count, 4), count, np.float32))
        report = pool.back_up(tmp_path / "store")
        assert report["rows_written"] == count
        sizes.append(report["bytes"])
    assert sizes[0] == 0
    assert 2 * sizes[1] < sizes[2] < 5 * sizes[1]


def test_a_listed_size_is_that_of_one_backup(pool: Pool, tmp_path: Path) -> None:
    """Also once the backups before it were purged."""
    pool.change(3000)
    sizes = []
    for _ in range(3):
        sizes.append(pool.back_up(tmp_path / "store")["bytes"])
        pool.change(20)
    store = Store.open(tmp_path / "store")
    assert [entry["bytes"] for entry in list_backups(store.name)] == sizes
    store.purge(1)
    assert [entry["bytes"] for entry in list_backups(store.name)] == sizes[-1:]


def test_a_row_of_equal_bytes_and_a_new_version_is_written(pool: Pool, tmp_path: Path) -> None:
    """It expires later than the one before."""
    table = pool.open.table("items")
    row = np.ones((1, 16), np.uint8)
    key = np.array([7], np.uint64)
    table.apply(key, row, None, 5)
    pool.back_up(tmp_path / "store")
    table.apply(key, row, None, 6)
    assert pool.back_up(tmp_path / "store")["rows_written"] == 1


def test_many_increments_become_a_full_backup(pool: Pool, tmp_path: Path) -> None:
    pool.change(500)
    kinds = []
    for _ in range(8):
        pool.change(200)
        report = pool.back_up(tmp_path / "store")
        kinds.append(report["kind"])
        check_restored(tmp_path / "store", None, pool.model, tmp_path / "restored")
    assert kinds[:2] == ["full", "increment"]
    assert "full" in kinds[2:]
    assert [entry["kind"] for entry in list_backups(str(tmp_path / "store"))] == kinds


def test_another_pool_goes_on_with_the_store(pool: Pool, tmp_path: Path) -> None:
    """A restored pool, and an old copy of the pool, have other rows than the last backup."""
    store = tmp_path / "store"
    pool.change(3000)
    pool.open.close()
    shutil.copy(pool.path, tmp_path / "copy")
    old = copy_of(pool.model)
    pool.open = petps.open(pool.path)
    pool.back_up(store)
    pool.change(100)
    pool.back_up(store)
    restore(str(store), tmp_path / "restored")
    with petps.open(tmp_path / "restored") as opened:
        opened.push("items", [1], np.full((1, 4), 8, np.float32))
        report = opened.back_up(store)
        assert (report["kind"], report["rows_written"]) == ("increment", 1)
        check_restored(store, None, rows_of(opened), tmp_path / "again")
    with petps.open(tmp_path / "copy") as opened:
        opened.back_up(store)
        check_restored(store, None, old, tmp_path / "again")


@pytest.mark.parametrize("looks", [1, 2])
def test_a_cancelled_backup_leaves_those_before(pool: Pool, tmp_path: Path, looks: int) -> None:
    store = tmp_path / "store"
    pool.change(500)
    first = pool.back_up(store)["version"]
    model = copy_of(pool.model)
    pool.change(50)
    calls = 0

    def goes_on() -> bool:
        nonlocal calls
        calls += 1
        return calls < looks

    with pytest.raises(FailedPrecondition, match="cancelled; the backups before it remain"):
        backup.back_up(pool.open.native, pool.open.backed_up(None), str(store), goes_on=goes_on)
    assert [entry["version"] for entry in list_backups(str(store))] == [first]
    check_restored(store, None, model, tmp_path / "restored")
    pool.back_up(store)
    check_restored(store, None, pool.model, tmp_path / "restored")


def test_what_a_killed_backup_left_is_replaced(pool: Pool, tmp_path: Path) -> None:
    """It had inserted a key that the pool has deleted since."""
    place = tmp_path / "store"
    pool.change(300)
    pool.back_up(place)
    pool.open.push("items", [9999], np.ones((1, 4), np.float32))
    opened = Store.open(place)
    described = opened.state.tables["items"]
    columns = {column.name: np.ones((1, column.width), np.uint8) for column in described.columns}
    rows = Rows.of(described, [9999], columns)
    opened.write(2, {"items": rows}, kind="delta", parts={PARTIAL_PART: b"{}"})
    pool.open.erase("items", [9999])
    assert pool.back_up(place)["version"] == 2
    check_restored(place, None, pool.model, tmp_path / "restored")


def test_a_purge_keeps_the_newest_backup(pool: Pool, tmp_path: Path) -> None:
    """Also if a killed backup has left a version that is none."""
    place = tmp_path / "store"
    pool.change(300)
    pool.back_up(place)
    opened = Store.open(place)
    columns = {
        c.name: np.ones((1, c.width), np.uint8) for c in opened.state.tables["items"].columns
    }
    rows = Rows.of(opened.state.tables["items"], [9999], columns)
    opened.write(2, {"items": rows}, kind="delta", parts={PARTIAL_PART: b"{}"})
    opened.purge(1)
    check_restored(place, None, pool.model, tmp_path / "restored")
    opened.drop_all_but([])
    check_restored(place, None, pool.model, tmp_path / "restored")
    opened.drop_all_but(Retention().choose(opened.state.versions(), 10**30))
    check_restored(place, None, pool.model, tmp_path / "restored")
    pool.change(50)
    pool.back_up(place)
    check_restored(place, None, pool.model, tmp_path / "restored")


def test_a_file_of_somebody_else_is_not_replaced(pool: Pool, tmp_path: Path) -> None:
    other = tmp_path / "pool.backup.default"
    with petps.create(other, durability="process"):
        pass
    before = other.read_bytes()
    pool.change(30)
    (warning,) = pool.back_up(tmp_path / "store")["warnings"]
    assert "is no file of a backup" in warning
    assert other.read_bytes() == before


def test_each_flipped_bit_of_the_known_rows_is_found(pool: Pool, tmp_path: Path) -> None:
    pool.change(20)
    pool.back_up(tmp_path / "store")
    store = Store.open(tmp_path / "store")
    (entry,) = store.state.versions()
    path = tmp_path / "pool.backup.default"
    content = path.read_bytes()
    whole = read_known(pool.path, "default", store.name, entry)
    assert whole is not None
    for bit in range(0, 8 * len(content), 7):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        known = read_known(pool.path, "default", store.name, entry)
        if known is not None:
            for name, rows in whole.items():
                assert np.array_equal(known[name].keys, rows.keys)
                assert np.array_equal(known[name].hashes, rows.hashes)


def test_a_table_made_during_a_backup_is_not_in_it(pool: Pool, tmp_path: Path) -> None:
    pool.change(30)

    def goes_on() -> bool:
        with contextlib.suppress(AlreadyExists):
            pool.open.create_table("later", dim=2, capacity=10)
        return True

    instance = pool.open.backed_up(None)
    backup.back_up(pool.open.native, instance, str(tmp_path / "store"), goes_on=goes_on)
    check_restored(tmp_path / "store", None, pool.model, tmp_path / "restored")


def test_a_full_disk_leaves_the_backups_before(pool: Pool, tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "small", "3m") as disk:
        store = disk / "store"
        pool.change(1000)
        pool.back_up(store)
        model = copy_of(pool.model)
        filler = disk / "filler"
        fill(filler)
        pool.change(1000)
        with pytest.raises(IoError, match="No space left"):
            pool.back_up(store, full=True)
        filler.unlink()
        check_restored(store, None, model, tmp_path / "restored")
        pool.back_up(store, full=True)
        check_restored(store, None, pool.model, tmp_path / "restored")


def fill(path: Path) -> None:
    """Fill the disk."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_restore_to_a_full_disk_leaves_nothing(pool: Pool, tmp_path: Path) -> None:
    pool.change(1000)
    pool.back_up(tmp_path / "store")
    with mount_small_disk(tmp_path / "small", "3m") as disk:
        with pytest.raises((ResourceExhausted, IoError)):
            restore(str(tmp_path / "store"), disk / "restored")
        assert list(disk.iterdir()) == []


KILLED = """
import os, sys
import petps.pool.restore as room
room._record = lambda *_: os.kill(os.getpid(), 9)
room.restore(sys.argv[1], sys.argv[2])
"""


def test_a_killed_restore_leaves_no_pool(pool: Pool, tmp_path: Path) -> None:
    pool.change(100)
    pool.back_up(tmp_path / "store")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "store"), str(tmp_path / "restored")]
    assert subprocess.run(command, check=False).returncode == -9
    assert not (tmp_path / "restored").exists()
    (left,) = tmp_path.glob("restored.restoring-*")
    with restore_room._locked(left):  # as of a restore that still runs
        check_restored(tmp_path / "store", None, pool.model, tmp_path / "restored")
        assert left.exists()
    check_restored(tmp_path / "store", None, pool.model, tmp_path / "restored")
    assert not left.exists()


def test_two_restores_to_one_name(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower one fails, and does not touch the pool of the other."""
    pool.change(300)
    pool.back_up(tmp_path / "store")
    original, calls = restore_room._fill, 0

    def fill_twice(*arguments: Any) -> dict[str, int]:
        nonlocal calls
        calls += 1
        if calls == 1:
            restore(str(tmp_path / "store"), tmp_path / "restored")
        return original(*arguments)

    monkeypatch.setattr(restore_room, "_fill", fill_twice)
    with pytest.raises(AlreadyExists, match="exists by now"):
        restore(str(tmp_path / "store"), tmp_path / "restored")
    with petps.open(tmp_path / "restored") as opened:
        assert rows_of(opened) == pool.model
    assert list(tmp_path.glob("restored.restoring-*")) == []


def test_damage_in_the_store_is_found(pool: Pool, tmp_path: Path) -> None:
    pool.change(300)
    pool.back_up(tmp_path / "store")
    (bundle,) = (tmp_path / "store" / "data").iterdir()
    content = bytearray(bundle.read_bytes())
    content[1000] ^= 1
    bundle.write_bytes(content)
    with pytest.raises(DataLoss, match="checksum"):
        restore(str(tmp_path / "store"), tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def test_damaged_and_missing_rows(pool: Pool, tmp_path: Path) -> None:
    """A damaged row ends a backup. Once it is removed, the backup says that it is missing."""
    store = tmp_path / "store"
    pool.open.push("items", [4321], row_of(4321, 7.0)[None, :])
    pool.open.close()
    pool.open = petps.open(pool.path)
    first = pool.back_up(store)
    assert first["warnings"] == []
    damage_row(pool.path, row_of(4321, 7.0))
    with pytest.raises(DataLoss, match="key 4321 in table 'items' is damaged"):
        pool.back_up(store)
    pool.open.scrub()
    second = pool.back_up(store)
    text = "1 rows of table 'items' were damaged and are missing"
    assert any(text in warning for warning in second["warnings"])
    report = check_restored(store, None, pool.model, tmp_path / "restored")
    assert any(text in warning for warning in report["warnings"])
    kept = restore(str(store), tmp_path / "kept", version=first["version"])
    assert kept["warnings"] == []
    with petps.open(tmp_path / "kept") as opened:
        assert opened.pull("items", [4321])[0].tolist() == row_of(4321, 7.0).tolist()


def test_what_is_refused(pool: Pool, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with pytest.raises(NotFound):
        restore(str(store), tmp_path / "restored")
    pool.change(10)
    pool.back_up(store)
    with pytest.raises(NotFound, match="has no backup 7; it has: 1"):
        restore(str(store), tmp_path / "restored", version=7)
    with pytest.raises(AlreadyExists, match="name a new file"):
        restore(str(store), pool.path)
    for url in ("", "ftp://me:secret@host/store"):
        with pytest.raises(InvalidArgument, match=r"has no name|has a password"):
            pool.open.back_up(url)
    with pytest.raises(InvalidArgument, match="durability"):
        restore(str(store), tmp_path / "restored", durability="none")
    pool.open.create_table("more", dim=2, capacity=10)
    with pytest.raises(FailedPrecondition, match=r"other tables \(items, ads\).*give a new store"):
        pool.back_up(store)
    trainers = Store.create(
        tmp_path / "trainer", "default", [Table("items", (Column("row", "f32", 4),))]
    )
    rows = Rows.of(trainers.state.tables["items"], [1], {"row": np.ones((1, 4), np.float32)})
    trainers.write(1, {"items": rows}, kind="base")
    with pytest.raises(FailedPrecondition, match="store of something else"):
        pool.back_up(tmp_path / "trainer")
    with pytest.raises(NotFound, match="holds no backup"):
        restore(str(tmp_path / "trainer"), tmp_path / "restored")
    pool.open.create_model("second")
    with pytest.raises(InvalidArgument, match=r"2 models \(default, second\): name one"):
        pool.back_up(tmp_path / "other")
    with pytest.raises(FailedPrecondition, match="has no table"):
        pool.back_up(tmp_path / "other", model="second")
    assert not (tmp_path / "other").exists()
