"""The trace of the repository."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.demo.trace import load_trace
from petps.errors import NotFound


def test_the_trace_is_as_its_readme_describes_it() -> None:
    trace = load_trace()
    assert trace.keys.dtype == np.uint64
    assert trace.keys.shape == (143_542,)
    assert trace.accesses.dtype == np.int64
    assert trace.accesses.shape == (1_000_000,)
    assert (trace.keys[1:] > trace.keys[:-1]).all()
    assert trace.accesses.min() == 0
    assert len(np.unique(trace.accesses)) == len(trace.keys)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"none\.npz is missing: get the file again"):
        load_trace(tmp_path / "none.npz")
