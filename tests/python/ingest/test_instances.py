"""Instances: a base begins one, the alias switches to it and back, an old one is dropped.

Real tables, a real log. Does not cover: kills of the process (tests/system), crash states of the
superblock (tests/crash).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from petps import _native
from petps.checkpoint import BaseFolder
from petps.delta import BaseBody, Kind, Record, RecordHeader, TableSchema, encode_record
from petps.delta.directory import DirectoryLog
from petps.errors import FailedPrecondition, InvalidArgument, NotFound
from petps.publish import Publisher
from petps.server.ingest import DirectoryDeadLetters
from petps.server.ingest.applier import InlineApplier
from petps.server.ingest.dense import DenseNames
from petps.server.ingest.follow import Follower
from petps.server.ingest.native_tables import NativeInstances, NativeInstanceTables
from petps.server.ingest.partition import PartitionState
from tests.python.ingest.test_follow import wait_until
from tests.python.ingest.world import P, World, write_rows

SCHEMAS = [TableSchema("user", "f32", 4), TableSchema("item", "f32", 8)]
KEYS = 300


def versions(world: World, instance: str) -> set[float]:
    """Return the versions of all rows of an instance: each value of a row is its version."""
    found: set[float] = set()
    for schema in SCHEMAS:
        table = world.tables.find(instance, schema.name)
        rows = np.empty((KEYS, schema.dim), np.float32)
        table.pull(np.arange(KEYS, dtype=np.uint64), rows)
        found |= set(np.unique(rows).tolist())
    return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[list[World]]:
    """Yield the open world in a list, so that a test that reopens it can replace it."""
    holder = [World(tmp_path, SCHEMAS)]
    yield holder
    holder[0].close()


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
    assert world.ingest.wait_for(trainer.version(), 30)
    assert versions(world, "m@1") == {1.0}
    return trainer


def test_a_base_begins_an_instance_that_is_switched_to(tmp_path: Path, world: list[World]) -> None:
    first_run(tmp_path, world[0]).close()
    trainer = Trainer(tmp_path)
    assert world[0].ingest.wait_for(trainer.base("two", instance="m@2"), 30)
    wait_until(lambda: world[0].current_instance == "m@2")
    assert world[0].names() == {"m@1": True, "m@2": False}
    assert versions(world[0], "m@2") == {2.0}
    assert world[0].ingest.status().dense == "dense/2"
    assert world[0].ingest.wait_for(trainer.version(), 30)
    assert versions(world[0], "m@2") == {3.0}
    assert versions(world[0], "m@1") == {1.0}, "frozen"
    table = world[0].tables.find("m@2", "user")
    assert table.record.capacity == 2000
    assert table.default_row().view(np.float32).tolist() == [-1] * 4
    world[0] = world[0].reopened()
    assert world[0].current_instance == "m@2"
    assert world[0].ingest.wait_for(trainer.version(), 30)
    assert versions(world[0], "m@2") == {4.0}
    assert versions(world[0], "m@1") == {1.0}
    trainer.close()


def test_by_command_only(tmp_path: Path, world: list[World]) -> None:
    world[0].switch = False
    world[0] = world[0].reopened()
    first_run(tmp_path, world[0]).close()
    trainer = Trainer(tmp_path)
    trainer.base("two", instance="m@2")
    assert world[0].ingest.wait_for(trainer.version(), 30)
    assert versions(world[0], "m@2") == {3.0}
    assert world[0].current_instance == "m@1", "side by side, until somebody says so"
    assert world[0].names() == {"m@1": False, "m@2": False}
    assert world[0].states() == {("m@2", "following")}
    world[0].tables.set_alias("m", world[0].tables.resolve("m@2").id)
    assert world[0].ingest.wait_for(trainer.version(), 30)
    assert versions(world[0], "m@2") == {4.0}
    assert versions(world[0], "m@1") == {1.0}
    trainer.close()


def test_back_and_on_from_there(tmp_path: Path, world: list[World]) -> None:
    first = first_run(tmp_path, world[0])
    position = first.publisher.position()
    first.close()
    bad = Trainer(tmp_path)
    assert world[0].ingest.wait_for(bad.base("two", instance="m@2"), 30)
    wait_until(lambda: world[0].current_instance == "m@2")
    world[0].tables.set_alias("m", world[0].tables.resolve("m@1").id)
    wait_until(lambda: world[0].states() == {("m@1", "passing")})
    # A decision that ingest made just before the switch must not undo it.
    NativeInstances(world[0].tables, "m", switch=True).complete(
        NativeInstanceTables(world[0].tables, "m@2")
    )
    assert world[0].current_instance == "m@1"
    last = bad.version()
    wait_until(lambda: not any(p.lag_records for p in world[0].ingest.status().partitions))
    assert versions(world[0], "m@2") == {2.0}, "it was left, so it is frozen"
    assert versions(world[0], "m@1") == {1.0}
    world[0] = world[0].reopened()
    assert world[0].current_instance == "m@1", "and not switched to again"
    bad.version()
    wait_until(lambda: world[0].states() == {("m@1", "passing")})
    bad.close()
    # A trainer restores the state of m@1, and continues.
    good = Trainer(tmp_path)
    good.publisher.begin_continue(position)
    version = good.version()
    assert version > last
    assert world[0].ingest.wait_for(version, 30)
    assert versions(world[0], "m@1") == {float(version)}
    assert world[0].states() == {("m@1", "following")}
    good.close()


def test_the_dropped_do_not_come_back(tmp_path: Path, world: list[World]) -> None:
    first_run(tmp_path, world[0]).close()
    for name in ("m@2", "m@3"):
        trainer = Trainer(tmp_path)
        trainer.base(name, instance=name)
        assert world[0].ingest.wait_for(trainer.version(), 30)
        wait_until(lambda name=name: world[0].current_instance == name)  # type: ignore[misc]
        trainer.close()
    world[0].tables.set_alias("m", world[0].tables.resolve("m@1").id)
    with pytest.raises(FailedPrecondition, match="petps alias"):
        world[0].tables.drop_instance(world[0].tables.resolve("m@1").id)
    for name in ("m@3", "m@2"):
        world[0].tables.drop_instance(world[0].tables.resolve(name).id)
    wait_until(lambda: world[0].states() == {("m@1", "passing")})
    world[0] = world[0].reopened()
    wait_until(lambda: world[0].states() == {("m@1", "passing")})
    wait_until(lambda: not any(p.lag_records for p in world[0].ingest.status().partitions))
    assert world[0].names() == {"m@1": False}
    assert versions(world[0], "m@1") == {1.0}
    fourth = Trainer(tmp_path)
    assert world[0].ingest.wait_for(fourth.base("four", instance="m@4"), 30)
    wait_until(lambda: world[0].current_instance == "m@4")
    fourth.close()


@pytest.mark.parametrize("then", ["drop", "go on"])
def test_the_dropped_do_not_come_back_in_partitions_that_are_followed_anew(
    tmp_path: Path, world: list[World], then: str
) -> None:
    world[0].switch = False
    world[0] = world[0].reopened(range(1, P))
    first = Trainer(tmp_path)
    first.publisher.begin_continue(None)
    assert world[0].ingest.wait_for(first.version(), 30)
    position = first.publisher.position()
    first.close()
    second = Trainer(tmp_path)
    assert world[0].ingest.wait_for(second.base("two", instance="m@2"), 30)
    second.close()
    world[0].tables.drop_instance(world[0].tables.resolve("m@2").id)
    wait_until(lambda: world[0].states() == {("m@1", "passing")})
    if then == "go on":
        third = Trainer(tmp_path)
        third.publisher.begin_continue(position)
        assert world[0].ingest.wait_for(third.version(), 30)
        third.close()
    world[0] = world[0].reopened()
    state, version = ("passing", 1.0) if then == "drop" else ("following", 3.0)
    wait_until(lambda: versions(world[0], "m@1") == {version})
    wait_until(lambda: world[0].states() == {("m@1", state)})
    assert world[0].names() == {"m@1": False}
    # A later run may use the name again.
    again = Trainer(tmp_path)
    assert world[0].ingest.wait_for(again.base("three", instance="m@2"), 30)
    assert world[0].names() == {"m@1": False, "m@2": False}
    again.close()


def test_dropped_while_it_is_written(tmp_path: Path, world: list[World]) -> None:
    world[0].switch = False
    world[0] = world[0].reopened()
    first_run(tmp_path, world[0]).close()
    trainer = Trainer(tmp_path)
    trainer.base("two", instance="m@2")
    table = world[0].tables.find("m@1", "user")
    for _ in range(5):
        trainer.version()
    dropped = world[0].tables.find
    wait_until(lambda: "m@2" in world[0].names())
    world[0].tables.drop_instance(world[0].tables.resolve("m@2").id)
    with pytest.raises(NotFound):
        dropped("m@2", "user")
    trainer.version()
    wait_until(lambda: world[0].ingest.status().error == "")
    assert table.status().rows == KEYS
    assert versions(world[0], "m@1") == {1.0}
    trainer.close()


def test_a_base_that_is_damaged_is_tried_again(tmp_path: Path, world: list[World]) -> None:
    first_run(tmp_path, world[0]).close()
    trainer = Trainer(tmp_path)
    write_base(tmp_path / "bases" / "two", 2, "m@2")
    chunk = next((tmp_path / "bases" / "two").glob("item-p0002-*"))
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-1])
    trainer.publisher.begin_base("two", version=2, instance="m@2")
    wait_until(lambda: ("m@2", "stale") in world[0].states())
    assert world[0].current_instance == "m@1", "not all of it is there"
    assert versions(world[0], "m@1") == {1.0}
    world[0] = world[0].reopened()
    wait_until(lambda: ("m@2", "stale") in world[0].states())
    version = trainer.version()
    assert world[0].current_instance == "m@1"
    chunk.write_bytes(whole)
    assert world[0].ingest.wait_for(version, 30)
    wait_until(lambda: world[0].current_instance == "m@2")
    assert versions(world[0], "m@2") == {float(version)}
    trainer.close()


def test_a_base_that_is_missing_is_waited_for(tmp_path: Path, world: list[World]) -> None:
    first_run(tmp_path, world[0]).close()
    trainer = Trainer(tmp_path)
    trainer.publisher.begin_base("late", version=2, instance="m@2")
    wait_until(lambda: world[0].states() == {("m@1", "stale")})
    version = trainer.version()
    assert world[0].names() == {"m@1": False}
    write_base(tmp_path / "made", 2, "m@2")
    shutil.move(tmp_path / "made", tmp_path / "bases" / "late")
    assert world[0].ingest.wait_for(version, 30)
    wait_until(lambda: world[0].current_instance == "m@2")
    assert versions(world[0], "m@2") == {float(version)}
    trainer.close()


def test_partitions_follow_where_their_run_goes(tmp_path: Path, world: list[World]) -> None:
    """Kill a publisher while it begins a run: one partition has the new run, the others do not."""
    first = first_run(tmp_path, world[0])
    write_base(tmp_path / "bases" / "two", 2, "m@2")
    header = RecordHeader(
        "m", Kind.BASE, first.publisher.run + 1, "other", 0, 1, 2, 1, partition=1, partitions=P
    )
    message = encode_record(Record(header, BaseBody(location="two", instance="m@2")))
    first.log.publish(1, message)
    first.log.flush()
    wait_until(lambda: world[0].states() == {("m@1", "following"), ("m@2", "following")})
    assert world[0].current_instance == "m@1"
    first.version()
    wait_until(
        lambda: (
            {(p.instance, p.version) for p in world[0].ingest.status().partitions}
            == {("m@1", 2), ("m@2", 2)}
        )
    )
    assert next(p for p in world[0].ingest.status().partitions if p.partition == 1).zombies > 0
    world[0] = world[0].reopened()
    wait_until(lambda: world[0].states() == {("m@1", "following"), ("m@2", "following")})
    assert world[0].current_instance == "m@1", "an instance of one partition is not complete"
    first.close()


def test_an_older_base_of_another_instance_mends_no_gap(tmp_path: Path, world: list[World]) -> None:
    trainer = first_run(tmp_path, world[0])
    trainer.publisher._seqs = [seq + 1 for seq in trainer.publisher._seqs]
    trainer.version()
    wait_until(lambda: world[0].states() == {("m@1", "stale")})
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
    assert not world[0].ingest.wait_for(9, 0.3)
    assert versions(world[0], "m@1") == {1.0}
    trainer.close()


def test_a_catch_up_that_is_broken_off_holds_nothing(tmp_path: Path) -> None:
    """Break a catch-up off after any number of steps, also within a scan, which holds the pool."""
    world = World(tmp_path, SCHEMAS, switch=False)
    assert world.ingest.stop(30)
    trainer = Trainer(tmp_path)
    trainer.base("one")
    trainer.close()
    store = NativeInstanceTables(world.tables, "m")
    event = world.log.subscribe({0: 0}).poll(max_bytes=1 << 20, timeout=5)[0]
    held = 0
    for steps in range(12):
        state = PartitionState.of(0, None, 0)
        follower = Follower(
            store,
            BaseFolder(tmp_path / "bases"),
            DirectoryDeadLetters(tmp_path / "dead"),
            {0: state},
            rows_max=30,
            pace=lambda rows: None,
            until_done=lambda action: action(),
            applier=InlineApplier(),
        )
        follower.take(event)
        assert follower.catching_up == [0]
        for _ in range(steps):
            follower.step()
        try:
            world.tables.close()
        except FailedPrecondition:
            held += 1
            follower.close()
            world.tables.close()
        world.tables = _native.Tables.open(str(tmp_path / "pool"))
        store = NativeInstanceTables(world.tables, "m")
    assert held > 0, "no step was amid a scan: this tests nothing"
    world.tables.close()
    world.log.close()


def test_dense_weights_are_known_after_a_restart(tmp_path: Path, world: list[World]) -> None:
    first_run(tmp_path, world[0]).close()
    assert world[0].ingest.status().dense is None
    trainer = Trainer(tmp_path)
    assert world[0].ingest.wait_for(trainer.base("two", instance="m@2"), 30)
    wait_until(lambda: world[0].current_instance == "m@2")
    wait_until(lambda: world[0].ingest.status().dense == "dense/2")
    world[0] = world[0].reopened()
    wait_until(lambda: world[0].ingest.status().dense == "dense/2")
    rows = np.zeros((1, 4), np.float32)
    trainer.publisher.publish("user", np.zeros(1, np.uint64), rows)
    version = trainer.publisher.commit(dense="dense/three")
    assert world[0].ingest.wait_for(version, 30)
    wait_until(lambda: world[0].ingest.status().dense == "dense/three")
    world[0] = world[0].reopened()
    wait_until(lambda: world[0].ingest.status().dense == "dense/three")
    assert world[0].ingest.wait_for(trainer.version(), 30)
    wait_until(lambda: world[0].ingest.status().dense is None)
    world[0] = world[0].reopened()
    wait_until(lambda: world[0].ingest.status().version == version + 1)
    assert world[0].ingest.status().dense is None, "that version has none"
    trainer.close()


def test_a_damaged_file_of_dense_weights_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "dense.json"
    for text in ("{", "[]", '{"m@1": 5}', '{"m@1": {"version": "x", "dense": 1}}'):
        path.write_text(text)
        names = DenseNames(path)
        assert names.of("m@1") == (0, None)
        names.note("m@1", (3, "s3://three"))
        assert DenseNames(path).of("m@1") == (3, "s3://three")


def test_names_of_instances(tmp_path: Path, world: list[World]) -> None:
    trainer = Trainer(tmp_path)
    for name in ("m", "other@1", "m@", "m@a/b", "m@" + 70 * "x"):
        with pytest.raises(InvalidArgument, match="m@NAME"):
            trainer.publisher.begin_base("two", version=2, instance=name)
    trainer.close()
