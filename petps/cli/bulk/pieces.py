"""Pieces: row groups of a Parquet file, which a worker reads, checks, and writes as spills.

Owns:        Piece, open_parquet(), plan_pieces(), read_piece(), find_error().
Never does:  know Ray; keep more than the rows of one spill.
Called by:   load.py, and its workers.
Invariants:  rows pass the same checks as in a pool's load, and an error has the same text.
Threads:     one for each piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from petps.checkpoint.spills import SPILL_BYTES, Spill, record_bytes, write_spill
from petps.checkpoint.state_files import new_name
from petps.cli.sources.base import Columns, check_dim
from petps.cli.sources.find import open_sources
from petps.errors import InvalidArgument, PetpsError
from petps.pool.arrays import as_encoded

if TYPE_CHECKING:
    from petps.checkpoint.chunk import Bytes, Floats, Keys, Table
    from petps.checkpoint.files import Files
    from petps.cli.sources.arrow_files import ParquetFile

__all__ = ["Piece", "PieceResult", "find_error", "open_parquet", "plan_pieces", "read_piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring row groups of a file. It can be pickled for another machine.

    number: Its place in the order of the sources; of a repeated key the row of the last piece wins.
    source: Its row groups alone.
    first_row: The number of its first row in the file.
    prefix: How the names of the load's files begin.
    """

    number: int
    table: Table
    source: ParquetFile
    first_row: int
    files: Files
    prefix: str
    partitions: int
    allow_not_finite: bool

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.source.rows or 0

    def __str__(self) -> str:
        return f"row {self.first_row:,} and the next {self.rows:,} of {self.source.name}"


@dataclass(frozen=True, slots=True)
class PieceResult:
    """The spills of a piece, or the error that its rows have."""

    spills: tuple[Spill, ...]
    error: PetpsError | None


def open_parquet(
    names: Sequence[str], columns: Columns, table: str, version: int | None = None
) -> list[ParquetFile]:
    """Open and check the files of a table, in their order. Raises as open_sources() does."""
    from petps.cli.sources.arrow_files import ParquetFile

    sources: list[ParquetFile] = []
    for source in open_sources(names, columns, table, version):
        if not isinstance(source, ParquetFile):
            raise InvalidArgument(
                f"{source.name}: --on ray reads Parquet files; load others without --on"
            )
        sources.append(source)
    return sources


def plan_pieces(
    number: int,
    table: Table,
    source: ParquetFile,
    files: Files,
    prefix: str,
    partitions: int,
    *,
    allow_not_finite: bool,
) -> Iterator[Piece]:
    """Divide a file into pieces of at most SPILL_BYTES, or of one row group that is larger.

    number: Of the first piece.
    """
    limit = SPILL_BYTES // record_bytes(table)
    start, rows, first_row = 0, 0, 0
    for stop, group_rows in enumerate([*source.group_rows, limit]):
        is_end = stop == len(source.group_rows)
        if stop > start and (is_end or rows + group_rows > limit):
            part = source.part(range(start, stop))
            yield Piece(number, table, part, first_row, files, prefix, partitions, allow_not_finite)
            number, start, first_row, rows = number + 1, stop, first_row + rows, 0
        rows += group_rows


def read_piece(piece: Piece) -> PieceResult:
    """Read a piece and write its rows as spills. Return the first error of its rows."""
    table, (column, *_) = piece.table, piece.table.columns
    capacity = max(1, min(piece.rows, SPILL_BYTES // record_bytes(table)))
    keys = np.empty(capacity, np.uint64)
    rows = np.empty((capacity, table.width), np.uint8)
    spills: list[Spill] = []
    count = 0

    def write() -> None:
        path = f"data/{piece.prefix}{new_name()}.spill"
        spills.append(
            write_spill(piece.files, path, table, keys[:count], rows[:count], piece.partitions)
        )

    try:
        for chunk_keys, chunk_rows in piece.source.chunks():
            check_dim(piece.source, chunk_rows.shape[1], table.name, column.dim)
            encoded = _encode(table, chunk_keys, chunk_rows, piece.allow_not_finite)
            at = 0
            while at < len(chunk_keys):
                taken = min(capacity - count, len(chunk_keys) - at)
                keys[count : count + taken] = chunk_keys[at : at + taken]
                rows[count : count + taken] = encoded[at : at + taken]
                count, at = count + taken, at + taken
                if count == capacity:
                    write()
                    count = 0
        if count:
            write()
    except PetpsError as error:
        return PieceResult((), error)
    return PieceResult(tuple(spills), None)


def find_error(table: Table, sources: Sequence[ParquetFile], allow_not_finite: bool) -> None:
    """Raise the error that a load of these files in their order would raise.

    Only the last file has one. A piece begins elsewhere than a chunk of the file, so its error may
    name another row, or another one of several errors.
    """
    before = sum(source.rows or 0 for source in sources[:-1])
    source, dim = sources[-1], table.columns[0].dim
    for keys, rows in source.chunks():
        check_dim(source, rows.shape[1], table.name, dim)
        try:
            _encode(table, keys, rows, allow_not_finite)
        except InvalidArgument as error:
            raise InvalidArgument(f"{source.name}, after {before:,} rows: {error}") from None
        before += len(keys)


def _encode(table: Table, keys: Keys, rows: Floats, allow_not_finite: bool) -> Bytes:
    column = table.columns[0]
    return as_encoded(
        keys, rows, column.dtype, column.dim, table.name, allow_not_finite=allow_not_finite
    )
