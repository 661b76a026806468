"""Expiry: ticks of the tables that pushes feed, and the walks that delete expired rows.

native/table/EXPIRY.md has the rule.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from petps import _native
from petps.errors import FailedPrecondition, NotFound, PetpsError
from petps.log import WARNING, Line

__all__ = ["Expiry"]

# A walk leaves rows that are due for at most 2 cells; a third has passed since it began.
CELLS_OF_A_WALK: Final = 3
LOOK_SECONDS: Final = 0.5


class Expiry:
    """Two threads that expire rows of all tables with ``expire_after``, until close().

    One ticks, because a walk may take minutes. Tables of frozen instances keep their rows, so that
    an alias can go back. Why a table cannot be expired is logged once, and in ``faults``.
    """

    def __init__(
        self,
        tables: _native.Tables,
        log: Callable[[str], None],
        *,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._tables, self._log, self._clock_ns = tables, log, clock_ns
        self._stopping = threading.Event()
        self._faults: dict[tuple[str, int], str] = {}  # by thread, and id of the table; 0: of all
        looks = {"petps-ticks": self._tick, "petps-expiry": self._walk}
        self._threads = [
            threading.Thread(target=self._run, args=(look, name), name=name, daemon=True)
            for name, look in looks.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def faults(self) -> dict[int, str]:
        """Return why rows of a table cannot expire now, by the table's id; 0: of no table."""
        return {number: text for (_, number), text in dict(self._faults).items()}

    def close(self) -> None:
        """Stop. A walk in progress ends; the next one finds what it left."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, look: Callable[[_native.Table], None], name: str) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            pause = LOOK_SECONDS
            try:
                seen = set()
                for table in self._expiring():
                    seen.add((name, table.id))
                    pause = min(pause, table.record.expire_after / _native.EXPIRY_CELLS / 2)
                    self._look_at(table, look, name)
                for key in set(self._faults) - seen:
                    if key[0] == name:  # of a table that expires no more, or of all
                        self._faults.pop(key, None)
            except PetpsError as error:  # for example a pool that is being closed
                self._note((name, 0), f"rows cannot expire: {error}")

    def _expiring(self) -> Iterator[_native.Table]:
        frozen = {instance.id for instance in self._tables.instances() if instance.frozen}
        for table in self._tables.tables():
            if table.record.expire_after > 0 and table.record.instance not in frozen:
                yield table

    def _look_at(
        self, table: _native.Table, look: Callable[[_native.Table], None], name: str
    ) -> None:
        try:
            look(table)
            self._faults.pop((name, table.id), None)
        except NotFound:  # it has been dropped
            self._faults.pop((name, table.id), None)
        except PetpsError as error:
            self._note((name, table.id), f"rows of table '{table.name}' cannot expire: {error}")

    def _tick(self, table: _native.Table) -> None:
        if table.record.feed == "push":
            self._tables.tick(table.id, self._clock_ns())

    def _walk(self, table: _native.Table) -> None:
        if self._tables.info().failed:
            raise FailedPrecondition("a write-back failed, so the pool is read-only")
        delay = table.status().expiry_delay
        if not 0 <= delay < CELLS_OF_A_WALK * table.record.expire_after / _native.EXPIRY_CELLS:
            self._tables.expire(table.id, progress=lambda *_: not self._stopping.is_set())

    def _note(self, key: tuple[str, int], text: str) -> None:
        if self._stopping.is_set():
            return
        if self._faults.get(key) != text:
            self._faults[key] = text
            self._log(Line(text, "expiry_failed", WARNING))
