"""The lines of the log about incidents of the native server, and about peers that it refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from petps import _native
from petps.log import WARNING, Line

__all__ = ["NativeLines"]

REFUSALS_SECONDS: Final = 60.0  # between two lines about peers that were refused for one reason


class NativeLines:
    """Writes each incident once. Call write() each second, always from the same thread."""

    def __init__(self, server: _native.Server, log: Callable[[str], None]) -> None:
        self._server, self._log = server, log
        self._incident = 0  # the last one in the log
        self._refusals: list[str] = []  # as in the log
        self._refusals_due = 0.0

    def write(self) -> None:
        """Write the incidents since the last call. The server leaves out most lines of a flood."""
        for number, text, host in self._server.incidents_after(self._incident):
            self._incident = number
            self._log(Line(text, "incident", WARNING, **({"peer": host} if host else {})))
        if time.monotonic() < self._refusals_due:
            return
        self._refusals_due = time.monotonic() + REFUSALS_SECONDS
        before, self._refusals = self._refusals, self._server.refusals()
        for line in self._refusals:
            if line not in before:
                self._log(Line(line, "refused", WARNING))
