"""The contracts of the kernels on a CPU, by numpy, the native jagged_unique and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np

from petps import _native
from petps.train import tracker
from petps.train.kernels import Distinct
from petps.train.pytorch import torch_module

__all__ = ["intersection", "jagged_unique"]


def jagged_unique(values: Any, offsets: Any, variant: str) -> Distinct:
    """Do the same as petps.train.kernels.jagged_unique."""
    torch = torch_module()
    unique = tracker.jagged_unique(
        values.numpy().view(np.uint64),
        offsets.numpy().view(np.uint64),
        order="ascending" if variant == "radix" else "any",
        inverse=True,
    )
    keys, ends = unique.ids.view(np.int64), unique.offsets.astype(np.int64)
    assert unique.inverse is not None
    inverse = unique.inverse.astype(np.int64)
    if variant == "hash":
        tables = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets.numpy()))
        places = ends[tables] + inverse
        first = np.empty(len(keys), np.int64)
        first[places[::-1]] = np.arange(len(places))[::-1]
        # Tables are in order in keys and in values, so this order keeps each table's keys together.
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        keys, inverse = keys[order], rank[places] - ends[tables]
    return Distinct(*map(torch.from_numpy, (keys, ends, inverse)))


def intersection(first: Any, second: Any) -> tuple[Any, Any]:
    """Do the same as petps.train.kernels.intersection."""
    torch = torch_module()
    keys = [tensor.numpy().view(np.uint64) for tensor in (first, second)]
    in_first, in_second = _native.common_keys(*keys)
    return torch.from_numpy(in_first), torch.from_numpy(in_second)
