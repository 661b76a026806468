"""The parts of scrubbing in a server: the list of missing rows, passes, and repair from bases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from petps import _native
from petps.config import Config
from petps.config.schema import ScrubConfig
from petps.errors import InvalidArgument, IoError
from petps.log import WARNING, Line
from petps.pool import Pool
from petps.pool.damage import DamageLog
from petps.server.ingest_part import open_bases
from petps.server.repair import AtRest, Repairs
from petps.server.scrubber import Progress, Scrubber

__all__ = ["Scrubbing"]


class Scrubbing:
    """Scrubs the tables of a served pool and restores what it can, until close().

    ``at_rest`` runs an action between two applies of ingest (Ingest.between_applies). If the list
    of missing rows cannot be read, nothing is scrubbed, and the status says why.
    """

    def __init__(
        self,
        config: Config,
        tables: _native.Tables,
        at_rest: AtRest,
        log: Callable[[str], None],
    ) -> None:
        self._tables = tables
        self._fault = ""
        self.scrubber: Scrubber | None = None
        self.repairs: Repairs | None = None
        try:
            self.damage = DamageLog(tables, _folder_of(config))
        except IoError as error:
            self._fault = f"tables cannot be scrubbed: {error}; move it away, then restart"
            log(Line(self._fault, "scrub_failed", WARNING))
            return
        if self.damage.path is None and tables.info().path:
            text = (
                "missing rows are listed in memory only: set pool.folder to a folder for their list"
            )
            log(Line(text, "damage_in_memory", WARNING))
        self.damage.adopt(tables)
        self.scrubber = Scrubber(tables, config.scrub, self.damage, log)
        bases = open_bases(config, tables)
        if bases is not None:
            model = tables.resolve(config.ingest_model()).model
            self.repairs = Repairs(tables, model, bases, at_rest, self.damage, log)

    def configure(self, config: ScrubConfig) -> None:
        """Change when and how fast tables are scrubbed."""
        if self.scrubber is not None:
            self.scrubber.configure(config)

    def status(self) -> dict[str, Any]:
        """Return what the status shows as ``scrub``."""
        if self.scrubber is None:
            return {"faults": {"0": self._fault}, "tables": {}}
        return self.scrubber.status(self.repairs)

    def scrub(
        self, table: str, model: str | None, progress: Progress, *, paced: bool
    ) -> list[dict[str, Any]]:
        """Scrub a table now, or if ``table`` is empty all of the model. Return their reports."""
        if self.scrubber is None:
            raise IoError(self._fault)
        pool = Pool(self._tables, is_borrowed=True)
        return [
            self.scrubber.scrub(chosen, progress, paced=paced)
            for chosen in pool.tables_to_scrub(table, model)
        ]

    def close(self) -> None:
        """Stop."""
        for part in (self.scrubber, self.repairs):
            if part is not None:
                part.close()


def _folder_of(config: Config) -> Path | None:
    with suppress(InvalidArgument):  # a device, and no folder is configured
        return config.folder()
    return None
