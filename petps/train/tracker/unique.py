"""The distinct ids of many tables in one pass (DECK 4.1 ``jagged_unique``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.errors import InvalidArgument

Ids = npt.NDArray[np.uint64] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class JaggedUnique:
    """The distinct ids of each table.

    ids: those of table 0, then of table 1, and so on; the dtype is that of the values.
    offsets: uint64[tables + 1]; table t has ids[offsets[t]:offsets[t + 1]].
    inverse: uint32[n]; values[i] of table t is ids[offsets[t] + inverse[i]]. None if not requested.
    counts: uint64[len(ids)]; how often each id occurs in its table. None if not requested.
    """

    ids: Ids
    offsets: npt.NDArray[np.uint64]
    inverse: npt.NDArray[np.uint32] | None
    counts: npt.NDArray[np.uint64] | None

    def table(self, number: int) -> Ids:
        """Return the distinct ids of one table (a view)."""
        return self.ids[self.offsets[number] : self.offsets[number + 1]]


def jagged_unique(
    values: Ids,
    offsets: Ids,
    *,
    order: Literal["any", "ascending"] = "any",
    inverse: bool = False,
    counts: bool = False,
) -> JaggedUnique:
    """Return the distinct ids of each table.

    values: uint64[n] or int64[n]. offsets: [tables + 1], into the values. order: 'any' is
    deterministic for the same values; 'ascending' sorts the ids if they were not found in that
    order. Beside the result it takes at most 8 bytes for each id of the largest table, or 16 with
    inverse or counts. The GIL is released. One thread works.

    Raises InvalidArgument, which names an offset that does not begin at 0, ascend, or end with the
    values; the first negative id; or a table of 2^32 ids or more.
    """
    if order not in ("any", "ascending"):
        raise InvalidArgument(f"order must be 'any' or 'ascending', got {order!r}")
    result = _native.jagged_unique(
        _as_unsigned(values, "values"),
        _as_unsigned(offsets, "offsets"),
        ascending=order == "ascending",
        inverse=inverse,
        counts=counts,
    )
    ids: Any = result[0].view(values.dtype)
    return JaggedUnique(ids, *result[1:])


def _as_unsigned(array: Any, name: str) -> npt.NDArray[np.uint64]:
    """View int64 as uint64, without negatives; leave other dtypes to the native check."""
    if not isinstance(array, np.ndarray) or array.dtype != np.int64:
        return array  # type: ignore[no-any-return]
    if array.size > 0 and array.min() < 0:
        first = int(np.argmax(array.ravel() < 0))
        raise InvalidArgument(f"{name}[{first}] must be at least 0, got {array.ravel()[first]}")
    return array.view(np.uint64)
