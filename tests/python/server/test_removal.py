"""Removal of a partition from a pool: nothing else is touched, and a crash costs nothing."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import petps
from petps import _native
from petps.server.cluster import removal
from petps.server.cluster.removal import Stopped, remove_partition

PARTITIONS = 8
ALL = np.arange(2000, dtype=np.uint64)


@pytest.fixture
def tables(tmp_path: Path) -> _native.Tables:
    path = tmp_path / "pool"
    with petps.create(path, durability="process") as opened:
        opened.create_table("fed", dim=4, capacity=4000, feed="delta")
        opened.create_table("pushed", dim=4, capacity=4000)
        opened.push("pushed", ALL, np.ones((len(ALL), 4), np.float32))
    opened_tables = _native.Tables.open(str(path))
    fill(opened_tables, "default")
    return opened_tables


def fill(tables: _native.Tables, instance: str) -> None:
    record = tables.resolve(instance)
    rows = np.ones((len(ALL), 16), np.uint8)
    tables.find(record.name, "fed").apply(ALL, rows)
    for partition in range(PARTITIONS):
        tables.record_progress(
            _native.Progress(
                instance=record.id, partition=partition, run=3, seq=9, offset=11, version=5
            )
        )


def left(tables: _native.Tables, instance: str = "default", table: str = "fed") -> set[int]:
    return set(tables.find(tables.resolve(instance).name, table).keys().tolist())


def test_only_the_partition_goes(tables: _native.Tables) -> None:
    is_gone = _native.partition_of(ALL, PARTITIONS) == 3
    removed = remove_partition(
        tables, "default", 3, is_copied=True, held=nullcontext, may_go_on=lambda: True
    )
    assert removed == 2 * is_gone.sum()
    assert left(tables) == set(ALL[~is_gone].tolist())
    assert left(tables, table="pushed") == set(ALL[~is_gone].tolist())
    number = tables.resolve("default").id
    versions = [tables.progress(number, partition) for partition in range(PARTITIONS)]
    assert [0 if p is None else p.version for p in versions] == [5, 5, 5, 0, 5, 5, 5, 5]
    tables.close()


@pytest.mark.parametrize("batches", range(5))
def test_a_removal_that_is_cut_short_claims_nothing_and_ends_later(
    tables: _native.Tables, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "ROWS_OF_A_BATCH", 64)
    monkeypatch.setattr(removal, "KEYS_OF_A_SCAN", 100)
    asked = 0

    def may_go_on() -> bool:
        nonlocal asked
        asked += 1
        return asked <= batches

    with pytest.raises(Stopped):
        remove_partition(
            tables, "default", 3, is_copied=True, held=nullcontext, may_go_on=may_go_on
        )
    progress = tables.progress(tables.resolve("default").id, 3)
    assert progress is not None
    mine = _native.partition_of(ALL, PARTITIONS) == 3
    has_lost_rows = len(left(tables) & set(ALL[mine].tolist())) < mine.sum()
    assert progress.version == (0 if batches else 5)
    assert not (has_lost_rows and progress.version)
    remove_partition(tables, "default", 3, is_copied=True, held=nullcontext, may_go_on=lambda: True)
    assert left(tables) == set(ALL[~mine].tolist())
    tables.close()


def test_a_frozen_instance_keeps_its_rows(tables: _native.Tables) -> None:
    record = tables.create_instance("default", "default@2", PARTITIONS)
    tables.create_table("fed", instance=record.id, dim=4, dtype="f32", capacity=4000, feed="delta")
    fill(tables, "default@2")
    tables.set_alias("default", record.id)
    remove_partition(tables, "default", 3, is_copied=True, held=nullcontext, may_go_on=lambda: True)
    mine = _native.partition_of(ALL, PARTITIONS) == 3
    assert left(tables, "default@2") == set(ALL[~mine].tolist())
    old = next(entry for entry in tables.instances() if entry.frozen)
    progress = tables.progress(old.id, 3)
    assert progress is not None
    assert progress.version == 5
    assert left(tables, old.name) == set(ALL.tolist())
    tables.close()
