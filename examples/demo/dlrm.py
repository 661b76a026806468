"""A small DLRM (Naumov et al. 2019), trained for one epoch on a CPU. It continues from any step.

Owns:        Shape, Interaction, Vocabulary, Training: embeddings summed by field, dot products
             between fields, a perceptron below and one above; log loss and AUC of its logits.
Never does:  write checkpoints or logs (petps.train.TrainerOutput does, from Training.tables).
Called by:   bench, tests; training/, which keeps its rows in pools.
Invariants:  A step depends only on seed, step, rows, optimizer state and dense weights. So after a
             restore that is exact bit by bit, training continues with the same bits. PyTorch has
             one thread.
Threads:     the trainer's. Only this file and training/ import torch in this room (pip install
             petps[torch]).
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

from examples.demo.ratings import Floats, Keys, Samples
from petps.checkpoint import Column, Table
from petps.errors import InvalidArgument
from petps.train.pytorch import track_module
from petps.train.table import ROW
from petps.train.tracker import Tracker

__all__ = [
    "Encoded",
    "Interaction",
    "Logits",
    "Shape",
    "Training",
    "Vocabulary",
    "area_under_curve",
    "compute_logits",
    "log_loss",
]

Logits = npt.NDArray[np.float64]

# The optimizers of rows, and the state that each keeps per row, by PyTorch's names.
ROW_OPTIMIZERS: Final = {
    "adagrad": (torch.optim.Adagrad, ("sum",)),
    "adam": (torch.optim.SparseAdam, ("exp_avg", "exp_avg_sq")),
}
# The names of a version's parts other than rows.
DENSE: Final = "dense"
READER: Final = "reader"
SCORING_BATCH: Final = 8192  # samples


@dataclass(frozen=True, slots=True)
class Shape:
    """The model and its training.

    row_optimizer: a key of ROW_OPTIMIZERS; Adam needs a lower rate. Dense weights have Adam.
    """

    dim: int = 16
    bottom: tuple[int, ...] = (32,)
    top: tuple[int, ...] = (64, 32)
    batch: int = 512
    row_optimizer: str = "adagrad"
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
    """The row of each key: for each field, its keys in ascending order."""

    def __init__(self, samples: Samples) -> None:
        self.fields = samples.fields
        self.keys: list[Keys] = [np.unique(column) for column in samples.keys.T]

    def encode(self, samples: Samples) -> Encoded:
        """Return samples as tensors. Raise InvalidArgument for an unknown key."""
        positions = np.empty(samples.keys.shape, np.int64)
        for field, known in enumerate(self.keys):
            keys = samples.keys[:, field]
            at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
            is_unknown = known[at] != keys
            if is_unknown.any():
                unknown = keys[is_unknown][0]
                raise InvalidArgument(f"field {self.fields[field]}: key {unknown} is unknown")
            positions[:, field] = at
        return Encoded(*map(torch.from_numpy, (positions, samples.numbers, samples.labels)))


class Interaction(torch.nn.Module):  # type: ignore[misc]
    """The dense part of the model.

    ``bottom`` makes a vector of dim values from the numbers. ``top`` makes the logit from this
    vector and the dot products of all pairs of vectors.
    """

    def __init__(self, fields: int, numbers: int, shape: Shape) -> None:
        super().__init__()
        vectors = fields + 1
        self.bottom = _perceptron([numbers, *shape.bottom, shape.dim])
        self.top = _perceptron([shape.dim + vectors * (vectors - 1) // 2, *shape.top, 1])
        self._pairs = torch.tril_indices(vectors, vectors, -1)

    def forward(self, bags: Sequence[Any], numbers: Any) -> Any:
        """Compute logits: float32[n, dim] for each field, float32[n, d] -> float32[n]."""
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *bags], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        crossed = products[:, self._pairs[0], self._pairs[1]]
        return self.top(torch.cat([dense, crossed], dim=1)).squeeze(1)


class Model(torch.nn.Module):  # type: ignore[misc]
    """One nn.EmbeddingBag for each field, and the dense part."""

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
        """Compute logits: int64[n, f], float32[n, d] -> float32[n]."""
        bags = [bag(positions[:, i : i + 1]) for i, bag in enumerate(self.embeddings.values())]
        return self.dense(bags, numbers)


class Training:
    """One epoch over ``samples``. The seed determines their order and the initial weights."""

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
        row_optimizer, self._columns = ROW_OPTIMIZERS[self.shape.row_optimizer]
        self._row_optimizer = row_optimizer(
            self.model.embeddings.parameters(), lr=self.shape.row_learning_rate
        )
        self._dense_optimizer = torch.optim.Adam(
            self.model.dense.parameters(), lr=self.shape.dense_learning_rate
        )
        self.tracker = tracker or Tracker()
        self.tables = track_module(
            self.tracker,
            self.model.embeddings,
            optimizer=self._row_optimizer,
            columns=self._columns,
        )

    def stored_as(self, dtypes: Mapping[str, str]) -> list[Table]:
        """Return the tables of a store, with these dtypes by column, and f32 for the others."""
        columns = tuple(
            Column(name, dtypes.get(name, "f32"), self.shape.dim) for name in (ROW, *self._columns)
        )
        return [Table(table.name, columns) for table in self.tables]

    def train(self, until: int) -> None:
        """Train up to step ``until``, exclusive."""
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
        """Return float64[n]: the logit that each sample's label is 1."""
        self.model.eval()
        return compute_logits(self.model, samples.positions, samples.numbers)

    def parts(self) -> dict[str, bytes]:
        """Return a version's parts: dense weights and their optimizer's state, and the step.

        The first part also has the steps that the row optimizer counts for each table: Adam's next
        change of a row depends on them.
        """
        dense = [self.model.dense.state_dict(), self._dense_optimizer.state_dict()]
        file = io.BytesIO()
        torch.save([*dense, [state.get("step", 0) for state in self._row_states()]], file)
        return {DENSE: file.getvalue(), READER: json.dumps({"step": self.step}).encode()}

    def forget(self) -> None:
        """Fill all weights with NaN, so that a test notices what a restore leaves out."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float("nan"))

    def load_parts(self, parts: Mapping[str, bytes]) -> None:
        """Load the result of parts(), after TrainerOutput.restore() has loaded the rows."""
        weights, dense_state, row_steps = torch.load(io.BytesIO(parts[DENSE]), weights_only=True)
        self.model.dense.load_state_dict(weights)
        self._dense_optimizer.load_state_dict(dense_state)
        for state, step in zip(self._row_states(), row_steps, strict=True):
            state["step"] = step
        self.step = int(json.loads(parts[READER])["step"])

    def _row_states(self) -> list[dict[str, Any]]:
        weights = self.model.embeddings.parameters()
        return [self._row_optimizer.state[weight] for weight in weights]


def compute_logits(model: Callable[[Any, Any], Any], ids: Any, numbers: Any) -> Logits:
    """Return float64[n], in batches by model(integers[m, f], float32[m, d]) -> float32[m]."""
    batches = zip(ids.split(SCORING_BATCH), numbers.split(SCORING_BATCH), strict=True)
    with torch.no_grad():
        parts = [model(*batch) for batch in batches]
    logits: Logits = torch.cat(parts).double().numpy()
    return logits


def log_loss(logits: Logits, labels: Floats) -> float:
    """Return the mean log loss over the samples, in nats."""
    return float(np.mean(np.logaddexp(0, logits) - labels * logits))


def area_under_curve(logits: Logits, labels: Floats) -> float:
    """Return the probability that a sample of label 1 scores above one of label 0. Ties count half.

    Raise InvalidArgument unless both labels occur.
    """
    _, positions, counts = np.unique(logits, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[positions]
    ones = float(labels.sum())
    if not 0 < ones < len(labels):
        raise InvalidArgument(
            f"an AUC needs samples of both labels; {len(labels)} samples have {ones:.0f} of label 1"
        )
    below = ranks[labels == 1].sum() - ones * (ones + 1) / 2
    return float(below / (ones * (len(labels) - ones)))


def _perceptron(widths: list[int]) -> Any:
    layers: list[Any] = []
    for before, after in pairwise(widths):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])
