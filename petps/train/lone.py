"""The tables of a training in one process, for RankedOutput: numpy arrays, PyTorch's embeddings.

Owns:        LoneTables; Tables, what RankedOutput takes.
Never does:  hold rows; track keys.
Called by:   trainers whose loop is their own; ranks.py, stores.py.
Invariants:  the one rank owns every key and every partition.
Threads:     values only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from petps.errors import InvalidArgument
from petps.train.sharded import ShardedTables
from petps.train.table import Keys, Mask, TrainedTable
from petps.train.tracker import Tracker

__all__ = ["LoneTables", "Tables"]


class LoneTables:
    """The tables of the only rank, as RankedOutput and open_store() take them.

    partitions: those of the log that the rows are published to; it must be the log's number.
    Raises InvalidArgument if two tables have the same name, or there is none.
    """

    rank = 0
    world = 1

    def __init__(
        self, tracker: Tracker, tables: Iterable[TrainedTable], *, partitions: int = 1
    ) -> None:
        self._tables: dict[str, TrainedTable] = {}
        for table in tables:
            if table.name in self._tables:
                raise InvalidArgument(f"two tables have the name {table.name!r}: give each its own")
            self._tables[table.name] = table
        if not self._tables:
            raise InvalidArgument("give at least one table")
        self.tracker = tracker
        self.partitions = partitions

    def __iter__(self) -> Iterator[TrainedTable]:
        return iter(self._tables.values())

    def owns(self, keys: Keys) -> Mask:
        """Return bool[n]: all keys belong to this rank."""
        return np.ones(len(keys), np.bool_)

    def owned_partitions(self) -> range:
        """Return all partitions."""
        return range(self.partitions)

    def erase(self) -> None:
        """Leave the rows as they are: without a version, they are those that the trainer drew."""

    def expect_versions(self, steps: int | None) -> None:
        """Do nothing: these tables remove no rows by rules."""

    def save_counts(self) -> dict[str, bytes]:
        """Return nothing: these tables admit every key."""
        return {}

    def load_counts(self, table: str, bodies: Sequence[bytes]) -> None:
        """Ignore the counts of a training with ranks, which has admitted its keys."""


Tables = ShardedTables | LoneTables
