"""The versions of rows that several ranks publish and store. No two of them read the same time.

Run by `make test-train`. Ranks are threads. tests/python/ingest/test_expiry_store.py has one rank.
"""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from petps.checkpoint import POLICIES, BaseFolder
from petps.checkpoint.served import ServedVersions
from petps.delta.directory import DirectoryLog
from petps.delta.schema import partition_of
from petps.train.link import Links
from petps.train.optimizer import Sgd
from petps.train.pipeline import Boundary
from petps.train.ranks import RankedOutput
from petps.train.removal import Removal
from petps.train.runs import publisher_of
from petps.train.schedule import Every
from petps.train.sharded import ShardedTables, TableSpec
from petps.train.stores import open_store
from tests.python.ingest.driver import SCHEMAS, P
from tests.python.ingest.test_expiry import SECOND_NS, START_NS, Replica
from tests.python.ingest.test_expiry_store import assert_same, follow
from tests.train.rank_threads import in_threads

KEYS = 600


class World:
    """Ranks in one folder. second: the time, to which each reading adds a millisecond."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.second = 0.0
        self._readings = itertools.count()
        self.log = self.open_log()  # only to read

    def open_log(self) -> DirectoryLog:
        return DirectoryLog(self.folder / "log", partitions=P, segment_bytes=4096)

    def now(self) -> int:
        return START_NS + round((self.second + next(self._readings) / 1000) * SECOND_NS)

    def train(self, ranks: int, steps: int) -> None:
        """Train up to a step, from the store's newest version. Each step is published."""
        in_threads(ranks, lambda rank, links: self._train(rank, links, ranks, steps))

    def _train(self, rank: int, links: Links, ranks: int, steps: int) -> None:
        specs = [
            TableSpec("user", 4, 5000, removal=Removal(steps_to_live=1000, every=500)),
            TableSpec("item", 2, 5000),
        ]
        with (
            closing(self.open_log()) as log,
            ShardedTables(None, specs, Sgd(0.1), rank=rank, world=ranks, partitions=P) as tables,
        ):
            store = open_store(
                self.folder / "store", "m", tables, links, quantising=None, stamps=True
            )
            publisher = publisher_of(log, "m", tables, links.dense, schemas=SCHEMAS)
            with RankedOutput(
                tables, links, store=store, policy=POLICIES["2d"](), publisher=publisher,
                checkpoint=Every(steps=10), publish=Every(steps=1), chunk_bytes=1 << 16,
                staging=self.folder / "staging",
            ) as output:  # fmt: skip
                restored = output.restore()
                output.begin_run(restored)
                for step in range(restored.step + 1, steps + 1):
                    self._step(step, tables)
                    links.keys.all_gather(torch.tensor([step]))
                    if rank == 0:
                        self.second = 2.0 * step
                    links.keys.all_gather(torch.tensor([step]))
                    output.act(Boundary(step, b"reader"))
                    output.wait()
                output.end(Boundary(steps, b"reader"))

    def _step(self, step: int, tables: ShardedTables) -> None:
        random = np.random.default_rng(step)
        for table in tables:
            keys = np.unique(random.integers(0, KEYS, 20)).astype(np.uint64)
            rows = random.standard_normal((len(keys), table.width)).astype(np.float32)
            own = tables.owns(keys)
            table.write_back(step, keys[own], rows[own])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_replicas_of_several_ranks_keep_the_same_rows(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second training continues with two ranks."""
    world = World(tmp_path)
    monkeypatch.setattr("petps.publish.publisher.time.time_ns", world.now)
    bases: Any = ServedVersions(
        str(tmp_path / "store"),
        BaseFolder(tmp_path / "bases"),
        lambda: {schema.name: schema for schema in SCHEMAS},
    )
    eager = Replica(world.log, bases)
    world.train(ranks, 20)
    follow(eager)
    world.train(2, 40)
    follow(eager)
    with closing(world.open_log()) as log:
        for partition, end in log.end_offsets(range(P)).items():
            log.trim(partition, end)
    world.train(2, 44)
    late = Replica(world.log, bases)
    follow(eager, late)
    assert all(state.catch_ups == 1 for state in late.driver.states.values())
    assert partition_of(np.arange(KEYS, dtype=np.uint64), P).max() == P - 1
    assert_same(eager, late)
    for table in eager.tables.tables():
        first, *others = eager.tables.clocks(table.id)
        assert others == [first] * (P - 1), "all partitions show the same time"
    world.train(2, 60)
    follow(eager, late)
    assert_same(eager, late)
