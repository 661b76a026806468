"""A small DLRM (Naumov et al. 2019) that trains for one epoch on a CPU, and goes on from anywhere.

Owns:        Shape, Interaction, Vocabulary, Training: embeddings summed field by field, dot
             products between fields, a perceptron below and one above; figures of its logits.
Never does:  checkpoints, logs (petps.train.Feed does, over Training.tables).
Called by:   bench, tests; training/, which has its rows elsewhere.
Invariants:  what a step does depends on seed, step, rows, optimizer state and dense weights alone:
             restored bit by bit, training goes on bit by bit. PyTorch has one thread.
Threads:     the trainer's. Of the room only this file and training/ import torch
             (pip install petps[torch]).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from petps.checkpoint import Column, Table
from petps.demo.ratings import Floats, Keys, Samples
from petps.errors import InvalidArgument
from petps.tracker import Tracker
from petps.train.pytorch import track_module
from petps.train.table import ROW

__all__ = [
    "Encoded",
    "Interaction",
    "Logits",
    "Shape",
    "Training",
    "Vocabulary",
    "area_under_curve",
    "log_loss",
    "scored",
]

Logits = npt.NDArray[np.float64]

STATE: Final = "sum"  # Adagrad's, by PyTorch's name
# Parts of a version beside its rows.
DENSE: Final = "dense"
READER: Final = "reader"
SCORED_AT_A_TIME: Final = 8192


@dataclass(frozen=True, slots=True)
class Shape:
    """The model and how it is trained; learning rates are those of Adagrad and of Adam."""

    dim: int = 16
    bottom: tuple[int, ...] = (32,)
    top: tuple[int, ...] = (64, 32)
    batch: int = 512
    row_learning_rate: float = 0.1
    dense_learning_rate: float = 1e-3


@dataclass(frozen=True, slots=True)
class Encoded:
    """Samples as tensors: positions int64[n, f], numbers float32[n, d], labels float32[n]."""

    positions: Any
    numbers: Any
    labels: Any

    def __len__(self) -> int:
        return len(self.labels)


class Vocabulary:
    """The row of each key: by field, its keys in ascending order."""

    def __init__(self, samples: Samples) -> None:
        self.fields = samples.fields
        self.keys: list[Keys] = [np.unique(column) for column in samples.keys.T]

    def encode(self, samples: Samples) -> Encoded:
        """Raises InvalidArgument for a key that is not in it."""
        out = np.empty(samples.keys.shape, np.int64)
        for field, known in enumerate(self.keys):
            wanted = samples.keys[:, field]
            found = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            if not np.array_equal(known[found], wanted):
                missing = wanted[known[found] != wanted][0]
                raise InvalidArgument(f"field {self.fields[field]}: key {missing} is unknown")
            out[:, field] = found
        return Encoded(*map(torch.from_numpy, (out, samples.numbers, samples.labels)))


class Interaction(torch.nn.Module):  # type: ignore[misc]
    """What is dense: numbers go through ``bottom`` into a vector of dim, which goes with the
    products of all vectors through ``top``.
    """

    def __init__(self, fields: int, numbers: int, shape: Shape) -> None:
        super().__init__()
        vectors = fields + 1
        self.bottom = _perceptron([numbers, *shape.bottom, shape.dim])
        self.top = _perceptron([shape.dim + vectors * (vectors - 1) // 2, *shape.top, 1])
        self._pairs = torch.tril_indices(vectors, vectors, -1)

    def forward(self, bags: Sequence[Any], numbers: Any) -> Any:
        """A float32[n, dim] for each field, float32[n, d] -> float32[n]: logits."""
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *bags], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        crossed = products[:, self._pairs[0], self._pairs[1]]
        return self.top(torch.cat([dense, crossed], dim=1)).squeeze(1)


class Model(torch.nn.Module):  # type: ignore[misc]
    """One nn.EmbeddingBag a field, and what is dense."""

    def __init__(
        self, rows: list[int], fields: tuple[str, ...], numbers: int, shape: Shape
    ) -> None:
        super().__init__()
        self.embeddings = torch.nn.ModuleDict(
            {
                name: torch.nn.EmbeddingBag(count, shape.dim, mode="sum", sparse=True)
                for name, count in zip(fields, rows, strict=True)
            }
        )
        for bag in self.embeddings.values():
            torch.nn.init.uniform_(bag.weight, -0.05, 0.05)
        self.dense = Interaction(len(fields), numbers, shape)

    def forward(self, positions: Any, numbers: Any) -> Any:
        """int64[n, f], float32[n, d] -> float32[n]: logits."""
        bags = [bag(positions[:, i : i + 1]) for i, bag in enumerate(self.embeddings.values())]
        return self.dense(bags, numbers)


class Training:
    """One epoch over ``samples``; ``seed`` draws their order and the first weights."""

    def __init__(
        self,
        samples: Encoded,
        vocabulary: Vocabulary,
        seed: int,
        shape: Shape | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        torch.set_num_threads(1)
        self.shape = shape or Shape()
        self.step = 0
        self.steps = len(samples) // self.shape.batch
        self._samples = samples
        self._order = torch.from_numpy(np.random.default_rng(seed).permutation(len(samples)))
        torch.manual_seed(seed)
        rows = [len(keys) for keys in vocabulary.keys]
        self.model = Model(rows, vocabulary.fields, samples.numbers.shape[1], self.shape)
        self._row_optimizer = torch.optim.Adagrad(
            self.model.embeddings.parameters(), lr=self.shape.row_learning_rate
        )
        self._dense_optimizer = torch.optim.Adam(
            self.model.dense.parameters(), lr=self.shape.dense_learning_rate
        )
        self.tracker = tracker or Tracker()
        self.tables = track_module(
            self.tracker, self.model.embeddings, optimizer=self._row_optimizer, columns=(STATE,)
        )

    def stored_as(self, row: str = "f32", state: str = "f32") -> list[Table]:
        """The tables of a store that keeps rows and optimizer state as these dtypes."""
        columns = (Column(ROW, row, self.shape.dim), Column(STATE, state, self.shape.dim))
        return [Table(table.name, columns) for table in self.tables]

    def train(self, until: int) -> None:
        """Up to and without step ``until``."""
        self.model.train()
        for step in range(self.step, min(until, self.steps)):
            batch = self._order[step * self.shape.batch : (step + 1) * self.shape.batch]
            self._row_optimizer.zero_grad()
            self._dense_optimizer.zero_grad()
            logits = self.model(self._samples.positions[batch], self._samples.numbers[batch])
            labels = self._samples.labels[batch]
            torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
            self._row_optimizer.step()
            self._dense_optimizer.step()
            self.step = step + 1

    def score(self, samples: Encoded) -> Logits:
        """float64[n]: the logit of each sample's label being 1."""
        self.model.eval()
        return scored(self.model, samples.positions, samples.numbers)

    def parts(self) -> dict[str, bytes]:
        """What a version has beside the rows: dense weights with their optimizer's state; place."""
        file = io.BytesIO()
        torch.save([self.model.dense.state_dict(), self._dense_optimizer.state_dict()], file)
        return {DENSE: file.getvalue(), READER: json.dumps({"step": self.step}).encode()}

    def forget(self) -> None:
        """No weight is left: what is not restored after this is seen by all that follows."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float("nan"))

    def load_parts(self, parts: Mapping[str, bytes]) -> None:
        """What parts() gave; the rows are Feed.restore()'s."""
        weights, state = torch.load(io.BytesIO(parts[DENSE]), weights_only=True)
        self.model.dense.load_state_dict(weights)
        self._dense_optimizer.load_state_dict(state)
        self.step = int(json.loads(parts[READER])["step"])


def scored(model: Callable[[Any, Any], Any], ids: Any, numbers: Any) -> Logits:
    """model(integers[m, f], float32[m, d]) of some samples at a time -> float64[n]: logits."""
    with torch.no_grad():
        parts = [
            model(*part)
            for part in zip(
                ids.split(SCORED_AT_A_TIME), numbers.split(SCORED_AT_A_TIME), strict=True
            )
        ]
    found: Logits = torch.cat(parts).double().numpy()
    return found


def log_loss(logits: Logits, labels: Floats) -> float:
    """Mean over samples, in nats."""
    return float(np.mean(np.logaddexp(0, logits) - labels * logits))


def area_under_curve(logits: Logits, labels: Floats) -> float:
    """The chance that a sample of label 1 scores above one of label 0; equal scores count half."""
    _, places, counts = np.unique(logits, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    ones = float(labels.sum())
    below = ranks[labels == 1].sum() - ones * (ones + 1) / 2
    return float(below / (ones * (len(labels) - ones)))


def _perceptron(widths: list[int]) -> Any:
    layers: list[Any] = []
    for before, after in pairwise(widths):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])
