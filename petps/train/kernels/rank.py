"""The numbering of flagged places, in two passes over blocks; every compaction here needs it."""

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

from petps.train.pytorch import torch_module

__all__ = ["BLOCK", "grid_of", "number_flags"]

BLOCK: Final = 1024


def grid_of(count: int) -> tuple[int]:
    """Return the grid of a kernel in which each program takes BLOCK places."""
    return (triton.cdiv(count, BLOCK),)


@triton.jit
def _count(flags, counts, n, size: tl.constexpr):
    block = tl.program_id(0)
    at = block * size + tl.arange(0, size)
    flag = tl.load(flags + at, mask=at < n, other=0)
    tl.store(counts + block, tl.sum(flag, axis=0))


@triton.jit
def _number(flags, begins, numbers, n, size: tl.constexpr):
    block = tl.program_id(0)
    at = block * size + tl.arange(0, size)
    flag = tl.load(flags + at, mask=at < n, other=0)
    number = tl.load(begins + block) + tl.cumsum(flag, axis=0) - flag
    tl.store(numbers + at, number, mask=at < n)


def number_flags(flags: Any) -> Any:
    """Count the flags before each place: int32[n] of 0 or 1 -> int64[n + 1], then the total."""
    torch = torch_module()
    n = len(flags)
    grid = grid_of(n)
    counts = torch.empty(grid[0], dtype=torch.int64, device=flags.device)
    _count[grid](flags, counts, n, size=BLOCK)
    ends = torch.cumsum(counts, 0)
    numbers = torch.empty(n + 1, dtype=torch.int64, device=flags.device)
    _number[grid](flags, ends - counts, numbers, n, size=BLOCK)
    numbers[n:] = ends[-1]
    return numbers
