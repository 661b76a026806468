"""Next-access prediction by served rows, and by popularity: the demo's measure of the rows' value.

At a place of the stream, the task is to predict which object comes next. The ranker adds up the
rows of the last HISTORY accesses, newest first with weights 1, FADE, FADE^2, ... Its prediction
is the K candidates that this sum ranks highest. The candidates are the CANDIDATES most accessed
objects so far. The baseline predicts the K objects most accessed so far. Both know the accesses
up to the newest delta (the sum also knows the few since then), but never the access to be
predicted.
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
PLACES: Final = 1000  # places of the stream for each call of ask()
BLOCK: Final = 250  # places scored at once: 250 x 20,000 scores are 20 MB


@dataclass(frozen=True, slots=True)
class Hits:
    """The number of predicted accesses, and how many were among the K of each prediction."""

    asked: int
    rows: int
    popularity: int

    def __add__(self, other: Hits) -> Hits:
        return Hits(
            self.asked + other.asked, self.rows + other.rows, self.popularity + other.popularity
        )


class Ranker:
    """A predictor at random places. ``rows_of``: int64[n] objects -> float32[n, dim]."""

    def __init__(self, accesses: Indices, objects: int, rows_of: RowsOf, seed: int) -> None:
        self._accesses = accesses
        self._objects = objects
        self._rows_of = rows_of
        self._random = np.random.default_rng(seed)

    def ask(self, begin: int, end: int, places: int = PLACES) -> Hits:
        """Predict accesses in [begin, end); the served rows come from those before ``begin``."""
        places = min(places, end - begin)
        chosen = np.sort(self._random.choice(end - begin, places, replace=False)) + begin
        counts = np.bincount(self._accesses[:begin], minlength=self._objects)
        candidates = np.argsort(-counts, kind="stable")[:CANDIDATES]
        candidates = candidates[counts[candidates] > 0]
        place_of = np.full(self._objects, -1)
        place_of[candidates] = np.arange(len(candidates))
        targets = place_of[self._accesses[chosen]]
        rows = self._rows_of(candidates)
        hits = 0
        for start in range(0, places, BLOCK):
            block = slice(start, start + BLOCK)
            scores = self._sums(chosen[block]) @ rows[:, 1:].T + rows[:, 0]
            hits += _in_first_k(scores, targets[block])
        popular = int(np.count_nonzero((targets >= 0) & (targets < K)))
        return Hits(places, hits, popular)

    def _sums(self, places: Indices) -> Floats:
        """Return float32[n, dim-1]: the weighted sum of the last vectors before each place."""
        before = self._accesses[places[:, None] - 1 - np.arange(HISTORY)]
        distinct, where = np.unique(before, return_inverse=True)
        vectors = self._rows_of(distinct)[:, 1:]
        weights = (FADE ** np.arange(HISTORY)).astype(np.float32)
        sums: Floats = np.einsum("h,nhd->nd", weights, vectors[where.reshape(before.shape)])
        return sums


def _in_first_k(scores: Floats, targets: Indices) -> int:
    """Count the targets with fewer than K candidates scored above them; -1 is no candidate."""
    known = targets >= 0
    own = scores[np.arange(len(targets)), np.maximum(targets, 0)]
    above = np.count_nonzero(scores > own[:, None], axis=1)
    return int(np.count_nonzero(known & (above < K)))
