"""A base: a version of a store that holds every row of an instance. FORMAT.md.

Owns:        write_base(), Base (reading), BaseFolder (finding bases).
Never does:  apply rows; decide when a base is due.
Called by:   cli, export of a pool, trainers, the catch-up of ingest (through its own Protocols).
Invariants:  a base exists when its state exists, which is written last; a chunk of a base that
             write_base() wrote holds rows of one partition; data that does not match its checksum
             is never returned.
Threads:     any; a Base belongs to one of them.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from petps.checkpoint.bundle import CHUNK_BYTES
from petps.checkpoint.chunk import ROW, STAMP, Bytes, Column, Keys, Mask, Rows, Stamps, Table
from petps.checkpoint.commits import Commits, newer_stamps
from petps.checkpoint.files import LocalFiles
from petps.checkpoint.old_base import MANIFEST, OldBase
from petps.checkpoint.published import BASE_PART, BaseInfo
from petps.checkpoint.store import BASE, Store
from petps.delta import TableSchema
from petps.delta.schema import DTYPES, partition_of
from petps.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    IoError,
    NotFound,
    PetpsError,
    ResourceExhausted,
)

__all__ = [
    "Base",
    "BaseFolder",
    "check_is_new",
    "convert",
    "is_url",
    "open_store",
    "served_column",
    "split_by_partition",
    "write_base",
]

STATES: Final = "states/*.json"
FILE: Final = "file://"
# An event time: cell_ns, time_ns, version, bounds, shown_ns, debt_ns.
Clock = tuple[int, int, int, list[int], int, int]


# ---- writing ----


def write_base(
    folder: str | Path,
    model: str,
    info: BaseInfo,
    tables: Mapping[TableSchema, Generator[Rows]],
    *,
    stamped: Collection[str] = (),
    commits: Commits | None = None,
) -> dict[str, int]:
    """Write a base, which exists once this returns. Return the number of rows by table.

    Args:
        folder: A new folder, or one that holds no base.
        model: The model.
        info: The instance and its positions. Read the positions **before** the first row: the
            deltas after them then correct every row that changes while the base is written.
        tables: For each table its rows, as split_by_partition() yields them.
        stamped: The tables whose rows have stamps.
        commits: The times of the log's versions; None: ``info`` has the clocks, or rows have no
            stamps.

    Raises:
        AlreadyExists: The folder holds a base or a store.
        InvalidArgument: A key appears twice, or the rows do not fit the table.
        ResourceExhausted: The disk is full.
        IoError: The disk failed.

    After an error all written files are removed; the error names those that could not be removed.
    """
    path = Path(folder)
    check_is_new(path)
    files = _NewFiles(path)
    try:
        with contextlib.ExitStack() as stack:
            for rows in tables.values():
                stack.enter_context(contextlib.closing(rows))
            described = [_describe(schema, schema.name in stamped) for schema in tables]
            store = Store.create(files, model, described, commit_empty=False)
            store.write(
                max(1, info.version),  # a store has no version 0
                {schema.name: rows for schema, rows in tables.items()},
                kind=BASE,
                parts={BASE_PART: info.to_json(), **({} if commits is None else commits.parts())},
                partitions=info.partitions,
            )
    except BaseException as error:
        remaining = ", ".join(str(path) for path in files.discard())
        rest = f"remove what is left of it: {remaining}" if remaining else "nothing is left of it"
        cause = error.__cause__ if isinstance(error, IoError) else error
        if isinstance(cause, OSError):
            kind = ResourceExhausted if cause.errno in (errno.ENOSPC, errno.EDQUOT) else IoError
            reason = cause.strerror or str(error)
            raise kind(f"base {path} was not written: {reason}; {rest}") from error
        if isinstance(error, PetpsError):
            error.args = (f"{error}; {rest}",)  # a new error would lose attributes such as report
        raise
    chunks = store.state.lineage.chunks
    return {
        schema.name: sum(chunk.rows for chunk in chunks if chunk.table == schema.name)
        for schema in tables
    }


def check_is_new(folder: Path) -> None:
    """Raise AlreadyExists if the folder holds a base or a store."""
    if (folder / MANIFEST).exists() or any(folder.glob(STATES)):
        raise AlreadyExists(f"{folder} holds a base already: name a new folder")


def _describe(schema: TableSchema, stamped: bool) -> Table:
    row = Column(ROW, schema.dtype, schema.dim)
    return Table(schema.name, (row, Column(STAMP, "u32", 1)) if stamped else (row,))


def split_by_partition(
    schema: TableSchema,
    keys: Keys,
    rows_of: Callable[[Keys], tuple[Bytes, Mask | None]],
    partitions: int,
    *,
    stamps: Stamps | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Callable[[int], None] = lambda count: None,
) -> Generator[Rows]:
    """Yield the rows of a table for write_base(): partition by partition, in the order of keys.

    Args:
        schema: The table.
        keys: uint64[n] in any order, each once.
        rows_of: Takes m of them and returns uint8[m, row_bytes], and bool[m]: which of the keys
            exist (None: all). A key may be deleted while the base is written.
        stamps: uint32[n or more]: rows_of also sets the first m of them, if the rows have stamps.
        partitions: P of the model.
        chunk_bytes: The size of a piece.
        progress: Called with the number of keys of each piece that was written.

    Raises:
        InvalidArgument: A key appears twice.
    """
    table = _describe(schema, stamps is not None)
    partition_by_key = partition_of(keys, partitions)
    order = np.lexsort((keys, partition_by_key))
    keys = keys[order]
    if (keys[1:] == keys[:-1]).any():
        raise InvalidArgument(f"table {schema.name}: a key appears twice in the rows of a base")
    bounds = np.searchsorted(partition_by_key[order], np.arange(partitions + 1))
    step = max(1, chunk_bytes // (8 + schema.row_bytes))
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        for start in range(begin, end, step):
            piece = keys[start : min(start + step, end)]
            rows, present = rows_of(piece)
            chosen = slice(None) if present is None else present
            columns = {ROW: rows[chosen]}
            if stamps is not None:
                columns[STAMP] = stamps[: len(piece), None].view(np.uint8)[chosen]
            yield Rows.of(table, piece[chosen], columns)
            progress(len(piece))


class _NewFiles(LocalFiles):
    """The files of a base that is being written; discard() removes them after an error."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._is_new = not root.exists()
        self._written: list[Path] = []

    def _folder_of(self, path: str) -> Path:
        self._written.append(self._root / path)
        return super()._folder_of(path)

    def create(self, path: str, content: bytes) -> None:
        """See Files."""
        try:
            super().create(path, content)
        except AlreadyExists:
            self._written.remove(self._root / path)  # another writer owns this file
            raise

    def discard(self) -> list[Path]:
        """Remove the files, and the folders that are new and empty. Return what remains."""
        remaining: list[Path] = []
        for path in reversed(self._written):  # the state first: without it there is no base
            try:
                path.unlink(missing_ok=True)
            except OSError:
                remaining.append(path)
        folders = {path.parent for path in self._written}
        for folder in [*folders, self._root] if self._is_new else folders:
            with contextlib.suppress(OSError):  # it still has a file, perhaps of another program
                folder.rmdir()
        if self._is_new and self._root.exists() and not remaining:
            remaining.append(self._root)
        return remaining


# ---- reading ----


def is_url(location: str) -> bool:
    """Return whether a base is at a URL of fsspec, and not in a folder of this machine."""
    return "://" in location and not location.startswith(FILE)


def open_store(folder: str | Path) -> Store:
    """Open a store. A base of an older release, in a folder, reads as a store with one version.

    Raise NotFound, DataLoss, IoError, Unimplemented (newer format).
    """
    if is_url(str(folder)):
        return Store.open(str(folder))
    path = Path(str(folder).removeprefix(FILE))
    if any(path.glob(STATES)):
        return Store.open(path)
    if (path / MANIFEST).exists():
        return OldBase(path)
    raise NotFound(
        f"{path} holds no base: there is neither {STATES} nor {MANIFEST} (perhaps its writer did "
        "not finish)"
    )


def served_column(own: Column, dtype: str | None = None) -> Column:
    """Return the served form of a trainer's row column: ``dtype``, else its own, else float32.

    A quantised column is served as float32.
    """
    return Column(own.name, dtype or (own.dtype if own.dtype in DTYPES else "f32"), own.dim)


def convert(stored: Column, rows: Bytes, column: Column) -> Bytes:
    """Convert stored rows to the served column, or return them unchanged if it is the same."""
    return rows if stored == column else column.stored(stored.values(rows))


class Base:
    """A version of a store, read as a base: see petps.server.ingest.BaseReader."""

    def __init__(
        self,
        store: Store,
        version: int,
        info: BaseInfo | None = None,
        tables: Mapping[str, TableSchema] | None = None,
    ) -> None:
        """Find the version's chunks.

        info: None: the version has no position in a log. tables: the server's; a table that it
        lacks has the trainer's dtype.
        """
        lineage = store.state.lineage_of(version)
        info = info or BaseInfo(
            instance=store.state.model, version=version, partitions=1, by_partition=False
        )
        self._store = store
        self._entry = store.state.version(version)
        self._positions = {entry.partition: (entry.run, entry.seq) for entry in info.positions}
        self._by_partition = info.by_partition
        self._clocks = info.clocks
        self._commits: Commits | None = None  # not read yet
        self._chunks = lineage.chunks_of(version)
        self._tables = lineage.tables
        self._columns: dict[str, Column] = {}
        for name, table in store.state.tables.items():
            served = (tables or {}).get(name)
            self._columns[name] = served_column(table.columns[0], served.dtype if served else None)
        is_alone = BASE_PART in self._entry.parts
        self.name = f"base {store.name}" if is_alone else f"version {version} of store {store.name}"
        self.model = store.state.model
        self.instance = info.instance
        self.version = info.version
        self.dense = info.dense
        self.partitions = info.partitions
        self.created_ns = self._entry.created_ns
        # Not by the chunks: a version without changes may become a base, and its chunks go then.
        self.has_deltas = self._entry.kind != BASE

    @classmethod
    def open(cls, folder: str | Path, version: int | None = None) -> Base:
        """Open a version of the store in a folder; None: the newest that has a position in a log.

        Raise NotFound, DataLoss, IoError, Unimplemented (newer format).
        """
        store = open_store(folder)
        entries = store.state.versions() if version is None else [store.state.version(version)]
        for entry in reversed(entries):
            info = BaseInfo.of(store, entry.version)
            if info is not None:
                return cls(store, entry.version, info)
        lacking = "no version has a" if version is None else f"version {version} has no"
        raise NotFound(f"{folder}: {lacking} position in a log, which a base needs")

    def position(self, partition: int) -> tuple[int, int]:
        """Return (run, seq): the rows hold all deltas of the partition up to it.

        (0, 0): the rows hold no delta, or the position is unknown, or they are newer than the log.
        """
        return self._positions.get(partition, (0, 0))

    def schemas(self) -> dict[str, TableSchema]:
        """Return the schemas of the tables as served, by name."""
        return {
            name: TableSchema(name, column.dtype, column.dim)
            for name, column in self._columns.items()
        }

    def rows(self, table: str) -> int:
        """Return an upper bound of a table's rows: a key counts once in each chunk that has it."""
        return sum(chunk.rows for chunk in self._chunks if chunk.table == table)

    def clocks(self, table: str) -> dict[int, Clock]:
        """Return the event times of a table whose rows expire, by partition."""
        return {
            entry.partition: (
                entry.cell_ns,
                entry.time_ns,
                entry.version,
                entry.bounds,
                entry.shown_ns,
                entry.debt_ns,
            )
            for entry in self._clocks.get(table, [])
        }

    def commits(self) -> list[tuple[int, int]]:
        """Return (version, time in ns) of commits of the log up to this version, oldest first.

        Those of long ago are incomplete. Empty if the version has none. Raise DataLoss, NotFound.
        """
        commits = self._read_commits()
        return list(zip(commits.versions.tolist(), commits.times_ns.tolist(), strict=True))

    def _read_commits(self) -> Commits:
        if self._commits is None:
            self._commits = Commits.of(self._store, self._entry.version)
            self._check_number()
        return self._commits

    def chunks(
        self, table: str, partitions: Collection[int] | None = None
    ) -> Iterator[tuple[Keys, Bytes]]:
        """Yield keys and rows. See stamped_chunks()."""
        for keys, rows, _ in self.stamped_chunks(table, partitions):
            yield keys, rows

    def stamped_chunks(
        self, table: str, partitions: Collection[int] | None = None
    ) -> Iterator[tuple[Keys, Bytes, Stamps | None]]:
        """Yield keys uint64[m] and rows uint8[m, row_bytes] of all or some partitions.

        Also the rows' stamps uint32[m]; None if the base has none.

        Keys ascend within a partition. Of a base that write_base() wrote, read only the chunks of
        these partitions; otherwise read the whole table. Raise DataLoss. Raise NotFound if there is
        no such table, or if the version was purged or rolled back, even if another version has its
        number now.
        """
        self._check_number()
        if table not in self._columns:
            raise NotFound(
                f"{self.name} has no table {table!r}; it has: {', '.join(self._columns)}"
            )
        chosen = None if partitions is None else list(partitions)
        if self.has_deltas:
            pieces = self._store.pieces(table, self._entry.version)
        else:
            pieces = self._read_chunks(table, chosen)
        stored = self._tables[table].columns[0]
        is_stamped = Column(STAMP, "u32", 1) in self._tables[table].columns
        floor = self._read_commits().floor if is_stamped else 0
        for rows in pieces:
            self._check_number()  # the store may have been refreshed since
            if chosen is not None and not self._by_partition:
                rows = rows.at(np.isin(partition_of(rows.keys, self.partitions), chosen))
            stamps = None
            if is_stamped:
                stamps = np.ascontiguousarray(rows.columns[STAMP]).view(np.uint32)[:, 0]
                stamps = newer_stamps(stamps, floor, self.version)
            yield (
                rows.keys,
                convert(stored, rows.columns[stored.name], self._columns[table]),
                stamps,
            )
        self._check_number()

    def _read_chunks(self, table: str, partitions: Sequence[int] | None) -> Iterator[Rows]:
        """Yield the chunks of a version without deltas one by one; five of them are in memory."""
        chunks = [chunk for chunk in self._chunks if chunk.table == table]
        if partitions is not None and self._by_partition:
            firsts = np.array([chunk.min_key for chunk in chunks], np.uint64)
            is_wanted = np.isin(partition_of(firsts, self.partitions), partitions)
            chunks = [chunk for chunk, wanted in zip(chunks, is_wanted, strict=True) if wanted]
        try:
            for (rows,) in self._store.reader.read_ahead(
                [[chunk] for chunk in chunks], self._tables
            ):
                yield rows
        except DataLoss as error:
            self._store.refresh().version(self._entry.version)  # NotFound: it was purged
            self._check_number()
            raise DataLoss(f"{self.name}: {error}") from error

    def _check_number(self) -> None:
        """Raise NotFound if another version has this number.

        A reader may finish a deleted version, but must not mix the rows of two versions.
        """
        for entry in self._store.state.versions():
            if entry.version == self._entry.version and entry.created_ns != self._entry.created_ns:
                raise NotFound(f"{self.name} was rolled back, and another version has its number")


class BaseFolder:
    """The bases in a folder: each is a folder directly below ``root``."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)

    def open(self, location: str) -> Base:
        """Open the base at an absolute path, a file:// URL, or a path below the root.

        FOLDER#N is version N of the store in FOLDER. Raise the errors of Base.open(), and
        FailedPrecondition for another URL: a writer of the log must not choose where this process
        connects to.
        """
        if is_url(location):
            raise FailedPrecondition(
                f"base {location} is at a URL, and a URL is read only if it is that of [ingest] "
                f"store: write store = {json.dumps(location.partition('#')[0])} there"
            )
        path = self._root / location.removeprefix(FILE)
        folder, _, version = str(path).rpartition("#")
        if folder and version.isdecimal() and not path.exists():
            return Base.open(folder, int(version))
        return Base.open(path)

    def of_model(self, model: str) -> Sequence[Base]:
        """Return the readable bases of a model, newest first: by version, then by time."""
        bases = []
        for path in [*self._root.glob("*/states"), *self._root.glob(f"*/{MANIFEST}")]:
            try:
                base = Base.open(path.parent)
            except PetpsError:
                continue  # a base that is damaged or being removed must not hide the others
            if base.model == model:
                bases.append(base)
        bases.sort(key=lambda base: (base.version, base.created_ns), reverse=True)
        return bases
