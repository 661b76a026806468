"""The training of train_equal.py in plain PyTorch: one process, or DistributedDataParallel.

It imports nothing of petps: nn.EmbeddingBag over whole tables, autograd, torch.optim where it has
the optimizer, FBGEMM's row-wise Adagrad, and petps' Adam (each row counts its own steps) written
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.functional import binary_cross_entropy_with_logits

EPS = 1e-8


@dataclass(frozen=True)
class Micro:
    """The samples of a micro-batch of one rank. bags: row numbers and offsets by feature."""

    samples: int
    bags: Mapping[str, tuple[Any, Any]]
    dense: Any
    label: Any


class Dense(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8 + 8 + 8 + 4 + 2, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, inputs: Any) -> Any:
        return self.last(torch.relu(self.first(inputs))).squeeze(1)


class Network:
    """Tables and dense layers. rows: the first rows float32[n, dim], by table."""

    def __init__(self, rows: Mapping[str, Any]) -> None:
        self.bags = {
            name: nn.EmbeddingBag(*values.shape, include_last_offset=True, mode="sum",
                                  _weight=values.clone())
            for name, values in rows.items()
        }  # fmt: skip
        self.tables = {name: bag.weight for name, bag in self.bags.items()}
        self.bags["history"] = nn.EmbeddingBag(
            *rows["item"].shape, include_last_offset=True, mode="mean"
        )
        self.bags["history"].weight = self.tables["item"]
        self.dense: nn.Module = Dense()

    def loss(self, micro: Micro) -> Any:
        """Return the mean loss of the samples."""
        pooled = [
            self.bags[name](*micro.bags[name]) for name in ("item", "history", "user", "shop")
        ]
        logits = self.dense(torch.cat([*pooled, micro.dense], dim=1))
        return binary_cross_entropy_with_logits(logits, micro.label)


# Optimizers of one table's rows. step() updates the touched rows, int64[m]; gradient: of all rows;
# number: of the step, from 1. state() returns the columns of state.


class Sgd:
    def __init__(self, weight: Any, lr: float) -> None:
        self._weight, self._optimizer = weight, torch.optim.SGD([weight], lr)

    def step(self, gradient: Any, touched: Any, number: int) -> None:
        self._weight.grad = gradient
        self._optimizer.step()

    def state(self) -> list[Any]:
        return []


class SparseAdam:
    def __init__(self, weight: Any, lr: float) -> None:
        self._weight, self._optimizer = weight, torch.optim.SparseAdam([weight], lr, eps=EPS)

    def step(self, gradient: Any, touched: Any, number: int) -> None:
        self._weight.grad = torch.sparse_coo_tensor(
            touched[None], gradient[touched], gradient.shape
        )
        self._optimizer.step()

    def state(self) -> list[Any]:
        state = self._optimizer.state[self._weight]
        return [state["exp_avg"], state["exp_avg_sq"]]


class RowwiseAdagrad:
    """FBGEMM's EXACT_ROWWISE_ADAGRAD: each touched row is a bag of its own."""

    def __init__(self, weight: Any, lr: float) -> None:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        self._weight = weight
        self._tables = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
            [(*weight.shape, fbgemm.EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=lr, eps=EPS,
        )  # fmt: skip
        (self._rows,) = self._tables.split_embedding_weights()
        self._rows.copy_(weight.detach())

    def step(self, gradient: Any, touched: Any, number: int) -> None:
        self._tables(touched, torch.arange(len(touched) + 1)).backward(gradient[touched])
        self._weight.data.copy_(self._rows)

    def state(self) -> list[Any]:
        ((sums,),) = self._tables.split_optimizer_states()
        return [sums[:, None]]


class LazyAdam:
    """petps' Adam, from its definition: moments and a count of steps of each row's own."""

    def __init__(self, weight: Any, lr: float) -> None:
        self._weight, self._lr = weight, lr
        self._mean, self._variance = torch.zeros_like(weight), torch.zeros_like(weight)
        self._steps = torch.zeros(len(weight), 1)

    def step(self, gradient: Any, touched: Any, number: int) -> None:
        g, row = gradient[touched], self._weight.detach()[touched]
        m, v, t = self._mean[touched], self._variance[touched], self._steps[touched] + 1
        m, v = 0.9 * m + (1 - 0.9) * g, 0.999 * v + (1 - 0.999) * (g * g)
        first, second = (1 - 0.9 ** t.double()).float(), (1 - 0.999 ** t.double()).float()
        change = m / first / ((v / second).sqrt() + EPS)
        self._weight.data[touched] = row - self._lr * change
        self._mean[touched], self._variance[touched], self._steps[touched] = m, v, t

    def state(self) -> list[Any]:
        return [self._mean, self._variance, self._steps]


def train(
    network: Network, rules: Mapping[str, Any], steps: Iterable[Sequence[Sequence[Micro]]],
    *, ddp: bool = False,
) -> None:  # fmt: skip
    """Train. steps: for each one the micro-batches by rank, of all ranks.

    A row's gradient is summed over micro-batches, and for each one over ranks; a dense gradient
    over the micro-batches of a rank, then over ranks. ddp: this process computes only its own
    rank's part, and DistributedDataParallel and gloo's all-reduce add the parts.
    """
    world = distributed.get_world_size() if ddp else 1
    if ddp:
        network.dense = nn.parallel.DistributedDataParallel(network.dense)
    parameters = list(network.dense.parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    for number, ranks in enumerate(steps, start=1):
        total = sum(micro.samples for micros in ranks for micro in micros)
        sums = {name: torch.zeros_like(weight) for name, weight in network.tables.items()}
        dense: list[list[Any]] = [[0.0] * len(parameters) for _ in ranks]
        count = len(ranks[0])
        for at in range(count):
            for rank, micros in enumerate(ranks):
                if ddp and rank != distributed.get_rank():
                    continue
                last = not ddp or at == count - 1
                for weight in network.tables.values():
                    weight.grad = None
                with nullcontext() if last else network.dense.no_sync():
                    if micros[at].samples:
                        share = micros[at].samples / total * world
                        (network.loss(micros[at]) * share).backward()
                    elif ddp:
                        network.dense(torch.zeros(0, 30)).sum().backward()
                for name, weight in network.tables.items():
                    if weight.grad is not None:
                        sums[name] += weight.grad / world
                if not ddp:
                    _collect(dense[rank], parameters)
        if ddp:
            for gradient in sums.values():
                distributed.all_reduce(gradient)
        for at, parameter in enumerate([] if ddp else parameters):
            parameter.grad = sum(own[at] for own in dense) + torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        for name, gradient in sums.items():
            features = (name, "history") if name == "item" else (name,)
            touched = [micro.bags[f][0] for micros in ranks for micro in micros for f in features]
            rules[name].step(gradient, torch.cat(touched).unique(), number)


def _collect(sums: list[Any], parameters: Sequence[Any]) -> None:
    for at, parameter in enumerate(parameters):
        if parameter.grad is not None:
            sums[at] = sums[at] + parameter.grad
        parameter.grad = None
