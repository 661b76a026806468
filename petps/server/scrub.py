"""The parts of scrubbing in a server: the list of missing rows, passes, and repair from bases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from petps import _native
from petps.config import Config
from petps.config.schema import ScrubConfig
from petps.errors import InvalidArgument
from petps.pool import Pool
from petps.pool.damage import DamageLog
from petps.server.ingest_part import open_bases
from petps.server.repair import AtRest, Repairs
from petps.server.scrubber import Progress, Scrubber

__all__ = ["Scrubbing"]


class Scrubbing:
    """Scrubs the tables of a served pool and restores what it can, until close().

    ``at_rest`` runs an action between two applies of ingest (Ingest.between_applies). Raises
    IoError if there is a list of missing rows that cannot be read.
    """

    def __init__(
        self,
        config: Config,
        tables: _native.Tables,
        at_rest: AtRest,
        log: Callable[[str], None],
    ) -> None:
        self._tables = tables
        self.damage = DamageLog(tables, _folder_of(config))
        if self.damage.path is None and tables.info().path:
            log(
                "missing rows are listed in memory only: set pool.folder to a folder for their list"
            )
        self.damage.adopt(tables)
        self.scrubber = Scrubber(tables, config.scrub, self.damage, log)
        bases = open_bases(config, tables)
        self.repairs = (
            None
            if bases is None
            else Repairs(tables, config.ingest_model(), bases, at_rest, self.damage, log)
        )

    def configure(self, config: ScrubConfig) -> None:
        """Change when and how fast tables are scrubbed."""
        self.scrubber.configure(config)

    def status(self) -> dict[str, Any]:
        """Return what the status shows as ``scrub``."""
        return self.scrubber.status(self.repairs)

    def scrub(
        self, table: str, model: str | None, progress: Progress, *, paced: bool
    ) -> list[dict[str, Any]]:
        """Scrub a table now, or if ``table`` is empty all of the model. Return their reports."""
        pool = Pool(self._tables, is_borrowed=True)
        return [
            self.scrubber.scrub(chosen, progress, paced=paced)
            for chosen in pool.tables_to_scrub(table, model)
        ]

    def close(self) -> None:
        """Stop."""
        self.scrubber.close()
        if self.repairs is not None:
            self.repairs.close()


def _folder_of(config: Config) -> Path | None:
    with suppress(InvalidArgument):  # a device, and no folder is configured
        return config.folder()
    return None
