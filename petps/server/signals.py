"""The signals of a server process."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Final

__all__ = ["Signals"]

HANDLED_SIGNALS: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class Signals:
    """Handlers of the process's signals while the context is entered.

    SIGTERM and SIGINT request a drain and a close; a second SIGINT exits at once. SIGHUP requests a
    reload. SIGUSR1 and SIGUSR2 do nothing.
    """

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._is_reload_pending = False
        self._wake = threading.Event()
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in HANDLED_SIGNALS:
            self._old_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._is_reload_pending = True
        elif number in (signal.SIGTERM, signal.SIGINT):
            if number == signal.SIGINT and self.stopped_by == signal.SIGINT:
                os._exit(128 + number)  # as after a crash: the next open serves at once
            self.stopped_by = self.stopped_by or number
        self._wake.set()

    def wait(self, seconds: float) -> bool:
        """Wait ``seconds``, or until a signal arrives. Return False if the process must stop."""
        self._wake.wait(seconds)
        self._wake.clear()
        return self.stopped_by is None

    def take_reload(self) -> bool:
        """Return whether a SIGHUP arrived since the last call."""
        reload, self._is_reload_pending = self._is_reload_pending, False
        return reload
