"""Parquet and Arrow IPC: a column of integers and a column of lists of floats."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from petps.cli.sources.base import (
    KEY_NAMES,
    ROW_NAMES,
    Chunk,
    Columns,
    chunk_rows,
    convert_keys,
    convert_rows,
    pick,
)
from petps.cli.sources.place import Place
from petps.errors import DataLoss, FailedPrecondition, InvalidArgument, IoError, PetpsError

__all__ = ["ArrowFile", "ParquetFile"]

BUFFER_BYTES = 4 << 20  # of a column that is read
FIRST_CHUNK_ROWS = 1024  # rows of a chunk while the dim of a variable-size list is unknown


def _fault(damage: str, name: str, error: Exception) -> PetpsError:
    """Return IoError if the system could not read the file, else DataLoss."""
    if isinstance(error, FileNotFoundError):
        return IoError(
            f"{name} is gone, or this machine does not see it: give every machine of a load the "
            "same folders, or name an object store"
        )
    if isinstance(error, OSError) and error.errno:
        return IoError(f"{name} cannot be read: {error}")
    return DataLoss(f"{damage}: {error}")


class _ArrowSource:
    """Common part of Parquet and Arrow IPC: finds columns by name, and cuts batches into chunks."""

    def __init__(self, place: Place, schema: pa.Schema, columns: Columns) -> None:
        self.name = place.name
        self.rows: int | None = None
        self.dim: int | None = None
        self._place = place
        self._has_signed_keys = columns.has_signed_keys
        self._key = pick(schema.names, columns.key, KEY_NAMES, "key", self.name)
        self._row = pick(schema.names, columns.row, ROW_NAMES, "row", self.name)
        kind = schema.field(self._row).type
        if pa.types.is_fixed_size_list(kind):
            self.dim = kind.list_size
        elif not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            raise InvalidArgument(
                f"{place}: column '{self._row}' is {kind}, expected a list of floats"
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
        except PetpsError:  # of which IoError is an OSError too
            raise
        except (pa.ArrowException, OSError) as error:
            raise _fault(f"{self.name} is damaged", self.name, error) from None

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
        array = column.to_numpy(zero_copy_only=False)
        return convert_keys(array, self.name, self._has_signed_keys)

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
    """A Parquet file, or some of its row groups. Each read decodes only a part of a row group.

    pyarrow.dataset would decode a whole row group at a time, whatever its size.
    """

    def __init__(self, place: Place, columns: Columns) -> None:
        try:
            with _open_parquet(place) as file:
                schema, metadata = file.schema_arrow, file.metadata
                groups = range(metadata.num_row_groups)
                self.group_rows = [metadata.row_group(number).num_rows for number in groups]
                self._footer = _checksum(metadata)
        except PetpsError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise _fault(f"{place} is no whole Parquet file", str(place), error) from None
        super().__init__(place, schema, columns)
        self.rows = sum(self.group_rows)
        self._groups: range = groups

    def part(self, groups: range) -> ParquetFile:
        """Return these row groups as a source, which can be pickled and read from any folder."""
        part = copy.copy(self)
        part._place = self._place.absolute()
        part._groups = groups
        part.group_rows = [self.group_rows[number] for number in groups]
        part.rows = sum(part.group_rows)
        return part

    def _batches(self) -> Iterator[pa.RecordBatch]:
        step = chunk_rows(self.dim) if self.dim else FIRST_CHUNK_ROWS
        columns = [self._key, self._row]
        with _open_parquet(self._place) as file:
            if _checksum(file.metadata) != self._footer:
                raise FailedPrecondition(
                    f"{self.name} has changed since the load began: load again, from files that "
                    "nobody writes"
                )
            yield from file.iter_batches(step, list(self._groups), columns, use_threads=False)


def _checksum(metadata: pq.FileMetaData) -> str:
    """Return a checksum of a footer, which has the rows, bounds and sizes of all row groups."""
    sink = pa.BufferOutputStream()
    metadata.write_metadata_file(sink)
    return xxhash.xxh3_64_hexdigest(sink.getvalue())


@contextlib.contextmanager
def _open_parquet(place: Place) -> Iterator[Any]:
    # Without a buffer pyarrow reads the whole column of a row group at once.
    options = {"pre_buffer": False, "buffer_size": BUFFER_BYTES}
    if place.path is not None:  # pyarrow reads it without the GIL
        with pq.ParquetFile(place.path, **options) as file:
            yield file
    else:
        with place.open() as content, pq.ParquetFile(content, **options) as file:
            yield file


class ArrowFile(_ArrowSource):
    """An Arrow IPC file or stream, memory-mapped if it is here."""

    def __init__(self, place: Place, columns: Columns) -> None:
        try:
            with _map(place) as mapped, _open_ipc(mapped) as reader:
                schema = reader.schema
                rows = _rows_of(reader) if place.path is not None else None
        except PetpsError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise _fault(f"{place} is no whole Arrow file or stream", str(place), error) from None
        super().__init__(place, schema, columns)
        self.rows = rows

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with _map(self._place) as mapped, _open_ipc(mapped) as reader:
            if isinstance(reader, pa.RecordBatchFileReader):
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)
            else:
                yield from reader


@contextlib.contextmanager
def _map(place: Place) -> Iterator[Any]:
    """Open a file: mapped, or of a URL as a file that can seek."""
    if place.path is not None:
        with pa.memory_map(str(place.path)) as mapped:
            yield mapped
    else:
        with place.open() as content, pa.PythonFile(content, "r") as file:
            yield file


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
