"""Admission of new keys: a key gets a row once it occurred often enough, in the order of batches.

Owns:        Admission.
Never does:  touch rows; know which rank needs a key.
Called by:   sharded.py.
Invariants:  the counts are those after the last committed batch. Counts of later batches are kept
             separately until they are committed, so a version that is saved before that does not
             contain them.
Threads:     one thread calls count(), another commit(); a lock serialises them.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from petps.errors import DataLoss, FailedPrecondition, InvalidArgument

__all__ = ["Admission"]

Keys = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]
# If there are more newer counts than this, a pass over all counts merges them into the older ones.
NEWER_MAX: Final = 1 << 16


class Admission:
    """Counts of keys that have no row yet. A key is admitted in the batch that fills its count.

    threshold: how often a key must occur, this batch included; 1 admits every key at once and
    counts nothing. Memory: 12 bytes for each key that is not admitted.
    """

    def __init__(self, threshold: int = 1) -> None:
        if threshold < 1:
            raise InvalidArgument(f"threshold must be at least 1, got {threshold}")
        self.threshold = threshold
        self._mutex = threading.Lock()
        self._older = _KeyCounts()
        self._newer = _KeyCounts()  # takes precedence over the older count of the same key
        # The counts after the last committed batch take precedence over the newer ones. They keep
        # admitted keys too: the next batch may have looked for its rows before the rows that this
        # batch admitted were written.
        self._last = _KeyCounts()
        self._uncommitted: list[tuple[int, _KeyCounts]] = []  # by batch: the counts after it

    def count(self, batch: int, keys: Keys, seen: npt.NDArray[np.integer]) -> Mask:
        """Return bool[n]: which of ``keys`` (ascending, without a row) this batch admits.

        seen: integers[n], how often each key occurs in the batch. Batches come in order. Raises
        FailedPrecondition if they do not.
        """
        if self.threshold == 1:
            return np.ones(len(keys), np.bool_)
        with self._mutex:
            if self._uncommitted and batch <= self._uncommitted[-1][0]:
                raise FailedPrecondition(
                    f"batch {batch} must be above {self._uncommitted[-1][0]}, counted before it"
                )
            after = np.zeros(len(keys), np.uint64)
            ahead = (counts for _, counts in self._uncommitted)
            for counts in (self._older, self._newer, self._last, *ahead):
                counts.copy_to(after, keys)
            after = np.minimum(after + seen.astype(np.uint64), np.iinfo(np.uint32).max)
            self._uncommitted.append((batch, _KeyCounts(keys, after.astype(np.uint32))))
            return after >= self.threshold

    def commit(self, batch: int) -> None:
        """Make the counts of the batches up to this one permanent. Stop counting admitted keys."""
        with self._mutex:
            while self._uncommitted and self._uncommitted[0][0] <= batch:
                self._newer = self._newer.updated_by(self._last)
                self._last = self._uncommitted.pop(0)[1]
            if len(self._newer.keys) > NEWER_MAX:
                self._fold()

    def forget_ahead(self) -> None:
        """Forget uncommitted counts. Those batches come again, or never."""
        with self._mutex:
            self._uncommitted = []

    def _fold(self) -> None:
        self._older = self._older.updated_by(self._newer).below(self.threshold)
        self._newer = _KeyCounts()

    def save(self) -> bytes:
        """Return the committed counts, for load()."""
        with self._mutex:
            out = io.BytesIO()
            self._fold()
            counts = self._older.updated_by(self._last).below(self.threshold)
            np.savez(out, keys=counts.keys, counts=counts.counts)
            return out.getvalue()

    def load(self, bodies: Sequence[bytes], owns: Callable[[Keys], Mask] | None = None) -> None:
        """Replace all counts by those that save() returned.

        owns: accepts the keys to keep (None: all). Forgets uncommitted counts. Raises DataLoss;
        then nothing has changed.
        """
        older = _KeyCounts()
        for body in bodies:
            counts = _read(body)
            if owns is not None:
                is_own = owns(counts.keys)
                counts = _KeyCounts(counts.keys[is_own], counts.counts[is_own])
            older = older.updated_by(counts)
        with self._mutex:
            self._older, self._newer, self._last = older, _KeyCounts(), _KeyCounts()
            self._uncommitted = []


@dataclass(frozen=True, slots=True)
class _KeyCounts:
    """Counts by key. keys: uint64[n], ascending, distinct; counts: uint32[n]."""

    keys: Keys = field(default_factory=lambda: np.empty(0, np.uint64))
    counts: Counts = field(default_factory=lambda: np.empty(0, np.uint32))

    def copy_to(self, after: npt.NDArray[np.uint64], keys: Keys) -> None:
        """Set after[i] to the count of keys[i], for the keys that have a count here."""
        if len(self.keys) == 0:
            return
        where = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        is_here = self.keys[where] == keys
        after[is_here] = self.counts[where[is_here]]

    def updated_by(self, newer: _KeyCounts) -> _KeyCounts:
        """Return the union. A key that is in both has the count of ``newer``."""
        is_kept = ~np.isin(self.keys, newer.keys, assume_unique=True)
        keys = np.concatenate([self.keys[is_kept], newer.keys])
        order = np.argsort(keys, kind="stable")
        counts = np.concatenate([self.counts[is_kept], newer.counts])
        return _KeyCounts(keys[order], counts[order])

    def below(self, threshold: int) -> _KeyCounts:
        """Return the counts of the keys that are not admitted."""
        is_below = self.counts < threshold
        return _KeyCounts(self.keys[is_below], self.counts[is_below])


def _read(body: bytes) -> _KeyCounts:
    try:
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            keys, counts = arrays["keys"], arrays["counts"]
    except (OSError, ValueError, KeyError) as error:
        raise DataLoss(f"admission counts cannot be read: {error}") from error
    if keys.dtype != np.uint64 or counts.dtype != np.uint32 or keys.shape != counts.shape:
        raise DataLoss("admission counts are not uint64 keys and uint32 counts of one length")
    return _KeyCounts(keys, counts)
