"""Pulls for a caller that needs the same tables for each batch, such as a model's embeddings.

Owns:        Puller: it requests each key once and all tables in one call, prefetches the next
             batch, and takes recently pulled rows from a cache.
Never does:  pool rows (petps_client.torch does); know PyTorch.
Called by:   petps_client.torch, and programs that pool rows themselves.
Invariants:  All rows of a pull are of one instance, at least as new as min_version, and requested
             at most staleness_ms ago. This holds for cached and prefetched rows too.
Threads:     pull and prefetch from one thread; a thread of the Puller's own prefetches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps_client import _native
from petps_client.arrays import as_keys
from petps_client.cache import RowCache
from petps_client.client import Client
from petps_client.errors import InvalidArgument, PetpsError
from petps_client.records import OnUnavailable

__all__ = ["Pulled", "Puller"]

Keys = npt.NDArray[np.uint64]

# Limit of prefetched batches: the next one, and one more while the caller uses that one.
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
    unavailable: dict[str, npt.NDArray[np.bool_]]
    """{table: bool[distinct keys]}: for which keys no server answered; they have the default row.
    All False unless ``on_unavailable`` is "default"."""


@dataclass(frozen=True)
class _Prefetch:
    keys: dict[str, Keys]
    pulled: Future[Pulled]


class Puller:
    """A puller of some tables of a model. It requests each key once and all tables in one call.

    The client's URL determines the instance: ``petps://h/ranking`` follows the alias,
    ``petps://h/ranking@7`` is pinned. A pull of at most ``keys_per_request`` distinct keys (an
    option of the client) is one frame for all tables.

    Args:
        client: The client that pulls.
        tables: The names of the tables.
        min_version, wait_ms, deadline_ms, on_unavailable: As in :meth:`Client.pull`. The attribute
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
        on_unavailable: OnUnavailable | None = None,
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
                "a cache needs staleness_ms above 0: the age at which a row is pulled again"
            )
        self.min_version = min_version
        self._client = client
        self.signed_keys: bool = client.signed_keys
        self._options: dict[str, Any] = {
            "wait_ms": wait_ms,
            "deadline_ms": deadline_ms,
            "on_unavailable": on_unavailable,
        }
        self._staleness = staleness_ms / 1000
        self._clock = clock
        self.dims = {table: client.describe(table).dim for table in tables}
        self._cache: RowCache | None = None
        if cache_bytes > 0:
            self._cache = RowCache(cache_bytes, self.dims)
        self._prefetches: deque[_Prefetch] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def pull(self, keys: Mapping[str, npt.ArrayLike]) -> Pulled:
        """Return the rows of {table: integers[n]}, pulled now or earlier by :meth:`prefetch`.

        A missing key has the table's default row. Raises what :meth:`Client.pull` raises.
        """
        key_arrays = self._check_keys(keys)
        for number, prefetch in enumerate(self._prefetches):
            if not _have_same_keys(prefetch.keys, key_arrays):
                continue
            for _ in range(number + 1):
                self._prefetches.popleft()
            try:
                pulled = prefetch.pulled.result()
            except PetpsError:
                break  # pull again: that may succeed, or raise the same error
            if self._is_fresh(pulled):
                return pulled
            break
        return self._pull(key_arrays)

    def prefetch(self, keys: Mapping[str, npt.ArrayLike]) -> None:
        """Begin to pull these keys. The next :meth:`pull` of exactly the same keys takes the rows.

        At most two batches are kept: a third replaces the oldest. The arrays may be changed as
        soon as this returns.
        """
        key_arrays = {
            table: table_keys.copy() for table, table_keys in self._check_keys(keys).items()
        }
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "petps-prefetch")
        if len(self._prefetches) == PREFETCHES_MAX:
            self._prefetches.popleft().pulled.cancel()
        run = copy_context().run  # the active span of the pull is that of this call
        pulled = self._thread.submit(run, self._pull, key_arrays)
        self._prefetches.append(_Prefetch(key_arrays, pulled))

    def _check_keys(self, keys: Mapping[str, npt.ArrayLike]) -> dict[str, Keys]:
        unknown = set(keys) - set(self.dims)
        if unknown:
            raise InvalidArgument(
                f"this puller does not have tables {sorted(unknown)}; it has {list(self.dims)}"
            )
        return {table: as_keys(table_keys, self.signed_keys) for table, table_keys in keys.items()}

    def _is_fresh(self, pulled: Pulled) -> bool:
        if not pulled.instance:  # there were no keys
            return True
        if self._staleness > 0 and self._clock() - pulled.asked > self._staleness:
            return False
        return pulled.applied_version >= self.min_version

    def _pull(self, keys: dict[str, Keys]) -> Pulled:
        distinct_keys, places = {}, {}
        for table, table_keys in keys.items():
            distinct_keys[table], places[table] = _native.distinct(table_keys)
        if not any(map(len, distinct_keys.values())):
            rows = {table: np.empty((0, self.dims[table]), np.float32) for table in distinct_keys}
            pulled = Pulled(rows, places, 0, "", self._clock(), _all_answered(rows))
        elif (cache := self._cache) is None:
            pulled = self._request(distinct_keys)
        else:
            pulled = self._pull_through(cache, distinct_keys)
        return replace(pulled, places=places)

    def _request(self, distinct_keys: dict[str, Keys]) -> Pulled:
        requested_at = self._clock()
        answer = self._client.pull_many_answer(
            distinct_keys, dedup=False, min_version=self.min_version, **self._options
        )
        return Pulled(
            answer.rows,
            {},
            answer.applied_version,
            answer.instance,
            requested_at,
            answer.unavailable,
        )

    def _pull_through(self, cache: RowCache, distinct_keys: dict[str, Keys]) -> Pulled:
        now = self._clock()
        cached = cache.look_up(distinct_keys, now, now - self._staleness, self.min_version)
        missing = {
            table: distinct_keys[table][~hit] for table, hit in cached.hits.items() if not hit.all()
        }
        if not missing:
            return Pulled(
                cached.rows,
                {},
                cached.version,
                cached.instance,
                cached.requested_at,
                _all_answered(cached.rows),
            )
        pulled = self._request(missing)
        is_switched = cached.instance != pulled.instance
        if is_switched and any(hit.any() for hit in cached.hits.values()):
            # The alias resolves to another instance now. A result must not mix two instances.
            missing, pulled = distinct_keys, self._request(distinct_keys)
        if cache.instance != pulled.instance:
            dims = {table: self._client.describe(table).dim for table in self.dims}
            # The described tables may be older than the reply.
            dims |= {table: rows.shape[1] for table, rows in pulled.rows.items()}
            try:
                if cache.reset(pulled.instance, dims, pulled.asked, self._clock()):
                    self.dims = dims
            except InvalidArgument:  # the new rows are longer: continue without a cache
                self._cache, self.dims = None, dims
        # The default rows of unavailable keys are not stored: the keys may have other rows.
        answered = {table: ~mask for table, mask in pulled.unavailable.items()}
        cache.store(
            pulled.instance,
            {table: missing[table][mask] for table, mask in answered.items()},
            {table: pulled.rows[table][mask] for table, mask in answered.items()},
            pulled.asked,
            pulled.applied_version,
        )
        unavailable = _all_answered(cached.rows)
        if is_switched:
            # The union includes the tables without keys.
            return replace(
                pulled,
                rows=cached.rows | pulled.rows,
                unavailable=unavailable | pulled.unavailable,
            )
        for table, rows in pulled.rows.items():
            if len(rows) == len(distinct_keys[table]):  # no key was cached; the dim may differ
                cached.rows[table] = rows
            else:
                cached.rows[table][~cached.hits[table]] = rows
            unavailable[table][~cached.hits[table]] = pulled.unavailable[table]
        has_cached = any(hit.any() for hit in cached.hits.values())
        has_answered = any(mask.any() for mask in answered.values())
        version = min(cached.version, pulled.applied_version)
        if has_cached and not has_answered:  # the rows are those of the cache
            version = cached.version
        return Pulled(
            cached.rows,
            {},
            version,
            pulled.instance,
            min(cached.requested_at, pulled.asked),
            unavailable,
        )


def _all_answered(rows: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.bool_]]:
    return {table: np.zeros(len(table_rows), np.bool_) for table, table_rows in rows.items()}


def _have_same_keys(first: Mapping[str, Keys], second: Mapping[str, Keys]) -> bool:
    return first.keys() == second.keys() and all(
        np.array_equal(keys, second[table]) for table, keys in first.items()
    )
