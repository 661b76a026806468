"""Conversion of callers' rows to the arrays of native code, with errors that say what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.errors import InvalidArgument

__all__ = ["as_rows", "as_stored", "check_finite"]


def as_rows(rows: npt.ArrayLike, n: int, dim: int, table: str) -> npt.NDArray[np.float32]:
    """Convert floats[n, dim] to a contiguous float32[n, dim]. Raises InvalidArgument."""
    array: npt.NDArray[Any] = np.asarray(rows)
    if array.shape != (n, dim):
        raise InvalidArgument(
            f"table '{table}': rows have shape {array.shape}, expected ({n}, {dim}): "
            f"one row of dim {dim} for each key"
        )
    if array.dtype.kind != "f":
        raise InvalidArgument(f"table '{table}': rows are {array.dtype}, expected floats")
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf; check_finite sees it
        return np.ascontiguousarray(array, dtype=np.float32)


def as_stored(rows: npt.ArrayLike, n: int, row_bytes: int, table: str) -> npt.NDArray[np.uint8]:
    """Return uint8[n, row_bytes] as a contiguous array. Raises InvalidArgument for another one."""
    array: npt.NDArray[Any] = np.asarray(rows)
    if array.shape != (n, row_bytes) or array.dtype != np.uint8:
        raise InvalidArgument(
            f"table '{table}': stored rows are {array.dtype}{list(array.shape)}, "
            f"expected uint8[{n}, {row_bytes}]"
        )
    return np.ascontiguousarray(array)


def check_finite(
    keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.float32], table: str, *, first: int = 0
) -> None:
    """Raise InvalidArgument if a row has a NaN or infinity. ``first``: number of rows[0]."""
    bad = _native.first_not_finite(rows)
    if bad < rows.shape[0]:
        raise InvalidArgument(
            f"table '{table}': row {first + bad} (key {keys[bad]}) has a NaN or infinity; "
            "allow_not_finite (--allow-not-finite) takes such rows"
        )
