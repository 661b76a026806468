"""What ingest asks of the tables, of bases and of dead letters."""

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
    "DeadLetters",
    "Instances",
    "Progress",
    "Standing",
    "Store",
    "StoreTable",
]

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


class Standing(enum.Enum):
    """How a partition stands to its stream, across restarts (native/pool/FORMAT.md, progress)."""

    FOLLOWING = "following"
    CATCHING_UP = "catching_up"  # rows are a mixture of the old stream and of base ``target``
    PASSING = "passing"  # run ``target`` feeds, or fed, another instance: it is passed over
    INCOMPLETE = "incomplete"  # rows that the commit of version ``target`` counts never came
    CONFLICT = "conflict"  # two publishers wrote the run
    LOST_POWER = "lost_power"  # the pool lost power: rows may be older than any progress said

    @property
    def needs_base(self) -> bool:
        """Only a base ends it, whatever the stream brings."""
        return self not in (Standing.FOLLOWING, Standing.PASSING)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a partition has applied, as the pool remembers it.

    ``offset``: where reading goes on. ``target``: see Standing. ``publisher``: who wrote ``run``,
    as order.mark_of tells; 0: not known.
    """

    partition: int
    run: int = 0
    seq: int = 0
    offset: int = 0
    version: int = 0
    standing: Standing = Standing.FOLLOWING
    target: int = 0
    publisher: int = 0


class ApplyReport(Protocol):
    """What an apply did, in rows."""

    inserted: int
    updated: int
    deleted: int
    absent: int
    refused: int


class StoreTable(Protocol):
    """One table that deltas feed."""

    @property
    def schema(self) -> TableSchema:
        """Its name, dtype and dim."""

    @property
    def capacity(self) -> int:
        """Rows that it can hold."""

    def has_room(self) -> bool:
        """Whether it holds fewer rows than its capacity."""

    def holds(self, keys: Keys) -> Mask:
        """bool[n]: which keys are there now."""

    def apply(self, keys: Keys, rows: Rows | None, deleted: Mask | None, stamp: int) -> ApplyReport:
        """keys: uint64[n], rows: uint8[n, row_bytes] or None (all deleted). Durable on return."""

    def all_keys(self) -> Iterator[Keys]:
        """Every key that is there from the call to the end, in pages; others may be given."""


class Store(Protocol):
    """The tables and the progress of one instance."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def instance(self) -> str:
        """The instance's name."""

    @property
    def partitions(self) -> int:
        """P of the model."""

    def live(self) -> bool:
        """False once it is frozen or dropped: nothing is to be written any more."""

    def tables(self) -> Mapping[str, StoreTable]:
        """The tables that deltas feed, by name."""

    def progress(self, partition: int) -> Progress | None:
        """What was recorded last, or None."""

    def record_progress(self, progress: Sequence[Progress]) -> None:
        """Records partitions, each at most once. Durable on return."""


class BaseReader(Protocol):
    """A base, as petps.checkpoint reads it."""

    @property
    def name(self) -> str:
        """What to call it in messages."""

    @property
    def model(self) -> str:
        """The model whose rows it holds."""

    @property
    def instance(self) -> str:
        """The instance whose rows it holds; the model's plain name: of any."""

    @property
    def version(self) -> int:
        """The version it holds."""

    @property
    def dense(self) -> str | None:
        """Where the dense weights of that version are."""

    @property
    def partitions(self) -> int:
        """P of the model."""

    def position(self, partition: int) -> tuple[int, int]:
        """(run, seq) up to which it holds the partition's deltas."""

    def schemas(self) -> Mapping[str, TableSchema]:
        """Its tables, by name."""

    def rows(self, table: str) -> int:
        """Rows of a table, at most."""

    def chunks(
        self, table: str, partitions: Collection[int] | None = None
    ) -> Iterator[tuple[Keys, Rows]]:
        """Its rows of some partitions. Raises PetpsError when they can't be read whole."""


class Instances(Protocol):
    """The instances of a model: which of them a partition's deltas feed."""

    def owner(self, partition: int) -> Store:
        """The newest that follows the partition, or else what the model's name means."""

    def begin(self, name: str, base: BaseReader, run: int) -> Store | None:
        """The instance, made beside the others with the base's tables if it is not there.

        None: ``run`` feeds nobody here, because the instance is frozen, or was dropped after the
        run had begun. Raises PetpsError when it can't be made.
        """

    def complete(self, store: Store) -> None:
        """All partitions follow it now: the model's name may mean it."""


class BaseSource(Protocol):
    """Where bases are found."""

    def open(self, location: str) -> BaseReader:
        """The base that a marker names. Raises PetpsError."""

    def of_model(self, model: str) -> Sequence[BaseReader]:
        """The bases of a model, newest first. Raises PetpsError when they can't be looked for."""


class DeadLetters(Protocol):
    """Where messages go that could not be decoded."""

    def add(self, partition: int, offset: int, reason: str, message: Message | None) -> None:
        """Keeps a message (None: the log had lost it) and why it was refused."""
