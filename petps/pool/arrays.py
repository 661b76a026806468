"""Checks of callers' rows and of push reports, and the conversion of rows for native code."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.errors import InvalidArgument, ResourceExhausted

__all__ = [
    "MAX_ROWS_PER_APPLY",
    "as_encoded",
    "as_rows",
    "as_stored",
    "check_decoded",
    "check_finite",
    "check_refused",
]

# Rows of one durable batch: enough to amortise its three drains, few enough that a failed batch
# (disk full) loses little work.
MAX_ROWS_PER_APPLY: Final = 1 << 16


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
    """Return ``rows``, uint8[n, row_bytes], as a contiguous array. Raises InvalidArgument."""
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
            "allow_not_finite (--allow-not-finite) accepts such rows"
        )


def as_encoded(
    keys: npt.NDArray[np.uint64],
    rows: npt.ArrayLike,
    dtype: str,
    dim: int,
    table: str,
    *,
    allow_not_finite: bool,
) -> npt.NDArray[np.uint8]:
    """Convert floats[n, dim] to stored rows, uint8[n, row_bytes]. Raises InvalidArgument."""
    values = as_rows(rows, len(keys), dim, table)
    if not allow_not_finite:
        check_finite(keys, values, table)
    encoded = _native.encode_rows(dtype, values)
    if not allow_not_finite and dtype != "f32":
        check_decoded(keys, encoded, dtype, dim, table)
    return encoded


def check_decoded(
    keys: npt.NDArray[np.uint64], encoded: npt.NDArray[np.uint8], dtype: str, dim: int, table: str
) -> None:
    """Raise InvalidArgument if a stored row decodes to a NaN or infinity.

    A number too large for f16 becomes infinity only when it is encoded.
    """
    for at in range(0, len(keys), MAX_ROWS_PER_APPLY):
        part = slice(at, at + MAX_ROWS_PER_APPLY)
        decoded = _native.decode_rows(dtype, dim, encoded[part])
        check_finite(keys[part], decoded, table, first=at)


def check_refused(table: _native.Table, report: Any) -> None:
    """Raise ResourceExhausted, which carries the report, if the table refused new keys.

    ``report`` has the counts refused, updated and inserted.
    """
    if report.refused == 0:
        return
    error = ResourceExhausted(
        f"table '{table.name}' is full (capacity {table.record.capacity:,}): {report.refused:,} "
        f"new keys were refused, {report.updated:,} rows updated, {report.inserted:,} inserted; "
        "delete rows, or give the table more capacity (petps table grow)"
    )
    error.report = report
    raise error
