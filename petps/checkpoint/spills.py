"""Spills: files of rows that wait until all of their partition are known. FORMAT.md, "Spills".

Owns:        Spill, write_spill(), merge_spills().
Never does:  know where rows come from; name a spill in a state.
Called by:   bulk.py, petps.cli.bulk.
Invariants:  merge_spills() yields the newest row of each key, in the order of keys, wherever spills
             begin and end; one that does not match its checksum raises before the last piece. The
             memory is bounded by WINDOW_BYTES, however large the partition is.
Threads:     one for each write_spill() and merge_spills().
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from petps.checkpoint.chunk import ROW, Bytes, Keys, Rows, Table, lay_over
from petps.checkpoint.files import Files
from petps.delta.schema import partition_of
from petps.errors import DataLoss

__all__ = ["SPILL_BYTES", "WINDOW_BYTES", "Spill", "merge_spills", "record_bytes", "write_spill"]

# Rows of a spill. Its writer holds them, and one more copy of their keys and of BLOCK_BYTES.
SPILL_BYTES: Final = 128 << 20
BLOCK_BYTES: Final = 4 << 20
# Rows of all spills that a merge holds at a time. It copies them once.
WINDOW_BYTES: Final = 64 << 20
READ_THREADS: Final = 4  # an object store answers several requests at a time

Records = npt.NDArray[Any]  # of the dtype of _record_type()


@dataclass(frozen=True, slots=True)
class Spill:
    """A file of records, in the order of partitions first, ..., and then of keys.

    bounds: int64[n + 1]: records bounds[i] to bounds[i + 1] are of partition first + i.
    checksums: uint64[n]: XXH3-64 of these records.
    """

    file: str
    first: int
    bounds: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint64]

    def of(self, start: int, stop: int) -> Spill:
        """Return the same file with what is needed for partitions ``start`` to ``stop`` - 1."""
        begin, end = start - self.first, stop - self.first
        return Spill(self.file, start, self.bounds[begin : end + 1], self.checksums[begin:end])


def record_bytes(table: Table) -> int:
    """Return the bytes of a key and its row in a spill."""
    return 8 + table.width


def _record_type(table: Table) -> np.dtype[Any]:
    return np.dtype([("key", "<u8"), (ROW, "u1", (table.width,))])


def write_spill(
    files: Files, path: str, table: Table, keys: Keys, rows: Bytes, partitions: int
) -> Spill:
    """Write rows as a spill of all partitions. Of a repeated key, keep the last row.

    Args:
        files: The files of the store.
        path: A new name.
        table: A table with the column ``row`` only.
        keys: uint64[n] in any order.
        rows: uint8[n, width].
        partitions: P of the model.

    Raise IoError.
    """
    order = np.argsort(keys, kind="stable")
    partition = partition_of(keys, partitions).astype(np.uint16)
    order = order[np.argsort(partition[order], kind="stable")]
    ordered = keys[order]
    is_newest = np.ones(len(order), np.bool_)
    is_newest[:-1] = ordered[1:] != ordered[:-1]
    order = order[is_newest]
    bounds = np.searchsorted(partition[order], np.arange(partitions + 1)).astype(np.int64)
    checksums = np.empty(partitions, np.uint64)

    def blocks() -> Iterator[memoryview]:
        record_type, step = _record_type(table), max(1, BLOCK_BYTES // record_bytes(table))
        for number in range(partitions):
            checksum = xxhash.xxh3_64()
            for start in range(bounds[number], bounds[number + 1], step):
                chosen = order[start : min(start + step, bounds[number + 1])]
                records = np.empty(len(chosen), record_type)
                records["key"] = keys[chosen]
                records[ROW] = rows[chosen]
                block = records.view(np.uint8).data
                checksum.update(block)
                yield block
            checksums[number] = checksum.intdigest()

    files.write(path, blocks())
    return Spill(path, 0, bounds, checksums)


def merge_spills(
    files: Files, table: Table, spills: Sequence[Spill], partition: int
) -> Iterator[Rows]:
    """Yield the rows of a partition in pieces; of a key in several, that of the last.

    A window holds the next records of each spill. What is at most the lowest of the windows' last
    keys is complete: no spill has more of it.

    Raise DataLoss if a spill is gone, cut or altered; raise IoError.
    """
    step = max(1, WINDOW_BYTES // (record_bytes(table) * max(1, len(spills))))
    windows = [_Window(files, table, spill, partition, step) for spill in spills]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        while windows := [window for window in windows if window.has_records]:
            for _ in pool.map(_Window.fill, windows):
                pass
            bound = min((s.last_key for s in windows if s.has_more), default=None)
            rows = lay_over(table, [s.take(bound) for s in windows], keep_deleted=False)
            if len(rows):
                yield rows


class _Window:
    """The records of one partition in one spill, of which it holds the next ``step``."""

    def __init__(self, files: Files, table: Table, spill: Spill, partition: int, step: int) -> None:
        number = partition - spill.first
        self._files = files
        self._run = spill
        self._at, self._end = (int(bound) for bound in spill.bounds[number : number + 2])
        self._step = step
        self._expected = int(spill.checksums[number])
        self._checksum = xxhash.xxh3_64()
        self._records: Records = np.empty(0, _record_type(table))

    @property
    def has_more(self) -> bool:
        """Return whether the file has records that fill() has not read yet."""
        return self._at < self._end

    @property
    def has_records(self) -> bool:
        """Return whether records are left, here or in the file."""
        return self.has_more or len(self._records) > 0

    @property
    def last_key(self) -> int:
        """Return the key of the last record here."""
        return int(self._records["key"][-1])

    def fill(self) -> None:
        """Read records until ``step`` are here, if less than half of them are. Raise DataLoss."""
        if 2 * len(self._records) >= self._step or not self.has_more:
            return
        count = min(self._step - len(self._records), self._end - self._at)
        records = np.empty(count, self._records.dtype)
        content = records.view(np.uint8).data
        self._files.read_into(self._run.file, [(self._at * records.itemsize, content)])
        self._checksum.update(content)
        self._at += count
        if self._at == self._end and self._checksum.intdigest() != self._expected:
            raise DataLoss(
                f"{self._files.name}/{self._run.file} does not fit its checksum: check the disk, "
                "and load again"
            )
        self._records = np.concatenate([self._records, records])

    def take(self, bound: int | None) -> Rows:
        """Remove and return the records up to the key ``bound``; None: all."""
        keys = self._records["key"]
        count = (
            len(keys) if bound is None else int(np.searchsorted(keys, np.uint64(bound), "right"))
        )
        taken, self._records = self._records[:count], self._records[count:]
        return Rows(np.ascontiguousarray(taken["key"]), {ROW: np.ascontiguousarray(taken[ROW])})
