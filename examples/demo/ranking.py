"""Next-access prediction by served rows, and by popularity: the demo's measure of the rows' value.

At a position of the stream, the task is to predict the next object. The ranker adds up the rows of
the last HISTORY accesses, newest first with weights 1, FADE, FADE^2, ... It predicts the K
candidates that this sum ranks highest. The candidates are the CANDIDATES most accessed objects so
far. The baseline predicts the K objects most accessed so far. Both know the accesses up to the
newest delta (the sum also knows the few since then), but never the access to be predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["CANDIDATES", "HISTORY", "Hits", "K", "Ranker"]

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
RowsOf = Callable[[Indices], Floats]

K: Final = 50
CANDIDATES: Final = 20_000
HISTORY: Final = 20
FADE: Final = 0.9
POSITIONS: Final = 1000  # predicted by each call of predict()
BLOCK: Final = 250  # positions scored at once: 250 x 20,000 scores are 20 MB


@dataclass(frozen=True, slots=True)
class Hits:
    """The number of predicted accesses, and of hits: accesses among the K predicted objects."""

    asked: int
    rows: int
    popularity: int

    def __add__(self, other: Hits) -> Hits:
        return Hits(
            self.asked + other.asked, self.rows + other.rows, self.popularity + other.popularity
        )


class Ranker:
    """A predictor at random positions. ``rows_of``: int64[n] objects -> float32[n, dim]."""

    def __init__(self, accesses: Indices, objects: int, rows_of: RowsOf, seed: int) -> None:
        self._accesses = accesses
        self._objects = objects
        self._rows_of = rows_of
        self._random = np.random.default_rng(seed)

    def predict(self, begin: int, end: int, count: int = POSITIONS) -> Hits:
        """Predict ``count`` accesses in [begin, end) from those before ``begin``."""
        count = min(count, end - begin)
        positions = np.sort(self._random.choice(end - begin, count, replace=False)) + begin
        counts = np.bincount(self._accesses[:begin], minlength=self._objects)
        candidates = np.argsort(-counts, kind="stable")[:CANDIDATES]
        candidates = candidates[counts[candidates] > 0]
        candidate_of = np.full(self._objects, -1)
        candidate_of[candidates] = np.arange(len(candidates))
        targets = candidate_of[self._accesses[positions]]
        rows = self._rows_of(candidates)
        hits = 0
        for start in range(0, count, BLOCK):
            block = slice(start, start + BLOCK)
            scores = self._sum_history(positions[block]) @ rows[:, 1:].T + rows[:, 0]
            hits += _count_hits(scores, targets[block])
        popularity_hits = int(np.count_nonzero((targets >= 0) & (targets < K)))
        return Hits(count, hits, popularity_hits)

    def _sum_history(self, positions: Indices) -> Floats:
        """Return float32[n, dim-1]: the weighted sum of the last vectors before each position."""
        before = self._accesses[positions[:, None] - 1 - np.arange(HISTORY)]
        distinct, numbers = np.unique(before, return_inverse=True)
        vectors = self._rows_of(distinct)[:, 1:]
        weights = (FADE ** np.arange(HISTORY)).astype(np.float32)
        sums: Floats = np.einsum("h,nhd->nd", weights, vectors[numbers.reshape(before.shape)])
        return sums


def _count_hits(scores: Floats, targets: Indices) -> int:
    """Count the targets with fewer than K candidates scored above them; -1 is no candidate."""
    is_candidate = targets >= 0
    target_scores = scores[np.arange(len(targets)), np.maximum(targets, 0)]
    above = np.count_nonzero(scores > target_scores[:, None], axis=1)
    return int(np.count_nonzero(is_candidate & (above < K)))
