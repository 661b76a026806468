"""A mixing function of 64 bits, by which a training makes numbers from keys.

Owns:        mix(), GOLDEN.
Never does:  choose a key's partition (petps.delta.schema does).
Called by:   sharded.py, admission.py, removal.py.
Invariants:  stored rows and saved filters depend on it, so it never changes.
Threads:     values only.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["GOLDEN", "mix"]

GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's finaliser. Different values have different results."""
    with np.errstate(over="ignore"):
        values = values + GOLDEN
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
