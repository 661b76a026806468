"""Lag of the applied rows behind the log. It is known even while the log does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Final

__all__ = ["Lag"]

# The log counts as away if it has not answered for longer. It is asked each second.
AWAY_SECONDS: Final = 5.0


class Lag:
    """The lag of each partition: the time since everything that the log held was applied.

    Ingest notes each end of the log with the time of its request. Once the recorded offset has
    reached a noted end, everything that the log held at that time is applied. The lag is the time
    since then. While the log does not answer, no end is noted, so the lag grows. Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, int] = {}
        self._answered_at: float | None = None
        # By partition: an end that is not reached yet, and the time of its request.
        self._pending: dict[int, tuple[int, float]] = {}
        # By partition: the time at which everything in the log is known to be applied.
        self._applied_at: dict[int, float] = {}

    def note(
        self, ends: Mapping[int, int], applied: Mapping[int, int], requested_at: float
    ) -> None:
        """Note the log's ends, requested at ``requested_at`` (time.monotonic())."""
        with self._lock:
            self._ends = dict(ends)
            self._answered_at = time.monotonic()
            for partition, end in ends.items():
                self._reach(partition, applied[partition])
                if applied[partition] >= end:
                    self._applied_at[partition] = requested_at
                elif partition not in self._pending:
                    self._pending[partition] = end, requested_at

    def of(self, partition: int, applied: int) -> float | None:
        """Return the lag in seconds; None if the partition is not known to have reached an end."""
        with self._lock:
            self._reach(partition, applied)
            since = self._applied_at.get(partition)
        return None if since is None else max(0.0, time.monotonic() - since)

    def is_answered(self) -> bool:
        """Return whether the log has answered within the last AWAY_SECONDS."""
        answered_at = self._answered_at
        return answered_at is not None and time.monotonic() - answered_at <= AWAY_SECONDS

    def silence(self) -> str:
        """Return "" unless the log has answered since the start, but no longer does."""
        is_silent = self._answered_at is not None and not self.is_answered()
        return "the log does not answer" if is_silent else ""

    def end(self, partition: int) -> int | None:
        """Return the end that the log last reported; None if it is away, or has not reported it."""
        return self._ends.get(partition) if self.is_answered() else None

    def forget(self, partition: int) -> None:
        """Forget that an end was reached. Call this when a base replaces the applied rows."""
        with self._lock:
            self._pending.pop(partition, None)
            self._applied_at.pop(partition, None)

    def _reach(self, partition: int, applied: int) -> None:
        end, requested_at = self._pending.get(partition, (0, 0.0))
        if requested_at and applied >= end:
            self._applied_at[partition] = requested_at
            del self._pending[partition]
