"""Conversion of the caller's arguments to the arrays that native code takes, or to an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from petps_client.errors import InvalidArgument

__all__ = ["as_keys", "as_rows"]


def as_keys(keys: npt.ArrayLike, signed: bool = False) -> npt.NDArray[np.uint64]:
    """Return integers[n], 0 to 2**64 - 1, as a contiguous uint64[n], without a copy if possible.

    signed: take a key below 0 as the unsigned key with the same 64 bits.

    Raise InvalidArgument that names the wrong key.
    """
    if isinstance(keys, Sequence) and not isinstance(keys, str):
        return _from_numbers(keys, signed)
    array: npt.NDArray[Any] = np.asarray(keys)
    if array.ndim != 1:
        raise InvalidArgument(f"keys have shape {array.shape}, expected (n,)")
    if array.size == 0:  # of any dtype: numpy.array([]) has floats
        return np.empty(0, np.uint64)
    if array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"keys are {array.dtype}, expected integers: other types cannot hold every key exactly"
        )
    if array.dtype.kind == "i":
        if signed:
            return np.ascontiguousarray(array, dtype=np.int64).view(np.uint64)
        if (array < 0).any():
            position = int(np.argmax(array < 0))
            raise _negative_key_error(position, int(array[position]))
    return np.ascontiguousarray(array, dtype=np.uint64)


def _negative_key_error(position: int, key: int) -> InvalidArgument:
    return InvalidArgument(
        f"keys[{position}] is {key}, but keys are unsigned 64-bit numbers: to take one below 0 as "
        f"the key with the same 64 bits, {key % (1 << 64)}, connect with signed_keys=True, give "
        "commands --signed-keys, or pass numpy.int64 keys as keys.view(numpy.uint64)"
    )


def _from_numbers(keys: Sequence[Any], signed: bool) -> npt.NDArray[np.uint64]:
    # numpy would convert a list of small and very large integers to floats.
    for position, key in enumerate(keys):
        if not isinstance(key, int | np.integer) or isinstance(key, bool):
            raise InvalidArgument(f"keys[{position}] is {key!r}, expected a whole number")
        if not -(1 << 63) <= int(key) < 1 << 64:
            raise InvalidArgument(f"keys[{position}] is {key}, outside 0..2**64-1")
        if int(key) < 0 and not signed:
            raise _negative_key_error(position, int(key))
    return np.array([int(key) % (1 << 64) for key in keys], dtype=np.uint64)


def as_rows(rows: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Return floats[n, dim] as a contiguous float32[n, dim], without a copy if possible."""
    array: npt.NDArray[Any] = np.asarray(rows)
    if array.dtype.kind != "f":
        raise InvalidArgument(f"rows are {array.dtype}, expected floats")
    with np.errstate(over="ignore"):  # larger values become infinite, which push refuses
        return np.ascontiguousarray(array, dtype=np.float32)
