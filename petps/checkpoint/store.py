"""A checkpoint store: write, restore, split, merge and drop versions. STORE.md.

Owns:        Store, which keeps the files of a store consistent.
Never does:  decide how a version is written (policy.py), or which rows changed (tracker).
Called by:   checkpointer.py, policies, cli.
Invariants:  a committed version restores to the same rows until it is dropped; data that does not
             match its checksum is never returned; a failed call leaves the store as it was, unless
             may_have_committed.
Threads:     one thread writes; restores may run in others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

import xxhash

from petps.checkpoint.bundle import NewChunk, RowsByTable, prepare_chunks, write_bundle
from petps.checkpoint.chunk import Rows, Table, lay_over
from petps.checkpoint.commit import CHANGE_TRIES, create_state, list_obsolete, pause, prepare
from petps.checkpoint.files import Files, open_files
from petps.checkpoint.leftovers import remove_leftovers
from petps.checkpoint.quantise import Quantising
from petps.checkpoint.reader import Reader
from petps.checkpoint.reset import has_base, write_again
from petps.checkpoint.restore import read_layers, read_part, read_pieces
from petps.checkpoint.state import OPEN, Chunk, Lineage, Part, State, Version
from petps.checkpoint.state_files import load, new_name
from petps.checkpoint.verify import verify
from petps.delta.schema import check_name
from petps.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PetpsError,
    Unavailable,
)

if TYPE_CHECKING:
    from typing import Required, Unpack  # Python 3.11

__all__ = ["BASE", "DELTA", "DIFFERENCE", "NewChunk", "Store", "WriteOptions"]

BASE: Final = "base"
DELTA: Final = "delta"
DIFFERENCE: Final = "difference"
KINDS: Final = (BASE, DELTA, DIFFERENCE)
# Bundles of which less than half is in use are compacted once they have this many bytes in use.
COMPACT_BYTES: Final = 1 << 20
MAX_VERSION: Final = (1 << 64) - 1


class WriteOptions(TypedDict, total=False):
    """Options of Store.write().

    kind: BASE has every row. DELTA has the rows changed or deleted since the newest version.
    DIFFERENCE has those since the base of the lineage.
    tables: How the rows of a BASE are stored; None: as the trainer has them. A DELTA or DIFFERENCE
    is stored like its lineage.
    parts: Opaque bytes, by name.
    raise_if_cancelled: Called before each piece; if it raises, the version is cancelled.
    partitions: Above 1: each piece holds keys of one of P partitions, and the pieces are in the
    order of partitions and then keys.
    """

    kind: Required[str]
    tables: Mapping[str, Table] | None
    parts: Mapping[str, bytes] | None
    raise_if_cancelled: Callable[[], None]
    partitions: int


class Store:
    """A checkpoint store, at the newest state that this object knows."""

    def __init__(self, files: Files, state: State) -> None:
        self._files = files
        self._state = state
        self._sizes: dict[str, int] = {}
        self._obsolete: list[str] = []  # files that tidy() removes
        self._open_number = 0  # of a state that may appear, because the store did not answer
        self._open_versions: set[int] = set()  # created_ns of the versions in such states
        self._mutex = threading.Lock()  # guards _state, which restores in other threads refresh
        self.reader = Reader(files)

    @classmethod
    def create(
        cls,
        url: str | Path | Files,
        model: str,
        tables: Sequence[Table],
        quantising: Quantising | None = None,
        *,
        commit_empty: bool = True,
    ) -> Store:
        """Create a store. Raise AlreadyExists if one exists here; raise InvalidArgument, IoError.

        tables: as the trainer has them. ``quantising``: the expected restores, by which a
        Checkpointer chooses the quantisation of a lineage; None: store rows as they are.
        commit_empty: commit a state without versions; if False, the store exists once its first
        version is committed.
        """
        files = open_files(url) if isinstance(url, str | Path) else url
        check_name("model", model)
        if not tables or len({table.name for table in tables}) != len(tables):
            raise InvalidArgument("a store needs at least one table, and a different name for each")
        if files.list("states"):
            raise AlreadyExists(f"{files.name} holds a checkpoint store already")
        tables_by_name = {table.name: table for table in tables}
        store = cls(files, State(0, model, tables_by_name, quantising=quantising))
        if commit_empty:
            store._commit(store._state, store._state)
        return store

    @classmethod
    def open(cls, url: str | Path | Files) -> Store:
        """Open a store. Raise NotFound if none exists, DataLoss, Unimplemented (newer format)."""
        files = open_files(url) if isinstance(url, str | Path) else url
        return cls(files, load(files))

    @property
    def name(self) -> str:
        """Return the name for messages."""
        return self._files.name

    @property
    def files(self) -> Files:
        """Return the files of the store."""
        return self._files

    @property
    def state(self) -> State:
        """Return the state that this object knows; refresh() reads the newest one."""
        return self._state

    @property
    def may_have_committed(self) -> bool:
        """Return whether a commit may still appear that failed because there was no answer."""
        return self._open_number > self._state.number

    def refresh(self) -> State:
        """Load the newest state, which another process may have written, and return it."""
        state = load(self._files)
        with self._mutex:  # a change may have been committed since load()
            if state.number > self._state.number:
                self._state = state
            return self._state

    # ---- writing ----

    def write(
        self,
        version: int,
        rows: RowsByTable,
        **options: Unpack[WriteOptions],
    ) -> Version:
        """Write a version and commit it.

        Args:
            version: Its number, above all versions of the store.
            rows: By table, all at once or as pieces. The keys ascend from piece to piece, and one
                piece at a time is in memory.
            options: See WriteOptions.

        Raise InvalidArgument, FailedPrecondition (another writer), IoError. Then the version does
        not exist, and the store is as it was, unless may_have_committed. If such a version appears
        later, the next write() replaces it, unless this object knows of it by then (refresh).
        """
        before = self._state
        lineage = self.write_data(version, rows, **options)
        self.add(lineage, before)
        return lineage.versions[0]

    def write_data(
        self,
        version: int,
        rows: RowsByTable,
        *,
        kind: str,
        tables: Mapping[str, Table] | None = None,
        parts: Mapping[str, bytes] | None = None,
        raise_if_cancelled: Callable[[], None] = lambda: None,
        partitions: int = 1,
    ) -> Lineage:
        """Write a version but do not commit it. Return a lineage with only it, for add()."""
        start = time.monotonic()
        self._check_new(version, rows, kind)
        stored_tables = self._state.tables if kind == BASE else self._state.lineage.tables
        if kind != BASE and tables not in (None, stored_tables):
            text = f"version {version}: {self.name} has a base with other columns now: write again"
            raise Unavailable(text)
        tables = tables or stored_tables
        chunks = self._write_bundle(
            prepare_chunks(
                version, rows, tables, raise_if_cancelled, base=kind == BASE, partitions=partitions
            )
        )
        stored: dict[str, Part] = {}
        try:
            for name, body in (parts or {}).items():
                check_name("part", name)
                path = f"parts/{new_name()}"
                self._files.write(path, [body])
                stored[name] = Part(path, len(body), xxhash.xxh3_64_hexdigest(body))
            raise_if_cancelled()
        except BaseException:
            self.discard({chunk.file for chunk in chunks} | {p.file for p in stored.values()})
            raise
        entry = Version(
            version,
            kind,
            time.time_ns(),
            time.monotonic() - start,
            sum(chunk.rows for chunk in chunks),
            sum(chunk.length + chunk.bloom_length for chunk in chunks),
            parts=stored,
        )
        record = (version, kind, entry.bytes, entry.seconds)
        return Lineage("", version, (entry,), tuple(chunks), tables, (record,))

    def reset(self) -> Version:
        """Write the newest version again as a base, which begins a new lineage. Return its entry.

        All versions keep their rows, and the base has them as they are stored: nothing is quantised
        again. Other writers may add versions meanwhile, which then belong to the new lineage. In
        memory is what pieces() holds.

        Raise FailedPrecondition if the version is a base already. Raise NotFound if it was dropped
        meanwhile, or a newer base was written; Unavailable, DataLoss, IoError. Then the store is as
        it was.
        """
        entry = self._state.version(self._state.newest_version)
        if entry.kind == BASE:
            raise FailedPrecondition(f"version {entry.version} of {self.name} is a base already")
        new = write_again(self, BASE, self._write_bundle)
        try:
            self._change(lambda state: state.reset(new), lambda state: has_base(state, new))
        except (FailedPrecondition, NotFound, Unavailable):  # after an IoError it may exist
            self.discard({chunk.file for chunk in new.chunks})
            raise
        return new.versions[0]

    def discard(self, paths: Iterable[str]) -> None:
        """Remove files of a version that failed. One that remains is removed by purge."""
        for path in paths:
            with contextlib.suppress(PetpsError):
                self._files.remove(path)

    def add(self, new: Lineage, before: State, *, is_first: bool = False) -> None:
        """Commit a version that write_data() wrote above the newest version of ``before``.

        If another writer changed the store meanwhile, but added or dropped no version above that
        one, add it to what that writer left. Above a version that became a base meanwhile, a delta
        and a difference have what they need, and more. A version of this object's that has appeared
        since, after its commit had no answer, is dropped in the same state. is_first: as state 1.
        """
        (entry,) = new.versions
        above = before
        for attempt in range(CHANGE_TRIES):
            try:
                if entry.kind == BASE:
                    self._commit(before, replace(above, lineages=(*above.lineages, new)))
                else:
                    is_difference = entry.kind == DIFFERENCE
                    lineage = above.lineage.add_version(new, is_difference=is_difference)
                    self._commit(before, above.with_lineage(lineage))
                return
            except FailedPrecondition as error:
                after = self.refresh()
                if any(entry.created_ns == other.created_ns for other in after.versions()[-1:]):
                    return  # it was added, and another writer's state followed at once
                found = after.find_place(above, self._open_versions)
                if after.number == before.number or found is None or is_first:
                    raise
                pause(attempt, error)
                before, above = after, found
            except BaseException:
                if self.may_have_committed:
                    self._open_versions.add(entry.created_ns)
                raise

    def _check_new(self, version: int, rows: RowsByTable, kind: str) -> None:
        if kind not in KINDS:
            raise InvalidArgument(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if not 0 < version <= MAX_VERSION:
            raise InvalidArgument(f"version must be from 1 to 2^64-1, got {version}")
        newest = self._state.versions()
        if newest and version <= newest[-1].version:
            raise InvalidArgument(
                f"version {version} is not above {newest[-1].version}, the newest of {self.name}"
            )
        if kind != BASE and not newest:
            raise FailedPrecondition(f"{self.name} has no base yet: write a base first")
        unknown = set(rows) - set(self._state.tables)
        if unknown:
            raise InvalidArgument(
                f"{self.name} has no table {min(unknown)!r}; "
                f"it has: {', '.join(self._state.tables)}"
            )
        if kind == BASE and set(rows) != set(self._state.tables):
            missing = min(set(self._state.tables) - set(rows))
            raise InvalidArgument(f"a base needs every table, but {missing!r} is missing")

    def _write_bundle(self, new_chunks: Iterable[NewChunk]) -> list[Chunk]:
        chunks = write_bundle(self._files, self._state.tables, new_chunks)
        if chunks:
            self._sizes[chunks[-1].file] = chunks[-1].bloom_offset + chunks[-1].bloom_length
        return chunks

    def _commit(self, before: State, after: State) -> None:
        # The state that this object knows may be newer than ``before``, because a restore in
        # another thread refreshed it. Then the commit must fail.
        state = prepare(self._files, before, after)
        try:
            create_state(self._files, state)
        except BaseException as error:  # also Ctrl-C: the request may be on its way
            if not isinstance(error, FailedPrecondition):
                self._open_number = state.number
            raise
        self._open_versions.clear()
        with self._mutex:
            self._state = state
        self.tidy()
        self._obsolete = list_obsolete(before)
        files = {chunk.file for lineage in self._state.lineages for chunk in lineage.chunks}
        self.reader.forget_all_but(files)
        self._sizes = {path: size for path, size in self._sizes.items() if path in files}

    def _change(
        self,
        derive: Callable[[State], State],
        is_made: Callable[[State], bool] = lambda _: False,
    ) -> None:
        """Commit a change that fits any state. If another writer was faster, make it again.

        is_made: whether a state has the change already. A commit is refused although it was made
        if another writer's state followed at once.
        """
        for attempt in range(CHANGE_TRIES):
            before = self._state
            try:
                self._commit(before, derive(before))
                return
            except FailedPrecondition as error:
                after = self.refresh()
                if is_made(after):
                    return
                if after.number == before.number:
                    raise
                pause(attempt, error)

    @property
    def appeared(self) -> int | None:
        """Return the newest version if this object takes it for failed; see may_have_committed."""
        newest = self._state.versions()[-1:]
        return next((e.version for e in newest if e.created_ns in self._open_versions), None)

    def _settle(self) -> State:
        """Return the state that this object knows; first ask for an answer that is missing."""
        return self.refresh() if self.may_have_committed else self._state

    def tidy(self) -> None:
        """Remove the files that no reader needs any more; otherwise the next change does it."""
        paths, self._obsolete = self._obsolete, []
        for path in paths:
            with contextlib.suppress(PetpsError):  # purge will remove a file that remains
                self._files.remove(path)

    def rearrange(
        self,
        removed: Sequence[Chunk],
        bundles: Sequence[Iterable[NewChunk]] = (),
        *,
        added: Sequence[Chunk] = (),
        ended: Sequence[Chunk] = (),
        end: int = OPEN,
    ) -> None:
        """Replace chunks of the newest lineage by other chunks, in one state, and compact bundles.

        Args:
            removed: Chunks to remove.
            bundles: The chunks of each bundle to write; they are added.
            added: Chunks to add whose bundles are in the store already.
            ended: Chunks that end at version ``end``.

        The caller must not change the rows of any version.
        """
        before = self._state
        new = [chunk for bundle in bundles for chunk in self._write_bundle(bundle)]
        removed_chunks, ended_chunks = set(removed), set(ended)
        chunks = [
            replace(chunk, end=end) if chunk in ended_chunks else chunk
            for chunk in before.lineage.chunks
            if chunk not in removed_chunks
        ]
        chunks += [*new, *added]
        lineage = replace(before.lineage, chunks=tuple(self._compact(chunks)))
        self._commit(before, before.with_lineage(lineage))

    def _compact(self, chunks: list[Chunk]) -> list[Chunk]:
        """Copy the chunks of bundles that are less than half in use to one bundle.

        Return all chunks.
        """
        used_bytes: dict[str, int] = {}
        for chunk in chunks:
            used_bytes[chunk.file] = (
                used_bytes.get(chunk.file, 0) + chunk.length + chunk.bloom_length
            )
        sparse = {path for path, count in used_bytes.items() if 2 * count < self._size(path)}
        sparse_chunks = [chunk for chunk in chunks if chunk.file in sparse]
        if sum(chunk.length + chunk.bloom_length for chunk in sparse_chunks) < COMPACT_BYTES:
            return chunks
        new_chunks = (
            (chunk.table, rows, chunk.first, chunk.end, chunk.layer)
            for chunk, rows in zip(sparse_chunks, self.read(sparse_chunks), strict=True)
        )
        dense = [chunk for chunk in chunks if chunk.file not in sparse]
        return dense + self._write_bundle(new_chunks)

    def _size(self, path: str) -> int:
        if path not in self._sizes:
            self._sizes[path] = self._files.size(path)
        return self._sizes[path]

    # ---- reading ----

    def restore(
        self, version: int | None = None, tables: Sequence[str] | None = None
    ) -> dict[str, Rows]:
        """Return the rows of a version (None: the newest), by table: ascending keys, no deletions.

        Raise NotFound for an unknown version or table. Raise DataLoss for files that are missing,
        cut or altered; it names them, and the newest version that does not need them.
        """
        chosen = self._state.newest_version if version is None else version
        layers = self.layers(chosen, tables)
        stored = self.tables_of(chosen)
        return {name: lay_over(stored[name], layers[name], keep_deleted=False) for name in layers}

    def resume(self, version: int | None = None) -> dict[str, Rows]:
        """Restore a version for a training that continues from it, and count the restore.

        If a training has several ranks, one rank calls this and the others call restore().
        """
        newest = self._state.newest_version
        rows = self.restore(version)
        self.count_restore(newest if version in (None, newest) else None)
        return rows

    def count_restore(self, newest: int | None = None) -> None:
        """Count durably that a training continues from a version's rows.

        Once the count exceeds the expected restores of a quantised store, the next version is a
        base of 8 bits. Raise Unavailable if other writers were faster each time, and IoError.

        newest: the version, if it was the newest. Raise FailedPrecondition if it no longer is, for
        example because a commit of the trainer before this one appeared only now. After this call
        none can appear.
        """

        self._fence(newest, 1)

    def begin_empty(self) -> None:
        """Make sure that the store has no version, and that no commit without an answer appears.

        Raise FailedPrecondition if it has one; raise Unavailable, IoError.
        """
        self._fence(0, 0)

    def _fence(self, newest: int | None, restores: int) -> None:
        """Make a state, so that no other one with its number can appear, and count restores."""

        def fence(state: State) -> State:
            found = state.newest_version if state.lineages else 0
            if newest not in (None, found):
                raise FailedPrecondition(
                    f"{self.name}: version {newest} was the newest when rows were restored, now "
                    f"it is {found} (0: none): restore again, or roll back first"
                )
            return replace(state, restores=state.restores + restores)

        self._change(fence)

    def expect(self, quantising: Quantising | None) -> None:
        """Set the expected restores for the quantisation of new lineages; None: do not quantise."""
        self._change(lambda state: replace(state, quantising=quantising))

    def tables_of(self, version: int | None = None) -> Mapping[str, Table]:
        """Return the tables of a version, as its chunks store them; None: of the newest lineage.

        Column.values() decodes their rows.
        """
        lineage = self._state.lineage if version is None else self._state.lineage_of(version)
        return lineage.tables

    def pieces(self, table: str, version: int | None = None) -> Iterator[Rows]:
        """Yield the rows of restore() for one table, in pieces in the order of keys.

        In memory are the chunks above the base, four chunks of the base, which are read in
        parallel, and two copies of the piece being built. If chunks of the base overlap, all that
        overlap are in memory: four chunks of each rank if ranks wrote the base, and a chunk of each
        partition if write_base() wrote it.

        Raise the errors of restore(), and NotFound if the version was rolled back, even if another
        version has its number now.
        """
        return read_pieces(self, table, version)

    def layers(
        self,
        version: int | None = None,
        tables: Sequence[str] | None = None,
        *,
        above_base: bool = False,
    ) -> dict[str, list[Rows]]:
        """Return the rows of each chunk of a version, by table, oldest first.

        above_base: leave out the chunks of the base.
        """
        return read_layers(self, version, tables, above_base=above_base)

    def read(
        self, chunks: Sequence[Chunk], tables: Mapping[str, Table] | None = None
    ) -> list[Rows]:
        """Return the rows of chunks.

        tables: as the chunks store them; None: those of the newest lineage. Raise DataLoss that
        names file and offset.
        """
        if tables is None:
            tables = self._state.lineage.tables
        return self.reader.read(chunks, tables)

    def part(self, version: int, name: str) -> bytes:
        """Return a part of a version. Raise NotFound, DataLoss."""
        return read_part(self, version, name)

    # ---- dropping ----

    def keep(self, version: int, kept: bool = True) -> None:
        """Set or clear the mark that purge must not drop this version."""
        self._change(lambda state: state.mark_kept(version, kept))

    def purge(self, newest: int) -> list[int]:
        """Delete all versions except the last ``newest``; see drop_all_but()."""
        if newest < 1:
            raise InvalidArgument(f"purge keeps at least the newest version, got newest={newest}")
        return self.drop_all_but(set(self._state.whole_versions()[-newest:]))

    def drop_all_but(self, versions: Collection[int]) -> list[int]:
        """Delete all versions except these, the newest and those marked kept; return the deleted.

        Chunks that they need stay. Also remove files at least two days old that no state names.
        """
        before = self._settle()
        newest = [entry.version for entry in before.versions()[-1:]]  # perhaps a partial one
        remaining = {*versions, *newest, *before.whole_versions()[-1:]}
        remaining |= {entry.version for entry in before.versions() if entry.kept}
        deleted = [e.version for e in before.versions() if e.version not in remaining]
        if deleted:
            self._commit(before, before.drop_all_but(remaining))
        remove_leftovers(self._files, self.refresh)
        return deleted

    def rollback(self, version: int) -> list[int]:
        """Drop all versions newer than ``version`` and return their numbers.

        Afterwards no version can appear whose commit failed without an answer.
        """
        before = self._settle()
        after = before.roll_back(version)
        dropped = [entry.version for entry in before.versions() if entry.version > version]
        if dropped or self.may_have_committed:
            self._commit(before, after)
        return dropped

    # ---- inspecting ----

    def stored_bytes(self, *, base: bool = True) -> int:
        """Return the size of all bundles in bytes; base: include bundles that hold base chunks."""
        files: dict[str, bool] = {}
        for lineage in self._state.lineages:
            for chunk in lineage.chunks:
                files[chunk.file] = files.get(chunk.file, False) or chunk.layer == 0
        return sum(self._files.size(path) for path, is_base in files.items() if base or not is_base)

    def verify(self) -> list[str]:
        """Read the whole store. Return texts that name its problems and the versions lost by them.

        If the list is empty, every version can be restored.
        """
        return verify(self)
