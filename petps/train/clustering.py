"""Grouping of samples that share keys into one micro-batch (NestPipe V.C): fewer keys cross twice.

A step's gradients do not depend on which micro-batch a sample is in. The bytes transferred do,
because keys are deduplicated only within a micro-batch.

Owns:        cluster(), dedup_ratio(), ByKeys (for Pipeline's ``arrange``).
Never does:  drop, repeat or change a sample.
Called by:   the prefetch stage of Pipeline, or offline.
Invariants:  the order is a permutation; the micro-batches that divide() makes of it have together
             no more distinct keys than those of the given order; the result depends only on the
             keys and the seed.
Threads:     any for functions; a ByKeys belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from petps.errors import InvalidArgument
from petps.train.batch import Batch, Ragged, divide
from petps.train.tracker import jagged_unique

__all__ = ["ByKeys", "Clustering", "cluster", "dedup_ratio"]

Ints = npt.NDArray[np.int64]

# Sweeps along the line, and rounds of moves between micro-batches. More of either gains less than
# 1 % on batches of sessions and of independent fields.
SWEEPS: Final = 12
ROUNDS: Final = 6


@dataclass(frozen=True, slots=True)
class Clustering:
    """An order of the samples, and the distinct keys before and after."""

    order: Ints
    """int64[samples]: micro-batch m has samples order[bounds[m]:bounds[m + 1]], ascending."""
    bounds: Ints
    """int64[micro-batches + 1]"""
    distinct: int
    """The number of distinct keys of the whole batch."""
    before: int
    """The sum of the distinct keys of each micro-batch, in the given order."""
    after: int
    """The same sum in this order."""


def cluster(
    keys: Mapping[str, Ragged],
    micro_batches: int,
    *,
    features: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Clustering:
    """Return an order of a batch's samples that groups samples with common keys.

    features: maps a feature to the table that has its keys, as in Pipeline; a key of two tables
    counts as two. Takes O(keys x micro-batches): 20 ms for 2,048 samples of 25 keys and 4
    micro-batches.

    Raises InvalidArgument if micro_batches is below 1 or features differ in samples.
    """
    batch = _find_pairs(keys, micro_batches, features)
    assignment = batch.assign(np.arange(batch.samples))
    before = best = batch.count_distinct(assignment)
    if micro_batches > 1 and batch.samples > 1:
        for candidate in batch.sweep(np.random.default_rng(seed)):
            distinct = batch.count_distinct(candidate)
            if distinct < best:
                best, assignment = distinct, candidate
        for _ in range(ROUNDS):
            candidate = batch.move(assignment)
            distinct = batch.count_distinct(candidate)
            if distinct >= best:
                break
            best, assignment = distinct, candidate
    order = np.argsort(assignment, kind="stable")
    return Clustering(order, batch.bounds, len(batch.count), before, best)


def dedup_ratio(
    keys: Mapping[str, Ragged],
    micro_batches: int,
    order: Ints | None = None,
    *,
    features: Mapping[str, str] | None = None,
) -> float:
    """Return the distinct keys of all micro-batches over those of the batch: 1 at best.

    order: of the samples before they are cut; None: the given order. Returns 1 for a batch
    without keys. Raises InvalidArgument if order is no permutation of the samples.
    """
    batch = _find_pairs(keys, micro_batches, features)
    given_order = np.arange(batch.samples)
    if order is not None and not np.array_equal(np.sort(order), given_order):
        raise InvalidArgument(f"order is no permutation of the {batch.samples} samples")
    if len(batch.count) == 0:
        return 1.0
    assignment = batch.assign(given_order if order is None else order)
    return batch.count_distinct(assignment) / len(batch.count)


class ByKeys:
    """An ``arrange`` for Pipeline: clusters each batch for a given number of micro-batches."""

    def __init__(
        self, micro_batches: int, *, features: Mapping[str, str] | None = None, seed: int = 0
    ) -> None:
        self._micro_batches = micro_batches
        self._features = features
        self._seed = seed
        self._distinct = self._before = self._after = 0

    def __call__(self, batch: Batch) -> Batch:
        """Return the same samples in the order in which they are cut into micro-batches."""
        if not batch.keys:
            return batch
        clusters = cluster(
            batch.keys, self._micro_batches, features=self._features, seed=self._seed
        )
        self._distinct += clusters.distinct
        self._before += clusters.before
        self._after += clusters.after
        return batch.select(clusters.order)

    @property
    def ratios(self) -> tuple[float, float]:
        """The dedup ratio of all batches so far, (in the given order, clustered)."""
        return self._before / max(1, self._distinct), self._after / max(1, self._distinct)


def _find_pairs(
    keys: Mapping[str, Ragged], micro_batches: int, features: Mapping[str, str] | None
) -> _KeyPairs:
    """Return the batch as distinct pairs of a sample and the number of a key."""
    counts = {name: ragged.samples for name, ragged in keys.items()}
    if len(set(counts.values())) > 1:
        raise InvalidArgument(f"all features must have the same number of samples, got {counts}")
    by_table: dict[str, list[Ragged]] = {}
    for name, ragged in keys.items():
        by_table.setdefault((features or {}).get(name, name), []).append(ragged)
    sorted_by_table = [ragged for group in by_table.values() for ragged in group]
    values = np.concatenate([np.empty(0, np.uint64), *(ragged.keys for ragged in sorted_by_table)])
    lengths = [sum(len(ragged.keys) for ragged in group) for group in by_table.values()]
    offsets = np.cumsum([0, *lengths]).astype(np.uint64)
    unique = jagged_unique(values, offsets, inverse=True)
    assert unique.inverse is not None
    number = np.repeat(unique.offsets[:-1].astype(np.int64), lengths) + unique.inverse
    samples = max(counts.values(), default=0)
    sample = [np.repeat(np.arange(samples), np.diff(ragged.offsets)) for ragged in sorted_by_table]
    distinct = max(1, len(unique.ids))
    pairs = np.concatenate([np.empty(0, np.int64), *sample]) * distinct + number
    distinct_pairs = jagged_unique(pairs, np.array([0, len(pairs)])).ids.astype(np.int64)
    number = distinct_pairs % distinct
    count = np.bincount(number, minlength=len(unique.ids))
    bounds = np.array(divide(samples, micro_batches))
    return _KeyPairs(distinct_pairs // distinct, number, count, samples, bounds)


@dataclass(slots=True)
class _KeyPairs:
    """A batch as pairs (sample, number of a key). An assignment has each sample's micro-batch."""

    sample: Ints
    number: Ints
    count: Ints  # the number of samples of each key
    samples: int
    bounds: Ints

    def assign(self, order: Ints) -> Ints:
        """Return int64[samples]: the micro-batch of each sample when this order is cut."""
        assignment = np.empty(self.samples, np.int64)
        sizes = np.diff(self.bounds)
        assignment[order] = np.repeat(np.arange(len(sizes)), sizes)
        return assignment

    def count_distinct(self, assignment: Ints) -> int:
        """Return the sum of the distinct keys of each micro-batch."""
        parts = len(self.bounds) - 1
        has_key = np.zeros(len(self.count) * parts, np.bool_)
        has_key[self.number * parts + assignment[self.sample]] = True
        return int(np.count_nonzero(has_key))

    def sweep(self, random: np.random.Generator) -> list[Ints]:
        """Return assignments by least hash, then after each sweep along a line of samples.

        The first order sorts samples by the least hash of a key that other samples have too, but
        no more than a micro-batch holds. Then, in each sweep, a key's place is the middle of its
        samples, and a sample moves to the middle of its keys. Frequent keys weigh less, and a key
        of all samples weighs nothing. Samples that belong together meet, wherever they begin.
        """
        order = self._sort_by_least_hash(random)
        assignments = [self.assign(order)]
        weight = np.where(self.count > 1, np.log(self.samples / self.count), 0).clip(min=0)
        weights = weight[self.number]
        sums = np.bincount(self.sample, weights, self.samples)
        place = np.empty(self.samples)
        place[order] = np.arange(self.samples)
        for _ in range(SWEEPS):
            middle = np.bincount(self.number, place[self.sample], len(self.count)) / self.count
            pulls = np.bincount(self.sample, weights * middle[self.number], self.samples)
            np.divide(pulls, sums, out=place, where=sums > 0)
            order = np.argsort(place, kind="stable")
            place[order] = np.arange(self.samples)
            assignments.append(self.assign(order))
        return assignments

    def _sort_by_least_hash(self, random: np.random.Generator) -> Ints:
        size = np.diff(self.bounds).max()
        shared = (self.count > 1) & (self.count <= size)
        pairs = shared[self.number]
        hashes = random.permutation(len(self.count))
        least = np.full(self.samples, len(self.count))
        np.minimum.at(least, self.sample[pairs], hashes[self.number[pairs]])
        return np.argsort(least, kind="stable")

    def move(self, assignment: Ints) -> Ints:
        """Move samples to the micro-batch that already has most of their keys, while it has room.

        The samples that gain most choose first.
        """
        parts = len(self.bounds) - 1
        own = assignment[self.sample]
        count_in_part = np.bincount(self.number * parts + own, minlength=len(self.count) * parts)
        score = np.empty((self.samples, parts))
        for part in range(parts):
            others = count_in_part[self.number * parts + part] - (own == part) > 0
            score[:, part] = np.bincount(self.sample, others, self.samples)
        score[np.arange(self.samples), assignment] += 0.5  # a sample that gains nothing stays
        best = np.sort(score, axis=1)
        waiting = np.argsort(best[:, -2] - best[:, -1], kind="stable")
        room = np.diff(self.bounds)
        assignment = np.empty(self.samples, np.int64)
        while len(waiting) > 0:
            choice = score[waiting].argmax(axis=1)
            is_refused = np.zeros(len(waiting), np.bool_)
            for part in range(parts):
                wanting = np.flatnonzero(choice == part)
                assignment[waiting[wanting[: room[part]]]] = part
                is_refused[wanting[room[part] :]] = True
                room[part] -= min(room[part], len(wanting))
            score[:, room == 0] = -1
            waiting = waiting[is_refused]
        return assignment
