"""The last hour of a server, as samples of ten seconds, and its last minute in detail.

Owns:        the samples, the snapshots of counters that they are made of, their bound on memory.
Never does:  read a server, keep anything on disk: a restarted server begins with no samples.
Called by:   watch.
Invariants:  At most BYTES_MAX bytes, whatever the server does. Every value is of an interval, never
             since the start. A value that is not known (no sample, or nothing to measure) is None:
             never 0, and never its neighbour. A counter that went back has begun again at 0.
Threads:     any.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["BYTES_MAX", "SAMPLES", "SAMPLE_SECONDS", "SERIES", "History", "Snapshot"]

SAMPLE_SECONDS: Final = 10.0
SAMPLES: Final = 360  # an hour
RECENT_SAMPLES: Final = 6  # a minute: the interval of recent()
# Tables whose latency is kept: the most pulled ones. Counters are kept of all.
TABLES_WITH_LATENCY_MAX: Final = 256
TABLES_MAX: Final = 4096  # of a pool: native/pool/pool.h

# The series of /history.json.
SERIES: Final = (
    "pulls_per_second",
    "keys_per_second",
    "hit_rate",
    "p50_us",
    "p99_us",
    "errors_per_second",
    "lag_seconds",
    "freshness_p50_ms",
    "freshness_p99_ms",
)
# Counters of the server of which recent() has the numbers of the last minute.
COUNTERS: Final = (
    "pulls",
    "keys",
    "rows_found",
    "misses",
    "errors",
    "pushes",
    "rows_pushed",
    "rows_refused",
    "bytes_received",
    "bytes_sent",
    "refused_for_memory",
    "connections_refused",
    "handshakes_refused",
    "logins_failed",
    "ingested_messages",
)
OPERATIONS_MAX: Final = 16  # native/wire/wire.h kOpcodesEnd
HISTOGRAM_BUCKETS_MAX: Final = 304  # native/server/server.h HistogramSnapshot::kBuckets
_OBJECT_BYTES: Final = 512  # an array, its entry in a dict, and what the allocator adds
_NUMBER_BYTES: Final = 40  # a float or an int, and the reference to it
_SNAPSHOT_BYTES: Final = (
    (TABLES_WITH_LATENCY_MAX + OPERATIONS_MAX) * (16 * HISTOGRAM_BUCKETS_MAX + _OBJECT_BYTES)
    + 32 * TABLES_MAX
    + _OBJECT_BYTES * (len(COUNTERS) + 8)
)
# 13 MB, of a server with 4,096 tables and all buckets; with 26 tables it has about 0.3 MB.
BYTES_MAX: Final = (
    (RECENT_SAMPLES + 2) * _SNAPSHOT_BYTES
    + SAMPLES * (len(SERIES) * _NUMBER_BYTES + _OBJECT_BYTES)
)  # fmt: skip

Buckets = Iterable[tuple[int, int]]  # (largest value, number of values up to it), as in stats()
Number = float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters of a server at one moment. ``at``: time.monotonic()."""

    at: float
    counters: dict[str, int]
    latency: dict[str, array[int]]
    """By operation: bound and number of values up to it, alternately."""
    tables: array[int]
    """Id, pulls, keys and misses of each table that was pulled, one table after another."""
    table_latency: dict[int, array[int]]

    @staticmethod
    def of(at: float, stats: Mapping[str, Any], status: Mapping[str, Any]) -> Snapshot:
        """Make a snapshot from the native server's stats() and a status."""
        of_table = stats.get("tables", {})
        ingest = status.get("ingest") or {}
        extra = {
            "logins_failed": (status.get("access") or {}).get("logins_failed", 0),
            "ingested_messages": ingest.get("records", 0),
        }
        counters = {name: int(stats.get(name, extra.get(name, 0))) for name in COUNTERS}
        flat = array("Q")
        for number, table in of_table.items():
            flat.extend((int(number), table["pulls"], table["keys"], table["misses"]))
        busiest = sorted(of_table, key=lambda number: -of_table[number]["pulls"])
        return Snapshot(
            at,
            counters,
            {name: _flat(entry["buckets"]) for name, entry in stats["latency"].items()},
            flat,
            {
                int(number): _flat(of_table[number]["latency"]["buckets"])
                for number in busiest[:TABLES_WITH_LATENCY_MAX]
            },
        )

    def tables_by_id(self) -> dict[int, tuple[int, int, int]]:
        """Return (pulls, keys, misses) by the table's id."""
        flat = self.tables
        return {flat[i]: (flat[i + 1], flat[i + 2], flat[i + 3]) for i in range(0, len(flat), 4)}


def _flat(buckets: Buckets) -> array[int]:
    return array("Q", (number for bucket in buckets for number in bucket))


def _counts(flat: array[int]) -> Iterator[tuple[int, int]]:
    """Yield (bound, number of values in the bucket)."""
    below = 0
    for i in range(0, len(flat), 2):
        yield flat[i], flat[i + 1] - below
        below = flat[i + 1]


def _difference(new: int, old: int) -> int:
    """Return how far a counter went; one that went back has begun again at 0."""
    return new - old if new >= old else new


def _interval(new: array[int], old: array[int] | None) -> list[tuple[int, int]]:
    """Return the buckets of the values between two snapshots: (bound, number), not cumulative."""
    before = dict(_counts(old)) if old is not None else {}
    counts = [(bound, count - before.pop(bound, 0)) for bound, count in _counts(new)]
    if before or any(count < 0 for _, count in counts):  # it has begun again
        return list(_counts(new))
    return [(bound, count) for bound, count in counts if count]


def _quantile_us(buckets: list[tuple[int, int]], q: float) -> Number:
    """Return a quantile in microseconds, at most 12.5 % too high; None without a value."""
    total = sum(count for _, count in buckets)
    rank = max(1, math.ceil(q * total))
    seen = 0
    for bound, count in buckets:
        seen += count
        if seen >= rank:
            return bound / 1e3
    return None


def _share(part: int, whole: int) -> Number:
    return part / whole if whole else None


class History:
    """The samples of the last hour and the snapshots of the last minute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the next ones
        self._samples: deque[tuple[Number, ...]] = deque(maxlen=SAMPLES)
        self._snapshots: deque[Snapshot] = deque(maxlen=RECENT_SAMPLES + 1)
        self._ended_at: float | None = None  # Unix time of the newest sample's end

    def begin(self, snapshot: Snapshot) -> None:
        """Take the snapshot from which the first interval counts."""
        with self._lock:
            self._snapshots.append(snapshot)

    def add(self, snapshot: Snapshot, status: Mapping[str, Any], wall: float) -> None:
        """Add the sample of the time since the last snapshot, and gaps for those that are missing.

        wall: Unix time of the snapshot.
        """
        with self._lock:
            before = self._snapshots[-1]
            missed = round((snapshot.at - before.at) / SAMPLE_SECONDS) - 1
            for _ in range(min(missed, SAMPLES)):
                self._samples.append((None,) * len(SERIES))
            self._samples.append(_sample(before, snapshot, status))
            self._snapshots.append(snapshot)
            self._ended_at = wall

    def recent(self, now: Snapshot) -> dict[str, Any]:
        """Return rates, counts and percentiles of the last minute, up to ``now``.

        ``seconds`` is its length, which is shorter after a start, and longer if samples are
        missing. ``latest`` has the keys and misses of each table in the last 10 to 20 seconds.
        """
        with self._lock:
            snapshots = list(self._snapshots)
        limit = now.at - (RECENT_SAMPLES + 1) * SAMPLE_SECONDS
        first = next((entry for entry in snapshots if entry.at > limit), snapshots[-1])
        settled = [entry for entry in snapshots if now.at - entry.at >= SAMPLE_SECONDS]
        latest = settled[-1] if settled else first
        return _rates(first, now) | {"latest": _keys_and_misses(latest, now)}

    def as_json(self) -> dict[str, Any]:
        """Return the series of the last hour: the oldest value first, None for a gap.

        ``ended_at`` is the Unix time of the last value's end; None before the first sample.
        """
        with self._lock:
            samples = list(self._samples)
            ended_at = self._ended_at
        columns = list(zip(*samples, strict=True)) if samples else [()] * len(SERIES)
        return {
            "ended_at": ended_at,
            "seconds": SAMPLE_SECONDS,
            "samples": SAMPLES,
            "series": {
                name: [None if value is None else float(f"{value:.4g}") for value in column]
                for name, column in zip(SERIES, columns, strict=True)
            },
        }


def _counted(old: Snapshot, new: Snapshot) -> dict[str, int]:
    return {name: _difference(new.counters[name], old.counters[name]) for name in COUNTERS}


def _sample(old: Snapshot, new: Snapshot, status: Mapping[str, Any]) -> tuple[Number, ...]:
    """Return the values of SERIES between two snapshots."""
    seconds = max(new.at - old.at, 1e-3)
    counts = _counted(old, new)
    pulls = _interval(new.latency.get("pull", array("Q")), old.latency.get("pull"))
    ingest = status.get("ingest") or {}
    lags = [partition["lag_seconds"] for partition in ingest.get("partitions", [])]
    freshness = ingest.get("freshness") or {}
    is_fresh = counts["ingested_messages"] > 0  # else the percentiles are of older messages
    values: dict[str, Number] = {
        "pulls_per_second": counts["pulls"] / seconds,
        "keys_per_second": counts["keys"] / seconds,
        "hit_rate": _share(counts["rows_found"], counts["keys"]),
        "p50_us": _quantile_us(pulls, 0.5),
        "p99_us": _quantile_us(pulls, 0.99),
        "errors_per_second": counts["errors"] / seconds,
        "lag_seconds": max(lags) if lags and None not in lags else None,
        "freshness_p50_ms": freshness.get("p50_ms") if is_fresh else None,
        "freshness_p99_ms": freshness.get("p99_ms") if is_fresh else None,
    }
    return tuple(values[name] for name in SERIES)


def _rates(old: Snapshot, new: Snapshot) -> dict[str, Any]:
    seconds = max(new.at - old.at, 1e-3)
    counts = _counted(old, new)
    per_second = {
        f"{name}_per_second": counts[name] / seconds
        for name in ("pulls", "keys", "pushes", "errors", "bytes_received", "bytes_sent")
    }
    latency = {}
    for operation, flat in new.latency.items():
        buckets = _interval(flat, old.latency.get(operation))
        latency[operation] = _percentiles(buckets)
    old_tables = old.tables_by_id()
    tables = {}
    for number, (pulls, keys, misses) in new.tables_by_id().items():
        before = old_tables.get(number, (0, 0, 0))
        asked, missed = _difference(keys, before[1]), _difference(misses, before[2])
        # Of a table that was not among those with latency a minute ago, nothing is known.
        is_known = number not in old_tables or number in old.table_latency
        flat = new.table_latency.get(number, array("Q"))
        buckets = _interval(flat, old.table_latency.get(number)) if is_known else []
        tables[str(number)] = {
            "pulls_per_second": _difference(pulls, before[0]) / seconds,
            "keys_per_second": asked / seconds,
            "keys": asked,
            "misses": missed,
            "hit_rate": _share(asked - missed, asked),
            **_percentiles(buckets),
        }
    return {
        "seconds": seconds,
        "counts": counts,
        "hit_rate": _share(counts["rows_found"], counts["keys"]),
        **per_second,
        "latency": latency,
        "tables": tables,
    }


def _percentiles(buckets: list[tuple[int, int]]) -> dict[str, Number]:
    return {
        "count": sum(count for _, count in buckets),
        "p50_us": _quantile_us(buckets, 0.5),
        "p99_us": _quantile_us(buckets, 0.99),
    }


def _keys_and_misses(old: Snapshot, new: Snapshot) -> dict[str, Any]:
    old_tables = old.tables_by_id()
    tables = {}
    for number, (_, keys, misses) in new.tables_by_id().items():
        before = old_tables.get(number, (0, 0, 0))
        asked = _difference(keys, before[1])
        if asked:
            tables[str(number)] = {"keys": asked, "misses": _difference(misses, before[2])}
    return {"seconds": max(new.at - old.at, 1e-3), "tables": tables}
