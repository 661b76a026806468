"""Grouping of samples that share keys into one micro-batch (NestPipe V.C): fewer keys cross twice.

A step's gradients do not depend on which micro-batch a sample is in. The bytes transferred do,
because keys are deduplicated only within a micro-batch.

Owns:        cluster(), dedup_ratio(), ByKeys (for Pipeline's ``arrange``).
Never does:  drop, repeat or change a sample.
Called by:   the prefetch stage of Pipeline, or offline.
Invariants:  the order is a permutation; the micro-batches that cuts() makes of it have together
             no more distinct keys than those of the given order; the result depends only on the
             keys and the seed.
Threads:     functions; a ByKeys belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from petps.errors import InvalidArgument
from petps.train.batch import Batch, Ragged, cuts
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
    sample, number, count, samples = _number_keys(keys, features or {})
    batch = _KeyPairs(sample, number, count, samples, np.array(cuts(samples, micro_batches)))
    assignment = batch.assign(np.arange(samples))
    before = best = batch.distinct_keys(assignment)
    if micro_batches > 1 and samples > 1:
        for candidate in batch.candidates(np.random.default_rng(seed)):
            worth = batch.distinct_keys(candidate)
            if worth < best:
                best, assignment = worth, candidate
        for _ in range(ROUNDS):
            candidate = batch.move(assignment)
            worth = batch.distinct_keys(candidate)
            if worth >= best:
                break
            best, assignment = worth, candidate
    order = np.argsort(assignment, kind="stable")
    return Clustering(order, batch.bounds, len(count), before, best)


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
    sample, number, count, samples = _number_keys(keys, features or {})
    batch = _KeyPairs(sample, number, count, samples, np.array(cuts(samples, micro_batches)))
    if order is None:
        order = np.arange(samples)
    elif not np.array_equal(np.sort(order), np.arange(samples)):
        raise InvalidArgument(f"order is no permutation of the {samples} samples")
    return batch.distinct_keys(batch.assign(order)) / max(1, len(count)) if len(count) else 1.0


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


def _number_keys(
    keys: Mapping[str, Ragged], features: Mapping[str, str]
) -> tuple[Ints, Ints, Ints, int]:
    """Return the batch as distinct pairs of a sample and the number of a key.

    Returns (sample int64[n], number int64[n], the count of samples of each key, samples).
    """
    counts = {name: ragged.samples for name, ragged in keys.items()}
    if len(set(counts.values())) > 1:
        raise InvalidArgument(f"features differ in samples: {counts}")
    by_table: dict[str, list[Ragged]] = {}
    for name, ragged in keys.items():
        by_table.setdefault(features.get(name, name), []).append(ragged)
    inorder = [ragged for group in by_table.values() for ragged in group]
    values = np.concatenate([np.empty(0, np.uint64), *(ragged.keys for ragged in inorder)])
    lengths = [sum(len(ragged.keys) for ragged in group) for group in by_table.values()]
    offsets = np.cumsum([0, *lengths]).astype(np.uint64)
    unique = jagged_unique(values, offsets, inverse=True)
    assert unique.inverse is not None
    number = np.repeat(unique.offsets[:-1].astype(np.int64), lengths) + unique.inverse
    samples = max(counts.values(), default=0)
    sample = [np.repeat(np.arange(samples), np.diff(ragged.offsets)) for ragged in inorder]
    distinct = max(1, len(unique.ids))
    pairs = np.concatenate([np.empty(0, np.int64), *sample]) * distinct + number
    once = jagged_unique(pairs, np.array([0, len(pairs)])).ids.astype(np.int64)
    number = once % distinct
    return once // distinct, number, np.bincount(number, minlength=len(unique.ids)), samples


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

    def distinct_keys(self, assignment: Ints) -> int:
        """Return the sum of the distinct keys of each micro-batch."""
        parts = len(self.bounds) - 1
        there = np.zeros(len(self.count) * parts, np.bool_)
        there[self.number * parts + assignment[self.sample]] = True
        return int(np.count_nonzero(there))

    def candidates(self, random: np.random.Generator) -> list[Ints]:
        """Return assignments by least hash, then after each sweep along a line of samples.

        The first order sorts samples by the least hash of a key that other samples have too, but
        no more than a micro-batch holds. Then, in each sweep, a key's place is the middle of its
        samples, and a sample moves to the middle of its keys. Frequent keys weigh less, and a key
        of all samples weighs nothing. Samples that belong together meet, wherever they begin.
        """
        order = self._by_least_hash(random)
        assignments = [self.assign(order)]
        weight = np.where(self.count > 1, np.log(self.samples / self.count), 0).clip(min=0)
        weights = weight[self.number]
        sums = np.bincount(self.sample, weights, self.samples)
        place = np.empty(self.samples)
        place[order] = np.arange(self.samples)
        for _ in range(SWEEPS):
            middle = np.bincount(self.number, place[self.sample], len(self.count)) / self.count
            drawn = np.bincount(self.sample, weights * middle[self.number], self.samples)
            np.divide(drawn, sums, out=place, where=sums > 0)
            order = np.argsort(place, kind="stable")
            place[order] = np.arange(self.samples)
            assignments.append(self.assign(order))
        return assignments

    def _by_least_hash(self, random: np.random.Generator) -> Ints:
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
        stand = np.bincount(self.number * parts + own, minlength=len(self.count) * parts)
        score = np.empty((self.samples, parts))
        for part in range(parts):
            others = stand[self.number * parts + part] - (own == part) > 0
            score[:, part] = np.bincount(self.sample, others, self.samples)
        score[np.arange(self.samples), assignment] += 0.5  # a sample that gains nothing stays
        best = np.sort(score, axis=1)
        waiting = np.argsort(best[:, -2] - best[:, -1], kind="stable")
        room = np.diff(self.bounds)
        moved = np.empty(self.samples, np.int64)
        while len(waiting) > 0:
            wish = score[waiting].argmax(axis=1)
            refused = np.zeros(len(waiting), np.bool_)
            for part in range(parts):
                wanting = np.flatnonzero(wish == part)
                moved[waiting[wanting[: room[part]]]] = part
                refused[wanting[room[part] :]] = True
                room[part] -= min(room[part], len(wanting))
            score[:, room == 0] = -1
            waiting = waiting[refused]
        return moved
