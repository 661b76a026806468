"""The samples of the last hour: rates of intervals, gaps, counters that begin again, memory."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import pytest

from petps.server.history import (
    BYTES_MAX,
    HISTOGRAM_BUCKETS_MAX,
    OPERATIONS_MAX,
    RECENT_SAMPLES,
    SAMPLE_SECONDS,
    SAMPLES,
    SERIES,
    TABLES_MAX,
    TABLES_WITH_LATENCY_MAX,
    History,
    Snapshot,
)
from tests.seed import SEED

Stats = dict[str, Any]


def histogram(values: dict[int, int]) -> list[tuple[int, int]]:
    """Return {largest value: number} as the native server reports it: cumulative."""
    below, result = 0, []
    for bound, count in sorted(values.items()):
        below += count
        result.append((bound, below))
    return result


class FakeServer:
    """Counts as a native server does. ``tables``: id -> [pulls, keys, misses, latency]."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.counters: dict[str, int] = {}
        self.latency: dict[int, int] = {}
        self.tables: dict[int, list[Any]] = {}
        self.ingest: dict[str, Any] | None = None
        self.history = History()
        self.history.begin(self.snapshot())

    def pull(self, table: int, keys: int, found: int, ns: int, times: int = 1) -> None:
        for name, count in (("pulls", 1), ("keys", keys), ("rows_found", found)):
            self.counters[name] = self.counters.get(name, 0) + times * count
        self.latency[ns] = self.latency.get(ns, 0) + times
        counts = self.tables.setdefault(table, [0, 0, 0, {}])
        counts[0] += times
        counts[1] += times * keys
        counts[2] += times * (keys - found)
        counts[3][ns] = counts[3].get(ns, 0) + times

    def status(self) -> dict[str, Any]:
        return {"ingest": self.ingest}

    def stats(self) -> Stats:
        return {
            **self.counters,
            "latency": {"pull": {"buckets": histogram(self.latency)}} if self.latency else {},
            "tables": {
                number: {
                    "pulls": counts[0],
                    "keys": counts[1],
                    "misses": counts[2],
                    "latency": {"buckets": histogram(counts[3])},
                }
                for number, counts in self.tables.items()
            },
        }

    def snapshot(self) -> Snapshot:
        return Snapshot.of(self.at, self.stats(), self.status())

    def pass_time(self, seconds: float = SAMPLE_SECONDS) -> None:
        """Let time pass, then take a sample."""
        self.at += seconds
        self.history.add(self.snapshot(), self.status(), 5000.0 + self.at)

    def recent(self, later: float = 0.0) -> dict[str, Any]:
        self.at += later
        return self.history.recent(self.snapshot())

    def series(self, name: str) -> list[float | None]:
        values: list[float | None] = self.history.as_json()["series"][name]
        return values


def test_a_sample_has_the_rates_and_percentiles_of_its_interval() -> None:
    server = FakeServer()
    server.pull(1, keys=10, found=9, ns=1_000, times=99)
    server.pull(1, keys=10, found=9, ns=8_000, times=1)
    server.pass_time()
    server.pull(1, keys=4, found=0, ns=64_000, times=50)
    server.pass_time()
    assert server.series("pulls_per_second") == [10, 5]
    assert server.series("keys_per_second") == [100, 20]
    assert server.series("hit_rate") == [0.9, 0]  # not 0.75, which it is since the start
    assert server.series("p50_us") == [1, 64]
    assert server.series("p99_us") == [1, 64]
    server.pass_time()
    assert server.series("pulls_per_second")[-1] == 0
    assert server.series("hit_rate")[-1] is None  # nothing was asked: neither 0 nor the last one
    assert server.series("p99_us")[-1] is None


def test_the_last_minute_forgets_what_was_before() -> None:
    server = FakeServer()
    server.pull(1, keys=1000, found=1000, ns=1_000, times=1000)
    for _ in range(RECENT_SAMPLES + 1):
        server.pass_time()
    server.pull(1, keys=100, found=25, ns=5_000, times=10)
    recent = server.recent(later=5.0)
    assert recent["seconds"] == 65
    assert recent["counts"]["pulls"] == 10
    assert recent["hit_rate"] == 0.25
    assert recent["latency"]["pull"] == {"count": 10, "p50_us": 5, "p99_us": 5}
    table = recent["tables"]["1"]
    assert (table["keys"], table["misses"], table["hit_rate"]) == (1000, 750, 0.25)
    assert (table["p50_us"], table["p99_us"]) == (5, 5)
    assert table["pulls_per_second"] == pytest.approx(10 / 65)


def test_a_table_with_nothing_but_misses_shows_within_two_samples() -> None:
    server = FakeServer()
    for _ in range(RECENT_SAMPLES):
        server.pull(1, keys=1000, found=1000, ns=1_000)
        server.pass_time()
    server.pull(1, keys=500, found=0, ns=1_000)
    server.pass_time()
    server.pull(1, keys=500, found=0, ns=1_000)
    recent = server.recent(later=10.0)
    assert recent["latest"]["tables"] == {"1": {"keys": 500, "misses": 500}}
    assert recent["tables"]["1"]["hit_rate"] > 0.7  # the minute would hide it


def test_before_the_first_sample_the_interval_is_short() -> None:
    server = FakeServer()
    server.pull(1, keys=8, found=4, ns=1_000)
    recent = server.recent(later=2.0)
    assert recent["seconds"] == 2
    assert recent["keys_per_second"] == 4
    assert recent["latest"]["tables"]["1"] == {"keys": 8, "misses": 4}
    assert server.history.as_json()["ended_at"] is None
    assert server.series("hit_rate") == []


def test_samples_that_are_missing_are_gaps() -> None:
    server = FakeServer()
    server.pass_time()
    server.pull(1, keys=10, found=10, ns=1_000, times=40)
    server.pass_time(4 * SAMPLE_SECONDS)  # the process did not run
    server.pass_time()
    assert server.series("pulls_per_second") == [0, None, None, None, 1, 0]
    server.pass_time(10 * SAMPLES * SAMPLE_SECONDS)
    assert len(server.series("hit_rate")) == SAMPLES
    assert server.series("pulls_per_second")[:-1] == [None] * (SAMPLES - 1)


def test_an_unpunctual_sample_is_no_gap() -> None:
    server = FakeServer()
    for seconds in (10.4, 9.6, 12.0, 8.0, 14.9):
        server.pass_time(seconds)
    assert server.series("pulls_per_second") == [0] * 5


def test_counters_that_begin_again_count_from_zero() -> None:
    server = FakeServer()
    server.pull(1, keys=10, found=10, ns=1_000, times=500)
    server.pass_time()
    server.counters, server.latency, server.tables = {}, {}, {}
    server.pull(1, keys=10, found=5, ns=1_000, times=5)  # a bucket that had more before
    server.pull(1, keys=10, found=5, ns=2_000, times=15)
    recent = server.recent()
    assert recent["counts"]["pulls"] == 20
    assert recent["hit_rate"] == 0.5
    assert recent["tables"]["1"]["misses"] == 100
    assert recent["latency"]["pull"] == {"count": 20, "p50_us": 2, "p99_us": 2}
    server.pass_time()
    assert server.series("pulls_per_second") == [50, 2]
    assert server.series("p50_us") == [1, 2]


def test_a_dropped_table_vanishes_and_a_new_one_counts_from_its_start() -> None:
    server = FakeServer()
    server.pull(1, keys=10, found=10, ns=1_000)
    server.pass_time()
    del server.tables[1]
    server.pull(2, keys=6, found=3, ns=4_000)
    recent = server.recent()
    assert set(recent["tables"]) == {"2"}
    assert recent["tables"]["2"]["hit_rate"] == 0.5
    assert recent["tables"]["2"]["p50_us"] == 4


def test_lag_and_freshness_are_unknown_rather_than_old() -> None:
    server = FakeServer()
    server.ingest = {
        "records": 5,
        "freshness": {"p50_ms": 3.0, "p90_ms": 4.0, "p99_ms": 9.0},
        "partitions": [{"lag_seconds": 1.5}, {"lag_seconds": 0.25}],
    }
    server.pass_time()
    assert server.series("lag_seconds") == [1.5]
    assert server.series("freshness_p99_ms") == [9]
    server.ingest["partitions"].append({"lag_seconds": None})
    server.pass_time()  # and no message came
    server.ingest = None
    server.pass_time()
    assert server.series("lag_seconds")[1:] == [None, None]
    assert server.series("freshness_p50_ms")[1:] == [None, None]


def test_the_memory_is_bounded() -> None:
    """The largest pool: 4,096 tables that are all pulled, and every bucket of every histogram."""
    random.seed(SEED)
    buckets = [(2**64 - HISTOGRAM_BUCKETS_MAX + i, 2**50 + i) for i in range(HISTOGRAM_BUCKETS_MAX)]
    stats: Stats = {
        "pulls": 2**60,
        "latency": {f"operation {i}": {"buckets": buckets} for i in range(OPERATIONS_MAX)},
        "tables": {
            number: {
                "pulls": random.randrange(2**60),
                "keys": 2**62,
                "misses": 2**61,
                "latency": {"buckets": buckets},
            }
            for number in range(TABLES_MAX)
        },
    }
    partitions = [{"lag_seconds": 0.1}]
    ingest = {"records": 1, "freshness": {"p50_ms": 0.1, "p99_ms": 0.2}, "partitions": partitions}
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        history = History()
        history.begin(Snapshot.of(0.0, stats, {}))
        for number in range(1, RECENT_SAMPLES + 3):
            snapshot = Snapshot.of(number * SAMPLE_SECONDS, stats, {})
            history.add(snapshot, {"ingest": ingest}, float(number))
        small = Snapshot.of(0.0, {"latency": {}}, {})
        for _ in range(SAMPLES + 10):
            history._samples.append(tuple(random.random() for _ in SERIES))
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(snapshot.table_latency) == TABLES_WITH_LATENCY_MAX
    assert len(small.tables) == 0
    assert BYTES_MAX / 2 < held <= BYTES_MAX
    assert BYTES_MAX <= 13 << 20


def test_the_history_is_plain_json() -> None:
    server = FakeServer()
    for _ in range(SAMPLES + 5):
        server.pull(1, keys=3, found=1, ns=123_456, times=7)
        server.pass_time()
    text = json.dumps(server.history.as_json(), allow_nan=False)
    assert len(text) < 100_000
    report = json.loads(text)
    assert {len(series) for series in report["series"].values()} == {SAMPLES}
    assert list(report["series"]) == list(SERIES)
    assert report["ended_at"] == 5000.0 + server.at


def test_percentiles_agree_with_sorted_values() -> None:
    """The slow, obvious model: all values of the interval, sorted."""
    random.seed(SEED)
    server = FakeServer()
    for _ in range(20):
        values = [random.choice((100, 200, 400, 900, 5_000)) for _ in range(random.randint(0, 60))]
        for value in values:
            server.pull(1, keys=1, found=1, ns=value)
        server.pass_time()
        values.sort()
        for q, name in ((0.5, "p50_us"), (0.99, "p99_us")):
            expected = values[max(1, -int(-q * len(values) // 1)) - 1] / 1e3 if values else None
            assert server.series(name)[-1] == expected, (SEED, values)
