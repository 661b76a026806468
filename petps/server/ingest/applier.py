"""Appliers: run one apply at a time, in a thread of their own or in the caller's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

__all__ = ["Applier", "InlineApplier", "ThreadApplier"]


class Applier(Protocol):
    """Executor of actions, one after the other. An error of an action reaches the caller."""

    def submit(self, action: Callable[[], None]) -> None:
        """Wait for the previous action. If it raised, raise its error; otherwise begin this one."""

    def wait(self) -> None:
        """Wait until no action runs. Raise the error of the last one, once."""


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
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="petps-apply")
        self._last: Future[None] | None = None

    def submit(self, action: Callable[[], None]) -> None:
        """See Applier."""
        self.wait()
        self._last = self._executor.submit(action)

    def wait(self) -> None:
        """See Applier."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Wait for the running action, whether it succeeds or fails, and end the thread."""
        self._executor.shutdown(wait=True)
