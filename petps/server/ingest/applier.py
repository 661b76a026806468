"""Execution of applies, one at a time, beside the thread that reads and decodes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

__all__ = ["Applier", "InlineApplier", "ThreadApplier"]


class Applier(Protocol):
    """Executor of actions, one after the other. The next call raises the error of a failed one."""

    def submit(self, action: Callable[[], None]) -> None:
        """Wait until the previous action has ended, then begin this one."""

    def wait(self) -> None:
        """Return when no action is running."""


class InlineApplier:
    """Applier that runs actions in the caller's thread."""

    def submit(self, action: Callable[[], None]) -> None:
        """See Applier."""
        action()

    def wait(self) -> None:
        """See Applier."""


class ThreadApplier:
    """Applier with its own thread, so that the caller decodes the next window during an apply.

    At most one action runs, which bounds the memory.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="petps-apply")
        self._last: Future[None] | None = None

    def submit(self, action: Callable[[], None]) -> None:
        """See Applier."""
        self.wait()
        self._last = self._thread.submit(action)

    def wait(self) -> None:
        """See Applier."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Wait for the running action, whether it succeeds or fails, and end the thread."""
        self._thread.shutdown(wait=True)
