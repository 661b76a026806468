"""Where windows are applied: beside the thread that reads and decodes, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

__all__ = ["Applier", "InlineApplier", "ThreadApplier"]


class Applier(Protocol):
    """Runs actions one after the other. Errors of an action come out of the next call."""

    def submit(self, action: Callable[[], None]) -> None:
        """Begins an action once the one before it has ended."""

    def wait(self) -> None:
        """Returns when no action goes on."""


class InlineApplier:
    """In the caller's thread."""

    def submit(self, action: Callable[[], None]) -> None:
        """See Applier."""
        action()

    def wait(self) -> None:
        """See Applier."""


class ThreadApplier:
    """In a thread of its own: the next window is read and decoded while this one is applied.

    Never more than one goes on, so that what is held stays bounded.
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
        """Waits for the action that goes on, whatever comes of it, and ends the thread."""
        self._thread.shutdown(wait=True)
