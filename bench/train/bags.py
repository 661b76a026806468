"""torch.embedding_bag: a batch's rows pulled from a server and pooled, against in-process pulls.

It needs PyTorch; bench.lines runs it. There are one server process and one caller. A batch has the
ids of 26 tables, Zipf. The in-process side pulls the same ids from the pool that the server has
open, without pooling them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import petps_client
import torch
from petps_client.torch import EmbeddingBagCollection

import petps
from bench.pull.grpc import served

TABLES: Final = 26
DIM: Final = 64
BAG: Final = 4
LOAD_ROWS: Final = 50_000
# The most keys in one frame here; the servers' own limit is higher.
KEYS_PER_REQUEST: Final = 4096


def figures(work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one result: ids a second; also those from a full cache and from in-process pulls."""
    names = [f"t{number}" for number in range(TABLES)]
    with tempfile.TemporaryDirectory() as folder:
        pool = Path(folder) / "pool"
        _make(pool, names, work["rows"])
        with (
            served(Path(folder), pool) as facts,
            petps.open_live(pool) as beside,
            petps_client.connect(
                f"petps://127.0.0.1:{facts['port']}/default", keys_per_request=KEYS_PER_REQUEST
            ) as client,
        ):
            batches = [_batch(names, work, number) for number in range(work["batches"])]
            plain = EmbeddingBagCollection(client, names)
            cached = EmbeddingBagCollection(
                client, names, cache_bytes=1 << 28, staleness_ms=3_600_000
            )
            keys = [
                {name: ids.numpy().ravel().view(np.uint64) for name, ids in batch.items()}
                for batch in batches
            ]

            def in_process(number: int) -> None:
                for name, ids in keys[number].items():
                    beside.pull(name, ids)

            sides: dict[str, Callable[[int], Any]] = {
                "pooled": lambda number: plain(batches[number]),
                "in_process": in_process,
                "cached": lambda number: cached(batches[number]),
            }
            _check(plain, cached, batches[0], beside)
            for batch in batches:  # puts all rows into the cache before the clock starts
                cached(batch)
            id_count = work["batch"] * BAG * TABLES
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(work["rounds"]):
                for name, side in sides.items():
                    rates[name].append(id_count / _median_seconds(side, len(batches)))
    pairs = zip(rates["pooled"], rates["in_process"], strict=True)
    yield {
        "name": "torch.embedding_bag",
        "value": statistics.median(rates["pooled"]),
        "unit": "ids/s",
        "ratio_to": "in-process pull of the same ids",
        "ratio": statistics.median(ours / other for ours, other in pairs),
        "in_process": statistics.median(rates["in_process"]),
        "cached": statistics.median(rates["cached"]),
        "distinct_ids_share": sum(len(np.unique(ids_of_table)) for ids_of_table in keys[0].values())
        / id_count,
    }


def _make(path: Path, names: list[str], rows: int) -> None:
    with petps.create(path, durability="process") as new_pool:
        for number, name in enumerate(names):
            new_pool.create_table(name, dim=DIM, capacity=rows * 5 // 4)
            for first in range(0, rows, LOAD_ROWS):
                keys = np.arange(first, min(first + LOAD_ROWS, rows), dtype=np.uint64)
                values = ((keys[:, None] + number) % 1000).astype(np.float32)
                new_pool.push(name, keys, np.repeat(values, DIM, axis=1))


def _batch(names: list[str], work: dict[str, Any], number: int) -> dict[str, torch.Tensor]:
    """Return {table: int64[batch, BAG]}; low ids are the frequent ones."""
    random = np.random.default_rng(number)
    shape = (work["batch"], BAG)
    return {
        name: torch.from_numpy((random.zipf(1.1, shape) % work["rows"]).astype(np.int64))
        for name in names
    }


def _check(plain: Any, cached: Any, batch: dict[str, torch.Tensor], beside: Any) -> None:
    ours, again = plain(batch), cached(batch)
    for name, ids in batch.items():
        rows = torch.from_numpy(beside.pull(name, ids.numpy().ravel().view(np.uint64)))
        places = torch.arange(len(rows)).reshape(ids.shape)
        expected = torch.nn.functional.embedding_bag(places, rows, mode="sum")
        if not (torch.equal(ours[name], expected) and torch.equal(again[name], expected)):
            raise SystemExit(f"{name} gave wrong rows")


def _median_seconds(side: Callable[[int], Any], batches: int) -> float:
    durations = []
    for number in range(batches):
        began = time.perf_counter()
        side(number)
        durations.append(time.perf_counter() - began)
    return statistics.median(durations)
