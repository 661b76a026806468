"""How far behind the log the applied rows are, also while the log does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

__all__ = ["Lag"]


class Lag:
    """By partition, the last moment of which everything that the log held then is applied.

    The log's ends are noted with the moment before they were asked for. Once the recorded offset
    has reached a noted end, all that was in the log at that moment is applied; the time since then
    is the lag. While the log does not answer no end is noted, so the lag grows. Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, int] = {}
        self._noted: dict[int, tuple[int, float]] = {}  # an end that was not reached yet, and when
        self._whole: dict[int, float] = {}

    def note(self, ends: Mapping[int, int], applied: Mapping[int, int], asked_at: float) -> None:
        """Takes ends that the log told when it was asked at ``asked_at`` (time.monotonic())."""
        with self._lock:
            self._ends = dict(ends)
            for partition, end in ends.items():
                self._reach(partition, applied[partition])
                if applied[partition] >= end:
                    self._whole[partition] = asked_at
                elif partition not in self._noted:
                    self._noted[partition] = end, asked_at

    def of(self, partition: int, applied: int) -> float | None:
        """Seconds; None: it is not known to have been at an end."""
        with self._lock:
            self._reach(partition, applied)
            since = self._whole.get(partition)
        return None if since is None else max(0.0, time.monotonic() - since)

    def end(self, partition: int) -> int:
        """The end that the log told last; 0: none."""
        return self._ends.get(partition, 0)

    def forget(self, partition: int) -> None:
        """What was applied is replaced, as by a base: it is not known to have been at an end."""
        with self._lock:
            self._noted.pop(partition, None)
            self._whole.pop(partition, None)

    def _reach(self, partition: int, applied: int) -> None:
        end, asked_at = self._noted.get(partition, (0, 0.0))
        if asked_at and applied >= end:
            self._whole[partition] = asked_at
            del self._noted[partition]
