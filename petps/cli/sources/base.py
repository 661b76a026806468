"""The source protocol, and the checks that all kinds of sources share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from petps_client.arrays import as_keys

from petps.errors import InvalidArgument

__all__ = [
    "KEY_NAMES",
    "ROW_NAMES",
    "Chunk",
    "Columns",
    "Source",
    "check_dim",
    "chunk_rows",
    "convert_keys",
    "convert_rows",
    "pick",
    "total_rows",
]

Chunk = tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]

# Column names to look for when the user gives none.
KEY_NAMES: Final = ("keys", "key", "ids", "id")
ROW_NAMES: Final = (
    "rows",
    "row",
    "embeddings",
    "embedding",
    "emb_vector",
    "vectors",
    "vector",
    "values",
)

# Bytes of a chunk's float32 rows; a few chunks exist at the same time.
CHUNK_BYTES: Final = 16 << 20
CHUNK_ROWS_MAX: Final = 1 << 16  # rows of one durable batch, and of one push


@dataclass(frozen=True)
class Columns:
    """Names of the key and row columns; None selects one of the usual names.

    has_signed_keys: a key below 0 is the unsigned key with the same 64 bits.
    """

    key: str | None = None
    row: str | None = None
    has_signed_keys: bool = False


class Source(Protocol):
    """Keys and rows of one file, of a pair of files, or of a folder."""

    @property
    def name(self) -> str:
        """Return the name for messages: the path."""

    @property
    def rows(self) -> int | None:
        """Return the number of rows, or None if the source does not state it in advance."""

    @property
    def dim(self) -> int | None:
        """Return the values in a row, or None if the source does not state it in advance."""

    def chunks(self) -> Iterator[Chunk]:
        """Yield keys uint64[n] and rows float32[n, dim]. Raises DataLoss or InvalidArgument."""


def chunk_rows(dim: int) -> int:
    """Return the number of rows of one chunk."""
    return max(1, min(CHUNK_ROWS_MAX, CHUNK_BYTES // (4 * dim)))


def check_dim(source: Source, source_dim: int | None, table: str, dim: int) -> None:
    """Raise InvalidArgument if the rows of a source have another dim than the table."""
    if source_dim not in (None, dim):
        raise InvalidArgument(
            f"table '{table}' has dim {dim}, but {source.name} has rows of dim {source_dim}"
        )


def total_rows(sources: Sequence[Source]) -> int | None:
    """Return the number of rows of all sources; None if a source does not state it."""
    counts = [source.rows for source in sources if source.rows is not None]
    return sum(counts) if len(counts) == len(sources) else None


def pick(
    names: Iterable[str], chosen: str | None, usual: tuple[str, ...], role: str, source: str
) -> str:
    """Return the name of the column with this role ('key' or 'row'). Raises InvalidArgument.

    Args:
        names: The columns of the source.
        chosen: The name that the user gave; None selects the first of ``usual`` that exists.
        usual: The usual names for this role.
        role: 'key' or 'row'.
        source: Name of the source for messages.
    """
    present = list(names)
    listed = ", ".join(f"'{name}'" for name in present) or "no columns"
    if chosen is not None:
        if chosen in present:
            return chosen
        raise InvalidArgument(f"{source} has no {role} column '{chosen}'; it has {listed}")
    for name in usual:
        if name in present:
            return name
    raise InvalidArgument(
        f"{source} has {listed}; none is named like a {role} column "
        f"({', '.join(usual)}): name it with --{role}-column"
    )


def convert_keys(keys: npt.NDArray[Any], source: str, signed: bool) -> npt.NDArray[np.uint64]:
    """Return a chunk's keys as uint64[n]. Raises InvalidArgument, which names the source."""
    try:
        return as_keys(keys, signed)
    except InvalidArgument as error:
        raise InvalidArgument(f"{source}: {error}") from None


def convert_rows(rows: npt.NDArray[Any], source: str) -> npt.NDArray[np.float32]:
    """Return a chunk's rows as float32[n, dim]. Raises InvalidArgument, which names the source."""
    if rows.dtype.kind != "f":
        raise InvalidArgument(f"{source}: rows are {rows.dtype}, expected floats")
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which is checked later
        return np.ascontiguousarray(rows, dtype=np.float32)
