"""A rank's partitions of the embedding tables: training slots in a petps pool.

Owns:        TableSpec, TableStatus, ShardedTables, ShardedTable (a TrainedTable).
Never does:  talk to other ranks, compute gradients; import torch.
Called by:   pipeline.py; TrainerOutput and RankedOutput, which write its rows to store and log.
Invariants:  a slot is the row followed by its optimizer state, written together; a new row
             depends only on (seed, table, key); a rank holds only keys of its own partitions. The
             stamp of a slot is the step that used it last.
Threads:     one thread calls retrieve(), another write_back(). If both touch a row, retrieve()
             reads all of it from before the write, or all of it from after the write.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.checkpoint.chunk import STAMP
from petps.delta.schema import MAX_DIM, check_name, partition_of
from petps.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from petps.pool import MAX_ROWS_PER_APPLY, Pool
from petps.train.admission import Admission, FilterAdmission
from petps.train.mix import GOLDEN, mix
from petps.train.optimizer import Optimizer
from petps.train.removal import LAST_USE, RULES, USES, Removal, Selection, SumOverRanks
from petps.train.table import ROW, Floats, Gathered, Keys, check_columns
from petps.train.tracker import Tracker

__all__ = ["Retrieved", "ShardedTable", "ShardedTables", "TableSpec", "TableStatus"]

_log = logging.getLogger("petps.train")

Mask = npt.NDArray[np.bool_]
Steps = npt.NDArray[np.uint32]
MODEL: Final = "train"  # the pool's model; the served model is another, in another pool
FULL_FILTER: Final = 0.1  # chance of a false admission at which a removal warns
PARTITIONS: Final = 64  # the default; the number of a pool, as of a log, never changes
ROWS_AT_ONCE: Final = MAX_ROWS_PER_APPLY


@dataclass(frozen=True, slots=True)
class TableSpec:
    """An embedding table.

    Args:
        dim: Values in a row.
        capacity: Rows that one rank can hold.
        initial: New rows are uniform in [-initial, initial).
        threshold: How often a key must occur before it gets a row.
        filter_bytes: Count the keys that have no row in a counting Bloom filter of this many bytes
            on all ranks together. None: count each key exactly, with 12 bytes a key.
        removal: The rules by which rows are removed; None: all rows stay.
    """

    name: str
    dim: int
    capacity: int
    initial: float = 0.05
    threshold: int = 1
    filter_bytes: int | None = None
    removal: Removal | None = None

    def __post_init__(self) -> None:
        check_name("table", self.name)
        if not 1 <= self.dim <= MAX_DIM:
            raise InvalidArgument(
                f"table {self.name}: dim must be from 1 to {MAX_DIM}, got {self.dim}"
            )
        for name, value in (("capacity", self.capacity), ("threshold", self.threshold)):
            if value < 1:
                raise InvalidArgument(f"table {self.name}: {name} must be at least 1, got {value}")
        if self.filter_bytes is not None and self.threshold == 1:
            raise InvalidArgument(
                f"table {self.name}: filter_bytes needs a threshold of at least 2, because "
                "threshold 1 admits every key at once and counts nothing"
            )

    @property
    def counts(self) -> bool:
        """Whether the table needs to know how often a key occurs in a batch."""
        return self.threshold > 1 or (self.removal is not None and self.removal.needs_uses)


@dataclass(frozen=True, slots=True)
class TableStatus:
    """The rows of a table on a rank, and how many of them it removed since it was opened.

    rows: how many there are. removed: how many rows each rule of Removal removed.
    false_admission: the chance that a key is admitted the first time that it occurs although its
    threshold is higher; None without a filter.
    """

    name: str
    rows: int
    removed: Mapping[str, int]
    false_admission: float | None


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
        admission: Admission | FilterAdmission,
    ) -> None:
        self.spec = spec
        self.optimizer = optimizer
        self.columns = _slot_columns(spec, optimizer)
        """The widths by name, in the order of a slot."""
        self.width = sum(self.columns.values())
        self.admission = admission
        self.has_uses = USES in self.columns
        """Whether the last value of a slot counts the uses of the row."""
        self._has_last_use = spec.removal is not None and spec.removal.needs_last_use
        self._removed = dict.fromkeys(RULES, 0)
        self.last_step, self._has_restarted = 0, False  # the step that wrote rows last
        self._group: Callable[[Steps], npt.NDArray[Any]] = lambda steps: steps
        self._table = table
        self._tracker = tracker
        self._salt = mix(np.array([seed], np.uint64) ^ _hash_name(spec.name))
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
        """Write and track the slots of the keys that a batch used; they are used in this step.

        Raise ResourceExhausted in a full table.
        """
        self._has_restarted |= batch < self.last_step
        self.last_step = batch
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
        slots, has_row, last_use = self._pull(keys)
        columns: dict[str, npt.NDArray[Any]] = {
            name: slots[:, part] for name, part in self._column_slices()
        }
        if self._has_last_use:
            columns[LAST_USE] = last_use.view(np.uint8).reshape(len(keys), 4)
        return Gathered(columns, None if has_row.all() else ~has_row, last_use)

    def take_restart(self) -> bool:
        """Return whether a batch had a lower number than the one before, since the last call."""
        result, self._has_restarted = self._has_restarted, False
        return result

    def begin_steps(self, step: int, group: Callable[[Steps], npt.NDArray[Any]]) -> None:
        """Note that no row which load_pieces() loads next is 2^31 steps from this one.

        group: Without a rule that needs them, steps for which it returns the same are equal.
        """
        self.last_step, self._has_restarted = step, False
        self._group = self._group if self._has_last_use else group

    def remove(self, step: int, sum_over_ranks: SumOverRanks) -> None:
        """Remove and track the rows that the rules remove after ``step``, whose rows are written.

        No batch may hold rows or counts of the table meanwhile. All ranks call this for the same
        table at a time, because keep_rows counts the rows of all ranks.
        """
        removal = self.spec.removal
        assert removal is not None
        selection = Selection(removal, step)
        keys = self._table.keys()
        for part in _slices(len(keys)):
            slots, _, last_use = self._pull(keys[part])
            uses = slots[:, -1] if self.has_uses else None
            selection.add(keys[part], slots[:, : self.spec.dim], last_use, uses)
        gone = selection.finish(sum_over_ranks)
        self._delete(gone)
        self._tracker.track(self.name, gone)
        self.admission.forget_admitted()
        self._warn_of_full_filter()
        for rule, count in selection.removed.items():
            self._removed[rule] += count
        _log.info(
            "[train] step %d: table %s: %d of %d rows removed (%s)",
            step, self.name, len(gone), len(keys),
            ", ".join(f"{rule} {count}" for rule, count in selection.removed.items()),
        )  # fmt: skip

    def begin_at(self, step: int) -> None:
        """Let rows that an earlier training used in later steps count as used in the step before.

        That training had a count of steps of its own, so its steps say nothing in this one.
        """
        if not self._has_last_use:
            return
        keys, last_use = self._table.keys_and_stamps()
        ahead = keys[(last_use - np.uint32(step & 0xFFFFFFFF)).view(np.int32) >= 0]
        for part in _slices(len(ahead)):
            slots, has_row, _ = self._pull(ahead[part])
            self._apply(ahead[part][has_row], slots[has_row], (step - 1) & 0xFFFFFFFF)
        self._tracker.track(self.name, ahead)

    def _warn_of_full_filter(self) -> None:
        chance = self.admission.estimate_false()
        if chance is not None and chance > FULL_FILTER:
            _log.warning(
                "[train] table %s: the filter admits %.0f %% of new keys at once, because it has "
                "seen too many: give a new store greater filter_bytes",
                self.name, 100 * chance,
            )  # fmt: skip

    def removes_at(self, step: int, version_steps: int | None) -> bool:
        """Return whether rows are removed after ``step``.

        version_steps: a version of the store is due after each step that is a multiple of it.
        """
        removal = self.spec.removal
        every = None if removal is None else removal.every or version_steps
        return every is not None and step % every == 0

    def status(self) -> TableStatus:
        """Return the numbers of rows of this rank. Reads all counters of a filter."""
        rows, chance = self._table.status().rows, self.admission.estimate_false()
        return TableStatus(self.name, rows, dict(self._removed), chance)

    def load_pieces(self, pieces: Iterable[tuple[Keys, Mapping[str, npt.NDArray[Any]]]]) -> None:
        """See TrainedTable. Erases keys that no piece has, and does not write rows that are equal.

        Pieces may have LAST_USE also if no rule needs it. Holds one piece and 8 bytes a row.
        """
        loaded = [np.empty(0, np.uint64)]
        for keys, columns in pieces:
            self._check_columns(keys, columns)
            for part in _slices(len(keys)):
                slots = np.concatenate([columns[name][part] for name in self.columns], axis=1)
                slots = np.ascontiguousarray(slots, np.float32)
                last_use = np.zeros(len(slots), np.uint32)
                if LAST_USE in columns:
                    last_use = np.ascontiguousarray(columns[LAST_USE][part]).view(np.uint32)[:, 0]
                    ahead = (last_use - np.uint32(self.last_step & 0xFFFFFFFF)).view(np.int32)
                    self.last_step += int(ahead.max(initial=0))
                old_slots, has_row, old_last_use = self._pull(keys[part])
                same_bits = old_slots.view(np.uint32) == slots.view(np.uint32)
                is_same = has_row & same_bits.all(axis=1)
                if LAST_USE in columns:
                    is_same &= self._group(last_use) == self._group(old_last_use)
                changed = keys[part][~is_same], slots[~is_same], last_use[~is_same]
                try:
                    self._apply(*changed)
                except ResourceExhausted:  # keys that are not in the pieces so far fill the table
                    self._erase_all_but(*loaded, keys)
                    self._apply(*changed)
            loaded.append(keys)
        self._erase_all_but(*loaded)

    def _erase_all_but(self, *kept: Keys) -> None:
        self._delete(np.setdiff1d(self._table.keys(), np.concatenate(kept)))

    def _delete(self, keys: Keys) -> None:
        for part in _slices(len(keys)):
            self._table.apply(keys[part], None)

    def _pull(self, keys: Keys) -> tuple[Floats, Mask, Steps]:
        """Return the slots of keys, which of them have a row, and the low 32 bits of last uses."""
        slots = np.empty((len(keys), self.width), np.float32)
        has_row = np.empty(len(keys), np.bool_)
        last_use = np.zeros(len(keys), np.uint32)
        self._table.pull(np.ascontiguousarray(keys), slots, has_row, last_use)
        return slots, has_row, last_use

    def _check_columns(self, keys: Keys, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        has_steps = self._has_last_use or LAST_USE in columns
        widths = self.columns | ({LAST_USE: 4} if has_steps else {})
        check_columns(self.name, widths, columns)
        for name, width in widths.items():
            if columns[name].shape != (len(keys), width):
                raise InvalidArgument(
                    f"table {self.name}: column {name} has shape {columns[name].shape}, "
                    f"expected ({len(keys)}, {width})"
                )

    def _apply(self, keys: Keys, slots: Floats, last_use: int | Steps) -> None:
        for part in _slices(len(keys)):
            rows = np.ascontiguousarray(slots[part], np.float32).view(np.uint8)
            stamp = last_use[part] if isinstance(last_use, np.ndarray) else int(last_use)
            report = self._table.apply(np.ascontiguousarray(keys[part]), rows, None, stamp)
            if report.refused:
                raise ResourceExhausted(
                    f"table {self.name} is full: it holds {self.spec.capacity} rows on a rank; "
                    "give it a greater capacity, raise its threshold, or let it remove rows "
                    "(removal=)"
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
        if self.has_uses:
            slots[:, -1] = 0
        bits = mix(keys ^ self._salt)[:, None] + np.arange(1, dim + 1, dtype=np.uint64) * GOLDEN
        bits = mix(bits) >> np.uint64(40)
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
        self._version_steps: int | None = None
        self._pool = _open_pool(path, specs, optimizer, partitions, f"{MODEL}@{rank}-of-{world}")
        try:
            self._tables = {
                spec.name: ShardedTable(
                    self._pool.table(spec.name, MODEL),
                    spec,
                    optimizer,
                    self.tracker,
                    seed,
                    self._make_admission(spec),
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
        """Delete all rows and counts, for example of a training that has written no version."""
        for table in self:
            table.load_pieces([])
            table.admission.load([])

    def expect_versions(self, steps: int | None) -> None:
        """Note that a version of the store is due after each step that is a multiple of ``steps``.

        Tables whose removal has no steps of its own remove rows then. None: not by steps, so what
        was noted before stays.
        """
        self._version_steps = self._version_steps if steps is None else steps

    def begin_removal(self, first_step: int) -> None:
        """Prepare the tables for a loop whose first batch has this number.

        Raise InvalidArgument if a table removes rows, but it is not known after which steps.
        """
        for table in self:
            removal = table.spec.removal
            if removal is not None and removal.every is None and self._version_steps is None:
                raise InvalidArgument(
                    f"table {table.name}: it is not known after which steps rows are removed: give "
                    "Removal(every=N), or make a RankedOutput with checkpoint=Every(steps=N) "
                    "before the Pipeline"
                )
        for table in self:
            table.begin_at(first_step)

    def removes_at(self, step: int) -> bool:
        """Return whether a table removes rows after ``step``. It is the same on all ranks."""
        return any(table.removes_at(step, self._version_steps) for table in self)

    def remove(self, step: int, sum_over_ranks: SumOverRanks) -> None:
        """Remove the rows that the tables' rules remove after ``step``. All ranks call this."""
        for name in sorted(self.names):  # in one order on all ranks
            if self[name].removes_at(step, self._version_steps):
                self[name].remove(step, sum_over_ranks)

    def status(self) -> list[TableStatus]:
        """Return the status of each table, between two steps."""
        return [table.status() for table in self]

    def _make_admission(self, spec: TableSpec) -> Admission | FilterAdmission:
        if spec.filter_bytes is None:
            return Admission(spec.threshold)
        owned = self.owned_partitions()
        return FilterAdmission(spec.threshold, spec.filter_bytes, self.partitions, owned)

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


def _slot_columns(spec: TableSpec, optimizer: Optimizer) -> dict[str, int]:
    """Return the widths of the columns of a slot, by name. USES is the last one, if it has one."""
    columns = {ROW: spec.dim, **optimizer.columns(spec.dim)}
    reserved = columns.keys() & {LAST_USE, USES, STAMP}
    if reserved:
        raise InvalidArgument(
            f"table {spec.name}: the optimizer has a column {min(reserved)!r}, which petps has for "
            "itself: give the column another name"
        )
    if spec.removal is not None and spec.removal.needs_uses:
        columns[USES] = 1
    return columns


def _hash_name(name: str) -> np.uint64:
    value = np.zeros(1, np.uint64)
    for byte in name.encode():
        value = mix(value ^ np.uint64(byte))
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
    widths = {spec.name: sum(_slot_columns(spec, optimizer).values()) for spec in specs}
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
                f"{table.capacity} rows; wanted {width} and {spec.capacity}): give the same "
                "tables, removal and optimizer, or another path and restore a version"
            )
