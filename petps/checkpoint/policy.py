"""Policies: how each version is written, and how older chunks change. STORE.md has the table.

Owns:        Policy and its six kinds: Full, OneShot, Consecutive, Intermittent, TwoD, Merged;
             LeftToOthers.
Never does:  read rows from a trainer; restore (a restore needs no policy).
Called by:   checkpointer.py.
Invariants:  arrange() changes no version: a store restores the same rows before and after it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar, Final

import numpy as np

from petps.checkpoint.chunk import Hashes, Keys, hash_keys
from petps.checkpoint.merge import Executed, Executor, InPlace, apply, plan_merges
from petps.checkpoint.state import OPEN, Chunk, Lineage
from petps.checkpoint.store import BASE, DELTA, DIFFERENCE, NewChunk, Store
from petps.errors import InvalidArgument, PetpsError

__all__ = [
    "POLICIES",
    "Consecutive",
    "Full",
    "Intermittent",
    "LeftToOthers",
    "Merged",
    "OneShot",
    "Policy",
    "TwoD",
    "find_every",
    "find_stride",
]

_log = logging.getLogger("petps.checkpoint")

# Limits of the searches for layers, for a stride and for a number of deltas.
MAX_LAYERS: Final = 64
MAX_STRIDE: Final = 64
MAX_EVERY: Final = 4096
STRIDE_BEHIND: Final = 16  # if no stride keeps up: few layers, so that few rows are merged again


class Policy:
    """A rule that decides how versions are written. Each store has its own Policy object."""

    name: str
    kind_above_base: str
    leaves_bases: ClassVar[bool] = False
    """Whether a base that is due may be written behind the trainer (Store.reset)."""

    def kind(self, store: Store) -> str:
        """Return BASE, DELTA or DIFFERENCE: how to write the next version."""
        return BASE if not store.state.lineages else self.next_kind(store, store.state.lineage)

    def next_kind(self, store: Store, lineage: Lineage) -> str:
        """Return how to write the next version above a lineage; kind() handles an empty store."""
        return self.kind_above_base

    def is_reset_due(self, store: Store) -> bool:
        """Return whether the newest version should become a base, behind the trainer."""
        lineage = store.state.lineage
        if not self.leaves_bases or lineage.versions[-1].kind == BASE:
            return False
        return self.needs_base(store, lineage)

    def needs_base(self, store: Store, lineage: Lineage) -> bool:
        """Return whether a base is due that costs the trainer nothing."""
        return self.next_kind(store, lineage) == BASE

    def arrange(self, store: Store) -> None:
        """Move spans of the newest lineage and rewrite its chunks, after a commit of a version."""
        del store

    def arrange_all(self, store: Store, done: Callable[[], None] = lambda: None) -> None:
        """Arrange until nothing is left to do. Call ``done`` after each merge."""
        del done
        self.arrange(store)

    def measure(self, store: Store) -> None:
        """Measure what next_kind() needs, after a commit, if another process calls arrange()."""
        del store


class Full(Policy):
    """A policy that writes every version as a base."""

    name = "full"
    kind_above_base = BASE


class OneShot(Policy):
    """One base, then differences since that base (Check-N-Run's one-shot differential)."""

    name = "oneshot"
    kind_above_base = DIFFERENCE


class Consecutive(Policy):
    """Deltas since the last version (Check-N-Run; IncrCP's naive incremental)."""

    name = "consecutive"
    kind_above_base = DELTA


class Intermittent(Policy):
    """OneShot, with a new base once a base is expected to write less (Check-N-Run 5.1)."""

    name = "intermittent"

    def next_kind(self, store: Store, lineage: Lineage) -> str:
        """Return BASE if F_c <= I_c (STORE.md), sizes in units of the base; else DIFFERENCE."""
        base = lineage.base_bytes
        sizes = [size / base for _, kind, size, _ in lineage.history if kind == DIFFERENCE and base]
        if not sizes:
            return DIFFERENCE
        return BASE if 1 + sum(sizes) <= (len(sizes) + 1) * sizes[-1] else DIFFERENCE


@dataclass
class Filters:
    """Counts of chunks: those compared, those that passed a filter of IncrCP, those split."""

    chunks: int = 0
    in_range: int = 0
    by_bloom: int = 0
    split: int = 0


@dataclass
class TwoD(Policy):
    """2-D chunks (IncrCP 4): each version splits the rows that it rewrites off older chunks.

    ratio: R of the filters (STORE.md, "2-D chunks").
    by_range, by_bloom, by_count: Use the first, second, third filter.
    bundles: Write the split chunks of a version to two files; if False, two for each split chunk.
    resets: Begin a new lineage once T_base < T_incre.
    """

    ratio: float = 0.02
    by_range: bool = True
    by_bloom: bool = True
    by_count: bool = True
    bundles: bool = True
    resets: bool = True
    filters: Filters = field(default_factory=Filters)
    split_by: int = 0
    """The newest delta that arrange_all() has split by."""
    name = "2d"
    leaves_bases = True

    def next_kind(self, store: Store, lineage: Lineage) -> str:
        """Return BASE if a reset is due, else DELTA."""
        return BASE if self.resets and self._reset_pays(store, lineage) else DELTA

    def _reset_pays(self, store: Store, lineage: Lineage) -> bool:
        """Return whether T_base = C_base + R_base < T_incre = C_incre + R_base + R_v."""
        bases = [seconds for _, kind, _, seconds in lineage.history if kind == BASE]
        deltas = [seconds for _, kind, _, seconds in lineage.history if kind == DELTA]
        if not bases or not deltas or store.reader.read_bytes == 0:
            return False
        above = sum(chunk.length for chunk in lineage.open_delta_chunks())
        recovery = above * store.reader.read_seconds / store.reader.read_bytes
        return bases[-1] < deltas[-1] + recovery

    def needs_base(self, store: Store, lineage: Lineage) -> bool:
        """See Policy. The trainer's times say nothing here, so it is decided by bytes."""
        del store
        above = sum(chunk.length for chunk in lineage.open_delta_chunks())
        return self.resets and above > lineage.base_bytes

    def arrange(self, store: Store) -> None:
        """Split the older chunks by the newest delta. See Policy."""
        entry = store.state.lineage.versions[-1]
        if entry.kind == DELTA:
            self._split_by(store, entry.version)

    def arrange_all(self, store: Store, done: Callable[[], None] = lambda: None) -> None:
        """Split the older chunks by each delta that this object has not split by yet."""
        while True:
            deltas = {chunk.first for chunk in store.state.lineage.open_delta_chunks()}
            left = sorted(version for version in deltas if version > self.split_by)
            if not left:
                return
            self._split_by(store, left[0])
            self.split_by = left[0]
            done()

    def _split_by(self, store: Store, version: int) -> None:
        lineage = store.state.lineage
        new = [chunk for chunk in lineage.open_delta_chunks() if chunk.first == version]
        old = [chunk for chunk in lineage.open_delta_chunks() if chunk.first < version]
        splits: list[tuple[Chunk, NewChunk, NewChunk | None]] = []
        for table in {chunk.table for chunk in new}:
            ours = [chunk for chunk in new if chunk.table == table]
            keys = np.sort(np.concatenate([rows.keys for rows in store.read(ours)]))
            older = [chunk for chunk in old if chunk.table == table]
            splits += self._find_splits(store, keys, version, older)
        if not splits:
            return
        if self.bundles:
            open_halves = [half for _, _, half in splits if half is not None]
            ended_halves = [half for _, half, _ in splits]
            store.rearrange([chunk for chunk, _, _ in splits], [open_halves, ended_halves])
            return
        for chunk, ended, rest in splits:
            store.rearrange([chunk], [[ended], [rest]] if rest is not None else [[ended]])

    def measure(self, store: Store) -> None:
        """Read the newest delta, for the speed of reading. See Policy."""
        lineage = store.state.lineage
        newest = lineage.versions[-1].version
        store.read([chunk for chunk in lineage.open_delta_chunks() if chunk.first == newest])

    def _count_hits(self, store: Store, chunk: Chunk, keys: Keys, hashes: Hashes) -> int:
        """Return how many of the ascending ``keys`` the chunk may have."""
        if chunk.has_keys:
            return store.reader.read_bloom(chunk).hits(hashes)
        first = np.searchsorted(keys, np.uint64(chunk.min_key))
        return int(np.searchsorted(keys, np.uint64(chunk.max_key), side="right") - first)

    def _find_splits(
        self, store: Store, keys: Keys, version: int, older: Iterable[Chunk]
    ) -> Iterable[tuple[Chunk, NewChunk, NewChunk | None]]:
        """Yield each chunk to split, its ended half, and its open half (None: it has no row)."""
        least = self.ratio * len(keys)
        hashes = hash_keys(keys)
        chosen: list[Chunk] = []
        for chunk in older:
            self.filters.chunks += 1
            if self.by_range and (chunk.max_key < keys[0] or chunk.min_key > keys[-1]):
                continue
            self.filters.in_range += 1
            if self.by_bloom and self._count_hits(store, chunk, keys, hashes) <= least:
                continue
            self.filters.by_bloom += 1
            chosen.append(chunk)
        for chunk, rows in zip(chosen, store.read(chosen), strict=True):
            at = np.searchsorted(keys, rows.keys)
            at[at == len(keys)] = 0
            is_rewritten = keys[at] == rows.keys
            count = int(np.count_nonzero(is_rewritten))
            if count == 0 or (self.by_count and count <= least):
                continue
            self.filters.split += 1
            name, first, layer = chunk.table, chunk.first, chunk.layer
            remainder = (
                None if count == len(rows) else (name, rows.at(~is_rewritten), first, OPEN, layer)
            )
            yield chunk, (name, rows.at(is_rewritten), first, version, layer), remainder


@dataclass
class Merged(Policy):
    """Merge ``stride`` deltas of a layer into one; write a base after ``every`` deltas (DECK 3.3).

    If ``stride`` or ``every`` is 0, it is computed from d, v and ``volume`` (STORE.md, "Merging").
    d and v are measured. ``volume`` limits the volume of the open deltas; its unit is the volume of
    one delta as written.
    """

    stride: int = 0
    every: int = 0
    volume: float = 32.0
    duplication: float = 0.0
    """d: the share of rows that two consecutive deltas have in common, as last measured."""
    velocity: float = 0.0
    """v: the deltas that can be merged between two versions, as last measured."""
    executor: Executor = field(default_factory=InPlace)
    """Where chunks are merged: in this process, or in the workers of on_ray.OnRay."""
    name = "merged"
    leaves_bases = True

    def next_kind(self, store: Store, lineage: Lineage) -> str:
        """Return BASE once ``every`` deltas of the lineage were written, else DELTA."""
        deltas = sum(1 for _, kind, _, _ in lineage.history if kind == DELTA)
        d = round(self.duplication, 2)
        every = self.every or find_every(self._choose_stride(), d, self.volume)
        return BASE if deltas >= every else DELTA

    def _choose_stride(self) -> int:
        """Return s: the given stride, or the least that keeps up at the last measured d and v."""
        if self.stride:
            return self.stride
        if not self.velocity:
            return 2
        try:
            return find_stride(self.duplication, self.velocity)
        except InvalidArgument as error:  # slow merging must not stop the writing of versions
            if not self._is_lagging:
                _log.warning("[checkpoint] %s; merging %d at a time", error, STRIDE_BEHIND)
            self._is_lagging = True
            return STRIDE_BEHIND

    def measure(self, store: Store) -> None:
        """Measure d and v if they are needed. It reads two versions: call it behind the trainer."""
        if self.stride and self.every:
            return
        deltas = [chunk for chunk in store.state.lineage.open_delta_chunks() if chunk.layer == 1]
        versions = sorted({chunk.first for chunk in deltas})[-2:]
        if len(versions) < 2:
            return
        chunk_lists = [
            [
                chunk
                for chunk in deltas
                if chunk.first == version and chunk.table == deltas[-1].table
            ]
            for version in versions
        ]
        if not chunk_lists[0]:  # one of the two versions did not change this table
            return
        first, second = (
            np.concatenate([rows.keys for rows in store.read(chunks)]) for chunks in chunk_lists
        )
        same = np.isin(first, second, assume_unique=True).sum()
        self.duplication = 2 * float(same) / (len(first) + len(second))
        times = [version.created_ns for version in store.state.lineage.versions[-2:]]
        if self._merge_seconds and len(times) == 2:
            self.velocity = (times[1] - times[0]) / 1e9 / self._merge_seconds

    _merge_seconds: float = 0.0  # that the last merge took for each of its deltas
    _is_lagging: bool = False  # merging does not keep up, and a warning was logged

    def arrange(self, store: Store) -> None:
        """Do one due merge in each layer; that is enough, because each version adds one delta."""
        self.measure(store)
        stride = self._choose_stride()
        for layer in range(1, MAX_LAYERS):
            due = [plan for plan in plan_merges(store, stride) if plan.layer == layer + 1]
            if not due:
                return
            for done in self.executor.run(due[:1]):
                self._apply(store, done)

    def arrange_all(self, store: Store, done: Callable[[], None] = lambda: None) -> None:
        """Do all due merges, also in a lineage of another policy. Call ``done`` after each.

        A merge that fails leaves its own chunks unmerged and stops no other merge. Raise the first
        error at the end.
        """
        self.measure(store)
        stride = self._choose_stride()
        failed: dict[tuple[Chunk, ...], PetpsError] = {}
        while due := [plan for plan in plan_merges(store, stride) if plan.chunks not in failed]:
            for executed in self.executor.run(due):
                try:
                    self._apply(store, executed)
                    done()
                except PetpsError as error:
                    _log.warning("[checkpoint] %s stays undone: %s", executed.plan, error)
                    failed[executed.plan.chunks] = error
        if failed:
            raise next(iter(failed.values()))

    def _apply(self, store: Store, done: Executed) -> None:
        start = time.monotonic()
        apply(store, done)
        self._merge_seconds = (done.seconds + time.monotonic() - start) / done.plan.deltas


class LeftToOthers(Policy):
    """A trainer's policy beside a process that arranges its store and writes due bases.

    The trainer writes a delta where ``policy`` asks for a base above a lineage. If that process has
    written none for PATIENCE versions, the trainer does.
    """

    PATIENCE: Final = 16

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self._policy = policy
        self._due_since: tuple[int, int] | None = None  # the lineage, and its number of versions

    def next_kind(self, store: Store, lineage: Lineage) -> str:
        """See Policy."""
        if not self._policy.leaves_bases:
            return self._policy.next_kind(store, lineage)
        if not self._policy.needs_base(store, lineage):
            self._due_since = None
            return DELTA
        written = len(lineage.history)
        if self._due_since is None or self._due_since[0] != lineage.base_version:
            self._due_since = lineage.base_version, written
        if written - self._due_since[1] < self.PATIENCE:
            return DELTA
        _log.warning(
            "[checkpoint] %s: no other process wrote the base that is due for %d versions, so this "
            "one does: is `petps checkpoint tend` running, with the same policy?",
            store.name,
            self.PATIENCE,
        )
        return BASE

    def measure(self, store: Store) -> None:
        """See Policy."""
        self._policy.measure(store)


def find_stride(duplication: float, velocity: float) -> int:
    """Return the least stride >= 2 with which merging keeps up (DECK's inequality 1).

    Raise InvalidArgument if there is none up to MAX_STRIDE.
    """
    if not 0 <= duplication <= 1:
        raise InvalidArgument(f"duplication must be from 0 to 1, got {duplication}")
    for stride in range(2, MAX_STRIDE + 1):
        ratio = (2 - duplication) ** math.log2(stride) / stride
        if ratio < 1 and ratio / (1 - ratio) < velocity:
            return stride
    raise InvalidArgument(
        f"no stride up to {MAX_STRIDE} keeps up: {velocity:.2f} deltas can be merged between two "
        f"versions, with duplication {duplication:.2f}: write versions less often"
    )


def compute_living_volume(count: int, stride: int, duplication: float) -> float:
    """Return the volume of the open deltas (DECK: living) after ``count`` deltas.

    The unit is the volume of one delta as written. This is the left side of DECK's inequality 2,
    plus the deltas that are not merged yet.
    """
    volume = float(count % stride)
    layer = 1
    while stride**layer <= count:
        living = count // stride**layer - (count // stride ** (layer + 1)) * stride
        volume += living * (2 - duplication) ** (layer * math.log2(stride))
        layer += 1
    return volume


@cache
def find_every(stride: int, duplication: float, volume: float) -> int:
    """Return the most deltas, up to MAX_EVERY, for which the living volume is below ``volume``."""
    count = 1
    while count < MAX_EVERY and compute_living_volume(count + 1, stride, duplication) < volume:
        count += 1
    return count


POLICIES: Final[dict[str, type[Policy]]] = {
    policy.name: policy for policy in (Full, OneShot, Consecutive, Intermittent, TwoD, Merged)
}
