"""Rows as chunks, and chunks one after another as one file. STORE.md.

Owns:        Edit, Encoded, checked_edits(), write_bundle().
Never does:  decide which versions a chunk belongs to.
Called by:   store.py, staging.py.
Invariants:  a bundle's chunks have the order of its edits; no more than one is in memory.
Threads:     any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import xxhash

from petps.checkpoint.chunk import Bloom, Rows, Table, ascend_by_one, encode, layout_of
from petps.checkpoint.files import Files
from petps.checkpoint.state import OPEN, Chunk, new_name
from petps.errors import InvalidArgument

__all__ = ["Edit", "Encoded", "Given", "checked_edits", "write_bundle"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk's bytes. ``body``: pieces, each valid until the next is asked for; read once."""

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
        """Of rows that are there, at least one."""
        return cls.from_body(table, rows, encode(table, rows))

    @classmethod
    def from_body(cls, table: Table, rows: Rows, body: memoryview) -> Encoded:
        """Of what encode() gave for the rows."""
        return cls(
            len(rows),
            int(rows.keys[0]),
            int(rows.keys[-1]),
            rows.deleted is not None,
            len(body),
            xxhash.xxh3_64_hexdigest(body),
            layout_of(table, body),
            [body],
            b"" if ascend_by_one(rows.keys) else Bloom.make(rows.keys),
        )


# What a version is written from, by table: whole, or pieces whose keys ascend.
Given = Mapping[str, Rows | Iterable[Rows | Encoded]]
# A chunk to be written: its table, rows, first, end and layer.
Edit = tuple[str, Rows | Encoded, int, int, int]


def checked_edits(
    version: int,
    given: Given,
    tables: Mapping[str, Table],
    goes_on: Callable[[], None],
    *,
    base: bool,
) -> Iterator[Edit]:
    """Of a version's rows. Raises InvalidArgument; goes_on() is called before each piece."""
    for name, pieces in given.items():
        last = -1
        for piece in [pieces] if isinstance(pieces, Rows) else pieces:
            goes_on()
            if isinstance(piece, Rows):
                if len(piece) == 0:
                    continue
                _check_shape(tables[name], piece)
                piece = Encoded.of(tables[name], piece)
            if piece.min_key <= last:
                raise InvalidArgument(f"table {name}: the pieces' keys do not ascend")
            last = piece.max_key
            if base and piece.deletes:
                raise InvalidArgument(f"table {name}: a base deletes nothing")
            yield name, piece, version, OPEN, 0 if base else 1


def _check_shape(table: Table, rows: Rows) -> None:
    for column in table.columns:
        stored = rows.columns.get(column.name)
        if stored is None or stored.shape != (len(rows), column.width):
            shape = None if stored is None else stored.shape
            raise InvalidArgument(
                f"table {table.name}: column {column.name} has {shape}, the line's has "
                f"({len(rows)}, {column.width}): make rows by Rows.of"
            )


def write_bundle(files: Files, tables: Mapping[str, Table], edits: Iterable[Edit]) -> list[Chunk]:
    """One file of all of them, in order; none if there are none."""
    path = f"data/{new_name()}.chunks"
    chunks: list[Chunk] = []

    def pieces() -> Iterator[bytes | memoryview]:
        offset = 0
        for name, rows, first, end, layer in edits:
            one = Encoded.of(tables[name], rows) if isinstance(rows, Rows) else rows
            yield from one.body
            yield one.bloom
            chunks.append(
                Chunk(
                    name,
                    first,
                    end,
                    layer,
                    path,
                    offset,
                    one.length,
                    offset + one.length,
                    len(one.bloom),
                    one.rows,
                    one.min_key,
                    one.max_key,
                    one.checksum,
                    one.layout,
                )
            )
            offset += one.length + len(one.bloom)

    every = pieces()
    try:
        head = next(every)
    except StopIteration:
        return []

    def all_pieces() -> Iterator[bytes | memoryview]:
        yield head
        yield from every

    files.write(path, all_pieces())
    return chunks
