"""What callers hand in, as the arrays native code takes; or an error that says what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from petps_client.errors import InvalidArgument

__all__ = ["as_keys", "as_rows"]


def as_keys(keys: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """keys: integers[n] of 0 to 2**64 - 1 -> uint64[n], contiguous; uint64 is not copied."""
    if isinstance(keys, Sequence) and not isinstance(keys, str):
        return _from_numbers(keys)
    array: npt.NDArray[Any] = np.asarray(keys)
    if array.ndim != 1:
        raise InvalidArgument(f"keys have shape {array.shape}, expected (n,)")
    if array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"keys are {array.dtype}, expected integers: other types cannot hold every key exactly"
        )
    if array.dtype.kind == "i" and array.size > 0 and (array < 0).any():
        where = int(np.argmax(array < 0))
        raise InvalidArgument(
            f"keys[{where}] is {array[where]}, but keys are unsigned 64-bit numbers; "
            "keys.view(numpy.uint64) takes the same bits"
        )
    return np.ascontiguousarray(array, dtype=np.uint64)


def _from_numbers(keys: Sequence[Any]) -> npt.NDArray[np.uint64]:
    # numpy alone would take a list of small and very large whole numbers for floats.
    for where, key in enumerate(keys):
        if not isinstance(key, int | np.integer) or isinstance(key, bool):
            raise InvalidArgument(f"keys[{where}] is {key!r}, expected a whole number")
        if not 0 <= int(key) < 1 << 64:
            raise InvalidArgument(f"keys[{where}] is {key}, outside 0..2**64-1")
    return np.array([int(key) for key in keys], dtype=np.uint64)


def as_rows(rows: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """rows: floats[n, dim] -> float32[n, dim], contiguous; float32 is not copied."""
    array: npt.NDArray[Any] = np.asarray(rows)
    if array.dtype.kind != "f":
        raise InvalidArgument(f"rows are {array.dtype}, expected floats")
    with np.errstate(over="ignore"):  # beyond float32 it becomes infinite, which push refuses
        return np.ascontiguousarray(array, dtype=np.float32)
