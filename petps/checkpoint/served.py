"""Versions of a store as what a running server catches up to, instead of bases. STORE.md.

Owns:        ServedVersions (finds them), ServedVersion (reads one); served_column(), served().
Never does:  apply rows; decide when a server catches up (ingest, which sees its own Protocols).
Called by:   server, cli.
Invariants:  rows are in the served table's dtype; what does not fit its checksum is given to
             nobody; a version is nothing to catch up to where its rows are ahead of its log.
Threads:     one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from petps.checkpoint.base import Base, BaseFolder
from petps.checkpoint.chunk import Bytes, Column, Keys
from petps.checkpoint.published import Published
from petps.checkpoint.state import Version, newest_state
from petps.checkpoint.store import Store
from petps.delta import TableSchema
from petps.delta.schema import DTYPES, partition_of
from petps.errors import NotFound, PetpsError

__all__ = ["ServedVersion", "ServedVersions", "served", "served_column"]

_log = logging.getLogger("petps.checkpoint")

# The newest so many are looked at: their positions are two small files each, read once.
CANDIDATES: Final = 32


def served_column(own: Column, dtype: str | None = None) -> Column:
    """A trainer's row column as a table serves it: in a dtype, or its own; quantised: float32."""
    return Column(own.name, dtype or (own.dtype if own.dtype in DTYPES else "f32"), own.dim)


def served(stored: Column, rows: Bytes, column: Column) -> Bytes:
    """Stored rows as they are, or as the served column has what they stand for."""
    return rows if stored == column else column.stored(stored.values(rows))


class ServedVersion:
    """A version of a store, read as a base is (petps.ingest.BaseReader)."""

    def __init__(
        self,
        store: Store,
        version: int,
        published: Published,
        tables: Mapping[str, TableSchema],
    ) -> None:
        """tables: as they are served, where they are; others are as the trainer has them."""
        self._store = store
        self._version = version
        self._position = published.position
        self._behind = published.behind()
        state = store.state
        self._mark = _mark(state.version(version))
        self._rows = state.line_of(version).of(version)
        self._columns = {}
        for name, table in state.tables.items():
            dtype = tables[name].dtype if name in tables else None
            self._columns[name] = served_column(table.columns[0], dtype)

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"version {self._version} of store {self._store.name}"

    @property
    def model(self) -> str:
        """The model whose rows it holds."""
        return self._store.state.model

    @property
    def instance(self) -> str:
        """The instance that its log feeds; the model's plain name: any."""
        return self._position.instance or self.model

    @property
    def version(self) -> int:
        """The log's version that it holds at least."""
        return self._position.version

    @property
    def dense(self) -> None:
        """The log says where dense weights are; here they are a part that only trainers read."""
        return None

    @property
    def partitions(self) -> int:
        """P of the model."""
        return len(self._position.seqs)

    def position(self, partition: int) -> tuple[int, int]:
        """(run, seq) up to which it holds the partition's deltas; (0, 0): no catch-up to it.

        Where its rows are ahead of the log, a trainer that goes on from an older version could
        never take them back: servers would not see that they have them.
        """
        seq = self._position.seqs[partition]
        if seq == 0 or partition in self._behind:
            return 0, 0
        return self._position.run, seq

    def schemas(self) -> dict[str, TableSchema]:
        """Its tables, by name, as they are served."""
        return {
            name: TableSchema(name, column.dtype, column.dim)
            for name, column in self._columns.items()
        }

    def rows(self, table: str) -> int:
        """Rows of a table, at most: some of those written may be written over."""
        return sum(chunk.rows for chunk in self._rows if chunk.table == table)

    def chunks(
        self, table: str, partitions: Collection[int] | None = None
    ) -> Iterator[tuple[Keys, Bytes]]:
        """keys uint64[m] and rows uint8[m, row_bytes], ascending; of some partitions or of all.

        All of the table is read for them. Raises DataLoss, and NotFound once it was purged, or
        rolled back, be there another of its number or not.
        """
        self._check_stands()
        stored = self._store.tables_of(self._version)[table].columns[0]
        column = self._columns[table]
        for rows in self._store.pieces(table, self._version):
            self._check_stands()  # the store may have been refreshed meanwhile
            keys, found = rows.keys, rows.columns[stored.name]
            if partitions is not None:
                chosen = np.isin(partition_of(keys, self.partitions), list(partitions))
                keys, found = keys[chosen], found[chosen]
            yield keys, served(stored, found, column)
        self._check_stands()

    def _check_stands(self) -> None:
        """One that is gone may be read to its end; not another that has its number."""
        for each in self._store.state.versions():
            if each.version != self._version:
                continue
            if self._mark not in {part.file for part in each.parts.values()}:
                raise NotFound(f"{self.name} was rolled back, and another has its number")


class ServedVersions:
    """Finds them, and the bases of a folder: what petps.ingest asks of a BaseSource.

    The store need not be there yet. ``tables``: what a server has, by name.
    """

    def __init__(
        self, place: str, bases: BaseFolder, tables: Callable[[], Mapping[str, TableSchema]]
    ) -> None:
        self._place = place
        self._bases = bases
        self._tables = tables
        self._store: Store | None = None
        self._published: dict[str, Published] = {}  # by _mark()
        self._told: set[int] = set()

    def open(self, location: str) -> Base:
        """The base that a marker names. Raises as Base."""
        return self._bases.open(location)

    def of_model(self, model: str) -> Sequence[Base | ServedVersion]:
        """Versions of the store, newest first, then the folder's bases. Raises PetpsError."""
        return [*self._versions(model), *self._bases.of_model(model)]

    def _versions(self, model: str) -> list[ServedVersion]:
        try:
            store = self._opened()
        except NotFound:  # no trainer has begun it yet
            return []
        if store.state.model != model:
            return []
        entries = [each for each in store.state.versions() if Published.positions(each)]
        newest = entries[: -CANDIDATES - 1 : -1]
        known = {_mark(each) for each in newest}
        self._published = {mark: one for mark, one in self._published.items() if mark in known}
        tables = self._tables()
        found = []
        for each in newest:
            published = self._of(store, each)
            if published is not None:
                found.append(ServedVersion(store, each.version, published, tables))
        return found

    def _opened(self) -> Store:
        if self._store is None:
            self._store = Store.open(self._place)
        elif newest_state(self._store.files) != self._store.state.number:
            self._store.refresh()
        return self._store

    def _of(self, store: Store, entry: Version) -> Published | None:
        """None, and said so once, where the parts are lost."""
        mark = _mark(entry)
        if mark not in self._published:
            try:
                published = Published.of(store, entry.version)
            except PetpsError as error:
                if entry.version not in self._told:
                    _log.warning("[checkpoint] %s: no catch-up to it", error)
                    self._told.add(entry.version)
                return None
            if published is None:
                return None
            self._published[mark] = published
        published = self._published[mark]
        if published.owed and published.behind() and entry.version not in self._told:
            self._told.add(entry.version)
            _log.warning(
                "[checkpoint] version %d of %s has rows that its log had not yet, in %d partitions:"
                " these don't catch up to it; Feed.checkpoint(publish=True) writes whole ones",
                entry.version,
                store.name,
                len(published.behind()),
            )
        return published


def _mark(entry: Version) -> str:
    """The file of a part, which never changes: another version of that number has another."""
    return entry.parts[Published.positions(entry)[0]].file
