"""Ranks as threads of one process, with links between them: fast, and with any schedule.

Does not cover torch.distributed itself (train_processes.py does), or several interpreters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from bench.train.unfreshened import BaselineMode, pipeline_of
from petps.train.batch import Batch, Ragged
from petps.train.link import Links
from petps.train.optimizer import Adam, Optimizer
from petps.train.options import PipelineOptions
from petps.train.pipeline import Boundary, Hook, Pipeline
from petps.train.ranks import RankedOutput
from petps.train.sharded import ShardedTable, ShardedTables, TableSpec

SPECS = (
    TableSpec("item", 8, 20_000),
    TableSpec("user", 8, 20_000),
    TableSpec("shop", 4, 20_000, initial=0.1),
)
FEATURES = {"history": "item"}


def specs_with(threshold: int) -> list[TableSpec]:
    """Return SPECS with an admission threshold."""
    return [replace(spec, threshold=threshold) for spec in SPECS]


WAIT_SECONDS = 500.0
_RANDOM = threading.Lock()


class Meeting:
    """The exchange point of one link: each rank leaves its values, then all take their parts."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world)
        self.left: list[Any] = [None] * world


class LocalLink:
    def __init__(self, meeting: Meeting, rank: int, world: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.world = world

    def all_to_all(self, send: Any, sends: Sequence[int], receives: Sequence[int]) -> Any:
        pieces = send.split(list(sends))
        received = [pieces_of_rank[self.rank].clone() for pieces_of_rank in self.exchange(pieces)]
        self._meeting.barrier.wait(WAIT_SECONDS)
        assert [len(piece) for piece in received] == list(receives)
        return torch.cat(received)

    def all_gather(self, values: Any) -> list[Any]:
        tensors = [tensor.clone() for tensor in self.exchange(values)]
        self._meeting.barrier.wait(WAIT_SECONDS)
        return tensors

    def all_reduce(self, values: Any) -> Any:
        return torch.stack(self.all_gather(values)).sum(dim=0)

    def exchange(self, given: Any) -> list[Any]:
        self._meeting.left[self.rank] = given
        self._meeting.barrier.wait(WAIT_SECONDS)
        return self._meeting.left


def in_threads(world: int, work: Callable[[int, Links], Any]) -> list[Any]:
    """Run work(rank, links) on each rank; return the results. Raise the first error."""
    meetings = [Meeting(world) for _ in fields(Links)]
    results: list[Any] = [None] * world
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(
                rank, Links(*(LocalLink(meeting, rank, world) for meeting in meetings))
            )
        except BaseException as error:
            errors.append((rank, error))
            for meeting in meetings:
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    for _, error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    return results


class Ranker(torch.nn.Module):  # type: ignore[misc]
    """A model with tables of two widths, a table of two features, sums and means."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with _RANDOM:  # torch's generator belongs to the whole process
            torch.manual_seed(seed)
            self.first = torch.nn.Linear(8 + 8 + 8 + 4 + 2, 16)
            self.last = torch.nn.Linear(16, 1)

    def forward(self, lookups: Any, batch: Batch) -> Any:
        pooled = [
            lookups["item"].pooled(),
            lookups["history"].pooled("mean"),
            lookups["user"].pooled(),
            lookups["shop"].pooled(),
            batch.dense["dense"],
        ]
        hidden = torch.relu(self.first(torch.cat(pooled, dim=1)))
        logits = self.last(hidden).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.dense["label"])


class Loader:
    """Seeded batches of a rank. overlap: the share of keys drawn from a few hot ones."""

    def __init__(
        self, seed: int, rank: int, steps: int, *, samples: int = 12, overlap: float = 0.5,
        first: int = 1, ids: int = 3000,
    ) -> None:  # fmt: skip
        self._seed, self._rank, self._steps = seed, rank, steps
        self._samples, self._overlap, self._ids = samples, overlap, ids
        self._at = first - 1

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._at >= self._steps:
            raise StopIteration
        self._at += 1
        random = np.random.default_rng((self._seed, self._rank, self._at))
        samples = int(random.integers(0, 2 * self._samples + 1))
        keys = {
            name: Ragged.single(self._keys(random, samples)) for name in ("item", "user", "shop")
        }
        lengths = random.integers(0, 5, samples)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        keys["history"] = Ragged(self._keys(random, int(offsets[-1])), offsets)
        dense = torch.from_numpy(random.standard_normal((samples, 2)).astype(np.float32))
        label = torch.from_numpy(random.integers(0, 2, samples).astype(np.float32))
        return Batch(keys, {"dense": dense, "label": label}, b"%d" % self._at)

    def _keys(self, random: np.random.Generator, count: int) -> np.ndarray:
        cold = random.integers(0, self._ids, count).astype(np.uint64)
        hot = random.integers(0, 7, count).astype(np.uint64)
        keys = np.where(random.random(count) < self._overlap, hot, cold + np.uint64(7))
        # Spreads the keys over all 64 bits.
        return keys * np.uint64(0x9E3779B97F4A7C15)


@contextmanager
def open_pipeline(
    steps: int,
    *,
    rank: int = 0,
    world: int = 1,
    seed: int = 1,
    model: Any = None,
    lr: float = 0.0,
    options: PipelineOptions | None = None,
    **more: Any,
) -> Iterator[tuple[ShardedTables, Pipeline]]:
    """Open tables in memory and a pipeline over them. lr: of the dense parameters; 0: fixed."""
    model = model or Ranker()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr) if lr else None
    loader = iter(Loader(seed, rank, steps))
    with (
        ShardedTables(None, SPECS, Adam(0.05), rank=rank, world=world, seed=seed) as tables,
        Pipeline(
            model, tables, loader, options=options, optimizer=optimizer, features=FEATURES, **more
        ) as pipeline,
    ):
        yield tables, pipeline


def read_slots(table: ShardedTable) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys of a table, uint64[n] ascending, and their slots, float32[n, width]."""
    keys = table.keys()
    return keys, np.concatenate(list(table.gather(keys).columns.values()), axis=1)


class InStep:
    """A RankedOutput whose versions end before the next step: a test knows their numbers."""

    def __init__(self, output: RankedOutput) -> None:
        self._output = output

    def wants(self, step: int) -> bool:
        return self._output.wants(step)

    def act(self, boundary: Boundary) -> None:
        self._output.act(boundary)
        self._output.wait()

    def end(self, boundary: Boundary) -> None:
        self._output.end(boundary)


class OnHost:
    """The device of a rank: here the host. Subclasses put its model and links elsewhere."""

    device = "cpu"

    def use(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def model(self, model: Any) -> Any:
        return model

    def links(self, links: Links) -> Links:
        return links

    def host(self, tensor: Any) -> Any:
        return tensor.detach().clone()


def train(
    mode: BaselineMode,
    world: int,
    *,
    steps: int = 20,
    micro_batches: int = 2,
    seed: int = 1,
    optimizer: Optimizer | None = None,
    specs: Sequence[TableSpec] = SPECS,
    deterministic: bool = True,
    loader: Callable[[int], Iterator[Batch]] | None = None,
    hooks: Sequence[Hook] = (),
    overlap: float = 0.5,
    on: OnHost | None = None,
) -> dict[str, Any]:
    """Train; return slots by table and key, dense parameters, losses."""
    place = on or OnHost()
    kind, product_mode = pipeline_of(mode)
    options = PipelineOptions(
        micro_batches, product_mode, deterministic=deterministic, device=place.device
    )

    def work(rank: int, links: Links) -> Any:
        with place.use():
            return train_there(rank, place.links(links))

    def train_there(rank: int, links: Links) -> Any:
        model = place.model(Ranker())
        torch_optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        tables = ShardedTables(
            None, specs, optimizer or Adam(0.05), rank=rank, world=world, seed=seed
        )
        given = loader(rank) if loader else iter(Loader(seed, rank, steps, overlap=overlap))
        with (
            tables,
            kind(
                model, tables, given, options=options, optimizer=torch_optimizer, links=links,
                features=FEATURES, hooks=hooks,
            ) as pipeline,
        ):  # fmt: skip
            losses = [step.loss for step in pipeline.run()]
            slots = {table.name: read_slots(table) for table in tables}
        return slots, [place.host(parameter) for parameter in model.parameters()], losses

    ranks = in_threads(world, work)
    result: dict[str, Any] = {"losses": ranks[0][2], "dense": ranks[0][1]}
    for other in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other[1], ranks[0][1], strict=True))
        assert other[2] == ranks[0][2]
    for name in (spec.name for spec in specs):
        keys = np.concatenate([rank[0][name][0] for rank in ranks])
        slots = np.concatenate([rank[0][name][1] for rank in ranks])
        order = np.argsort(keys)
        assert (np.diff(keys[order].astype(np.float64)) >= 0).all()
        assert len(np.unique(keys)) == len(keys), "two ranks hold a key"
        result[name] = (keys[order], slots[order])
    return result


def same(left: dict[str, Any], right: dict[str, Any], specs: Sequence[TableSpec] = SPECS) -> bool:
    """Return whether rows, optimizer state, dense parameters and losses are equal bit by bit."""
    if left["losses"] != right["losses"]:
        return False
    if not all(torch.equal(a, b) for a, b in zip(left["dense"], right["dense"], strict=True)):
        return False
    return all(
        np.array_equal(left[spec.name][0], right[spec.name][0])
        and np.array_equal(left[spec.name][1].view(np.uint32), right[spec.name][1].view(np.uint32))
        for spec in specs
    )
