"""The version of the log that published each trained row last. petps/checkpoint/STORE.md.

Owns:        Stamps, STAMP_COLUMN, can_keep_stamps().
Never does:  publish; write a version.
Called by:   output.py, ranks.py, runs.py; source.py, for the column of a store.
Invariants:  a row has the stamp that a server has which read it from the log. If the list of
             commits lacks its version, it has that of the next one in the list, which counts as
             committed at the same time (native/table/EXPIRY.md).
Threads:     one at a time; commit() may run in a thread of its own while no mark() does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps.checkpoint import Column, Store
from petps.checkpoint.chunk import STAMP
from petps.checkpoint.commits import Commits, newer_stamps
from petps.errors import InvalidArgument
from petps.train.removal import LAST_USE
from petps.train.sharded import ShardedTable
from petps.train.table import Gathered, Keys, TrainedTable
from petps.train.tracker import Reading, Tracker

__all__ = ["STAMP_COLUMN", "Stamps", "can_keep_stamps"]

STAMP_COLUMN: Final = Column(STAMP, "u32", 1)
Pieces = Iterable[tuple[Keys, Mapping[str, npt.NDArray[Any]]]]
Ids = npt.NDArray[np.uint64]


def can_keep_stamps(tracker: Tracker, table: TrainedTable) -> bool:
    """Return whether the rows of a table can have stamps.

    They can if its ids are row numbers, or if it knows the step that wrote each row last.
    """
    return isinstance(table, ShardedTable) or tracker.tables.get(table.name) is not None


class Stamps:
    """The stamps of the tables that have a column for them in the store, and the commits' times.

    A table with row numbers as ids takes 4 bytes a row here. A ShardedTable takes none: its slots
    have the step that used a row last, and the list of commits has the version that followed.

    Raises InvalidArgument if the store has the column for a table that has neither.
    """

    def __init__(
        self, tracker: Tracker, tables: Iterable[TrainedTable], store: Store | None
    ) -> None:
        self.commits = Commits()
        # The list, and the version that publishes rows of later steps. Replaced as one, because
        # commit() may run while rows are stored.
        self._known = (self.commits, 1)
        self._next_step = 0
        self._owes_all = False
        self._sharded: dict[str, ShardedTable] = {}
        self._by_id: dict[str, npt.NDArray[np.uint32]] = {}
        self._tables = {table.name: table for table in tables}
        for name, table in self._tables.items():
            stored = None if store is None else store.state.tables.get(name)
            if stored is None or STAMP_COLUMN not in stored.columns:
                continue
            if not can_keep_stamps(tracker, table):
                raise InvalidArgument(
                    f"table {name}: its ids are no row numbers, so it cannot keep the versions of "
                    f"its rows: create the store without column {STAMP!r}"
                )
            if isinstance(table, ShardedTable):
                self._sharded[name] = table
            else:
                self._by_id[name] = np.zeros(tracker.tables[name] or 0, np.uint32)
        self.names = frozenset(self._sharded) | frozenset(self._by_id)
        """The tables whose rows have stamps."""

    @property
    def cover_all(self) -> bool:
        """Return whether the rows of all tables have stamps."""
        return len(self.names) == len(self._tables)

    # ---- publishing

    def mark(self, version: int, rewritten_at: int) -> None:
        """Begin a version of the log: it publishes the rows of the tracker's reading.

        rewritten_at: see Publisher. Call mark_rows() for each table, then gather().
        """
        self.raise_floor(version if self._owes_all else rewritten_at)
        self._owes_all, commits = False, self.commits
        steps = [table.last_step for table in self._sharded.values()]
        # Batches have numbers again that rows of the list have. So let all rows seem to be of this
        # version.
        restarts = [table.take_restart() for table in self._sharded.values()]
        if any(restarts):
            commits = commits.without_steps()
        self.commits, self._next_step = commits, max(steps, default=0)
        self._known = (commits, version)

    def raise_floor(self, rewritten_at: int) -> None:
        """Note the version of a base that gave all rows its version; see Publisher.rewritten_at."""
        self.commits = self.commits.with_floor(rewritten_at)
        self._known = (self.commits, max(self._known[1], rewritten_at))

    def mark_rows(self, table: str, ids: Ids) -> None:
        """Note that the version of mark() publishes the rows of these ids."""
        if table in self._by_id:
            self._by_id[table][ids.astype(np.intp)] = self._known[1] & 0xFFFFFFFF

    def mark_reading(self, version: int, rewritten_at: int, reading: Reading) -> None:
        """Call mark(), and mark_rows() for the ids of a reading."""
        self.mark(version, rewritten_at)
        for name in self._by_id:
            self.mark_rows(name, reading.ids(name))

    def commit(self, version: int, time_ns: int) -> Commits:
        """Note that the version of mark() is committed; return the list of commits."""
        self.commits = self.commits.add(version, time_ns, self._next_step)
        self._known = (self.commits, version + 1)
        return self.commits

    # ---- storing

    def columns(self, table: str, keys: Keys, gathered: Gathered) -> dict[str, Any]:
        """Return the stored column of gathered rows by name, or nothing if the store has none."""
        if table not in self.names:
            return {}
        stamps = self.of(table, keys, gathered)
        return {STAMP: stamps.view(np.uint8).reshape(len(keys), 4)}

    def of(self, table: str, keys: Keys, gathered: Gathered) -> npt.NDArray[np.uint32]:
        """Return uint32[n]: the stamps of gathered rows."""
        commits, next_version = self._known
        if table in self._by_id:
            stamps = self._by_id[table][self._tables[table].ids_of(keys).astype(np.intp)]
        else:
            assert gathered.last_steps is not None
            steps, _ = _steps_of(gathered.last_steps, self._sharded[table].last_step)
            versions = commits.version_after(steps, next_version)
            stamps = (versions & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        return newer_stamps(stamps, commits.floor, next_version)

    def parts(self, commits: Commits | None = None) -> dict[str, bytes]:
        """Return the part of the store's version by name; commits: None for those of now."""
        return (self.commits if commits is None else commits).parts() if self.names else {}

    # ---- restoring

    def begin_load(self, store: Store, version: int) -> None:
        """Take over the list of a version; then load() the pieces of each table."""
        self.commits = Commits.of(store, version)
        self._known = (self.commits, self.commits.last_version + 1)
        self._owes_all = False

    def owe_all(self) -> None:
        """Note that the next version publishes all rows."""
        self._owes_all = True

    def load(self, table: str, pieces: Pieces) -> Pieces:
        """Return the pieces of a version without their stamps, which are kept here."""
        if table in self._by_id:
            return self._load_by_id(table, pieces)
        return self._load_sharded(table, pieces) if table in self._sharded else pieces

    def _load_by_id(self, name: str, pieces: Pieces) -> Iterator[tuple[Keys, dict[str, Any]]]:
        table, stamps = self._tables[name], self._by_id[name]
        stamps[:] = 0
        for keys, columns in pieces:
            stamps[table.ids_of(keys).astype(np.intp)] = _take(columns)
            yield keys, {column: values for column, values in columns.items() if column != STAMP}

    def _load_sharded(self, name: str, pieces: Pieces) -> Iterator[tuple[Keys, dict[str, Any]]]:
        table, (commits, next_version) = self._sharded[name], self._known

        def versions_of(low: npt.NDArray[np.uint32]) -> Ids:
            steps, is_ahead = _steps_of(low, table.last_step)
            versions = commits.version_after(steps, next_version)
            # The pool may have rows of later steps, which the version has not.
            return np.where(is_ahead, np.uint64(1 << 63) + low, versions)

        table.begin_steps(commits.last_step, versions_of)
        for keys, columns in pieces:
            steps = commits.step_of(_take(columns))
            low = (steps & np.uint64(0xFFFFFFFF)).astype(np.uint32)
            others = {column: values for column, values in columns.items() if column != STAMP}
            # If the table's removal stores the exact steps, these count.
            yield keys, {LAST_USE: low.view(np.uint8).reshape(len(keys), 4), **others}


def _steps_of(low: npt.NDArray[np.uint32], last_step: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Return uint64[n], the steps with these low 32 bits, and bool[n]: which are not reached yet.

    Such a step is of an earlier training, and counts as the last one.
    """
    age = (np.uint32(last_step & 0xFFFFFFFF) - low).view(np.int32)
    steps = np.maximum(last_step - np.maximum(age, 0).astype(np.int64), 0)
    return steps.astype(np.uint64), age < 0


def _take(columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.uint32]:
    stamps: npt.NDArray[np.uint32] = np.ascontiguousarray(columns[STAMP]).view(np.uint32)[:, 0]
    return stamps
