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
BLOCK: Final = 48
BLOCKS: Final = 4
# The first steps of a block do not count. Until then the stages ahead use up the batches that they
# have prepared, if the prefetch stage is now too slow.
SETTLING: Final = 16
FIRST_TRIAL: Final = 16  # batches before it
# Batches between two trials; it doubles after each.
INTERVAL: Final = 4096
INTERVAL_MAX: Final = 65_536
# Steps must become shorter, and keys fewer, by this share.
LEAST_GAIN: Final = 0.02
# A trial that has lost the time of this number of steps ends. Short losses may be other programs'.
LOSS_STEPS: Final = 12
JUDGED: Final = 4  # the clustered batches by which a trial sees that there is nothing to gain


class WherePays:
    """An ``arrange`` that clusters batches if steps are shorter with it, as trials measure.

    A step counts for a kind of batches if its batch and all that were arranged during it are of
    that kind: a batch is arranged several steps before it is trained, and takes its time then.
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
        self._is_trying = True
        self._arranged = first  # the first batch that was not arranged when the last step ended
        self._seconds: tuple[list[float], list[float]] = ([], [])  # as given, clustered
        self._touched: list[float] = []  # of all steps that clustering may have made longer
        self._before = self._after = self._judged = 0
        self._pays = False

    @property
    def pays(self) -> bool:
        """Whether batches are clustered now, as the last trial has decided."""
        return self._pays

    def __call__(self, batch: Batch) -> Batch:
        """Return the next batch, clustered or as given."""
        with self._mutex:
            number, self._next = self._next, self._next + 1
            if number == self._trial + BLOCK * BLOCKS + self._interval:
                self._trial, self._is_trying = number, True
                self._interval = min(2 * self._interval, INTERVAL_MAX)
            if not self._clusters(number) or not batch.keys:
                return batch
        clusters = cluster(batch.keys, self._micro_batches, features=self._features)
        with self._mutex:
            if self._is_trial(number):
                self._judge(clusters.before, clusters.after)
        return batch.select(clusters.order)

    def after(self, number: int, seconds: float) -> None:
        """Take the time that step ``number`` took, hooks left out."""
        with self._mutex:
            # From the one that may have been in the middle of it when the step began.
            arranged, self._arranged = range(self._arranged - 1, self._next), self._next
            place = number - self._trial
            if not self._is_trial(number):
                return
            kind = self._clusters(number)
            if place % BLOCK >= SETTLING and all(self._clusters(n) == kind for n in arranged):
                self._seconds[kind].append(seconds)
            if kind or any(self._clusters(n) for n in arranged):
                self._touched.append(seconds)
            given, clustered = (statistics.median(times or [0.0]) for times in self._seconds)
            if self._loses(given):
                touched = statistics.median(self._touched)
                self._decide(
                    False, f"took {1e3 * touched:.2f} ms a step instead of {1e3 * given:.2f}"
                )
                return
            if place < BLOCK * BLOCKS - 1:
                return
            pays = 0 < clustered < (1 - LEAST_GAIN) * given
            self._decide(
                pays, f"takes {1e3 * clustered:.2f} ms a step instead of {1e3 * given:.2f}"
            )

    def _loses(self, given: float) -> bool:
        """Return whether this trial has lost so much that it ends. given: seconds of a step."""
        if not self._touched or not self._seconds[0]:
            return False
        lost = sum(self._touched) - len(self._touched) * given
        is_slow = statistics.median(self._touched) > (1 + LEAST_GAIN) * given
        return is_slow and lost > LOSS_STEPS * given

    def _is_trial(self, number: int) -> bool:
        return self._is_trying and 0 <= number - self._trial < BLOCK * BLOCKS

    def _clusters(self, number: int) -> bool:
        """Return whether a batch is clustered, as is known now."""
        if self._is_trial(number):
            return (number - self._trial) // BLOCK % 2 == 1
        return self._pays

    def _judge(self, before: int, after: int) -> None:
        """End a trial early if its first clustered batches save hardly any keys."""
        if self._judged == JUDGED:
            return
        self._judged += 1
        self._before, self._after = self._before + before, self._after + after
        if self._judged == JUDGED and self._after >= (1 - LEAST_GAIN) * self._before:
            self._decide(False, "has too few common keys")

    def _decide(self, pays: bool, why: str) -> None:
        if pays != self._pays:
            _log.info("[train] batches are %sclustered: it %s", "" if pays else "not ", why)
        self._pays = pays
        self._is_trying = False
        self._seconds, self._touched = ([], []), []
        self._before = self._after = self._judged = 0
