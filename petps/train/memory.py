"""Memory for rows and keys that come and go with each batch.

Owns:        empty().
Never does:  pinned memory (streams.py).
Called by:   rows.py, window.py, link.py, streams.py, optimizer.py.
Invariants:  what a large tensor of the host gives back is kept for the next
             (native/unique/pages.h). Where batches are under way at once, the process's allocator
             gives such memory to the kernel and asks for it again: clearing it took an eighth of a
             worker's processor.
Threads:     any; whoever drops a tensor last gives its memory back.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from petps import _native
from petps.train.pytorch import torch_module

__all__ = ["empty"]


def empty(shape: Sequence[int], dtype: Any, device: Any = "cpu") -> Any:
    """A tensor of anything. Raises MemoryError."""
    torch = torch_module()
    size = prod(shape) * dtype.itemsize
    if size == 0 or torch.device(device).type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.from_numpy(_native.host_memory(size)).view(dtype).view(tuple(shape))
