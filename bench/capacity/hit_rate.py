"""Hit rates of a full table that evicts, beside those of exact policies.

A client reads through the table: it pulls a batch, and pushes the rows that were missing. Every
policy sees the same batches. A batch is looked up before any of its missing keys is stored.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from examples.demo.trace import load_trace
from petps import _native

Keys = npt.NDArray[np.uint64]

BATCH: Final = 256
DIM: Final = 4
RULES: Final = ("evict_oldest", "evict_coldest")


class Policy(ABC):
    """A cache of ``capacity`` keys, fed by batches."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def batch(self, keys: Sequence[int], first: int) -> int:
        """Look the keys up, then store the missing ones. Return the hits.

        first: The position of the first key in the trace.
        """


class Lru(Policy):
    """Evict the key that was looked up longest ago."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._held: OrderedDict[int, None] = OrderedDict()

    def batch(self, keys: Sequence[int], first: int) -> int:
        """See Policy."""
        hits = sum(key in self._held for key in keys)
        for key in keys:
            self._held[key] = None
            self._held.move_to_end(key)
        while len(self._held) > self.capacity:
            self._held.popitem(last=False)
        return hits


class Lfu(Policy):
    """Evict the key that was looked up least often so far, also before it was stored."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._held: set[int] = set()
        self._count: Counter[int] = Counter()
        self._heap: list[tuple[int, int]] = []  # (count, key); older counts are stale

    def batch(self, keys: Sequence[int], first: int) -> int:
        """See Policy."""
        hits = sum(key in self._held for key in keys)
        for key in keys:
            self._count[key] += 1
            self._held.add(key)
            heapq.heappush(self._heap, (self._count[key], key))
        while len(self._held) > self.capacity:
            count, key = heapq.heappop(self._heap)
            if key in self._held and count == self._count[key]:
                self._held.remove(key)
        return hits


class Belady(Policy):
    """Evict the key whose next lookup is farthest in the future: no policy has more hits."""

    def __init__(self, capacity: int, following: npt.NDArray[np.int64]) -> None:
        super().__init__(capacity)
        self._following = following
        self._next: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def batch(self, keys: Sequence[int], first: int) -> int:
        """See Policy."""
        hits = sum(key in self._next for key in keys)
        for at, key in enumerate(keys, start=first):
            self._next[key] = int(self._following[at])
            heapq.heappush(self._heap, (-self._next[key], key))
        while len(self._next) > self.capacity:
            later, key = heapq.heappop(self._heap)
            if self._next.get(key) == -later:
                del self._next[key]
        return hits


class Table(Policy):
    """A table of petps."""

    def __init__(self, capacity: int, rule: str) -> None:
        super().__init__(capacity)
        self._tables = _native.Tables.create("")
        instance = self._tables.create_instance("bench", "bench@1", 1)
        self._table = self._tables.create_table(
            "t", instance=instance.id, dim=DIM, dtype="f32", capacity=capacity
        )
        self._tables.set_when_full(self._table.id, rule)
        self._out = np.empty((BATCH, DIM), np.float32)
        self._mask = np.empty(BATCH, np.bool_)

    def batch(self, keys: Sequence[int], first: int) -> int:
        """See Policy."""
        wanted = np.array(keys, np.uint64)
        mask = self._mask[: len(wanted)]
        hits = self._table.pull(wanted, self._out[: len(wanted)], mask)
        missing = np.unique(wanted[~mask])
        if len(missing):
            report = self._table.apply(
                missing, np.zeros((len(missing), self._table.row_bytes), np.uint8)
            )
            assert report.refused == 0, report.as_dict()
        return hits

    def close(self) -> None:
        """Close the pool."""
        self._tables.close()


def _following(trace: Keys) -> npt.NDArray[np.int64]:
    """Return int64[n]: the position of the next access of the same key; n if there is none."""
    order = np.argsort(trace, kind="stable")
    following = np.full(len(trace), len(trace), np.int64)
    same = trace[order[1:]] == trace[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


def _hit_rate(policy: Policy, trace: Keys) -> float:
    """Return the share of hits in the second half: in the first half the cache fills."""
    half = len(trace) // 2 // BATCH * BATCH
    hits = 0
    for start in range(0, len(trace), BATCH):
        found = policy.batch(trace[start : start + BATCH].tolist(), start)
        hits += found if start >= half else 0
    return hits / (len(trace) - half)


def zipf_trace(rng: np.random.Generator, keys: int, accesses: int, exponent: float = 0.99) -> Keys:
    """Return uint64[accesses] of ``keys`` keys, whose popularity changes place half way.

    A tenth of the keys swaps ranks with others then, so a policy must forget.
    """
    weights = np.cumsum(1.0 / np.arange(1, keys + 1) ** exponent)
    ranks = np.searchsorted(weights, rng.random(accesses) * weights[-1]).clip(0, keys - 1)
    names = rng.permutation(keys)
    later = names.copy()
    moved = rng.choice(keys, keys // 10, replace=False)
    later[moved] = names[rng.permutation(moved)]
    half = accesses // 2
    return np.concatenate([names[ranks[:half]], later[ranks[half:]]]).astype(np.uint64)


def figures(sizes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield capacity.hit_rate.<policy>.<share>, of the demo's trace and of a Zipf trace.

    value: the hit rate of the demo's trace; zipf: that of the Zipf trace; of_lru, of_lfu and
    of_belady: ours / theirs, on the demo's trace.
    """
    demo = load_trace()
    rng = np.random.default_rng(1)
    traces = {
        "demo": demo.keys[demo.accesses[: sizes["accesses"]]],
        "zipf": zipf_trace(rng, sizes["zipf_keys"], sizes["accesses"]),
    }
    for percent in sizes["percent"]:
        rates: dict[str, dict[str, float]] = {}
        for name, trace in traces.items():
            capacity = max(64, len(np.unique(trace)) * percent // 100)
            exact: dict[str, Policy] = {
                "lru": Lru(capacity),
                "lfu": Lfu(capacity),
                "belady": Belady(capacity, _following(trace)),
            }
            rates[name] = {policy: _hit_rate(cache, trace) for policy, cache in exact.items()}
            for rule in RULES:
                table = Table(capacity, rule)
                rates[name][rule] = _hit_rate(table, trace)
                table.close()
        for policy in (*RULES, "lru", "lfu", "belady"):
            own = rates["demo"][policy]
            yield {
                "name": f"capacity.hit_rate.{policy}.{percent}",
                "value": own,
                "unit": "of accesses",
                "zipf": rates["zipf"][policy],
                **{f"of_{other}": own / rates["demo"][other] for other in ("lru", "lfu", "belady")},
            }
