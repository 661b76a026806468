"""A rank beside TorchRec: python -m bench.train.torchrec_rank RANK 'SETTINGS as JSON'.

One DLRM is trained by petps in two modes and by TorchRec in two pipelines, in turn, in the same
processes and over the same links. All have the same first rows, dense weights, batches and
optimizers, so their losses are compared too. The rank prints a line of JSON: for each trainer the
seconds of a step in each round, and its first losses; or why it does not run here.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
import torchrec
from torch import distributed, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from bench.train.rank import FIELDS
from examples.demo.trace import load_trace
from petps.train import Batch, Links, Pipeline, PipelineOptions, Ragged, RowwiseAdagrad
from petps.train.sharded import ShardedTables, TableSpec

NUMBERS: Final = 13  # the dense inputs of a sample, as in Criteo's data
HIDDEN: Final = 64
ROW_RATE, DENSE_RATE = 0.01, 0.01
INITIAL: Final = 0.01  # every value of every row
LOSSES: Final = 3  # how many of a trainer's first losses are compared
DISTINCT_BATCHES: Final = 8
MODES: Final = ("synchronous", "nested")
PIPELINES: Final = {"torchrec": TrainPipelineBase, "sparse_dist": TrainPipelineSparseDist}


@dataclass(frozen=True)
class Inputs:
    """A rank's batch. bags: ids int64 and offsets int64[samples + 1], by table."""

    bags: dict[str, tuple[Any, Any]]
    numbers: Any
    labels: Any


def make_batches(settings: dict[str, Any], rank: int) -> list[Inputs]:
    """Return batches of items in the order of access; each rank begins at another place."""
    trace = load_trace()
    samples, length = settings["samples"], settings["length"]
    random = np.random.default_rng((settings["seed"], rank))
    offsets = np.arange(samples + 1, dtype=np.int64) * length
    at = len(trace.accesses) * rank // settings["world"]
    batches = []
    for _ in range(DISTINCT_BATCHES):
        items = trace.accesses.take(np.arange(at, at + offsets[-1]), mode="wrap")
        ids = {"item": items, **{name: items % count for name, count in FIELDS.items()}}
        numbers = random.standard_normal((samples, NUMBERS), np.float32)
        labels = random.integers(0, 2, samples).astype(np.float32)
        batches.append(
            Inputs(
                {name: (values, offsets) for name, values in ids.items()},
                torch.from_numpy(numbers),
                torch.from_numpy(labels),
            )
        )
        at += offsets[-1]
    return batches


class Dlrm(nn.Module):  # type: ignore[misc]
    """The dense part: an MLP of the numbers, dot products of all pairs, an MLP of the result."""

    def __init__(self, tables: int, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below = nn.Sequential(
            nn.Linear(NUMBERS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, dim), nn.ReLU()
        )
        vectors = tables + 1
        self.above = nn.Sequential(
            nn.Linear(dim + vectors * (vectors - 1) // 2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
        )
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, offset=-1))

    def forward(self, pooled: list[Any], numbers: Any, labels: Any) -> Any:
        """Return the mean loss. pooled: float32[samples, dim] of each table."""
        below = self.below(numbers)
        vectors = torch.stack([below, *pooled], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits = self.above(torch.cat([below, products], dim=1)).squeeze(1)
        return binary_cross_entropy_with_logits(logits, labels)


class Trainer(Protocol):
    """A way to train the DLRM."""

    def step(self) -> float:
        """Train one batch; return its mean loss over this rank's or all samples."""

    def close(self) -> None:
        """End the training."""


class OfPetps:
    """petps in one of its modes."""

    def __init__(
        self, settings: dict[str, Any], rank: int, inputs: list[Inputs], mode: Any
    ) -> None:
        world, rows = settings["world"], {"item": settings["rows"], **FIELDS}
        specs = [
            TableSpec(name, settings["dim"], 2 * count // world + 1000)
            for name, count in rows.items()
        ]
        self._tables = ShardedTables(None, specs, RowwiseAdagrad(ROW_RATE), rank=rank, world=world)
        for name, count in rows.items():
            keys = np.arange(count, dtype=np.uint64)
            keys = keys[self._tables.owns(keys)]
            slots = np.zeros((len(keys), self._tables[name].width), np.float32)
            slots[:, : settings["dim"]] = INITIAL
            self._tables[name].write_back(0, keys, slots)
        model = _OnLookups(Dlrm(len(rows), settings["dim"]), list(rows))
        self._pipeline = Pipeline(
            model, self._tables, itertools.cycle([_batch_of(batch) for batch in inputs]),
            optimizer=torch.optim.SGD(model.parameters(), DENSE_RATE), links=Links.of_processes(),
            options=PipelineOptions(settings["micro_batches"], mode, arrange=None),
        )  # fmt: skip

    def step(self) -> float:
        """See Trainer."""
        step = self._pipeline.step()
        assert step is not None
        return step.loss

    def close(self) -> None:
        """See Trainer."""
        self._pipeline.close()
        self._tables.close()


class _OnLookups(nn.Module):  # type: ignore[misc]
    def __init__(self, dense: Dlrm, names: list[str]) -> None:
        super().__init__()
        self.dense, self._names = dense, names

    def forward(self, lookups: Any, batch: Batch) -> Any:
        pooled = [lookups[name].pooled() for name in self._names]
        return self.dense(pooled, batch.dense["numbers"], batch.dense["labels"])


def _batch_of(inputs: Inputs) -> Batch:
    keys = {name: Ragged(ids.astype(np.uint64), at) for name, (ids, at) in inputs.bags.items()}
    return Batch(keys, {"numbers": inputs.numbers, "labels": inputs.labels})


@dataclass
class _Kjt(Pipelineable):  # type: ignore[misc]
    """A batch that TorchRec's pipelines can move."""

    features: Any
    numbers: Any
    labels: Any

    def to(self, device: Any, non_blocking: bool = False) -> _Kjt:
        return self

    def record_stream(self, stream: Any) -> None:
        pass

    def pin_memory(self) -> _Kjt:
        return self


class _OnBags(nn.Module):  # type: ignore[misc]
    def __init__(self, dense: Dlrm, rows: dict[str, int], dim: int) -> None:
        super().__init__()
        self.dense = dense
        self.bags = torchrec.EmbeddingBagCollection(
            device=torch.device("cpu"),
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=name, embedding_dim=dim, num_embeddings=count, feature_names=[name],
                    pooling=torchrec.PoolingType.SUM,
                    init_fn=lambda weight: nn.init.constant_(weight, INITIAL),
                )
                for name, count in rows.items()
            ],
        )  # fmt: skip
        self._names = list(rows)

    def forward(self, batch: _Kjt) -> Any:
        pooled = self.bags(batch.features).to_dict()
        loss = self.dense([pooled[name] for name in self._names], batch.numbers, batch.labels)
        return loss, loss.detach()


class OfTorchRec:
    """TorchRec's EmbeddingBagCollection, sharded by rows, in one of its pipelines."""

    def __init__(
        self, settings: dict[str, Any], rank: int, inputs: list[Inputs], pipeline: Any
    ) -> None:
        rows = {"item": settings["rows"], **FIELDS}
        model = _OnBags(Dlrm(len(rows), settings["dim"]), rows, settings["dim"])
        sparse = list(model.bags.parameters())
        options = {"lr": ROW_RATE, "eps": RowwiseAdagrad(ROW_RATE).eps}
        apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, sparse, options)
        sharder, device = EmbeddingBagCollectionSharder(), torch.device("cpu")
        plan = construct_module_sharding_plan(
            model.bags,
            {name: row_wise() for name in rows},
            sharder=sharder, local_size=settings["world"], world_size=settings["world"],
            device_type="cpu",
        )  # fmt: skip
        sharded = DistributedModelParallel(
            model, device=device, plan=ShardingPlan(plan={"bags": plan}), sharders=[sharder]
        )
        dense = torch.optim.SGD(
            [value for name, value in sharded.named_parameters() if "bags" not in name], DENSE_RATE
        )
        self._batches = itertools.cycle([_kjt_of(batch) for batch in inputs])
        self._pipeline = pipeline(sharded, dense, device)

    def step(self) -> float:
        """See Trainer."""
        return float(self._pipeline.progress(self._batches))

    def close(self) -> None:
        """See Trainer."""


def _kjt_of(inputs: Inputs) -> _Kjt:
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=list(inputs.bags),
        values=torch.from_numpy(np.concatenate([ids for ids, _ in inputs.bags.values()])),
        lengths=torch.from_numpy(np.concatenate([np.diff(at) for _, at in inputs.bags.values()])),
    )
    return _Kjt(features, inputs.numbers, inputs.labels)


def _make(name: str, settings: dict[str, Any], rank: int, inputs: list[Inputs]) -> Trainer:
    if name in PIPELINES:
        return OfTorchRec(settings, rank, inputs, PIPELINES[name])
    return OfPetps(settings, rank, inputs, name)


def train(settings: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train all trainers in turn; return the rank's line."""
    inputs = make_batches(settings, rank)
    trainers: dict[str, Trainer] = {}
    results: dict[str, Any] = {}
    for name in (*PIPELINES, *MODES):
        try:
            trainers[name] = _make(name, settings, rank, inputs)
            own = torch.tensor([trainers[name].step() for _ in range(LOSSES)])
            distributed.all_reduce(own)
            results[name] = {"losses": (own / settings["world"]).tolist(), "step_s": []}
        except (RuntimeError, AttributeError, AssertionError, ValueError) as error:
            if name != "sparse_dist":
                raise
            results[name] = {"missing": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            trainers.pop(name, None)
    for name, trainer in _in_turn(trainers, settings["rounds"]):
        for _ in range(settings["warm_up"]):  # a pipeline has prepared its next batches
            trainer.step()
        distributed.barrier()
        began = time.monotonic()
        for _ in range(settings["steps"]):
            trainer.step()
        results[name]["step_s"].append((time.monotonic() - began) / settings["steps"])
    for trainer in trainers.values():
        trainer.close()
    return results


def _in_turn(trainers: dict[str, Trainer], rounds: int) -> Iterator[tuple[str, Trainer]]:
    for _ in range(rounds):
        yield from trainers.items()


def main(rank: int, settings: dict[str, Any]) -> None:
    """Run one rank on one processor, as in rank.py."""
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[rank % len(processors)]})
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{settings['meeting']}", rank=rank, world_size=settings["world"]
    )
    print(json.dumps(train(settings, rank)), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
