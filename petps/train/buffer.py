"""The rows of one batch on their owner's device, while it is trained.

Owns:        Buffer (retrieve, freshen, update, write back), shared_rows.
Never does:  talk to other workers.
Called by:   pipeline.py, stages.py.
Invariants:  row and optimizer state move together; a key without a row reads as zeros, and is
             neither updated nor copied nor written back.
Threads:     one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from petps.train.optimizer import Optimizer
from petps.train.pytorch import torch_module
from petps.train.routing import Keys, Layout, Owned
from petps.train.sharded import ShardedTables

__all__ = ["Buffer", "Shared", "shared_rows"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shared:
    """Of each block, positions of the keys that two buffers share: in the older, in the newer."""

    older: list[Any]
    newer: list[Any]


class Buffer:
    """Slots of the keys that all workers want of this one: by block float32[n, width]."""

    def __init__(self, batch: int, owned: Owned, layout: Layout, slots: list[Any]) -> None:
        self.batch = batch
        self.owned = owned
        self.slots = slots
        self.live: list[Any] = []
        """By table: bool[n], which keys have a row."""
        self._layout = layout

    @staticmethod
    def retrieve(
        batch: int, owned: Owned, tables: ShardedTables, layout: Layout, device: Any
    ) -> Buffer:
        """Rows as the pool has them now; new ones as they begin (NestPipe IV.A)."""
        torch = torch_module()
        slots: list[Any] = [[] for _ in layout.dims]
        live = []
        for number, name in enumerate(layout.names):
            rows = tables[name].retrieve(batch, owned.keys[number], owned.seen[number])
            slots[layout.block_of[number]].append(torch.from_numpy(rows.slots))
            live.append(rows.live)
        blocks = [each[0] if len(each) == 1 else torch.cat(each) for each in slots]
        buffer = Buffer(batch, owned, layout, [block.to(device) for block in blocks])
        buffer.live = live
        return buffer

    def freshen(self, older: Buffer, shared: Shared) -> None:
        """Copies what the batch before has updated: rows and state (NestPipe IV.B)."""
        for slots, fresh, to, of in zip(
            self.slots, older.slots, shared.newer, shared.older, strict=True
        ):
            slots.index_copy_(0, to, fresh.index_select(0, of))

    def update(self, gradients: list[Any], optimizer: Optimizer) -> None:
        """gradients: by block float32[n, dim]."""
        torch = torch_module()
        for block, (slots, gradient) in enumerate(zip(self.slots, gradients, strict=True)):
            live = np.concatenate(
                [self.live[each] for each in np.flatnonzero(self._layout.block_of == block)]
            )
            if live.all():
                optimizer.apply(slots, gradient)
                continue
            chosen = torch.from_numpy(np.flatnonzero(live)).to(slots.device)
            updated = slots.index_select(0, chosen)
            optimizer.apply(updated, gradient.index_select(0, chosen))
            slots.index_copy_(0, chosen, updated)

    def write_back(self, tables: ShardedTables) -> None:
        """The rows that there are, into the pool."""
        hosts = [block.cpu().numpy() for block in self.slots]
        for number, name in enumerate(self._layout.names):
            keys, live = self.owned.keys[number], self.live[number]
            begin = int(self.owned.begins[number])
            rows = hosts[self._layout.block_of[number]][begin : begin + len(keys)]
            if not live.all():
                keys, rows = keys[live], rows[live]
            tables[name].write_back(self.batch, keys, rows)


def shared_rows(older: Buffer, newer: Buffer, layout: Layout, device: Any) -> Shared:
    """Keys of both buffers that have a row in the older (NestPipe IV.B: compact key sets)."""
    torch = torch_module()
    found: tuple[list[Any], list[Any]] = ([], [])
    for block in range(len(layout.dims)):
        parts: tuple[list[Ints], list[Ints]] = ([], [])
        for number in np.flatnonzero(layout.block_of == block):
            left, right = _common(older.owned.keys[number], newer.owned.keys[number])
            known = older.live[number][left]
            parts[0].append(left[known] + older.owned.begins[number])
            parts[1].append(right[known] + newer.owned.begins[number])
        for into, part in zip(found, parts, strict=True):
            into.append(torch.from_numpy(np.concatenate(part)).to(device))
    return Shared(*found)


def _common(left: Keys, right: Keys) -> tuple[Ints, Ints]:
    """Positions of the keys that both have, each ascending."""
    if len(left) == 0 or len(right) == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    where = np.minimum(np.searchsorted(left, right), len(left) - 1)
    there = np.flatnonzero(left[where] == right)
    return where[there].astype(np.int64), there.astype(np.int64)
