"""A server catches up from the checkpoint store automatically, also after kill -9 on the way.

A TrainerOutput writes log and store, and retention removes log entries that the server needs.
It does not cover every instant of a catch-up (tests/python/ingest/test_catch_up_store.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import petps
from petps.checkpoint import POLICIES, Column, Store, Table
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.publish import Publisher
from petps.train import ArrayTable, TrainerOutput
from petps.train.tracker import Tracker
from tests.seed import SEED
from tests.system.servers import Server, connect, wait_until

pytestmark = pytest.mark.system

P, DIM, ROWS = 8, 4, 60_000
SCHEMA = TableSchema("items", "f32", DIM)
KILLS = 3
# At this rate a catch-up takes half a minute without kills, so there is time for them.
CONFIG = """
[pool]
path = "{folder}/pool"
durability = "process"
[ingest]
log = "{folder}/log"
store = "{folder}/store"
rows_per_second = {rate}
[server]
grpc = false
"""


class Trainer:
    """Trainer of one table of float32 rows with one sum per row. It deletes some rows."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        tracker = Tracker()
        self.rows = np.zeros((ROWS, DIM), np.float32)
        self.present = np.zeros(ROWS, np.bool_)
        sums = np.zeros(ROWS, np.float32)
        self.table = ArrayTable(
            tracker, "items", self.rows, columns={"sum": sums}, present=self.present
        )
        columns = (Column("row", "f32", DIM), Column("sum", "f32", 1))
        self.log = DirectoryLog(folder / "log", partitions=P, segment_bytes=1 << 16)
        publisher = Publisher(self.log, "default", tables=[SCHEMA])
        publisher.begin_continue(None)
        self.feed = TrainerOutput(
            tracker,
            [self.table],
            store=Store.create(folder / "store", "default", [Table("items", columns)]),
            policy=POLICIES["2d"](),
            publisher=publisher,
        )
        self.version = 0

    def train(self, rows: int) -> None:
        ids = self.random.choice(ROWS, rows, replace=False)
        self.table.update(ids, self.random.standard_normal((rows, DIM), np.float32))
        self.table.delete(ids[: rows // 10])

    def checkpoint(self) -> None:
        self.version += 1
        self.feed.checkpoint(self.version, publish=True)
        self.feed.arrange()

    @property
    def published_version(self) -> int:
        assert self.feed.publisher is not None
        return self.feed.publisher.version

    def retention(self) -> None:
        """Remove everything from the log."""
        for partition, end in self.log.end_offsets(range(P)).items():
            self.log.trim(partition, end)


def ingest_of(server: Server) -> dict[str, Any]:
    # Ingest starts after serving.
    return server.status().get("ingest") or {"version": 0, "partitions": []}


def wait_for(
    server: Server, event: str, condition: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Return the report of ingest once it fulfils the condition."""

    def ingest_if() -> dict[str, Any] | None:
        ingest = ingest_of(server)
        return ingest if condition(ingest) else None

    ingest = wait_until(event, ingest_if)
    assert ingest is not None
    return ingest


def wait_for_version(server: Server, version: int) -> dict[str, Any]:
    return wait_for(server, f"version {version}", lambda ingest: ingest["version"] == version)


def states(ingest: dict[str, Any]) -> set[str]:
    return {partition["state"] for partition in ingest["partitions"]}


def assert_serves(server: Server, trainer: Trainer) -> None:
    """Check every key, including the deleted ones."""
    with connect(server.url) as client:
        rows, found = client.pull("items", np.arange(ROWS, dtype=np.uint64), return_mask=True)
    np.testing.assert_array_equal(found, trainer.present)
    np.testing.assert_array_equal(rows[found], trainer.rows[found])


def test_a_server_that_is_killed_during_catch_ups_catches_up(
    tmp_path: Path, serve: Callable[..., Server]
) -> None:
    chance = random.Random(SEED)
    pool = tmp_path / "pool"
    with petps.create(pool, durability="process") as opened:
        opened.create_table("items", dim=DIM, capacity=2 * ROWS, feed="delta")
    trainer = Trainer(tmp_path, SEED)
    trainer.train(20_000)
    trainer.checkpoint()
    config = tmp_path / "petps.toml"

    config.write_text(CONFIG.format(folder=tmp_path, rate=0))
    server = serve(pool, "--config", config)
    wait_for_version(server, trainer.published_version)
    assert_serves(server, trainer)
    server.end()

    for _ in range(4):
        trainer.train(20_000)
        trainer.checkpoint()
    trainer.retention()
    config.write_text(CONFIG.format(folder=tmp_path, rate=1500))
    for _ in range(KILLS):
        server = serve(pool, "--config", config)
        ingest = wait_for(server, "a catch-up", lambda ingest: "catching_up" in states(ingest))
        assert {partition["catch_ups"] for partition in ingest["partitions"]} == {0}
        time.sleep(chance.uniform(0, 1.0))
        assert "catching_up" in states(ingest_of(server)), "the catch-up ended before the kill"
        server.kill()
    config.write_text(CONFIG.format(folder=tmp_path, rate=0))
    server = serve(pool, "--config", config)
    ingest = wait_for_version(server, trainer.published_version)
    assert {partition["catch_ups"] for partition in ingest["partitions"]} == {1}
    assert states(ingest) == {"following"}
    assert_serves(server, trainer)

    trainer.train(5_000)  # the server must follow the log again
    wait_for_version(server, trainer.feed.publish())
    assert_serves(server, trainer)
    server.end()
    trainer.log.close()
