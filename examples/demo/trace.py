"""The stream of accesses that the demo learns from and predicts. data/README.md has its source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from petps.errors import NotFound

__all__ = ["ATTRIBUTION", "Trace", "load_trace"]

ATTRIBUTION: Final = "Twitter cache cluster 52 (twitter/cache-trace; Yang, Yue, Rashmi, OSDI 2020)"
_FILE: Final = Path(__file__).parent / "data" / "twitter_c52_1M.npz"


@dataclass(frozen=True, slots=True)
class Trace:
    """A stream of accesses.

    keys: uint64[n], distinct and sorted. accesses: int64[m], in order, positions in ``keys``.
    """

    keys: npt.NDArray[np.uint64]
    accesses: npt.NDArray[np.int64]


def load_trace(path: Path = _FILE) -> Trace:
    """Read the trace of the repository. Raise NotFound if the file is missing."""
    if not path.exists():
        raise NotFound(f"{path} is missing: get the file again, for example by git checkout")
    with np.load(path, allow_pickle=False) as arrays:
        return Trace(arrays["ids"], arrays["accesses"].astype(np.int64))
