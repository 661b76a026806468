"""The training loop: whatever overlaps, the rows end as if nothing did.

Run by `make test-train`, in an environment that has PyTorch. Ranks are threads (rank_threads.py).
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Sequence
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
from tests.train.rank_threads import FEATURES, SPECS, Loader, Ranker, in_threads, same, train

SEED = 11
MODES: tuple[Mode, ...] = ("dual", "frozen", "nested")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    specs = [TableSpec(each.name, each.dim, each.capacity, threshold=threshold) for each in SPECS]
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


def test_without_a_fixed_order_one_step_is_close() -> None:
    exact = train("synchronous", 4, steps=1, micro_batches=2)
    for mode in MODES:
        loose = train(mode, 4, steps=1, micro_batches=2, deterministic=False)
        both = [(torch.cat([p.ravel() for p in each["dense"]])) for each in (exact, loose)]
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
def test_a_gradient_that_is_not_finite(mode: Mode) -> None:
    seen: list[str] = []
    mutex = threading.Lock()

    def work(rank: int, links: Links) -> tuple[int, list[Any]]:
        model = Poisoned(rank)
        with ShardedTables(None, SPECS, Adam(0.1), rank=rank, world=2) as tables:
            pipeline = Pipeline(
                model, tables, iter(Loader(SEED, rank, 9)),
                options=PipelineOptions(2, mode), links=links, features=FEATURES,
                optimizer=torch.optim.SGD(model.parameters(), 0.1),
            )  # fmt: skip
            steps: list[Any] = []
            with pytest.raises(InvalidArgument) as raised:
                steps.extend(iter(pipeline))
            with mutex:
                seen.append(str(raised.value))
            with pytest.raises(FailedPrecondition, match="has ended: InvalidArgument: step 3"):
                pipeline.step()
            pipeline.close()
            rows = [table.gather(table.keys()).columns["row"] for table in tables]
            assert all(np.isfinite(each).all() for each in rows)
            return len(steps), [each.detach() for each in model.parameters()]

    found = in_threads(2, work)
    assert [steps for steps, _ in found] == [2, 2]
    assert all(torch.isfinite(each).all() for _, dense in found for each in dense)
    assert all("step 3" in each and "ranks 1)" in each for each in seen)
    assert sum("the gradient of table shop, key " in each for each in seen) == 1


def test_training_ends_between_any_two_steps() -> None:
    """Stages of other ranks have begun later batches by then. None hangs; all rows exist."""
    whole = train("nested", 2, steps=7)

    def work(rank: int, links: Links) -> dict[str, Any]:
        model = Ranker()
        with ShardedTables(None, SPECS, Adam(0.05), rank=rank, world=2, seed=1) as tables:
            with Pipeline(
                model, tables, iter(Loader(1, rank, 50)), links=links, features=FEATURES,
                optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
                options=PipelineOptions(2, deterministic=True),
            ) as pipeline:  # fmt: skip
                for step in pipeline:
                    if step.number == 7:
                        break
            return {table.name: table.gather(table.keys()).columns["row"] for table in tables}

    found = in_threads(2, work)
    for spec in SPECS:
        left = np.sort(whole[spec.name][1][:, : spec.dim], axis=0)
        right = np.sort(np.concatenate([each[spec.name] for each in found]), axis=0)
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


@pytest.mark.parametrize("mode", ["synchronous", "nested"])
def test_hooks_act_on_all_ranks_at_the_same_step(mode: Mode) -> None:
    def work(rank: int, links: Links) -> Any:
        hook = Recording(rank)
        with (
            ShardedTables(None, SPECS, Adam(0.05), rank=rank, world=2) as tables,
            Pipeline(
                Ranker(), tables, iter(Loader(1, rank, 8)), links=links, features=FEATURES,
                hooks=[hook], options=PipelineOptions(mode=mode),
            ) as pipeline,
        ):  # fmt: skip
            pipeline.run()
        return hook.acted

    for acted in in_threads(2, work):
        assert acted == [(3, b"3"), (6, b"6")]  # not the state of a batch that was read ahead


def test_a_full_table_says_so() -> None:
    specs = [TableSpec("item", 8, 40), *SPECS[1:]]
    with pytest.raises(ResourceExhausted, match=r"table item is full: it holds 40 rows"):
        train("nested", 1, specs=specs, steps=40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": {"history": "items"}}, "a table 'items' that there is not"),
        ({"features": {}}, "feature 'history' has no table"),
        ({"links": Links.alone()}, "the links are rank 0's of 1, the tables 1's of 2"),
    ],
)
def test_what_is_asked_for_wrongly(arguments: dict[str, Any], message: str) -> None:
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
        ({"mode": "fast"}, "mode 'fast' is unknown; there are: nested, dual"),
        ({"micro_batches": 0}, "micro_batches 0 is below 1"),
    ],
)
def test_options_that_no_pipeline_has(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        PipelineOptions(**options)


class Held(LoneLink):
    """A link on which the keys of batch 2 cross only once batch 3 is routed."""

    def __init__(self, routed: threading.Event) -> None:
        self.routed = routed
        self.calls = 0

    def all_to_all(self, send: Any, sends: Sequence[int], receives: Sequence[int]) -> Any:
        self.calls += 1  # two a batch: the numbers of keys, then the keys
        assert self.calls < 3 or self.routed.wait(20), "routing waits for keys to cross"
        return super().all_to_all(send, sends, receives)


def test_a_batch_is_routed_while_keys_of_the_one_before_cross(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routed = threading.Event()
    numbers = itertools.count(1)

    def counted(*arguments: Any) -> Any:
        requests = route_keys(*arguments)
        if next(numbers) == 3:
            routed.set()
        return requests

    monkeypatch.setattr(lookup, "route_keys", counted)
    links = Links(Held(routed), LoneLink(), LoneLink())
    with (
        ShardedTables(None, SPECS, Sgd(0.1)) as tables,
        Pipeline(Ranker(), tables, iter(Loader(1, 0, 6)), features=FEATURES, links=links) as loop,
    ):
        assert len(loop.run()) == 6


def test_the_time_line(tmp_path: Path) -> None:
    timeline = Timeline(keep=True)
    with (
        ShardedTables(None, SPECS, Sgd(0.1)) as tables,
        Pipeline(
            Ranker(), tables, iter(Loader(1, 0, 6)), features=FEATURES, timeline=timeline,
            options=PipelineOptions(2),
        ) as pipeline,
    ):  # fmt: skip
        steps = pipeline.run()
    assert len(steps) == 6
    timeline.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    stages = {"prefetch", "to-device", "route", "exchange", "retrieve", "freshen", "dense"}
    stages |= {"write-back", "send_rows", "take_gradients", "update", "reduce", "wait"}
    assert {each["name"] for each in events if each["ph"] == "X"} == stages
    dense = [each for each in events if each["name"] == "dense"]
    assert sorted((each["args"]["batch"], each["args"]["micro"]) for each in dense) == [
        (batch, micro) for batch in range(1, 7) for micro in range(2)
    ]
    timeline.draw(tmp_path / "line.svg", batches=2)
    drawn = (tmp_path / "line.svg").read_text()
    assert "batch 6" in drawn
    assert "batch 4" not in drawn
