"""checkpoint.merging.<deltas>: the effect of merging in layers on a recovery (DECK 3.3).

The trace is the accesses of Twitter's cluster 52, one delta for each interval; only the first
version is a base. Deltas are merged with the stride that inequality 1 gives for the mean d of the
trace, if ``velocity`` deltas are merged in an interval. Each result also has the living deltas and
their volume, as measured and by the paper's formula with the same d, and the merging time for each
delta.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.checkpoint.policies import Trainer, cut_intervals, recover
from examples.demo.trace import load_trace
from petps.checkpoint import POLICIES, Checkpointer, Policy, Store, Table
from petps.checkpoint.policy import Merged, compute_living_volume, find_stride

REPEATS = 5


class _Grown:
    """A store that grows by one delta at a time."""

    def __init__(self, folder: Path, policy: Policy, keys: int, dim: int) -> None:
        self.policy = policy
        self.store = Store.create(folder, "bench", [Table.of("items", dim)])
        self.trainer = Trainer(keys, dim)
        self.writer = Checkpointer(self.store, policy, self.trainer)
        self.writer.write(1)
        self.merging_s = 0.0
        self._array = np.ones((keys, 4 * dim), np.uint8)

    def add(self, version: int, changed: np.ndarray[Any, Any]) -> None:
        """Write a delta, then do the work behind the trainer."""
        self.trainer.step(version, changed)
        self.writer.write(version)
        began = time.perf_counter()
        self.writer.arrange()
        self.merging_s += time.perf_counter() - began

    def recovery_s(self) -> float:
        """Return the best time to read the newest version above its base into an array."""
        return recover(self.store, None, self._array, repeats=REPEATS, above_base=True)[0]

    def living(self) -> tuple[int, int]:
        """Return the number of deltas that the newest version needs, and their rows."""
        lineage, newest = self.store.state.lineage, self.store.state.newest_version
        chunks = [chunk for chunk in lineage.open_delta_chunks() if chunk.holds(newest)]
        return len(chunks), sum(chunk.rows for chunk in chunks)


def figures(work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one result for each count of deltas."""
    accesses = load_trace().accesses[: work["accesses"]]
    keys = int(accesses.max()) + 1
    intervals = cut_intervals(accesses, work["versions"])
    duplication = _duplication(intervals)
    stride = find_stride(duplication, work["velocity"])
    with tempfile.TemporaryDirectory(prefix="petps-bench-") as folder:
        place = Path(folder)
        merged = Merged(stride=stride, every=1 << 20)
        ours = _Grown(place / "merged", merged, keys, work["dim"])
        naive = _Grown(place / "naive", POLICIES["consecutive"](), keys, work["dim"])
        for count, changed in enumerate(intervals, 1):
            ours.add(count + 1, changed)
            naive.add(count + 1, changed)
            if count in work["counts"]:
                rows = statistics.fmean(len(interval) for interval in intervals[:count])
                yield _result(count, ours, naive, stride, duplication, rows)


def _result(
    count: int, ours: _Grown, naive: _Grown, stride: int, duplication: float, rows: float
) -> dict[str, Any]:
    deltas, volume = ours.living()
    naive_deltas, naive_volume = naive.living()
    recovery_s, naive_recovery_s = ours.recovery_s(), naive.recovery_s()
    return {
        "name": f"checkpoint.merging.{count}",
        "value": 1e3 * recovery_s,
        "unit": "ms",
        "ratio_to": "the same deltas, not merged",
        "ratio": recovery_s / naive_recovery_s,
        "not_merged_ms": 1e3 * naive_recovery_s,
        "stride": stride,
        "duplication": duplication,
        "living_deltas": deltas,
        "living_deltas_not_merged": naive_deltas,
        "living_deltas_by_formula": sum(_digits(count, stride)),
        "living_volume": volume / rows,
        "living_volume_not_merged": naive_volume / rows,
        "living_volume_by_formula": compute_living_volume(count, stride, duplication),
        "merging_ms_a_delta": 1e3 * ours.merging_s / count,
    }


def _digits(count: int, stride: int) -> list[int]:
    digits = []
    while count:
        digits.append(count % stride)
        count //= stride
    return digits


def _duplication(intervals: list[np.ndarray[Any, Any]]) -> float:
    """Return d: the share of rows that consecutive deltas have in common."""
    pairs = list(itertools.pairwise(intervals))
    shares = [2 * len(np.intersect1d(a, b)) / (len(a) + len(b)) for a, b in pairs]
    return statistics.fmean(shares)
