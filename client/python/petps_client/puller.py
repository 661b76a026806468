"""Pulls of one caller that asks for the same tables again and again: a model's embeddings.

Owns:        Puller: each key once, all tables in one call, the next batch ahead of its need, rows
             pulled lately out of a cache.
Never does:  pool rows (petps_client.torch); know PyTorch.
Called by:   petps_client.torch, and programs that pool rows themselves.
Invariants:  all rows of a pull are of one instance, at least as new as min_version, and asked for
             at most staleness_ms ago, wherever they come from.
Threads:     pull and prefetch from one; a thread of its own pulls ahead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps_client import _native
from petps_client.arrays import as_keys
from petps_client.cache import RowCache
from petps_client.client import Client
from petps_client.errors import InvalidArgument, PetpsError

__all__ = ["Pulled", "Puller"]

Keys = npt.NDArray[np.uint64]

# Batches that are pulled ahead at most: the next one, and one more while it is being taken.
PREFETCHES_MAX: Final = 2


@dataclass(frozen=True)
class Pulled:
    """Rows of distinct keys, and where each key's row is: ``rows[t][places[t]]`` are in order."""

    rows: dict[str, npt.NDArray[np.float32]]
    """{table: float32[distinct keys, dim]}"""
    places: dict[str, npt.NDArray[np.int64]]
    """{table: int64[keys]}"""
    applied_version: int
    """Every row is at least that new; 0: no key was asked for."""
    instance: str
    """That all rows are of; empty when no key was asked for."""
    asked: float
    """When the oldest row was asked for, by the clock."""


@dataclass(frozen=True)
class _Ahead:
    keys: dict[str, Keys]
    pulled: Future[Pulled]


class Puller:
    """Pulls some tables of a model, each key once and all tables in one call.

    client: its URL says which instance is pulled from: ``petps://h/ranking`` follows the alias,
    ``petps://h/ranking@7`` is pinned. A pull of at most its ``keys_per_request`` distinct keys is
    one frame, of however many tables.

    min_version, wait_ms, deadline_ms: as in :meth:`Client.pull`; min_version may be set later, and
    holds for cached and prefetched rows too. cache_bytes: 0, or the most that the rows pulled
    lately may take, rows of missing keys included; it needs staleness_ms. staleness_ms: a row that
    was asked for so long ago is pulled again, cached or prefetched; 0: prefetched rows may have any
    age. clock: seconds that never go back.

    Errors: NotFound (a table; lists the tables), InvalidArgument (an option).
    """

    def __init__(
        self,
        client: Client,
        tables: Sequence[str],
        *,
        min_version: int = 0,
        wait_ms: int = 0,
        deadline_ms: int | None = None,
        cache_bytes: int = 0,
        staleness_ms: float = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if cache_bytes < 0 or staleness_ms < 0:
            raise InvalidArgument(
                f"cache_bytes is {cache_bytes} and staleness_ms is {staleness_ms}, "
                "expected 0 or more"
            )
        if cache_bytes > 0 and staleness_ms == 0:
            raise InvalidArgument(
                "a cache needs staleness_ms, the age at which a row is pulled again"
            )
        self.min_version = min_version
        self._client = client
        self._options: dict[str, Any] = {"wait_ms": wait_ms, "deadline_ms": deadline_ms}
        self._staleness = staleness_ms / 1000
        self._clock = clock
        self.dims = {table: client.describe(table).dim for table in tables}
        self._cache: RowCache | None = None
        if cache_bytes > 0:
            self._cache = RowCache(cache_bytes, self.dims)
        self._ahead: deque[_Ahead] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def pull(self, keys: Mapping[str, npt.ArrayLike]) -> Pulled:
        """{table: integers[n]} -> their rows, pulled now, or ahead by :meth:`prefetch`.

        A missing key has the table's default row. Errors: those of :meth:`Client.pull`.
        """
        wanted = self._checked(keys)
        for number, ahead in enumerate(self._ahead):
            if not _same(ahead.keys, wanted):
                continue
            for _ in range(number + 1):
                self._ahead.popleft()
            try:
                pulled = ahead.pulled.result()
            except PetpsError:
                break  # asked for anew, which may go well or tell the same
            if self._is_good(pulled):
                return pulled
            break
        return self._pull(wanted)

    def prefetch(self, keys: Mapping[str, npt.ArrayLike]) -> None:
        """Begins to pull these keys; the next :meth:`pull` of just the same keys takes the answer.

        It is kept for two batches at most: a third takes the place of the oldest. The arrays may be
        changed as soon as this returns.
        """
        wanted = {table: each.copy() for table, each in self._checked(keys).items()}
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "petps-prefetch")
        if len(self._ahead) == PREFETCHES_MAX:
            self._ahead.popleft().pulled.cancel()
        self._ahead.append(_Ahead(wanted, self._thread.submit(self._pull, wanted)))

    def _checked(self, keys: Mapping[str, npt.ArrayLike]) -> dict[str, Keys]:
        unknown = set(keys) - set(self.dims)
        if unknown:
            raise InvalidArgument(
                f"tables {sorted(unknown)} are none of this puller's: {', '.join(self.dims)}"
            )
        return {table: as_keys(each) for table, each in keys.items()}

    def _is_good(self, pulled: Pulled) -> bool:
        if not pulled.instance:  # no keys
            return True
        if self._staleness > 0 and self._clock() - pulled.asked > self._staleness:
            return False
        return pulled.applied_version >= self.min_version

    def _pull(self, keys: dict[str, Keys]) -> Pulled:
        distinct, places = {}, {}
        for table, each in keys.items():
            distinct[table], places[table] = _native.distinct(each)
        if not any(map(len, distinct.values())):
            rows = {table: np.empty((0, self.dims[table]), np.float32) for table in distinct}
            pulled = Pulled(rows, places, 0, "", self._clock())
        elif (cache := self._cache) is None:
            pulled = self._ask(distinct)
        else:
            pulled = self._through(cache, distinct)
        return replace(pulled, places=places)

    def _ask(self, distinct: dict[str, Keys]) -> Pulled:
        asked = self._clock()
        answer = self._client.pull_many_answer(
            distinct, dedup=False, min_version=self.min_version, **self._options
        )
        return Pulled(answer.rows, {}, answer.applied_version, answer.instance, asked)

    def _through(self, cache: RowCache, distinct: dict[str, Keys]) -> Pulled:
        now = self._clock()
        taken = cache.take(distinct, now, now - self._staleness, self.min_version)
        left = {table: distinct[table][~hit] for table, hit in taken.hits.items() if not hit.all()}
        if not left:
            return Pulled(taken.rows, {}, taken.version, taken.instance, taken.asked)
        fresh = self._ask(left)
        switched = taken.instance != fresh.instance
        if switched and any(hit.any() for hit in taken.hits.values()):
            # The alias means another instance by now: no row of the one before stands beside it.
            left, fresh = distinct, self._ask(distinct)
        if cache.instance != fresh.instance:
            dims = {table: self._client.describe(table).dim for table in self.dims}
            # What is described may be older than what answered.
            dims |= {table: rows.shape[1] for table, rows in fresh.rows.items()}
            try:
                if cache.begin(fresh.instance, dims, fresh.asked, self._clock()):
                    self.dims = dims
            except InvalidArgument:  # its rows are longer: it goes on without a cache
                self._cache, self.dims = None, dims
        cache.keep(fresh.instance, left, fresh.rows, fresh.asked, fresh.applied_version)
        if switched:
            return replace(fresh, rows=taken.rows | fresh.rows)  # where no key was asked for too
        for table, rows in fresh.rows.items():
            if len(rows) == len(distinct[table]):  # none was cached, perhaps for another dim
                taken.rows[table] = rows
            else:
                taken.rows[table][~taken.hits[table]] = rows
        version = min(taken.version, fresh.applied_version)
        return Pulled(taken.rows, {}, version, fresh.instance, min(taken.asked, fresh.asked))


def _same(one: Mapping[str, Keys], other: Mapping[str, Keys]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(keys, other[table]) for table, keys in one.items()
    )
