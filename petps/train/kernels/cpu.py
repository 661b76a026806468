"""The contracts of the kernels on a CPU, by numpy, the native jagged_unique and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np

from petps import _native
from petps.train import tracker
from petps.train.kernels import Distinct
from petps.train.pytorch import torch_module

__all__ = ["intersection", "jagged_unique", "pooled_lookup"]


def jagged_unique(values: Any, offsets: Any, variant: str) -> Distinct:
    """Do the same as petps.train.kernels.jagged_unique."""
    torch = torch_module()
    found = tracker.jagged_unique(
        values.numpy().view(np.uint64),
        offsets.numpy().view(np.uint64),
        order="ascending" if variant == "radix" else "any",
        inverse=True,
    )
    keys, ends = found.ids.view(np.int64), found.offsets.astype(np.int64)
    assert found.inverse is not None
    inverse = found.inverse.astype(np.int64)
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
    return Distinct(*(torch.from_numpy(each) for each in (keys, ends, inverse)))


def intersection(one: Any, other: Any) -> tuple[Any, Any]:
    """Do the same as petps.train.kernels.intersection."""
    torch = torch_module()
    found = _native.common_keys(*(each.numpy().view(np.uint64) for each in (one, other)))
    return torch.from_numpy(found[0]), torch.from_numpy(found[1])


def pooled_lookup(rows: Any, places: Any, offsets: Any, mode: str, weights: Any) -> Any:
    """Do the same as petps.train.kernels.pooled_lookup."""
    torch = torch_module()
    return torch.nn.functional.embedding_bag(
        places, rows, offsets, mode=mode, per_sample_weights=weights, include_last_offset=True
    )
