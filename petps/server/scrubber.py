"""Passes over the rows of all tables, on schedule and on request. native/table/SCRUB.md."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from petps import _native
from petps.config.schema import ScrubConfig
from petps.errors import FailedPrecondition, NotFound, PetpsError, Unavailable
from petps.log import WARNING, Line
from petps.pool.damage import DamageLog
from petps.pool.scrub import TablePass

__all__ = ["Progress", "Scrubber"]

LOOK_SECONDS: Final = 1.0
WAIT_SECONDS: Final = 0.1  # between two looks at the limit and at whether to stop
NICENESS: Final = 19  # of 19
# A pass may read faster for this long, after it was slower than its limit.
CREDIT_SECONDS: Final = 0.1

# (table, buckets done, buckets): reports the progress of a pass; returns whether it goes on.
Progress = Callable[[str, int, int], bool]


class Repaired(Protocol):
    """Tells what repairs have done."""

    restored: dict[int, int]
    fault: str


class Scrubber:
    """A thread that scrubs each table every ``scrub.every``, until close().

    Why a table cannot be scrubbed is logged once, and in ``faults``. Threads: any thread may call
    every method.

    Args:
        tables: The pool's.
        config: When and how fast.
        damage: The list of missing rows, which is adopted already.
        log: Receives a line for each damaged row and each new fault.
        clock: Seconds since 1970.
    """

    def __init__(
        self,
        tables: _native.Tables,
        config: ScrubConfig,
        damage: DamageLog,
        log: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tables, self._config, self._damage, self._log = tables, config, damage, log
        self._clock = clock
        self._stopping = threading.Event()
        self._pass_lock = threading.Lock()  # one pass at a time
        self._requests = 0  # passes that wait for the lock, or have it; under _counts_lock
        self._counts_lock = threading.Lock()
        self._current: TablePass | None = None  # of the schedule, between two of its turns
        self._counts: dict[int, list[int]] = {}  # by table: rows read, and rows damaged
        self._faults: dict[int, str] = {}  # by table; 0: of all
        self._not_before = 0.0  # when the limit allows the next step
        self._struck_out = 0.0  # when missing rows were last struck out
        if damage.unreadable_lines:
            text = (
                f"{damage.unreadable_lines} lines of {damage.path} cannot be read: keys that they "
                "listed as missing are forgotten"
            )
            log(Line(text, "damage_unreadable", WARNING))
        self._thread = threading.Thread(target=self._run, name="petps-scrub", daemon=True)
        self._thread.start()

    def configure(self, config: ScrubConfig) -> None:
        """Change when and how fast tables are scrubbed."""
        self._config = config

    def close(self) -> None:
        """Stop. A pass in progress ends, and the next one begins anew."""
        self._stopping.set()
        self._thread.join()
        with self._pass_lock:  # a pass on request ends too
            pass

    # ---- what it shows

    @property
    def faults(self) -> dict[int, str]:
        """Return why a table cannot be scrubbed, or what is damaged for good; 0: of all tables."""
        return dict(self._faults)

    def status(self, repairs: Repaired | None) -> dict[str, Any]:
        """Return plain values for the status."""
        faults = {str(table): text for table, text in self.faults.items()}
        if repairs is not None and repairs.fault:
            faults["repair"] = repairs.fault
        return {
            "every_seconds": self._config.every_seconds(),
            "bytes_per_second": self._config.bytes_per_second,
            "faults": faults,
            "tables": {
                str(table.id): self._status_of(table, repairs) for table in self._tables.tables()
            },
        }

    def _status_of(self, table: _native.Table, repairs: Repaired | None) -> dict[str, Any]:
        rows, damaged = self._counts.get(table.id, (0, 0))
        return {
            "rows": rows,
            "damaged": damaged,
            "restored": repairs.restored.get(table.id, 0) if repairs is not None else 0,
            "missing": self._damage.count_of(table.id),
            "last_pass": self._damage.last_pass(table.id),
        }

    # ---- passes on request

    def scrub(
        self, table: _native.Table, progress: Progress, *, paced: bool = True
    ) -> dict[str, Any]:
        """Scrub a table now, and return the report of the pass.

        A pass of the schedule waits meanwhile. Raises Unavailable if ``progress`` or close() ends
        it, and the errors of TablePass.
        """
        with self._counts_lock:
            self._requests += 1
        try:
            with self._pass_lock:
                work = self._new_pass(table)
                while self._step(work, paced):
                    if not progress(table.name, work.buckets, work.bucket_count):
                        raise Unavailable(f"scrubbing of table '{table.name}' was cancelled")
            return work.report.as_dict() | {"missing": self._damage.count_of(table.id)}
        finally:
            with self._counts_lock:
                self._requests -= 1

    def _new_pass(self, table: _native.Table) -> TablePass:
        instances = {record.id: record.name for record in self._tables.instances()}
        name = instances.get(table.record.instance, str(table.record.instance))
        return TablePass(table, name, self._damage, self._log, self._clock)

    # ---- the schedule

    def _run(self) -> None:
        _native.lower_priority(NICENESS)
        while not self._stopping.wait(LOOK_SECONDS):
            try:
                existing = {table.id: table for table in self._tables.tables()}
                self._strike_out_all()
                for number in [*self._faults]:
                    if number not in existing:
                        self._faults.pop(number, None)
                for table in self._due(existing):
                    self._scrub_on_schedule(table)
            except Exception as error:  # report any error, but continue to serve
                self._note(0, f"tables cannot be scrubbed: {error}")

    def _due(self, existing: dict[int, _native.Table]) -> Iterator[_native.Table]:
        """Yield the tables whose last pass is too long ago, the one that has begun first."""
        every, begun = self._config.every_seconds(), self._current
        if every == 0 or begun is None or begun.table.id not in existing:
            self._current = begun = None
        if begun is not None:
            yield begun.table
        for table in existing.values():
            last = self._damage.last_pass(table.id)
            if every > 0 and (last is None or not 0 <= self._clock() - last < every):
                yield table

    def _strike_out_all(self) -> None:
        """Strike out missing rows that were written or deleted since, at most once a second."""
        now = time.monotonic()
        if self._damage.count == 0 or now - self._struck_out < LOOK_SECONDS:
            return
        self._struck_out = now
        for table in self._tables.tables():
            with contextlib.suppress(NotFound):  # it has been dropped
                self._damage.strike_out(table, "written or deleted")

    def _scrub_on_schedule(self, table: _native.Table) -> None:
        """Go on with the pass over the table, until a request wants the turn."""
        try:
            with self._pass_lock:
                if self._current is None or self._current.table.id != table.id:
                    self._current = self._new_pass(table)
                while self._step(self._current, paced=True):
                    if self._requests > 0 or self._config.every_seconds() == 0:
                        return
                self._current = None
        except NotFound:  # it has been dropped
            self._current = None
            self._faults.pop(table.id, None)
        except PetpsError as error:
            self._note(table.id, f"table '{table.name}' cannot be scrubbed: {error}")

    def _step(self, work: TablePass, paced: bool) -> bool:
        """Do one step of a pass. Return False once it is complete."""
        if self._stopping.is_set():
            raise Unavailable("the server stops")
        if self._tables.info().failed:
            raise FailedPrecondition("a write-back failed, so the pool is read-only")
        before = work.report.rows, work.report.damaged
        try:
            count = work.step()
        finally:  # also if the rows found could not be listed
            counts = self._counts.setdefault(work.table.id, [0, 0])
            counts[0] += work.report.rows - before[0]
            counts[1] += work.report.damaged - before[1]
        self._strike_out_all()
        if count is None:
            self._end(work)
            return False
        if paced:
            self._wait(count)
        return True

    def _end(self, work: TablePass) -> None:
        table = work.table
        if work.report.unremoved > 0:
            self._note(
                table.id,
                f"{work.report.unremoved} index entries of table '{table.name}' are damaged, so "
                "that their keys cannot be found: export what is whole and load it into a new pool",
            )
        elif work.report.default_row_damaged:
            self._note(
                table.id,
                f"the default row of table '{table.name}' is damaged: missing keys are served with "
                "it; create the table anew",
            )
        else:
            self._faults.pop(table.id, None)

    def _wait(self, count: int) -> None:
        """Wait as the limit requires after ``count`` bytes."""
        limit = self._config.bytes_per_second
        if limit == 0:
            return
        now = time.monotonic()
        self._not_before = max(now - CREDIT_SECONDS, self._not_before) + count / limit
        while now < self._not_before:
            if self._config.bytes_per_second != limit:  # the new one counts from now on
                self._not_before = now
                return
            if self._stopping.wait(min(WAIT_SECONDS, self._not_before - now)):
                return
            now = time.monotonic()

    def _note(self, number: int, text: str) -> None:
        if self._stopping.is_set() or self._faults.get(number) == text:
            return
        self._faults[number] = text
        self._log(Line(text, "scrub_failed", WARNING))
