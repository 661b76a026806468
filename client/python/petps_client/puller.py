"""Pulls for one caller that requests the same tables again and again: a model's embeddings.

Owns:        Puller: it requests each key once and all tables in one call, prefetches the next
             batch, and reads recently pulled rows from a cache.
Never does:  pool rows (petps_client.torch does); know PyTorch.
Called by:   petps_client.torch, and programs that pool rows themselves.
Invariants:  All rows of a pull are of one instance, at least as new as min_version, and requested
             at most staleness_ms ago, whether cached, prefetched or pulled.
Threads:     pull and prefetch from one thread; a thread of the Puller's own prefetches.
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

# Limit of prefetched batches: the next one, and one more while that is being taken.
PREFETCHES_MAX: Final = 2


@dataclass(frozen=True)
class Pulled:
    """Rows of distinct keys, and each key's place: ``rows[t][places[t]]`` is in key order."""

    rows: dict[str, npt.NDArray[np.float32]]
    """{table: float32[distinct keys, dim]}"""
    places: dict[str, npt.NDArray[np.int64]]
    """{table: int64[keys]}"""
    applied_version: int
    """Every row is at least this new; 0: there were no keys."""
    instance: str
    """The instance of all rows; empty when there were no keys."""
    asked: float
    """Request time of the oldest row, by the clock."""


@dataclass(frozen=True)
class _Ahead:
    keys: dict[str, Keys]
    pulled: Future[Pulled]


class Puller:
    """Pulls some tables of a model, each key once and all tables in one call.

    The client's URL determines the instance: ``petps://h/ranking`` follows the alias,
    ``petps://h/ranking@7`` is pinned. A pull of at most ``keys_per_request`` distinct keys (an
    option of the client) is one frame for all tables.

    Args:
        client: The client that pulls.
        tables: The names of the tables.
        min_version, wait_ms, deadline_ms: As in :meth:`Client.pull`. The attribute
            ``min_version`` may be changed later, and applies to cached and prefetched rows too.
        cache_bytes: Limit of the cache of pulled rows, which includes the default rows of missing
            keys; 0: no cache. A cache needs ``staleness_ms``.
        staleness_ms: A row requested longer ago than this, cached or prefetched, is pulled again.
            0: prefetched rows may have any age.
        clock: Returns seconds that never decrease.

    Raises:
        NotFound: A table is unknown; lists the tables.
        InvalidArgument: An option is wrong.
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
        """Return the rows of {table: integers[n]}, pulled now or earlier by :meth:`prefetch`.

        A missing key has the table's default row. Raises what :meth:`Client.pull` raises.
        """
        wanted = self._check_keys(keys)
        for number, ahead in enumerate(self._ahead):
            if not _same(ahead.keys, wanted):
                continue
            for _ in range(number + 1):
                self._ahead.popleft()
            try:
                pulled = ahead.pulled.result()
            except PetpsError:
                break  # pull again: that may succeed, or raise the same error
            if self._is_good(pulled):
                return pulled
            break
        return self._pull(wanted)

    def prefetch(self, keys: Mapping[str, npt.ArrayLike]) -> None:
        """Begin to pull these keys. The next :meth:`pull` of exactly the same keys takes the rows.

        At most two batches are kept: a third replaces the oldest. The arrays may be changed as
        soon as this returns.
        """
        wanted = {table: each.copy() for table, each in self._check_keys(keys).items()}
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "petps-prefetch")
        if len(self._ahead) == PREFETCHES_MAX:
            self._ahead.popleft().pulled.cancel()
        self._ahead.append(_Ahead(wanted, self._thread.submit(self._pull, wanted)))

    def _check_keys(self, keys: Mapping[str, npt.ArrayLike]) -> dict[str, Keys]:
        unknown = set(keys) - set(self.dims)
        if unknown:
            raise InvalidArgument(
                f"tables {sorted(unknown)} are none of this puller's: {', '.join(self.dims)}"
            )
        return {table: as_keys(each) for table, each in keys.items()}

    def _is_good(self, pulled: Pulled) -> bool:
        if not pulled.instance:  # there were no keys
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
            # The alias resolves to another instance now. Rows of two instances must not be mixed.
            left, fresh = distinct, self._ask(distinct)
        if cache.instance != fresh.instance:
            dims = {table: self._client.describe(table).dim for table in self.dims}
            # The described tables may be older than the reply.
            dims |= {table: rows.shape[1] for table, rows in fresh.rows.items()}
            try:
                if cache.begin(fresh.instance, dims, fresh.asked, self._clock()):
                    self.dims = dims
            except InvalidArgument:  # the new rows are longer: continue without a cache
                self._cache, self.dims = None, dims
        cache.keep(fresh.instance, left, fresh.rows, fresh.asked, fresh.applied_version)
        if switched:
            # The union includes the tables without keys.
            return replace(fresh, rows=taken.rows | fresh.rows)
        for table, rows in fresh.rows.items():
            if len(rows) == len(distinct[table]):  # no key was cached, perhaps for another dim
                taken.rows[table] = rows
            else:
                taken.rows[table][~taken.hits[table]] = rows
        version = min(taken.version, fresh.applied_version)
        return Pulled(taken.rows, {}, version, fresh.instance, min(taken.asked, fresh.asked))


def _same(one: Mapping[str, Keys], other: Mapping[str, Keys]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(keys, other[table]) for table, keys in one.items()
    )
