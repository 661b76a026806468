"""Partitions whose messages retention has removed, all of them, before a server reads any."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.delta.directory.frame import pack_segment_header
from petps.delta.directory.segments import partition_folder, segment_path
from petps.publish import Publisher
from petps.server.cluster.removal import remove_partition
from tests.python.ingest.world import P, World, write_rows
from tests.python.waiting import wait_until

SCHEMAS = [TableSchema("user", "f32", 4)]
KEYS = 200


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, SCHEMAS)
    yield world
    world.close()


def publish(folder: Path) -> None:
    """Publish version 1 of all rows, and write it as a base. Then empty the log."""
    log = DirectoryLog(folder / "log", partitions=P)
    publisher = Publisher(log, "m", tables=SCHEMAS)
    publisher.begin_continue(None)
    rows = np.full((KEYS, 4), 1, np.float32)
    publisher.publish("user", np.arange(KEYS, dtype=np.uint64), rows)
    publisher.commit()
    position = publisher.position()
    write_rows(
        folder / "bases" / "one",
        SCHEMAS,
        {"user": {key: rows[key].tobytes() for key in range(KEYS)}},
        partitions=P,
        positions={p: (position.run, position.seqs[p]) for p in range(P)},
        version=1,
        instance="m@1",
    )
    log.close()


def empty_log(folder: Path) -> None:
    """Remove all messages, as retention of Kafka does; the offsets go on."""
    log = DirectoryLog(folder / "log", partitions=P)
    ends = log.end_offsets(range(P))
    log.close()
    for partition, end in ends.items():
        segments = partition_folder(folder / "log", partition)
        shutil.rmtree(segments)
        segments.mkdir()
        segment_path(segments, end).write_bytes(pack_segment_header(partition, end))
    again = DirectoryLog(folder / "log", partitions=P)
    assert again.start_offsets(range(P)) == again.end_offsets(range(P)) == ends
    again.close()


def rows_of(world: World) -> set[float]:
    rows = np.empty((KEYS, 4), np.float32)
    world.tables.find("m@1", "user").pull(np.arange(KEYS, dtype=np.uint64), rows)
    return set(np.unique(rows).tolist())


def states(world: World) -> set[str]:
    return {partition.state for partition in world.ingest.status().partitions}


def wait_for_rounds(world: World) -> None:
    before = world.ingest.rounds() or 0
    wait_until(lambda: (world.ingest.rounds() or 0) > before + 3)


def test_a_new_pool_restores_the_newest_base(tmp_path: Path, world: World) -> None:
    world.reopen(())
    publish(tmp_path)
    empty_log(tmp_path)
    world.reopen()
    wait_until(lambda: rows_of(world) == {1.0})
    wait_until(lambda: states(world) == {"following"})
    assert {partition.gaps for partition in world.ingest.status().partitions} == {1}


def test_without_a_base_the_partitions_are_stale_until_one_comes(
    tmp_path: Path, world: World
) -> None:
    world.reopen(())
    publish(tmp_path)
    (tmp_path / "bases" / "one").rename(tmp_path / "kept")
    empty_log(tmp_path)
    world.reopen()
    wait_until(lambda: states(world) == {"stale"})
    assert "retention removed them" in world.ingest.status().partitions[0].reason
    (tmp_path / "kept").rename(tmp_path / "bases" / "one")
    wait_until(lambda: rows_of(world) == {1.0})


def test_a_partition_that_was_removed_is_restored(tmp_path: Path, world: World) -> None:
    publish(tmp_path)
    assert world.ingest.wait_for(1, 60)
    world.reopen(())
    remove_partition(
        world.tables, "m", 0, is_copied=False, held=nullcontext, may_go_on=lambda: True
    )
    assert rows_of(world) == {-1.0, 1.0}
    empty_log(tmp_path)
    world.reopen()
    wait_until(lambda: rows_of(world) == {1.0})


def test_rows_that_were_loaded_otherwise_are_kept(tmp_path: Path, world: World) -> None:
    world.reopen(())
    publish(tmp_path)
    empty_log(tmp_path)
    table = world.tables.find("m@1", "user")
    keys = np.arange(KEYS, dtype=np.uint64)
    table.apply(keys, np.full((KEYS, 4), 7, np.float32).view(np.uint8), None)
    world.reopen()
    wait_for_rounds(world)
    assert (states(world), rows_of(world)) == ({"following"}, {7.0})


def test_an_empty_log_that_never_held_anything_is_followed(world: World) -> None:
    wait_for_rounds(world)
    assert states(world) == {"following"}
