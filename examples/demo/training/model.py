"""The DLRM for petps.train: the dense part of dlrm.py over rows of ShardedTables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from examples.demo.dlrm import Interaction, Shape
from examples.demo.training.task import DIM, Task
from petps.train import Batch, Ragged

__all__ = ["Loader", "Ranker", "dense_part"]

_SHAPE = Shape(dim=DIM)


def dense_part(task: Task) -> Interaction:
    """Return the dense part, with weights drawn by torch."""
    return Interaction(len(task.fields), task.samples.numbers.shape[1], _SHAPE)


class Ranker(torch.nn.Module):  # type: ignore[misc]
    """The model for Pipeline: (lookups by field, micro-batch) -> the mean loss of its samples."""

    def __init__(self, task: Task, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)  # all ranks start from the same weights
        self.dense = dense_part(task)
        self._fields = task.fields

    def forward(self, lookups: Any, batch: Batch) -> Any:
        """Return the mean loss of the micro-batch."""
        bags = [lookups[name].pooled("sum") for name in self._fields]
        logits = self.dense(bags, batch.dense["numbers"])
        loss = torch.nn.functional.binary_cross_entropy_with_logits
        return loss(logits, batch.dense["label"])

    def optimizer(self) -> Any:
        """Return the optimizer of the dense weights."""
        return torch.optim.Adam(self.parameters(), lr=_SHAPE.dense_learning_rate)


class Loader:
    """A rank's batches from step ``first`` on. The reader's state is the last step read."""

    def __init__(self, task: Task, rank: int, first: int) -> None:
        self._fields = task.fields
        self._batches = task.batches(rank, first)

    def __iter__(self) -> Iterator[Batch]:
        for step, samples in self._batches:
            keys = {
                name: Ragged.single(np.ascontiguousarray(column))
                for name, column in zip(self._fields, samples.keys.T, strict=True)
            }
            dense = {
                "numbers": torch.from_numpy(samples.numbers),
                "label": torch.from_numpy(samples.labels),
            }
            yield Batch(keys, dense, b"%d" % step)
