"""Encoding of rows as chunks, and writing of bundles: files of several chunks. STORE.md.

Owns:        NewChunk, Encoded, prepare_chunks(), write_bundle().
Never does:  decide which versions a chunk belongs to.
Called by:   store.py, staging.py.
Invariants:  a bundle has its chunks in the given order; at most one of them is in memory.
Threads:     any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from petps.checkpoint.chunk import Bloom, Rows, Table, are_consecutive, encode, find_layout
from petps.checkpoint.files import Files
from petps.checkpoint.state import OPEN, Chunk
from petps.checkpoint.state_files import new_name
from petps.delta.schema import partition_of
from petps.errors import InvalidArgument

__all__ = [
    "CHUNK_BYTES",
    "Encoded",
    "NewChunk",
    "RowsByTable",
    "divide",
    "prepare_chunks",
    "write_bundle",
]

# Bytes of the rows of a chunk. A writer holds one chunk in memory, a reader of a base five.
CHUNK_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk as bytes, with the facts that its lineage records.

    ``body`` yields pieces and can be read once; a piece is valid until the next one is requested.
    """

    rows: int
    min_key: int
    max_key: int
    deletes: bool
    length: int
    checksum: str
    layout: tuple[int, ...]
    body: Iterable[memoryview]
    bloom: bytes

    @classmethod
    def of(cls, table: Table, rows: Rows) -> Encoded:
        """Encode rows, which must not be empty."""
        return cls.from_body(table, rows, encode(table, rows))

    @classmethod
    def from_body(cls, table: Table, rows: Rows, body: memoryview) -> Encoded:
        """Return the chunk whose body is ``body``: the result of encode() for these rows."""
        return cls(
            len(rows),
            int(rows.keys[0]),
            int(rows.keys[-1]),
            rows.deleted is not None,
            len(body),
            xxhash.xxh3_64_hexdigest(body),
            find_layout(table, body),
            [body],
            b"" if are_consecutive(rows.keys) else Bloom.make(rows.keys),
        )


# The rows of a version, by table: either all rows at once, or pieces whose keys ascend.
RowsByTable = Mapping[str, Rows | Iterable[Rows | Encoded]]
# A chunk to be written: its table, rows, first, end and layer.
NewChunk = tuple[str, Rows | Encoded, int, int, int]


def prepare_chunks(
    version: int,
    given: RowsByTable,
    tables: Mapping[str, Table],
    raise_if_cancelled: Callable[[], None],
    *,
    base: bool,
    partitions: int = 1,
) -> Iterator[NewChunk]:
    """Yield the chunks to write for a version's rows.

    Call raise_if_cancelled() before each piece. partitions: see WriteOptions. Raise InvalidArgument
    for rows that the version cannot hold.
    """
    for name, pieces in given.items():
        last = (0, -1)  # partition and key
        for piece in [pieces] if isinstance(pieces, Rows) else pieces:
            raise_if_cancelled()
            if isinstance(piece, Rows):
                if len(piece) == 0:
                    continue
                _check_shape(tables[name], piece)
                partition = _partition_of(name, piece, partitions)
                piece = Encoded.of(tables[name], piece)
            else:
                partition = 0
            if (partition, piece.min_key) <= last:
                raise InvalidArgument(f"table {name}: the pieces' keys do not ascend")
            last = (partition, piece.max_key)
            if base and piece.deletes:
                raise InvalidArgument(f"table {name}: a base must not have deleted rows")
            yield name, piece, version, OPEN, 0 if base else 1


def divide(table: Table, pieces: Iterable[Rows]) -> Iterator[Rows]:
    """Yield the same rows in pieces of CHUNK_BYTES; the last may be smaller."""
    step = max(1, CHUNK_BYTES // (8 + table.width))
    waiting: list[Rows] = []
    count = 0
    for rows in pieces:
        waiting.append(rows)
        count += len(rows)
        if count >= step:
            joined = _join(waiting)
            whole = count // step * step
            for start in range(0, whole, step):
                yield joined.at(np.arange(start, start + step))
            waiting = [joined.at(np.arange(whole, count))]
            count -= whole
    if count:
        yield _join(waiting)


def _join(parts: list[Rows]) -> Rows:
    """Return the rows of all parts, whose keys ascend from part to part."""
    deleted = [
        np.zeros(len(rows), np.bool_) if rows.deleted is None else rows.deleted for rows in parts
    ]
    return Rows(
        np.concatenate([rows.keys for rows in parts]),
        {name: np.concatenate([rows.columns[name] for rows in parts]) for name in parts[0].columns},
        np.concatenate(deleted) if any(rows.deleted is not None for rows in parts) else None,
    )


def _partition_of(table: str, rows: Rows, partitions: int) -> int:
    """Return the partition of all keys. Raise InvalidArgument if they have several."""
    if partitions == 1:
        return 0
    own = partition_of(rows.keys, partitions)
    if (own != own[0]).any():
        raise InvalidArgument(f"table {table}: a piece has keys of several partitions")
    return int(own[0])


def _check_shape(table: Table, rows: Rows) -> None:
    for column in table.columns:
        stored = rows.columns.get(column.name)
        if stored is None or stored.shape != (len(rows), column.width):
            shape = None if stored is None else stored.shape
            raise InvalidArgument(
                f"table {table.name}: column {column.name} must have shape ({len(rows)}, "
                f"{column.width}) as in its lineage, got {shape}: create the rows by Rows.of"
            )


def write_bundle(
    files: Files, tables: Mapping[str, Table], new_chunks: Iterable[NewChunk], *, prefix: str = ""
) -> list[Chunk]:
    """Write the chunks to one file, in order, and return them; without chunks write no file.

    prefix: how the file's name begins.
    """
    path = f"data/{prefix}{new_name()}.chunks"
    chunks: list[Chunk] = []

    def pieces() -> Iterator[bytes | memoryview]:
        offset = 0
        for name, rows, first, end, layer in new_chunks:
            encoded = Encoded.of(tables[name], rows) if isinstance(rows, Rows) else rows
            yield from encoded.body
            yield encoded.bloom
            chunks.append(
                Chunk(
                    name,
                    first,
                    end,
                    layer,
                    path,
                    offset,
                    encoded.length,
                    offset + encoded.length,
                    len(encoded.bloom),
                    encoded.rows,
                    encoded.min_key,
                    encoded.max_key,
                    encoded.checksum,
                    encoded.layout,
                )
            )
            offset += encoded.length + len(encoded.bloom)

    stream = pieces()
    try:
        head = next(stream)
    except StopIteration:
        return []

    def all_pieces() -> Iterator[bytes | memoryview]:
        yield head
        yield from stream

    files.write(path, all_pieces())
    return chunks
