"""Which settings of a changed configuration take effect while the server serves (SIGHUP)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from petps.config import Change, Config, changes, replaced
from petps.log import WARNING, Line

__all__ = ["Reload"]

# The keys that SIGHUP reloads; those of tables without the table's name.
RELOADED: Final = frozenset(
    {
        "server.ready_lag_seconds",
        "server.drain_seconds",
        "tls.certificate",
        "tls.key",
        "tls.client_ca",
        "access.file",
        "ingest.rows_per_second",
        "backup.every",
        "backup.keep",
        "scrub.every",
        "scrub.bytes_per_second",
        "log.format",
        "log.level",
        "tables.grow",
        "tables.capacity_max",
    }
)


class Reload:
    """The changes from one configuration to another.

    ``merged`` is the old configuration with those that need no restart.
    """

    def __init__(self, old: Config, new: Config) -> None:
        self._applied: list[Change] = []
        self._for_restart: list[str] = []
        self.merged = old
        for change in changes(old, new):
            if _may_reload(change, old, new):
                self._applied.append(change)
                self.merged = replaced(self.merged, change.path, change.new)
            else:
                self._for_restart.append(change.key)

    def lines(self) -> Iterator[Line]:
        """Yield lines of the log: what has changed, and what needs a restart."""
        settings = [
            f"{change.key} = {_text(change.new)} (was {_text(change.old)})"
            for change in self._applied
        ]
        nothing = "no setting that can change while serving has changed"
        names = [change.key for change in self._applied]
        yield Line(f"reloaded: {'; '.join(settings) or nothing}", "reloaded", settings=names)
        if self._for_restart:
            text = f"changed, but needs a restart: {', '.join(self._for_restart)}"
            yield Line(text, "restart_needed", WARNING, settings=self._for_restart)


def _may_reload(change: Change, old: Config, new: Config) -> bool:
    """Return whether a change takes effect without a restart."""
    if change.path[0] == "tables" and len(change.path) == 3:
        return f"tables.{change.path[2]}" in RELOADED
    if change.path[0] == "tls":  # TLS itself, and whom it asks for a certificate, stay
        is_same = old.tls.client_certificates == new.tls.client_certificates
        return change.key in RELOADED and is_same and None not in (change.old, change.new)
    if change.key == "access.file":
        return None not in (change.old, change.new)
    return change.key in RELOADED


def _text(value: Any) -> str:
    return repr(str(value) if isinstance(value, Path) else value)
