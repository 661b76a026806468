"""Messages to the service manager that started this process (sd_notify(3)); without one, none."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Final

__all__ = ["Notifier"]

EXTEND_SECONDS: Final = 30.0  # by which a start or a stop may go on after each message
EXTEND_EVERY_SECONDS: Final = 5.0
# A start or a stop makes progress if it uses this much of a processor between two messages, or
# waits for pages that the disk brings.
PROGRESS_SECONDS: Final = 0.01
STATUS_CHARACTERS_MAX: Final = 500


class Notifier:
    """The socket of NOTIFY_SOCKET. A message that cannot be sent is lost, and stops nothing."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = ""  # of another kind, such as vsock: none
        if address.startswith(("/", "@")):
            self._address = "\0" + address[1:] if address[0] == "@" else address
        self.watchdog_seconds = _watchdog_seconds(environ)
        """Within which the manager must hear from this process; None: it does not ask for that."""
        self._status = ""
        self._alive_at = 0.0

    def send(self, *lines: str) -> None:
        """Send one message, a variable a line."""
        if not self._address:
            return
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK  # a manager that does not read is no fault
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as manager:
            manager.sendto("\n".join(lines).encode(), self._address)

    def ready(self, status: str) -> None:
        """Say that every door is open, or that a reload is over."""
        self._status = _one_line(status)
        self.send("READY=1", f"STATUS={self._status}")

    def set_status(self, text: str) -> None:
        """Say in one sentence how the server is, if that has changed."""
        text = _one_line(text)
        if text != self._status:
            self._status = text
            self.send(f"STATUS={text}")

    def reloading(self) -> None:
        """Say that a reload begins; ready() says that it is over."""
        microseconds = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.send("RELOADING=1", f"MONOTONIC_USEC={microseconds}")

    def stopping(self) -> None:
        """Say that the process drains and closes."""
        self.send("STOPPING=1", "STATUS=draining")

    def alive(self) -> None:
        """Say that everything makes progress, unless this was said a moment ago.

        Call it more often than four times in watchdog_seconds: then the manager hears of it within
        half of that time.
        """
        now = time.monotonic()
        seconds = self.watchdog_seconds
        if seconds is not None and now - self._alive_at >= seconds / 4:
            self._alive_at = now
            self.send("WATCHDOG=1")

    @contextlib.contextmanager
    def extending(self) -> Iterator[None]:
        """Ask for more time to start or to stop, as long as this process makes progress."""
        if not self._address:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(
            target=self._extend, args=(over,), name="petps-notify", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _extend(self, over: threading.Event) -> None:
        seen = _work_done()
        self.send(f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1e6:.0f}")
        while not over.wait(EXTEND_EVERY_SECONDS):
            before, seen = seen, _work_done()
            if seen[0] - before[0] >= PROGRESS_SECONDS or seen[1] > before[1]:
                self.send(f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1e6:.0f}")


def _work_done() -> tuple[float, int]:
    """Return the processor time that this process has used, and the pages it has waited for."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_majflt + used.ru_inblock


def _watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    text = environ.get("WATCHDOG_USEC", "")
    if not text.isdecimal() or int(text) == 0:
        return None
    is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(text) / 1e6 if is_ours else None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:STATUS_CHARACTERS_MAX]
