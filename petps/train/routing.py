"""Which worker holds which key of a batch: keys go to their owners, rows come back by position.

Owns:        Layout (tables of one width share a buffer), Asked (what this worker wants), Owned
             (what all workers want of this one), ask(), exchange().
Never does:  rows.
Called by:   pipeline.py.
Invariants:  a key crosses once for each micro-batch that has it; what is received stands in the
             order (asking rank, micro-batch, table, key), so that sums have a fixed order.
Threads:     one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from petps.errors import InvalidArgument
from petps.tracker import jagged_unique
from petps.train.batch import Batch
from petps.train.link import Link
from petps.train.pytorch import torch_module
from petps.train.sharded import ShardedTables

__all__ = ["Asked", "Layout", "Owned", "ask", "exchange"]

Keys = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]


class Layout:
    """Tables in the order of their dim; those of one dim lie in one buffer, a *block*.

    features: by feature, the table that has its keys; those not named have a table of their name.
    """

    def __init__(self, tables: ShardedTables, features: Mapping[str, str] | None = None) -> None:
        # By name too: all workers mean the same table, in whatever order they gave them.
        self.names = sorted(tables.names, key=lambda name: (tables[name].spec.dim, name))
        """Tables."""
        dims = [tables[name].spec.dim for name in self.names]
        self.dims = sorted(set(dims))
        """Of the blocks."""
        self.block_of: Ints = np.array([self.dims.index(dim) for dim in dims], np.int64)
        """By table."""
        self.counts = any(tables[name].spec.threshold > 1 for name in self.names)
        """Whether owners want to know how often a key stands in a batch."""
        self._features = dict(features or {})
        unknown = set(self._features.values()) - set(self.names)
        if unknown:
            raise InvalidArgument(f"features name a table {min(unknown)!r} that there is not")

    def table_of(self, feature: str) -> int:
        """Its number. Raises InvalidArgument."""
        name = self._features.get(feature, feature)
        if name not in self.names:
            raise InvalidArgument(
                f"feature {feature!r} has no table; there are: {', '.join(self.names)} (name one "
                "in features)"
            )
        return self.names.index(name)


@dataclass(frozen=True, slots=True)
class Asked:
    """What this worker wants of a batch.

    keys: uint64[n], seen: uint32[n], in the order (owner, micro-batch, table, key);
    counts: int64[world, micro-batches, tables]; inverse[m][feature]: int64, positions among the
    rows of micro-batch m and the feature's block, which come from rank 0, then 1, ...
    """

    keys: Keys
    seen: npt.NDArray[np.uint32]
    counts: Ints
    inverse: list[dict[str, Ints]]

    def rows(self, micro: int, block_of: Ints, block: int) -> list[int]:
        """How many rows of a block come from each rank."""
        chosen = self.counts[:, micro, block_of == block].sum(axis=1)
        return [int(each) for each in chosen]


def ask(parts: Sequence[Batch], tables: ShardedTables, layout: Layout) -> Asked:
    """Each micro-batch's distinct keys by owner (NestPipe IV.A, key routing)."""
    micros, count, world = len(parts), len(layout.names), tables.world
    groups: list[list[Keys]] = [[] for _ in range(micros * count)]
    places: list[tuple[int, str, int]] = []  # micro-batch, feature, group
    for number, batch in enumerate(parts):
        for feature, ragged in batch.keys.items():
            place = number * count + layout.table_of(feature)
            groups[place].append(ragged.keys)
            places.append((number, feature, place))
    values = [np.concatenate(each) if each else np.empty(0, np.uint64) for each in groups]
    offsets = _ends([len(each) for each in values])
    found = jagged_unique(
        np.concatenate(values), offsets.astype(np.uint64),
        order="ascending", inverse=True, counts=layout.counts,
    )  # fmt: skip
    assert found.inverse is not None
    keys = found.ids.view(np.uint64)
    ends = found.offsets.astype(np.int64)
    group = np.repeat(np.arange(micros * count), np.diff(ends))
    owner = tables.owner_of(keys)
    micro, table = group // count, group % count
    sent = np.argsort(owner * (micros * count) + group, kind="stable")
    # Rows of (micro-batch, block) come from rank 0, then 1, ..., of each by table and key.
    block = layout.block_of[table]
    part_of = micro * len(layout.dims) + block
    come = np.argsort((part_of * world + owner) * count + table, kind="stable")
    begins = _ends(np.bincount(part_of, minlength=micros * len(layout.dims)))
    position = np.empty(len(keys), np.int64)
    position[come] = np.arange(len(keys)) - begins[part_of[come]]
    inverse: list[dict[str, Ints]] = [{} for _ in parts]
    at = offsets[:-1].copy()
    for part, feature, number in places:
        length = len(parts[part].keys[feature].keys)
        local = found.inverse[at[number] : at[number] + length].astype(np.int64)
        inverse[part][feature] = position[ends[number] + local]
        at[number] += length
    seen = np.zeros(0, np.uint32) if found.counts is None else found.counts[sent].astype(np.uint32)
    counted = np.bincount(owner * (micros * count) + group, minlength=world * micros * count)
    return Asked(keys[sent], seen, counted.reshape(world, micros, count), inverse)


@dataclass(frozen=True, slots=True)
class Owned:
    """What all workers want of this one.

    keys[t]: uint64, ascending, each once; seen[t]: how often in the whole batch; begins[t]: where
    table t begins in its block; positions[m][b]: int64, rows of block b that micro-batch m wants,
    for rank 0, then 1, ...; counts[m][b]: how many of them for each rank; samples: of all workers,
    by rank; ended: every loader is at its end.
    """

    keys: list[Keys]
    seen: list[Ints]
    begins: Ints
    positions: list[list[Ints]]
    counts: list[list[list[int]]]
    samples: list[int]
    ended: bool


def exchange(asked: Asked, samples: int, ended: bool, layout: Layout, link: Link) -> Owned:
    """Sends keys to their owners, and takes those that others want of us."""
    torch = torch_module()
    world, micros, count = asked.counts.shape
    told = np.empty((world, micros * count + 2), np.int64)
    told[:, :-2] = asked.counts.reshape(world, -1)
    told[:, -2:] = samples, ended
    even = [told.shape[1]] * world
    heard = link.all_to_all(torch.from_numpy(told.ravel()), even, even).numpy()
    heard = heard.reshape(world, -1)
    wanted = heard[:, :-2]
    sends = [int(each) for each in asked.counts.reshape(world, -1).sum(axis=1)]
    receives = [int(each) for each in wanted.sum(axis=1)]
    keys = link.all_to_all(torch.from_numpy(asked.keys.view(np.int64)), sends, receives)
    keys = keys.numpy().view(np.uint64)
    seen = np.ones(len(keys), np.int64)
    if layout.counts:
        counted = torch.from_numpy(asked.seen.astype(np.int64))
        seen = link.all_to_all(counted, sends, receives).numpy()
    return _owned(keys, seen, wanted.reshape(world, micros, count), heard[:, -2:], layout)


def _owned(keys: Keys, seen: Ints, wanted: Ints, said: Ints, layout: Layout) -> Owned:
    world, micros, count = wanted.shape
    table = np.repeat(np.tile(np.arange(count), world * micros), wanted.ravel())
    order = np.argsort(table, kind="stable")
    found = jagged_unique(
        keys[order], _ends(np.bincount(table, minlength=count)).astype(np.uint64),
        order="ascending", inverse=True,
    )  # fmt: skip
    assert found.inverse is not None
    sizes = np.diff(found.offsets.astype(np.int64))
    begins = np.zeros(count, np.int64)
    for block in range(len(layout.dims)):
        chosen = np.flatnonzero(layout.block_of == block)
        begins[chosen] = _ends(sizes[chosen])[:-1]
    position = np.empty(len(keys), np.int64)
    position[order] = begins[table[order]] + found.inverse
    total = np.zeros(int(sizes.sum()), np.int64)
    np.add.at(total, found.offsets.astype(np.int64)[table[order]] + found.inverse, seen[order])
    bounds = found.offsets.astype(np.int64)
    per_rank = _ends(wanted.sum(axis=(1, 2)))
    positions: list[list[Ints]] = [[] for _ in range(micros)]
    counts: list[list[list[int]]] = [[] for _ in range(micros)]
    inside = np.cumsum(wanted.reshape(world, -1), axis=1).reshape(world, micros, count)
    for micro in range(micros):
        for block in range(len(layout.dims)):
            chosen = np.flatnonzero(layout.block_of == block)
            first, last = chosen[0], chosen[-1]  # tables of a block are neighbours
            ends = per_rank[:-1] + inside[:, micro, last]
            starts = per_rank[:-1] + inside[:, micro, first] - wanted[:, micro, first]
            pieces = [position[a:b] for a, b in zip(starts, ends, strict=True)]
            positions[micro].append(np.concatenate(pieces))
            counts[micro].append([len(piece) for piece in pieces])
    return Owned(
        keys=[found.table(each).view(np.uint64) for each in range(count)],
        seen=[total[bounds[each] : bounds[each + 1]] for each in range(count)],
        begins=begins,
        positions=positions,
        counts=counts,
        samples=[int(each) for each in said[:, 0]],
        ended=bool(said[:, 1].all()),
    )


def _ends(lengths: Any) -> Ints:
    """int64[n + 1]: where each begins, and the end."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends
