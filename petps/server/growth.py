"""What full tables do: grow before, or evict rows ([tables.NAME] grow, when_full)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from petps import _native
from petps.config import Config, TableConfig
from petps.errors import NotFound, PetpsError
from petps.log import WARNING, Line

__all__ = ["Growth"]

FULL_SHARE: Final = 0.85  # of a table's capacity: from here on it grows
FACTOR: Final = 2  # of the capacity
LOOK_SECONDS: Final = 0.5


class Growth:
    """A thread that gives tables more capacity, up to their ``capacity_max``, until close().

    It also tells tables what to do when they are full (native/table/EVICTION.md). Every instance of
    the model follows the same rules. If a table cannot grow, the reason is logged once, and it is
    tried again.
    """

    def __init__(self, config: Config, tables: _native.Tables, log: Callable[[str], None]) -> None:
        self._model = config.model.name
        self._growing: dict[str, TableConfig] = {}
        self._evicting = {
            name: table.when_full
            for name, table in config.tables.items()
            if table.when_full != "refuse"
        }
        self._told: set[int] = set()  # tables, by their id
        self._tables, self._log = tables, log
        self._stopping = threading.Event()
        self._logged: dict[int, str] = {}  # by the table's id
        self._thread = threading.Thread(target=self._run, name="petps-growth", daemon=True)
        if self._evicting:
            self._look()
        self.configure(config)
        if self._evicting and not self._thread.is_alive():
            self._thread.start()

    def configure(self, config: Config) -> None:
        """Use these ``grow`` and ``capacity_max`` from now on."""
        self._growing = {
            name: table for name, table in config.tables.items() if table.grow == "auto"
        }
        if self._growing and not self._thread.is_alive():
            self._thread.start()

    def close(self) -> None:
        """Stop. A growth in progress leaves its table as it was."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        try:
            self._look_at_all()
        except PetpsError as error:  # for example a pool that is being closed
            self._log_once(0, f"tables cannot grow: {error}")

    def _look_at_all(self) -> None:
        instances = {
            instance.id for instance in self._tables.instances() if instance.model == self._model
        }
        for table in self._tables.tables():
            if table.record.instance not in instances:
                continue
            rule = self._evicting.get(table.name)
            if rule is not None and table.id not in self._told:
                self._evict(table, rule)
            config = self._growing.get(table.name)
            if config is not None and self._thread.is_alive():
                self._grow(table, config)

    def _evict(self, table: _native.Table, rule: str) -> None:
        try:
            self._tables.set_when_full(table.id, rule)
            self._told.add(table.id)
        except PetpsError as error:
            self._log_once(table.id, f"when_full = '{rule}' is ignored: {error}")

    def _grow(self, table: _native.Table, config: TableConfig) -> None:
        try:
            status = table.status()
            ceiling = config.capacity_max or status.capacity
            if status.rows < FULL_SHARE * status.capacity:
                return
            name, number = table.name, table.record.id
            if status.capacity >= ceiling:
                self._log_once(number, f"table '{name}' is at its capacity_max of {ceiling:,} rows")
                return
            capacity = min(FACTOR * status.capacity, ceiling)
            self._tables.grow(number, capacity, progress=lambda *_: not self._stopping.is_set())
            text = f"table '{name}' has grown from {status.capacity:,} to {capacity:,} rows"
            self._log(Line(text, "table_grown", table=name, capacity=capacity))
            self._logged.pop(number, None)
        except NotFound:
            return  # it has been dropped
        except PetpsError as error:
            if not self._stopping.is_set():
                self._log_once(table.record.id, f"table '{table.name}' cannot grow: {error}")

    def _log_once(self, number: int, text: str) -> None:
        if self._logged.get(number) != text:
            self._logged[number] = text
            self._log(Line(text, "growth_failed", WARNING))
