"""Six policies over one trace: the cost to write a version, to store it and to go back to it.

The trace is the accesses of Twitter's cluster 52, cut into one interval for each version; an
interval changes the rows that it touches. As in IncrCP's table, the load, construction and storage
of bases are left out for every policy, and the naive incremental (`consecutive`) never begins a new
base. Each result also has the storage with bases, and the number of bases. A recovery reads a
version's rows above its base and writes them to the trainer's array, oldest chunk first; the page
cache holds the files for all policies. `full` has only bases, so it is measured with them.
Arranging (splits, merges) runs behind a trainer, and each result lists it separately.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from examples.demo.trace import load_trace
from petps.checkpoint import POLICIES, Checkpointer, Policy, Store, Table
from petps.checkpoint.chunk import Bytes, Keys, Mask
from petps.checkpoint.policy import Merged, TwoD
from petps.checkpoint.store import BASE

NAIVE = "consecutive"
REFERENCE = "intermittent"


class Trainer:
    """A Source: one array of rows, and the version that last changed each row."""

    def __init__(self, keys: int, dim: int) -> None:
        self.values = np.random.default_rng(0).random((keys, dim), np.float32)
        self.changed = np.zeros(keys, np.int64)

    def step(self, version: int, keys: Keys) -> None:
        """Change rows at a version."""
        places = keys.astype(np.int64)
        self.values[places] += 1
        self.changed[places] = version

    def keys(self, table: str, since: int | None) -> Keys:
        """See petps.checkpoint.Source."""
        del table
        chosen = self.changed >= 0 if since is None else self.changed > since
        return np.flatnonzero(chosen).astype(np.uint64)

    def rows(self, table: str, keys: Keys) -> tuple[Mapping[str, Bytes], Mask | None]:
        """See petps.checkpoint.Source."""
        del table
        rows = self.values[keys.astype(np.int64)]
        return {"row": rows.view(np.uint8).reshape(len(keys), -1)}, None


def cut_intervals(accesses: np.ndarray[Any, Any], count: int) -> list[Keys]:
    """Return the distinct keys of ``count`` consecutive parts of the accesses."""
    return [np.unique(part).astype(np.uint64) for part in np.array_split(accesses, count)]


def figures(work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield checkpoint.recovery, .storage and .construct of each policy.

    Yield them for three policies over a Zipf trace too. Then yield checkpoint.without.<part>: the
    time to arrange 2-D chunks without one of their parts.
    """
    accesses = load_trace().accesses
    intervals = cut_intervals(accesses[: work["accesses"]], work["versions"])
    keys = int(accesses.max()) + 1
    every = (NAIVE, REFERENCE, *(set(POLICIES) - {NAIVE, REFERENCE}))
    yield from _compare("checkpoint", every, intervals, keys, work["dim"])
    zipf = _zipf(work["zipf_keys"], work["zipf_accesses"], work["versions"])
    three = (NAIVE, REFERENCE, "2d")
    yield from _compare("checkpoint.zipf", three, zipf, work["zipf_keys"], work["dim"])
    yield from _ablations(intervals, keys, work["dim"])


def _zipf(keys: int, accesses: int, count: int) -> list[Keys]:
    """Return intervals of Zipf accesses, exponent 0.99; the hot keys are anywhere among all."""
    rng = np.random.default_rng(2)
    weights = np.arange(1, keys + 1) ** -0.99
    ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(accesses))
    return cut_intervals(rng.permutation(keys)[np.minimum(ranks, keys - 1)], count)


def _measure_in_folder(
    policy: Policy, intervals: list[Keys], keys: int, dim: int
) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="petps-bench-") as folder:
        return _measure(Path(folder) / "store", policy, intervals, keys, dim)


def _compare(
    prefix: str, policies: Iterable[str], intervals: list[Keys], keys: int, dim: int
) -> Iterator[dict[str, Any]]:
    measured = {}
    for name in policies:
        policy = Merged(stride=2) if name == "merged" else POLICIES[name]()
        measured[name] = _measure_in_folder(policy, intervals, keys, dim)
    for figure, unit, reference in (
        ("recovery", "ms", NAIVE),
        ("storage", "MB", REFERENCE),
        ("construct", "ms", NAIVE),
    ):
        for name, result in measured.items():
            against = measured[reference][figure]
            yield {
                "name": f"{prefix}.{figure}.{name}",
                "value": result[figure],
                "unit": unit,
                "ratio_to": reference,
                "ratio": result[figure] / against if against else None,
                **{key: value for key, value in result.items() if key != figure},
            }


def _ablations(intervals: list[Keys], keys: int, dim: int) -> Iterator[dict[str, Any]]:
    """Yield IncrCP's Figure 14: one part left out. No policy resets, so the lines are equal."""
    whole = TwoD(resets=False)
    without = {
        "key_range": TwoD(resets=False, by_range=False),
        "bloom": TwoD(resets=False, by_bloom=False),
        "count": TwoD(resets=False, by_count=False),
        "bundles": TwoD(resets=False, bundles=False),
    }
    reference = _measure_in_folder(whole, intervals, keys, dim)
    for name, policy in without.items():
        result = _measure_in_folder(policy, intervals, keys, dim)
        yield {
            "name": f"checkpoint.without.{name}",
            "value": result["arrange_ms"],
            "unit": "ms",
            "ratio_to": "with it",
            "ratio": result["arrange_ms"] / reference["arrange_ms"],
            "recovery_ratio": result["recovery"] / reference["recovery"],
            "storage_ratio": result["storage"] / reference["storage"],
            "construct_ratio": result["construct"] / reference["construct"],
            "chunks_read": policy.filters.by_bloom,
            "chunks_read_with_it": whole.filters.by_bloom,
            "chunks_split": policy.filters.split,
            "chunks_split_with_it": whole.filters.split,
        }


def _measure(
    folder: Path, policy: Policy, intervals: list[Keys], keys: int, dim: int
) -> dict[str, float]:
    store = Store.create(folder, "bench", [Table.of("items", dim)])
    trainer = Trainer(keys, dim)
    writer = Checkpointer(store, policy, trainer)
    writer.write(1)
    construct, arrange = [], []
    with_bases = policy.name == "full"  # this policy writes only bases
    for version, changed in enumerate(intervals, 2):
        trainer.step(version, changed)
        began = time.perf_counter()
        info = writer.write(version)
        if info.kind != BASE or with_bases:
            construct.append(time.perf_counter() - began)
        began = time.perf_counter()
        writer.arrange()
        arrange.append(time.perf_counter() - began)
    recovery, loaded = [], []
    state = np.zeros((keys, 4 * dim), np.uint8)
    state += 1  # touch its pages before the clock starts
    for version in range(2, len(intervals) + 2):
        seconds, rows = recover(store, version, state, repeats=3, above_base=not with_bases)
        recovery.append(seconds)
        loaded.append(rows)
    _check(store, trainer)
    return {
        "recovery": statistics.fmean(recovery) * 1e3,
        "storage": store.stored_bytes(base=with_bases) / 1e6,
        "construct": statistics.fmean(construct) * 1e3 if construct else 0.0,
        "recovery_highest_ms": max(recovery) * 1e3,
        "rows_loaded": statistics.fmean(loaded),
        "arrange_ms": statistics.fmean(arrange) * 1e3,
        "bases": len(store.state.lineages),
        "storage_with_bases_mb": store.stored_bytes() / 1e6,
    }


def recover(
    store: Store, version: int | None, array: Bytes, *, repeats: int, above_base: bool
) -> tuple[float, int]:
    """Read a version into an array; return the seconds of the best repeat, and the rows read."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        layers = store.layers(version, above_base=above_base)["items"]
        for rows in layers:
            array[rows.keys.astype(np.int64)] = rows.columns["row"]
        times.append(time.perf_counter() - began)
    return min(times), sum(len(rows) for rows in layers)


def _check(store: Store, trainer: Trainer) -> None:
    """Exit if the newest version does not restore to the trainer's array."""
    rows = store.restore()["items"]
    same = rows.columns["row"].view(np.float32).reshape(len(rows), -1)
    if not np.array_equal(same, trainer.values[rows.keys.astype(np.int64)]):
        raise SystemExit("the newest version is not what the trainer had")
