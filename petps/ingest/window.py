"""The window: consecutive records merged into few applies, each of which costs the same drains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from petps.delta import RecordHeader, RowsBody
from petps.ingest.partition import PartitionState
from petps.ingest.store import ApplyReport, Keys, Mask, Rows, Store, StoreTable

__all__ = ["Window"]


class Window:
    """Records taken and not yet applied, of any partitions, bounded by its owner.

    Rows of one table are merged in the order in which they were taken, so a key's newest row wins;
    tables, and partitions, share no row, so their order among each other does not matter.
    """

    def __init__(self) -> None:
        self._bodies: dict[str, list[RowsBody]] = {}
        self._stamps: dict[str, int] = {}
        self._touched: dict[int, PartitionState] = {}
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

    def __bool__(self) -> bool:
        return bool(self._touched)

    def apply(
        self,
        tables: Mapping[str, StoreTable],
        rows_max: int,
        report: Callable[[str, ApplyReport], None],
    ) -> None:
        """Applies all rows, about ``rows_max`` a call. May be called again after an error."""
        for name, bodies in self._bodies.items():
            stamp = self._stamps[name] & 0xFFFFFFFF
            for keys, rows, deleted in _merged(bodies, rows_max):
                report(name, tables[name].apply(keys, rows, deleted, stamp))

    def record(self, store: Store) -> None:
        """Records the progress of every partition touched: from now on its rows are served."""
        for state in self._touched.values():
            progress = state.progress()
            store.record_progress(progress)
            state.recorded = progress
        now = time.time_ns()
        for state, published_ns, rows in self._times:
            state.samples.add((now - published_ns) / 1e6)
            state.last_time_ns = published_ns
            state.records += 1
            state.rows += rows


def _merged(bodies: list[RowsBody], rows_max: int) -> Iterator[tuple[Keys, Rows, Mask | None]]:
    """Runs of bodies as one contiguous array each; a body of its own is given as it is."""
    run: list[RowsBody] = []
    rows = 0
    for body in bodies:
        if run and rows + len(body.keys) > rows_max:
            yield _concatenated(run)
            run, rows = [], 0
        run.append(body)
        rows += len(body.keys)
    if run:
        yield _concatenated(run)


def _concatenated(bodies: list[RowsBody]) -> tuple[Keys, Rows, Mask | None]:
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
    keys = np.concatenate([body.keys for body in bodies])
    return keys, np.concatenate([body.rows for body in bodies]), deleted
