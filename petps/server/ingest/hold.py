"""A hold of ingest between two applies, for a backup and for repairs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from petps.errors import Unavailable

__all__ = ["Hold"]

LOOK_SECONDS: Final = 0.1  # between two looks at whether a wait is still wanted


class Hold:
    """Lets other threads hold a thread that works in rounds, one of them at a time.

    The thread calls begin(), then give_way() before each round, and in the end end(). While it is
    held it does not stop either, so that no successor of it begins.
    """

    def __init__(self) -> None:
        self._one = threading.Lock()
        self._changed = threading.Condition()
        self._is_wanted = False
        self._is_working = False
        self._is_held = False

    @contextlib.contextmanager
    def taken(
        self,
        timeout: float,
        *,
        only_working: bool = False,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Iterator[None]:
        """Hold the thread. Raise Unavailable after the timeout, in seconds.

        only_working: wait until the thread works; otherwise one that does not is held as it is.
        goes_on: False ends the wait early.
        """
        deadline = time.monotonic() + timeout

        def waits() -> bool:
            return goes_on() and time.monotonic() < deadline

        while not self._one.acquire(timeout=min(timeout, LOOK_SECONDS)):
            if not waits():
                raise Unavailable(f"ingest is held for something else, for {timeout:g} s at least")
        try:
            with self._changed:
                self._is_wanted = True
                while not (self._is_held or not (self._is_working or only_working)):
                    if not waits():
                        raise Unavailable(
                            f"ingest did not end its batch within {timeout:g} s: `petps status` "
                            "shows what it waits for"
                        )
                    self._changed.wait(LOOK_SECONDS)
                self._is_held = True
            yield
        finally:
            with self._changed:
                self._is_wanted = self._is_held = False
                self._changed.notify_all()
            self._one.release()

    @property
    def is_wanted(self) -> bool:
        """Return whether somebody waits for the end of a round, or holds the thread."""
        return self._is_wanted

    @property
    def is_held(self) -> bool:
        """Return whether the thread waits for the end of a hold."""
        return self._is_held

    def begin(self) -> None:
        """Begin to work in rounds, once no hold is taken."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            self._is_working = True
            self._changed.notify_all()

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
            self._is_held = self._is_wanted  # it may have given up
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_held)
