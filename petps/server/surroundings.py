"""What a server depends on beside its own process: the clock, the disk, the other servers."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

__all__ = ["Clock", "Surroundings", "reachable"]

CLOCK_SECONDS: Final = 1.0  # between two looks at the clock
# Above what a second's look may be late between the two clocks, and what NTP corrects in a second.
JUMP_SECONDS: Final = 1.0
MEMBERS_SECONDS: Final = 10.0  # between two tries to reach the other servers
CONNECT_SECONDS: Final = 2.0  # how long all of them together may take to accept a connection


class Clock:
    """Counts how often the system's clock has moved against the monotonic clock."""

    def __init__(self) -> None:
        self._offset = _clock_offset()
        self.jumps = 0
        self.last_jump_seconds = 0.0
        self.last_jump_at: float | None = None

    def check(self) -> float | None:
        """Return by how many seconds the clock has jumped since the last check, or None."""
        offset = _clock_offset()
        jump, self._offset = offset - self._offset, offset
        if abs(jump) < JUMP_SECONDS:
            return None
        self.jumps += 1
        self.last_jump_seconds, self.last_jump_at = jump, time.time()
        return jump

    def status(self) -> dict[str, Any]:
        """Return the member ``clock`` of the status."""
        return {
            "jumps": self.jumps,
            "last_jump_seconds": self.last_jump_seconds,
            "last_jump_at": self.last_jump_at,
        }


def _clock_offset() -> float:
    return time.time() - time.monotonic()


def reachable(addresses: Iterable[str]) -> dict[str, bool]:
    """Return which ``HOST:PORT`` accept a connection within CONNECT_SECONDS, tried all at once."""
    result = dict.fromkeys(addresses, False)
    deadline = time.monotonic() + CONNECT_SECONDS
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for address in result:
            host, _, port = address.rpartition(":")
            host = host.strip("[]")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            connection.setblocking(False)
            with contextlib.suppress(OSError):  # else it cannot be reached at all
                connection.connect_ex((host, int(port)))
                selector.register(connection, selectors.EVENT_WRITE, (address, connection))
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                address, connection = key.data
                result[address] = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
                selector.unregister(connection)
    return result


class Surroundings:
    """Looks at the clock and at the other servers of the shard map, in a thread, until close().

    Args:
        pool: Path of the pool, whose file system is looked at.
        members: Function that returns the addresses of the other servers of the shard map.
        log: Function that prints a line for the operator.
    """

    def __init__(
        self, pool: Path, members: Callable[[], list[str]], log: Callable[[str], None]
    ) -> None:
        self._pool, self._members, self._log = pool, members, log
        self._clock = Clock()
        self._reachable: dict[str, bool] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="petps-watch", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return the members ``clock``, ``disk`` and ``shard_members`` of the status."""
        return {
            "clock": self._clock.status(),
            "disk": self._disk(),
            "shard_members": dict(self._reachable),
        }

    def close(self) -> None:
        """Stop."""
        self._stopping.set()
        self._thread.join(2 * CONNECT_SECONDS)  # longer: it waits for a name server

    def _disk(self) -> dict[str, int] | None:
        """Return the size and the free bytes of the pool's file system; None: it has none."""
        if not self._pool.is_file():
            return None
        try:
            facts = os.statvfs(self._pool)
        except OSError:
            return None
        unit = facts.f_frsize
        return {"bytes": facts.f_blocks * unit, "free_bytes": facts.f_bavail * unit}

    def _run(self) -> None:
        look_again = 0.0
        while not self._stopping.wait(CLOCK_SECONDS):
            jump = self._clock.check()
            if jump is not None:
                self._log(
                    f"the system's clock jumped by {jump:+.1f} s: check its time service; until "
                    "then do not trust expiry, certificates, tokens, freshness and backup times"
                )
            if time.monotonic() >= look_again:
                self._look_at_members()
                look_again = time.monotonic() + MEMBERS_SECONDS

    def _look_at_members(self) -> None:
        found = reachable(self._members())
        for address, is_reachable in found.items():
            if is_reachable != self._reachable.get(address, True):
                state = "answers again" if is_reachable else "does not accept connections"
                self._log(f"the server {address} of the shard map {state}")
        self._reachable = found
