"""The trainer's rows, and their comparison with pulled rows, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from examples.demo.report import Comparison

__all__ = ["State", "bits", "compare"]


@dataclass(frozen=True, slots=True)
class State:
    """The trainer's rows float32[n, dim] and which are present, bool[n]."""

    rows: npt.NDArray[np.float32]
    present: npt.NDArray[np.bool_]

    @staticmethod
    def read(path: Path) -> State:
        """Read the state that the trainer saved."""
        with np.load(path, allow_pickle=False) as arrays:
            return State(arrays["rows"], arrays["present"])

    def part(self, chosen: slice) -> State:
        """Return the state of some objects."""
        return State(self.rows[chosen], self.present[chosen])


def bits(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Return the bits of float32 values: -0 differs from 0, and a NaN equals itself."""
    return np.ascontiguousarray(rows).view(np.uint32)


def compare(state: State, rows: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_]) -> Comparison:
    """Compare a pull with ``state``: rows float32[n, dim] and mask bool[n], in the state's order.

    A missing key must have the table's default row, zeros.
    """
    is_present = state.present
    is_equal = (bits(rows) == bits(state.rows)).all(axis=1)
    is_default = (bits(rows) == 0).all(axis=1)

    def count(is_counted: npt.NDArray[np.bool_]) -> int:
        return int(np.count_nonzero(is_counted))

    return Comparison(
        keys=len(is_present),
        rows_equal=count(is_present & mask & is_equal),
        missing_as_they_should=count(~is_present & ~mask & is_default),
        rows_different=count(is_present & mask & ~is_equal),
        rows_lost=count(is_present & ~mask),
        rows_undead=count(~is_present & (mask | ~is_default)),
    )
