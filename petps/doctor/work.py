"""Work in a thread of its own, which is waited for only until a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from petps.errors import DeadlineExceeded

__all__ = ["Work", "in_time"]

T = TypeVar("T")


class Work(Generic[T]):
    """A function that runs in a thread.

    A thread that never returns, of a network file system whose server is gone, ends with the
    process.
    """

    def __init__(self, function: Callable[[], T], name: str = "") -> None:
        self._function = function
        self._values: list[T] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name or None, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._values.append(self._function())
        except Exception as error:  # result() raises it
            self._error = error

    def ends_before(self, deadline: float) -> bool:
        """Wait until time.monotonic() reaches the deadline; return whether the work is done."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def result(self, deadline: float) -> T:
        """Return the value, or raise the function's error or DeadlineExceeded."""
        if not self.ends_before(deadline):
            raise DeadlineExceeded("it took too long")
        if self._error is not None:
            raise self._error
        return self._values[0]


def in_time(function: Callable[[], T], seconds: float, what: str) -> T:
    """Return what a function returns. Raise DeadlineExceeded that names ``what``."""
    work = Work(function)
    if not work.ends_before(time.monotonic() + seconds):
        raise DeadlineExceeded(
            f"{what} did not answer within {seconds:g} s: look for a file system or a disk that "
            "hangs (dmesg, /proc/mounts)"
        )
    return work.result(0.0)
