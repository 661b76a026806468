"""What ingest tells about itself: one snapshot, plain values."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

__all__ = ["Freshness", "IngestStatus", "Mode", "PartitionHealth", "PartitionStatus", "Samples"]

# Freshness of the last so many messages a partition; at 100 messages/s, the last 40 seconds.
SAMPLES: Final = 4096


class Mode(enum.Enum):
    """How a partition stands to its stream."""

    FOLLOWING = "following"
    CATCHING_UP = "catching_up"  # reading a base
    STALE = "stale"  # something is missing: what is served gets older until a base comes
    FULL = "full"  # rows could not be stored: they are read again until there is room
    CONFLICT = "conflict"  # two publishers write one run


@dataclass(frozen=True, slots=True)
class Freshness:
    """Published to servable, in milliseconds, over the last messages. None: no message yet."""

    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One partition.

    ``state``: a Mode, or "passing" (its run feeds another instance), "starting" (ingest has not
    begun to read it), "unreachable" (the log does not answer), "blocked" (the pool takes no rows).
    ``lag_seconds``: how long ago everything that the log held then was applied. None: never since
    ingest was started. It grows while the log does not answer.
    """

    partition: int
    instance: str
    state: str
    reason: str
    run: int
    seq: int
    offset: int
    version: int
    lag_records: int
    lag_seconds: float | None
    records: int
    rows: int
    duplicates: int
    gaps: int
    zombies: int
    conflicts: int
    dead_letters: int
    catch_ups: int
    refusals: int
    freshness: Freshness


@dataclass(frozen=True, slots=True)
class IngestStatus:
    """All partitions. ``error`` is the last one not overcome yet, empty when all is well.

    ``refused``: rows that wait for room in a full table, by table. ``dense``: where the dense
    weights of the newest version are, by its commit record.
    """

    running: bool
    paused: bool
    model: str
    log: str
    error: str
    errors: int
    rows: int
    records: int
    refused: dict[str, int]
    version: int
    dense: str | None
    freshness: Freshness
    partitions: list[PartitionStatus] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PartitionHealth:
    """Whether a partition is followed, and how far behind: as in PartitionStatus."""

    partition: int
    instance: str
    state: str
    reason: str
    lag_seconds: float | None


class Samples:
    """The last SAMPLES values, for percentiles."""

    def __init__(self) -> None:
        self._values = np.zeros(SAMPLES)
        self._count = 0

    def add(self, value: float) -> None:
        """Adds one value."""
        self._values[self._count % SAMPLES] = value
        self._count += 1

    def values(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """A copy of what is kept, in no order."""
        return self._values[: min(self._count, SAMPLES)].copy()


def freshness_of(*samples: Samples) -> Freshness:
    """Percentiles over all of them together; ``samples`` hold milliseconds."""
    values = np.concatenate([sample.values() for sample in samples]) if samples else np.empty(0)
    if values.size == 0:
        return Freshness()
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return Freshness(round(float(p50), 3), round(float(p90), 3), round(float(p99), 3))
