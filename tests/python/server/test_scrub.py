"""Scrubbing of a served pool: damaged rows leave it, and come back from bases of its log.

Rows are damaged in the pool's file while the server has it open. The list of missing rows alone is
tested in tests/python/pool/test_damage.py, the native part in tests/native/table/scrub_test.cc.
"""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import petps_client
import pytest

import petps
from petps import config
from petps.checkpoint import Base
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.errors import DataLoss, FailedPrecondition, InvalidArgument, IoError
from petps.publish import Publisher
from petps.server import Serving, repair, scrubber
from petps.server.ingest.catch_up import catch_up
from petps.server.ingest.native_tables import NativeInstanceTables
from petps.server.scrubber import Scrubber
from tests.python.server.conftest import settings
from tests.python.server.damaged import damage_row, row_of
from tests.python.small_disk import mount_small_disk
from tests.python.waiting import wait_until

COUNT = 64
KEYS = np.arange(COUNT, dtype=np.uint64)
NEVER = {"every": "never"}


def rows_of(value: float, keys: list[int] | None = None) -> np.ndarray[Any, Any]:
    return np.stack([row_of(key, value) for key in (range(COUNT) if keys is None else keys)])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubber, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(repair, "LOOK_SECONDS", 0.02)


class Served:
    """A server of a pool that follows a log, its trainer, and another server without damage."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.lines: list[str] = []
        self.log = stack.enter_context(DirectoryLog(folder / "log", partitions=2))
        self.pools = {name: folder / f"{name}.pool" for name in ("own", "other")}
        for path in self.pools.values():
            with petps.create(path, durability="process") as pool:
                pool.create_model("m", 2)
                pool.create_table("fed", dim=4, capacity=1000, feed="delta")
        schema = TableSchema("fed", "f32", 4)
        self.publisher = Publisher(self.log, "m", tables=[schema])
        self.publisher.begin_continue(None)
        self.version = 0
        self.servings = {name: self.serve(name) for name in self.pools}

    def serve(self, name: str) -> Serving:
        with_log = settings(
            self.pools[name],
            model={"name": "m"},
            ingest={"log": self.folder / "log"},
            scrub=NEVER,
            server={"http": False, "grpc": False},
        )
        return self.stack.enter_context(Serving(with_log, log=self.lines.append))

    @property
    def serving(self) -> Serving:
        return self.servings["own"]

    def restart(self) -> None:
        self.serving.close()
        self.servings["own"] = self.serve("own")

    def publish(self, keys: list[int], value: float, deleted: bool = False) -> None:
        """Commit a version, and wait until both servers have applied it."""
        marks = np.full(len(keys), deleted)
        self.publisher.publish("fed", np.array(keys, np.uint64), rows_of(value, keys), marks)
        self.version = self.publisher.commit()
        for serving in self.servings.values():
            wait_until(partial(self.has_applied, serving))

    def has_applied(self, serving: Serving) -> bool:
        return self.applied(serving) == self.version

    @staticmethod
    def applied(serving: Serving) -> int:
        return int(serving._tables.applied_version(serving._tables.resolve("m").id))

    def export(self, name: str = "other") -> None:
        """Make a base of a server's rows, where both servers look for bases."""
        pool = petps.Pool(self.servings[name]._tables, is_borrowed=True)
        pool.export(self.folder / "bases" / f"{name}-{self.version}", model="m")

    def damage(self, keys: list[int], value: float) -> None:
        for key in keys:
            damage_row(self.pools["own"], row_of(key, value))

    def scrub(self, table: str = "fed") -> dict[str, Any]:
        (report,) = self.serving.scrub(table, None, lambda *_: True, False)
        return report

    def pull(self) -> dict[int, float]:
        """Return the value of each key of ``fed`` that exists. Every row must be whole."""
        rows, mask = petps.Pool(self.serving._tables, is_borrowed=True).pull(
            "fed", KEYS, return_mask=True
        )
        values = {}
        for key in KEYS[mask].tolist():
            value = float(rows[key][1])
            assert (rows[key] == row_of(key, value)).all(), f"key {key} has a damaged row"
            values[key] = value
        return values

    def missing(self) -> set[int]:
        tables = self.serving._tables
        return set(tables.find("m@0", "fed").missing_keys().tolist())

    def listed(self) -> set[int]:
        table = self.serving._tables.find("m@0", "fed")
        return set(self.serving._scrub.damage.of_table(table.id))

    def look(self) -> None:
        """Let the repair look at the present bases once more than it has."""
        self.serving._scrub.repairs.look()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with contextlib.ExitStack() as stack:
        yield Served(tmp_path, stack)


def entry(status: dict[str, Any], table: str) -> dict[str, Any]:
    number = next(str(record["id"]) for record in status["tables"] if record["name"] == table)
    found: dict[str, Any] = status["scrub"]["tables"][number]
    return found


def test_a_row_comes_back_from_an_older_base_only_if_it_is_the_same(served: Served) -> None:
    served.publish(list(range(COUNT)), 1)
    served.publish([60], 1)
    served.export()  # of version 2, holds value 1 of all keys
    served.publish(list(range(10)), 2)
    served.damage([5], 2)
    served.damage([30], 1)
    report = served.scrub()
    assert (report["damaged"], report["removed"]) == (2, 2)
    wait_until(lambda: 30 in served.pull())
    served.look()
    expected = {key: 2.0 if key < 10 else 1.0 for key in range(COUNT)}
    assert served.pull() == {key: value for key, value in expected.items() if key != 5}
    assert served.missing() == served.listed() == {5}
    # Its stamp is the one of before, not that of the base or of now.
    table = served.serving._tables.find("m@0", "fed")
    stamps = np.zeros(1, np.uint32)
    table.pull(np.array([30], np.uint64), np.empty((1, 4), np.float32), None, stamps)
    assert stamps[0] == 1

    with pytest.raises(FailedPrecondition, match="1 rows of table 'fed' were damaged and are miss"):
        served.export("own")
    served.publish([40], 3)
    served.export()  # of a later position than the removal
    wait_until(lambda: 5 in served.pull())
    assert served.pull() == expected | {40: 3.0}
    wait_until(lambda: entry(served.serving.status(), "fed")["restored"] == 2)
    assert served.missing() == served.listed() == set()
    status = served.serving.status()
    assert entry(status, "fed") | {"rows": 0, "last_pass": 0} == {
        "rows": 0, "damaged": 2, "restored": 2, "missing": 0, "last_pass": 0,
    }  # fmt: skip
    wait_until(lambda: sum("1 missing rows are restored from base" in s for s in served.lines) == 2)


def test_a_deletion_since_the_removal_is_not_undone(served: Served) -> None:
    served.publish(list(range(COUNT)), 1)
    served.damage([7, 8, 9], 1)
    served.scrub()
    assert served.missing() == {7, 8, 9}
    served.publish([7], 1, deleted=True)
    served.publish([8], 4)
    assert served.missing() == {9}
    # The base of before the deletion has the very rows.
    (served.folder / "bases").mkdir(exist_ok=True)
    _old_base(served).rename(served.folder / "bases" / "old")  # at once, as an export appears
    wait_until(lambda: 9 in served.pull())
    served.look()
    assert 7 not in served.pull()
    assert served.pull()[8] == 4
    wait_until(lambda: served.listed() == set())


def _old_base(served: Served) -> Path:
    """Return a base of version 1, as a third server that stopped then would have it."""
    path = served.folder / "third.pool"
    with petps.create(path, durability="process") as pool:
        pool.create_model("m", 2)
        pool.create_table("fed", dim=4, capacity=1000, feed="delta")
        pool.load("fed", KEYS, rows_of(1))
        pool.export(served.folder / "old")
    return served.folder / "old"


def test_a_base_that_is_ahead_waits_for_the_log(served: Served) -> None:
    served.publish(list(range(COUNT)), 1)
    served.damage([3], 1)
    served.scrub()
    served.serving.set_ingest(paused=True)
    wait_until(lambda: served.serving.status()["ingest"]["paused"])
    other = served.servings["other"]
    served.publisher.publish("fed", np.array([3, 4], np.uint64), rows_of(2, [3, 4]))
    served.version = served.publisher.commit()
    wait_until(lambda: served.applied(other) == served.version)
    served.export()
    served.look()
    assert served.missing() == {3}, "the base is ahead of the applied log"
    served.serving.set_ingest(paused=False)
    wait_until(lambda: served.pull().get(3) == 2)
    wait_until(lambda: served.listed() == set())
    assert not any("restored" in line for line in served.lines), "the delta wrote it"


def test_missing_rows_survive_a_restart(served: Served) -> None:
    served.publish(list(range(COUNT)), 1)
    served.export()
    older = served.folder / "bases" / f"other-{served.version}"
    hidden = served.folder / "hidden"
    older.rename(hidden)
    served.publish(list(range(20)), 2)
    served.damage([5, 6], 2)
    served.damage([50], 1)
    served.scrub()
    served.restart()
    assert served.missing() == served.listed() == {5, 6, 50}
    # The older base has the very row of 50. But nobody knows what happened just before a crash.
    hidden.rename(older)
    served.look()
    assert served.missing() == {5, 6, 50}
    served.publish([6], 3)
    wait_until(lambda: served.listed() == {5, 50})
    served.export()
    wait_until(lambda: served.missing() == set())
    assert served.pull() == {
        key: 3.0 if key == 6 else 2.0 if key < 20 else 1.0 for key in range(COUNT)
    }
    served.restart()
    assert served.listed() == set()


def test_a_key_that_its_base_lacks_is_struck_out(served: Served) -> None:
    served.publish(list(range(COUNT)), 1)
    served.publish([3], 1, deleted=True)
    pool = petps.Pool(served.serving._tables, is_borrowed=True)
    served.damage([4], 1)
    served.scrub()
    # As after a crash behind the deletion of key 3, and before it was struck out.
    table = pool.table("fed", "m")
    lines = served.serving._scrub.damage.path.read_text().splitlines()
    line = json.loads(next(line for line in lines if '"key": 4' in line))
    served.serving.close()
    with (served.folder / "own.pool.damage").open("a") as file:
        file.write(json.dumps(line | {"key": 3}) + "\n")
    served.servings["own"] = served.serve("own")
    assert served.listed() == {3, 4}, table.id
    served.publish([40], 3)
    served.export()
    wait_until(lambda: served.listed() == set())
    assert set(served.pull()) == set(range(COUNT)) - {3}


def test_a_pushed_table_misses_its_rows_until_they_are_pushed(pool: Path) -> None:
    lines: list[str] = []
    with petps.open(pool) as opened:
        opened.push("items", KEYS, rows_of(1))
    every = {"every": "1h", "bytes_per_second": 0}
    with (
        Serving(settings(pool, scrub=every), log=lines.append) as serving,
        petps_client.connect(f"petps://127.0.0.1:{serving.port}") as client,
    ):
        wait_until(lambda: entry(serving.status(), "items")["last_pass"])
        damage_row(pool, row_of(3, 1))
        damage_row(pool, row_of(4, 1))
        (report,) = serving.scrub("items", None, lambda *_: True, True)
        assert report | {"rows": 0} == {
            "table": "items", "instance": "default@0", "rows": 0, "damaged": 2, "removed": 2,
            "unremoved": 0, "default_row_damaged": False, "missing": 2,
        }  # fmt: skip
        rows, mask = client.pull("items", KEYS, return_mask=True)
        assert KEYS[~mask].tolist() == [3, 4]
        assert (rows[3] == 0).all()
        damaged = sorted(line for line in lines if "is damaged" in line)
        assert [line.partition(" in slot")[0] for line in damaged] == [
            f"table 'items' of default@0: the row of key {key}" for key in (3, 4)
        ]
        labels = '{model_instance="default@0",table="items"}'
        metrics = serving._metrics_text("")[0].decode()
        assert f"petps_table_missing_rows{labels} 2.0" in metrics
        assert f"petps_scrub_damaged_rows_total{labels} 2.0" in metrics
        assert f"petps_scrub_repaired_rows_total{labels} 0.0" in metrics
        assert f"petps_scrub_failed{labels} 0.0" in metrics
        assert serving.status()["scrub"]["faults"] == {}
        client.push("items", KEYS[3:4], rows_of(2, [3]))
        wait_until(lambda: entry(serving.status(), "items")["missing"] == 1)
    path = pool.with_name("pool.damage")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with petps.open(pool, read_only=True) as opened:
        assert entry(opened.status(), "items")["missing"] == 1
    with (
        Serving(settings(pool, scrub=NEVER), log=lines.append) as serving,
        petps_client.connect(f"petps://127.0.0.1:{serving.port}") as client,
    ):
        assert entry(serving.status(), "items")["missing"] == 1
        client.erase("items", KEYS[4:5])
        wait_until(lambda: entry(serving.status(), "items")["missing"] == 0)


def test_a_damaged_row_is_found_by_the_schedule(pool: Path) -> None:
    clock = [1_800_000_000.0]
    lines: list[str] = []
    with petps.open(pool) as opened:
        opened.push("items", KEYS, rows_of(1))
        damage = _damage_log(opened)
        settled = config.merge(None, {"pool": {"path": pool}, "scrub": {"every": "1d"}}, "test")
        work = Scrubber(opened.native, settled.scrub, damage, lines.append, clock=lambda: clock[0])
        try:
            number = opened.table("items").id
            wait_until(lambda: damage.last_pass(number) == clock[0])
            damage_row(pool, row_of(9, 1))
            clock[0] += 86_399
            looks = scrubber_looks(work)
            wait_until(lambda: looks() > 3)
            assert damage.count == 0, "no pass is due"
            clock[0] += 1
            wait_until(lambda: damage.count == 1)
            wait_until(lambda: damage.last_pass(number) == clock[0])
            work.configure(settled.scrub.model_copy(update={"every": "never"}))
            clock[0] += 10 * 86_400
            seen = looks()
            wait_until(lambda: looks() > seen + 3)
            assert damage.last_pass(number) == clock[0] - 10 * 86_400
        finally:
            work.close()
    assert len(lines) == 1


def scrubber_looks(work: Scrubber) -> Callable[[], int]:
    """Return a function that returns how often the schedule was looked at since."""
    count, due = [0], work._due

    def counted(existing: Any) -> Any:
        count[0] += 1
        return due(existing)

    work._due = counted  # type: ignore[method-assign]
    return lambda: count[0]


def _damage_log(pool: petps.Pool) -> Any:
    from petps.pool.damage import DamageLog

    return DamageLog(pool.native)


def test_nothing_is_removed_while_it_cannot_be_listed(tmp_path: Path) -> None:
    lines: list[str] = []
    with mount_small_disk(tmp_path / "disk", "24M") as folder:
        pool = folder / "pool"
        with petps.create(pool, durability="process") as opened:
            opened.create_table("items", dim=4, capacity=1000)
            opened.push("items", KEYS, rows_of(1))
        scrub = {"every": "1h", "bytes_per_second": 0}
        with Serving(settings(pool, scrub=scrub), log=lines.append) as serving:
            wait_until(lambda: entry(serving.status(), "items")["last_pass"])
            damage = serving._scrub.damage
            wait_until(damage.path.exists)  # written after the status shows the pass
            while damage.path.stat().st_size % 4096 < 4040:  # so that a line needs another page
                damage.note_pass(9, 1.0)
            filler = folder / "filler"
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * 4096)
            damage_row(pool, row_of(3, 1))
            with pytest.raises(IoError, match="damaged rows stay in service until it can be"):
                serving.scrub("items", None, lambda *_: True, False)
            table = petps.Pool(serving._tables, is_borrowed=True).table("items")
            assert table.status().missing_rows == 0
            assert table.find_damaged(KEYS).nonzero()[0].tolist() == [3]
            damage._passes.clear()  # a pass is due
            wait_until(lambda: "No space left" in str(serving.status()["scrub"]["faults"]))
            labels = '{model_instance="default@0",table="items"}'
            assert f"petps_scrub_failed{labels} 1.0" in serving._metrics_text("")[0].decode()
            filler.unlink()
            wait_until(lambda: table.status().missing_rows == 1)
            wait_until(lambda: serving.status()["scrub"]["faults"] == {})
    assert sum("cannot be scrubbed" in line for line in lines) == 1


def test_a_list_that_cannot_be_read_does_not_stop_the_serving(pool: Path) -> None:
    lines: list[str] = []
    pool.with_name("pool.damage").mkdir()
    with Serving(settings(pool), log=lines.append) as serving:
        (fault,) = serving.status()["scrub"]["faults"].values()
        path = pool.with_name("pool.damage")
        assert fault == (
            f"tables cannot be scrubbed: {path} cannot be read: Is a directory; move it away, then "
            "restart"
        )
        assert fault in lines
        with pytest.raises(IoError, match="cannot be read"):
            serving.scrub("items", None, lambda *_: True, True)
        serving.reload(settings(pool, scrub=NEVER))
        labels = '{model_instance="default@0",table="items"}'
        assert f"petps_scrub_failed{labels} 1.0" in serving._metrics_text("")[0].decode()


def test_a_damaged_default_row_is_reported(tmp_path: Path) -> None:
    path, lines = tmp_path / "pool", list[str]()
    with petps.create(path, durability="process") as opened:
        opened.create_table("items", dim=4, capacity=1000, default=row_of(7, 9))
    scrub = {"every": "1h", "bytes_per_second": 0}
    with Serving(settings(path, scrub=scrub), log=lines.append) as serving:
        wait_until(lambda: entry(serving.status(), "items")["last_pass"])
        stored = row_of(7, 9).tobytes()
        content = path.read_bytes()
        for at in (at for at in range(len(content)) if content.startswith(stored, at)):
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"?")
        (report,) = serving.scrub("items", None, lambda *_: True, False)
        assert report["default_row_damaged"]
        (fault,) = serving.status()["scrub"]["faults"].values()
        assert fault.startswith("the default row of table 'items' is damaged")
    assert fault in lines


def test_an_export_does_not_copy_a_damaged_row(pool: Path, tmp_path: Path) -> None:
    with petps.open(pool) as opened:
        opened.push("items", KEYS, rows_of(1))
        damage_row(pool, row_of(9, 1))
        with pytest.raises(DataLoss, match=r"key 9 in table 'items' is damaged.*petps scrub"):
            opened.export(tmp_path / "base")
        assert not (tmp_path / "base").exists()
        (report,) = opened.scrub("items")
        assert report["removed"] == 1
        assert opened.export(tmp_path / "base")["tables"][0]["rows"] > 0


@pytest.mark.parametrize(
    ("scrub", "text"),
    [
        ({"every": "7"}, r"\[scrub\] every: it must be a whole number with its unit.*not '7'"),
        ({"every": "1w"}, r"\[scrub\] every"),
        ({"bytes_per_second": -1}, r"\[scrub\] bytes_per_second: should be greater than or equal"),
        ({"bytes_per_second": "64M"}, r"\[scrub\] bytes_per_second: should be a valid integer"),
        ({"rate": 1}, r"\[scrub\] rate is not a known key"),
    ],
)
def test_bad_settings_name_their_key(scrub: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        config.merge(None, {"pool": {"path": "p"}, "scrub": scrub}, "test")


def test_the_settings_are_reloaded(pool: Path) -> None:
    with Serving(settings(pool, scrub=NEVER), log=lambda _: None) as serving:
        serving.reload(settings(pool, scrub={"every": "12h", "bytes_per_second": 7}))
        scrub = serving.status()["scrub"]
        assert (scrub["every_seconds"], scrub["bytes_per_second"]) == (43_200, 7)


def test_a_catch_up_ends_that_its_absent_keys_are_missing(served: Served) -> None:
    served.publish(list(range(COUNT)), 1)
    served.damage([3, 4], 1)
    served.scrub()
    served.serving.set_ingest(paused=True)
    wait_until(lambda: served.serving.status()["ingest"]["paused"])
    other = served.servings["other"]
    served.publisher.publish("fed", np.array([3], np.uint64), rows_of(1, [3]), np.ones(1, np.bool_))
    served.version = served.publisher.commit()
    wait_until(lambda: served.applied(other) == served.version)
    pool = petps.Pool(other._tables, is_borrowed=True)
    pool.export(served.folder / "elsewhere", model="m")
    base = Base.open(served.folder / "elsewhere")
    instance = NativeInstanceTables(served.serving._tables, "m")
    targets = []
    for partition in range(2):
        before = instance.progress(partition)
        assert before is not None
        run, seq = base.position(partition)
        targets.append((before, replace(before, run=run, seq=seq)))
    for _ in catch_up(instance, base, targets, rows_max=1000, pace=lambda rows: None):
        pass
    assert served.missing() == set()
    assert set(served.pull()) == set(range(COUNT)) - {3}
