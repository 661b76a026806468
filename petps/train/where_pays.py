"""Cluster batches as long as that makes steps shorter (NestPipe V.C). PIPELINE.md, "Clustering".

Owns:        WherePays.
Never does:  change what a batch contains.
Called by:   lookup.py (the prefetch stage arranges batches), pipeline.py (reports each step).
Threads:     the prefetch stage's and the trainer's.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections.abc import Mapping
from typing import Final

from petps.train.batch import Batch
from petps.train.clustering import cluster

__all__ = ["WherePays"]

_log = logging.getLogger("petps.train")

# A trial has four blocks of batches: as given, clustered, as given, clustered.
BLOCK: Final = 12
BLOCKS: Final = 4
# The first steps of a block do not count, because the stages ahead work on those of the next one.
SETTLING: Final = 4
FIRST_TRIAL: Final = 16  # batches before it
# Batches between two trials. Each trial whose result is that clustering does not pay doubles it.
INTERVAL: Final = 1024
INTERVAL_MAX: Final = 16_384
# Steps must become shorter by this share.
LEAST_GAIN: Final = 0.02


class WherePays:
    """An ``arrange`` that clusters batches if steps are shorter with it, as trials measure.

    first: the number of the first batch. All ranks count the same batches, so they try at the same
    steps.
    """

    def __init__(
        self, micro_batches: int, *, features: Mapping[str, str] | None = None, first: int = 1
    ) -> None:
        self._micro_batches = micro_batches
        self._features = features
        self._mutex = threading.Lock()
        self._next = first
        self._trial = first + FIRST_TRIAL
        self._interval = INTERVAL
        self._seconds: tuple[list[float], list[float]] = ([], [])  # as given, clustered
        self._pays = False

    @property
    def pays(self) -> bool:
        """Whether batches are clustered now, as the last trial has decided."""
        return self._pays

    def __call__(self, batch: Batch) -> Batch:
        """Return the next batch, clustered or as given."""
        with self._mutex:
            number, self._next = self._next, self._next + 1
            place = number - self._trial
            is_trial = 0 <= place < BLOCK * BLOCKS
            if not (_is_clustered(place) if is_trial else self._pays):
                return batch
        clusters = cluster(batch.keys, self._micro_batches, features=self._features)
        if is_trial and clusters.after > (1 - LEAST_GAIN) * clusters.before:
            with self._mutex:  # there is nothing to gain, so the trial ends here
                self._decide(number, False, "has too few common keys")
            return batch
        return batch.select(clusters.order)

    def after(self, number: int, seconds: float) -> None:
        """Take the time that step ``number`` took, hooks left out."""
        with self._mutex:
            place = number - self._trial
            if not 0 <= place < BLOCK * BLOCKS:
                return
            if place % BLOCK >= SETTLING:
                self._seconds[_is_clustered(place)].append(seconds)
            if place < BLOCK * BLOCKS - 1:
                return
            given, clustered = map(statistics.median, self._seconds)
            pays = clustered < (1 - LEAST_GAIN) * given
            self._decide(
                number, pays, f"takes {1e3 * clustered:.2f} ms a step instead of {1e3 * given:.2f}"
            )

    def _decide(self, number: int, pays: bool, why: str) -> None:
        if pays or self._pays:
            self._interval = INTERVAL
        if pays != self._pays:
            _log.info("[train] batches are %sclustered: it %s", "" if pays else "not ", why)
        self._pays = pays
        self._seconds = ([], [])
        self._trial = number + self._interval
        if not pays:
            self._interval = min(2 * self._interval, INTERVAL_MAX)


def _is_clustered(place: int) -> bool:
    return place // BLOCK % 2 == 1
