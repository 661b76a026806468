"""Folders: HPS's `key` + `emb_vector`, and a petps checkpoint store, which a base is too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from petps.cli.sources.base import Chunk, chunk_rows
from petps.errors import DataLoss, InvalidArgument, NotFound

__all__ = ["HpsFolder", "StoreTable"]


class HpsFolder:
    """A sparse model of HugeCTR HPS: `key` (int64, raw) and `emb_vector` (float32[n, dim], raw).

    The 64 bits of a key are kept: a negative key becomes the unsigned key with the same bits.
    """

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        key_bytes = (folder / "key").stat().st_size
        row_bytes = (folder / "emb_vector").stat().st_size
        if key_bytes % 8 != 0:
            raise DataLoss(
                f"{folder / 'key'} has {key_bytes:,} bytes, which is no whole number of int64 "
                "keys: it is cut short, or has 32-bit keys"
            )
        self.rows = key_bytes // 8
        if self.rows == 0 and row_bytes == 0:
            raise InvalidArgument(f"{folder} holds no rows")
        if self.rows == 0 or row_bytes == 0 or row_bytes % (4 * self.rows) != 0:
            raise DataLoss(
                f"{folder}: emb_vector has {row_bytes:,} bytes, which is no whole number of "
                f"float32 for each of the {self.rows:,} keys in key: one of the two is cut short"
            )
        self.dim = row_bytes // (4 * self.rows)
        self._folder = folder

    def chunks(self) -> Iterator[Chunk]:
        """See Source."""
        keys = np.memmap(self._folder / "key", dtype="<u8", mode="r", shape=(self.rows,))
        rows = np.memmap(
            self._folder / "emb_vector", dtype="<f4", mode="r", shape=(self.rows, self.dim)
        )
        step = chunk_rows(self.dim)
        for at in range(0, self.rows, step):
            yield np.array(keys[at : at + step]), np.array(rows[at : at + step])


class StoreTable:
    """One table of a version in a checkpoint store or a base; version None selects the newest."""

    def __init__(self, folder: Path, table: str, version: int | None) -> None:
        from petps.checkpoint.base import open_store

        self.name = str(folder)
        self._store = open_store(folder)
        self._version = self._store.state.newest_version if version is None else version
        tables = self._store.tables_of(self._version)
        if table not in tables:
            raise NotFound(f"{folder} has no table '{table}'; it has: {', '.join(tables)}")
        chunks = self._store.state.lineage_of(self._version).of(self._version)
        # Above a base, the store knows the rows written, not the rows that remain.
        has_deltas = any(chunk.layer > 0 for chunk in chunks)
        rows = sum(chunk.rows for chunk in chunks if chunk.table == table)
        self.rows = None if has_deltas else rows
        self._table = table
        self._row = tables[table].columns[0]
        self.dim = self._row.dim

    def chunks(self) -> Iterator[Chunk]:
        """See Source. Quantised rows are decoded to floats."""
        step = chunk_rows(self.dim)
        for rows in self._store.pieces(self._table, self._version, in_key_order=False):
            for at in range(0, len(rows), step):
                part = slice(at, at + step)
                yield rows.keys[part], self._row.values(rows.columns[self._row.name][part])
