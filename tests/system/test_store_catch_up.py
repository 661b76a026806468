"""A server catches up from the checkpoint store automatically, also after kill -9 on the way.

A TrainerOutput writes log and store, and retention removes log entries that the server needs.
Does not cover: every instant of a catch-up (tests/python/ingest/test_catch_up_store.py).
"""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import petps_client
import pytest

import petps
from petps.checkpoint import POLICIES, Column, Store, Table
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.publish import Publisher
from petps.train import ArrayTable, TrainerOutput
from petps.train.tracker import Tracker
from tests.seed import SEED
from tests.system.test_serve import Process

pytestmark = pytest.mark.system

P, DIM, ROWS = 8, 4, 60_000
SCHEMA = TableSchema("items", "f32", DIM)
KILLS = 3
SECONDS = 120.0
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
port = 0
http_port = 0
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

    def retention(self) -> None:
        for partition, end in self.log.end_offsets(range(P)).items():
            self.log.trim(partition, end)


def ingest_of(facts: dict[str, Any]) -> dict[str, Any]:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{facts['http_port']}/status.json", timeout=30
    ) as reply:
        status: dict[str, Any] = json.load(reply)
    return status.get("ingest") or {"version": 0, "partitions": []}  # ingest starts after serving


def wait_until(
    facts: dict[str, Any], condition: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    deadline = time.monotonic() + SECONDS
    while True:
        ingest = ingest_of(facts)
        if condition(ingest):
            return ingest
        assert time.monotonic() < deadline, json.dumps(ingest)
        time.sleep(0.02)


def states(ingest: dict[str, Any]) -> set[str]:
    return {partition["state"] for partition in ingest["partitions"]}


def assert_serves(facts: dict[str, Any], trainer: Trainer) -> None:
    """Check every key, including the deleted ones."""
    with petps_client.connect(f"petps://127.0.0.1:{facts['port']}/default") as client:
        rows, found = client.pull("items", np.arange(ROWS, dtype=np.uint64), return_mask=True)
    np.testing.assert_array_equal(found, trainer.present)
    np.testing.assert_array_equal(rows[found], trainer.rows[found])


def end(process: Process) -> None:
    """Stop a server that has logged a stale partition: its standard error is not empty."""
    process.child.terminate()
    assert process.child.wait(SECONDS) == 0, process.errors


def test_killed_while_it_catches_up(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    pool = tmp_path / "pool"
    with petps.create(pool, durability="process") as opened:
        opened.create_table("items", dim=DIM, capacity=2 * ROWS, feed="delta")
    trainer = Trainer(tmp_path, SEED)
    trainer.train(20_000)
    trainer.checkpoint()
    config = tmp_path / "petps.toml"

    config.write_text(CONFIG.format(folder=tmp_path, rate=0))
    process = Process(pool, "--config", config)
    facts = process.wait_ready()
    version = trainer.feed.publisher.version  # type: ignore[union-attr]
    wait_until(facts, lambda ingest: ingest["version"] == version)
    assert_serves(facts, trainer)
    end(process)

    for _ in range(4):
        trainer.train(20_000)
        trainer.checkpoint()
    trainer.retention()
    config.write_text(CONFIG.format(folder=tmp_path, rate=1500))
    for _ in range(KILLS):
        process = Process(pool, "--config", config)
        facts = process.wait_ready()
        ingest = wait_until(facts, lambda ingest: "catching_up" in states(ingest))
        assert {partition["catch_ups"] for partition in ingest["partitions"]} == {0}
        time.sleep(chance.uniform(0, 1.0))
        assert "catching_up" in states(ingest_of(facts)), "the catch-up ended before the kill"
        process.kill()
    config.write_text(CONFIG.format(folder=tmp_path, rate=0))
    process = Process(pool, "--config", config)
    facts = process.wait_ready()
    version = trainer.feed.publisher.version  # type: ignore[union-attr]
    ingest = wait_until(facts, lambda ingest: ingest["version"] == version)
    assert {partition["catch_ups"] for partition in ingest["partitions"]} == {1}
    assert states(ingest) == {"following"}
    assert_serves(facts, trainer)

    trainer.train(5_000)  # the server must follow the log again
    version = trainer.feed.publish()
    wait_until(facts, lambda ingest: ingest["version"] == version)
    assert_serves(facts, trainer)
    end(process)
    trainer.log.close()
