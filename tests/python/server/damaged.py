"""Damage in the file of a pool, written beside the process that has the pool open."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["damage_row", "row_of"]


def row_of(key: int, value: float) -> npt.NDArray[np.float32]:
    """Return a row float32[4] that no other key has."""
    return np.array([key + 0.25, value, 1000 * value + key, -key - 0.5], np.float32)


def damage_row(pool: Path, row: npt.NDArray[np.float32]) -> None:
    """Flip a bit of the stored row, which must be in the file once.

    A mapping of the file sees the change at once.
    """
    content = pool.read_bytes()
    stored = row.tobytes()
    at = content.index(stored)
    assert content.find(stored, at + 1) == -1, "the row is in the file twice"
    with pool.open("r+b") as file:
        file.seek(at + 5)
        file.write(bytes([stored[5] ^ 0x10]))
