"""The source protocol, and the checks that all kinds of sources share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from petps_client.arrays import as_keys

from petps.errors import InvalidArgument

__all__ = [
    "KEY_NAMES",
    "ROW_NAMES",
    "Chunk",
    "Source",
    "checked_keys",
    "checked_rows",
    "chunk_rows",
    "pick",
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

CHUNK_BYTES: Final = 16 << 20  # of float32 rows: a few chunks exist at the same time
CHUNK_ROWS_MAX: Final = 1 << 16  # one durable batch, one push


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


def pick(
    names: Iterable[str], wanted: str | None, usual: tuple[str, ...], what: str, where: str
) -> str:
    """Return the name of the key or row column among ``names``. Raises InvalidArgument."""
    present = list(names)
    if wanted is not None:
        if wanted in present:
            return wanted
        raise InvalidArgument(f"{where} has no {what} column '{wanted}'; it has {_listed(present)}")
    for name in usual:
        if name in present:
            return name
    raise InvalidArgument(
        f"{where} has {_listed(present)}; none is named like a {what} column "
        f"({', '.join(usual)}): name it with --{what}-column"
    )


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) if names else "nothing"


def checked_keys(keys: npt.NDArray[Any], where: str) -> npt.NDArray[np.uint64]:
    """Return a chunk's keys as uint64[n]."""
    try:
        return as_keys(keys)
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from None


def checked_rows(rows: npt.NDArray[Any], where: str) -> npt.NDArray[np.float32]:
    """Return a chunk's rows as float32[n, dim]."""
    if rows.dtype.kind != "f":
        raise InvalidArgument(f"{where}: rows are {rows.dtype}, expected floats")
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which is checked later
        return np.ascontiguousarray(rows, dtype=np.float32)
