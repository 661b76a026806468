"""A pool file, with an ingest that follows a log into real tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from petps import _native
from petps.checkpoint import (
    BaseFolder,
    BaseInfo,
    Store,
    list_positions,
    split_by_partition,
    write_base,
)
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.delta.schema import partition_of
from petps.server.ingest import DirectoryDeadLetters, Ingest
from petps.server.ingest.dense import DenseLocations
from petps.server.ingest.native_tables import NativeInstances, NativeInstanceTables

P = 4


class World:
    """Model m of an open pool, fed from ``folder``/log; its bases are in ``folder``/bases."""

    def __init__(
        self,
        folder: Path,
        schemas: Sequence[TableSchema],
        *,
        switch: bool = True,
        partitions: Sequence[int] = range(P),
    ) -> None:
        """Open the pool, or create it with instance m@1 and default rows of -1."""
        self.folder = folder
        self.schemas = schemas
        self.switch = switch
        self._open(partitions)

    def _open(self, partitions: Sequence[int]) -> None:
        folder = self.folder
        path = folder / "pool"
        if path.exists():
            self.tables = _native.Tables.open(str(path))
        else:
            self.tables = _create(path, self.schemas)
        self.log = DirectoryLog(folder / "log", partitions=P)
        self.ingest = Ingest(
            self.log,
            NativeInstanceTables(self.tables, "m"),
            dead_letters=DirectoryDeadLetters(folder / "dead"),
            bases=BaseFolder(folder / "bases"),
            instances=NativeInstances(self.tables, "m", switch=self.switch),
            dense=DenseLocations(folder / "pool.dense.json"),
            partitions=partitions,
            search_seconds=0.02,
        )
        self.ingest.start()

    def reopen(self, partitions: Sequence[int] = range(P)) -> None:
        """Stop, close, and start again, following ``partitions``."""
        self.close()
        self._open(partitions)

    def close(self) -> None:
        if self.tables.closed:
            return
        assert self.ingest.stop(30)
        self.log.close()
        report = self.tables.verify()
        assert report.clean, report.problems
        self.tables.close()

    @property
    def current_instance(self) -> str:
        return self.tables.resolve("m").name

    def names(self) -> dict[str, bool]:
        """Return by name whether an instance is frozen."""
        return {record.name: record.frozen for record in self.tables.instances()}

    def states(self) -> set[tuple[str, str]]:
        return {(p.instance, p.state) for p in self.ingest.status().partitions}

    def stored(self, schema: TableSchema) -> dict[int, bytes]:
        """Return every row of a table of the instance that the model's name refers to."""
        with self.tables.find(self.current_instance, schema.name).scan() as pages:
            return {
                key: row.tobytes()
                for keys, rows in pages
                for key, row in zip(keys.tolist(), rows, strict=True)
            }


def _create(path: Path, schemas: Sequence[TableSchema]) -> _native.Tables:
    tables = _native.Tables.create(str(path), durability="process", unit_bytes=64 << 10)
    instance = tables.create_instance("m", "m@1", P)
    for schema in schemas:
        tables.create_table(
            schema.name,
            instance=instance.id,
            dim=schema.dim,
            dtype=schema.dtype,
            capacity=2000,
            feed="delta",
            default_row=schema.encode(np.full((1, schema.dim), -1, np.float32))[0],
        )
    return tables


def write_rows(
    folder: Path,
    schemas: Sequence[TableSchema],
    rows: Mapping[str, Mapping[int, bytes]],
    *,
    partitions: int,
    positions: Mapping[int, tuple[int, int]],
    version: int,
    instance: str,
    dense: str | None = None,
) -> Path:
    """Write a base of these rows, given by table and key."""
    tables = {}
    for schema in schemas:
        mine = rows[schema.name]
        keys = np.array(list(mine), dtype=np.uint64)
        stored = np.frombuffer(b"".join(mine.values()), np.uint8).reshape(-1, schema.row_bytes)
        where = {key: at for at, key in enumerate(keys.tolist())}
        tables[schema] = split_by_partition(
            schema,
            keys,
            lambda chosen, stored=stored, where=where: (  # type: ignore[misc]
                stored[[where[key] for key in chosen.tolist()]],
                None,
            ),
            partitions,
        )
    info = BaseInfo(
        instance=instance,
        version=version,
        partitions=partitions,
        positions=list_positions(positions),
        dense=dense,
    )
    write_base(folder, "m", info, tables)
    return folder


def damage_chunk(
    base: Path, table: str, partition: int, partitions: int
) -> tuple[Path, bytes, int]:
    """Flip a bit of a base's chunk. Return its file, the bytes before, and the chunk's offset."""
    chunk = next(
        chunk
        for chunk in Store.open(base).state.lineage.chunks
        if chunk.table == table
        and partition_of(np.array([chunk.min_key], np.uint64), partitions)[0] == partition
    )
    path = base / chunk.file
    whole = path.read_bytes()
    at = chunk.offset + chunk.length // 2
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    return path, whole, chunk.offset
