"""What a server depends on beside its own process: the clock and the disk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__all__ = ["Clock", "Surroundings"]

CLOCK_SECONDS: Final = 1.0  # between two looks at the clock
# Above what a second's look may be late between the two clocks, and what NTP corrects in a second.
JUMP_SECONDS: Final = 1.0


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


class Surroundings:
    """Looks at the clock in a thread, until close(), and at the disk when it is asked.

    Args:
        pool: Path of the pool, whose file system is looked at.
        log: Function that prints a line for the operator.
    """

    def __init__(self, pool: Path, log: Callable[[str], None]) -> None:
        self._pool, self._log = pool, log
        self._clock = Clock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="petps-clock", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return the members ``clock`` and ``disk`` of the status."""
        return {"clock": self._clock.status(), "disk": self._disk()}

    def close(self) -> None:
        """Stop."""
        self._stopping.set()
        self._thread.join()

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
        while not self._stopping.wait(CLOCK_SECONDS):
            jump = self._clock.check()
            if jump is not None:
                self._log(
                    f"the system's clock jumped by {jump:+.1f} s: check its time service; until "
                    "then do not trust expiry, certificates, tokens, freshness and backup times"
                )
