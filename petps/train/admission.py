"""Admission of new keys: a key gets a row once it occurred often enough, in the order of batches.

Owns:        Admission (exact counts), FilterAdmission (a counting Bloom filter).
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
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps.delta.schema import partition_of
from petps.errors import DataLoss, FailedPrecondition, InvalidArgument
from petps.train.mix import mix

__all__ = ["Admission", "FilterAdmission"]

Keys = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]
# If there are more newer counts than this, a pass over all counts merges them into the older ones.
NEWER_MAX: Final = 1 << 16
# Counters of a filter that a key has. With 4, a filter with 8 counters for each key that it has
# ever seen admits 2 % of new keys too early.
HASHES: Final = 4
SALTS: Final = mix(np.arange(1, HASHES + 1, dtype=np.uint64))
# With fewer counters in a partition, the counters of a key would be the same ones.
PARTITION_COUNTERS_MIN: Final = 64


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
            _check_order(self._uncommitted, batch)
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

    def forget_admitted(self) -> None:
        """Forget the counts of admitted keys, whose rows may be removed from here on.

        All counted batches must be committed. Then a key without a row counts from 0 again.
        """
        with self._mutex:
            self._newer, self._last = self._newer.updated_by(self._last), _KeyCounts()
            self._fold()

    def estimate_false(self) -> None:
        """Return None: exact counts admit no key too early."""

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
            arrays = _read(body, "keys", "counts")
            counts = _KeyCounts(arrays["keys"], arrays["counts"])
            if counts.keys.dtype != np.uint64 or counts.counts.dtype != np.uint32:
                raise DataLoss("admission counts are not uint64 keys and uint32 counts")
            if counts.keys.shape != counts.counts.shape:
                raise DataLoss("admission counts are not of the length of their keys")
            if owns is not None:
                is_own = owns(counts.keys)
                counts = _KeyCounts(counts.keys[is_own], counts.counts[is_own])
            older = older.updated_by(counts)
        with self._mutex:
            self._older, self._newer, self._last = older, _KeyCounts(), _KeyCounts()
            self._uncommitted = []


class FilterAdmission:
    """A counting Bloom filter of keys that have no row yet: bounded memory, whatever the keys.

    A key counts at least as often as it occurred, so it is never admitted too late. It may share
    its counters with others, and be admitted too early. Each partition of the log has a filter of
    its own, so which keys are admitted does not depend on the number of ranks. The counts of an
    admitted key stay: if its row is removed, the key is admitted again at once.

    Args:
        threshold: How often a key must occur, this batch included.
        filter_bytes: The memory of the counters of all partitions, thus of all ranks together.
        partitions: The number of partitions.
        owned: The partitions of this rank.

    Raises:
        InvalidArgument: There are too few bytes for the partitions.
    """

    def __init__(self, threshold: int, filter_bytes: int, partitions: int, owned: range) -> None:
        self.threshold = threshold
        # A counter stops at the threshold, which is all that counts.
        dtype = np.min_scalar_type(threshold)
        self._width = filter_bytes // partitions // dtype.itemsize
        if self._width < PARTITION_COUNTERS_MIN:
            need = PARTITION_COUNTERS_MIN * partitions * dtype.itemsize
            raise InvalidArgument(
                f"filter_bytes must be at least {need} with {partitions} partitions and threshold "
                f"{threshold}, got {filter_bytes}"
            )
        self._partitions = partitions
        self._owned = owned
        self._mutex = threading.Lock()
        self._counters = np.zeros((len(owned), self._width), dtype)
        self._uncommitted: list[tuple[int, _KeyCounts]] = []  # by batch: counters after it

    def count(self, batch: int, keys: Keys, seen: npt.NDArray[np.integer]) -> Mask:
        """See Admission."""
        places = self._places(keys)
        with self._mutex:
            _check_order(self._uncommitted, batch)
            now = self._counters.reshape(-1)[places.view(np.int64)].astype(np.uint64)
            for _, counts in self._uncommitted:
                counts.copy_to(now, places)
            after = np.minimum(now.min(axis=1) + seen.astype(np.uint64), self.threshold)
            # Raise only counters below the new count: the others have counted another key.
            raised = np.maximum(now, after[:, None]).astype(np.uint32)
            distinct, where = np.unique(places, return_inverse=True)
            values = np.zeros(len(distinct), np.uint32)
            np.maximum.at(values, where.reshape(-1), raised.reshape(-1))
            self._uncommitted.append((batch, _KeyCounts(distinct, values)))
            admitted: Mask = after >= self.threshold
            return admitted

    def commit(self, batch: int) -> None:
        """See Admission."""
        with self._mutex:
            while self._uncommitted and self._uncommitted[0][0] <= batch:
                counts = self._uncommitted.pop(0)[1]
                self._counters.reshape(-1)[counts.keys.view(np.int64)] = counts.counts

    def forget_ahead(self) -> None:
        """See Admission."""
        with self._mutex:
            self._uncommitted = []

    def forget_admitted(self) -> None:
        """Do nothing: no counter is of one key alone."""

    def estimate_false(self) -> float:
        """Return the chance that a key is admitted the first time that it occurs, once."""
        with self._mutex:
            is_near = self._counters >= self.threshold - 1
            return float(np.mean(is_near.mean(axis=1) ** HASHES))

    def save(self) -> bytes:
        """Return the committed counters of this rank's partitions, for load()."""
        out = io.BytesIO()
        with self._mutex:
            np.savez(out, counters=self._counters, of=np.array(self._describe()))
        return out.getvalue()

    def load(self, bodies: Sequence[bytes], owns: Callable[[Keys], Mask] | None = None) -> None:
        """Replace all counters by those that save() returned on each rank.

        Forgets uncommitted counts. Raises DataLoss, or InvalidArgument for another kind or size of
        counts; then nothing has changed.
        """
        del owns  # a partition has all of its keys
        counters = np.zeros_like(self._counters)
        for body in bodies:
            arrays = _read(body, "counters", "of")
            given, (first, *then) = arrays["counters"], arrays["of"].tolist()
            if then != self._describe()[1:]:
                names = ("partitions", "counters a partition", "threshold")
                had, has = (
                    ", ".join(f"{value} {name}" for name, value in zip(names, values, strict=True))
                    for values in (then, self._describe()[1:])
                )
                raise InvalidArgument(
                    f"the version has a filter of {had}, this table has {has}: give the tables the "
                    "partitions, threshold and filter_bytes that they had"
                )
            for number, partition in enumerate(self._owned):
                if first <= partition < first + len(given):
                    counters[number] = given[partition - first]
        with self._mutex:
            self._counters, self._uncommitted = counters, []

    def _describe(self) -> list[int]:
        """Return the first partition, and what must be equal where the counters are loaded."""
        return [self._owned.start, self._partitions, self._width, self.threshold]

    def _places(self, keys: Keys) -> Keys:
        """Return uint64[n, HASHES]: the places of the counters of keys of this rank."""
        number = partition_of(keys, self._partitions).astype(np.uint64)
        begin = (number - np.uint64(self._owned.start)) * np.uint64(self._width)
        return begin[:, None] + mix(keys[:, None] ^ SALTS) % np.uint64(self._width)


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


def _check_order(uncommitted: list[tuple[int, _KeyCounts]], batch: int) -> None:
    if uncommitted and batch <= uncommitted[-1][0]:
        raise FailedPrecondition(
            f"batch {batch} must be above {uncommitted[-1][0]}, counted before it"
        )


def _read(body: bytes, *names: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a body. Raise InvalidArgument if it has arrays of other names."""
    try:
        with np.load(io.BytesIO(body), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise DataLoss(f"admission counts cannot be read: {error}") from error
    if set(arrays) != set(names):
        raise InvalidArgument(
            f"the version has admission counts of another kind ({', '.join(sorted(arrays))}): give "
            "the table filter_bytes if it had a filter, and none if it had exact counts"
        )
    return arrays
