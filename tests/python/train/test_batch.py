"""The division of a batch into micro-batches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from petps.errors import InvalidArgument
from petps.train import Batch, Ragged
from petps.train.batch import divide


@pytest.mark.parametrize(
    ("samples", "micro_batches", "sizes"),
    [
        (7, 1, [7]),
        (7, 2, [3, 4]),
        (8, 3, [2, 4, 2]),
        (600, 4, [100, 200, 200, 100]),
        (1, 4, [0, 0, 0, 1]),
        (0, 3, [0, 0, 0]),
    ],
)
def test_the_first_and_the_last_micro_batch_are_half_as_large(
    samples: int, micro_batches: int, sizes: list[int]
) -> None:
    bounds = divide(samples, micro_batches)
    assert [end - begin for begin, end in itertools.pairwise(bounds)] == sizes
    batch = Batch({"a": Ragged.single(np.arange(samples, dtype=np.uint64))})
    assert [part.samples for part in batch.parts(micro_batches)] == sizes


def test_no_micro_batches_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="micro_batches must be at least 1, got 0"):
        divide(8, 0)
