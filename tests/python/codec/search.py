"""The greedy search of Check-N-Run 5.2, written plainly in numpy.

Tests compare the native search with it, and bench/checkpoint measures both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass
class Ranges:
    """Zero and width of each row's best range, and the l2 error for which it was chosen."""

    zero: Array
    width: Array
    error: Array


def search(rows: Array, bits: int, bins: int, ratio: float) -> Ranges:
    """Search all rows at once: float[n, dim] without constant rows, computed in their dtype."""
    real = rows.dtype.type
    levels = real(2**bits - 1)
    columns = np.ascontiguousarray(rows.T)  # makes numpy sum a row's values in their order
    low = columns.min(axis=0)
    whole = columns.max(axis=0) - low
    step = whole / real(bins)

    def error(zero: Array, width: Array) -> Array:
        at = (columns - zero) * (real(1) / (width / levels))
        codes = np.rint(np.clip(at, real(0), levels))
        total: Array = np.add.reduce(np.square(at - codes), axis=0)
        return total

    raised = np.zeros_like(low)
    best = Ranges(low, whole, error(low, whole))
    for moved in range(1, min(bins - 1, math.ceil(ratio * bins)) + 1):
        width = whole - step * real(moved)
        by_low = error(low + step * (raised + real(1)), width)
        by_high = error(low + step * raised, width)
        raised = np.where(by_low < by_high, raised + real(1), raised)
        share = width / whole
        error_now = np.minimum(by_low, by_high) * (share * share)
        better = error_now < best.error
        best.error = np.where(better, error_now, best.error)
        best.zero = np.where(better, low + step * raised, best.zero)
        best.width = np.where(better, width, best.width)
    best.error = np.sqrt(best.error) * (whole / levels)
    return best


def search_row(row: Array, bits: int, bins: int, ratio: float) -> float:
    """Return the l2 error of one row, searched as the paper describes it, on vectors."""
    levels = row.dtype.type(2**bits - 1)

    def error(low: Any, high: Any) -> Any:
        scale = (high - low) / levels
        codes = np.rint(np.clip((row - low) / scale, 0, levels))
        return np.linalg.norm(row - (low + scale * codes))

    low, high = row.min(), row.max()
    step = (high - low) / row.dtype.type(bins)
    best = error(low, high)
    for _ in range(min(bins - 1, math.ceil(ratio * bins))):
        by_low, by_high = error(low + step, high), error(low, high - step)
        if by_low < by_high:
            low += step
        else:
            high -= step
        best = min(best, by_low, by_high)
    return float(best)
