"""Protocols that ingest uses: tables, progress, instances, bases, dead letters."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from petps.delta import Message, TableSchema

__all__ = [
    "ApplyReport",
    "BaseReader",
    "BaseSource",
    "Commit",
    "DeadLetters",
    "InstanceTable",
    "InstanceTables",
    "Instances",
    "Progress",
    "Standing",
]

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Stamps = npt.NDArray[np.uint32]
# An event time: cell_ns, time_ns, version, bounds, shown_ns, debt_ns.
Clock = tuple[int, int, int, list[int], int, int]


class Standing(enum.Enum):
    """Persistent state of a partition in its stream (native/pool/FORMAT.md, progress)."""

    FOLLOWING = "following"
    CATCHING_UP = "catching_up"  # rows are a mixture of the old stream and of base ``target``
    PASSING = "passing"  # run ``target`` feeds, or fed, another instance: ingest skips it here
    ROWS_MISSING = "incomplete"  # rows that the commit of version ``target`` counts are missing
    CONFLICT = "conflict"  # two publishers wrote the run
    LOST_POWER = "lost_power"  # the pool lost power: rows may be older than recorded progress

    @property
    def needs_base(self) -> bool:
        """Return whether only a base ends this state, whatever messages follow."""
        return self not in (Standing.FOLLOWING, Standing.PASSING)


@dataclass(frozen=True, slots=True)
class Progress:
    """Applied part of a partition's stream, as the pool stores it.

    Reading continues at ``offset``. ``target``: see Standing. ``publisher`` is the mark of the
    run's publisher (order.mark_of); 0 if it is unknown.
    """

    partition: int
    run: int = 0
    seq: int = 0
    offset: int = 0
    version: int = 0
    standing: Standing = Standing.FOLLOWING
    target: int = 0
    publisher: int = 0

    @property
    def is_blank(self) -> bool:
        """Return whether it claims nothing, as that of a partition that was removed.

        Its ``target`` is then the newest run that it had applied, so that ingest, when it reads the
        log from its start, passes the runs of instances that were dropped since.
        """
        return self == Progress(self.partition, target=self.target)


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit of a version in a partition; ``time_ns``: when it was published."""

    partition: int
    version: int
    time_ns: int


class ApplyReport(Protocol):
    """Result of an apply, in rows."""

    inserted: int
    updated: int
    deleted: int
    absent: int  # deletions of keys that the table did not hold
    refused: int  # new keys that had no room


class InstanceTable(Protocol):
    """One table that deltas feed."""

    @property
    def schema(self) -> TableSchema:
        """Return the table's name, dtype and dim."""

    @property
    def capacity(self) -> int:
        """Return the number of rows that the table can hold."""

    def has_room(self) -> bool:
        """Return whether the table holds fewer rows than its capacity."""

    def holds(self, keys: Keys) -> Mask:
        """Return bool[n]: which of the keys the table holds now."""

    def apply(
        self, keys: Keys, rows: Rows | None, deleted: Mask | None, stamp: int | Stamps
    ) -> ApplyReport:
        """Apply keys uint64[n], rows uint8[n, row_bytes] or None (all deleted), deleted bool[n].

        ``stamp``: the low 32 bits of the version, which the slots keep, or uint32[n]. Durable on
        return.
        """

    def adopt_clock(self, partition: int, clock: Clock) -> None:
        """Take over a base's event time, unless the table's own counts a later version."""

    def all_keys(self) -> Iterator[Keys]:
        """Yield pages with every key that exists during the whole scan, and perhaps others.

        Among the others are keys whose damaged rows were removed.
        """


class InstanceTables(Protocol):
    """The tables and the progress of one instance."""

    @property
    def model(self) -> str:
        """Return the model's name."""

    @property
    def name(self) -> str:
        """Return the instance's name."""

    @property
    def partitions(self) -> int:
        """Return P of the model."""

    def is_live(self) -> bool:
        """Return whether the instance may be written. Once it is frozen or dropped, it may not."""

    def tables(self) -> Mapping[str, InstanceTable]:
        """Return the tables that deltas feed, by name."""

    def pushed_tables(self) -> Collection[str]:
        """Return the names of the tables that pushes feed: deltas and bases leave them alone."""

    def progress(self, partition: int) -> Progress | None:
        """Return the partition's last recorded progress, or None."""

    def record_progress(self, progress: Sequence[Progress], commits: Sequence[Commit] = ()) -> None:
        """Record the progress of partitions, each at most once. Durable on return.

        ``commits``: those that the progress covers, in order. A commit that was recorded before
        changes nothing.
        """


class BaseReader(Protocol):
    """Reader of a base (petps.checkpoint)."""

    @property
    def name(self) -> str:
        """Return the name for messages."""

    @property
    def model(self) -> str:
        """Return the model whose rows it holds."""

    @property
    def instance(self) -> str:
        """Return the instance whose rows it holds; the model's plain name fits any instance."""

    @property
    def version(self) -> int:
        """Return the version that it holds."""

    @property
    def dense(self) -> str | None:
        """Return the location of that version's dense weights."""

    @property
    def partitions(self) -> int:
        """Return P of the model."""

    def position(self, partition: int) -> tuple[int, int]:
        """Return (run, seq) up to which it holds the partition's deltas."""

    def schemas(self) -> Mapping[str, TableSchema]:
        """Return its tables, by name."""

    def rows(self, table: str) -> int:
        """Return an upper bound of a table's rows."""

    def stamped_chunks(
        self, table: str, partitions: Collection[int] | None = None
    ) -> Iterator[tuple[Keys, Rows, Stamps | None]]:
        """Yield the rows of some partitions, with their stamps, if the base has them.

        Raises PetpsError if they cannot be read whole.
        """

    def clocks(self, table: str) -> Mapping[int, Clock]:
        """Return the event times of a table whose rows expire, by partition."""

    def commits(self) -> Sequence[tuple[int, int]]:
        """Return (version, time in ns) of commits, oldest first, if the base has no event times.

        They hold for every partition. Raises PetpsError if they cannot be read.
        """


class Instances(Protocol):
    """The instances of a model, and the choice of the instance that a partition's deltas feed."""

    def owner(self, partition: int) -> InstanceTables:
        """Return the newest instance that follows the partition, else the model's current one."""

    def begin(self, name: str, base: BaseReader, run: int) -> InstanceTables | None:
        """Return the instance ``name``. If it does not exist, create it with the base's tables.

        Return None if ``run`` feeds no instance here, because the instance is frozen, or was
        dropped after the run had begun. Raises PetpsError if it cannot be created.
        """

    def complete(self, instance: InstanceTables) -> None:
        """Switch the model's name to the instance, if wanted: all partitions follow it now."""


class BaseSource(Protocol):
    """Source of bases."""

    def open(self, location: str) -> BaseReader:
        """Return the base that a marker names. Raises PetpsError."""

    def of_model(self, model: str) -> Sequence[BaseReader]:
        """Return a model's bases, newest first. Raises PetpsError if the search fails."""


class DeadLetters(Protocol):
    """Destination of messages that could not be decoded."""

    def add(self, partition: int, offset: int, reason: str, message: Message | None) -> None:
        """Store a message (None: the log has lost it) and the reason why it was refused."""
