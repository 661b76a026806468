"""Tracker, and its readings. TRACKER.md is the design."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PetpsError,
    ResourceExhausted,
)
from petps.train.tracker.sets import (
    BitSet,
    IdSet,
    Keep,
    Touched,
    TouchedSet,
    concatenate,
    find_distinct,
    join,
    shrink,
)
from petps.train.tracker.spill import SpilledSet, SpillFolder

__all__ = ["Reading", "Tracker"]

# track() compacts on its own beyond this many ids that are not compacted yet: 32 MiB.
PENDING_IDS: Final = 1 << 22
# The ids that arrive for each distinct one before they are compacted. With 1, a steady hot set
# passes twice through compactions; with 2, 1.5 times, for one more copy of its ids in memory.
APPENDED_PER_DISTINCT: Final = 2
# After a spill that failed, the next one is tried when the ids grow by this share of the budget.
RETRY_SHARE: Final = 1 / 16


@dataclass(eq=False, slots=True)
class _Segment:
    """The ids touched between two reads of any tenants, by table.

    All segments but the open one are compact.
    """

    begin: int
    end: int = 0
    sets: dict[str, TouchedSet] = field(default_factory=dict)

    @property
    def spilled(self) -> bool:
        return any(isinstance(touched_set, SpilledSet) for touched_set in self.sets.values())

    @property
    def resident_bytes(self) -> int:
        return sum(touched_set.resident_bytes for touched_set in self.sets.values())


@dataclass(eq=False, slots=True)
class _Tenant:
    name: str
    position: int  # the tenant has acknowledged everything before it
    reading: Reading | None = None


class Reading:
    """The ids that a tenant has not acknowledged yet.

    Without acknowledge(), the end of its ``with`` block gives the ids back: the tenant's next
    reading has them again.
    """

    def __init__(self, tracker: Tracker, tenant: str, begin: int, end: int) -> None:
        self._tracker = tracker
        self.tenant = tenant
        self.begin = begin
        self.end = end

    def touched(self, table: str) -> Touched:
        """Return distinct ids uint64[n], ascending, and their states, from memory or spilled files.

        Raise NotFound for an unknown table, FailedPrecondition once the reading is over.
        """
        return self._tracker._touched(self, table)

    def ids(self, table: str) -> npt.NDArray[np.uint64]:
        """Return the ids of touched(), without states."""
        return self.touched(table).ids

    def acknowledge(self) -> None:
        """Acknowledge the reading: its ids are never handed out to this tenant again.

        Raise FailedPrecondition if the reading is over, for example because the tenant began
        another one or was removed.
        """
        self._tracker._end(self, acknowledged=True)

    def abandon(self) -> None:
        """End the reading; its ids come again in the next one. Do nothing if it is over."""
        self._tracker._end(self, acknowledged=False)

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *error: object) -> None:
        self.abandon()


class Tracker:
    """The ids of each table that were touched since each tenant's last acknowledged reading.

    tables: by name, the number of rows of a dense id space (ids are below it), or None for any
    uint64. keep: which of an id's states counts. spill: a folder, used by this tracker only, for
    ids beyond ``memory_bytes``; its contents do not outlive the process. Raises InvalidArgument,
    IoError, and FailedPrecondition if another tracker has the folder.
    """

    def __init__(
        self,
        tables: Mapping[str, int | None] | Iterable[tuple[str, int | None]] = (),
        *,
        tenants: Iterable[str] = (),
        keep: Keep = "last",
        memory_bytes: int | None = None,
        spill: str | Path | None = None,
    ) -> None:
        if keep not in ("first", "last"):
            raise InvalidArgument(f"keep must be 'first' or 'last', got {keep!r}")
        if memory_bytes is not None and memory_bytes <= 0:
            raise InvalidArgument(f"memory_bytes must be above 0, got {memory_bytes}")
        if spill is not None and memory_bytes is None:
            raise InvalidArgument("a spill folder needs memory_bytes, the ids that stay in memory")
        self._rows: dict[str, int | None] = {}
        self._states: dict[str, tuple[np.dtype[Any], tuple[int, ...]] | None] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._keep = keep
        self._budget = memory_bytes
        self._segments: list[_Segment] = []
        self._open = _Segment(0)
        self._resident = 0  # bytes of all sets, or a little more
        self._appended = 0  # ids of the open segment after its distinct ones
        self._distinct = 0
        self._retry_bytes = 0  # after a failed spill: no new attempt below this many resident bytes
        self._closed = False
        # _mutex guards all of the above, for short times. A thread that compacts, merges, spills or
        # reads holds _work too and takes it first; only that thread touches sealed segments.
        self._mutex = threading.Lock()
        self._work = threading.Lock()
        for name, rows in tables.items() if isinstance(tables, Mapping) else tables:
            self.add_table(name, rows)
        for tenant in tenants:
            self.add_tenant(tenant)
        self._spill = None if spill is None else SpillFolder(spill)

    # ---- tables and tenants ----

    @property
    def tables(self) -> dict[str, int | None]:
        """Return the tables by name: the rows of a dense id space, or None."""
        with self._mutex:
            return dict(self._rows)

    @property
    def tenants(self) -> list[str]:
        """Return the names of the tenants."""
        with self._mutex:
            return sorted(self._tenants)

    @property
    def resident_bytes(self) -> int:
        """Return the memory of all ids and states that are held."""
        with self._mutex:
            return self._resident

    @property
    def spilled_bytes(self) -> int:
        """Return the size of the spill folder's files in bytes."""
        with self._work:
            return 0 if self._spill is None else self._spill.stored_bytes

    @property
    def segments(self) -> int:
        """Return the number of sealed segments."""
        with self._mutex:
            return len(self._segments)

    def add_table(self, name: str, rows: int | None = None) -> None:
        """Add a table. Raise AlreadyExists, InvalidArgument."""
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"a table's name must be text that is not empty, got {name!r}")
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows <= 0):
            raise InvalidArgument(f"table {name}: rows must be above 0 or None, got {rows!r}")
        with self._mutex:
            if name in self._rows:
                raise AlreadyExists(
                    f"table {name} is tracked already: name it by its owner too (owner.{name})"
                )
            self._rows[name] = rows

    def add_tenant(self, name: str) -> None:
        """Add a tenant; its readings have the ids touched from now on. Raise AlreadyExists."""
        with self._work:
            with self._mutex:
                self._check_open()
                if name in self._tenants:
                    raise AlreadyExists(f"tenant {name} exists already")
            self._seal()
            with self._mutex:
                self._tenants[name] = _Tenant(name, self._open.begin)

    def remove_tenant(self, name: str) -> None:
        """Remove a tenant: end its reading and drop the ids only it still needs. Raise NotFound."""
        with self._work:
            with self._mutex:
                self._tenant(name)
                del self._tenants[name]
            self._forget()
            self._merge()

    # ---- the trainer's side ----

    def track(self, fqn: str, ids: npt.ArrayLike, state: npt.ArrayLike | None = None) -> None:
        """Record touched ids (integers of any shape, repeated or not) of a table.

        state: [number of ids, ...], of one dtype and shape for all of a table's ids, or None for
        all. Both are copied. Raise NotFound for an unknown table, and InvalidArgument with the
        first bad id; then nothing is recorded. Raise ResourceExhausted when the ids exceed
        memory_bytes and cannot be spilled; in this case the ids are recorded.
        """
        touched = self._check_touched(fqn, ids, state)
        with self._mutex:
            self._check_open()
            if not self._tenants or len(touched.ids) == 0:
                return
            open_set = self._open.sets.setdefault(fqn, IdSet())
            assert isinstance(open_set, IdSet | BitSet)
            open_set.add(touched)
            if isinstance(open_set, IdSet):
                self._appended += len(touched.ids)
                self._resident += touched.nbytes
            is_due = self._appended >= max(PENDING_IDS, APPENDED_PER_DISTINCT * self._distinct) or (
                8 * self._appended >= self._distinct and self._over_budget()
            )
        if is_due:
            with self._work:
                self._tidy()

    def compact(self) -> int:
        """Drop repeated ids of all tables in one pass, and return how many they were.

        Do nothing while fewer ids have arrived than APPENDED_PER_DISTINCT times the distinct ones
        of the open segment, so that a call in each step costs little. Raise ResourceExhausted as
        track() does.
        """
        with self._mutex:
            self._check_open()
            if self._appended == 0 or self._appended < APPENDED_PER_DISTINCT * self._distinct:
                return 0
        with self._work:
            return self._tidy()

    # ---- a tenant's side ----

    def read(self, tenant: str) -> Reading:
        """Return what was touched since the tenant's last acknowledged reading.

        Call it between two steps. It ends a reading that the tenant has not acknowledged, and
        includes the ids of that reading. Raise NotFound for an unknown tenant.
        """
        with self._work:
            with self._mutex:
                self._check_open()
                self._tenant(tenant)
            self._seal()
            with self._mutex:
                reader = self._tenant(tenant)
                reading = Reading(self, tenant, reader.position, self._open.begin)
                reader.reading = reading
            self._merge()
            return reading

    def close(self) -> None:
        """Drop all ids and clean the spill folder. A second call does nothing."""
        with self._work:
            with self._mutex:
                if self._closed:
                    return
                self._closed = True
                self._tenants.clear()
            self._forget()
            if self._spill is not None:
                self._spill.close()

    def _touched(self, reading: Reading, table: str) -> Touched:
        with self._work:
            with self._mutex:
                self._check_current(reading)
                if table not in self._rows:
                    raise self._unknown(table)
                rows = self._rows[table]
            sets = [
                _load(segment.sets[table])
                for segment in self._segments
                if reading.begin <= segment.begin < reading.end and table in segment.sets
            ]
            if not sets:
                return Touched(np.empty(0, np.uint64))
            touched = concatenate(sets[0] if len(sets) == 1 else join(sets, rows, self._keep))
            return touched.read_only()

    def _end(self, reading: Reading, *, acknowledged: bool) -> None:
        with self._work:
            with self._mutex:
                if not acknowledged and not self._is_current(reading):
                    return
                self._check_current(reading)
                tenant = self._tenants[reading.tenant]
                tenant.reading = None
                if acknowledged:
                    tenant.position = reading.end
            self._forget()
            self._merge()

    def _is_current(self, reading: Reading) -> bool:
        tenant = self._tenants.get(reading.tenant)
        return tenant is not None and tenant.reading is reading

    def _check_current(self, reading: Reading) -> None:
        if not self._is_current(reading):
            raise FailedPrecondition(
                f"this reading of tenant {reading.tenant} is over (acknowledged, abandoned, "
                "followed by another one, or the tenant was removed): call read() again"
            )

    # ---- under _work ----

    def _tidy(self) -> int:
        """Compact the open segment, then spill beyond the budget; return the number dropped."""
        with self._mutex:
            if self._closed:
                return 0
            segment = self._open
        dropped = self._compact(segment)
        with self._mutex:
            is_over = self._over_budget()
        if is_over:
            self._spill_some()
        return dropped

    def _compact(self, segment: _Segment) -> int:
        """Make each table's set distinct, in one pass; the open segment may grow during it."""
        with self._mutex:
            is_sealed = segment is not self._open
            parts_by_table = {
                name: list(table_set.parts())
                for name, table_set in segment.sets.items()
                if isinstance(table_set, IdSet) and (is_sealed or table_set.appended)
            }
        if not parts_by_table:
            return 0
        touched_by_table = find_distinct(
            parts_by_table, self._keep, "ascending" if is_sealed else "any"
        )
        count_before = sum(len(part.ids) for parts in parts_by_table.values() for part in parts)
        with self._mutex:
            for name, touched in touched_by_table.items():
                id_set = segment.sets[name]
                assert isinstance(id_set, IdSet)
                id_set.replace(len(parts_by_table[name]), touched)
                compact_set = shrink(touched, self._rows[name])
                if isinstance(compact_set, BitSet):
                    compact_set.absorb(id_set)
                    segment.sets[name] = compact_set
            self._count()
        return count_before - sum(len(touched.ids) for touched in touched_by_table.values())

    def _seal(self) -> None:
        """Begin a new open segment, if the current one has any ids."""
        with self._mutex:
            segment = self._open
            if not segment.sets:
                return
            segment.end = segment.begin + 1
            self._segments.append(segment)
            self._open = _Segment(segment.end)
            self._count()
        self._compact(segment)

    def _forget(self) -> None:
        """Drop the segments that every tenant has acknowledged."""
        with self._mutex:
            if not self._tenants:
                self._open.sets.clear()
            needed = min(
                (tenant.position for tenant in self._tenants.values()), default=self._open.begin
            )
            old_segments = [segment for segment in self._segments if segment.end <= needed]
            self._segments = self._segments[len(old_segments) :]
            self._count()
        if self._spill is not None:
            for segment in old_segments:
                self._spill.remove(segment.sets)

    def _merge(self) -> None:
        """Join segments that no tenant can tell apart any more.

        Join those in memory always, and files when the newer is no smaller than the older, so that
        an id is rewritten few times.
        """
        with self._mutex:
            bounds = {tenant.position for tenant in self._tenants.values()}
            bounds |= {tenant.reading.end for tenant in self._tenants.values() if tenant.reading}
        at = len(self._segments) - 1
        while at > 0:
            older, newer = self._segments[at - 1], self._segments[at]
            if newer.begin not in bounds and self._may_join(older, newer):
                joined = self._join(older, newer)
                if joined is None:  # the disk refused the write; keep both
                    return
                with self._mutex:
                    self._segments[at - 1 : at + 1] = [joined]
                    self._count()
                if self._spill is not None:
                    self._spill.remove(older.sets)
                    self._spill.remove(newer.sets)
                at = min(at, len(self._segments) - 1)
            else:
                at -= 1

    def _may_join(self, older: _Segment, newer: _Segment) -> bool:
        if self._spill is None or not (older.spilled or newer.spilled):
            return True
        if not (older.spilled and newer.spilled):
            return False
        return self._spill.size(newer.sets) >= self._spill.size(older.sets)

    def _join(self, older: _Segment, newer: _Segment) -> _Segment | None:
        def set_of(name: str) -> TouchedSet:
            sets = [segment.sets[name] for segment in (older, newer) if name in segment.sets]
            if len(sets) == 1:
                return sets[0]
            return join([_load(touched_set) for touched_set in sets], self._rows[name], self._keep)

        names = [*older.sets, *(name for name in newer.sets if name not in older.sets)]
        if self._spill is not None and older.spilled:
            try:
                sets = self._spill.write((name, set_of(name)) for name in names)
            except PetpsError:  # keep both files; touched() reports a file that is damaged
                return None
        else:
            sets = {name: set_of(name) for name in names}
        return _Segment(older.begin, newer.end, sets)

    def _spill_some(self) -> None:
        """Spill segments until half the budget is free, oldest first, the open one last.

        Raise ResourceExhausted if that is impossible.
        """
        assert self._budget is not None
        if self._spill is None:
            self._retry_bytes = int(self._resident + self._budget * RETRY_SHARE)
            raise ResourceExhausted(self._describe_budget())
        try:
            for segment in list(self._segments):
                if self._resident <= self._budget // 2:
                    break
                if not segment.spilled:
                    self._spill_one(segment)
            if self._resident > self._budget // 2:
                self._seal()
                if self._segments and not self._segments[-1].spilled:
                    self._spill_one(self._segments[-1])
        except ResourceExhausted:
            self._retry_bytes = int(self._resident + self._budget * RETRY_SHARE)
            raise
        self._merge()

    def _spill_one(self, segment: _Segment) -> None:
        assert self._spill is not None
        spilled_sets = self._spill.write(segment.sets.items())
        with self._mutex:
            segment.sets = spilled_sets
            self._count()

    # ---- under _mutex ----

    def _count(self) -> None:
        """Count bytes and ids again."""
        self._resident = self._open.resident_bytes + sum(
            segment.resident_bytes for segment in self._segments
        )
        id_sets = [id_set for id_set in self._open.sets.values() if isinstance(id_set, IdSet)]
        self._appended = sum(id_set.appended for id_set in id_sets)
        self._distinct = sum(id_set.distinct for id_set in id_sets)
        if self._budget is not None and self._resident <= self._budget:
            self._retry_bytes = 0

    def _over_budget(self) -> bool:
        return self._budget is not None and self._resident > max(self._budget, self._retry_bytes)

    def _describe_budget(self) -> str:
        slowest = min(self._tenants.values(), key=lambda tenant: tenant.position, default=None)
        tenant_text = "" if slowest is None else f"; tenant {slowest.name} has waited longest"
        return (
            f"the tracker holds {self._resident} bytes of ids, above memory_bytes "
            f"{self._budget}{tenant_text}. They are kept, and none is lost: let the tenants read "
            "and acknowledge, remove tenants that have stopped, or give a spill folder"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise FailedPrecondition("the tracker is closed")

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            names = ", ".join(sorted(self._tenants)) or "none"
            raise NotFound(f"the tracker has no tenant {name!r}; it has: {names}")
        return tenant

    def _unknown(self, table: str) -> NotFound:
        names = ", ".join(sorted(self._rows)) or "none"
        return NotFound(f"the tracker has no table {table!r}; it has: {names}")

    # ---- checking input ----

    def _check_touched(self, fqn: str, ids: npt.ArrayLike, state: npt.ArrayLike | None) -> Touched:
        with self._mutex:
            if fqn not in self._rows:
                raise self._unknown(fqn)
            rows = self._rows[fqn]
        id_array = _check_ids(fqn, ids, rows)
        state_array = None if state is None else np.array(state)
        if state_array is not None and (state_array.ndim == 0 or len(state_array) != len(id_array)):
            raise InvalidArgument(
                f"table {fqn}: give one state for each of the {len(id_array)} ids, got shape "
                f"{state_array.shape}"
            )
        if state_array is not None and state_array.dtype.hasobject:
            raise InvalidArgument(f"table {fqn}: states must be numbers, got {state_array.dtype}")
        kind = None if state_array is None else (state_array.dtype, state_array.shape[1:])
        if len(id_array):
            with self._mutex:
                table_kind = self._states.setdefault(fqn, kind)
            if table_kind != kind:
                raise InvalidArgument(
                    f"table {fqn}: state is {_describe_state(kind)}, before it was "
                    f"{_describe_state(table_kind)}: all ids of a table need states of the same "
                    "dtype and shape"
                )
        return Touched(id_array, state_array)


def _check_ids(fqn: str, ids: npt.ArrayLike, rows: int | None) -> npt.NDArray[np.uint64]:
    """Return the ids as a copy, uint64[n]. Raise InvalidArgument for the first bad id."""
    array = np.asarray(ids)
    if array.size == 0:
        return np.empty(0, np.uint64)
    if array.dtype.kind not in "iu":
        raise InvalidArgument(f"table {fqn}: ids must be integers, got {array.dtype}")
    flat = array.ravel()
    if array.dtype.kind == "i" and flat.min() < 0:
        position = int(np.argmax(flat < 0))
        raise InvalidArgument(
            f"table {fqn}: ids[{position}] must be at least 0, got {flat[position]}"
        )
    if rows is not None and flat.max() >= rows:
        position = int(np.argmax(flat >= rows))
        raise InvalidArgument(
            f"table {fqn}: ids[{position}] must be below {rows}, the table's rows, got "
            f"{flat[position]}"
        )
    return flat.astype(np.uint64)


def _describe_state(kind: tuple[np.dtype[Any], tuple[int, ...]] | None) -> str:
    return "none" if kind is None else f"{kind[0]}{[*kind[1]]} an id"


def _load(touched_set: TouchedSet) -> TouchedSet:
    return touched_set.load() if isinstance(touched_set, SpilledSet) else touched_set
