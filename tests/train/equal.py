"""The same 200 steps by petps and by the reference (reference.py), for train_equal.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch

from petps.train.batch import Batch
from petps.train.link import Links
from petps.train.optimizer import Adam, Optimizer, RowwiseAdagrad, Sgd, SparseAdam
from petps.train.options import Mode, PipelineOptions
from petps.train.pipeline import Pipeline
from petps.train.sharded import ShardedTables
from tests.train import reference
from tests.train.rank_threads import FEATURES, SPECS, Loader, Ranker, read_slots

# `make test-train` trains 40 steps, so that it ends in time on a slow machine.
STEPS = int(os.environ.get("PETPS_EQUAL_STEPS", "200"))
SEED = 5
DENSE_LR = 0.01
OPTIMIZERS: dict[str, tuple[type[Any], type[Any], float]] = {
    "sgd": (Sgd, reference.Sgd, 0.1),
    "rowwise_adagrad": (RowwiseAdagrad, reference.RowwiseAdagrad, 0.1),
    "adam": (Adam, reference.LazyAdam, 0.02),
    "sparse_adam": (SparseAdam, reference.SparseAdam, 0.02),
}
Arrays = dict[str, np.ndarray]


def run_petps(
    name: str,
    micro_batches: int,
    rank: int,
    links: Links,
    *,
    kind: str = "synchronous",
    optimizer: Optimizer | None = None,
    dense_lr: float = DENSE_LR,
) -> Arrays:
    """Train on one rank; return its keys and slots by table, and the dense weights.

    kind: the mode, in which sums have a fixed order, or "defaults": a user's options.
    """
    own, _, lr = OPTIMIZERS[name]
    model = Ranker()
    if kind == "defaults":
        options = PipelineOptions(micro_batches)
    else:
        options = PipelineOptions(micro_batches, cast(Mode, kind), deterministic=True)
    world = links.rows.world
    with (
        ShardedTables(
            None, SPECS, optimizer or own(lr), rank=rank, world=world, seed=SEED
        ) as tables,
        Pipeline(
            model, tables, iter(Loader(SEED, rank, STEPS)), options=options, links=links,
            features=FEATURES, optimizer=torch.optim.Adam(model.parameters(), lr=dense_lr),
        ) as pipeline,
    ):  # fmt: skip
        assert len(pipeline.run()) == STEPS
        arrays: Arrays = {}
        for table in tables:
            arrays[f"{table.name}.keys"], arrays[table.name] = read_slots(table)
    return arrays | _dense(model.parameters())


def run_reference(
    name: str, micro_batches: int, world: int, *, ddp: bool = False, reordered: bool = False
) -> Arrays:
    """Train the reference; return the same as run_petps, of all ranks.

    reordered: samples, micro-batches and ranks in the opposite order, so that sums are in another
    order.
    """
    keys = {table: _find_keys(world, table) for table in ("item", "user", "shop")}
    network = reference.Network({table: _first_rows(table, own) for table, own in keys.items()})
    _, rule, lr = OPTIMIZERS[name]
    rules = {table: rule(weight, lr) for table, weight in network.tables.items()}
    reference.train(network, rules, _steps(micro_batches, world, keys, reordered), ddp=ddp)
    arrays: Arrays = {}
    for table, weight in network.tables.items():
        order = np.argsort(keys[table])
        arrays[f"{table}.keys"] = keys[table][order]
        slots = torch.cat([weight.detach(), *rules[table].state()], dim=1)
        arrays[table] = slots.numpy()[order]
    return arrays | _dense(network.dense.parameters())


def _dense(parameters: Any) -> Arrays:
    return {f"dense{at}": values.detach().numpy() for at, values in enumerate(parameters)}


def _batches(world: int) -> Iterator[list[Batch]]:
    loaders = [Loader(SEED, rank, STEPS) for rank in range(world)]
    return map(list, zip(*loaders, strict=True))


def _find_keys(world: int, table: str) -> np.ndarray:
    """Return a table's keys in the order of its rows: by owner, then ascending.

    PyTorch adds the gradients of a row that occurs several times in an order that depends on the
    numbers of the rows, because it sorts them, not stably. petps numbers rows by owner.
    """
    features = {"item": ("item", "history")}.get(table, (table,))
    batches = [batch for ranks in _batches(world) for batch in ranks]
    keys = np.unique(np.concatenate([batch.keys[f].keys for batch in batches for f in features]))
    with ShardedTables(None, SPECS, Sgd(1.0), world=world) as tables:
        return keys[np.argsort(tables.owner_of(keys), kind="stable")]


def _first_rows(table: str, keys: np.ndarray) -> Any:
    seen = np.ones(len(keys), np.int64)
    with ShardedTables(None, SPECS, Sgd(1.0), seed=SEED) as tables:
        return torch.from_numpy(tables[table].retrieve(1, keys, seen).slots)


def _steps(
    micro_batches: int, world: int, keys: Arrays, reordered: bool
) -> Iterator[list[list[reference.Micro]]]:
    order = -1 if reordered else 1
    for ranks in _batches(world):
        yield [
            [_micro(part, keys, order) for part in batch.parts(micro_batches)][::order]
            for batch in ranks
        ][::order]


def _micro(part: Batch, keys: Arrays, order: int) -> reference.Micro:
    part = part.select(np.arange(part.samples)[::order].copy())
    bags = {}
    for feature, ragged in part.keys.items():
        own = keys[FEATURES.get(feature, feature)]
        by_key = np.argsort(own)
        rows = by_key[np.searchsorted(own, ragged.keys, sorter=by_key)]
        bags[feature] = (torch.from_numpy(rows), torch.from_numpy(ragged.offsets))
    return reference.Micro(part.samples, bags, part.dense["dense"], part.dense["label"])
