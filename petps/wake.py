"""A wake-up of the main thread that signal handlers may send."""

from __future__ import annotations

import queue
from contextlib import suppress

__all__ = ["Wake"]


class Wake:
    """Ends a wait, from any thread and from a signal handler.

    threading.Event cannot do that: its lock is not reentrant, so a handler that runs while the main
    thread is inside wait() or clear() waits for that thread, which is its own, for ever.
    """

    def __init__(self) -> None:
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # whose put() is reentrant

    def send(self) -> None:
        """End the running wait, or else the next one."""
        self._wakes.put(None)

    def wait(self, seconds: float) -> None:
        """Wait ``seconds``, or until send() is called. Only one thread may wait."""
        with suppress(queue.Empty):
            if seconds > 0:  # with 0, some versions of Python may wait for ever
                self._wakes.get(timeout=seconds)
            while True:  # several are one
                self._wakes.get_nowait()
