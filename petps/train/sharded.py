"""A rank's partitions of the embedding tables: training slots in a petps pool.

Owns:        TableSpec, ShardedTables, ShardedTable (a TrainedTable).
Never does:  talk to other ranks, compute gradients; import torch.
Called by:   pipeline.py; TrainerOutput and RankedOutput, which write its rows to store and log.
Invariants:  a slot is the row followed by its optimizer state, written together; a new row
             depends only on (seed, table, key); a rank holds only keys of its own partitions.
Threads:     one thread calls retrieve(), another write_back(). If both touch a row, retrieve()
             reads all of it from before the write, or all of it from after the write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.delta.schema import MAX_DIM, check_name, partition_of
from petps.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from petps.pool import MAX_ROWS_PER_APPLY, Pool
from petps.train.admission import Admission
from petps.train.optimizer import Optimizer
from petps.train.table import ROW, Floats, Gathered, Keys, check_columns
from petps.train.tracker import Tracker

__all__ = ["Retrieved", "ShardedTable", "ShardedTables", "TableSpec"]

Mask = npt.NDArray[np.bool_]
MODEL: Final = "train"  # the pool's model; the served model is another, in another pool
PARTITIONS: Final = 64  # the default; the number of a pool, as of a log, never changes
ROWS_AT_ONCE: Final = MAX_ROWS_PER_APPLY


@dataclass(frozen=True, slots=True)
class TableSpec:
    """An embedding table.

    dim: values in a row. capacity: rows that one rank can hold. initial: new rows are uniform
    in [-initial, initial). threshold: how often a key must occur before it gets a row.
    """

    name: str
    dim: int
    capacity: int
    initial: float = 0.05
    threshold: int = 1

    def __post_init__(self) -> None:
        check_name("table", self.name)
        if not 1 <= self.dim <= MAX_DIM:
            raise InvalidArgument(
                f"table {self.name}: dim must be from 1 to {MAX_DIM}, got {self.dim}"
            )
        for name, value in (("capacity", self.capacity), ("threshold", self.threshold)):
            if value < 1:
                raise InvalidArgument(f"table {self.name}: {name} must be at least 1, got {value}")


@dataclass(frozen=True, slots=True)
class Retrieved:
    """The slots of a batch's keys.

    slots: float32[n, width], in the order of the keys. live: bool[n], which keys have a row from
    now on. The other keys read as zeros, and are neither updated nor written back.
    """

    slots: Floats
    live: Mask


class ShardedTable:
    """One table's rows on this rank, tracked when they are written back."""

    def __init__(
        self,
        table: _native.Table,
        spec: TableSpec,
        optimizer: Optimizer,
        tracker: Tracker,
        seed: int,
    ) -> None:
        self.spec = spec
        self.optimizer = optimizer
        self.columns: dict[str, int] = {ROW: spec.dim, **optimizer.columns(spec.dim)}
        """The widths by name, in the order of a slot."""
        self.width = sum(self.columns.values())
        self.admission = Admission(spec.threshold)
        self._table = table
        self._tracker = tracker
        self._salt = _mix(np.array([seed], np.uint64) ^ _hash_name(spec.name))
        tracker.add_table(spec.name, None)

    @property
    def name(self) -> str:
        """See TrainedTable."""
        return self.spec.name

    def retrieve(
        self, batch: int, keys: Keys, seen: npt.NDArray[np.integer], into: Floats | None = None
    ) -> Retrieved:
        """Read the slots of a batch, and admit new keys.

        keys: uint64[n], ascending, distinct. seen: how often each key occurs in the batch. into:
        float32[n, width], the memory for the slots.
        """
        slots = np.empty((len(keys), self.width), np.float32) if into is None else into
        live = np.empty(len(keys), np.bool_)
        self._table.pull(keys, slots, live)
        new = np.flatnonzero(~live)
        if len(new) or self.spec.threshold > 1:
            admitted = new[self.admission.count(batch, keys[new], seen[new])]
            live[admitted] = True
            slots[admitted] = self._make_slots(keys[admitted])
        return Retrieved(slots, live)

    def write_back(self, batch: int, keys: Keys, slots: Floats) -> None:
        """Write and track the slots of updated keys. Raise ResourceExhausted in a full table."""
        self._apply(keys, slots, batch)
        self.admission.commit(batch)
        self._tracker.track(self.name, keys)

    def keys(self) -> Keys:
        """See TrainedTable."""
        return np.sort(self._table.keys())

    def keys_of(self, ids: npt.NDArray[np.uint64]) -> Keys:
        """See TrainedTable; ids are keys."""
        return ids

    def ids_of(self, keys: Keys) -> npt.NDArray[np.uint64]:
        """See TrainedTable."""
        return keys

    def gather(self, keys: Keys) -> Gathered:
        """See TrainedTable."""
        slots = np.empty((len(keys), self.width), np.float32)
        has_row = np.empty(len(keys), np.bool_)
        self._table.pull(keys, slots, has_row)
        columns = {name: slots[:, part] for name, part in self._column_slices()}
        return Gathered(columns, None if has_row.all() else ~has_row)

    def load_pieces(self, pieces: Iterable[tuple[Keys, Mapping[str, Floats]]]) -> None:
        """See TrainedTable. Erases keys that no piece has, and does not write rows that are equal.

        Holds one piece and 8 bytes a row in memory.
        """
        loaded = [np.empty(0, np.uint64)]
        for keys, columns in pieces:
            self._check_columns(keys, columns)
            for part in _slices(len(keys)):
                slots = np.concatenate([columns[name][part] for name in self.columns], axis=1)
                slots = np.ascontiguousarray(slots, np.float32)
                old_slots = np.empty_like(slots)
                has_row = np.empty(len(slots), np.bool_)
                self._table.pull(np.ascontiguousarray(keys[part]), old_slots, has_row)
                same_bits = old_slots.view(np.uint32) == slots.view(np.uint32)
                differs = ~(has_row & same_bits.all(axis=1))
                try:
                    self._apply(keys[part][differs], slots[differs], 0)
                except ResourceExhausted:  # keys that are not in the pieces so far fill the table
                    self._erase_all_but(*loaded, keys)
                    self._apply(keys[part][differs], slots[differs], 0)
            loaded.append(keys)
        self._erase_all_but(*loaded)

    def _erase_all_but(self, *kept: Keys) -> None:
        others = np.setdiff1d(self._table.keys(), np.concatenate(kept))
        for part in _slices(len(others)):
            self._table.apply(others[part], None)

    def _check_columns(self, keys: Keys, columns: Mapping[str, Floats]) -> None:
        check_columns(self.name, self.columns, columns)
        for name, width in self.columns.items():
            if columns[name].shape != (len(keys), width):
                raise InvalidArgument(
                    f"table {self.name}: column {name} has shape {columns[name].shape}, "
                    f"expected ({len(keys)}, {width})"
                )

    def _apply(self, keys: Keys, slots: Floats, stamp: int) -> None:
        for part in _slices(len(keys)):
            rows = np.ascontiguousarray(slots[part], np.float32).view(np.uint8)
            report = self._table.apply(np.ascontiguousarray(keys[part]), rows, None, stamp)
            if report.refused:
                raise ResourceExhausted(
                    f"table {self.name} is full: it holds {self.spec.capacity} rows on a rank; "
                    "give it a greater capacity, or raise its threshold"
                )

    def _column_slices(self) -> Iterator[tuple[str, slice]]:
        at = 0
        for name, width in self.columns.items():
            yield name, slice(at, at + width)
            at += width

    def _make_slots(self, keys: Keys) -> Floats:
        """Return float32[n, width]: rows that are hashes of key and column, and initial state."""
        dim = self.spec.dim
        slots = np.full((len(keys), self.width), self.optimizer.initial(dim), np.float32)
        counters = np.arange(1, dim + 1, dtype=np.uint64) * _GOLDEN
        bits = _mix(_mix(keys ^ self._salt)[:, None] + counters) >> np.uint64(40)
        unit = bits.astype(np.float32) * np.float32(2.0**-24)  # exact: 24 bits
        slots[:, :dim] = (unit * np.float32(2) - np.float32(1)) * np.float32(self.spec.initial)
        return slots


class ShardedTables:
    """Embedding tables, of which this rank holds the keys of its partitions.

    path: the rank's pool, which is reopened if it exists and created otherwise; None: memory. A
    pool belongs to one rank: (rank, world) must be those that it was created with. partitions:
    the number of partitions of the log that receives the rows. seed: of new rows. As a context
    manager, it closes the pool on leaving the block.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None,
        specs: Sequence[TableSpec],
        optimizer: Optimizer,
        *,
        rank: int = 0,
        world: int = 1,
        partitions: int = PARTITIONS,
        seed: int = 0,
        tracker: Tracker | None = None,
    ) -> None:
        if not 0 <= rank < world:
            raise InvalidArgument(f"rank {rank} must be from 0 to {world - 1}, below world {world}")
        if partitions < world:
            raise InvalidArgument(
                f"partitions must be at least {world}, one for each rank, got {partitions}"
            )
        if len({spec.name for spec in specs}) != len(specs) or not specs:
            raise InvalidArgument("give at least one table, and each table a name of its own")
        self.rank = rank
        self.world = world
        self.partitions = partitions
        self.optimizer = optimizer
        self.tracker = tracker or Tracker()
        self._pool = _open_pool(path, specs, optimizer, partitions, f"{MODEL}@{rank}-of-{world}")
        try:
            self._tables = {
                spec.name: ShardedTable(
                    self._pool.table(spec.name, MODEL), spec, optimizer, self.tracker, seed
                )
                for spec in specs
            }
        except BaseException:
            self._pool.close()
            raise

    @property
    def names(self) -> list[str]:
        """The names of the tables, in the order given."""
        return list(self._tables)

    def __getitem__(self, name: str) -> ShardedTable:
        try:
            return self._tables[name]
        except KeyError:
            raise NotFound(
                f"there is no table {name!r}; the tables are: {', '.join(self._tables)}"
            ) from None

    def __iter__(self) -> Iterator[ShardedTable]:
        return iter(self._tables.values())

    def owner_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return int64[n]: the rank that holds each key. A rank's partitions are consecutive."""
        return partition_of(keys, self.partitions).astype(np.int64) * self.world // self.partitions

    def owns(self, keys: Keys) -> Mask:
        """Return bool[n]: whether each key belongs to this rank."""
        is_own: Mask = self.owner_of(keys) == self.rank
        return is_own

    def owned_partitions(self) -> range:
        """Return this rank's partitions."""
        first, last = (
            -(-rank * self.partitions // self.world) for rank in (self.rank, self.rank + 1)
        )
        return range(first, last)

    def erase(self) -> None:
        """Delete all rows, for example those that a training without a version left."""
        for table in self:
            table.load_pieces([])

    def save_counts(self) -> dict[str, bytes]:
        """Return the admission counts by table, of the tables that have a threshold."""
        return {table.name: table.admission.save() for table in self if table.spec.threshold > 1}

    def load_counts(self, table: str, bodies: Sequence[bytes]) -> None:
        """Replace the counts of a table by those that save_counts() returned on each rank."""
        self[table].admission.load(bodies, self.owns)

    def close(self) -> None:
        """Close the pool cleanly."""
        self._pool.close()

    def __enter__(self) -> ShardedTables:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's finaliser."""
    with np.errstate(over="ignore"):
        values = values + _GOLDEN
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _hash_name(name: str) -> np.uint64:
    value = np.zeros(1, np.uint64)
    for byte in name.encode():
        value = _mix(value ^ np.uint64(byte))
    return np.uint64(value[0])


def _slices(count: int) -> Iterator[slice]:
    for at in range(0, count, ROWS_AT_ONCE):
        yield slice(at, min(count, at + ROWS_AT_ONCE))


def _open_pool(
    path: str | PathLike[str] | None,
    specs: Sequence[TableSpec],
    optimizer: Optimizer,
    partitions: int,
    instance: str,
) -> Pool:
    """Open or create the pool and make the tables that it lacks.

    Some tables may exist already, because a rank may have been killed while it made them.
    Raises FailedPrecondition if the pool has other tables, or belongs to another rank.
    """
    widths = {spec.name: spec.dim + sum(optimizer.columns(spec.dim).values()) for spec in specs}
    if path is not None and Path(path).exists():
        pool = Pool.open(path)
    else:
        # Enough here: a version can be restored after a power loss, and after a crash of the
        # process alone the kernel still writes the pages back.
        pool = Pool.create(path, durability="process")
    with contextlib.ExitStack() as stack:
        stack.callback(pool.close)
        instances = {entry.name: entry.partitions for entry in pool.native.instances()}
        if instances and instances != {instance: partitions}:
            raise FailedPrecondition(
                f"pool {path} belongs to {', '.join(instances)} with "
                f"{', '.join(map(str, instances.values()))} partitions, not to {instance} with "
                f"{partitions}: give another path, and restore a version"
            )
        if not instances:
            pool.native.create_instance(MODEL, instance, partitions)
        _make_tables(pool, path, specs, widths)
        stack.pop_all()
    return pool


def _make_tables(
    pool: Pool, path: Any, specs: Sequence[TableSpec], widths: Mapping[str, int]
) -> None:
    existing = {table.name: table for table in pool.tables(MODEL)}
    for spec in specs:
        width = widths[spec.name]
        table = existing.get(spec.name)
        if table is None:
            table = pool.create_table(spec.name, dim=width, capacity=spec.capacity, model=MODEL)
        if table.dim != width or table.capacity != spec.capacity:
            raise FailedPrecondition(
                f"pool {path} was created for other tables ({spec.name}: {table.dim} values, "
                f"{table.capacity} rows; wanted {width} and {spec.capacity}): give the same tables "
                "and optimizer, or another path and restore a version"
            )
