"""POOL.damage: the keys whose damaged rows were removed, and when each table was last scrubbed.

A line is JSON. A key is listed before its row is removed, so that no crash forgets that it is
missing, and struck out once it is written again, deleted or restored. native/table/SCRUB.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import numpy as np

from petps import _native
from petps.delta.files import publish_file
from petps.errors import IoError, ResourceExhausted
from petps.pool.beside import FILE_MODE, append, file_beside

__all__ = ["MISSING_MAX", "DamageLog", "MissingRow", "damage_status"]

# The keys that a pool may miss, over all tables: 15 MB of lines. A pool that has lost more is to be
# rebuilt, and not to be repaired row by row.
MISSING_MAX: Final = 100_000
# The file is rewritten once it has this many lines, and most of them no longer count.
LINES_BEFORE_REWRITE: Final = 10_000


@dataclass(slots=True)
class MissingRow:
    """A key without its row.

    is_exact: This process removed the row, so it knows of each write and deletion of the key since.
    since: (run, seq) of the partition at a moment after the removal; None: not known yet.
    tried: The bases that could not restore it.
    """

    key: int
    slot: int
    stamp: int
    crc: int
    fault: str
    is_exact: bool = False
    since: tuple[int, int] | None = None
    tried: set[tuple[str, int, int]] = field(default_factory=set)

    def as_line(self, table: int) -> dict[str, Any]:
        """Return the line that lists the row."""
        names = ("key", "slot", "stamp", "crc", "fault")
        return {"table": table} | {name: getattr(self, name) for name in names}


class DamageLog:
    """The missing rows of an open pool, by table and key, and their file.

    A pool that is no file, and has no ``folder``, has no file of them: they are in memory only.
    Threads: any. ``lock`` is held from listing rows until they are removed, and while rows are
    struck out.

    Raises IoError if the file exists and cannot be read.
    """

    def __init__(self, tables: _native.Tables, folder: Path | None = None) -> None:
        """folder: For the file of a pool that is no file."""
        self.lock = threading.RLock()
        self._rows: dict[int, dict[int, MissingRow]] = {}
        self._passes: dict[int, float] = {}
        self._lines = 0
        info = tables.info()
        self._uuid = info.uuid
        self._tables = tables
        self._pool = Path(info.path) if info.path else None
        self.path = self._find_path(info.path, folder)
        self.unreadable_lines = 0
        """Lines of the file that were left out; the last one of a crash is none of them."""
        if self.path is not None:
            self._load(self.path)

    @staticmethod
    def _find_path(pool: str, folder: Path | None) -> Path | None:
        if not pool:
            return None
        beside = file_beside(pool, "damage")
        if beside is None and folder is not None:
            return folder / f"{Path(pool).name}.damage"
        return beside

    # ---- what is missing

    @property
    def count(self) -> int:
        """Return how many rows of all tables are missing."""
        return sum(len(rows) for rows in list(self._rows.values()))

    def of_table(self, table: int) -> dict[int, MissingRow]:
        """Return a copy of a table's missing rows, by key."""
        with self.lock:
            return dict(self._rows.get(table, {}))

    def count_of(self, table: int) -> int:
        """Return how many rows of a table are missing."""
        return len(self._rows.get(table, {}))

    def last_pass(self, table: int) -> float | None:
        """Return when a pass of the table was last complete, in seconds since 1970; None: never."""
        return self._passes.get(table)

    # ---- changes

    def remove(
        self, table: _native.Table, rows: Sequence[_native.DamagedRow]
    ) -> list[_native.DamagedRow]:
        """List damaged rows, then remove them. Return those that were removed.

        A row that was written again since it was found stays.

        Raises:
            IoError: The rows cannot be listed. None is removed.
            ResourceExhausted: The pool misses MISSING_MAX rows. None is removed.
        """
        with self.lock:
            # A missing key has no row: this one was removed since it was found.
            missing = set(table.missing_keys().tolist())
            rows = [row for row in rows if row.key not in missing]
            if self.count + len(rows) > MISSING_MAX:
                raise ResourceExhausted(
                    f"the pool would miss more than {MISSING_MAX:,} rows: rebuild it from a base "
                    "(petps create, petps load), and replace the disk or the memory"
                )
            listed = self._rows.setdefault(table.id, {})
            new = [
                MissingRow(row.key, row.slot, row.stamp, row.crc, row.fault, is_exact=True)
                for row in rows
            ]
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            self._write([row.as_line(table.id) | {"time": now} for row in new])
            listed.update((row.key, row) for row in new)
            table.remove_damaged(list(rows))
            self.strike_out(table, "written again")
            return [row for row in rows if row.key in listed]

    def strike_out(self, table: _native.Table, reason: str) -> list[int]:
        """Strike out the keys that the table no longer remembers as missing. Return them.

        Raises IoError if the file cannot be written; the keys are struck out in memory.
        """
        with self.lock:
            listed = self._rows.get(table.id, {})
            # After a failed drain nobody knows which deletions are durable.
            if not listed or self._tables.info().failed:
                return []
            missing = set(table.missing_keys().tolist())
            ended = [key for key in listed if key not in missing]
            for key in ended:
                del listed[key]
            if ended:
                self._write([{"table": table.id, "key": key, "ended": reason} for key in ended])
            return ended

    def note_pass(self, table: int, seconds: float) -> None:
        """Record that a pass of the table is complete. Raises IoError."""
        with self.lock:
            self._passes[table] = seconds
            self._write([{"table": table, "pass": round(seconds, 3)}])

    def adopt(self, tables: _native.Tables) -> None:
        """Tell the tables which keys are missing, once, after the open.

        Strike out what is written again or belongs to a dropped table; in memory only, if the file
        cannot be written.
        """
        with self.lock:
            existing = {table.id: table for table in tables.tables()}
            for number in (set(self._rows) | set(self._passes)) - set(existing):
                self._rows.pop(number, None)
                self._passes.pop(number, None)
            for number, rows in self._rows.items():
                existing[number].note_missing(np.array(list(rows), np.uint64))
                with contextlib.suppress(IoError):
                    self.strike_out(existing[number], "found in the table")

    # ---- the file

    def _load(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise IoError(f"{path} cannot be read: {error.strerror}") from None
        lines = content.split(b"\n")
        is_torn = lines.pop() != b""
        is_ours = False
        for number, line in enumerate(lines):
            try:
                values = json.loads(line)
                if number == 0:
                    is_ours = values["pool"] == self._uuid
                elif is_ours:
                    self._take(values)
            except (ValueError, KeyError, TypeError):
                if number == 0:
                    raise IoError(
                        f"{path} does not begin with the uuid of its pool, so nobody knows whose "
                        "missing rows it lists"
                    ) from None
                self.unreadable_lines += 1
        # With 0 lines, the next line rewrites the whole file.
        self._lines = 0 if is_torn or self.unreadable_lines or not is_ours else len(lines)

    def _take(self, values: dict[str, Any]) -> None:
        table = int(values["table"])
        if "pass" in values:
            self._passes[table] = float(values["pass"])
            return
        key = int(values["key"])
        rows = self._rows.setdefault(table, {})
        if "ended" in values:
            rows.pop(key, None)
            return
        rows[key] = MissingRow(
            key, int(values["slot"]), int(values["stamp"]), int(values["crc"]), str(values["fault"])
        )

    def _write(self, lines: Sequence[dict[str, Any]]) -> None:
        if self.path is None:
            return
        live = self.count + len(self._passes)
        is_due = self._lines == 0 or self._lines > LINES_BEFORE_REWRITE + 2 * live
        if is_due or not self.path.exists():  # it was moved away
            self._rewrite(lines)
            return
        try:
            append(self.path, _text_of(lines), self._owner())
        except OSError as error:
            raise self._error_of(error) from error
        self._lines += len(lines)

    def _rewrite(self, more: Sequence[dict[str, Any]] = ()) -> None:
        """Replace the file by one with what counts, and ``more``."""
        if self.path is None:
            return
        lines: list[dict[str, Any]] = [{"pool": self._uuid}]
        lines += [{"table": table, "pass": seconds} for table, seconds in self._passes.items()]
        for table, rows in self._rows.items():
            lines += [row.as_line(table) for row in rows.values()]
        lines += more
        owner = self._owner()

        def write(file: Any) -> None:
            os.fchmod(file.fileno(), FILE_MODE)
            if owner is not None and os.geteuid() == 0:
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            file.write(_text_of(lines))

        try:
            publish_file(self.path, write)
        except OSError as error:
            raise self._error_of(error) from error
        self._lines = len(lines)

    def _owner(self) -> os.stat_result | None:
        """Return the owner of a pool that is a file."""
        return self._pool.stat() if self._pool is not None and self._pool.is_file() else None

    def _error_of(self, error: OSError) -> IoError:
        return IoError(
            f"the list of missing rows, {self.path}, cannot be written: {error.strerror or error}; "
            "damaged rows stay in service until it can be"
        )


def damage_status(tables: _native.Tables) -> dict[str, Any]:
    """Return what the status of a pool without a server shows as ``scrub``."""
    try:
        damage = DamageLog(tables)
    except IoError as error:
        return {"faults": {"0": str(error)}, "tables": {}}
    return {
        "faults": {},
        "tables": {
            str(table.id): {
                "missing": damage.count_of(table.id),
                "last_pass": damage.last_pass(table.id),
            }
            for table in tables.tables()
        },
    }


def _text_of(lines: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()
