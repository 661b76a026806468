"""Adapters from native tables and instances to ingest's InstanceTables and Instances."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from petps import _native
from petps.delta import TableSchema
from petps.delta.schema import check_instance
from petps.errors import FailedPrecondition
from petps.server.ingest.protocols import (
    ApplyReport,
    BaseReader,
    Clock,
    Commit,
    InstanceTable,
    InstanceTables,
    Keys,
    Mask,
    Progress,
    Rows,
    Stamps,
    Standing,
)

__all__ = ["NativeInstanceTables", "NativeInstances"]

_log = logging.getLogger("petps.server.ingest")

LOOKUP_KEYS: Final = 4096  # keys of one lookup, which needs memory for all their rows


class _NativeTable:
    """A native table as InstanceTable."""

    def __init__(self, tables: _native.Tables, table: _native.Table, threads: int) -> None:
        self._tables = tables
        self._table = table
        self._threads = threads
        self._schema = TableSchema(table.name, table.dtype, table.dim)

    @property
    def schema(self) -> TableSchema:
        return self._schema

    @property
    def capacity(self) -> int:
        return int(self._table.status().capacity)  # the table may have grown

    def has_room(self) -> bool:
        return self._table.status().rows < self.capacity

    def holds(self, keys: Keys) -> Mask:
        mask = np.empty(len(keys), np.bool_)
        out = np.empty((min(len(keys), LOOKUP_KEYS), self._schema.row_bytes), np.uint8)
        for start in range(0, len(keys), LOOKUP_KEYS):
            part = slice(start, start + LOOKUP_KEYS)
            self._table.pull(keys[part], out[: len(keys[part])], mask[part])
        return mask

    def apply(
        self, keys: Keys, rows: Rows | None, deleted: Mask | None, stamp: int | Stamps
    ) -> ApplyReport:
        return self._table.apply(keys, rows, deleted, stamp, self._threads)

    def adopt_clock(self, partition: int, clock: Clock) -> None:
        self._tables.adopt_clock(self._table.id, partition, clock)

    def all_keys(self) -> Iterator[Keys]:
        with self._table.scan() as pages:
            for keys, _ in pages:
                yield keys
        # A catch-up ends that a key is missing which its base lacks (native/table/SCRUB.md).
        yield self._table.missing_keys()


class NativeInstanceTables:
    """The delta-fed tables of an instance in an open pool (petps._native.Tables) as InstanceTables.

    ``threads``: the number of threads that apply a large batch together.
    """

    def __init__(self, tables: _native.Tables, name: str, *, threads: int = 1) -> None:
        record = tables.resolve(name)
        self._threads = threads
        self._tables = tables
        self._name: str = record.name
        self._id: int = record.id
        self._model: str = record.model
        self._partitions: int = record.partitions

    @property
    def model(self) -> str:
        """See InstanceTables."""
        return self._model

    @property
    def partitions(self) -> int:
        """See InstanceTables."""
        return self._partitions

    @property
    def name(self) -> str:
        """See InstanceTables."""
        return self._name

    def is_live(self) -> bool:
        """See InstanceTables."""
        return any(
            record.id == self._id and not record.frozen for record in self._tables.instances()
        )

    def tables(self) -> dict[str, InstanceTable]:
        """See InstanceTables."""
        return {
            table.name: _NativeTable(self._tables, table, self._threads)
            for table in self._tables.tables()
            if table.record.instance == self._id and table.record.feed == "delta"
        }

    def pushed_tables(self) -> set[str]:
        """See InstanceTables."""
        return {
            table.name
            for table in self._tables.tables()
            if table.record.instance == self._id and table.record.feed == "push"
        }

    def progress(self, partition: int) -> Progress | None:
        """See InstanceTables."""
        record = self._tables.progress(self._id, partition)
        if record is None:
            return None
        values = record.as_dict()
        del values["instance"]
        return Progress(standing=Standing(values.pop("state")), **values)

    def record_progress(self, progress: Sequence[Progress], commits: Sequence[Commit] = ()) -> None:
        """See InstanceTables."""
        self._tables.record_all_progress(
            [
                _native.Progress(
                    instance=self._id,
                    partition=entry.partition,
                    run=entry.run,
                    seq=entry.seq,
                    offset=entry.offset,
                    version=entry.version,
                    state=entry.standing.value,
                    target=entry.target,
                    publisher=entry.publisher,
                )
                for entry in progress
            ],
            [(self._id, commit.partition, commit.version, commit.time_ns) for commit in commits],
        )


class NativeInstances:
    """The instances of a model in an open pool as Instances.

    ``switch``: whether the model's name switches to a new instance as soon as it is complete.
    ``threads``: as for NativeInstanceTables.
    """

    def __init__(
        self, tables: _native.Tables, model: str, *, switch: bool, threads: int = 1
    ) -> None:
        self._tables = tables
        self._threads = threads
        self._model: str = tables.resolve(model).model
        self._switch = switch
        # Reading a removed partition again replaces the record of the run that it had applied.
        self._begun_at = self._newest_run()

    def owner(self, partition: int) -> NativeInstanceTables:
        """See Instances."""
        for record in reversed(self._tables.instances()):
            if (
                record.model == self._model
                and not record.frozen
                and self._tables.progress(record.id, partition) is not None
            ):
                return NativeInstanceTables(self._tables, record.name, threads=self._threads)
        return NativeInstanceTables(self._tables, self._model, threads=self._threads)

    def begin(self, name: str, base: BaseReader, run: int) -> NativeInstanceTables | None:
        """See Instances. New tables inherit from the model's current tables of the same name.

        The capacity is the larger of the current table's capacity and the base's rows. The default
        row is the current table's if dtype and dim are equal, and so is expire_after.
        """
        check_instance(self._model, name)
        current = self._tables.resolve(self._model)
        records = {record.name: record for record in self._tables.instances()}
        instance = records.get(name)
        if instance is not None and instance.frozen:
            return None
        if instance is None and self._was_passed(run):
            _log.info("[ingest] instance %s was dropped: passing over run %d", name, run)
            return None
        if instance is None:
            instance = self._tables.create_instance(self._model, name, current.partitions)
            _log.info("[ingest] instance %s begins with %s", name, base.name)
        tables = {(table.record.instance, table.name): table for table in self._tables.tables()}
        for table, schema in base.schemas().items():
            if (instance.id, table) in tables:  # created before a crash
                continue
            old = tables.get((current.id, table))
            has_same_rows = old is not None and (old.dtype, old.dim) == (schema.dtype, schema.dim)
            self._tables.create_table(
                table,
                instance=instance.id,
                dim=schema.dim,
                dtype=schema.dtype,
                capacity=max(base.rows(table), old.status().capacity if old else 1),
                feed="delta",
                default_row=old.default_row() if old and has_same_rows else None,
                expire_after=old.record.expire_after if old else 0,
            )
        return NativeInstanceTables(self._tables, name, threads=self._threads)

    def _was_passed(self, run: int) -> bool:
        """Return whether a partition has passed the run: its instance existed here and is gone.

        Otherwise a partition that reads the log from its start would create the instance again.
        """
        return max(self._begun_at, self._newest_run()) > run or any(
            progress.state == "passing" and progress.target >= run for progress in self._progress()
        )

    def _newest_run(self) -> int:
        """Return the newest run that a partition has applied, also one that was removed since."""
        return max(
            (max(p.run, p.target if p.state == "following" else 0) for p in self._progress()),
            default=0,
        )

    def _progress(self) -> list[_native.Progress]:
        ids = {record.id for record in self._tables.instances() if record.model == self._model}
        return [progress for progress in self._tables.all_progress() if progress.instance in ids]

    def complete(self, instance: InstanceTables) -> None:
        """See Instances."""
        current = self._tables.resolve(self._model)
        if not self._switch or current.name == instance.name:
            return
        instance_id = self._tables.resolve(instance.name).id
        try:
            self._tables.set_alias(self._model, instance_id, unless_frozen=True)
        except FailedPrecondition:
            if instance.is_live():
                raise
            return  # another switch froze this instance at the same time: that switch wins
        _log.info(
            "[ingest] alias %s names %s now; it named %s before",
            self._model,
            instance.name,
            current.name,
        )
