"""Lag of the applied rows behind the log, also while the log does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

__all__ = ["Lag"]


class Lag:
    """For each partition, the latest moment such that all that the log held then is applied.

    Each end of the log is noted with the moment before it was requested. Once the recorded offset
    has reached a noted end, everything that the log held at that moment is applied. The lag is the
    time since then. While the log does not answer no end is noted, so the lag grows.
    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, int] = {}
        # An end that is not reached yet, and the moment of its request.
        self._noted: dict[int, tuple[int, float]] = {}
        self._whole: dict[int, float] = {}

    def note(self, ends: Mapping[int, int], applied: Mapping[int, int], asked_at: float) -> None:
        """Note the log's ends, requested at ``asked_at`` (time.monotonic())."""
        with self._lock:
            self._ends = dict(ends)
            for partition, end in ends.items():
                self._reach(partition, applied[partition])
                if applied[partition] >= end:
                    self._whole[partition] = asked_at
                elif partition not in self._noted:
                    self._noted[partition] = end, asked_at

    def of(self, partition: int, applied: int) -> float | None:
        """Return the lag in seconds; None if the partition is not known to have reached an end."""
        with self._lock:
            self._reach(partition, applied)
            since = self._whole.get(partition)
        return None if since is None else max(0.0, time.monotonic() - since)

    def end(self, partition: int) -> int:
        """Return the log's last known end; 0 if none is known."""
        return self._ends.get(partition, 0)

    def forget(self, partition: int) -> None:
        """Forget that an end was reached. Call this when a base replaces the applied rows."""
        with self._lock:
            self._noted.pop(partition, None)
            self._whole.pop(partition, None)

    def _reach(self, partition: int, applied: int) -> None:
        end, asked_at = self._noted.get(partition, (0, 0.0))
        if asked_at and applied >= end:
            self._whole[partition] = asked_at
            del self._noted[partition]
