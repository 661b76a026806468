"""Rows without room: their partition stops, loses nothing, and continues once there is room."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import pytest

from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.delta.schema import partition_of
from petps.errors import ResourceExhausted
from petps.publish import Publisher
from petps.server.ingest import Ingest, Mode
from tests.python.ingest.conftest import Bench
from tests.python.ingest.driver import (
    SCHEMAS,
    Driver,
    P,
    StepApplier,
    publish_versions,
    rows_by_partition,
    stream_of,
)
from tests.python.ingest.model import ALWAYS, Letters, MemoryTables
from tests.python.ingest.world import World
from tests.python.waiting import wait_until

NATIVE_SCHEMAS = [TableSchema("user", "f32", 4)]


def keys_of(partition: int, count: int, partitions: int = P) -> np.ndarray:
    keys = np.arange(100 * count, dtype=np.uint64)
    chosen: np.ndarray = keys[partition_of(keys, partitions) == partition][:count]
    return chosen


def rows_of(keys: np.ndarray, value: float = 1) -> np.ndarray:
    return np.full((len(keys), 4), value, np.float32)


def states(ingest: Ingest) -> set[str]:
    return {partition.state for partition in ingest.health()}


def test_a_full_table_stops_its_partitions_and_loses_nothing(bench: Bench) -> None:
    table = bench.instance.by_name["user"]
    table.capacity = 5
    version = bench.publish(keys=10)
    wait_until(lambda: "full" in states(bench.ingest))
    wait_until(lambda: sum(bench.ingest.status().refused.values()) == 5)
    status = bench.ingest.status()
    assert status.version < version
    full_partitions = [p for p in status.partitions if p.state == "full"]
    for partition in full_partitions:
        assert "table 'user' is full (capacity 5)" in partition.reason
        assert partition.version < version
        assert partition.refusals >= 1
        assert partition.lag_records
    table.capacity = 10
    assert bench.ingest.wait_for(version, 60)
    assert len(table.rows) == 10
    wait_until(lambda: states(bench.ingest) == {"following"})
    assert bench.ingest.status().refused == {}


def test_a_full_disk_stops_the_partitions_until_there_is_space(bench: Bench) -> None:
    bench.instance.by_name["user"].failure = ResourceExhausted
    bench.instance.by_name["user"].fail_next = ALWAYS
    version = bench.publish()
    wait_until(lambda: states(bench.ingest) == {"full"})
    for partition in bench.ingest.status().partitions:
        assert "no space left on device" in partition.reason
        assert partition.version < version
    bench.instance.by_name["user"].fail_next = 0
    assert bench.ingest.wait_for(version, 60)
    assert len(bench.instance.by_name["user"].rows) == 50
    wait_until(lambda: states(bench.ingest) == {"following"})


class StoppedLog:
    """A log with one partition whose second version has no room."""

    def __init__(self, folder: Path) -> None:
        self.log = DirectoryLog(folder / "log", partitions=P)
        self.publisher = Publisher(self.log, "m", tables=SCHEMAS, run=3)
        self.publisher.begin_continue(None)
        self.instance = MemoryTables(SCHEMAS, P)
        self.table = self.instance.by_name["user"]
        self.table.capacity = 4
        self.publish(np.concatenate([keys_of(p, 1) for p in range(P)]))
        self.follow().close()
        self.publish(keys_of(0, 3))  # two new keys, with room for one
        self.publish(np.concatenate([keys_of(p, 1) for p in range(P)]), value=3)

    def publish(self, keys: np.ndarray, value: float = 1) -> None:
        self.publisher.publish("user", keys, rows_of(keys, value))
        self.publisher.commit()

    def follow(self) -> Driver:
        return Driver(self.log, self.instance, Letters()).run()

    def check_rows(self) -> None:
        """Check that the tables have every row of the log."""
        stream = stream_of(self.log, self.publisher.position())
        assert rows_by_partition(self.instance) == stream.final()


def test_only_the_partition_without_room_stops(tmp_path: Path) -> None:
    stopped = StoppedLog(tmp_path)
    driver = stopped.follow()
    assert {p: state.mode for p, state in driver.states.items()} == {
        0: Mode.FULL,
        1: Mode.FOLLOWING,
        2: Mode.FOLLOWING,
    }
    # Versions before the first record without room count; nothing after it is applied.
    assert [state.recorded.version for state in driver.states.values()] == [1, 3, 3]
    assert stopped.table.rows[int(keys_of(0, 1)[0])] == rows_of(keys_of(0, 1)).tobytes()
    assert driver.states[0].health("m@1", None).state == "full"
    driver.close()
    # A restart keeps this state, with room or without.
    for _ in range(2):
        driver = stopped.follow()
        assert driver.states[0].mode is Mode.FULL
        assert driver.states[0].recorded.version == 1
        driver.close()
    stopped.table.capacity = 5
    driver = stopped.follow()
    assert {state.recorded.version for state in driver.states.values()} == {3}
    assert all(state.full is None for state in driver.states.values())
    stopped.check_rows()
    driver.close()


def test_another_partitions_deletion_makes_room(tmp_path: Path) -> None:
    stopped = StoppedLog(tmp_path)
    driver = stopped.follow()
    gone = keys_of(1, 1)
    stopped.publisher.publish("user", gone, rows_of(gone), np.ones(1, np.bool_))
    stopped.publisher.commit()
    wait_until(lambda: {s.recorded.version for s in driver.run().states.values()} == {4})
    stopped.check_rows()
    driver.close()


def test_a_version_that_replaces_keys_fits_in_a_full_table(tmp_path: Path) -> None:
    """Publish new keys before the deletions that make room for them."""
    log = DirectoryLog(tmp_path / "log", partitions=P)
    publisher = Publisher(log, "m", tables=SCHEMAS)
    publisher.begin_continue(None)
    old, new = np.arange(50), np.arange(100, 150)
    publisher.publish("user", old, rows_of(old))
    publisher.commit()
    instance = MemoryTables(SCHEMAS, P)
    instance.by_name["user"].capacity = 50
    driver = Driver(log, instance, Letters()).run()
    publisher.publish("user", new, rows_of(new))
    publisher.publish("user", old, rows_of(old), np.ones(50, np.bool_))
    publisher.commit()
    driver.run()
    assert {state.recorded.version for state in driver.states.values()} == {2}
    assert set(instance.by_name["user"].rows) == set(new.tolist())
    assert sum(state.refusals for state in driver.states.values()) == 0
    driver.close()


def test_a_refusal_at_any_line_of_the_reading_thread_loses_no_row(tmp_path: Path) -> None:
    stopped = StoppedLog(tmp_path)
    stream = stream_of(stopped.log, stopped.publisher.position())
    recorded_before = dict(stopped.instance.recorded)
    rows_before = dict(stopped.table.rows)
    for steps in count():
        stopped.instance.recorded = dict(recorded_before)
        stopped.table.rows = dict(rows_before)
        stopped.table.capacity = 4
        applier = StepApplier(steps)
        driver = Driver(stopped.log, stopped.instance, Letters(), rows_max=1, applier=applier)
        with applier.stepping():
            driver.run()
        rows = rows_by_partition(stopped.instance)
        for p, state in driver.states.items():
            place = (p, state.recorded.run, state.recorded.seq)
            if state.is_following:
                assert rows[p] == stream.rows_at(*place), f"after {steps} lines: {place}"
        assert driver.states[0].recorded.version == 1, f"after {steps} lines"
        stopped.table.capacity = 5
        for state in driver.states.values():
            state.retry_at = 0.0
        driver.run()
        driver.close()
        assert rows_by_partition(stopped.instance) == stream.final(), f"after {steps} lines"
        if applier.steps >= 0:  # the block had fewer lines
            break
    assert steps > 100


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_stored_in_the_end(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    log = DirectoryLog(tmp_path / "log", partitions=P)
    publisher = Publisher(log, "m", tables=SCHEMAS, run=5)
    publisher.begin_continue(None)
    instance = MemoryTables(SCHEMAS, P)
    for table in instance.by_name.values():
        table.capacity = int(rng.integers(1, 30))
    rows_max = int(rng.integers(1, 100))
    applier = StepApplier(0, lambda: int(rng.integers(0, 200)))
    driver = Driver(log, instance, Letters(), rows_max=rows_max, applier=applier)
    before = [0] * P
    for _ in range(8):
        publish_versions(publisher, rng, 2)
        with applier.stepping():
            driver.run()
        versions = [state.recorded.version for state in driver.states.values()]
        assert all(new >= old for new, old in zip(versions, before, strict=True))
        before = versions
        if rng.random() < 0.3:
            driver.close()
            driver = Driver(log, instance, Letters(), rows_max=rows_max, applier=applier)
        if rng.random() < 0.5:
            name = SCHEMAS[int(rng.integers(0, 2))].name
            instance.by_name[name].capacity += int(rng.integers(1, 20))
        assert all(len(table.rows) <= table.capacity for table in instance.by_name.values())
    driver.run()
    stream = stream_of(log, publisher.position())
    rows = rows_by_partition(instance)
    for p, state in driver.states.items():
        if state.is_following:
            assert rows[p] == stream.rows_at(p, state.recorded.run, state.recorded.seq)
    for table in instance.by_name.values():
        table.capacity = 1 << 30
    wait_until(lambda: {s.recorded.version for s in driver.run().states.values()} == {16})
    assert rows_by_partition(instance) == stream.final()
    driver.close()


def check_stopped(world: World, version: int) -> None:
    wait_until(lambda: "full" in states(world.ingest))
    wait_until(lambda: sum(world.ingest.status().refused.values()) == 100)
    assert world.tables.applied_version(world.tables.resolve("m").id) < version
    assert world.tables.find("m@1", "user").status().rows == 2000


def test_a_full_pool_loses_no_row(tmp_path: Path) -> None:
    """Write more than the capacity of 2,000 rows: stop, restart, delete rows, continue."""
    world = World(tmp_path, NATIVE_SCHEMAS)
    log = DirectoryLog(tmp_path / "log", partitions=4)
    publisher = Publisher(log, "m", tables=NATIVE_SCHEMAS)
    publisher.begin_continue(None)
    first = np.arange(1900, dtype=np.uint64)
    publisher.publish("user", first, rows_of(first, 1))
    assert world.ingest.wait_for(publisher.commit(), 60)
    second = np.arange(1850, 2100, dtype=np.uint64)
    publisher.publish("user", second, rows_of(second, 2))
    version = publisher.commit()
    check_stopped(world, version)
    world.reopen()
    check_stopped(world, version)
    gone = first[:150]
    world.tables.find("m@1", "user").apply(gone, None, np.ones(150, np.bool_))
    assert world.ingest.wait_for(version, 60)
    stored = world.stored(NATIVE_SCHEMAS[0])
    assert sorted(stored) == list(range(150, 2100))
    assert {stored[key] for key in range(1850, 2100)} == {rows_of(first[:1], 2).tobytes()}
    wait_until(lambda: states(world.ingest) == {"following"})
    log.close()
    world.close()
