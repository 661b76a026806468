"""Pipelines that decide about clustering themselves, over a link whose speed depends on the keys.

Does not cover: the rule itself (tests/python/train/test_where_pays.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from petps.errors import InvalidArgument
from petps.train import Batch, PipelineOptions, Ragged, where_pays
from petps.train.batch import divide
from petps.train.clustering import Clustering
from petps.train.link import Links
from petps.train.optimizer import Sgd
from petps.train.pipeline import Pipeline
from petps.train.sharded import ShardedTables, TableSpec
from tests.train.rank_threads import in_threads

WORLD, SAMPLES, KEYS = 2, 64, 40
STEPS = 72  # the last step of a short trial is 66
pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Rows(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, lookups: Any, batch: Batch) -> Any:
        return (lookups["item"].pooled() @ self.weight).mean()


class PerRow:
    """A link on which each row takes a time of its own."""

    def __init__(self, link: Any, seconds: float) -> None:
        self._link, self._seconds = link, seconds
        self.rank, self.world = link.rank, link.world

    def all_to_all(self, send: Any, sends: Sequence[int], receives: Sequence[int]) -> Any:
        time.sleep(self._seconds * sum(sends))
        return self._link.all_to_all(send, sends, receives)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


def load_sessions(batches: int) -> Iterator[Batch]:
    """Yield samples of two sessions in turn, each with its own keys."""
    for _ in range(batches):
        keys = [np.arange(KEYS, dtype=np.uint64) + KEYS * (n % 2) for n in range(SAMPLES)]
        yield Batch(
            {"item": Ragged(np.concatenate(keys), np.arange(SAMPLES + 1, dtype=np.int64) * KEYS)}
        )


def decide(world: int, seconds_per_row: float, options: PipelineOptions, steps: int) -> list[Any]:
    """Return what each rank's pipeline has decided: None if it decides nothing."""

    def train(rank: int, links: Links) -> bool | None:
        links = replace(links, rows=PerRow(links.rows, seconds_per_row))
        model = Rows()
        specs = [TableSpec("item", 4, 1000)]
        with (
            ShardedTables(None, specs, Sgd(0.01), rank=rank, world=world) as tables,
            Pipeline(
                model, tables, load_sessions(steps), options=options, links=links,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            ) as pipeline,
        ):  # fmt: skip
            pipeline.run()
            decider = pipeline._where_pays
            return None if decider is None else decider.pays

    return in_threads(world, train)


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where_pays, "FIRST_TRIAL", 2)
    monkeypatch.setattr(where_pays, "BLOCK", 16)
    monkeypatch.setattr(where_pays, "SETTLING", 4)


@pytest.mark.parametrize("mode", ["nested", "synchronous"])
def test_a_slow_link_makes_clustering_pay(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the rows cross only once; they take longer than anything else."""
    monkeypatch.setattr(where_pays, "LOSS_STEPS", 1000)  # a stall of the machine is no loss
    options = PipelineOptions(2, mode)
    assert decide(WORLD, 0.15e-3, options, steps=STEPS) == [True, True]


@pytest.mark.parametrize("mode", ["nested", "synchronous"])
def test_clustering_that_only_costs_time_does_not_pay(
    monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """It seems to save half of the keys, but changes no order."""

    def spin(keys: Any, micro_batches: int, **options: Any) -> Clustering:
        end = time.monotonic() + 0.05  # more than another test beside this one costs
        while time.monotonic() < end:
            pass
        samples = np.arange(SAMPLES)
        return Clustering(samples, np.array(divide(SAMPLES, micro_batches)), 1, 4, 2)

    monkeypatch.setattr(where_pays, "cluster", spin)
    assert decide(WORLD, 0.0, PipelineOptions(2, mode), steps=STEPS) == [False, False]


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, PipelineOptions(2)),
        (WORLD, PipelineOptions(1)),
        (WORLD, PipelineOptions(2, deterministic=True)),
        (WORLD, PipelineOptions(2, arrange=None)),
    ],
    ids=["one rank", "one micro-batch", "equal bits", "not asked to"],
)
def test_nothing_is_decided_where_nothing_can_be_gained(
    world: int, options: PipelineOptions
) -> None:
    assert decide(world, 0.0, options, steps=4) == [None] * world


def test_another_word_than_auto_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="arrange must be 'auto', None or a function"):
        PipelineOptions(2, arrange="often")  # type: ignore[arg-type]
