"""The trainer's state of every row, and its comparison with pulled rows, bit by bit."""

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
    """Compare a pull with ``state``: rows float32[n, dim] and mask bool[n], keys in its order.

    A missing key must have the table's default row, zeros.
    """
    there = state.present
    same = (bits(rows) == bits(state.rows)).all(axis=1)
    default = (bits(rows) == 0).all(axis=1)

    def count(chosen: npt.NDArray[np.bool_]) -> int:
        return int(np.count_nonzero(chosen))

    return Comparison(
        keys=len(there),
        rows_equal=count(there & mask & same),
        missing_as_they_should=count(~there & ~mask & default),
        rows_different=count(there & mask & ~same),
        rows_lost=count(there & ~mask),
        rows_undead=count(~there & (mask | ~default)),
    )
