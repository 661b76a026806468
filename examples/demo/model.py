"""The demo's model: skip-gram with negative sampling over a stream of accesses, in numpy.

There is one row for each object, float32[dim]. Value 0 is the logarithm of the object's number of
accesses; values 1 to dim-1 are its vector v. In the model, object o follows object c with a
probability proportional to count(o) * exp(v_c . v_o), so untrained vectors predict by popularity.
The model learns the vectors from pairs (an access, one of the few accesses before it) against
negatives drawn from all accesses so far (Mikolov et al. 2013), with one AdaGrad step size for each
row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "Gradient",
    "Settings",
    "SkipGram",
    "compute_gradient",
    "compute_pair_loss",
    "sum_by_key",
]

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

EPSILON: Final = 1e-3  # AdaGrad's initial sum: the first step of a row is about the learning rate


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings chosen by the hit rates (ranking.py) on accesses 100,000 to 400,000 of the trace.

    There the rows reach 37.5 % and popularity 35.6 %. On accesses 400,000 to 700,000, which did
    not influence the choice, the rows reach 35.0 % and popularity 33.5 %. Learning rates of 0.1 to
    0.2, windows of 10 to 50 and start norms of 1 to 4 are within half a point of each other. In
    these accesses little but popularity and recency predicts the next one: exact counts of the
    objects that followed each object within 50 accesses reach 36.8 %, where popularity has 34.2 %.
    """

    dim: int = 64
    window: int = 10  # an access is paired with one of this many accesses before it
    pairs: int = 5  # pairs drawn for each access
    negatives: int = 5  # the weight of the negatives: this many for each pair
    shared_negatives: int = 512  # drawn once a batch and used by all of its pairs
    batch: int = 1000  # accesses
    learning_rate: float = 0.2
    start_norm: float = 2.0  # expected squared length of an untrained vector
    shrink: float = 0.02  # the share of every vector that sweep() removes


@dataclass(frozen=True, slots=True)
class Gradient:
    """Gradients by key. keys: int64[u], distinct and sorted; values: float32[u, dim-1]."""

    keys: Indices
    values: Floats


def sum_by_key(keys: Indices, values: Floats) -> Gradient:
    """Sum the values of each distinct key. keys: int64[m], values: float32[m, d]."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    return Gradient(ordered[starts], np.add.reduceat(values[order], starts, axis=0))


def _sigmoid(x: Floats) -> Floats:
    return (1 / (1 + np.exp(-x))).astype(np.float32, copy=False)


def compute_gradient(
    vectors: Floats, centres: Indices, targets: Indices, noise: Indices, negatives: int
) -> Gradient:
    """Return the gradient of compute_pair_loss() with respect to the vectors that occur.

    vectors: float32[n, d]; centres, targets: int64[p]; noise: int64[q], the shared negatives.
    """
    shift = np.float32(np.log(negatives))
    distinct, positions = np.unique(centres, return_inverse=True)
    v = vectors[distinct]
    v_targets, v_noise = vectors[targets], vectors[noise]
    v_centres = v[positions]
    pull = _sigmoid(np.einsum("ij,ij->i", v_centres, v_targets) - shift) - np.float32(1)
    weight = np.bincount(positions, minlength=len(distinct)) * (negatives / len(noise))
    push = _sigmoid(v @ v_noise.T - shift) * weight.astype(np.float32)[:, None]
    return sum_by_key(
        np.concatenate([centres, targets, distinct, noise]),
        np.concatenate(
            [pull[:, None] * v_targets, pull[:, None] * v_centres, push @ v_noise, push.T @ v]
        ),
    )


def compute_pair_loss(
    vectors: npt.NDArray[np.float64],
    centres: Indices,
    targets: Indices,
    noise: Indices,
    negatives: int,
) -> float:
    """Return the loss that compute_gradient() descends, one pair at a time: slow, for tests."""
    shift = np.log(negatives)
    loss = 0.0
    for centre, target in zip(centres, targets, strict=True):
        loss += np.log1p(np.exp(-(vectors[centre] @ vectors[target] - shift)))
        scores = vectors[noise] @ vectors[centre] - shift
        loss += negatives * float(np.mean(np.log1p(np.exp(scores))))
    return float(loss)


class SkipGram:
    """The rows of all objects, learned online. One thread.

    A server should serve ``rows`` float32[n, dim] of the objects in ``present`` bool[n].
    ``changed`` bool[n] marks the objects whose row or presence changed since take_changed().
    """

    def __init__(self, objects: int, settings: Settings, seed: int) -> None:
        self.settings = settings
        self._random = np.random.default_rng(seed)
        scale = np.sqrt(settings.start_norm / (settings.dim - 1))
        self._start = self._random.standard_normal((objects, settings.dim), np.float32)
        self._start *= np.float32(scale)
        self._start[:, 0] = 0
        self.rows: Floats = self._start.copy()
        self.present = np.zeros(objects, np.bool_)
        self.changed = np.zeros(objects, np.bool_)
        self._squares = np.full(objects, EPSILON, np.float32)
        self._counts = np.zeros(objects, np.int64)
        self._last_access = np.zeros(objects, np.int64)

    def learn(self, accesses: Indices, begin: int, end: int) -> None:
        """Learn from accesses[begin:end]; only these and earlier accesses are read."""
        settings = self.settings
        for start in range(begin, end, settings.batch):
            stop = min(end, start + settings.batch)
            self._count(accesses, start, stop)
            first = max(start, settings.window)
            if first < stop:
                self._step(accesses, first, stop)

    def _count(self, accesses: Indices, start: int, stop: int) -> None:
        objects, first, times = np.unique(
            accesses[start:stop][::-1], return_index=True, return_counts=True
        )
        self._counts[objects] += times
        self._last_access[objects] = stop - 1 - first
        self.present[objects] = True
        self.changed[objects] = True
        self.rows[objects, 0] = np.log(self._counts[objects])

    def _step(self, accesses: Indices, first: int, stop: int) -> None:
        settings, random = self.settings, self._random
        positions = np.arange(first, stop)
        back = random.integers(1, settings.window + 1, (settings.pairs, len(positions)))
        centres = accesses[positions[None, :] - back].ravel()
        targets = np.tile(accesses[first:stop], settings.pairs)
        noise = accesses[random.integers(0, stop, settings.shared_negatives)]
        noise = noise[self.present[noise]]
        gradient = compute_gradient(self.rows[:, 1:], centres, targets, noise, settings.negatives)
        keys, values = gradient.keys, gradient.values
        self._squares[keys] += np.mean(values * values, axis=1)
        rate = settings.learning_rate / np.sqrt(self._squares[keys])
        self.rows[keys, 1:] -= rate[:, None].astype(np.float32) * values
        self.changed[keys] = True

    def expire(self, now: int, idle: int, count_max: int, limit: int) -> int:
        """Forget at most ``limit`` objects, those unused for longest first. Return their number.

        An object expires if it is not among the last ``idle`` accesses before ``now``, and has at
        most ``count_max`` accesses in all. If it is accessed later, it starts again from its first
        row.
        """
        cold = self.present & (self._last_access < now - idle) & (self._counts <= count_max)
        objects = np.flatnonzero(cold)
        objects = objects[np.argsort(self._last_access[objects], kind="stable")[:limit]]
        self.present[objects] = False
        self.changed[objects] = True
        self.rows[objects] = self._start[objects]
        self._squares[objects] = EPSILON
        self._counts[objects] = 0
        return len(objects)

    def sweep(self) -> None:
        """Apply weight decay: shrink every vector, so every row changes."""
        self.rows[self.present, 1:] *= np.float32(1 - self.settings.shrink)
        self.changed |= self.present

    def take_changed(self) -> Indices:
        """Return int64[u]: the objects that changed since the last call."""
        objects = np.flatnonzero(self.changed)
        self.changed[objects] = False
        return objects
