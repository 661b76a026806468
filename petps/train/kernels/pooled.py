"""Gather and sum of each bag's rows in one kernel, without a copy of the gathered rows."""

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

from petps.train.pytorch import torch_module

__all__ = ["pooled_lookup"]

DIMS_MAX: Final = 256
"""The largest number of columns of a program."""


@triton.jit
def _pool(
    rows,
    places,
    offsets,
    weights,
    out,
    dim,
    is_mean: tl.constexpr,
    is_weighted: tl.constexpr,
    size: tl.constexpr,
):
    bag = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * size + tl.arange(0, size)
    there = column < dim
    begin = tl.load(offsets + bag)
    end = tl.load(offsets + bag + 1)
    total = tl.full([size], 0, tl.float32)
    for at in range(begin, end):
        place = tl.load(places + at)
        row = tl.load(rows + place * dim + column, mask=there, other=0.0)
        if is_weighted:
            row = row * tl.load(weights + at)
        total += row
    if is_mean:
        total = total / tl.maximum(end - begin, 1).to(tl.float32)
    tl.store(out + bag * dim + column, total, mask=there)


def pooled_lookup(rows: Any, places: Any, offsets: Any, mode: str, weights: Any) -> Any:
    """Do the same as petps.train.kernels.pooled_lookup, with checked arguments."""
    torch = torch_module()
    bags, dim = len(offsets) - 1, rows.shape[1]
    out = torch.empty((bags, dim), dtype=torch.float32, device=rows.device)
    if bags == 0 or dim == 0:
        return out
    size = min(DIMS_MAX, triton.next_power_of_2(dim))
    _pool[(bags, triton.cdiv(dim, size))](
        rows,
        places.contiguous(),
        offsets.contiguous(),
        rows if weights is None else weights.contiguous(),
        out,
        dim,
        is_mean=mode == "mean",
        is_weighted=weights is not None,
        size=size,
    )
    return out
