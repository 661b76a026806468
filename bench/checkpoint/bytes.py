"""checkpoint.write_bytes and .capacity by bits: Check-N-Run's Figure 17.

The trace grows as in its Figure 15: an interval modifies 26 % of the rows. Most of them are
modified in every interval, so that ten intervals modify half of the model. The reference is full
checkpoints of float32 rows in the same format. The measured side is the intermittent policy,
quantised for the number of restores that allows these bits. write_bytes is the mean over the
versions, bases included; capacity is the most that the store holds while it keeps only the newest
version.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.checkpoint.policies import Trainer
from petps.checkpoint import POLICIES, Checkpointer, Policy, Quantising, Store, Table
from petps.checkpoint.chunk import Keys

# The expected restores that allow these bits: Check-N-Run 6.2.
RESTORES: Final = {2: 1, 3: 3, 4: 20, 8: 100}
MODIFIED: Final = 0.26
ALWAYS: Final = 0.22


def figures(work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield both ratios to full float32, by bits; lower is better."""
    keys, count = int(work["modified_of"]), int(work["intervals"])
    intervals = _intervals(keys, count)
    reference = _measure(POLICIES["full"](), None, intervals, keys, work["dim"])
    modified = len(np.unique(np.concatenate(intervals))) / keys
    for bits, restores in RESTORES.items():
        values = _measure(
            POLICIES["intermittent"](), Quantising(restores), intervals, keys, work["dim"]
        )
        for figure in ("write_bytes", "capacity"):
            yield {
                "name": f"checkpoint.{figure}.{bits}",
                "value": values[figure] / 1e6,
                "unit": "MB",
                "ratio_to": "full float32",
                "ratio": values[figure] / reference[figure],
                "times_less": reference[figure] / values[figure],
                "expected_restores": restores,
                "bases": values["bases"],
                "modified_in_all": modified,
            }


def _intervals(keys: int, count: int) -> list[Keys]:
    """Return intervals of 26 % of the rows each: the same 22 %, and others of the rest."""
    rng = np.random.default_rng(1)
    shuffled = rng.permutation(keys)
    frequent, rest = np.split(shuffled, [int(ALWAYS * keys)])
    rare_count = int(MODIFIED * keys) - len(frequent)
    intervals = (
        np.concatenate([frequent, rng.choice(rest, rare_count, replace=False)])
        for _ in range(count)
    )
    return [np.sort(interval).astype(np.uint64) for interval in intervals]


def _measure(
    policy: Policy, quantising: Quantising | None, intervals: list[Keys], keys: int, dim: int
) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="petps-bench-") as folder:
        store = Store.create(Path(folder) / "store", "bench", [Table.of("items", dim)], quantising)
        trainer = Trainer(keys, dim)
        writer = Checkpointer(store, policy, trainer)
        written_bytes, stored_bytes, bases = [], [], 0
        for version, changed in enumerate([intervals[0][:0], *intervals], 1):
            trainer.step(version, changed)
            info = writer.write(version)
            bases += info.kind == "base"
            store.purge(1)
            written_bytes.append(info.bytes)
            stored_bytes.append(store.stored_bytes())
    return {
        "write_bytes": statistics.fmean(written_bytes),
        "capacity": max(stored_bytes),
        "bases": bases,
    }
