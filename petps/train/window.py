"""The frozen window of a batch (NestPipe V).

The rows of each micro-batch go out and their gradients come back. Nothing is updated until the
last gradient has arrived.

Owns:        Window, Lookup.
Never does:  decide when a transfer runs.
Called by:   pipeline.py, forward_backward.py.
Invariants:  the gradients of a row are added in the order (micro-batch, rank), whatever overlaps.
Threads:     send_rows() and take_gradients() run on the link's thread; the trainer reads
             gradients once both have returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from petps.train.link import Link
from petps.train.lookup import BatchWork
from petps.train.pytorch import torch_module
from petps.train.routing import Layout
from petps.train.rows import add, gather

__all__ = ["Lookup", "Window"]


@dataclass(frozen=True, slots=True)
class Lookup:
    """A feature's rows in a micro-batch, as a model sees them.

    rows: float32[u, dim], distinct, shared by the features of one dim, requires_grad. inverse:
    int32[n], the row of each key (call .long() for operations that take only int64). offsets:
    int64[samples + 1].
    """

    rows: Any
    inverse: Any
    offsets: Any

    def each(self) -> Any:
        """Return the row of each key: float32[n, dim]."""
        return torch_module().nn.functional.embedding(self.inverse, self.rows)

    def pooled(self, mode: str = "sum", weights: Any = None) -> Any:
        """Return the pooled rows of each sample: float32[samples, dim].

        mode: 'sum' or 'mean'; weights: float32[n], only with 'sum'.
        """
        return torch_module().nn.functional.embedding_bag(
            self.inverse,
            self.rows,
            self.offsets.to(self.inverse.dtype),  # otherwise PyTorch copies all of inverse
            mode=mode,
            per_sample_weights=weights,
            include_last_offset=True,
        )


class Window:
    """The window of one batch on one rank, which requests rows and owns rows at the same time."""

    def __init__(self, work: BatchWork, layout: Layout, link: Link) -> None:
        self._torch = torch_module()
        self._requests, self._owned = work.requests, work.owned
        self._slots, self._positions = work.buffer.slots, work.positions
        self._layout = layout
        self._link = link
        self.gradients = [
            self._torch.zeros((len(slots), dim), dtype=slots.dtype, device=slots.device)
            for slots, dim in zip(self._slots, layout.dims, strict=True)
        ]
        """By block float32[n, dim], the sums so far."""

    @property
    def tensors(self) -> list[Any]:
        """The device tensors that the trainer hands to the link's lane."""
        return [*self.gradients, *(rows for blocks in self._positions for rows in blocks)]

    def send_rows(self, micro: int) -> list[Any]:
        """Exchange a micro-batch's rows; return those for this rank, by block float32[u, dim]."""
        rows = [
            gather(slots, at, dim)
            for slots, at, dim in zip(
                self._slots, self._positions[micro], self._layout.dims, strict=True
            )
        ]
        return self._exchange(rows, self._owned.counts[micro], self._requests.rows[micro])

    def take_gradients(self, micro: int, gradients: Sequence[Any]) -> list[Any]:
        """Send each gradient to the row's owner, and add those that arrive. Return the sums so far.

        gradients: by block float32[u, dim], for the rows of send_rows().
        """
        counts = self._owned.counts[micro]
        received = self._exchange(list(gradients), self._requests.rows[micro], counts)
        for block, at in enumerate(self._positions[micro]):
            total = self.gradients[block]
            pieces = received[block].split(counts[block])
            for to, piece in zip(at.split(counts[block]), pieces, strict=True):
                add(total, to, piece)  # a row occurs once in a rank's piece
        return self.gradients

    def _exchange(
        self, blocks: list[Any], sends: list[list[int]], receives: list[list[int]]
    ) -> list[Any]:
        """Exchange the rows of all blocks in one transfer.

        sends, receives: by block, the number of rows for each rank.
        """
        dims = np.array(self._layout.dims)
        sent: list[int] = (np.array(sends).T @ dims).tolist()  # values for each rank
        received: list[int] = (np.array(receives).T @ dims).tolist()
        if len(blocks) == 1:
            values = self._link.all_to_all(blocks[0].reshape(-1), sent, received)
            return [values.view(-1, int(dims[0]))]
        pieces = [block.split(counts) for block, counts in zip(blocks, sends, strict=True)]
        ranks = range(self._link.world)
        flat = self._torch.cat([block[rank].reshape(-1) for rank in ranks for block in pieces])
        sizes = [receives[b][rank] * int(dims[b]) for rank in ranks for b in range(len(blocks))]
        parts = iter(self._link.all_to_all(flat, sent, received).split(sizes))
        by_rank = [[next(parts).view(-1, int(dim)) for dim in dims] for _ in ranks]
        return [self._torch.cat(block) for block in zip(*by_rank, strict=True)]
