"""A pass over the rows of a table that removes those which are damaged. native/table/SCRUB.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from petps import _native
from petps.errors import FailedPrecondition
from petps.log import WARNING, Line
from petps.pool.damage import DamageLog

__all__ = ["ScrubReport", "TablePass", "scrub_tables"]

STEP_BYTES: Final = 1 << 20  # read between two looks at the pace and at whether the pass goes on
# Damaged rows that get a line each in the log of a process; the list of missing rows has them all.
LINES_MAX: Final = 100


@dataclass(slots=True)
class ScrubReport:
    """Counts of one pass over a table."""

    table: str
    instance: str
    rows: int = 0
    damaged: int = 0
    removed: int = 0
    """Those of the damaged ones that were not written again since they were found."""
    unremoved: int = 0
    """Rows of another key that are still there: it is their index entry that is damaged."""
    default_row_damaged: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


class TablePass:
    """A pass over one table, step by step."""

    lines_logged = 0  # of all passes of the process

    def __init__(
        self,
        table: _native.Table,
        instance: str,
        damage: DamageLog,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.table = table
        self.report = ScrubReport(table.name, instance)
        self.buckets = self.bucket_count = 0
        self._damage, self._log, self._clock = damage, log, clock
        self._cursor = _native.ScrubCursor()
        self._pending: list[_native.DamagedRow] = []  # found, and not removed yet
        self._is_read = False

    def step(self) -> int | None:
        """Read about STEP_BYTES of rows, and remove the damaged ones. Return the bytes read.

        Return None once the pass is complete, which is recorded then. After an error, the next step
        tries the same rows again.

        Raises IoError or ResourceExhausted if damaged rows cannot be listed as missing; they stay.
        """
        count = 0
        if not self._pending and not self._is_read:
            step = self.table.scrub(self._cursor, STEP_BYTES)
            count = step.bytes
            self.buckets, self.bucket_count = step.buckets, step.bucket_count
            self.report.rows += step.rows
            self.report.damaged += len(step.damaged)
            self.report.default_row_damaged |= step.default_row_damaged
            self._pending, self._is_read = step.damaged, step.complete
        if self._pending:
            removed = self._damage.remove(self.table, self._pending)
            self.report.removed += len(removed)
            self.report.unremoved += self._count_unreachable(removed)
            for row in removed:
                self._note(row)
            self._pending = []
        if not self._is_read:
            return count
        self._damage.strike_out(self.table, "written or deleted")
        self._damage.note_pass(self.table.id, self._clock())
        return None

    def _count_unreachable(self, removed: Sequence[_native.DamagedRow]) -> int:
        """Return how many of the pending rows have an entry whose key leads elsewhere."""
        gone = {row.slot for row in removed}
        return sum(row.fault == "other key" and row.slot not in gone for row in self._pending)

    def _note(self, row: _native.DamagedRow) -> None:
        if TablePass.lines_logged > LINES_MAX:
            return
        TablePass.lines_logged += 1
        name = f"table '{self.report.table}' of {self.report.instance}"
        if TablePass.lines_logged > LINES_MAX:
            text = f"{name}: more rows are damaged; {self._damage.path} lists all of them"
            self._log(Line(text, "rows_damaged", WARNING, table=self.report.table))
            return
        text = (
            f"{name}: the row of key {row.key} in slot {row.slot} is damaged ({row.fault}) and was "
            "removed: the key is missing"
        )
        facts = {"table": self.report.table, "key": row.key, "slot": row.slot}
        self._log(Line(text, "row_damaged", WARNING, **facts))


def scrub_tables(
    tables: _native.Tables,
    chosen: Iterable[_native.Table],
    *,
    progress: Callable[[str, int, int], bool],
    log: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Scrub tables of a pool that no server has. See Pool.scrub."""
    damage = DamageLog(tables)
    path = tables.info().path
    if damage.path is None and path:
        raise FailedPrecondition(
            f"{path} is a device, which has no place for a list of missing rows: serve it with "
            "pool.folder set, and scrub it then"
        )
    damage.adopt(tables)
    names = {instance.id: instance.name for instance in tables.instances()}
    reports = []
    for table in chosen:
        work = TablePass(table, names[table.record.instance], damage, log)
        while work.step() is not None:
            if not progress(table.name, work.buckets, work.bucket_count):
                raise FailedPrecondition(f"scrubbing of table '{table.name}' was cancelled")
        reports.append(work.report.as_dict() | {"missing": damage.count_of(table.id)})
    return reports
