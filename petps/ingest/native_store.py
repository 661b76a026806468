"""The native tables as ingest's Store."""

from __future__ import annotations

from collections.abc import Iterator

from petps import _native
from petps.delta import TableSchema
from petps.ingest.store import ApplyReport, Keys, Mask, Progress, Rows, StoreTable

__all__ = ["NativeStore"]


class _NativeTable:
    """A native table as StoreTable."""

    def __init__(self, table: _native.Table) -> None:
        self._table = table
        self._schema = TableSchema(table.name, table.dtype, table.dim)

    @property
    def schema(self) -> TableSchema:
        return self._schema

    def apply(self, keys: Keys, rows: Rows | None, deleted: Mask | None, stamp: int) -> ApplyReport:
        return self._table.apply(keys, rows, deleted, stamp)

    def all_keys(self) -> Iterator[Keys]:
        with self._table.scan() as pages:
            for keys, _ in pages:
                yield keys


class NativeStore:
    """The delta-fed tables of an instance in an open pool (petps._native.Tables) as Store."""

    def __init__(self, tables: _native.Tables, instance: str) -> None:
        record = tables.resolve(instance)
        self._tables = tables
        self._instance: int = record.id
        self._model: str = record.model
        self._partitions: int = record.partitions

    @property
    def model(self) -> str:
        """See Store."""
        return self._model

    @property
    def partitions(self) -> int:
        """See Store."""
        return self._partitions

    def tables(self) -> dict[str, StoreTable]:
        """See Store."""
        return {
            table.name: _NativeTable(table)
            for table in self._tables.tables()
            if table.record.instance == self._instance and table.record.feed == "delta"
        }

    def progress(self, partition: int) -> Progress | None:
        """See Store."""
        found = self._tables.progress(self._instance, partition)
        if found is None:
            return None
        return Progress(
            partition=partition,
            run=found.run,
            seq=found.seq,
            offset=found.offset,
            version=found.version,
            catching_up=found.state == "catching_up",
            target=found.target,
        )

    def record_progress(self, progress: Progress) -> None:
        """See Store."""
        self._tables.record_progress(
            _native.Progress(
                instance=self._instance,
                partition=progress.partition,
                run=progress.run,
                seq=progress.seq,
                offset=progress.offset,
                version=progress.version,
                state="catching_up" if progress.catching_up else "following",
                target=progress.target,
            )
        )
