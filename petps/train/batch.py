"""A loader's samples, and their division into micro-batches.

Owns:        Ragged, Batch, divide().
Never does:  read data; import torch (dense values are the loader's own tensors).
Called by:   loaders, pipeline.py, routing.py, clustering.py.
Threads:     values only; once a pipeline has taken a batch, its arrays belong to the pipeline.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from petps.errors import InvalidArgument

__all__ = ["Batch", "Ragged", "divide"]

Keys = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]


def divide(samples: int, micro_batches: int) -> list[int]:
    """Return bounds int[micro_batches + 1]: micro-batch m has samples [bounds[m], bounds[m + 1]).

    All micro-batches have the same size, except that the first and the last of three or more have
    half of it: nothing is computed while the first's rows and the last's gradients cross
    (PIPELINE.md). Raises InvalidArgument if there is less than one micro-batch.
    """
    if micro_batches < 1:
        raise InvalidArgument(f"micro_batches must be at least 1, got {micro_batches}")
    half_count = max(1, 2 * micro_batches - 2)  # a whole micro-batch has two halves
    halves = [0, *range(1, half_count, 2), half_count]
    return [samples * half // half_count for half in halves]


@dataclass(frozen=True, slots=True)
class Ragged:
    """The keys of one feature: sample s has keys[offsets[s]:offsets[s + 1]].

    keys: uint64[n]. offsets: int64[samples + 1], ascending from 0 to n. Raises InvalidArgument.
    """

    keys: Keys
    offsets: Offsets

    def __post_init__(self) -> None:
        if self.keys.dtype != np.uint64 or self.keys.ndim != 1:
            raise InvalidArgument(
                f"keys must be uint64[n], got {self.keys.dtype}{list(self.keys.shape)}"
            )
        ends = self.offsets
        if ends.dtype != np.int64 or ends.ndim != 1 or len(ends) == 0:
            raise InvalidArgument(
                f"offsets must be int64[samples + 1], got {ends.dtype}{list(ends.shape)}"
            )
        if ends[0] != 0 or ends[-1] != len(self.keys) or (ends[1:] < ends[:-1]).any():
            raise InvalidArgument(
                f"offsets must ascend from 0 to {len(self.keys)}, the number of keys"
            )

    @staticmethod
    def single(keys: Keys) -> Ragged:
        """Return a feature with one key for each sample."""
        return Ragged(keys, np.arange(len(keys) + 1, dtype=np.int64))

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self.offsets) - 1

    def part(self, begin: int, end: int) -> Ragged:
        """Return the samples from ``begin`` to ``end`` - 1 without copying their keys."""
        first, last = self.offsets[begin], self.offsets[end]
        return Ragged(self.keys[first:last], self.offsets[begin : end + 1] - first)

    def select(self, order: npt.NDArray[np.intp]) -> Ragged:
        """Return the samples at these positions, in this order."""
        lengths = np.diff(self.offsets)[order]
        offsets = np.zeros(len(order) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        index = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][order] - offsets[:-1], lengths)
        return Ragged(self.keys[index], offsets)


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's samples of one step.

    keys: the keys of each feature, by name. dense: tensors by name, labels included; the first
    axis is the samples. reader: the loader's state after this batch, from which a restored
    trainer continues.
    """

    keys: Mapping[str, Ragged]
    dense: Mapping[str, Any] = field(default_factory=dict)
    reader: bytes = b""

    def __post_init__(self) -> None:
        counts = {name: ragged.samples for name, ragged in self.keys.items()}
        counts |= {name: len(values) for name, values in self.dense.items()}
        if len(set(counts.values())) > 1:
            raise InvalidArgument(
                f"all features must have the same number of samples, got {counts}"
            )

    @property
    def samples(self) -> int:
        """The number of samples."""
        counts = itertools.chain(
            (ragged.samples for ragged in self.keys.values()), map(len, self.dense.values())
        )
        return next(counts, 0)

    def select(self, order: npt.NDArray[np.intp]) -> Batch:
        """Return the samples at these positions, in this order."""
        return Batch(
            {name: ragged.select(order) for name, ragged in self.keys.items()},
            {name: values[order] for name, values in self.dense.items()},
            self.reader,
        )

    def parts(self, count: int) -> Iterator[Batch]:
        """Yield ``count`` micro-batches of neighbouring samples, divided by divide()."""
        for begin, end in itertools.pairwise(divide(self.samples, count)):
            yield Batch(
                {name: ragged.part(begin, end) for name, ragged in self.keys.items()},
                {name: values[begin:end] for name, values in self.dense.items()},
                self.reader,
            )
