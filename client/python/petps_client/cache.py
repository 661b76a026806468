"""A cache of recently pulled rows for one caller's tables.

Owns:        RowCache.
Never does:  pull; decide how old a row may be (the caller passes that with each lookup).
Called by:   petps_client.puller.
Invariants:  The cache never exceeds the bytes given at its creation, and holds rows of one
             instance only. A row's age counts from the moment before its request, so no row is
             older than the cache says. An older row never replaces a newer one. The instance of an
             earlier request never replaces that of a later one.
Threads:     any.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps_client.errors import InvalidArgument

__all__ = ["RowCache"]

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
TableNumbers = npt.NDArray[np.uint32]

# Places in a key's set. With 8, when half of the capacity is used, 8 keys in 1,000 find no place.
WAYS: Final = 8
# Bytes beside a row's values: key, table, version, time of request, time of last use.
ENTRY_BYTES: Final = 8 + 4 + 8 + 8 + 8

_VERSION_MAX: Final = (1 << 64) - 1
_NO_KEYS: Final = np.empty(0, np.uint64)


@dataclass
class CachedRows:
    """The result of RowCache.look_up()."""

    instance: str
    """The instance of the rows; empty before the first."""
    hits: dict[str, Mask]
    """{table: bool[n]}: which keys were found."""
    rows: dict[str, Rows]
    """{table: float32[n, dim]}; undefined where a key was not found."""
    requested_at: float
    """Request time of the oldest row found; the time of the lookup if none was found."""
    version: int
    """The lowest version of the rows found; 2**64 - 1 if none was found."""


class RowCache:
    """A cache of rows of several tables, {name: dim}, in at most ``bytes_max`` bytes.

    The places for rows form sets. A new row whose set is full replaces the least recently used row
    of the set. Tables with the same dim share their sets, and every table contributes the same
    number of sets. The operating system provides memory on the first write.

    Raises:
        InvalidArgument: The bytes do not hold one set of places for each table.
    """

    def __init__(self, bytes_max: int, dims: Mapping[str, int]) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._reset_at = -math.inf
        self.reset("", dims, -math.inf, -math.inf)

    @property
    def instance(self) -> str:
        """The instance of the rows; empty before the first."""
        with self._lock:
            return self._instance

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; at most ``bytes_max``."""
        with self._lock:
            return sum(places.nbytes for places in self._places.values())

    def reset(
        self, instance: str, dims: Mapping[str, int], requested_at: float, now: float
    ) -> bool:
        """Delete all rows, and accept rows of ``instance``, whose tables have these dims.

        Args:
            instance: The name of the new instance.
            dims: {table: dim}.
            requested_at: The time before the request whose reply named the instance.
            now: The time of this call.

        Returns:
            False, and the cache is unchanged, if reset() was called after ``requested_at``. The
            order of the two replies is then unknown, and the cache never returns to an older
            instance.

        Raises:
            InvalidArgument: The bytes do not hold one set of places for each table.
        """
        entry_bytes = sum(ENTRY_BYTES + 4 * dim for dim in dims.values())
        sets_per_table = self._bytes_max // max(1, entry_bytes * WAYS)
        with self._lock:
            if requested_at < self._reset_at:
                return False
            if sets_per_table == 0:
                raise InvalidArgument(
                    f"a cache of {self._bytes_max} bytes is too small for {len(dims)} tables: "
                    f"cache_bytes must be at least {entry_bytes * WAYS}"
                )
            self._reset_at = now
            self._instance = instance
            self._places = {
                dim: _Places(
                    sets_per_table * sum(other_dim == dim for other_dim in dims.values()), dim
                )
                for dim in set(dims.values())
            }
            self._dims = {name: int(dim) for name, dim in dims.items()}
            self._numbers = {name: number for number, name in enumerate(dims, 1)}
            return True

    def look_up(
        self, keys: Mapping[str, Keys], now: float, oldest: float, min_version: int
    ) -> CachedRows:
        """Return the rows of distinct keys that are recent enough. Set their last use to ``now``.

        A row is recent enough if it was requested at ``oldest`` or later, and its version is at
        least ``min_version``.
        """
        with self._lock:
            cached = CachedRows(self._instance, {}, {}, now, _VERSION_MAX)
            for dim, places in self._places.items():
                tables = [table for table in keys if self._dims[table] == dim]
                if not tables:
                    continue
                group = _Group(self._numbers, tables, keys)
                indices, hit = places.find(group.numbers, group.keys)
                hit &= (places.requested_at[indices] >= oldest) & (
                    places.version[indices] >= min_version
                )
                hit_indices = indices[hit]
                places.used[hit_indices] = now
                cached.hits |= group.by_table(hit)
                cached.rows |= group.by_table(places.rows.take(indices, axis=0))
                if len(hit_indices) > 0:
                    cached.requested_at = min(
                        cached.requested_at, float(places.requested_at[hit_indices].min())
                    )
                    cached.version = min(cached.version, int(places.version[hit_indices].min()))
            return cached

    def store(
        self,
        instance: str,
        keys: Mapping[str, Keys],
        rows: Mapping[str, Rows],
        requested_at: float,
        version: int,
    ) -> None:
        """Store rows of distinct keys, unless their instance or dim is not that of the cache."""
        with self._lock:
            if instance != self._instance:
                return
            for dim, places in self._places.items():
                tables = [
                    table for table in keys if self._dims[table] == dim == rows[table].shape[1]
                ]
                if not tables:
                    continue
                group = _Group(self._numbers, tables, keys)
                values = np.concatenate([rows[table] for table in tables])
                places.store(group.numbers, group.keys, values, requested_at, version)


class _Group:
    """The concatenated keys of several tables, with the number of each key's table."""

    def __init__(
        self, numbers: Mapping[str, int], tables: list[str], keys: Mapping[str, Keys]
    ) -> None:
        self._tables = tables
        lengths = [len(keys[table]) for table in tables]
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self.keys = np.concatenate([_NO_KEYS, *(keys[table] for table in tables)])
        table_numbers = np.array([numbers[table] for table in tables], np.uint32)
        self.numbers = np.repeat(table_numbers, lengths)

    def by_table(self, array: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """Split an array with one element per key into {table: its part} (views)."""
        return dict(zip(self._tables, np.split(array, self._ends[:-1]), strict=True))


class _Places:
    """Sets of WAYS places for rows of one dim. A key's hash determines its set."""

    def __init__(self, sets: int, dim: int) -> None:
        count = sets * WAYS
        self.sets = sets
        self.key = np.zeros(count, np.uint64)
        self.table = np.zeros(count, np.uint32)  # 0: the place is free
        self.version = np.zeros(count, np.uint64)
        self.requested_at = np.zeros(count, np.float64)
        self.used = np.zeros(count, np.float64)
        self.rows = np.empty((count, dim), np.float32)

    @property
    def nbytes(self) -> int:
        arrays = (self.key, self.table, self.version, self.requested_at, self.used, self.rows)
        return sum(array.nbytes for array in arrays)

    def find(self, tables: TableNumbers, keys: Keys) -> tuple[npt.NDArray[np.int64], Mask]:
        """Return (int64[n] index, bool[n] is found) of keys. Other indices are undefined."""
        sets = self._set(tables, keys)
        is_match = self.key.reshape(-1, WAYS).take(sets, axis=0) == keys[:, None]
        is_match &= self.table.reshape(-1, WAYS).take(sets, axis=0) == tables[:, None]
        way = is_match.argmax(axis=1)
        return sets * WAYS + way, is_match[np.arange(len(keys)), way]

    def store(
        self, tables: TableNumbers, keys: Keys, rows: Rows, requested_at: float, version: int
    ) -> None:
        indices, is_stored = self.find(tables, keys)
        has_newer = is_stored & (self.requested_at[indices] > requested_at)
        new_positions = np.flatnonzero(~is_stored)
        sets = self._set(tables[new_positions], keys[new_positions])
        order = np.argsort(sets, kind="stable")
        new_positions, sets = new_positions[order], sets[order]
        # The new keys of a set take its least recently used places, in order.
        begins = np.flatnonzero(np.r_[True, sets[1:] != sets[:-1]]) if len(sets) else sets
        rank = np.arange(len(sets)) - np.repeat(begins, np.diff(np.r_[begins, len(sets)]))
        fits = rank < WAYS
        new_positions, sets, rank = new_positions[fits], sets[fits], rank[fits]
        ways = np.argsort(self.used.reshape(-1, WAYS).take(sets, axis=0), axis=1, kind="stable")
        indices[new_positions] = sets * WAYS + ways[np.arange(len(new_positions)), rank]
        is_written = is_stored & ~has_newer
        is_written[new_positions] = True
        written_indices = indices[is_written]
        self.key[written_indices] = keys[is_written]
        self.table[written_indices] = tables[is_written]
        self.version[written_indices] = version
        self.requested_at[written_indices] = requested_at
        self.used[written_indices] = requested_at
        self.rows[written_indices] = rows[is_written]

    def _set(self, tables: TableNumbers, keys: Keys) -> npt.NDArray[np.int64]:
        """Return each key's set. splitmix64's finalizer spreads keys that are near each other."""
        hashes: Any = keys ^ (tables * np.uint64(0x9E3779B97F4A7C15))
        hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashes ^= hashes >> np.uint64(31)
        sets: npt.NDArray[np.int64] = (hashes % np.uint64(self.sets)).astype(np.int64)
        return sets
