"""Expiry: ticks of the tables that pushes feed, and the walks that delete expired rows.

native/table/EXPIRY.md has the rule.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from petps import _native
from petps.errors import NotFound, PetpsError

__all__ = ["Expiry"]

CELLS: Final = 48  # native/pool/clock.h kExpiryCells
# A walk leaves rows that are due for at most 2 cells; a third has passed since it began.
CELLS_OF_A_WALK: Final = 3
LOOK_SECONDS: Final = 0.5
FIRST_LOOK_SECONDS: Final = 0.05


class Expiry:
    """A thread that expires rows of all tables with ``expire_after``, until close().

    If a table cannot be walked, the reason is logged once, and it is tried again.
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
        self._logged: dict[int, str] = {}  # by the table's id
        self._thread = threading.Thread(target=self._run, name="petps-expiry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. A walk in progress ends; the next one finds what it left."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        pause = FIRST_LOOK_SECONDS
        while not self._stopping.wait(pause):
            pause = LOOK_SECONDS
            try:
                for table in self._tables.tables():
                    seconds = table.status().expire_after
                    if seconds > 0:
                        pause = min(pause, seconds / CELLS / 2)
                        self._look_at(table, seconds)
            except PetpsError as error:  # for example a pool that is being closed
                self._log_once(0, f"rows cannot expire: {error}")

    def _look_at(self, table: _native.Table, seconds: int) -> None:
        number = table.record.id
        try:
            if table.record.feed == "push":
                self._tables.tick(number, self._clock_ns())
            delay = table.status().expiry_delay
            if 0 <= delay < CELLS_OF_A_WALK * seconds / CELLS:
                return
            self._tables.expire(number, progress=lambda *_: not self._stopping.is_set())
            self._logged.pop(number, None)
        except NotFound:
            return  # it has been dropped
        except PetpsError as error:
            if not self._stopping.is_set():
                self._log_once(number, f"table '{table.name}': rows cannot expire: {error}")

    def _log_once(self, number: int, text: str) -> None:
        if self._logged.get(number) != text:
            self._logged[number] = text
            self._log(text)
