"""What it costs the pulls that their table evicts its coldest rows and lets rows expire."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

import petps
from petps.server.expiry import Expiry

DIM: Final = 128
KEYS_OF_A_PULL: Final = 500
AGE: Final = 24 * 3600
PUSH: Final = 50_000


def figures(sizes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield capacity.sampling: pulls a second with sampling, expiry and eviction, to without.

    The two alternate in windows on one table, on a file. ratio: the median of the windows' ratios,
    each window to the mean of the two beside it. pairs: all of them.
    """
    rows = sizes["sampling_rows"]
    rng = np.random.default_rng(1)
    weights = np.cumsum(1.0 / np.arange(1, rows + 1) ** 0.99)
    names = rng.permutation(rows).astype(np.uint64)
    pulls = [
        names[np.searchsorted(weights, rng.random(KEYS_OF_A_PULL) * weights[-1]).clip(0, rows - 1)]
        for _ in range(512)
    ]
    out = np.empty((KEYS_OF_A_PULL, DIM), np.float32)
    with (
        tempfile.TemporaryDirectory() as folder,
        petps.create(Path(folder) / "pool", durability="process") as pool,
    ):
        pool.create_table("t", dim=DIM, capacity=rows)
        for start in range(0, rows, PUSH):
            keys = np.arange(start, min(rows, start + PUSH), dtype=np.uint64)
            pool.push("t", keys, np.ones((len(keys), DIM), np.float32))
        table = pool.table("t")
        expiry = Expiry(pool.native, lambda _: None)

        def window(is_on: bool) -> float:
            pool.native.set_when_full(table.id, "evict_coldest" if is_on else "refuse")
            pool.set_expiry("t", AGE if is_on else 0)
            end = time.perf_counter() + sizes["sampling_ms"] / 1e3
            begin, count = time.perf_counter(), 0
            while (now := time.perf_counter()) < end:
                table.pull(pulls[count % len(pulls)], out)
                count += 1
            return count / (now - begin)

        window(False)
        rates = [window(number % 2 == 1) for number in range(2 * sizes["sampling_pairs"] + 1)]
        expiry.close()
    pairs = [
        rates[at] / ((rates[at - 1] + rates[at + 1]) / 2) for at in range(1, len(rates) - 1, 2)
    ]
    yield {
        "name": "capacity.sampling",
        "value": statistics.median(rates[1::2]),
        "unit": "pulls/s",
        "ratio_to": "the same pulls without sampling, expiry and eviction",
        "ratio": statistics.median(pairs),
        "pairs": pairs,
    }
