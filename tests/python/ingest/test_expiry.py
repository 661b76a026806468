"""Versions of rows and times of commits on their way from the log to the tables.

Does not cover the arithmetic of event time (tests/native/pool/clock_test.cc).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import petps.pool.export
from petps import _native
from petps.checkpoint import BaseFolder
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.errors import InvalidArgument
from petps.publish import Publisher
from petps.server.ingest.native_tables import NativeInstanceTables
from petps.server.ingest.protocols import Commit
from tests.python.ingest.driver import SCHEMAS, Driver, P
from tests.python.ingest.model import Letters, MemoryTables

START_NS = 1_700_000_000 * 10**9
SECOND_NS = 10**9
EXPIRE_AFTER = 48  # a cell is a second


class Trainer:
    """A publisher whose wall clock the test sets, in seconds."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.second = 0.0
        now = lambda: START_NS + round(self.second * SECOND_NS)  # noqa: E731
        monkeypatch.setattr("petps.publish.publisher.time.time_ns", now)
        self.log = DirectoryLog(folder / "log", partitions=P)
        self.publisher = Publisher(self.log, "m", tables=SCHEMAS)
        self.publisher.begin_continue(None)

    def version(self, keys: list[int], second: float, table: str = "user") -> int:
        self.second = second
        dim = next(schema.dim for schema in SCHEMAS if schema.name == table)
        rows = np.full((len(keys), dim), second, np.float32)
        self.publisher.publish(table, np.array(keys, np.uint64), rows)
        return self.publisher.commit()


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    return Trainer(tmp_path, monkeypatch)


def test_a_row_keeps_the_version_that_wrote_it_in_a_window_of_many(trainer: Trainer) -> None:
    versions = [trainer.version(list(range(10 * i, 10 * i + 20)), i) for i in range(5)]
    instance = MemoryTables(SCHEMAS, P)
    Driver(trainer.log, instance, Letters()).run().close()
    assert instance.by_name["user"].applies < len(versions) * P
    expected = {key: versions[min(key // 10, 4)] for key in range(60)}
    assert instance.by_name["user"].stamps == expected
    for partition in range(P):
        assert [commit for commit in instance.commits if commit.partition == partition] == [
            Commit(partition, version, START_NS + i * SECOND_NS)
            for i, version in enumerate(versions)
        ]


def test_a_refused_row_keeps_its_version_until_there_is_room(trainer: Trainer) -> None:
    first = trainer.version(list(range(40)), 0)
    second = trainer.version(list(range(40, 80)), 1)
    instance = MemoryTables(SCHEMAS, P)
    table = instance.by_name["user"]
    table.capacity = 60
    driver = Driver(trainer.log, instance, Letters()).run()
    stopped = [p for p in range(P) if driver.states[p].full is not None]
    assert stopped
    for commit in instance.commits:  # none of a version whose rows have no room
        assert commit.version == first or commit.partition not in stopped
    table.capacity = 100
    driver.run()
    for state in driver.states.values():
        state.retry_at = 0.0
    driver.run().close()
    assert table.stamps == dict.fromkeys(range(40), first) | dict.fromkeys(range(40, 80), second)
    assert {(commit.partition, commit.version) for commit in instance.commits} >= {
        (p, second) for p in range(P)
    }


class Replica:
    """A pool in memory that follows the log, with walks when the test wants them."""

    def __init__(
        self,
        log: DirectoryLog,
        bases: BaseFolder | None = None,
        skip: Callable[[int], int] | None = None,
    ) -> None:
        """skip: the offset at which the log begins for this replica, by partition."""
        self.tables = _native.Tables.create("", background=False)
        instance = self.tables.create_instance("m", "m@1", P)
        for schema in SCHEMAS:
            self.tables.create_table(
                schema.name, instance=instance.id, dim=schema.dim, dtype=schema.dtype,
                capacity=5000, feed="delta", expire_after=EXPIRE_AFTER,
            )  # fmt: skip
        native = NativeInstanceTables(self.tables, "m")
        self.driver = Driver(log, native, Letters(), bases)  # type: ignore[arg-type]
        if skip is not None:
            for partition, state in self.driver.states.items():
                state.skip_to(skip(partition))
            self.driver.subscription.close()
            self.driver.subscription = log.subscribe(
                {p: state.offset for p, state in self.driver.states.items()}
            )

    def walk(self) -> None:
        for table in self.tables.tables():
            self.tables.expire(table.id)

    def keys(self, table: str) -> list[int]:
        return sorted(self.tables.find("m@1", table).keys().tolist())


@pytest.mark.parametrize("seed", range(4))
def test_replicas_that_read_the_log_at_different_times_keep_the_same_rows(
    trainer: Trainer, seed: int
) -> None:
    random = np.random.default_rng(seed)
    eager = Replica(trainer.log)
    written: dict[int, float] = {}
    now = 0.0
    for _ in range(150):
        now += min(float(random.exponential(2.0)), EXPIRE_AFTER / 4)
        # A few publishers' clocks are wrong; event time is the highest that a commit may reach.
        shown = now + (100_000.0 if random.random() < 0.01 else 0.0)
        keys = random.integers(0, 2000, 20).tolist()
        trainer.version(keys, shown)
        written.update(dict.fromkeys(keys, now))
        if random.random() < 0.3:
            eager.driver.read()
            eager.walk()
    late = Replica(trainer.log)
    late.driver.read()
    late.walk()
    eager.driver.read()
    eager.walk()
    assert eager.keys("user") == late.keys("user")
    clocks = {t.name: t.status().event_time_ns for t in late.tables.tables()}
    assert clocks == {t.name: t.status().event_time_ns for t in eager.tables.tables()}
    if seed == 0:  # this one has no wrong clock, so the model is simple
        kept = set(late.keys("user"))
        assert {k for k, at in written.items() if at > now - EXPIRE_AFTER} <= kept
        assert not {k for k, at in written.items() if at < now - EXPIRE_AFTER * 50 / 48} & kept


def test_a_replica_that_begins_with_a_base_keeps_the_same_rows(
    trainer: Trainer, tmp_path: Path
) -> None:
    """The base carries the versions of its rows, and the event times."""
    random = np.random.default_rng(5)
    eager = Replica(trainer.log)
    now = 0.0
    for round_number in range(100):
        now += float(random.exponential(1.5))
        trainer.version(random.integers(0, 2000, 20).tolist(), now)
        if round_number == 88:  # rows of versions before the base and after it remain
            eager.driver.read()
            eager.walk()
            instance = eager.tables.resolve("m@1")
            petps.pool.export.write_base(eager.tables, instance, tmp_path / "bases" / "b")
            trainer.publisher.base("b")
    eager.driver.read()
    first = trainer.log.end_offsets(range(P))
    late = Replica(trainer.log, BaseFolder(tmp_path / "bases"), skip=lambda p: first[p] // 2)
    late.driver.run()
    assert all(state.catch_ups == 1 for state in late.driver.states.values())
    stamps = np.empty(2000, np.uint32), np.empty(2000, np.uint32)
    for replica, own in zip((eager, late), stamps, strict=True):
        replica.walk()
        keys = np.arange(2000, dtype=np.uint64)
        table = replica.tables.find("m@1", "user")
        own[:] = 0
        table.pull(keys, np.empty((2000, 4), np.float32), None, own)
    np.testing.assert_array_equal(*stamps)
    assert eager.keys("user") == late.keys("user")
    assert 0 < len(late.keys("user")) < 1000
    for name in ("user", "item"):
        of = [r.tables.clocks(r.tables.find("m@1", name).id) for r in (eager, late)]
        assert of[0] == of[1]


def test_a_base_without_event_times_leaves_those_of_the_table(tmp_path: Path) -> None:
    replica = Replica(DirectoryLog(tmp_path / "log", partitions=P))
    number = replica.tables.find("m@1", "user").id
    bounds = [9] + [0] * 49
    replica.tables.adopt_clock(number, 1, (SECOND_NS, START_NS, 8, bounds, START_NS, 5))
    assert replica.tables.clocks(number)[1] == (SECOND_NS, START_NS, 8, bounds, START_NS, 5)
    replica.tables.adopt_clock(
        number, 1, (SECOND_NS, START_NS + 5, 7, bounds, START_NS, 5)
    )  # older
    replica.tables.adopt_clock(number, 1, (0, 0, 90, bounds, 0, 0))  # none
    assert replica.tables.clocks(number)[1] == (SECOND_NS, START_NS, 8, bounds, START_NS, 5)
    replica.tables.adopt_clock(number, 1, (2 * SECOND_NS, START_NS, 10, [11] * 50, START_NS, 5))
    cell, _, version, changed, *_ = replica.tables.clocks(number)[1]
    assert (cell, version) == (SECOND_NS, 10)
    assert changed[0] == 11
    with pytest.raises(InvalidArgument, match="no partition 3"):
        replica.tables.adopt_clock(number, 3, (SECOND_NS, START_NS, 11, bounds, START_NS, 5))


def test_a_new_instance_of_a_model_expires_like_the_one_before() -> None:
    from petps.server.ingest.native_tables import NativeInstances

    class Nothing:
        name, model, instance, version, dense, partitions = "b", "m", "m@2", 5, None, P

        def schemas(self) -> dict[str, TableSchema]:
            return {schema.name: schema for schema in SCHEMAS}

        def rows(self, table: str) -> int:
            return 10

    tables = _native.Tables.create("", background=False)
    instance = tables.create_instance("m", "m@1", P)
    tables.create_table(
        "user", instance=instance.id, dim=4, dtype="f32", capacity=10, feed="delta",
        expire_after=77,
    )  # fmt: skip
    NativeInstances(tables, "m", switch=False).begin("m@2", Nothing(), 2)  # type: ignore[arg-type]
    assert tables.find("m@2", "user").record.expire_after == 77
    assert tables.find("m@2", "item").record.expire_after == 0
