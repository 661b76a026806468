"""Instances: a base begins one, the alias switches to it and back, an old one is dropped.

The tables and the log are real. Not covered here: kills of the process (tests/system), and crash
states of the superblock (tests/crash).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from petps import _native
from petps.checkpoint import BaseFolder
from petps.delta import BaseBody, Kind, Record, RecordHeader, TableSchema, encode_record
from petps.delta.directory import DirectoryLog
from petps.errors import FailedPrecondition, InvalidArgument, NotFound
from petps.publish import Publisher
from petps.server.cluster.removal import remove_partition
from petps.server.ingest import DirectoryDeadLetters
from petps.server.ingest.applier import InlineApplier
from petps.server.ingest.dense import DenseLocations
from petps.server.ingest.follow import Follower
from petps.server.ingest.native_tables import NativeInstances, NativeInstanceTables
from petps.server.ingest.partition import PartitionState
from petps.server.ingest.protocols import Progress, Standing
from tests.python.ingest.world import P, World, damage_chunk, write_rows
from tests.python.waiting import wait_until

SCHEMAS = [TableSchema("user", "f32", 4), TableSchema("item", "f32", 8)]
KEYS = 300


def versions(world: World, instance: str) -> set[float]:
    """Return the versions of all rows of an instance: each value of a row is its version."""
    values: set[float] = set()
    for schema in SCHEMAS:
        table = world.tables.find(instance, schema.name)
        rows = np.empty((KEYS, schema.dim), np.float32)
        table.pull(np.arange(KEYS, dtype=np.uint64), rows)
        values |= set(np.unique(rows).tolist())
    return values


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, SCHEMAS)
    yield world
    world.close()


class Trainer:
    """A run that publishes all rows of both tables; each row holds its version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = DirectoryLog(folder / "log", partitions=P)
        self.publisher = Publisher(self.log, "m", tables=SCHEMAS)

    def base(self, name: str, *, instance: str | None = None) -> int:
        version = self.publisher.version + 1
        write_base(self.folder / "bases" / name, version, instance or "m")
        self.publisher.begin_base(name, version=version, instance=instance)
        return version

    def version(self) -> int:
        version = self.publisher.version + 1
        for schema in SCHEMAS:
            rows = np.full((KEYS, schema.dim), version, np.float32)
            self.publisher.publish(schema.name, np.arange(KEYS, dtype=np.uint64), rows)
        assert self.publisher.commit() == version
        return version

    def close(self) -> None:
        self.log.close()


def write_base(folder: Path, version: int, instance: str) -> None:
    rows = {
        schema.name: dict.fromkeys(
            range(KEYS), schema.encode(np.full((1, schema.dim), version, np.float32)).tobytes()
        )
        for schema in SCHEMAS
    }
    write_rows(
        folder,
        SCHEMAS,
        rows,
        partitions=P,
        positions={},
        version=version,
        instance=instance,
        dense=f"dense/{version}",
    )


def first_run(folder: Path, world: World) -> Trainer:
    """Publish version 1, which m@1 serves."""
    trainer = Trainer(folder)
    trainer.publisher.begin_continue(None)
    assert world.ingest.wait_for(trainer.version(), 60)
    assert versions(world, "m@1") == {1.0}
    return trainer


def test_a_base_begins_an_instance_and_the_alias_switches_to_it(
    tmp_path: Path, world: World
) -> None:
    first_run(tmp_path, world).close()
    trainer = Trainer(tmp_path)
    assert world.ingest.wait_for(trainer.base("two", instance="m@2"), 60)
    wait_until(lambda: world.current_instance == "m@2")
    assert world.names() == {"m@1": True, "m@2": False}
    assert versions(world, "m@2") == {2.0}
    assert world.ingest.status().dense == "dense/2"
    assert world.ingest.wait_for(trainer.version(), 60)
    assert versions(world, "m@2") == {3.0}
    assert versions(world, "m@1") == {1.0}, "frozen"
    table = world.tables.find("m@2", "user")
    assert table.record.capacity == 2000
    assert table.default_row().view(np.float32).tolist() == [-1] * 4
    world.reopen()
    assert world.current_instance == "m@2"
    assert world.ingest.wait_for(trainer.version(), 60)
    assert versions(world, "m@2") == {4.0}
    assert versions(world, "m@1") == {1.0}
    trainer.close()


def test_without_automatic_switch_the_alias_stays(tmp_path: Path, world: World) -> None:
    world.switch = False
    world.reopen()
    first_run(tmp_path, world).close()
    trainer = Trainer(tmp_path)
    trainer.base("two", instance="m@2")
    assert world.ingest.wait_for(trainer.version(), 60)
    assert versions(world, "m@2") == {3.0}
    assert world.current_instance == "m@1", "only a command switches"
    assert world.names() == {"m@1": False, "m@2": False}
    assert world.states() == {("m@2", "following")}
    world.tables.set_alias("m", world.tables.resolve("m@2").id)
    assert world.ingest.wait_for(trainer.version(), 60)
    assert versions(world, "m@2") == {4.0}
    assert versions(world, "m@1") == {1.0}
    trainer.close()


def test_a_rollback_freezes_the_new_instance_and_the_old_one_continues(
    tmp_path: Path, world: World
) -> None:
    first = first_run(tmp_path, world)
    position = first.publisher.position()
    first.close()
    bad = Trainer(tmp_path)
    assert world.ingest.wait_for(bad.base("two", instance="m@2"), 60)
    wait_until(lambda: world.current_instance == "m@2")
    world.tables.set_alias("m", world.tables.resolve("m@1").id)
    wait_until(lambda: world.states() == {("m@1", "passing")})
    # A decision that ingest made just before the switch must not undo it.
    NativeInstances(world.tables, "m", switch=True).complete(
        NativeInstanceTables(world.tables, "m@2")
    )
    assert world.current_instance == "m@1"
    last = bad.version()
    wait_until(lambda: not any(p.lag_records for p in world.ingest.status().partitions))
    assert versions(world, "m@2") == {2.0}, "the instance is frozen"
    assert versions(world, "m@1") == {1.0}
    world.reopen()
    assert world.current_instance == "m@1", "the restart does not switch again"
    bad.version()
    wait_until(lambda: world.states() == {("m@1", "passing")})
    bad.close()
    # A trainer restores the state of m@1, and continues.
    good = Trainer(tmp_path)
    good.publisher.begin_continue(position)
    version = good.version()
    assert version > last
    assert world.ingest.wait_for(version, 60)
    assert versions(world, "m@1") == {float(version)}
    assert world.states() == {("m@1", "following")}
    good.close()


def test_dropped_instances_are_not_created_again(tmp_path: Path, world: World) -> None:
    first_run(tmp_path, world).close()
    for name in ("m@2", "m@3"):
        trainer = Trainer(tmp_path)
        trainer.base(name, instance=name)
        assert world.ingest.wait_for(trainer.version(), 60)
        wait_until(lambda name=name: world.current_instance == name)  # type: ignore[misc]
        trainer.close()
    world.tables.set_alias("m", world.tables.resolve("m@1").id)
    with pytest.raises(FailedPrecondition, match="petps alias"):
        world.tables.drop_instance(world.tables.resolve("m@1").id)
    for name in ("m@3", "m@2"):
        world.tables.drop_instance(world.tables.resolve(name).id)
    wait_until(lambda: world.states() == {("m@1", "passing")})
    world.reopen()
    wait_until(lambda: world.states() == {("m@1", "passing")})
    wait_until(lambda: not any(p.lag_records for p in world.ingest.status().partitions))
    assert world.names() == {"m@1": False}
    assert versions(world, "m@1") == {1.0}
    fourth = Trainer(tmp_path)
    assert world.ingest.wait_for(fourth.base("four", instance="m@4"), 60)
    wait_until(lambda: world.current_instance == "m@4")
    fourth.close()


@pytest.mark.parametrize("then", ["drop", "continue"])
def test_partitions_read_from_the_start_create_no_dropped_instance(
    tmp_path: Path, world: World, then: str
) -> None:
    world.switch = False
    world.reopen(range(1, P))
    first = Trainer(tmp_path)
    first.publisher.begin_continue(None)
    assert world.ingest.wait_for(first.version(), 60)
    position = first.publisher.position()
    first.close()
    second = Trainer(tmp_path)
    assert world.ingest.wait_for(second.base("two", instance="m@2"), 60)
    second.close()
    world.tables.drop_instance(world.tables.resolve("m@2").id)
    wait_until(lambda: world.states() == {("m@1", "passing")})
    if then == "continue":
        third = Trainer(tmp_path)
        third.publisher.begin_continue(position)
        assert world.ingest.wait_for(third.version(), 60)
        third.close()
    world.reopen()
    state, version = ("passing", 1.0) if then == "drop" else ("following", 3.0)
    wait_until(lambda: versions(world, "m@1") == {version})
    wait_until(lambda: world.states() == {("m@1", state)})
    assert world.names() == {"m@1": False}
    # A later run may use the name again.
    again = Trainer(tmp_path)
    assert world.ingest.wait_for(again.base("three", instance="m@2"), 60)
    assert world.names() == {"m@1": False, "m@2": False}
    again.close()


@pytest.mark.parametrize("was_removed", [False, True])
def test_a_drop_makes_no_instance_that_is_not_loaded_yet_complete(
    tmp_path: Path, world: World, was_removed: bool
) -> None:
    first_run(tmp_path, world).close()
    second = Trainer(tmp_path)
    second.base("two", instance="m@2")
    assert world.ingest.wait_for(second.version(), 60)
    wait_until(lambda: world.current_instance == "m@2")
    second.close()
    world.switch = False
    world.reopen(range(1))
    third = Trainer(tmp_path)
    third.base("three", instance="m@3")
    assert world.ingest.wait_for(third.version(), 60)
    third.close()
    instance = world.tables.resolve("m@3").id

    def others() -> list[str]:
        return [str(world.tables.progress(instance, p)) for p in range(1, P)]

    if was_removed:  # as petps.server.cluster.removal leaves it
        blank = [
            _native.Progress(
                instance=instance, partition=p, run=0, seq=0, offset=0, version=0, target=3
            )
            for p in range(1, P)
        ]
        world.tables.record_all_progress(blank)
    before = others()
    world.tables.drop_instance(world.tables.resolve("m@1").id)
    assert world.tables.progress(instance, 0) is not None
    assert others() == before
    # With another record they would count as followed, and m@3 as complete.
    world.switch = True
    world.reopen()
    wait_until(lambda: world.current_instance == "m@3")
    wait_until(lambda: versions(world, "m@3") == {5.0})


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (Progress(0, run=2, version=5), True),
        (Progress(0, run=2, version=5, standing=Standing.PASSING, target=3), True),
        (Progress(0, version=5, offset=9), True),  # a base without a position
        (Progress(0, target=3), False),  # the partition was removed
        (Progress(0, offset=9, standing=Standing.PASSING, target=3), False),  # older runs
        (Progress(0, run=2, version=5, standing=Standing.CATCHING_UP), False),
    ],
)
def test_a_partition_is_loaded_once_something_of_the_instance_was_applied(
    progress: Progress, expected: bool
) -> None:
    assert PartitionState.of(0, progress, start=7).is_loaded is expected


def test_a_pool_whose_partitions_were_removed_creates_no_dropped_instance(
    tmp_path: Path, world: World
) -> None:
    first_run(tmp_path, world).close()
    for name in ("m@2", "m@3"):
        trainer = Trainer(tmp_path)
        trainer.base(name, instance=name)
        assert world.ingest.wait_for(trainer.version(), 60)
        wait_until(lambda name=name: world.current_instance == name)  # type: ignore[misc]
        trainer.close()
    for name in ("m@1", "m@2"):
        world.tables.drop_instance(world.tables.resolve(name).id)
    world.reopen(())
    for partition in range(P):  # the second time as after a crash
        for _ in range(2):
            remove_partition(
                world.tables, "m", partition, is_copied=False, held=nullcontext,
                may_go_on=lambda: True,
            )  # fmt: skip
    assert versions(world, "m@3") == {-1.0}
    world.reopen()
    assert world.ingest.wait_for(5, 60)
    assert world.current_instance == "m@3"
    assert world.names() == {"m@3": False}
    assert versions(world, "m@3") == {5.0}


def test_an_instance_can_be_dropped_while_it_is_written(tmp_path: Path, world: World) -> None:
    world.switch = False
    world.reopen()
    first_run(tmp_path, world).close()
    trainer = Trainer(tmp_path)
    trainer.base("two", instance="m@2")
    table = world.tables.find("m@1", "user")
    for _ in range(5):
        trainer.version()
    wait_until(lambda: "m@2" in world.names())
    world.tables.drop_instance(world.tables.resolve("m@2").id)
    with pytest.raises(NotFound):
        world.tables.find("m@2", "user")
    trainer.version()
    wait_until(lambda: world.ingest.status().error == "")
    assert table.status().rows == KEYS
    assert versions(world, "m@1") == {1.0}
    trainer.close()


def test_a_damaged_base_is_retried(tmp_path: Path, world: World) -> None:
    first_run(tmp_path, world).close()
    trainer = Trainer(tmp_path)
    write_base(tmp_path / "bases" / "two", 2, "m@2")
    path, whole, _ = damage_chunk(tmp_path / "bases" / "two", "item", 2, P)
    trainer.publisher.begin_base("two", version=2, instance="m@2")
    wait_until(lambda: ("m@2", "stale") in world.states())
    assert world.current_instance == "m@1", "the base is damaged"
    assert versions(world, "m@1") == {1.0}
    world.reopen()
    wait_until(lambda: ("m@2", "stale") in world.states())
    version = trainer.version()
    assert world.current_instance == "m@1"
    path.write_bytes(whole)
    assert world.ingest.wait_for(version, 60)
    wait_until(lambda: world.current_instance == "m@2")
    assert versions(world, "m@2") == {float(version)}
    trainer.close()


def test_ingest_waits_for_a_missing_base(tmp_path: Path, world: World) -> None:
    first_run(tmp_path, world).close()
    trainer = Trainer(tmp_path)
    trainer.publisher.begin_base("late", version=2, instance="m@2")
    wait_until(lambda: world.states() == {("m@1", "stale")})
    version = trainer.version()
    assert world.names() == {"m@1": False}
    write_base(tmp_path / "finished", 2, "m@2")
    shutil.move(tmp_path / "finished", tmp_path / "bases" / "late")
    assert world.ingest.wait_for(version, 60)
    wait_until(lambda: world.current_instance == "m@2")
    assert versions(world, "m@2") == {float(version)}
    trainer.close()


def test_each_partition_follows_its_own_run(tmp_path: Path, world: World) -> None:
    """Begin a run in only one partition, as a publisher does that is killed at that time."""
    first = first_run(tmp_path, world)
    write_base(tmp_path / "bases" / "two", 2, "m@2")
    header = RecordHeader(
        "m", Kind.BASE, first.publisher.run + 1, "other", 0, 1, 2, 1, partition=1, partitions=P
    )
    message = encode_record(Record(header, BaseBody(location="two", instance="m@2")))
    first.log.publish(1, message)
    first.log.flush()
    wait_until(lambda: world.states() == {("m@1", "following"), ("m@2", "following")})
    assert world.current_instance == "m@1"
    first.version()
    wait_until(
        lambda: (
            {(p.instance, p.version) for p in world.ingest.status().partitions}
            == {("m@1", 2), ("m@2", 2)}
        )
    )
    assert next(p for p in world.ingest.status().partitions if p.partition == 1).zombies > 0
    world.reopen()
    wait_until(lambda: world.states() == {("m@1", "following"), ("m@2", "following")})
    assert world.current_instance == "m@1", "an instance of one partition is not complete"
    first.close()


def test_a_base_of_another_instance_ends_no_gap(tmp_path: Path, world: World) -> None:
    trainer = first_run(tmp_path, world)
    trainer.publisher._seqs = [seq + 1 for seq in trainer.publisher._seqs]
    trainer.version()
    wait_until(lambda: world.states() == {("m@1", "stale")})
    position = trainer.publisher.position()
    write_rows(
        tmp_path / "bases" / "other",
        SCHEMAS,
        {schema.name: {} for schema in SCHEMAS},
        partitions=P,
        positions={p: (position.run, position.seqs[p]) for p in range(P)},
        version=9,
        instance="m@7",
    )
    assert not world.ingest.wait_for(9, 0.3)
    assert versions(world, "m@1") == {1.0}
    trainer.close()


def test_an_abandoned_catch_up_releases_the_pool(tmp_path: Path) -> None:
    """Abandon a catch-up after any number of steps, also during a scan, which holds the pool."""
    world = World(tmp_path, SCHEMAS, switch=False)
    assert world.ingest.stop(30)
    trainer = Trainer(tmp_path)
    trainer.base("one")
    trainer.close()
    instance = NativeInstanceTables(world.tables, "m")
    event = world.log.subscribe({0: 0}).poll(max_bytes=1 << 20, timeout=5)[0]
    held = 0
    for steps in range(12):
        state = PartitionState.of(0, None, 0)
        follower = Follower(
            instance,
            BaseFolder(tmp_path / "bases"),
            DirectoryDeadLetters(tmp_path / "dead"),
            {0: state},
            rows_max=30,
            pace=lambda rows: None,
            retry_until_done=lambda action: action(),
            applier=InlineApplier(),
        )
        follower.take(event)
        assert follower.catching_up == [0]
        for _ in range(steps):
            follower.advance_catch_up()
        try:
            world.tables.close()
        except FailedPrecondition:
            held += 1
            follower.close()
            world.tables.close()
        world.tables = _native.Tables.open(str(tmp_path / "pool"))
        instance = NativeInstanceTables(world.tables, "m")
    assert held > 0, "no catch-up was abandoned during a scan, so this tests nothing"
    world.tables.close()
    world.log.close()


def test_locations_of_dense_weights_survive_a_restart(tmp_path: Path, world: World) -> None:
    first_run(tmp_path, world).close()
    assert world.ingest.status().dense is None
    trainer = Trainer(tmp_path)
    assert world.ingest.wait_for(trainer.base("two", instance="m@2"), 60)
    wait_until(lambda: world.current_instance == "m@2")
    wait_until(lambda: world.ingest.status().dense == "dense/2")
    world.reopen()
    wait_until(lambda: world.ingest.status().dense == "dense/2")
    rows = np.zeros((1, 4), np.float32)
    trainer.publisher.publish("user", np.zeros(1, np.uint64), rows)
    version = trainer.publisher.commit(dense="dense/three")
    assert world.ingest.wait_for(version, 60)
    wait_until(lambda: world.ingest.status().dense == "dense/three")
    world.reopen()
    wait_until(lambda: world.ingest.status().dense == "dense/three")
    assert world.ingest.wait_for(trainer.version(), 60)
    wait_until(lambda: world.ingest.status().dense is None)
    world.reopen()
    wait_until(lambda: world.ingest.status().version == version + 1)
    assert world.ingest.status().dense is None, "that version has no dense weights"
    trainer.close()


def test_a_damaged_file_of_dense_weights_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "dense.json"
    for text in ("{", "[]", '{"m@1": 5}', '{"m@1": {"version": "x", "dense": 1}}'):
        path.write_text(text)
        names = DenseLocations(path)
        assert names.of("m@1") == (0, None)
        names.set("m@1", (3, "s3://three"))
        assert DenseLocations(path).of("m@1") == (3, "s3://three")


def test_bad_names_of_instances_are_refused(tmp_path: Path, world: World) -> None:
    trainer = Trainer(tmp_path)
    for name in ("m", "other@1", "m@", "m@a/b", "m@" + 70 * "x"):
        with pytest.raises(InvalidArgument, match="m@NAME"):
            trainer.publisher.begin_base("two", version=2, instance=name)
    trainer.close()
