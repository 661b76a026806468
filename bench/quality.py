"""Figures that do not depend on the clock: bucket reads per hit, and bytes per row."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import petps_client

from bench import DEADLINE_MS
from petps import _native

Keys = npt.NDArray[np.uint64]
BATCH = 50_000
PULL = 500


def _table(
    rows: int, dim: int, *, background: bool = False
) -> tuple[_native.Tables, _native.Table]:
    tables = _native.Tables.create("", background=background)
    instance = tables.create_instance("bench", "bench@1", 1)
    table = tables.create_table("t", instance=instance.id, dim=dim, dtype="f32", capacity=rows)
    return tables, table


def _add(table: _native.Table, keys: Keys) -> None:
    for begin in range(0, len(keys), BATCH):
        part = keys[begin : begin + BATCH]
        rows = np.zeros((len(part), table.row_bytes), dtype=np.uint8)
        report = table.apply(part, rows)
        assert report.inserted == len(part), report.as_dict()


def _erase(table: _native.Table, keys: Keys) -> None:
    for begin in range(0, len(keys), BATCH):
        part = keys[begin : begin + BATCH]
        report = table.apply(part, None, np.ones(len(part), dtype=np.bool_))
        assert report.deleted == len(part), report.as_dict()


def _reads_per_hit(table: _native.Table, keys: Keys) -> float:
    reads, hits = table.bucket_reads(keys)
    assert hits == len(keys)
    return reads / hits


def _zipf(rng: np.random.Generator, n: int, draws: int) -> npt.NDArray[np.int64]:
    """Return int64[draws]: ranks drawn from Zipf 0.99 over `n` items."""
    weights: npt.NDArray[np.float64] = np.cumsum(1.0 / np.arange(1, n + 1) ** 0.99)
    ranks = np.searchsorted(weights, rng.random(draws) * weights[-1])
    ranked: npt.NDArray[np.int64] = np.minimum(ranks, n - 1).astype(np.int64)
    return ranked


def bucket_reads(workload: dict[str, Any], seed: int = 1) -> dict[str, float]:
    """Return the bucket reads per hit of a table at load 0.8, by case.

    ``uniform``: all keys of a fresh table. ``zipf099_before`` and ``zipf099``: Zipf 0.99 draws
    before and after hot placement. ``churned_before`` and ``churned``: all keys, before and after
    re-homing, once every key has been replaced ``replacements`` times. Replacing deletes a batch
    of keys and then adds as many new ones.
    """
    rng = np.random.default_rng(seed)
    rows = int(workload["rows"])
    _, table = _table(rows, dim=2)
    keys = rng.permutation(rows * 2)[:rows].astype(np.uint64)
    _add(table, keys)
    figures = {"uniform": _reads_per_hit(table, keys)}

    # Popularity must not depend on insertion order: the keys inserted first are all in their home
    # buckets.
    popular = rng.permutation(keys)
    drawn = popular[_zipf(rng, rows, int(workload["pulls"]))]
    # Other draws, from which the hot keys are chosen: clients report keys that they pulled before.
    sample = popular[_zipf(rng, rows, int(workload["pulls"]))]
    sample_keys, counts = np.unique(sample, return_counts=True)
    hot = sample_keys[np.argsort(-counts, kind="stable")[: int(workload["hot_keys"])]]
    figures["zipf099_before"] = _reads_per_hit(table, drawn)
    table.migrate(hot)
    figures["zipf099"] = _reads_per_hit(table, drawn)

    next_key = np.uint64(rows * 2)
    for _ in range(int(workload["replacements"])):
        order = rng.permutation(rows)
        for begin in range(0, rows, BATCH):
            positions = order[begin : begin + BATCH]
            _erase(table, keys[positions])
            new_keys = np.arange(next_key, next_key + np.uint64(len(positions)), dtype=np.uint64)
            next_key += np.uint64(len(positions))
            _add(table, new_keys)
            keys[positions] = new_keys
    figures["churned_before"] = _reads_per_hit(table, keys)
    table.rehome()
    figures["churned"] = _reads_per_hit(table, keys)
    return figures


def served_bucket_reads(workload: dict[str, Any], seed: int = 2) -> dict[str, float]:
    """Return the bucket reads per hit after several clients pulled from a server for a while.

    Clients and server have their defaults: clients sample their pulls and send hot sets, the
    server merges them and moves keys home. ``value_before``: before the first pull.
    """
    rng = np.random.default_rng(seed)
    rows = int(workload["rows"])
    tables, table = _table(rows, dim=2, background=True)
    keys = rng.permutation(rows * 2)[:rows].astype(np.uint64)
    _add(table, keys)
    popular = rng.permutation(keys)
    drawn = popular[_zipf(rng, rows, int(workload["pulls"]))]
    before = _reads_per_hit(table, drawn)
    server = _native.Server.start(tables, port=0)
    url = f"petps://127.0.0.1:{server.port}/bench"
    ends_at = time.monotonic() + float(workload["served_seconds"])
    clients = int(workload["served_clients"])
    with ThreadPoolExecutor(clients) as pool:
        draws = [popular[_zipf(rng, rows, int(workload["pulls"]))] for _ in range(clients)]
        list(pool.map(lambda mine: _pull_until(ends_at, url, mine), draws))
    after = _reads_per_hit(table, drawn)
    server.stop()
    tables.close()
    return {"value": after, "value_before": before, "clients": clients}


def _pull_until(ends_at: float, url: str, keys: Keys) -> None:
    with petps_client.connect(url, deadline_ms=DEADLINE_MS) as client:
        for begin in itertools.cycle(range(0, len(keys) - PULL + 1, PULL)):
            if time.monotonic() > ends_at:
                return
            client.pull("t", keys[begin : begin + PULL])


def overhead_bytes_per_row(workload: dict[str, Any]) -> dict[str, float]:
    """Return the bytes per row beyond the row itself at load 0.8, in all and by part.

    The parts are the index, the headers and the allocator (in the pool and in DRAM).
    """
    rows = int(workload["rows"])
    _, table = _table(rows, int(workload["dim"]))
    _add(table, np.arange(rows, dtype=np.uint64))
    status = table.status()
    assert status.rows == status.capacity == rows
    # The allocator's bytes are the maps and bits of free slots, not the free slots themselves.
    index_and_headers = status.index_bytes + status.header_bytes
    total = index_and_headers + status.allocator_bytes
    return {
        "value": total / rows,
        "index": status.index_bytes / rows,
        "headers": status.header_bytes / rows,
        "allocator": status.allocator_bytes / rows,
    }
