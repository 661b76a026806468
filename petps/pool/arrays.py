"""Conversion of callers' arrays to those of native code, with errors that say what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.errors import InvalidArgument

__all__ = ["as_keys", "as_rows", "as_stored", "check_finite"]


def as_keys(keys: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Convert integers[n] of 0 to 2**64 - 1 to a contiguous uint64[n]. Raises InvalidArgument."""
    array: npt.NDArray[Any] = np.asarray(keys)
    if array.dtype.kind in "fO" and not isinstance(keys, np.ndarray):
        array = _from_numbers(keys, array)
    if array.ndim != 1:
        raise InvalidArgument(f"keys have shape {array.shape}, expected (n,)")
    if array.size == 0:
        return np.empty(0, np.uint64)
    if array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"keys are {array.dtype}, expected integers: other types cannot hold every key exactly"
        )
    if array.dtype.kind == "i" and (array < 0).any():
        where = int(np.argmax(array < 0))
        raise InvalidArgument(
            f"keys[{where}] is {array[where]}, but keys are unsigned 64-bit numbers; "
            "keys.view(numpy.uint64) takes the same bits"
        )
    return np.ascontiguousarray(array, dtype=np.uint64)


def _from_numbers(keys: Any, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert a list of whole numbers that numpy took for floats or objects to uint64.

    numpy does that to a list of small and very large numbers. Return ``array`` for anything else.
    """
    values = list(keys) if isinstance(keys, Sequence) else []
    if not values or not all(isinstance(value, int) for value in values):
        return array
    outside = next((value for value in values if not 0 <= value < 1 << 64), None)
    if outside is not None:
        raise InvalidArgument(f"key {outside} is outside 0..2^64-1")
    return np.array(values, dtype=np.uint64)


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
