"""A publisher, a directory log, and ingest into real tables of a pool, which is reopened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.publish import Publisher
from tests.python.ingest.world import P, World, write_rows
from tests.python.waiting import wait_until

SCHEMAS = [TableSchema("user", "f32", 16), TableSchema("item", "int8", 8)]
SPACE = 500


@pytest.fixture
def served(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, SCHEMAS)
    yield world
    world.close()


class Trainer:
    """Publisher of random rows of both tables; it keeps the rows that a server should hold."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.log = DirectoryLog(folder / "log", partitions=P)
        self.publisher = Publisher(self.log, "m", tables=SCHEMAS)
        self.rows: dict[str, dict[int, bytes]] = {schema.name: {} for schema in SCHEMAS}

    def version(self) -> int:
        for schema in SCHEMAS:
            n = int(self.rng.integers(1, 300))
            keys = self.rng.integers(0, SPACE, n, dtype=np.uint64)
            rows = self.rng.standard_normal((n, schema.dim), dtype=np.float32)
            deleted = self.rng.random(n) < 0.2
            self.publisher.publish(schema.name, keys, rows, deleted)
            table_rows = self.rows[schema.name]
            for key, row, is_deleted in zip(
                keys.tolist(), schema.encode(rows), deleted, strict=True
            ):
                if is_deleted:
                    table_rows.pop(key, None)
                else:
                    table_rows[key] = row.tobytes()
        return self.publisher.commit()


def check(served: World, trainer: Trainer) -> None:
    for schema in SCHEMAS:
        assert served.stored(schema) == trainer.rows[schema.name]


def test_a_reopened_pool_continues_to_follow(tmp_path: Path, served: World) -> None:
    trainer = Trainer(tmp_path, 1)
    trainer.publisher.begin_continue(None)
    for round_number in range(3):
        for _ in range(10):
            version = trainer.version()
        assert served.ingest.wait_for(version, 60)
        check(served, trainer)
        instance = served.tables.resolve("m").id
        assert served.tables.applied_version(instance) == version
        progress = served.tables.progress(instance, 0)
        assert progress is not None
        assert progress.seq == trainer.publisher.position().seqs[0]
        served.reopen()
        check(served, trainer)
        assert served.ingest.status().error == "", round_number
    trainer.log.close()


def write_base(
    folder: Path, trainer: Trainer, positions: dict[int, tuple[int, int]], version: int
) -> None:
    write_rows(
        folder,
        SCHEMAS,
        trainer.rows,
        partitions=P,
        positions=positions,
        version=version,
        instance="m@1",
    )


def test_a_new_run_begins_with_a_base_and_a_base_ends_a_gap(tmp_path: Path, served: World) -> None:
    trainer = Trainer(tmp_path, 2)
    trainer.publisher.begin_continue(None)
    assert served.ingest.wait_for(trainer.version(), 60)
    trainer.log.close()
    # A trainer of other rows begins a run with a base.
    other = Trainer(tmp_path, 3)
    for schema in SCHEMAS:
        rows = other.rng.standard_normal((700, schema.dim), dtype=np.float32)
        stored = schema.encode(rows)
        other.rows[schema.name] = {key: stored[key].tobytes() for key in range(700)}
    write_base(tmp_path / "bases" / "new", other, {}, 50)
    other.publisher.begin_base("new", version=50)
    assert served.ingest.wait_for(50, 60)
    check(served, other)
    assert served.ingest.wait_for(other.version(), 60)
    check(served, other)
    # The log loses messages; the next base repairs that.
    other.publisher._seqs = [seq + 2 for seq in other.publisher._seqs]
    version = other.version()
    wait_until(lambda: {p.state for p in served.ingest.status().partitions} == {"stale"})
    assert not served.ingest.wait_for(version, 0.3)
    position = other.publisher.position()
    positions = {p: (position.run, position.seqs[p]) for p in range(P)}
    write_base(tmp_path / "bases" / "repair", other, positions, version)
    assert served.ingest.wait_for(version, 60)
    check(served, other)
    assert all(p.catch_ups == 2 for p in served.ingest.status().partitions)
    other.log.close()
