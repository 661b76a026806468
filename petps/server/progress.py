"""Whether the threads of a server make progress. docs/how-to/operate.md, "Watchdog"."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from petps import _native
    from petps.server.ingest import Ingest

__all__ = ["Progress", "counts_of"]

STUCK_SECONDS: Final = 60.0  # without a watchdog of the service manager; else half of its time
# A thread is reported only if its count stands still for this long after that. A process that was
# stopped and goes on (SIGSTOP, a paused machine) makes progress again within this time.
CERTAIN_SECONDS: Final = 6.0
# Of threads that write to the disk, or read a store: a server that a slow disk stops for a minute
# still answers pulls, and a restart would not make the disk faster.
SLOW_STUCK_SECONDS: Final = 300.0
SLOW: Final = ("ingest", "writer of pushes")


def counts_of(server: _native.Server, ingest: Ingest | None) -> dict[str, int | None]:
    """Return a count for each thread of a server; None: it has nothing to do."""
    workers, pushes = server.progress()
    counts: dict[str, int | None] = {f"worker {n}": count for n, count in enumerate(workers)}
    counts["writer of pushes"] = pushes if pushes % 2 else None
    counts["ingest"] = None if ingest is None else ingest.rounds()
    return counts


class Progress:
    """Compares the counts of threads with those before. One thread calls look(), any stuck()."""

    def __init__(
        self,
        counts: Callable[[], Mapping[str, int | None]],
        seconds: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``counts`` returns a count for each thread, which grows; None: it has nothing to do.

        seconds: of the service manager's watchdog.
        """
        self._counts, self._clock = counts, clock
        self._seconds = STUCK_SECONDS if seconds is None else seconds / 2
        self._seen: dict[str, tuple[int | None, float]] = {}
        self._suspected: dict[str, float] = {}
        self._stuck = ""
        self._looked_at: float | None = None

    def look(self) -> str:
        """Return which thread makes no progress, as a sentence; '': all do."""
        now = self._clock()
        self._stuck = ""
        for name, count in self._counts().items():
            before, since = self._seen.get(name, (None, now))
            if count is None or count != before:
                self._seen[name] = (count, now)
                self._suspected.pop(name, None)
            elif now - since >= self._limit(name):
                certain = min(CERTAIN_SECONDS, self._limit(name) / 2)
                if now - self._suspected.setdefault(name, now) >= certain:
                    self._stuck = f"{name} has made no progress for {now - since:.0f} s"
        self._looked_at = self._clock()
        return self._stuck

    def stuck(self) -> str:
        """Return what look() found, or that its thread is stuck itself."""
        at = self._looked_at
        if at is not None and (silent := self._clock() - at) >= self._seconds:
            return f"the main thread has made no progress for {silent:.0f} s"
        return self._stuck

    def _limit(self, name: str) -> float:
        return max(self._seconds, SLOW_STUCK_SECONDS) if name in SLOW else self._seconds
