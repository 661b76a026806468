"""The rows of one batch on their owner's device, while the batch is trained.

Owns:        Buffer (retrieve, freshen, update, write back), SharedRows, find_shared_rows().
Never does:  talk to other ranks.
Called by:   lookup.py, pipeline.py, write_back.py.
Invariants:  a row and its optimizer state move together; a key without a row reads as zeros and
             is neither updated nor copied nor written back.
Threads:     one at a time; on a GPU each thread uses its own lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from petps.train.kernels import intersection
from petps.train.optimizer import Optimizer
from petps.train.pytorch import torch_module
from petps.train.routing import Layout, OwnedKeys
from petps.train.rows import copy
from petps.train.sharded import ShardedTables
from petps.train.streams import Lane

__all__ = ["Buffer", "SharedRows", "find_shared_rows"]

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SharedRows:
    """The rows that a buffer shares with the one before, ``buffer``.

    older, newer: by block int64[m], their positions in the older and in the newer buffer.
    """

    buffer: Buffer
    older: list[Any]
    newer: list[Any]


class Buffer:
    """The slots of the keys that all ranks need from this one: by block float32[n, width]."""

    def __init__(
        self, batch: int, owned: OwnedKeys, tables: ShardedTables, layout: Layout, lane: Lane
    ) -> None:
        """Read the rows from the pool as they are now; initialise new rows (NestPipe IV.A)."""
        self.batch = batch
        self.owned = owned
        self.live: list[Mask] = []
        """By table: bool[n], whether each key has a row."""
        self._layout = layout
        blocks: list[Any] = []
        for block in range(len(layout.dims)):
            numbers = np.flatnonzero(layout.block_of == block)
            count = sum(len(owned.keys[number]) for number in numbers)
            width = tables[layout.names[numbers[0]]].width
            blocks.append(lane.allocate((count, width), torch_module().float32))
        hosts = [block.numpy() for block in blocks]
        for number, name in enumerate(layout.names):
            keys, begin = owned.keys[number], int(owned.begins[number])
            into = hosts[layout.block_of[number]][begin : begin + len(keys)]
            self.live.append(tables[name].retrieve(batch, keys, owned.seen[number], into).live)
        self.slots = [lane.copy_in(block) for block in blocks]
        self.keys = [lane.copy_in(keys.view(np.int64)) for keys in owned.keys]
        """By table: int64[n], the bits of its keys, on the device."""
        self._trained = [self._find_live(block, lane) for block in range(len(layout.dims))]
        self._seen = [self._copy_seen(block, lane) for block in range(len(layout.dims))]

    def _copy_seen(self, block: int, lane: Lane) -> Any | None:
        """Return float32[n]: how often a block's keys occur in the batch, if its slots count it."""
        if not self._layout.have_uses[block]:
            return None
        numbers = np.flatnonzero(self._layout.block_of == block)
        seen = np.concatenate([self.owned.seen[number] for number in numbers])
        return lane.copy_in(seen.astype(np.float32))

    def _find_live(self, block: int, lane: Lane) -> Any | None:
        """Return the positions of a block's keys that have a row, or None if all have."""
        numbers = np.flatnonzero(self._layout.block_of == block)
        live = np.concatenate([self.live[number] for number in numbers])
        return None if live.all() else lane.copy_in(np.flatnonzero(live))

    @property
    def tensors(self) -> list[Any]:
        """The device tensors that the lane of this buffer hands to other lanes."""
        optional = [*self._trained, *self._seen]
        return [*self.slots, *(tensor for tensor in optional if tensor is not None)]

    def freshen(self, shared: SharedRows) -> None:
        """Copy shared rows and their state from the updated batch before (NestPipe IV.B)."""
        blocks = zip(self.slots, shared.newer, shared.buffer.slots, shared.older, strict=True)
        for slots, to, fresh, of in blocks:
            copy(slots, to, fresh, of)

    def update(self, gradients: list[Any], optimizer: Optimizer) -> None:
        """Apply the gradients, by block float32[n, dim], to the rows that exist; count their uses.

        A count stops at 2^24, where float32 has no next integer.
        """
        blocks = zip(self.slots, gradients, self._trained, self._seen, strict=True)
        for slots, gradient, rows, seen in blocks:
            updated = slots
            if rows is not None:
                updated, gradient = slots.index_select(0, rows), gradient.index_select(0, rows)
                seen = None if seen is None else seen.index_select(0, rows)
            if seen is None:
                optimizer.apply(updated, gradient, self.batch)
            else:
                optimizer.apply(updated[:, :-1], gradient, self.batch)
                updated[:, -1].add_(seen)
            if rows is not None:
                slots.index_copy_(0, rows, updated)

    def write_back(self, tables: ShardedTables, lane: Lane) -> None:
        """Write the rows that exist back into the pool."""
        hosts = lane.copy_out("written", self.slots)
        for number, name in enumerate(self._layout.names):
            keys, live = self.owned.keys[number], self.live[number]
            begin = int(self.owned.begins[number])
            rows = hosts[self._layout.block_of[number]][begin : begin + len(keys)]
            if not live.all():
                keys, rows = keys[live], rows[live]
            tables[name].write_back(self.batch, keys, rows)


def find_shared_rows(older: Buffer, newer: Buffer, layout: Layout, lane: Lane) -> SharedRows:
    """Find the rows whose keys are in both buffers (NestPipe IV.B, compact key sets)."""
    torch = torch_module()
    shared = SharedRows(older, [], [])
    for block in range(len(layout.dims)):
        parts: tuple[list[Any], list[Any]] = ([], [])
        for number in np.flatnonzero(layout.block_of == block):
            left, right = intersection(older.keys[number], newer.keys[number])
            live = older.live[number]
            if not live.all():
                has_row = lane.copy_in(live)[left]
                left, right = left[has_row], right[has_row]
            parts[0].append(left + int(older.owned.begins[number]))
            parts[1].append(right + int(newer.owned.begins[number]))
        for positions, part in zip((shared.older, shared.newer), parts, strict=True):
            positions.append(part[0] if len(part) == 1 else torch.cat(part))
    return shared
