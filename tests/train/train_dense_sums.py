"""Dense gradients in buckets: the same bits as in one piece, on their way during the backward pass.

The models are small, so the tests lower the size of a bucket. Buckets of 1 MiB cross over gloo in
train_processes.py; the order on a device is checked in train_streams.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from petps.errors import InvalidArgument
from petps.train import dense_sums
from petps.train.batch import Batch
from petps.train.link import Link, Links
from petps.train.options import MODES, Mode, PipelineOptions
from petps.train.timeline import Timeline
from tests.train.rank_threads import Ranker, in_threads, open_pipeline, same, train

SEED = 5
GENEROUS = 120.0
pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(name="small_buckets")
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ranker's four parameters fill three buckets; its first weight is larger than one."""
    monkeypatch.setattr(dense_sums, "BUCKET_BYTES", 60)


def buckets_of(parameters: list[Any]) -> list[list[int]]:
    return dense_sums._divide(parameters)


def test_buckets_hold_the_last_parameters_first(small_buckets: None) -> None:
    # first.weight, first.bias (64 bytes), last.weight (64 bytes), last.bias (4 bytes)
    assert buckets_of(list(Ranker().parameters())) == [[3, 2], [1], [0]]
    assert buckets_of([]) == []
    assert buckets_of([torch.zeros(14), torch.zeros(15)]) == [[1]]  # the first fills none


@pytest.mark.parametrize("world", [2, 3])
def test_buckets_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    run: dict[str, Any] = {"micro_batches": 3, "seed": SEED, "steps": 12}
    reference = train("synchronous", world, **run)
    for size in (1, 60, 70):  # also parameters that fill no bucket
        monkeypatch.setattr(dense_sums, "BUCKET_BYTES", size)
        for mode in MODES:
            assert same(reference, train(mode, world, **run)), (mode, size)


class Late(torch.autograd.Function):  # type: ignore[misc]
    """The identity, whose backward pass waits for an event."""

    @staticmethod
    def forward(context: Any, values: Any, event: threading.Event) -> Any:
        context.event = event
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        assert context.event.wait(GENEROUS), "no bucket began during the backward pass"
        return gradient, None


class Waiting(Ranker):
    """A model whose first layer's backward pass waits until a bucket crosses, in the last pass."""

    def __init__(self, crossing: threading.Event) -> None:
        super().__init__()
        self.crossing = crossing
        self.passes = 0

    def forward(self, lookups: Any, batch: Batch) -> Any:
        self.passes += 1
        if self.passes % 2:
            return super().forward(lookups, batch)
        hidden = torch.relu(
            Late.apply(self.first(torch.ones(len(batch.dense["label"]), 30)), self.crossing)
        )
        return self.last(hidden).mean() + lookups["item"].pooled().mean()


class Noting:
    """A link that sets an event when a transfer begins."""

    def __init__(self, link: Link, began: threading.Event) -> None:
        self._link, self._began = link, began
        self.rank, self.world = link.rank, link.world

    def all_gather(self, values: Any) -> Any:
        self._began.set()
        return self._link.all_gather(values)


def test_the_first_bucket_crosses_during_the_backward_pass(small_buckets: None) -> None:
    def work(rank: int, links: Links) -> list[str]:
        began, timeline = threading.Event(), Timeline(keep=True)
        options = PipelineOptions(2, "nested", steps=1, deterministic=True)
        dense: Any = Noting(links.dense, began)
        links = replace(links, dense=dense)
        with open_pipeline(
            1, rank=rank, world=2, model=Waiting(began), links=links, options=options,
            timeline=timeline,
        ) as (_, pipeline):  # fmt: skip
            assert len(pipeline.run()) == 1
        return [span.stage for span in timeline.spans() if span.stage == "sum_bucket"]

    assert in_threads(2, work) == [["sum_bucket"] * 3] * 2


class Partial(Ranker):
    """A model of which some parameters have no gradient: on a rank, or in the last passes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.ones(40))  # by all ranks
        self.rank = rank
        self.passes = 0

    def forward(self, lookups: Any, batch: Batch) -> Any:
        self.passes += 1
        loss = super().forward(lookups, batch)
        if self.rank == 1 and self.passes % 2 == 0:  # never in the second micro-batch of rank 1
            return loss.detach() + lookups["item"].pooled().mean()
        return loss


@pytest.mark.parametrize("mode", MODES)
def test_parameters_without_a_gradient(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    def run(size: int) -> list[list[Any]]:
        monkeypatch.setattr(dense_sums, "BUCKET_BYTES", size)

        def work(rank: int, links: Links) -> list[Any]:
            model = Partial(rank)
            options = PipelineOptions(2, mode, deterministic=True)
            with open_pipeline(
                8, rank=rank, world=2, seed=SEED, model=model, lr=0.1, options=options, links=links
            ) as (_, pipeline):
                pipeline.run()
            return [parameter.detach() for parameter in model.parameters()]

        return in_threads(2, work)

    whole, buckets = run(1 << 20), run(60)
    for expected, actual in zip([*whole[0], *whole[0]], [*buckets[0], *buckets[1]], strict=True):
        assert torch.equal(expected, actual)


def test_a_bucket_that_is_not_finite_stops_all_ranks(small_buckets: None) -> None:
    class Poisoned(Ranker):
        def forward(self, lookups: Any, batch: Batch) -> Any:
            loss = super().forward(lookups, batch)
            if poisons:
                loss = loss + (self.last.bias * 0).sum().sqrt()  # its gradient is not finite
            return loss

    poisons = True

    def work(rank: int, links: Links) -> list[Any]:
        model = Poisoned() if rank else Ranker()
        options = PipelineOptions(2)
        with open_pipeline(
            3, rank=rank, world=2, seed=SEED, model=model, lr=0.1, options=options, links=links
        ) as (tables, pipeline):
            first = [parameter.detach().clone() for parameter in model.parameters()]
            with pytest.raises(InvalidArgument, match=r"step 1: .* is not finite; nothing"):
                pipeline.run()
            assert all(map(torch.equal, first, model.parameters()))
            assert all(len(table.keys()) == 0 for table in tables)
            return [hook for value in model.parameters() for hook in _hooks_of(value)]

    assert in_threads(2, work)


def _hooks_of(parameter: Any) -> Iterator[Any]:
    yield from (parameter._post_accumulate_grad_hooks or {}).values()


def test_a_closed_pipeline_leaves_no_hook(small_buckets: None) -> None:
    def work(rank: int, links: Links) -> tuple[int, int]:
        model = Ranker()
        with open_pipeline(2, rank=rank, world=2, model=model, links=links) as (_, pipeline):
            during = sum(1 for value in model.parameters() for _ in _hooks_of(value))
            pipeline.run()
        return during, sum(1 for value in model.parameters() for _ in _hooks_of(value))

    assert in_threads(2, work) == [(4, 0), (4, 0)]
