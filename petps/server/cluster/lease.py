"""A server's lease in etcd, kept alive by a thread that has nothing else to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from petps.cluster.etcd import CALL_SECONDS, LEASE_SHARE, Etcd
from petps.errors import PetpsError, Unavailable

__all__ = ["Lease"]

RETRY_SECONDS: Final = 0.25  # after an etcd that did not answer
CLOSE_SECONDS: Final = 3.0


class Lease:
    """A lease. The thread that does the work of the cluster may be late without losing it."""

    def __init__(self, etcd: Etcd, seconds: int, is_working: Callable[[], bool]) -> None:
        """``etcd``: of this lease alone. ``is_working``: whether the server deserves a lease."""
        self._etcd, self._seconds, self._is_working = etcd, seconds, is_working
        self._condition = threading.Condition()  # over the next two
        self._number = 0
        self._error = ""
        self._is_to_end = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="petps-lease", daemon=True)

    def start(self) -> None:
        """Begin to ask etcd for it."""
        self._thread.start()

    def number(self) -> int:
        """Return the lease. Waits for the first one. Raises Unavailable if etcd grants none."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._number or self._error, CALL_SECONDS):
                raise Unavailable("etcd has not granted a lease yet")
            if not self._number:
                raise Unavailable(self._error)
            return self._number

    def replace(self) -> None:
        """Get another lease soon, and end this one with what was written."""
        self._is_to_end.set()

    def keep(self) -> None:
        """Undo replace(), if it is not done yet."""
        self._is_to_end.clear()

    def close(self) -> None:
        """End it at once if etcd answers."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)  # a daemon: an etcd that is silent keeps nobody

    def _run(self) -> None:
        number = 0
        while True:
            error, asked_at = "", time.monotonic()
            try:
                if number and self._is_to_end.is_set():
                    ended, number = number, self._etcd.grant(self._seconds)
                    self._is_to_end.clear()
                    self._etcd.revoke(ended)  # if that fails, it ends after its time
                if self._is_working() and not (number and self._etcd.keep_alive(number)):
                    number = 0
                    number = self._etcd.grant(self._seconds)
            except Exception as failure:  # of any kind: the next round asks again
                error = str(failure) if isinstance(failure, PetpsError) else repr(failure)
            with self._condition:
                self._number, self._error = number, error
                self._condition.notify_all()
            pause = RETRY_SECONDS if error else self._seconds / LEASE_SHARE
            if self._stopping.wait(max(0.0, asked_at + pause - time.monotonic())):
                break
        try:
            if number:
                self._etcd.revoke(number)
        except PetpsError:
            pass  # the lease ends after its time
        self._etcd.close()
