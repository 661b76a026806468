"""The window: consecutive records merged into few applies, each of which costs the same drains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from petps.delta import RecordHeader, RowsBody
from petps.ingest.partition import PartitionState
from petps.ingest.store import ApplyReport, Keys, Mask, Progress, Rows, Store, StoreTable

__all__ = ["Merger", "Window"]


class Window:
    """Records taken and not yet applied, of any partitions, bounded by its owner.

    Rows of one table are merged in the order in which they were taken, so a key's newest row wins;
    tables, and partitions, share no row, so their order among each other does not matter.
    """

    def __init__(self) -> None:
        self._bodies: dict[str, list[RowsBody]] = {}
        self._stamps: dict[str, int] = {}
        self._touched: dict[int, PartitionState] = {}
        self._progress: dict[int, Progress] = {}
        self._times: list[tuple[PartitionState, int, int]] = []
        self.rows = 0

    def add(self, state: PartitionState, header: RecordHeader, body: RowsBody) -> None:
        """Takes the rows of a record."""
        self._bodies.setdefault(header.table, []).append(body)
        self._stamps[header.table] = max(self._stamps.get(header.table, 0), header.version)
        self._times.append((state, header.time_ns, len(body.keys)))
        self.rows += len(body.keys)

    def touch(self, state: PartitionState) -> None:
        """The partition's progress is to be recorded with this window."""
        self._touched[state.partition] = state

    def seal(self) -> None:
        """Nothing more comes into it: progress is what it is now, wherever reading goes on."""
        self._progress = {p: state.progress() for p, state in self._touched.items()}

    def __bool__(self) -> bool:
        return bool(self._touched)

    def apply(
        self,
        tables: Mapping[str, StoreTable],
        merger: Merger,
        report: Callable[[str, ApplyReport], None],
    ) -> None:
        """Applies all rows in the merger's batches. May be called again after an error."""
        for name, bodies in self._bodies.items():
            stamp = self._stamps[name] & 0xFFFFFFFF
            for keys, rows, deleted in merger.merged(bodies):
                report(name, tables[name].apply(keys, rows, deleted, stamp))

    def record(self, store: Store) -> None:
        """Records the progress of every partition touched: from now on its rows are served."""
        for state in self._touched.values():
            progress = self._progress[state.partition]
            store.record_progress(progress)
            state.recorded = progress
        now = time.time_ns()
        for state, published_ns, rows in self._times:
            state.samples.add((now - published_ns) / 1e6)
            state.last_time_ns = published_ns
            state.records += 1
            state.rows += rows


class Merger:
    """Makes runs of bodies one contiguous batch each, of about ``rows_max`` rows.

    Its memory is used again for the next batch: a fresh one of megabytes would be faulted in each
    time, which costs as much as the copy.
    """

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        self._keys = np.empty(0, np.uint64)
        self._rows = np.empty(0, np.uint8)

    def merged(self, bodies: list[RowsBody]) -> Iterator[tuple[Keys, Rows, Mask | None]]:
        """Batches, each valid until the next; a body of its own is given as it is."""
        run: list[RowsBody] = []
        rows = 0
        for body in bodies:
            if run and rows + len(body.keys) > self._rows_max:
                yield self._joined(run, rows)
                run, rows = [], 0
            run.append(body)
            rows += len(body.keys)
        if run:
            yield self._joined(run, rows)

    def _joined(self, bodies: list[RowsBody], count: int) -> tuple[Keys, Rows, Mask | None]:
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
