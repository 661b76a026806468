"""Parquet and Arrow IPC: a column of integers and a column of lists of floats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from petps.cli.sources.base import (
    KEY_NAMES,
    ROW_NAMES,
    Chunk,
    chunk_rows,
    convert_keys,
    convert_rows,
    pick,
)
from petps.errors import DataLoss, InvalidArgument

__all__ = ["ArrowFile", "ParquetFile"]

FIRST_CHUNK_ROWS = 1024  # rows of a chunk while the dim of a variable-size list is unknown


class _ArrowSource:
    """Common part of Parquet and Arrow IPC: finds columns by name, and cuts batches into chunks."""

    def __init__(
        self, path: Path, schema: pa.Schema, key_column: str | None, row_column: str | None
    ) -> None:
        self.name = str(path)
        self.rows: int | None = None
        self.dim: int | None = None
        self._path = path
        self._key = pick(schema.names, key_column, KEY_NAMES, "key", self.name)
        self._row = pick(schema.names, row_column, ROW_NAMES, "row", self.name)
        kind = schema.field(self._row).type
        if pa.types.is_fixed_size_list(kind):
            self.dim = kind.list_size
        elif not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            raise InvalidArgument(
                f"{path}: column '{self._row}' is {kind}, expected a list of floats"
            )

    def chunks(self) -> Iterator[Chunk]:
        """See Source."""
        done = 0
        try:
            for batch in self._batches():
                keys_column, rows_column = batch.column(self._key), batch.column(self._row)
                at = 0
                while at < batch.num_rows:
                    step = chunk_rows(self.dim) if self.dim else FIRST_CHUNK_ROWS
                    keys = self._keys(keys_column.slice(at, step), done)
                    yield keys, self._rows(rows_column.slice(at, step), done)
                    at += len(keys)
                    done += len(keys)
        except (pa.ArrowException, OSError) as error:
            raise DataLoss(f"{self.name} is damaged: {error}") from None

    def _batches(self) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError

    def _keys(self, column: pa.Array, done: int) -> npt.NDArray[np.uint64]:
        if column.null_count:
            raise InvalidArgument(
                f"{self.name}: column '{self._key}' has a null near row {done:,}; "
                "every row needs a key"
            )
        if not pa.types.is_integer(column.type):
            raise InvalidArgument(
                f"{self.name}: column '{self._key}' is {column.type}, expected integers"
            )
        return convert_keys(column.to_numpy(zero_copy_only=False), self.name)

    def _rows(self, column: pa.Array, done: int) -> npt.NDArray[np.float32]:
        if column.null_count:
            raise InvalidArgument(f"{self.name}: column '{self._row}' has a null near row {done:,}")
        if not pa.types.is_fixed_size_list(column.type):
            self._check_lengths(column, done)
        values = column.flatten()
        if values.null_count:
            raise InvalidArgument(f"{self.name}: a row near row {done:,} has a null in it")
        flat: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
        return convert_rows(flat.reshape(len(column), self.dim or 0), self.name)

    def _check_lengths(self, column: pa.Array, done: int) -> None:
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if self.dim is None:
            self.dim = int(lengths[0])
        wrong = np.flatnonzero(lengths != self.dim)
        if len(wrong) or self.dim == 0:
            where = int(wrong[0]) if len(wrong) else 0
            raise InvalidArgument(
                f"{self.name}: row {done + where:,} has {int(lengths[where])} numbers, "
                f"expected {self.dim or 'at least 1'}"
            )


class ParquetFile(_ArrowSource):
    """A Parquet file. Each read decodes only a part of a row group.

    pyarrow.dataset would decode a whole row group at a time, whatever its size.
    """

    def __init__(self, path: Path, key_column: str | None, row_column: str | None) -> None:
        try:
            with pq.ParquetFile(path) as file:
                schema, rows = file.schema_arrow, file.metadata.num_rows
        except (pa.ArrowException, OSError) as error:
            raise DataLoss(f"{path} is no whole Parquet file: {error}") from None
        super().__init__(path, schema, key_column, row_column)
        self.rows = rows

    def _batches(self) -> Iterator[pa.RecordBatch]:
        step = chunk_rows(self.dim) if self.dim else FIRST_CHUNK_ROWS
        with pq.ParquetFile(self._path, pre_buffer=False) as file:
            yield from file.iter_batches(step, columns=[self._key, self._row], use_threads=False)


class ArrowFile(_ArrowSource):
    """A memory-mapped Arrow IPC file or stream."""

    def __init__(self, path: Path, key_column: str | None, row_column: str | None) -> None:
        try:
            with pa.memory_map(str(path)) as mapped, _open_ipc(mapped) as reader:
                schema = reader.schema
                rows = _rows_of(reader)
        except (pa.ArrowException, OSError) as error:
            raise DataLoss(f"{path} is no whole Arrow file or stream: {error}") from None
        super().__init__(path, schema, key_column, row_column)
        self.rows = rows

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(str(self._path)) as mapped, _open_ipc(mapped) as reader:
            if isinstance(reader, pa.RecordBatchFileReader):
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)
            else:
                yield from reader


def _open_ipc(mapped: Any) -> Any:
    """Return a reader of the file format, or if it is another, of the stream format."""
    try:
        return pa.ipc.open_file(mapped)
    except pa.ArrowInvalid:
        mapped.seek(0)
        return pa.ipc.open_stream(mapped)


def _rows_of(reader: Any) -> int | None:
    if not isinstance(reader, pa.RecordBatchFileReader):
        return None
    total: int = sum(
        reader.get_batch(number).num_rows for number in range(reader.num_record_batches)
    )
    return total
