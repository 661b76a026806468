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

    def __init__(self, store_name: Path | str, table: str, version: int | None) -> None:
        """Open the store at a path or, if the name is a string, at a URL."""
        from petps.checkpoint import Store
        from petps.checkpoint.base import Base, open_store

        self.name = str(store_name)
        store = Store.open(store_name) if isinstance(store_name, str) else open_store(store_name)
        self._base = Base(store, store.state.newest_version if version is None else version)
        schemas = self._base.schemas()
        if table not in schemas:
            raise NotFound(f"{store_name} has no table '{table}'; it has: {', '.join(schemas)}")
        # Deltas hold the rows that were written, not the rows that remain.
        self.rows = None if self._base.has_deltas else self._base.rows(table)
        self._schema = schemas[table]
        self.dim = self._schema.dim

    def chunks(self) -> Iterator[Chunk]:
        """See Source. Quantised rows are decoded to floats."""
        from petps import _native

        step = chunk_rows(self.dim)
        for keys, stored in self._base.chunks(self._schema.name):
            for at in range(0, len(keys), step):
                part = np.ascontiguousarray(stored[at : at + step])
                yield keys[at : at + step], _native.decode_rows(self._schema.dtype, self.dim, part)
