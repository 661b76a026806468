"""The training loop: whatever overlaps, the rows end as if nothing did.

Run by `make test-train`, in an environment that has PyTorch. Ranks are threads (rank_threads.py).
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from petps.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from petps.train import lookup
from petps.train.batch import Batch, Ragged
from petps.train.link import Links, LoneLink
from petps.train.optimizer import Adam, RowwiseAdagrad, Sgd
from petps.train.options import Mode, PipelineOptions
from petps.train.pipeline import Boundary, Pipeline
from petps.train.routing import route_keys
from petps.train.sharded import ShardedTables, TableSpec
from petps.train.timeline import Timeline
from petps.train.tracker import Tracker
from tests.train.rank_threads import (
    FEATURES,
    SPECS,
    Loader,
    Ranker,
    in_threads,
    open_pipeline,
    same,
    specs_with,
    train,
)

SEED = 11
MODES: tuple[Mode, ...] = ("dual", "frozen", "nested")
pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize(("world", "micro_batches"), [(2, 1), (2, 3), (4, 2)])
def test_two_hundred_steps_end_bit_identical(world: int, micro_batches: int) -> None:
    run: dict[str, Any] = {"steps": 200, "micro_batches": micro_batches, "seed": SEED}
    reference = train("synchronous", world, **run)
    assert len(reference["losses"]) == 200
    for mode in MODES:
        assert same(reference, train(mode, world, **run)), mode
    assert not same(reference, train("stale", world, **run)), "the test cannot see staleness"


@pytest.mark.parametrize("optimizer", [Sgd(0.1), RowwiseAdagrad(0.1), Adam(0.1)])
def test_every_optimizer(optimizer: Any) -> None:
    reference = train("synchronous", 2, optimizer=optimizer)
    assert all(same(reference, train(mode, 2, optimizer=optimizer)) for mode in MODES)


@pytest.mark.parametrize("case", range(12))
def test_any_overlap_of_keys(case: int) -> None:
    """0 to 100 % of the keys are hot; empty batches and micro-batches; 1 to 4 ranks."""
    random = np.random.default_rng((SEED, case))
    overlap = [0.0, 1.0, *random.random(10)][case]
    world, micro_batches = int(random.integers(1, 5)), int(random.integers(1, 6))
    threshold = int(random.integers(1, 4))
    specs = specs_with(threshold)
    print(f"{overlap=} {world=} {micro_batches=} {threshold=}")

    def loader(rank: int) -> Iterator[Batch]:
        # Batches of 0 to 6 samples; ranks end at different times.
        return iter(Loader(case, rank, 18 + rank, samples=3, overlap=overlap, ids=200))

    run: dict[str, Any] = {"micro_batches": micro_batches, "specs": specs, "loader": loader}
    reference = train("synchronous", world, **run)
    assert len(reference["losses"]) == 18 + world - 1
    for mode in MODES:
        assert same(reference, train(mode, world, **run), specs), mode


def test_one_hot_key_in_every_sample() -> None:
    def loader(rank: int) -> Iterator[Batch]:
        for batch in Loader(SEED, rank, 30):
            keys = {n: Ragged(np.full_like(r.keys, 7), r.offsets) for n, r in batch.keys.items()}
            yield Batch(keys, batch.dense, batch.reader)

    reference = train("synchronous", 4, loader=loader, micro_batches=4)
    assert len(reference["item"][0]) == 1
    assert all(same(reference, train(m, 4, loader=loader, micro_batches=4)) for m in MODES)


def test_a_key_of_every_second_batch() -> None:
    """The key is in no intersection: its row comes from the pool, after that row's write-back."""

    def loader(rank: int) -> Iterator[Batch]:
        for batch in Loader(SEED, rank, 40):
            key = 1 + int(batch.reader) % 2
            keys = {n: Ragged(np.full_like(r.keys, key), r.offsets) for n, r in batch.keys.items()}
            yield Batch(keys, batch.dense, batch.reader)

    reference = train("synchronous", 2, loader=loader)
    assert all(same(reference, train(mode, 2, loader=loader)) for mode in MODES)


def test_a_step_without_a_fixed_order_is_close() -> None:
    exact = train("synchronous", 4, steps=1, micro_batches=2)
    for mode in MODES:
        loose = train(mode, 4, steps=1, micro_batches=2, deterministic=False)
        both = [(torch.cat([p.ravel() for p in result["dense"]])) for result in (exact, loose)]
        assert float((both[0] - both[1]).norm() / both[0].norm()) <= 1e-6
        for spec in SPECS:
            left, right = exact[spec.name][1], loose[spec.name][1]
            assert np.linalg.norm(left - right) <= 1e-6 * np.linalg.norm(left)


class Poisoned(Ranker):
    """A model whose gradients are not finite in rank 1's third batch."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def forward(self, lookups: Any, batch: Batch) -> Any:
        loss = super().forward(lookups, batch)
        if self._rank == 1 and batch.reader == b"3":
            rows = lookups["shop"].rows
            loss = loss + (rows * 0).sum().sqrt()  # the loss is finite, its gradient is not
        return loss


@pytest.mark.parametrize("mode", ["synchronous", "nested"])
def test_a_gradient_that_is_not_finite_stops_all_ranks(mode: Mode) -> None:
    seen: list[str] = []
    mutex = threading.Lock()

    def work(rank: int, links: Links) -> tuple[int, list[Any]]:
        model, options = Poisoned(rank), PipelineOptions(2, mode)
        with open_pipeline(
            9, rank=rank, world=2, seed=SEED, model=model, lr=0.1, options=options, links=links
        ) as (tables, pipeline):
            steps: list[Any] = []
            with pytest.raises(InvalidArgument) as raised:
                steps.extend(iter(pipeline))
            with mutex:
                seen.append(str(raised.value))
            with pytest.raises(FailedPrecondition, match="has ended: InvalidArgument: step 3"):
                pipeline.step()
            pipeline.close()
            rows = [table.gather(table.keys()).columns["row"] for table in tables]
            assert all(np.isfinite(row).all() for row in rows)
            return len(steps), [parameter.detach() for parameter in model.parameters()]

    results = in_threads(2, work)
    assert [steps for steps, _ in results] == [2, 2]
    assert all(torch.isfinite(parameter).all() for _, dense in results for parameter in dense)
    assert all("step 3" in message and "ranks 1)" in message for message in seen)
    assert sum("the gradient of table shop, key " in message for message in seen) == 1


def test_training_can_stop_between_any_two_steps() -> None:
    """Stages of other ranks have begun later batches by then. None hangs; all rows exist."""
    whole = train("nested", 2, steps=7)

    def work(rank: int, links: Links) -> dict[str, Any]:
        options = PipelineOptions(2, deterministic=True)
        with open_pipeline(
            50, rank=rank, world=2, lr=0.01, options=options, links=links
        ) as (tables, pipeline):  # fmt: skip
            for step in pipeline:
                if step.number == 7:
                    break
            pipeline.close()
            return {table.name: table.gather(table.keys()).columns["row"] for table in tables}

    results = in_threads(2, work)
    for spec in SPECS:
        left = np.sort(whole[spec.name][1][:, : spec.dim], axis=0)
        right = np.sort(np.concatenate([result[spec.name] for result in results]), axis=0)
        assert np.array_equal(left, right)


class Recording:
    """A hook: rank 0 wants steps 3 and 6; all ranks act, after all rows are written."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.acted: list[tuple[int, bytes]] = []

    def wants(self, step: int) -> bool:
        return self.rank == 0 and step % 3 == 0

    def act(self, boundary: Boundary) -> None:
        self.acted.append((boundary.step, boundary.reader))

    def end(self, boundary: Boundary) -> None:
        self.acted.append((-boundary.step, boundary.reader))


@pytest.mark.parametrize("mode", ["synchronous", "nested"])
def test_hooks_act_on_all_ranks_at_the_same_step(mode: Mode) -> None:
    def work(rank: int, links: Links) -> Any:
        hook = Recording(rank)
        options = PipelineOptions(mode=mode)
        with open_pipeline(
            8, rank=rank, world=2, options=options, links=links, hooks=[hook]
        ) as (_, pipeline):  # fmt: skip
            pipeline.run()
            assert pipeline.step() is None
        return hook.acted

    for acted in in_threads(2, work):
        # Not the state of a batch that was read ahead; and the end of the loaders, once.
        assert acted == [(3, b"3"), (6, b"6"), (-8, b"8")]


def test_a_full_table_is_named() -> None:
    specs = [TableSpec("item", 8, 40), *SPECS[1:]]
    with pytest.raises(ResourceExhausted, match=r"table item is full: it holds 40 rows"):
        train("nested", 1, specs=specs, steps=40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": {"history": "items"}}, "features name table 'items', but the tables are: "),
        ({"features": {}}, "feature 'history' has no table"),
        ({"links": Links.alone()}, "got rank 0 of 1 and rank 1 of 2"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    world = 2 if "links" in arguments else 1
    options = PipelineOptions(mode="synchronous")
    given: dict[str, Any] = {"features": FEATURES, "options": options} | arguments
    with (
        ShardedTables(None, SPECS, Sgd(0.1), rank=world - 1, world=world) as tables,
        pytest.raises(InvalidArgument, match=message),
    ):
        Pipeline(Ranker(), tables, iter(Loader(1, 0, 5)), **given).run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode must be one of nested, dual, .*, got 'fast'"),
        ({"micro_batches": 0}, "micro_batches must be at least 1, got 0"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        PipelineOptions(**options)


class Held(LoneLink):
    """A link on which the keys of batch 2 cross only once batch 3 is routed."""

    def __init__(self, routed: threading.Event) -> None:
        self.routed = routed
        self.calls = 0

    def all_to_all(self, send: Any, sends: Sequence[int], receives: Sequence[int]) -> Any:
        self.calls += 1  # two a batch: the numbers of keys, then the keys
        assert self.calls < 3 or self.routed.wait(120), "routing waits for keys to cross"
        return super().all_to_all(send, sends, receives)


def test_a_batch_is_routed_while_earlier_keys_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    routed = threading.Event()
    numbers = itertools.count(1)

    def counted(*arguments: Any) -> Any:
        requests = route_keys(*arguments)
        if next(numbers) == 3:
            routed.set()
        return requests

    monkeypatch.setattr(lookup, "route_keys", counted)
    links = replace(Links.alone(), keys=Held(routed))
    with open_pipeline(6, links=links) as (_, pipeline):
        assert len(pipeline.run()) == 6


def test_a_timeline_has_every_stage(tmp_path: Path) -> None:
    timeline = Timeline(keep=True)
    with open_pipeline(6, options=PipelineOptions(2), timeline=timeline) as (_, pipeline):
        assert len(pipeline.run()) == 6
    timeline.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    stages = {"prefetch", "to-device", "route", "exchange", "retrieve", "freshen", "dense"}
    stages |= {"write-back", "send_rows", "take_gradients", "update", "reduce", "wait"}
    assert {event["name"] for event in events if event["ph"] == "X"} == stages
    dense = [event for event in events if event["name"] == "dense"]
    assert sorted((event["args"]["batch"], event["args"]["micro"]) for event in dense) == [
        (batch, micro) for batch in range(1, 7) for micro in range(2)
    ]
    read = Timeline.read(tmp_path / "trace.json")
    moments = [(span.begin, span.end) for span in read.spans()]
    assert moments == [pytest.approx((span.begin, span.end), abs=1e-5) for span in timeline.spans()]
    assert [replace(span, begin=0, end=0) for span in read.spans()] == [
        replace(span, begin=0, end=0, processor=None) for span in timeline.spans()
    ]
    timeline.draw(tmp_path / "line.svg", batches=2)
    drawn = (tmp_path / "line.svg").read_text()
    assert "batch 6" in drawn
    assert "batch 4" not in drawn


@pytest.mark.parametrize("mode", ["synchronous", "nested"])
def test_tracked_keys_are_compacted_behind_the_batches(mode: Mode) -> None:
    """Without that, a version waits for the compaction of all keys since the last one."""
    timeline = Timeline(keep=True)
    options = PipelineOptions(mode=mode)
    with open_pipeline(30, options=options, timeline=timeline) as (tables, pipeline):
        tables.tracker.add_tenant("checkpoint")
        sizes = []
        for _ in pipeline:
            sizes.append(tables.tracker.resident_bytes)
        distinct = sum(len(tables.tracker.read("checkpoint").ids(t.name)) for t in tables)
    assert {span.track for span in timeline.spans() if span.stage == "compact"} == {"write-back"}
    assert max(sizes) <= 8 * 3 * distinct + 8 * 200  # 3 times the distinct keys, and one batch


def test_a_compaction_that_fails_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tracker: Tracker) -> int:
        raise ResourceExhausted("the spill folder is full")

    monkeypatch.setattr(Tracker, "compact", fail)
    with (
        open_pipeline(30) as (_, pipeline),
        pytest.raises(ResourceExhausted, match="the spill folder is full"),
    ):
        pipeline.run()
