"""A hold of ingest between two batches, for a backup."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from petps.errors import Unavailable

__all__ = ["Hold"]

LOOK_SECONDS: Final = 0.1  # between two looks at whether ingest must stop


class Hold:
    """Lets other threads hold a thread that works in rounds, one of them at a time.

    The thread calls begin(), then give_way() before each round, and in the end end().
    """

    def __init__(self, stop: threading.Event) -> None:
        """stop: ends the wait of the held thread."""
        self._stop = stop
        self._one = threading.Lock()
        self._changed = threading.Condition()
        self._is_wanted = False
        self._is_working = False
        self._is_held = False

    @contextlib.contextmanager
    def taken(self, timeout: float) -> Iterator[None]:
        """Hold the thread. Raise Unavailable after the timeout, in seconds."""
        deadline = time.monotonic() + timeout
        if not self._one.acquire(timeout=timeout):
            raise Unavailable(f"ingest is held for another backup since more than {timeout:g} s")
        try:
            with self._changed:
                self._is_wanted = True
                if not self._changed.wait_for(
                    lambda: self._is_held or not self._is_working, deadline - time.monotonic()
                ):
                    raise Unavailable(
                        f"ingest did not end its batch within {timeout:g} s: `petps status` shows "
                        "what it waits for"
                    )
            yield
        finally:
            with self._changed:
                self._is_wanted = False
                self._changed.notify_all()
            self._one.release()

    def begin(self) -> None:
        """Wait while a hold is taken, then work in rounds."""
        with self._changed:
            self._wait_while_wanted()
            self._is_working = True

    def end(self) -> None:
        """Work no longer, and hold nothing up."""
        with self._changed:
            self._is_working = False
            self._changed.notify_all()

    def give_way(self, settle: Callable[[], None]) -> None:
        """If a hold is wanted, call settle(), then wait until it ends."""
        if not self._is_wanted:
            return
        settle()
        with self._changed:
            self._is_held = True
            self._changed.notify_all()
            self._wait_while_wanted()
            self._is_held = False

    def _wait_while_wanted(self) -> None:
        while self._is_wanted and not self._stop.is_set():
            self._changed.wait(LOOK_SECONDS)
