"""scale.ingest: ingest whose applies use 1 to 16 threads, from a log of as many partitions.

The log is a folder, so that no broker takes processors. One thread reads and decodes at any number
of threads. Each round has one run of every number of threads, and one of a single thread with as
many partitions: more partitions make smaller messages, which cost more by themselves.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.ingest.deltas import SCHEMA, Keys, draw_keys, ingest_rate, publish, tables_of
from bench.record import ROOT

OUTPUT: Final = ROOT / "build" / "bench"
THREAD_COUNTS: Final = (1, 2, 4, 8, 16)


@dataclass
class Runs:
    """The rates of one number of threads and partitions, by round, and the sums of the costs."""

    rates: list[float] = field(default_factory=list)
    voluntary: int = 0
    involuntary: int = 0
    user_seconds: float = 0.0
    system_seconds: float = 0.0


def figures(work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the results."""
    keys = draw_keys(int(work["keys"]))
    versions, rounds = int(work["versions"]), int(work["rounds"])
    all_runs = {threads: Runs() for threads in THREAD_COUNTS}
    single_runs = {partitions: Runs() for partitions in THREAD_COUNTS[1:]}
    # Not in /tmp, which may be memory.
    OUTPUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUTPUT) as name:
        folder = Path(name)
        for threads in THREAD_COUNTS:
            place = str(folder / f"log-{threads}")
            total = publish(place, threads, keys, int(work["version_rows"]), versions)
        for _ in range(rounds):
            for threads, runs in all_runs.items():
                _run(folder, threads, keys, total, versions, threads, runs)
            for partitions, runs in single_runs.items():
                _run(folder, partitions, keys, total, versions, 1, runs)
    alone = all_runs[1].rates
    single_runs[1] = all_runs[1]
    for threads, runs in all_runs.items():
        ratios = [rate / single for rate, single in zip(runs.rates, alone, strict=True)]
        rows = total * rounds
        yield {
            "name": f"scale.ingest.{threads}",
            "medium": "file",
            "value": statistics.median(runs.rates),
            "unit": "rows/s",
            "ratio_to": "one thread in the same rounds",
            "ratio": statistics.median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "limit": statistics.median(alone),
            "threads": threads,
            "partitions": threads,
            "one_thread_same_partitions": statistics.median(single_runs[threads].rates),
            "processors": len(os.sched_getaffinity(0)),
            "rows": total,
            "row_bytes": SCHEMA.row_bytes,
            "voluntary_switches_per_1000_rows": 1000 * runs.voluntary / rows,
            "involuntary_switches_per_1000_rows": 1000 * runs.involuntary / rows,
            "system_cpu_share": runs.system_seconds / (runs.user_seconds + runs.system_seconds),
        }


def _run(
    folder: Path, partitions: int, keys: Keys, total: int, versions: int, threads: int, runs: Runs
) -> None:
    """Ingest the log of so many partitions into a new pool, and add the rate and the costs."""
    pool = folder / "scale.pool"
    place = str(folder / f"log-{partitions}")
    with tables_of(pool, keys, partitions) as tables:
        before = resource.getrusage(resource.RUSAGE_SELF)
        runs.rates.append(ingest_rate(place, partitions, tables, total, versions, threads=threads))
        after = resource.getrusage(resource.RUSAGE_SELF)
    pool.unlink()
    runs.voluntary += after.ru_nvcsw - before.ru_nvcsw
    runs.involuntary += after.ru_nivcsw - before.ru_nivcsw
    runs.user_seconds += after.ru_utime - before.ru_utime
    runs.system_seconds += after.ru_stime - before.ru_stime
