"""Repair: reads the rows that a pool misses from the bases of its log. native/table/SCRUB.md."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

import numpy as np

from petps import _native
from petps.delta.schema import partition_of
from petps.errors import DataLoss, NotFound, PetpsError, Unavailable
from petps.log import WARNING, Line
from petps.pool.damage import DamageLog, MissingRow
from petps.server.ingest.protocols import BaseReader, BaseSource

__all__ = ["Repairs"]

LOOK_SECONDS: Final = 5.0  # between two searches for bases, while rows are missing
# Only this many of the newest bases are read for a row.
BASES_MAX: Final = 4
# How long a base is left alone of which a table is damaged or lacks files, because somebody may be
# copying it: at first, and at most; each time twice as long.
UNREADABLE_SECONDS: Final = 60.0
UNREADABLE_SECONDS_MAX: Final = 3600.0
# How long ingest may take to finish what it has read, in tries of one second, between which the
# thread may stop.
AT_REST_TRIES: Final = 30
READ_BYTES: Final = 64 << 20  # of rows that are read together, and written in one batch
# States of a partition whose rows are those of its progress.
FOLLOWING: Final = ("following", "passing")

Position = tuple[int, int]  # (run, seq) of a partition
# Runs an action while nothing is applied; returns whether it ran (Ingest.between_applies).
AtRest = Callable[[Callable[[], None], float], bool]
BaseName = tuple[str, int, int]  # name, version, moment of creation
Found = dict[int, tuple[bytes, int | None]]  # by key: the row, and its stamp if the base has stamps


class Repairs:
    """A thread that restores missing rows of tables that deltas feed, until close().

    A row comes from a base only if it is the row that was removed, or the row that a catch-up to
    the base would give its key. Rows that no base has now are looked for again. A base that cannot
    be read whole is read again later.

    Args:
        tables: The pool's.
        model: The model whose log is followed.
        bases: The source of bases, for this thread only.
        at_rest: Runs an action between two applies.
        damage: The list of missing rows.
        log: Receives a line for each table with restored rows, and for each new fault.
    """

    def __init__(
        self,
        tables: _native.Tables,
        model: str,
        bases: BaseSource,
        at_rest: AtRest,
        damage: DamageLog,
        log: Callable[[str], None],
    ) -> None:
        self._tables, self._model, self._bases = tables, model, bases
        self._at_rest, self._damage, self._log = at_rest, damage, log
        self.restored: dict[int, int] = {}
        """Rows restored since the start, by table."""
        self.fault = ""
        """Why no row can be restored now; empty: nothing prevents it."""
        # By base and table: when it may be read again, and the seconds until then.
        self._unreadable: dict[tuple[BaseName, str], tuple[float, float]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="petps-repair", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        _native.lower_priority()  # as ingest, which waits for this thread while it writes
        while not self._stopping.wait(LOOK_SECONDS):
            try:
                self.look()
                fault = ""
            except Exception as error:  # report any error, but continue to serve
                fault = f"missing rows cannot be restored: {type(error).__name__}: {error}"
            if fault and fault != self.fault and not self._stopping.is_set():
                self._log(Line(fault, "repair_failed", WARNING))
            self.fault = fault

    def look(self) -> None:
        """Restore what the present bases can restore."""
        for instance in self._tables.instances():
            if instance.model != self._model or instance.frozen:
                continue
            tables = {
                table.name: table
                for table in self._tables.tables()
                if table.record.instance == instance.id
                and table.record.feed == "delta"
                and self._damage.count_of(table.id) > 0
            }
            if tables:
                self._repair(instance, tables)

    def _repair(
        self, instance: _native.InstanceRecord, tables: Mapping[str, _native.Table]
    ) -> None:
        positions: dict[int, Position] = {}

        def settle() -> None:
            positions.update(self._positions(instance.id))
            for table in tables.values():
                for row in self._damage.of_table(table.id).values():
                    if row.since is None:
                        row.since = positions.get(_partition(row.key, instance))

        if not self._rest(settle):
            return
        bases = [
            base
            for base in self._bases.of_model(self._model)
            if base.instance in (instance.name, self._model)
            and base.partitions == instance.partitions
        ][:BASES_MAX]
        names = {_name_of(base) for base in bases}
        for base in bases:
            for name, table in tables.items():
                schema = base.schemas().get(name)
                if schema is None or (schema.dtype, schema.dim) != (table.dtype, table.dim):
                    continue
                until, _ = self._unreadable.get((_name_of(base), name), (0.0, 0.0))
                if until > time.monotonic():
                    continue
                may_help = (
                    (key, row)
                    for key, row in self._damage.of_table(table.id).items()
                    if _may_help(base, row, _partition(key, instance), positions)
                )
                rows = dict(islice(may_help, max(1, READ_BYTES // table.row_bytes)))
                if rows:
                    found = self._read(base, name, rows, instance)
                    self._restore(base, table, instance, rows, found)
        for table in tables.values():
            for row in self._damage.of_table(table.id).values():
                row.tried &= names  # a base that has gone is not tried again

    def _positions(self, instance: int) -> dict[int, Position]:
        """Return what is applied, by partition. Call it at rest."""
        return {
            progress.partition: (progress.run, progress.seq)
            for progress in self._tables.all_progress()
            if progress.instance == instance and progress.state in FOLLOWING
        }

    def _rest(self, action: Callable[[], None]) -> bool:
        tries = AT_REST_TRIES
        while tries > 0 and not self._stopping.is_set():
            if self._at_rest(action, 1.0):
                return True
            tries -= 1
        if self._stopping.is_set():
            return False
        raise Unavailable("ingest did not end its batch, or reads no log: `petps status`")

    def _read(
        self,
        base: BaseReader,
        table: str,
        rows: Mapping[int, MissingRow],
        instance: _native.InstanceRecord,
    ) -> Found | None:
        """Return the base's rows of these keys; None if it cannot be read, or this thread stops."""
        wanted = np.sort(np.array(list(rows), np.uint64))
        partitions = np.unique(partition_of(wanted, instance.partitions)).tolist()
        found: Found = {}
        place = _name_of(base), table
        try:
            for keys, stored, stamps in base.stamped_chunks(table, partitions):
                if self._stopping.is_set():
                    return None
                for at in np.flatnonzero(np.isin(keys, wanted)).tolist():
                    stamp = None if stamps is None else int(stamps[at])
                    found[int(keys[at])] = (stored[at].tobytes(), stamp)
        except PetpsError as error:
            if isinstance(error, DataLoss | NotFound):
                known = self._unreadable.get(place)
                seconds = UNREADABLE_SECONDS if known is None else 2 * known[1]
                seconds = min(seconds, UNREADABLE_SECONDS_MAX)
                self._unreadable[place] = time.monotonic() + seconds, seconds
                if known is not None:
                    return None  # its fault is logged once
            fault = f"missing rows of table '{table}': {error}"
            self._log(Line(fault, "repair_failed", WARNING, table=table))
            return None
        self._unreadable.pop(place, None)
        return found

    def _restore(
        self,
        base: BaseReader,
        table: _native.Table,
        instance: _native.InstanceRecord,
        rows: Mapping[int, MissingRow],
        found: Found | None,
    ) -> None:
        if found is None:
            return
        restored: list[int] = []

        def restore() -> None:
            # First, because the list may be older than a write, which no restore may undo. Nothing
            # writes the table while ingest is held.
            self._damage.strike_out(table, "written again")
            positions = self._positions(instance.id)
            listed = self._damage.of_table(table.id)
            chosen: dict[int, tuple[bytes, int]] = {}
            gone: list[int] = []
            for key, row in rows.items():
                if listed.get(key) is not row:  # written, deleted or removed again since
                    continue
                value = found.get(key)
                is_current = _is_current(base, row, _partition(key, instance), positions)
                if value is not None and _is_same(row, value[0]):
                    chosen[key] = value[0], row.stamp
                elif value is not None and is_current:
                    stamp = base.version & 0xFFFFFFFF if value[1] is None else value[1]
                    chosen[key] = value[0], stamp
                elif is_current:
                    gone.append(key)  # a catch-up to the base would delete it
            if gone:
                table.apply(np.array(gone, np.uint64), None)
                self._damage.strike_out(table, "deleted before its removal")
            if chosen:
                restored.extend(self._write(table, chosen))

        if not self._rest(restore):
            return
        for row in rows.values():
            row.tried.add(_name_of(base))
        if restored:
            self.restored[table.id] = self.restored.get(table.id, 0) + len(restored)
            text = (
                f"table '{table.name}' of {instance.name}: {len(restored):,} missing rows are "
                f"restored from {base.name}"
            )
            self._log(Line(text, "rows_restored", table=table.name, rows=len(restored)))

    def _write(self, table: _native.Table, chosen: Mapping[int, tuple[bytes, int]]) -> list[int]:
        with self._damage.lock:
            rows = np.frombuffer(b"".join(row for row, _ in chosen.values()), np.uint8)
            table.restore(
                np.array(list(chosen), np.uint64),
                rows.reshape(len(chosen), table.row_bytes),
                np.array([stamp for _, stamp in chosen.values()], np.uint32),
            )
            return self._damage.strike_out(table, "restored")


def _partition(key: int, instance: _native.InstanceRecord) -> int:
    return int(partition_of(np.array([key], np.uint64), instance.partitions)[0])


def _name_of(base: BaseReader) -> BaseName:
    return base.name, base.version, int(getattr(base, "created_ns", 0))


def _may_help(
    base: BaseReader, row: MissingRow, partition: int, positions: Mapping[int, Position]
) -> bool:
    """Return whether the base is worth reading for the row now."""
    if _name_of(base) in row.tried or partition not in positions:
        return False
    if base.position(partition) > positions[partition]:  # later
        return False
    return row.is_exact or _is_current(base, row, partition, positions)


def _is_same(row: MissingRow, stored: bytes) -> bool:
    """Return whether ``stored`` is the removed row, byte for byte, by its header."""
    return row.is_exact and row.fault == "checksum" and _native.crc32c(stored) == row.crc


def _is_current(
    base: BaseReader, row: MissingRow, partition: int, positions: Mapping[int, Position]
) -> bool:
    """Return whether the base has the key as it was when it was removed.

    Nothing that was applied since has touched the key, so every base of a position between then and
    now has it so.
    """
    position, now = base.position(partition), positions.get(partition)
    if row.since is None or now is None or position == (0, 0):
        return False
    return row.since <= position <= now
