"""The window: merges consecutive records into few applies, because each apply costs drains."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from petps.delta import RecordHeader, RowsBody
from petps.delta.schema import partition_of
from petps.errors import ResourceExhausted
from petps.server.ingest.full import full_reason
from petps.server.ingest.partition import PartitionState, Refusal
from petps.server.ingest.protocols import (
    Commit,
    InstanceTable,
    InstanceTables,
    Keys,
    Mask,
    Progress,
    Rows,
    Stamps,
)
from petps.server.ingest.trace import VersionTrace

__all__ = ["Merger", "VersionedBody", "Window"]

Positions = npt.NDArray[np.intp]
# Keys, rows, deleted, and the stamp of all rows or of each.
Batch = tuple[Keys, Rows, Mask | None, int | Stamps]


class VersionedBody(NamedTuple):
    """Rows of one message. stamp: the low 32 bits of its version."""

    stamp: int
    body: RowsBody


class Window:
    """Records of any partitions that are taken but not applied. The owner limits its size.

    The rows of a table are merged in the order in which they were taken, so a key's newest row
    wins. Two tables, or two partitions, share no rows, so their order does not matter.
    """

    def __init__(self) -> None:
        self._bodies: dict[str, list[tuple[PartitionState, VersionedBody]]] = {}
        self._commits: list[tuple[PartitionState, Commit]] = []
        self._touched: dict[int, PartitionState] = {}
        self._progress: dict[int, Progress] = {}
        self._times: list[tuple[PartitionState, int, int]] = []
        self._traces: list[tuple[PartitionState, VersionTrace]] = []
        self.rows = 0

    def add(self, state: PartitionState, header: RecordHeader, body: RowsBody) -> None:
        """Add the rows of a record."""
        versioned = VersionedBody(header.version & 0xFFFFFFFF, body)
        self._bodies.setdefault(header.table, []).append((state, versioned))
        self._times.append((state, header.time_ns, len(body.keys)))
        self.rows += len(body.keys)

    def commit(self, state: PartitionState, header: RecordHeader) -> None:
        """Add the commit of a version, whose rows were added before."""
        self._commits.append((state, Commit(state.partition, header.version, header.time_ns)))

    def trace(self, state: PartitionState, trace: VersionTrace) -> None:
        """Add the trace of a version whose commit was added."""
        self._traces.append((state, trace))

    def traces(self) -> list[VersionTrace]:
        """Return the traces of the versions that record() has recorded."""
        return [trace for state, trace in self._traces if state.refused is None]

    def touch(self, state: PartitionState) -> None:
        """Mark the partition: record() records its progress when the window is sealed."""
        self._touched[state.partition] = state

    def forget(self, state: PartitionState) -> None:
        """Remove the rows and the progress of a partition."""
        self._touched.pop(state.partition, None)
        self._times = [entry for entry in self._times if entry[0] is not state]
        self._commits = [entry for entry in self._commits if entry[0] is not state]
        self._traces = [entry for entry in self._traces if entry[0] is not state]
        for name, parts in self._bodies.items():
            self._bodies[name] = [part for part in parts if part[0] is not state]

    def seal(self) -> None:
        """Close the window, and fix the progress to record while reading continues."""
        self._progress = {p: state.progress() for p, state in self._touched.items()}

    def __bool__(self) -> bool:
        return bool(self._touched)

    def apply(self, tables: Mapping[str, InstanceTable], merger: Merger, partitions: int) -> None:
        """Apply all rows in the merger's batches. May be called again after an error.

        If rows cannot be stored, refuse their partitions (PartitionState.refused): no further row
        or progress of those is stored. ``partitions`` is P of the model.
        """
        for name, parts in self._bodies.items():
            accepted = [(state, body) for state, body in parts if state.refused is None]
            bodies = [body for _, body in accepted]
            try:
                refused_keys = _apply(tables[name], merger, bodies)
            except ResourceExhausted as error:
                rows = Counter[int]()
                for state, body in accepted:
                    rows[state.partition] += len(body.body.keys)
                self._refuse(name, rows, str(error))
                continue
            if len(refused_keys):
                rows = Counter(partition_of(refused_keys, partitions).tolist())
                self._refuse(name, rows, full_reason(tables[name], len(refused_keys)))

    def _refuse(self, table: str, rows: Mapping[int, int], reason: str) -> None:
        for partition, count in rows.items():
            progress = self._progress[partition]
            until = (progress.run, progress.seq)
            self._touched[partition].refuse(Refusal(reason, table, count, until))

    def record(self, instance: InstanceTables) -> None:
        """Record the progress of the touched partitions, except the refused ones."""
        accepted = [state for state in self._touched.values() if state.refused is None]
        progress = [self._progress[state.partition] for state in accepted]
        commits = [entry for entry in self._commits if entry[0].refused is None]
        if progress:
            instance.record_progress(progress, [commit for _, commit in commits])
        # Counted before the progress is recorded, because callers wait for the progress.
        for state, commit in commits:
            state.count_commit(commit.time_ns)
        now = time.time_ns()
        for state, published_ns, rows in self._times:
            if state.refused is None:
                state.count_applied(rows, (now - published_ns) / 1e6)
        for state, recorded in zip(accepted, progress, strict=True):
            state.record(recorded)


def _apply(table: InstanceTable, merger: Merger, bodies: list[VersionedBody]) -> Keys:
    """Apply bodies in order. Return the keys whose newest row could not be stored."""
    refused = np.empty(0, np.uint64)
    refused_rows = np.empty((0, table.schema.row_bytes), np.uint8)
    refused_stamps = np.empty(0, np.uint32)
    for keys, rows, deleted, stamp in merger.merge(bodies):
        report = table.apply(keys, rows, deleted, stamp)
        if len(refused):  # drop the refused rows that this batch replaces or deletes
            is_current = ~np.isin(refused, keys)
            refused, refused_rows = refused[is_current], refused_rows[is_current]
            refused_stamps = refused_stamps[is_current]
        if report.refused:
            at = _missing_upserts(table, keys, deleted)
            refused = np.concatenate([refused, keys[at]])
            refused_rows = np.concatenate([refused_rows, rows[at]])
            stamps = np.broadcast_to(np.asarray(stamp, np.uint32), keys.shape)
            refused_stamps = np.concatenate([refused_stamps, stamps[at]])
    if len(refused) == 0:
        return refused
    # Later deletions in this window may have made room.
    table.apply(refused, refused_rows, None, refused_stamps)
    return refused[~table.holds(refused)]


def _missing_upserts(table: InstanceTable, keys: Keys, deleted: Mask | None) -> Positions:
    """Return the position of the last row of each written key that the table does not hold."""
    last = len(keys) - 1 - np.unique(keys[::-1], return_index=True)[1]
    if deleted is not None:
        last = last[~deleted[last]]
    last.sort()
    missing: Positions = last[~table.holds(keys[last])]
    return missing


class Merger:
    """Joiner of consecutive bodies into contiguous batches of about ``rows_max`` rows.

    It reuses its memory for the next batch, because page faults of fresh memory cost as much as the
    copy.
    """

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        self._keys = np.empty(0, np.uint64)
        self._rows = np.empty(0, np.uint8)

    def merge(self, bodies: list[VersionedBody]) -> Iterator[Batch]:
        """Yield batches, each valid until the next. A batch of one body is not a copy."""
        batch: list[VersionedBody] = []
        rows = 0
        for versioned in bodies:
            count = len(versioned.body.keys)
            if batch and rows + count > self._rows_max:
                yield self._batch(batch, rows)
                batch, rows = [], 0
            batch.append(versioned)
            rows += count
        if batch:
            yield self._batch(batch, rows)

    def _batch(self, parts: list[VersionedBody], count: int) -> Batch:
        stamp: int | Stamps = parts[0].stamp
        if any(part.stamp != stamp for part in parts):
            stamp = np.repeat(
                np.array([part.stamp for part in parts], np.uint32),
                [len(part.body.keys) for part in parts],
            )
        return (*self._join([part.body for part in parts], count), stamp)

    def _join(self, bodies: list[RowsBody], count: int) -> tuple[Keys, Rows, Mask | None]:
        if len(bodies) == 1:
            return bodies[0].keys, bodies[0].rows, bodies[0].deleted
        deleted: Mask | None = None
        if any(body.deleted is not None for body in bodies):
            deleted = np.concatenate(
                [
                    np.zeros(len(body.keys), np.bool_) if body.deleted is None else body.deleted
                    for body in bodies
                ]
            )
        width = bodies[0].rows.shape[1]
        if len(self._keys) < count:
            self._keys = np.empty(count, np.uint64)
        if len(self._rows) < count * width:
            self._rows = np.empty(count * width, np.uint8)
        keys = self._keys[:count]
        rows = self._rows[: count * width].reshape(count, width)
        np.concatenate([body.keys for body in bodies], out=keys)
        np.concatenate([body.rows for body in bodies], out=rows)
        return keys, rows, deleted
