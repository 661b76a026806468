"""Backup of an instance of an open pool into a checkpoint store. BACKUP.md says how and why.

Owns:        back_up().
Never does:  restore (restore.py), or decide when to back up (petps.server.backups).
Called by:   Pool.back_up, and a server on request and by schedule.
Invariants:  a version with the part `petps.backup` has each row of the delta-fed tables exactly as
             of the positions in the part. A failed backup leaves the backups before it.
Threads:     one; pulls, pushes, ingest, expiry and growth go on beside it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.checkpoint import BaseInfo, Column, Rows, Store, Table, list_positions
from petps.checkpoint.bundle import CHUNK_BYTES, divide
from petps.checkpoint.chunk import ROW, STAMP
from petps.checkpoint.published import BASE_PART
from petps.checkpoint.state import PARTIAL_PART, Lineage, Version
from petps.checkpoint.store import BASE, DELTA
from petps.config.place import check_store
from petps.delta.schema import partition_of
from petps.errors import (
    FailedPrecondition,
    NotFound,
    PetpsError,
    Unavailable,
)
from petps.pool.backup_info import (
    BACKUP_PART,
    INCOMPLETE_BASE_PART,
    NEEDS_BASE,
    BackupInfo,
    Known,
    read_known,
    write_known,
)
from petps.pool.export import Bar, clock_entries, count_removed, distinct, no_bar, pull_whole

__all__ = ["HASH", "back_up"]

HASH: Final = "hash"  # the column with the hash of a row and its stamp
# Increments are written until they have together this share of the bytes of their base: a restore
# reads them whole into memory. Then a full backup follows.
FULL_SHARE: Final = 0.5
# Passes go on, so that ingest is held only for a short last one, while they write more than this.
SETTLED_BYTES: Final = 64 << 20
PASSES_MAX: Final = 5
# The last pass keeps its rows in memory, unless they are more, and writes them after the hold.
HELD_BYTES: Final = 256 << 20
# From this version on, rows are compared by their hash: the low 32 bits of versions that grow so
# fast do not order them.
COUNTED_VERSIONS: Final = 1 << 30
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)

Keys = npt.NDArray[np.uint64]
Stamps = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]
Marks = Mapping[int, int]  # by partition: the version that it has committed
Pieces = Iterator[Rows] | list[Rows]
# Holds ingest inside the context: nothing is applied, and the recorded progress covers what was.
# Takes goes_on, for the time in which it waits. Yields a function that raises if it failed to hold.
Hold = Callable[[Callable[[], bool]], AbstractContextManager[Callable[[], None]]]


def back_up(
    native: _native.Tables,
    instance: _native.InstanceRecord,
    url: str,
    *,
    full: bool = False,
    hold: Hold | None = None,
    bar: Bar = no_bar,
    goes_on: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Write a version of the instance to the store, which is made if there is none.

    Args:
        native: The open pool.
        instance: The instance.
        url: A folder, or any URL that fsspec knows.
        full: Write all rows, even if an increment would do.
        hold: Holds ingest; None: no ingest runs.
        bar: Receives the progress, table by table.
        goes_on: Called every few milliseconds of work; False ends the backup.

    Returns:
        Facts about the version.

    Raises:
        FailedPrecondition: A partition is not in a state to be backed up, the store belongs to
            something else, or goes_on returned False.
        PetpsError: The store cannot be read or written. The backups before this one remain.
    """
    check_store(url)
    backup = _Backup(native, instance, url, full, bar, goes_on)
    try:
        return backup.run(hold)
    except BaseException:
        backup.undo()
        raise


class _Backup:
    def __init__(
        self,
        native: _native.Tables,
        instance: _native.InstanceRecord,
        url: str,
        full: bool,
        bar: Bar,
        goes_on: Callable[[], bool],
    ) -> None:
        self._native, self._instance, self._url = native, instance, url
        self._bar, self._goes_on = bar, goes_on
        self._pool = native.info().path
        self._tables = {
            table.name: table for table in native.tables() if table.record.instance == instance.id
        }
        if not self._tables:
            raise FailedPrecondition(
                f"{instance.name} has no table, so there is nothing to back up"
            )
        self._removed = count_removed(self._tables.values())
        self._check_held: Callable[[], None] = lambda: None
        self._why_full: str | None = None
        self._first = 1  # the first version that this backup writes
        now = self._info()
        self._check_states(now)  # before the work
        self._store, self._last = self._open_store()
        if self._store is not None and self._store.state.lineages:
            self._first = self._store.state.newest_version + 1
        self._then = self._read_last()
        self._check_partitions(now)
        self._why_full = "it was asked for" if full else self._find_why_full()
        self._known = self._read_known()
        self._rows = self._deleted = self._bytes = 0

    # ---- the store

    def _open_store(self) -> tuple[Store | None, Version | None]:
        """Return the store, None if it is new, and its newest backup."""
        try:
            store = Store.open(self._url)
        except NotFound:
            return None, None
        schemas = {name: _describe(table) for name, table in self._tables.items()}
        if store.state.model != self._instance.model or not all(
            HASH in {column.name for column in table.columns}
            for table in store.state.tables.values()
        ):
            raise FailedPrecondition(
                f"{store.name} is a store of something else (model {store.state.model}): give a "
                "store of its own for the backups of a model"
            )
        if dict(store.state.tables) != schemas:
            raise FailedPrecondition(
                f"{store.name} has backups of other tables ({', '.join(store.state.tables)}) than "
                f"{self._instance.name} has now ({', '.join(schemas)}): give a new store"
            )
        entries = store.state.versions()
        last = next((entry for entry in reversed(entries) if BackupInfo.is_in(entry)), None)
        if last is None and entries:
            store.drop_all_but([])  # all but the newest, which the first backup drops
        elif last is not None and entries[-1] is not last:
            store.rollback(last.version)  # what a killed backup left
        return store, last

    def _find_why_full(self) -> str | None:
        if self._store is None or self._last is None:
            return "it is the first"
        lineage = self._store.state.lineage
        base, deltas = _bytes_of(lineage)
        if deltas > FULL_SHARE * base:
            return f"the increments have more than {FULL_SHARE:.0%} of the bytes of their base"
        return None

    def _check_partitions(self, now: BackupInfo) -> None:
        """Raise FailedPrecondition if the store has backups of another server's partitions."""
        then = self._then
        if then is None or then.pool == now.pool:
            return
        if {entry.partition for entry in then.progress} != {
            entry.partition for entry in now.progress
        }:
            raise FailedPrecondition(
                f"{self._url} has backups of another pool, with other partitions: give each server "
                "of a shard map a store of its own"
            )

    def _read_known(self) -> dict[str, Known]:
        """Return what the last backup has, by table: from the pool's file, or the store."""
        if self._why_full is not None or self._store is None or self._last is None:
            return {name: Known.nothing() for name in self._tables}
        known = read_known(self._pool, self._instance.model, self._store.name, self._last)
        if known is not None and set(known) == set(self._tables):
            return known
        known = {}
        for name in self._tables:
            keys, hashes = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
            for rows in self._store.pieces(name, self._last.version):
                self._check_wanted()
                keys.append(rows.keys)
                stored = np.ascontiguousarray(rows.columns[HASH])
                hashes.append(stored.view(np.uint64)[:, 0].copy())
            known[name] = Known(np.concatenate(keys), np.concatenate(hashes))
        return known

    # ---- the passes

    def run(self, hold: Hold | None) -> dict[str, Any]:
        start = time.monotonic()
        then = None if self._why_full is not None else self._then
        kind = BASE if self._why_full is not None else DELTA
        version = self._first
        held = 0.0
        delta_fed = [name for name, table in self._tables.items() if table.record.feed == "delta"]
        names = list(self._tables)
        before, number = 1 << 62, 1
        while hold is not None and delta_fed and number < PASSES_MAX:
            now = self._info()
            entry = self._write(version, kind, self._pieces(names, then, now, kind), None)
            version, kind, then, names = version + 1, DELTA, now, delta_fed
            number += 1
            if entry.bytes <= SETTLED_BYTES or entry.bytes > before / 2:
                break
            before = entry.bytes
        pieces: dict[str, Pieces] | None
        holds = hold(self._goes_on) if hold is not None and delta_fed else nullcontext(lambda: None)
        with holds as self._check_held:
            held_from = time.monotonic()
            now = self._info()
            parts = self._parts_of(now)
            pieces = self._pieces(names, then, now, kind)
            if hold is not None and delta_fed:
                budget = HELD_BYTES
                for name, rows in pieces.items():
                    pieces[name], budget = _keep(rows, budget)
                held = time.monotonic() - held_from
                if any(not isinstance(rows, list) for rows in pieces.values()):
                    entry = self._write(version, kind, pieces, parts)
                    held, pieces = time.monotonic() - held_from, None
            self._check_held()
        self._check_held = lambda: None
        if pieces is not None:
            entry = self._write(version, kind, pieces, parts)
        self._drop_partial()
        warnings = now.warnings + self._remember(entry)
        if hold is None and delta_fed and not self._native.info().was_clean:
            warnings.append(
                "the pool was not closed cleanly, so its rows may be newer than its positions by "
                "the last batch: a server that follows the log makes up for it"
            )
        return self._report(entry, now) | {
            "held_seconds": round(held, 3),
            "seconds": round(time.monotonic() - start, 3),
            "warnings": warnings,
        }

    def _report(self, entry: Version, info: BackupInfo) -> dict[str, Any]:
        assert self._store is not None
        return {
            "store": self._store.name,
            "model": self._instance.model,
            "instance": self._instance.name,
            "version": entry.version,
            "kind": "increment" if self._why_full is None else "full",
            "why_full": self._why_full,
            "log_version": min((progress.version for progress in info.progress), default=0),
            "tables": [
                {"name": name, "rows": len(known.keys)} for name, known in self._known.items()
            ],
            "rows_written": self._rows,
            "rows_deleted": self._deleted,
            "bytes": self._bytes,
        }

    def _info(self) -> BackupInfo:
        own = (t for t in self._native.tables() if t.record.instance == self._instance.id)
        if {table.id for table in own} != {table.id for table in self._tables.values()}:
            raise Unavailable(
                f"a table of {self._instance.name} was created or dropped during the backup: back "
                "up again"
            )
        return BackupInfo.of(
            self._native, self._instance, self._tables.values(),
            full=self._why_full is not None, first_version=self._first,
        )  # fmt: skip

    def _check_states(self, info: BackupInfo) -> None:
        """Raise FailedPrecondition if the rows of a partition are a mixture."""
        for entry in info.progress:
            if entry.state in NEEDS_BASE:
                raise FailedPrecondition(
                    f"partition {entry.partition} of {info.instance} is {entry.state}, so its rows "
                    "are not those of one position of the log: back up once `petps status` shows "
                    "that it follows"
                )

    def _read_last(self) -> BackupInfo | None:
        """Return what the last backup recorded; None: there is none."""
        if self._store is None or self._last is None:
            return None
        return BackupInfo.parse(
            self._store.part(self._last.version, BACKUP_PART),
            f"{self._store.name}: part {BACKUP_PART}",
        )

    def _pieces(
        self, names: list[str], then: BackupInfo | None, now: BackupInfo, kind: str
    ) -> dict[str, Pieces]:
        """Return, by table, the pieces to write; each is read from the pool when it is requested.

        names: the tables to write. then: what was recorded before the known rows were read.
        """
        marks = {} if then is None else _marks(then, now)
        result: dict[str, Pieces] = {name: [] for name in self._tables}
        for name in names:
            by_version = marks if self._tables[name].record.feed == "delta" else None
            changes = self._changes_of(name, by_version, is_base=kind == BASE)
            result[name] = divide(_describe(self._tables[name]), changes)
        return result

    def _changes_of(self, name: str, marks: Marks | None, *, is_base: bool) -> Iterator[Rows]:
        table, known = self._tables[name], self._known[name]
        described = _describe(table)
        candidates = _list_candidates(table, known, marks, self._instance.partitions)
        step = max(1, CHUNK_BYTES // (8 + described.width))
        touched: list[Keys] = []
        found: list[Known] = []
        with self._bar(name, len(candidates)) as advance:
            for start in range(0, len(candidates), step):
                self._check_wanted()
                keys = candidates[start : start + step]
                rows, exists, hashes = _read(table, described, keys)
                at, is_known = _find(known.keys, keys)
                same = is_known.copy()
                same[is_known] = known.hashes[at[is_known]] == hashes[is_known]
                touched.append(keys)
                found.append(Known(keys[exists], hashes[exists]))
                is_gone = ~exists & is_known & (not is_base)
                chosen = is_gone | (exists & (~same if marks is None else True))
                self._rows += int(np.count_nonzero(chosen & exists))
                self._deleted += int(np.count_nonzero(is_gone))
                yield Rows.of(
                    described,
                    keys[chosen],
                    {column: values[chosen] for column, values in rows.items()},
                    is_gone[chosen],
                )
                advance(len(keys))
        self._known[name] = _updated(known, touched, found)

    def _parts_of(self, info: BackupInfo) -> dict[str, bytes]:
        """Return the parts of the version. Raise the error of _check_states()."""
        self._check_states(info)
        base = BaseInfo(
            instance=info.instance,
            version=min((entry.version for entry in info.progress), default=0),
            partitions=info.partitions,
            positions=list_positions(
                {entry.partition: (entry.run, entry.seq) for entry in info.progress}
            ),
            by_partition=False,
            clocks={
                name: clock_entries(self._native, table)
                for name, table in self._tables.items()
                if table.status().expire_after > 0
            },
        )
        is_base = all(self._tables[name].record.feed != "delta" for name in info.missing)
        return {
            BACKUP_PART: info.to_json(),
            BASE_PART if is_base else INCOMPLETE_BASE_PART: base.to_json(),
        }

    def _write(
        self,
        version: int,
        kind: str,
        pieces: Mapping[str, Pieces],
        parts: dict[str, bytes] | None,
    ) -> Version:
        if self._store is None:
            described = [_describe(table) for table in self._tables.values()]
            self._store = Store.create(
                self._url, self._instance.model, described, commit_empty=False
            )
        entry = self._store.write(
            version,
            pieces,
            kind=kind,
            parts={PARTIAL_PART: b"{}"} if parts is None else parts,
            raise_if_cancelled=self._check_wanted,
        )
        self._bytes += entry.bytes
        return entry

    def undo(self) -> None:
        """Drop what a failed backup has written. What remains is dropped by the next one."""
        with contextlib.suppress(PetpsError):
            if self._store is not None and self._last is not None:
                entries = self._store.state.versions()
                if entries[-1].version != self._last.version and entries[-1].is_partial:
                    self._store.rollback(self._last.version)

    def _drop_partial(self) -> None:
        assert self._store is not None
        entries = self._store.state.versions()
        if not all(BackupInfo.is_in(entry) for entry in entries):
            self._store.drop_all_but(
                {entry.version for entry in entries if BackupInfo.is_in(entry)}
            )

    def _remember(self, entry: Version) -> list[str]:
        """Write the file beside the pool. Return why it cannot be written, in a list."""
        assert self._store is not None
        try:
            write_known(self._pool, self._instance.model, self._store.name, entry, self._known)
        except OSError as error:
            place = error.filename or self._pool
            text = "the next backup reads the keys from the store instead, which takes longer"
            return [f"{place}: {error.strerror}: {text}"]
        return []

    def _check_wanted(self) -> None:
        """Raise PetpsError if the backup would be wrong, or is not wanted any more."""
        self._check_held()
        if count_removed(self._tables.values()) != self._removed:
            raise Unavailable("damaged rows were removed during the backup: back up again")
        if not self._goes_on():
            raise FailedPrecondition("the backup was cancelled; the backups before it remain")


def _describe(table: _native.Table) -> Table:
    columns = (Column(ROW, table.dtype, table.dim), Column(STAMP, "u32", 1), Column(HASH, "u32", 2))
    return Table(table.name, columns)


def _marks(then: BackupInfo, now: BackupInfo) -> Marks | None:
    """Return the versions committed then, if every row that changed since has a newer one.

    None: rows must be compared by their hash.
    """
    if (then.pool, then.instance_id, [table.identity for table in then.tables]) != (
        now.pool,
        now.instance_id,
        [table.identity for table in now.tables],
    ):
        return None
    if now.durability == "process" and then.boot != now.boot:
        return None  # rows of a base may have taken the place of rows that a power loss took
    before = {entry.partition: entry for entry in then.progress}
    for entry in now.progress:
        known = before.get(entry.partition)
        if known is None:
            continue
        if entry.run != known.run or entry.seq < known.seq or known.state in NEEDS_BASE:
            return None  # the base of a new run may have older versions
        if entry.version >= COUNTED_VERSIONS:
            return None
    return {entry.partition: entry.version for entry in then.progress}


def _bytes_of(lineage: Lineage) -> tuple[int, int]:
    """Return the bytes that the base of a lineage took, and all versions above it."""
    base = sum(size for _, kind, size, _ in lineage.history if kind == BASE)
    return base, sum(size for _, kind, size, _ in lineage.history if kind != BASE)


def _list_candidates(
    table: _native.Table, known: Known, marks: Marks | None, partitions: int
) -> Keys:
    """Return the keys whose rows may differ from the known ones, ascending.

    marks: None: all keys that exist or are known.
    """
    keys, stamps = table.keys_and_stamps()
    if marks is None:
        return distinct(np.concatenate([keys, known.keys]))
    partition = partition_of(keys, partitions)
    has_mark = np.zeros(partitions, np.bool_)
    mark = np.zeros(partitions, np.uint32)
    for number, version in marks.items():
        has_mark[number], mark[number] = True, version & 0xFFFFFFFF
    is_newer = ~has_mark[partition] | (stamps > mark[partition])
    newer, older = distinct(keys[is_newer]), distinct(keys[~is_newer])
    # A row without a newer version, of a key that is not known, was inserted all the same.
    _, is_known = _find(known.keys, older)
    _, exists = _find(distinct(keys), known.keys)
    return distinct(np.concatenate([newer, older[~is_known], known.keys[~exists]]))


def _find(keys: Keys, wanted: Keys) -> tuple[npt.NDArray[np.intp], Mask]:
    """Return where each wanted key is in ``keys``, which ascend, and bool[n]: whether it is."""
    if len(keys) == 0:
        return np.zeros(len(wanted), np.intp), np.zeros(len(wanted), np.bool_)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return at, keys[at] == wanted


def _read(
    table: _native.Table, described: Table, keys: Keys
) -> tuple[dict[str, npt.NDArray[np.uint8]], Mask, Keys]:
    """Return the columns of the keys' rows, bool[n]: which exist, and uint64[n]: their hashes.

    Raise DataLoss at a damaged row.
    """
    rows = np.empty((len(keys), table.row_bytes), np.uint8)
    exists = np.empty(len(keys), np.bool_)
    stamps = np.zeros(len(keys), np.uint32)
    pull_whole(table, keys, rows, exists, stamps)
    # Also of the stamp: a row that was written again, with the same values, expires later.
    hashes = _native.hash_rows(rows) ^ (stamps.astype(np.uint64) * _GOLDEN)
    columns = {
        ROW: rows,
        STAMP: stamps[:, None].view(np.uint8),
        HASH: hashes[:, None].view(np.uint8),
    }
    return columns, exists, hashes


def _updated(known: Known, touched: list[Keys], found: list[Known]) -> Known:
    """Return the known rows once those of the touched keys are the found ones."""
    all_touched = np.concatenate([np.empty(0, np.uint64), *touched])
    is_kept = ~np.isin(known.keys, all_touched, assume_unique=True)
    keys = np.concatenate([known.keys[is_kept], *(rows.keys for rows in found)])
    hashes = np.concatenate([known.hashes[is_kept], *(rows.hashes for rows in found)])
    order = np.argsort(keys, kind="stable")
    return Known(keys[order], hashes[order])


def _keep(pieces: Pieces, budget: int) -> tuple[Pieces, int]:
    """Return the pieces in memory, or if they have more bytes than that, as they are read.

    Also return what is left of the budget.
    """
    kept: list[Rows] = []
    for rows in pieces:
        kept.append(rows)
        budget -= sum(values.nbytes for values in rows.columns.values())
        if budget < 0:
            return _chain(kept, iter(pieces)), budget
    return kept, budget


def _chain(kept: list[Rows], rest: Iterator[Rows]) -> Iterator[Rows]:
    yield from kept
    kept.clear()
    yield from rest
