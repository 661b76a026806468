"""What the admin door needs of a running server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from petps.pool.export import Bar

__all__ = ["Served"]


class Served(Protocol):
    """Tells what the admin door needs of a running server."""

    def status(self) -> dict[str, Any]:
        """Return what `petps status` shows."""

    def back_up(
        self, store: str, model: str | None, *, full: bool, bar: Bar, goes_on: Callable[[], bool]
    ) -> dict[str, Any]:
        """Write a backup. See petps.server.backups."""

    def set_ingest(self, *, paused: bool | None, rows_per_second: int | None) -> None:
        """Pause, continue or limit ingest. None: as it is."""

    def ingest_held(self) -> contextlib.AbstractContextManager[None]:
        """Apply no delta inside the context. Raises Unavailable if ingest does not give way."""

    def loading(self, table: str, feed: str) -> contextlib.AbstractContextManager[None]:
        """Hold ingest for rows to be loaded. Raises the errors of ClusterPart.check_load too."""

    def scrub(
        self, table: str, model: str | None, progress: Callable[[str, int, int], bool], paced: bool
    ) -> list[dict[str, Any]]:
        """Scrub a table, or all of a model, now. Return a report for each."""
