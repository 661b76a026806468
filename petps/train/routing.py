"""Which rank holds which key of a batch. Keys go to their owners; rows come back by position.

Owns:        Layout (tables of one width share a buffer), KeyRequests (what this rank needs),
             OwnedKeys (what all ranks need from this one), route_keys(), exchange().
Never does:  touch rows.
Called by:   lookup.py.
Invariants:  a key crosses once for each micro-batch that has it; received keys are in the order
             (asking rank, micro-batch, table, key), so sums have a fixed order.
Threads:     one thread calls route_keys(), one calls exchange(); they may be different threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.errors import InvalidArgument
from petps.train.batch import Batch
from petps.train.link import Link
from petps.train.message import refuse
from petps.train.pytorch import torch_module
from petps.train.sharded import ShardedTables

__all__ = ["KeyRequests", "Layout", "OwnedKeys", "exchange", "route_keys"]

Keys = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
# Of one rank and one batch: a position in them is an int32.
KEYS_MAX: Final = (1 << 31) - 1


class Layout:
    """Tables in the order of their dim. Tables of one dim share one buffer, a *block*.

    Tables whose slots count uses have blocks of their own, because their slots are wider.

    features: maps a feature to the table that has its keys. A feature that is not named uses the
    table of its own name.
    """

    def __init__(self, tables: ShardedTables, features: Mapping[str, str] | None = None) -> None:
        # Sorted by name too: all ranks then number the tables alike, in whatever order they came.
        def shape_of(name: str) -> tuple[int, bool]:
            return tables[name].spec.dim, tables[name].has_uses

        self.names = sorted(tables.names, key=lambda name: (shape_of(name), name))
        """The names of the tables, in order."""
        shapes = sorted({shape_of(name) for name in self.names})
        self.dims = [dim for dim, _ in shapes]
        """The dims of the blocks."""
        self.have_uses = [has_uses for _, has_uses in shapes]
        """By block: whether the last value of a slot counts the uses of the row."""
        self.block_of: Ints = np.array([shapes.index(shape_of(n)) for n in self.names], np.int64)
        """The block of each table."""
        self.counts = any(tables[name].spec.counts for name in self.names)
        """Whether owners need to know how often a key occurs in a batch."""
        self._first_of = np.searchsorted(self.block_of, np.arange(len(self.dims) + 1))
        self._features = dict(features or {})
        unknown = set(self._features.values()) - set(self.names)
        if unknown:
            raise InvalidArgument(
                f"features name table {min(unknown)!r}, but the tables are: {', '.join(self.names)}"
            )

    def begins_in_block(self, ends: Ints) -> Ints:
        """Return int64[tables]: where each table begins in its block.

        ends: int64[tables], where each table begins among all tables.
        """
        return ends - ends[self._first_of[self.block_of]]

    def by_block(self, counts: Ints) -> list[list[list[int]]]:
        """Convert rows by [world, micro-batches, tables] to [micro-batch][block][rank]."""
        # Tables of a block are neighbours.
        sums = np.add.reduceat(counts, self._first_of[:-1], axis=2)
        rows: list[list[list[int]]] = sums.transpose(1, 2, 0).tolist()
        return rows

    def table_of(self, feature: str) -> int:
        """Return the number of a feature's table. Raise InvalidArgument if there is none."""
        name = self._features.get(feature, feature)
        if name not in self.names:
            raise InvalidArgument(
                f"feature {feature!r} has no table: name one of {', '.join(self.names)} in features"
            )
        return self.names.index(name)


@dataclass(frozen=True, slots=True)
class KeyRequests:
    """The keys and rows that this rank needs for a batch.

    keys: uint64[n] and seen: uint64[n] or [0], both in the order (owner, micro-batch, table,
    key). counts: int64[world, micro-batches, tables], the number of keys. rows[m][b]: how many
    rows of block b come from each rank for micro-batch m. inverse[m][feature]: int32, the
    position of each key among the rows of micro-batch m and the feature's block; rows from rank 0
    come first, then from rank 1, ...
    """

    keys: Keys
    seen: Keys
    counts: Ints
    rows: list[list[list[int]]]
    inverse: list[dict[str, npt.NDArray[np.int32]]]


def route_keys(parts: Sequence[Batch], tables: ShardedTables, layout: Layout) -> KeyRequests:
    """Find the distinct keys of each micro-batch by owner (NestPipe IV.A, key routing)."""
    micros, count, world = len(parts), len(layout.names), tables.world
    groups: list[list[Keys]] = [[] for _ in range(micros * count)]
    places: list[tuple[int, str, int]] = []  # micro-batch, feature, group
    for number, batch in enumerate(parts):
        for feature, ragged in batch.keys.items():
            place = number * count + layout.table_of(feature)
            groups[place].append(ragged.keys)
            places.append((number, feature, place))
    no_keys = np.empty(0, np.uint64)
    values = [
        np.require(group[0], requirements=["C", "A"])
        if len(group) == 1
        else np.concatenate([no_keys, *group])
        for group in groups
    ]
    keys, seen, key_counts, places_of_keys = _native.route_ask(
        values,
        layout.block_of.view(np.uint64),
        world=world,
        micros=micros,
        partitions=tables.partitions,
        seen=layout.counts,
    )
    inverse: list[dict[str, npt.NDArray[np.int32]]] = [{} for _ in parts]
    positions, at = places_of_keys.view(np.int32), _add_up([len(group) for group in values])
    for part, feature, number in places:
        length = len(parts[part].keys[feature].keys)
        inverse[part][feature] = positions[at[number] : at[number] + length]
        at[number] += length
    counts = key_counts.view(np.int64)
    return KeyRequests(keys, seen, counts, layout.by_block(counts), inverse)


@dataclass(frozen=True, slots=True)
class OwnedKeys:
    """The keys and rows that all ranks need from this one for a batch.

    keys[t]: uint64, ascending, distinct. seen[t]: how often each key occurs in the whole batch.
    begins[t]: where table t begins in its block. positions[m][b]: int64, the rows of block b that
    micro-batch m needs, for rank 0, then 1, ... counts[m][b]: how many of them go to each rank.
    samples: the number of samples of each rank. are_all_past_end: whether no loader has the batch.
    """

    keys: list[Keys]
    seen: list[Ints]
    begins: Ints
    positions: list[list[Ints]]
    counts: list[list[list[int]]]
    samples: list[int]
    are_all_past_end: bool


def exchange(
    requests: KeyRequests, samples: int, is_past_end: bool, layout: Layout, link: Link
) -> OwnedKeys:
    """Send keys to their owners, and receive the keys that other ranks need from this one."""
    torch = torch_module()
    world, micros, count = requests.counts.shape
    header = np.empty((world, micros * count + 2), np.int64)
    header[:, :-2] = requests.counts.reshape(world, -1)
    header[:, -2:] = samples, is_past_end
    even = [header.shape[1]] * world
    headers = link.all_to_all(torch.from_numpy(header.ravel()), even, even).numpy()
    headers = headers.reshape(world, -1)
    counts = headers[:, :-2]
    _check_headers(headers, counts)
    sends: list[int] = requests.counts.reshape(world, -1).sum(axis=1).tolist()
    receives: list[int] = counts.sum(axis=1).tolist()
    keys = link.all_to_all(torch.from_numpy(requests.keys.view(np.int64)), sends, receives)
    keys = keys.numpy().view(np.uint64)
    seen = np.empty(0, np.uint64)
    if layout.counts:
        seen_here = torch.from_numpy(requests.seen.view(np.int64))
        seen = link.all_to_all(seen_here, sends, receives).numpy().view(np.uint64)
    return _merge(keys, seen, counts.reshape(world, micros, count), headers[:, -2:], layout)


def _check_headers(headers: Ints, counts: Ints) -> None:
    """Raise FailedPrecondition for numbers of keys for which this rank must not allocate."""
    bad = ((headers < 0) | (headers > KEYS_MAX)).any(axis=1) | (counts.sum(axis=1) > KEYS_MAX)
    if bad.any():
        rank = int(bad.argmax())
        raise refuse(
            rank,
            f"the numbers of keys, of samples and past_end must be from 0 to {KEYS_MAX}, got "
            f"{int(headers[rank].min())} to {int(headers[rank].max())}",
        )


def _merge(keys: Keys, seen: Keys, counts: Ints, loaders: Ints, layout: Layout) -> OwnedKeys:
    """Merge the keys that all ranks sent. loaders: int64[world, 2], samples and is_past_end."""
    world, micros, count = counts.shape
    distinct, offsets, total, position = _native.route_merge(
        keys,
        seen,
        np.ascontiguousarray(counts).ravel().view(np.uint64),
        layout.block_of.view(np.uint64),
        world=world,
        micros=micros,
    )
    ends = offsets.view(np.int64)
    if not layout.counts:
        total = np.ones(len(distinct), np.uint64)
    lengths = layout.by_block(counts)
    bounds = _add_up([sum(ranks) for blocks in lengths for ranks in blocks])
    parts = iter([position[a:b] for a, b in pairwise(bounds)])
    return OwnedKeys(
        keys=[distinct[ends[table] : ends[table + 1]] for table in range(count)],
        seen=[total[ends[table] : ends[table + 1]].view(np.int64) for table in range(count)],
        begins=layout.begins_in_block(ends[:-1]),
        positions=[[next(parts) for _ in blocks] for blocks in lengths],
        counts=lengths,
        samples=loaders[:, 0].tolist(),
        are_all_past_end=bool(loaders[:, 1].all()),
    )


def _add_up(lengths: Any) -> Ints:
    """Return int64[n + 1]: where each part begins, and the total."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends
