"""The common keys of two buffers on a device: a binary search for each key, then a compaction."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from petps.train.kernels.rank import BLOCK, grid_of, number_flags
from petps.train.pytorch import torch_module

__all__ = ["intersection"]


@triton.jit
def _search(first, second, flags, places, n, m, steps: tl.constexpr, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    there = at < n
    key = tl.load(first + at, mask=there, other=0)
    wanted = key.to(tl.uint64, bitcast=True)
    low = tl.full([size], 0, tl.int64)  # all keys before low are less
    high = tl.full([size], 0, tl.int64) + m  # all keys from high on are not less
    for _ in range(steps):
        middle = (low + high) // 2
        open = there & (low < high)
        less = tl.load(second + middle, mask=open, other=0).to(tl.uint64, bitcast=True) < wanted
        low = tl.where(open & less, middle + 1, low)
        high = tl.where(open & (less == 0), middle, high)
    inside = there & (low < m)
    same = inside & (tl.load(second + low, mask=inside, other=0) == key)
    tl.store(flags + at, same.to(tl.int32), mask=there)
    tl.store(places + at, low, mask=there)


@triton.jit
def _pick_both(flags, numbers, places, left, right, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    there = at < n
    is_common = there & (tl.load(flags + at, mask=there, other=0) != 0)
    number = tl.load(numbers + at, mask=there, other=0)
    tl.store(left + number, at.to(tl.int64), mask=is_common)
    tl.store(right + number, tl.load(places + at, mask=there, other=0), mask=is_common)


def intersection(first: Any, second: Any) -> tuple[Any, Any]:
    """Do the same as petps.train.kernels.intersection for two inputs that are not empty."""
    torch = torch_module()
    n, m = len(first), len(second)
    grid = grid_of(n)
    flags = torch.empty(n, dtype=torch.int32, device=first.device)
    places = torch.empty(n, dtype=torch.int64, device=first.device)
    _search[grid](first, second, flags, places, n, m, steps=m.bit_length(), size=BLOCK)
    numbers = number_flags(flags)
    left = torch.empty(int(numbers[n]), dtype=torch.int64, device=first.device)
    right = torch.empty_like(left)
    _pick_both[grid](flags, numbers, places, left, right, n, size=BLOCK)
    return left, right
