"""Versions of a store as the bases that a running server catches up to. STORE.md.

Owns:        ServedVersions (finds them), ServedVersion (reads one); served_column(), served().
Never does:  apply rows; decide when a server catches up (ingest does, through its own Protocols).
Called by:   server, cli.
Invariants:  rows have the dtype of the served table; rows that do not match their checksum are
             never returned; no partition catches up to rows that are ahead of its log.
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

# Only this many of the newest versions are considered: the positions of each are two small files,
# which are read once.
CANDIDATES: Final = 32


def served_column(own: Column, dtype: str | None = None) -> Column:
    """Return the served form of a trainer's row column: ``dtype``, else its own, else float32.

    A quantised column is served as float32.
    """
    return Column(own.name, dtype or (own.dtype if own.dtype in DTYPES else "f32"), own.dim)


def served(stored: Column, rows: Bytes, column: Column) -> Bytes:
    """Convert stored rows to the served column, or return them unchanged if it is the same."""
    return rows if stored == column else column.stored(stored.values(rows))


class ServedVersion:
    """A version of a store, which is read as a base is (petps.server.ingest.BaseReader)."""

    def __init__(
        self,
        store: Store,
        version: int,
        published: Published,
        tables: Mapping[str, TableSchema],
    ) -> None:
        """Find the version's chunks. tables: the server's; a new table gets the trainer's dtype."""
        self._store = store
        self._version = version
        self._position = published.position
        self._behind = published.behind()
        state = store.state
        self._mark = _mark(state.version(version))
        self._rows = state.lineage_of(version).of(version)
        self._columns = {}
        for name, table in state.tables.items():
            dtype = tables[name].dtype if name in tables else None
            self._columns[name] = served_column(table.columns[0], dtype)

    @property
    def name(self) -> str:
        """Return the name for messages."""
        return f"version {self._version} of store {self._store.name}"

    @property
    def model(self) -> str:
        """Return the model whose rows the version holds."""
        return self._store.state.model

    @property
    def instance(self) -> str:
        """Return the instance that the version's log feeds; the model's plain name: any."""
        return self._position.instance or self.model

    @property
    def version(self) -> int:
        """Return the log's version; the rows hold at least that version."""
        return self._position.version

    @property
    def dense(self) -> None:
        """Return None: the log names the dense weights; in the store only trainers read them."""
        return None

    @property
    def partitions(self) -> int:
        """Return P, the number of partitions of the model."""
        return len(self._position.seqs)

    def position(self, partition: int) -> tuple[int, int]:
        """Return (run, seq) up to which the rows hold the partition's deltas; (0, 0): no catch-up.

        (0, 0) marks a partition whose rows are ahead of the log, or whose position is not known.
        A trainer that continues from an older version could never take back rows that are ahead
        of the log, because servers would not notice that they have them.
        """
        seq = self._position.seqs[partition]
        if seq == 0 or partition in self._behind:
            return 0, 0
        return self._position.run, seq

    def schemas(self) -> dict[str, TableSchema]:
        """Return the schemas of the tables as served, by name."""
        return {
            name: TableSchema(name, column.dtype, column.dim)
            for name, column in self._columns.items()
        }

    def rows(self, table: str) -> int:
        """Return an upper bound of a table's rows: a key counts again in each chunk that has it."""
        return sum(chunk.rows for chunk in self._rows if chunk.table == table)

    def chunks(
        self, table: str, partitions: Collection[int] | None = None
    ) -> Iterator[tuple[Keys, Bytes]]:
        """Yield keys uint64[m] and rows uint8[m, row_bytes], ascending, of all or some partitions.

        Read the whole table in either case. Raise DataLoss. Raise NotFound if the version was
        purged or rolled back, even if another version has its number now.
        """
        self._check_number()
        stored = self._store.tables_of(self._version)[table].columns[0]
        column = self._columns[table]
        for rows in self._store.pieces(table, self._version):
            self._check_number()  # the store may have been refreshed since
            keys, stored_rows = rows.keys, rows.columns[stored.name]
            if partitions is not None:
                chosen = np.isin(partition_of(keys, self.partitions), list(partitions))
                keys, stored_rows = keys[chosen], stored_rows[chosen]
            yield keys, served(stored, stored_rows, column)
        self._check_number()

    def _check_number(self) -> None:
        """Raise NotFound if another version has this number.

        A version that is gone may be read to its end; the rows of two versions must not be mixed.
        """
        for entry in self._store.state.versions():
            if entry.version != self._version:
                continue
            if self._mark not in {part.file for part in entry.parts.values()}:
                raise NotFound(f"{self.name} was rolled back, and another has its number")


class ServedVersions:
    """The versions of a store, and the bases of a folder, as a BaseSource of petps.server.ingest.

    The store need not exist yet. ``tables`` returns the server's tables, by name.
    """

    def __init__(
        self, place: str, bases: BaseFolder, tables: Callable[[], Mapping[str, TableSchema]]
    ) -> None:
        self._place = place
        self._bases = bases
        self._tables = tables
        self._store: Store | None = None
        self._published: dict[str, Published] = {}  # by _mark()
        self._warned_versions: set[int] = set()

    def open(self, location: str) -> Base:
        """Open the base that a marker names. Raise the errors of Base()."""
        return self._bases.open(location)

    def of_model(self, model: str) -> Sequence[Base | ServedVersion]:
        """Return versions of the store, newest first, then the folder's bases. Raise PetpsError."""
        return [*self._versions(model), *self._bases.of_model(model)]

    def _versions(self, model: str) -> list[ServedVersion]:
        try:
            store = self._open_store()
        except NotFound:  # no trainer has created the store yet
            return []
        if store.state.model != model:
            return []
        entries = [entry for entry in store.state.versions() if Published.positions(entry)]
        newest = entries[: -CANDIDATES - 1 : -1]
        marks = {_mark(entry) for entry in newest}
        self._published = {
            mark: published for mark, published in self._published.items() if mark in marks
        }
        tables = self._tables()
        versions = []
        for entry in newest:
            published = self._read_published(store, entry)
            if published is not None:
                versions.append(ServedVersion(store, entry.version, published, tables))
        return versions

    def _open_store(self) -> Store:
        if self._store is None:
            self._store = Store.open(self._place)
        elif newest_state(self._store.files) != self._store.state.number:
            self._store.refresh()
        return self._store

    def _read_published(self, store: Store, entry: Version) -> Published | None:
        """Return the position of a version's rows; log once and return None if it is lost."""
        mark = _mark(entry)
        if mark not in self._published:
            try:
                published = Published.of(store, entry.version)
            except PetpsError as error:
                if entry.version not in self._warned_versions:
                    _log.warning("[checkpoint] %s: no catch-up to it", error)
                    self._warned_versions.add(entry.version)
                return None
            if published is None:
                return None
            self._published[mark] = published
        published = self._published[mark]
        if published.owed and published.behind() and entry.version not in self._warned_versions:
            self._warned_versions.add(entry.version)
            _log.warning(
                "[checkpoint] version %d of %s has rows that its log does not have yet, in %d "
                "partitions: these partitions cannot catch up to it; "
                "TrainerOutput.checkpoint(publish=True) writes a version to which all can",
                entry.version,
                store.name,
                len(published.behind()),
            )
        return published


def _mark(entry: Version) -> str:
    """Return the file of a part: its name is unique, even if a version's number is used again."""
    return entry.parts[Published.positions(entry)[0]].file
