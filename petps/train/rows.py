"""Rows moved by position: in memory by native code without the GIL, on a device by PyTorch.

Owns:        gather(), add(), copy(), are_finite().
Never does:  know what the rows mean.
Called by:   buffer.py, window.py, totals.py.
Invariants:  both ways compute the same sums in the same order.
Threads:     any.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from petps import _native
from petps.train.pytorch import torch_module

__all__ = ["add", "are_finite", "copy", "gather"]


def gather(rows: Any, at: Any, dim: int) -> Any:
    """Return the first ``dim`` values of the rows at these positions.

    float32[n, width], int64[m] -> float32[m, dim].
    """
    if not _in_memory(rows):
        return rows[:, :dim].index_select(0, at)
    out = torch_module().empty((len(at), dim), dtype=rows.dtype)
    _native.gather_rows(rows.numpy(), at.numpy(), out.numpy())
    return out


def add(into: Any, at: Any, rows: Any) -> None:
    """Compute into[at] += rows: float32[n, dim], int64[m] (distinct), float32[m, dim]."""
    if _in_memory(into):
        _native.add_rows(into.numpy(), at.numpy(), rows.numpy())
    else:  # positions are distinct, so a gather, a sum and a scatter have one order
        into.index_copy_(0, at, into.index_select(0, at).add_(rows))


def copy(into: Any, to: Any, rows: Any, of: Any) -> None:
    """Compute into[to] = rows[of]: rows float32[n, width] of one width, positions int64[m]."""
    if _in_memory(into):
        _native.copy_rows(into.numpy(), to.numpy(), rows.numpy(), of.numpy())
    else:
        into.index_copy_(0, to, rows.index_select(0, of))


def are_finite(rows: Any) -> Any:
    """Return whether each row is finite: float32[n, dim] -> bool[n].

    In memory, return bool[1] if all rows are finite, because that is faster.
    """
    torch = torch_module()
    if _in_memory(rows) and (rows.numel() == 0 or all(map(isfinite, torch.aminmax(rows)))):
        return torch.ones(1, dtype=torch.bool)
    return torch.isfinite(rows).all(dim=1)


def _in_memory(tensor: Any) -> bool:
    return bool(tensor.device.type == "cpu")
