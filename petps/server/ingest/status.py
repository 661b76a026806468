"""Status of ingest: one snapshot of plain values."""

from __future__ import annotations

import enum
from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, Final

import numpy as np

__all__ = [
    "Freshness",
    "FreshnessHistogram",
    "IngestStatus",
    "Mode",
    "PartitionHealth",
    "PartitionStatus",
    "Samples",
]

# Freshness samples of a partition's last messages; at 100 messages/s, the last 40 seconds.
SAMPLES: Final = 4096
# Upper bounds of the freshness buckets, in seconds: from a log in a folder to a day behind.
FRESHNESS_BOUNDS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0,
    86400.0,
)  # fmt: skip


class Mode(enum.Enum):
    """State of a partition in its stream. The values are those that status shows."""

    FOLLOWING = "following"
    CATCHING_UP = "catching_up"  # reading a base
    INCOMPLETE = "stale"  # a message or rows are missing: the rows grow older until a base arrives
    FULL = "full"  # rows could not be stored: ingest retries them until there is room
    CONFLICT = "conflict"  # two publishers wrote one run


@dataclass(frozen=True, slots=True)
class Freshness:
    """Milliseconds from publishing to servable, over the last messages; None before the first."""

    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None


@dataclass(frozen=True, slots=True)
class FreshnessHistogram:
    """Seconds from publishing to servable, of all messages of rows since the start.

    ``counts[i]`` is the number of messages of at most ``bounds[i]`` seconds, and ``count`` of all.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    count: int
    sum: float


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """Status of one partition.

    ``state`` is the value of a Mode, or "passing" (the run feeds another instance), "starting"
    (ingest has not begun to read the partition), "unreachable" (the log does not answer) or
    "blocked" (the pool refuses writes). ``lag_seconds`` is the time since everything that the log
    held was applied. It grows while the log does not answer. It is None until ingest has reached
    the log's end once. ``lag_records`` is None while the log does not answer. ``version_time`` is
    when the last commit applied since the start was published, in seconds since 1970.
    """

    partition: int
    instance: str
    state: str
    reason: str
    run: int
    seq: int
    offset: int
    version: int
    version_time: float | None
    lag_records: int | None
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
    """Status of all partitions. ``error`` has the current errors; it is empty if there are none.

    ``refused`` has the number of rows that wait for room in a full table, by table. ``dense`` is
    the location of the newest version's dense weights, from its commit record.
    """

    running: bool
    paused: bool
    model: str
    log: str
    log_reachable: bool
    error: str
    errors: int
    rows: int
    records: int
    refused: dict[str, int]
    version: int
    dense: str | None
    freshness: Freshness
    freshness_histogram: FreshnessHistogram
    partitions: list[PartitionStatus] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PartitionHealth:
    """Whether a partition is followed, and its lag. The fields are those of PartitionStatus."""

    partition: int
    instance: str
    state: str
    reason: str
    lag_seconds: float | None


class Samples:
    """Milliseconds: the last SAMPLES values, for percentiles, and a histogram of all values."""

    def __init__(self) -> None:
        self._values = np.zeros(SAMPLES)
        self._count = 0
        self.buckets = [0] * (len(FRESHNESS_BOUNDS) + 1)
        """Values of each bucket, not cumulative; the last one has those above all bounds."""
        self.sum_seconds = 0.0

    def add(self, value: float) -> None:
        """Add one value."""
        self._values[self._count % SAMPLES] = value
        self._count += 1
        seconds = max(0.0, value / 1e3)  # below 0 if the publisher's clock is ahead
        self.buckets[bisect_left(FRESHNESS_BOUNDS, seconds)] += 1
        self.sum_seconds += seconds

    def values(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return a copy of the values, unordered."""
        return self._values[: min(self._count, SAMPLES)].copy()


def freshness_of(*samples: Samples) -> Freshness:
    """Return percentiles over all ``samples`` together, which are in milliseconds."""
    values = np.concatenate([sample.values() for sample in samples]) if samples else np.empty(0)
    if values.size == 0:
        return Freshness()
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return Freshness(round(float(p50), 3), round(float(p90), 3), round(float(p99), 3))


def histogram_of(*samples: Samples) -> FreshnessHistogram:
    """Return the histogram of all ``samples`` together."""
    buckets = [sum(values) for values in zip(*(sample.buckets for sample in samples), strict=True)]
    counts = list(accumulate(buckets or [0] * (len(FRESHNESS_BOUNDS) + 1)))
    return FreshnessHistogram(
        FRESHNESS_BOUNDS,
        tuple(counts[:-1]),
        counts[-1],
        sum(sample.sum_seconds for sample in samples),
    )
