"""Merge chunks in three steps: plan, execute on any machine, apply. STORE.md, "Merging".

Owns:        MergePlan, plan_merges(), count_merges(), execute(), apply(); Executor and InPlace.
Never does:  decide how many chunks become one, or when (policy.py); know Ray (on_ray.py).
Called by:   policy.py; on_ray.py, and its workers.
Invariants:  execute() reads chunks and writes a bundle, and touches no state; apply() changes
             nothing unless the newest lineage still has every chunk of the plan. A merge that is
             given up leaves its chunks as they are, and at most files that no state names.
Threads:     only the store's one writer calls plan_merges() and apply(); any thread may call
             execute().
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from petps.checkpoint.bundle import NewChunk, write_bundle
from petps.checkpoint.chunk import Table, lay_over
from petps.checkpoint.files import Files
from petps.checkpoint.reader import Reader
from petps.checkpoint.state import OPEN, Chunk, Lineage
from petps.errors import DataLoss, FailedPrecondition, NotFound, PetpsError

if TYPE_CHECKING:
    from petps.checkpoint.store import Store

__all__ = [
    "Executed",
    "Executor",
    "InPlace",
    "MergePlan",
    "apply",
    "count_merges",
    "execute",
    "plan_merges",
]

# How many times apply() tries to commit a merge while other writers commit too.
APPLY_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class MergePlan:
    """A plan to merge chunks into one for each table. It can be pickled for another machine.

    files: The files of the store, pickled as their address and options.
    tables: The tables of the lineage.
    chunks: The chunks to merge: neighbours of one layer, oldest first.
    first, layer: Of the merged chunks.
    newer: Ended chunks that are newer than some of ``chunks`` and end after ``first``. Up to their
    end their rows count, so the merged chunks must not have rows of their keys from older chunks.
    """

    files: Files
    tables: Mapping[str, Table]
    chunks: tuple[Chunk, ...]
    first: int
    layer: int
    newer: tuple[Chunk, ...]

    @property
    def deltas(self) -> int:
        """Return the number of deltas that become one."""
        return len({chunk.first for chunk in self.chunks})

    def __str__(self) -> str:
        return f"the merge of {self.deltas} deltas, {self.chunks[0].first} to {self.first}"


@dataclass(frozen=True, slots=True)
class Executed:
    """The outcome of a plan: the chunks that were written, or the error."""

    plan: MergePlan
    merged: Sequence[Chunk]
    error: PetpsError | None
    seconds: float


class Executor(Protocol):
    """The place where plans are executed."""

    def run(self, plans: Sequence[MergePlan]) -> Iterator[Executed]:
        """Yield the outcome of each plan when it is done, in any order; plans share no chunk."""


class InPlace:
    """An executor in this process, one plan after the other."""

    def run(self, plans: Sequence[MergePlan]) -> Iterator[Executed]:
        """See Executor."""
        for plan in plans:
            yield run_plan(plan)


def plan_merges(store: Store, stride: int) -> list[MergePlan]:
    """Return the merges due in the newest lineage, oldest first; no two of them share a chunk."""
    lineage = store.state.lineage
    deltas = _list_open_deltas(lineage)
    layers = [layer for layer, _ in deltas]
    plans = []
    for run in _runs(layers, stride):
        chunks = tuple(chunk for _, delta in deltas[run] for chunk in delta)
        first, layer = chunks[-1].first, layers[run.start] + 1
        # Leaving these keys out loses no row: from the version on at which such a chunk ends, a
        # chunk above ``first`` has a newer row of each of its keys, or the same row merged.
        newer = tuple(
            chunk
            for chunk in lineage.chunks
            if not chunk.is_open and chunks[0].first < chunk.first <= first < chunk.end
        )
        plans.append(MergePlan(store.files, lineage.tables, chunks, first, layer, newer))
    return plans


def count_merges(lineage: Lineage, stride: int) -> int:
    """Return the number of merges until no merge is due."""
    layers = [layer for layer, _ in _list_open_deltas(lineage)]
    count = 0
    while runs := list(_runs(layers, stride)):
        count += len(runs)
        for run in reversed(runs):
            layers[run] = [layers[run.start] + 1]
    return count


def _list_open_deltas(lineage: Lineage) -> list[tuple[int, list[Chunk]]]:
    """Return (layer, chunks) of each open delta, oldest first.

    A delta whose chunks have several layers gets a layer that no other delta has.
    """
    chunks_by_first: dict[int, list[Chunk]] = {}
    for chunk in lineage.open_delta_chunks():
        chunks_by_first.setdefault(chunk.first, []).append(chunk)
    return [
        (chunks[0].layer if len({chunk.layer for chunk in chunks}) == 1 else -first, chunks)
        for first, chunks in chunks_by_first.items()
    ]


def _runs(layers: Sequence[int], stride: int) -> Iterator[slice]:
    """Yield the slices of ``stride`` neighbours of one layer.

    A slice has no delta of another layer inside, because of two rows of a key the later one counts.
    """
    start = 0
    for at, layer in enumerate(layers):
        if layer != layers[start]:
            start = at
        if at + 1 - start == stride:
            yield slice(start, at + 1)
            start = at + 1


def execute(plan: MergePlan) -> list[Chunk]:
    """Write the bundle that replaces the plan's chunks durably, and return its chunks.

    Raise DataLoss for a chunk that is missing, cut or altered; raise IoError.
    """
    reader = Reader(plan.files)

    def new_chunks() -> Iterator[NewChunk]:
        for name in sorted({chunk.table for chunk in plan.chunks}):
            chunks = [chunk for chunk in plan.chunks if chunk.table == name]
            newer = [chunk for chunk in plan.newer if chunk.table == name]
            newer_rows = list(zip(newer, reader.read(newer, plan.tables), strict=True))
            layers = []
            for chunk, layer in zip(chunks, reader.read(chunks, plan.tables), strict=True):
                above = [rows.keys for other, rows in newer_rows if other.first > chunk.first]
                if above:
                    layer = layer.at(~np.isin(layer.keys, np.concatenate(above)))
                layers.append(layer)
            rows = lay_over(plan.tables[name], layers, keep_deleted=True)
            if len(rows):
                yield name, rows, plan.first, OPEN, plan.layer

    return write_bundle(plan.files, plan.tables, new_chunks())


def run_plan(plan: MergePlan) -> Executed:
    """Execute a plan; return a PetpsError in the outcome, so that other plans still run."""
    start = time.monotonic()
    try:
        merged, error = execute(plan), None
    except PetpsError as failure:
        merged, error = [], failure
    return Executed(plan, merged, error, time.monotonic() - start)


def apply(store: Store, done: Executed) -> None:
    """Commit an executed merge with one state.

    Raise its error if it has one; FailedPrecondition if a chunk was purged, split or rolled back
    since the plan; DataLoss if the bundle is gone. Then the store is as it was, and purge removes
    the bundle.
    """
    if done.error is not None:
        raise done.error
    plan = done.plan
    for tries in range(1, APPLY_TRIES + 1):
        state = store.state
        missing = set(plan.chunks) - set(state.lineage.chunks)
        if missing:
            oldest = min(missing, key=lambda chunk: chunk.first)
            raise FailedPrecondition(
                f"{plan} is given up: the chunk {oldest.file} at {oldest.offset}, of version "
                f"{oldest.first}, was purged, split or rolled back meanwhile; nothing has changed"
            )
        _check_bundle(store, done)
        try:
            store.rearrange(
                [chunk for chunk in plan.chunks if chunk.first == plan.first],
                added=done.merged,
                ended=[chunk for chunk in plan.chunks if chunk.first < plan.first],
                end=plan.first,
            )
            return
        except FailedPrecondition:  # another writer committed first
            if tries == APPLY_TRIES or store.refresh().number == state.number:
                raise


def _check_bundle(store: Store, done: Executed) -> None:
    """Raise DataLoss if purge removed the bundle, which no state has named for two days."""
    last = done.merged[-1]
    try:
        is_whole = store.files.size(last.file) >= last.bloom_offset + last.bloom_length
    except NotFound:
        is_whole = False
    if not is_whole:
        raise DataLoss(f"{done.plan}: {store.name}/{last.file} is gone or cut: merge again")
