"""A checkpoint store: versions are written, restored, split, merged and dropped. STORE.md.

Owns:        Store: what its files mean together.
Never does:  decide what a version is written as (policy.py), or which rows changed (tracker).
Called by:   checkpointer.py, policies, cli.
Invariants:  a version that was committed restores to the same rows until it is dropped; what does
             not fit its checksum is given to nobody; a failed call leaves the store as it was.
Threads:     one thread writes; restores may run in others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import xxhash

from petps.checkpoint.bundle import Edit, Given, checked_edits, write_bundle
from petps.checkpoint.chunk import Rows, Table, lay_over
from petps.checkpoint.files import Files, open_files
from petps.checkpoint.quantise import Quantising
from petps.checkpoint.reader import Reader
from petps.checkpoint.state import (
    OPEN,
    Chunk,
    Line,
    Part,
    State,
    Version,
    commit,
    load,
    new_name,
    obsolete,
)
from petps.checkpoint.verify import offer, verify
from petps.delta.schema import check_name
from petps.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PetpsError,
)

__all__ = ["BASE", "DELTA", "DIFFERENCE", "Edit", "Store"]

BASE: Final = "base"
DELTA: Final = "delta"
DIFFERENCE: Final = "difference"
KINDS: Final = (BASE, DELTA, DIFFERENCE)
# Files that no state names are removed by purge once nobody can still be writing them.
LEFTOVER_SECONDS: Final = 3600.0
# Sparse bundles are written anew once that much is named in them together.
COMPACT_BYTES: Final = 1 << 20
MAX_VERSION: Final = (1 << 64) - 1


class Store:
    """The newest state of a store, and changes of it."""

    def __init__(self, files: Files, state: State) -> None:
        self._files = files
        self._state = state
        self._sizes: dict[str, int] = {}
        self._obsolete: list[str] = []  # see tidy()
        self._mutex = threading.Lock()  # of _state, which restores in other threads refresh
        self.reader = Reader(files)

    @classmethod
    def create(
        cls,
        url: str | Path | Files,
        model: str,
        tables: Sequence[Table],
        quantising: Quantising | None = None,
    ) -> Store:
        """Makes one. Raises AlreadyExists where a store is, InvalidArgument.

        tables: as the trainer has them; ``quantising``: what a Checkpointer stores them for.
        """
        files = open_files(url) if isinstance(url, str | Path) else url
        check_name("model", model)
        if not tables or len({table.name for table in tables}) != len(tables):
            raise InvalidArgument("a store needs tables, each of a name of its own")
        if files.list("states"):
            raise AlreadyExists(f"{files.name} holds a checkpoint store already")
        named = {table.name: table for table in tables}
        state = State(1, model, named, quantising=quantising)
        return cls(files, commit(files, None, state))

    @classmethod
    def open(cls, url: str | Path | Files) -> Store:
        """Raises NotFound where none is, DataLoss, Unimplemented for a newer format."""
        files = open_files(url) if isinstance(url, str | Path) else url
        return cls(files, load(files))

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return self._files.name

    @property
    def files(self) -> Files:
        """Where it is."""
        return self._files

    @property
    def state(self) -> State:
        """What this object knows; refresh() reads it anew."""
        return self._state

    def refresh(self) -> State:
        """The newest state, which another process may have written."""
        found = load(self._files)
        with self._mutex:  # a change may have been committed meanwhile
            if found.number > self._state.number:
                self._state = found
            return self._state

    # ---- writing ----

    def write(
        self,
        version: int,
        rows: Given,
        *,
        kind: str,
        tables: Mapping[str, Table] | None = None,
        parts: Mapping[str, bytes] | None = None,
        goes_on: Callable[[], None] = lambda: None,
    ) -> Version:
        """Writes a version and commits it.

        rows: of each table, whole or in pieces whose keys ascend from piece to piece, so that no
        more than one is in memory. kind: BASE has every row; DELTA those changed since the newest
        version, DIFFERENCE since the line's base, deletions among them. tables: as the rows of a
        BASE are stored (as the trainer has them); others are stored as their line. parts: opaque,
        by name.
        goes_on: called before each piece; what it raises cancels the version.
        Raises InvalidArgument, FailedPrecondition (another writer), IoError; then there is no such
        version, and the store is as it was.
        """
        before = self._state
        written = self.write_data(
            version, rows, kind=kind, tables=tables, parts=parts, goes_on=goes_on
        )
        self.add(written, before)
        return written.versions[0]

    def write_data(
        self,
        version: int,
        rows: Given,
        *,
        kind: str,
        tables: Mapping[str, Table] | None = None,
        parts: Mapping[str, bytes] | None = None,
        goes_on: Callable[[], None] = lambda: None,
    ) -> Line:
        """As write(), without the commit: what add() takes, a line of this version alone."""
        began = time.monotonic()
        self._check_new(version, rows, kind)
        if kind != BASE:
            tables = self._state.line.tables
        elif tables is None:
            tables = self._state.tables
        chunks = self._write_bundle(
            checked_edits(version, rows, tables, goes_on, base=kind == BASE)
        )
        stored: dict[str, Part] = {}
        for name, body in (parts or {}).items():
            check_name("part", name)
            path = f"parts/{new_name()}"
            self._files.write(path, [body])
            stored[name] = Part(path, len(body), xxhash.xxh3_64_hexdigest(body))
        goes_on()
        made = Version(
            version,
            kind,
            time.time_ns(),
            time.monotonic() - began,
            sum(chunk.rows for chunk in chunks),
            sum(chunk.length + chunk.bloom_length for chunk in chunks),
            parts=stored,
        )
        written = (version, kind, made.bytes, made.seconds)
        return Line("", version, (made,), tuple(chunks), tables, (written,))

    def add(self, new: Line, before: State) -> None:
        """Commits a version that write_data() wrote above the newest one of ``before``."""
        (made,) = new.versions
        if made.kind == BASE:
            self._commit(before, replace(before, lines=(*before.lines, new)))
            return
        line = before.line
        older = line.chunks
        if made.kind == DIFFERENCE:  # it says anew all that the last one did
            older = tuple(
                replace(each, end=made.version) if each.layer > 0 and each.open else each
                for each in older
            )
        line = replace(
            line,
            versions=(*line.versions, made),
            chunks=(*older, *new.chunks),
            written=(*line.written, *new.written),
        )
        self._commit(before, before.with_line(line))

    def _check_new(self, version: int, rows: Given, kind: str) -> None:
        if kind not in KINDS:
            raise InvalidArgument(f"kind {kind!r} is none of {', '.join(KINDS)}")
        if not 0 < version <= MAX_VERSION:
            raise InvalidArgument(f"version {version} is outside 1..2^64-1")
        newest = self._state.versions()
        if newest and version <= newest[-1].version:
            raise InvalidArgument(
                f"version {version} is not above {newest[-1].version}, the newest of {self.name}"
            )
        if kind != BASE and not newest:
            raise FailedPrecondition(f"{self.name} has no base: the first version is one")
        unknown = set(rows) - set(self._state.tables)
        if unknown:
            raise InvalidArgument(
                f"{self.name} has no table {min(unknown)!r}; "
                f"it has: {', '.join(self._state.tables)}"
            )
        if kind == BASE and set(rows) != set(self._state.tables):
            missing = min(set(self._state.tables) - set(rows))
            raise InvalidArgument(f"a base has every table: {missing!r} is missing")

    def _write_bundle(self, edits: Iterable[Edit]) -> list[Chunk]:
        chunks = write_bundle(self._files, self._state.tables, edits)
        if chunks:
            self._sizes[chunks[-1].file] = chunks[-1].bloom_offset + chunks[-1].bloom_length
        return chunks

    def _commit(self, before: State, after: State) -> None:
        # Of the state that was changed: another thread's restore may have read a newer one since.
        made = commit(self._files, before, after)
        with self._mutex:
            self._state = made
        self.tidy()
        self._obsolete = obsolete(before)
        files = {chunk.file for line in self._state.lines for chunk in line.chunks}
        self.reader.forget_all_but(files)
        self._sizes = {path: size for path, size in self._sizes.items() if path in files}

    def tidy(self) -> None:
        """Removes what nobody needs any more now, and not with the next change."""
        paths, self._obsolete = self._obsolete, []
        for path in paths:
            with contextlib.suppress(PetpsError):  # purge removes what is left over
                self._files.remove(path)

    def rearrange(
        self,
        gone: Sequence[Chunk],
        bundles: Sequence[Iterable[Edit]] = (),
        *,
        written: Sequence[Chunk] = (),
        ended: Sequence[Chunk] = (),
        end: int = OPEN,
    ) -> None:
        """Of the newest line, in one state: chunks that are gone, and bundles that stand for them.

        ``written`` are bundles' chunks that are in the store already; ``ended`` stay, up to version
        ``end``. Bundles of which less than half is named by now are written anew. Who calls sees to
        it that every version is what it was.
        """
        before = self._state
        new = [chunk for bundle in bundles for chunk in self._write_bundle(bundle)]
        line = before.line
        left, ending = set(gone), set(ended)
        chunks = [
            replace(chunk, end=end) if chunk in ending else chunk
            for chunk in line.chunks
            if chunk not in left
        ]
        chunks += [*new, *written]
        line = replace(line, chunks=tuple(self._compact(chunks)))
        self._commit(before, before.with_line(line))

    def _compact(self, chunks: list[Chunk]) -> list[Chunk]:
        """Copies what is named of sparse bundles into one."""
        named: dict[str, int] = {}
        for chunk in chunks:
            named[chunk.file] = named.get(chunk.file, 0) + chunk.length + chunk.bloom_length
        sparse = {path for path, named_bytes in named.items() if 2 * named_bytes < self._size(path)}
        moving = [chunk for chunk in chunks if chunk.file in sparse]
        if sum(chunk.length + chunk.bloom_length for chunk in moving) < COMPACT_BYTES:
            return chunks
        edits = (
            (chunk.table, rows, chunk.first, chunk.end, chunk.layer)
            for chunk, rows in zip(moving, self.read(moving), strict=True)
        )
        return [chunk for chunk in chunks if chunk.file not in sparse] + self._write_bundle(edits)

    def _size(self, path: str) -> int:
        if path not in self._sizes:
            self._sizes[path] = self._files.size(path)
        return self._sizes[path]

    # ---- reading ----

    def restore(
        self, version: int | None = None, tables: Sequence[str] | None = None
    ) -> dict[str, Rows]:
        """The rows of a version (the newest), by table: ascending keys, nothing deleted.

        Raises NotFound for a version or table that is not there, DataLoss for files that are
        missing, cut or altered: it names them, and the newest version that does without.
        """
        chosen = self._state.line.versions[-1].version if version is None else version
        layers = self.layers(chosen, tables)
        stored = self.tables_of(chosen)
        return {name: lay_over(stored[name], layers[name], keep_deleted=False) for name in layers}

    def resume(self, version: int | None = None) -> dict[str, Rows]:
        """As restore(), for a training that goes on from there, and count_restore().

        Of a training's ranks one says so; the others restore().
        """
        found = self.restore(version)
        self.count_restore()
        return found

    def count_restore(self) -> None:
        """A training goes on from a version's rows. Durable.

        Once that was done more often than was expected of a quantised store, the next version is a
        base of 8 bits. Raises FailedPrecondition where another writer is at work, IoError.
        """
        before = self._state
        self._commit(before, replace(before, restores=before.restores + 1))

    def expect(self, quantising: Quantising | None) -> None:
        """Says anew what lines are quantised for, from the next base on; None: kept whole."""
        before = self._state
        self._commit(before, replace(before, quantising=quantising))

    def tables_of(self, version: int | None = None) -> Mapping[str, Table]:
        """How a version's rows are stored (the newest line's): whose Column.values() reads them."""
        line = self._state.line if version is None else self._state.line_of(version)
        return line.tables

    def pieces(self, table: str, version: int | None = None) -> Iterator[Rows]:
        """restore() of one table, piece by piece in the order of keys.

        In memory is no more than what was written above the base, four of its chunks, which are
        read side by side (of a base that ranks wrote: four of each rank), and the piece that is
        laid, twice. Raises as restore() does, and NotFound once the version was rolled back, be
        there another of its number or not.
        """
        self._check_tables([table])
        chosen = self._state.line.versions[-1].version if version is None else version
        created = self._entry(chosen).created_ns
        start: int | None = 0
        while start is not None:
            state = self._state
            if self._entry(chosen).created_ns != created:
                raise NotFound(f"{self.name} was rolled back, and another version is {chosen} now")
            try:
                for rows, after in self._windows(state.line_of(chosen), chosen, table, start):
                    yield rows
                    start = after
                    del rows  # not held while the next one is laid
            except DataLoss as error:
                if self.refresh().number == state.number:
                    needed = state.line_of(chosen).of(chosen)
                    raise DataLoss(f"version {chosen}: {error}; {offer(self, needed)}") from error
                # Split or merged meanwhile: on from where it was.

    def _entry(self, version: int) -> Version:
        line = self._state.line_of(version)
        return next(each for each in line.versions if each.version == version)

    def _windows(
        self, line: Line, version: int, table: str, start: int
    ) -> Iterator[tuple[Rows, int | None]]:
        """Pieces of the keys from ``start`` on, each with where the next one begins (None: none).

        A piece ends where the next chunk of the base begins.
        """
        chunks = [each for each in line.of(version) if each.table == table]
        above = self.read([each for each in chunks if each.layer > 0], line.tables)
        base = sorted((each for each in chunks if each.layer == 0), key=lambda each: each.min_key)
        stops = sorted({each.min_key for each in base[1:]})
        windows: list[tuple[int | None, list[Chunk]]] = []
        for stop in [*stops, None]:
            if stop is not None and stop <= start:
                continue
            reach = next(
                (i for i, each in enumerate(base) if stop is not None and each.min_key >= stop),
                len(base),
            )
            begun, base = base[:reach], base[reach:]
            windows.append((stop, [each for each in begun if each.max_key >= start]))
        reads = self.reader.read_ahead([begun for _, begun in windows], line.tables)
        held: list[tuple[Chunk, Rows]] = []  # of several ranks' chunks some overlap
        for (stop, begun), read in zip(windows, reads, strict=True):
            held = [each for each in held if each[0].max_key >= start]
            held += zip(begun, read, strict=True)
            layers = [*(rows for _, rows in held), *above]
            cut = [rows.between(start, stop) for rows in layers]
            yield lay_over(line.tables[table], cut, keep_deleted=False), stop
            del read, layers, cut  # not held while the next one is awaited
            start = stop or 0

    def _check_tables(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._state.tables:
                known = ", ".join(self._state.tables)
                raise NotFound(f"{self.name} has no table {name!r}; it has: {known}")

    def layers(
        self,
        version: int | None = None,
        tables: Sequence[str] | None = None,
        *,
        above_base: bool = False,
    ) -> dict[str, list[Rows]]:
        """The chunks of a version by table, read, in the order in which they are laid over."""
        while True:
            state = self._state
            chosen = state.line.versions[-1].version if version is None else version
            line = state.line_of(chosen)
            names = list(state.tables) if tables is None else list(tables)
            self._check_tables(names)
            chunks = [
                chunk
                for chunk in line.of(chosen)
                if chunk.table in names and not (above_base and chunk.layer == 0)
            ]
            try:
                rows = self.read(chunks, line.tables)
            except DataLoss as error:
                if self.refresh().number != state.number:
                    continue  # split or merged meanwhile
                raise DataLoss(f"version {chosen}: {error}; {offer(self, chunks)}") from error
            found: dict[str, list[Rows]] = {name: [] for name in names}
            for chunk, read in zip(chunks, rows, strict=True):
                found[chunk.table].append(read)
            return found

    def read(
        self, chunks: Sequence[Chunk], tables: Mapping[str, Table] | None = None
    ) -> list[Rows]:
        """The rows of chunks of a line with those tables (the newest). Raises DataLoss.

        It names file and offset.
        """
        if tables is None:
            tables = self._state.line.tables
        return self.reader.read(chunks, tables)

    def part(self, version: int, name: str) -> bytes:
        """What rode along. Raises NotFound, DataLoss."""
        parts = self._state.version(version).parts
        if name not in parts:
            raise NotFound(f"version {version} has no part {name!r}; it has: {', '.join(parts)}")
        part = parts[name]
        try:
            body = self._files.read(part.file)
        except NotFound as error:
            raise DataLoss(f"version {version}: {error}") from error
        if len(body) != part.bytes or xxhash.xxh3_64_hexdigest(body) != part.checksum:
            raise DataLoss(f"{self.name}/{part.file} does not fit its checksum")
        return body

    # ---- dropping ----

    def keep(self, version: int, kept: bool = True) -> None:
        """Marks a version that purge leaves: to go back to when corruption is noticed late."""
        before = self._state
        line = before.line_of(version)
        versions = tuple(
            replace(each, kept=kept) if each.version == version else each for each in line.versions
        )
        new = replace(line, versions=versions)
        lines = tuple(new if each is line else each for each in before.lines)
        self._commit(before, replace(before, lines=lines))

    def purge(self, newest: int) -> list[int]:
        """Drops all versions but the ``newest`` so many and those that are kept; returns which.

        What a version that stays needs stays. Also removes files that no state names, an hour old.
        """
        if newest < 1:
            raise InvalidArgument("purge leaves at least the newest version")
        before = self._state
        versions = before.versions()
        stay = {each.version for each in versions[-newest:]}
        stay |= {each.version for each in versions if each.kept}
        gone = [each.version for each in versions if each.version not in stay]
        lines = []
        for line in before.lines:
            left = tuple(each for each in line.versions if each.version in stay)
            if len(left) == len(line.versions):
                lines.append(line)
            elif left:
                newest_line = line is before.lines[-1]
                chunks = tuple(
                    chunk
                    for chunk in line.chunks
                    if (newest_line and chunk.open)
                    or any(chunk.holds(each.version) for each in left)
                )
                lines.append(replace(line, versions=left, chunks=chunks))
        if gone:
            self._commit(before, replace(before, lines=tuple(lines)))
        self._sweep()
        return gone

    def _sweep(self) -> None:
        # Shares first: without its share nobody commits the rest. And listed before the state is
        # read: what it does not name then, no newer one does either, unless it is young.
        folders = {name: self._files.list(name) for name in ("shares", "lines", "parts", "data")}
        state = self.refresh()
        named = state.files() | set(state.trash)
        for folder, files in folders.items():
            for name, age in files.items():
                if age > LEFTOVER_SECONDS and f"{folder}/{name}" not in named:
                    self._files.remove(f"{folder}/{name}")

    def rollback(self, version: int) -> list[int]:
        """Drops what is newer than a version, which is the newest then; returns which."""
        before = self._state
        line = before.line_of(version)
        gone = [each.version for each in before.versions() if each.version > version]
        chunks = tuple(
            replace(chunk, end=OPEN) if chunk.end > version else chunk
            for chunk in line.chunks
            if chunk.first <= version
        )
        versions = tuple(each for each in line.versions if each.version <= version)
        lines = before.lines[: before.lines.index(line)]
        if gone:
            written = tuple(each for each in line.written if each[0] <= version)
            new = replace(line, versions=versions, chunks=chunks, written=written)
            after = replace(before, lines=(*lines, new), rollbacks=before.rollbacks + 1)
            self._commit(before, after)
        return gone

    # ---- looking ----

    def stored_bytes(self, *, base: bool = True) -> int:
        """Bytes of data files, as they are on the disk; base: with those that hold base chunks."""
        files: dict[str, bool] = {}
        for line in self._state.lines:
            for chunk in line.chunks:
                files[chunk.file] = files.get(chunk.file, False) or chunk.layer == 0
        return sum(self._files.size(path) for path, of_base in files.items() if base or not of_base)

    def verify(self) -> list[str]:
        """Reads all of it; what is wrong, and what is lost by it, in words.

        Empty: every version restores.
        """
        return verify(self)
