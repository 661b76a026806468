"""The contents of a store at one moment. STORE.md.

Owns:        Chunk, Version, Sealed, Lineage, State.
Never does:  read or write files.
Called by:   state_files.py, commit.py, store.py, policies, the CLI's lists.
Invariants:  a State and all objects in it are immutable; a change makes a new State, wholly or not
             at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from petps.checkpoint.chunk import Table
from petps.checkpoint.quantise import Quantising
from petps.errors import NotFound

__all__ = ["OPEN", "PARTIAL_PART", "Chunk", "Lineage", "Part", "Sealed", "State", "Version"]

PARTIAL_PART: Final = "petps.partial"  # of a version that only prepares a later one
OPEN: Final = 0  # the end of a span that has not ended


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of a table in a bundle, and the versions that they belong to."""

    table: str
    first: int  # the first version that the rows belong to
    end: int  # OPEN, or the first version that the rows do not belong to
    layer: int  # 0: of the base; 1: a delta as written; above: merged
    file: str
    offset: int
    length: int
    bloom_offset: int
    bloom_length: int
    rows: int
    min_key: int
    max_key: int
    checksum: str  # xxh3-64 of the Arrow stream, 16 hex digits
    # Offsets in the stream of the keys, each column and the null mask; -1: no keys, no mask.
    # Empty: unknown, so the stream is parsed (old_base.py).
    layout: tuple[int, ...]

    def holds(self, version: int) -> bool:
        """Return whether the version is in the chunk's span."""
        return self.first <= version and (self.end == OPEN or version < self.end)

    @property
    def stop_offset(self) -> int:
        """Return the offset in the bundle at which the chunk's Arrow stream ends."""
        return self.offset + self.length

    @property
    def has_keys(self) -> bool:
        """Return whether the chunk stores its keys; else they are min_key and the keys after it."""
        return not self.layout or self.layout[0] >= 0

    @property
    def is_open(self) -> bool:
        """Return whether the chunk belongs to future versions."""
        return self.end == OPEN


@dataclass(frozen=True, slots=True)
class Part:
    """Opaque bytes stored with a version."""

    file: str
    bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Version:
    """One checkpoint. ``kind``: base, delta (since the last) or difference (since the base)."""

    version: int
    kind: str
    created_ns: int
    seconds: float  # that writing it took, without the commit
    rows: int
    bytes: int
    kept: bool = False  # purge does not drop it
    parts: Mapping[str, Part] = field(default_factory=dict)

    @property
    def is_partial(self) -> bool:
        """Return whether it only prepares a later version, and counts for no retention."""
        return PARTIAL_PART in self.parts


@dataclass(frozen=True, slots=True)
class Sealed:
    """Ended chunks of a lineage, listed in a file of their own and not in the lineage's file."""

    file: str
    checksum: str  # xxh3-64 of the file, 16 hex digits
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Lineage:
    """A base and the versions written above it."""

    file: str
    base_version: int  # the version that is the base; purge may have deleted it
    versions: tuple[Version, ...]
    chunks: tuple[Chunk, ...]
    tables: Mapping[str, Table]  # as stored in its chunks
    # (version, kind, bytes, seconds) of every version ever written, purged ones included
    history: tuple[tuple[int, str, int, float], ...]
    sealed: tuple[Sealed, ...] = ()  # chunks that the lineage's own file does not list

    @property
    def base_bytes(self) -> int:
        """Return the bytes of the base's chunks."""
        return sum(chunk.length + chunk.bloom_length for chunk in self.chunks if chunk.layer == 0)

    def chunks_of(self, version: int) -> list[Chunk]:
        """Return the chunks of a version, oldest first: the order in which to lay them over."""
        chunks = [chunk for chunk in self.chunks if chunk.holds(version)]
        return sorted(chunks, key=lambda chunk: chunk.first)

    def open_delta_chunks(self) -> list[Chunk]:
        """Return the open chunks above the base, oldest first (IncrCP: Row_0; DECK: living)."""
        return sorted(
            (chunk for chunk in self.chunks if chunk.layer > 0 and chunk.is_open),
            key=lambda chunk: chunk.first,
        )

    def add_version(self, new: Lineage, *, is_difference: bool) -> Lineage:
        """Return this lineage with the one version of ``new`` added.

        is_difference: the version has all rows changed since the base, so the open chunks above
        the base end at it.
        """
        (entry,) = new.versions
        older = tuple(
            replace(chunk, end=entry.version)
            if is_difference and chunk.layer > 0 and chunk.is_open
            else chunk
            for chunk in self.chunks
        )
        return replace(
            self,
            versions=(*self.versions, entry),
            chunks=(*older, *new.chunks),
            history=(*self.history, *new.history),
        )

    def drop_all_but(self, remaining: Collection[int], *, is_newest: bool) -> Lineage:
        """Return this lineage with only these versions, and the chunks that they need."""
        versions = tuple(entry for entry in self.versions if entry.version in remaining)
        if len(versions) == len(self.versions):
            return self
        chunks = tuple(
            chunk
            for chunk in self.chunks
            if (is_newest and chunk.is_open)  # the next version needs it
            or any(chunk.holds(entry.version) for entry in versions)
        )
        return replace(self, versions=versions, chunks=chunks)

    def split_at(self, new: Lineage) -> tuple[Lineage, Lineage]:
        """Return the versions below that of ``new``, and it with the versions above it.

        ``new`` has one version of this lineage, as a base. No version's rows change: what this
        lineage wrote up to that version is in the base, whatever later merges and differences have
        of it again.
        """
        version = new.base_version
        below = tuple(entry for entry in self.versions if entry.version < version)
        older = replace(
            self,
            versions=below,
            chunks=tuple(
                chunk for chunk in self.chunks if any(chunk.holds(entry.version) for entry in below)
            ),
            history=tuple(record for record in self.history if record[0] < version),
        )
        newer = replace(
            new,
            versions=new.versions + tuple(e for e in self.versions if e.version > version),
            chunks=new.chunks + tuple(chunk for chunk in self.chunks if chunk.first > version),
            history=new.history + tuple(record for record in self.history if record[0] > version),
        )
        return older, newer

    def roll_back(self, version: int) -> Lineage:
        """Return this lineage without the versions and chunks written above ``version``.

        Chunks that ended above it are open again. A chunk that ended at it stays ended, because its
        rows do not belong to ``version``. Splits and merges are not undone.
        """
        return replace(
            self,
            versions=tuple(entry for entry in self.versions if entry.version <= version),
            chunks=tuple(
                replace(chunk, end=OPEN) if chunk.end > version else chunk
                for chunk in self.chunks
                if chunk.first <= version
            ),
            history=tuple(record for record in self.history if record[0] <= version),
        )


@dataclass(frozen=True, slots=True)
class State:
    """Everything that a store holds."""

    number: int
    model: str
    tables: Mapping[str, Table]  # the trainer's own
    lineages: tuple[Lineage, ...] = ()
    trash: tuple[str, ...] = ()  # files that the state before this one named, and this one does not
    quantising: Quantising | None = None
    restores: int = 0  # how often a training has resumed from a version
    rollbacks: int = 0  # how often versions were dropped to continue from an older one

    @property
    def lineage(self) -> Lineage:
        """Return the newest lineage. Raise NotFound."""
        if not self.lineages:
            raise NotFound("the store has no version yet: write one")
        return self.lineages[-1]

    @property
    def newest_version(self) -> int:
        """Return the number of the newest version. Raise NotFound."""
        return self.lineage.versions[-1].version

    def versions(self) -> list[Version]:
        """Return all versions, oldest first."""
        return [version for lineage in self.lineages for version in lineage.versions]

    def whole_versions(self) -> list[int]:
        """Return the numbers of the versions that are not partial, oldest first."""
        return [entry.version for entry in self.versions() if not entry.is_partial]

    def version(self, version: int) -> Version:
        """Return one version. Raise NotFound."""
        return next(
            entry for entry in self.lineage_of(version).versions if entry.version == version
        )

    def lineage_of(self, version: int) -> Lineage:
        """Return the lineage of a version. Raise NotFound with the versions that exist."""
        for lineage in self.lineages:
            if any(entry.version == version for entry in lineage.versions):
                return lineage
        numbers = [entry.version for entry in self.versions()]
        text = f"has only version {numbers[0]}" if numbers else "has no version yet"
        if len(numbers) > 1:
            text = f"has {len(numbers)} versions from {numbers[0]} to {numbers[-1]}"
        raise NotFound(f"there is no version {version} in the store; it {text}")

    def files(self) -> set[str]:
        """Return the paths of all files that the state and its lineages name."""
        paths = {lineage.file for lineage in self.lineages}
        for lineage in self.lineages:
            paths |= {sealed.file for sealed in lineage.sealed}
            paths |= {chunk.file for chunk in lineage.chunks}
            paths |= {part.file for version in lineage.versions for part in version.parts.values()}
        return paths

    def with_lineage(self, lineage: Lineage) -> State:
        """Return a state in which ``lineage`` replaces the newest lineage."""
        return replace(self, lineages=(*self.lineages[:-1], lineage))

    def has_same_end(self, other: State) -> bool:
        """Return whether a version that was written above one state can be added to the other."""

        def end_of(state: State) -> tuple[int, int, Mapping[str, Table]]:
            if not state.lineages:
                return 0, 0, {}
            newest = state.lineage.versions[-1]
            return newest.version, newest.created_ns, state.lineage.tables

        return end_of(self) == end_of(other)

    def find_place(self, above: State, own: Collection[int]) -> State | None:
        """Return the state to which a version can be added that was written above ``above``.

        own: created_ns of versions that their writer takes for failed: the newest version of this
        state is dropped if it is one of them, and not kept. None: there is no place.
        """
        if self.has_same_end(above):
            return self
        newest, undone = self.versions()[-1], self.drop_newest()
        is_replaceable = newest.created_ns in own and not newest.kept
        return undone if is_replaceable and undone.has_same_end(above) else None

    def reset(self, new: Lineage) -> State:
        """Return a state in which a version of the newest lineage begins a lineage of its own.

        new: that version, as a base. Raise NotFound if the newest lineage does not have it, or has
        it as its base.
        """
        (entry,) = new.versions
        found = self.version(entry.version)
        is_same = found.created_ns == entry.created_ns and found.kind != entry.kind
        if not is_same or found not in self.lineage.versions:
            raise NotFound(
                f"version {entry.version} was rolled back meanwhile, or another base was written"
            )
        new = replace(new, versions=(replace(entry, kept=found.kept),))
        lineages = (*self.lineages[:-1], *self.lineage.split_at(new))
        return replace(self, lineages=tuple(lineage for lineage in lineages if lineage.versions))

    def mark_kept(self, version: int, kept: bool) -> State:
        """Return a state in which the version has or lacks the mark that purge must not drop it."""
        lineage = self.lineage_of(version)
        versions = tuple(
            replace(entry, kept=kept) if entry.version == version else entry
            for entry in lineage.versions
        )
        marked = replace(lineage, versions=versions)
        return replace(
            self, lineages=tuple(marked if other is lineage else other for other in self.lineages)
        )

    def drop_all_but(self, remaining: Collection[int]) -> State:
        """Return a state with only these versions, and the chunks that they need."""
        lineages = (
            lineage.drop_all_but(remaining, is_newest=lineage is self.lineages[-1])
            for lineage in self.lineages
        )
        return replace(self, lineages=tuple(lineage for lineage in lineages if lineage.versions))

    def drop_newest(self) -> State:
        """Return a state without the newest version."""
        older = self.versions()[-2:-1]
        if older:
            return self.roll_back(older[0].version)
        return replace(self, lineages=(), rollbacks=self.rollbacks + 1)

    def roll_back(self, version: int) -> State:
        """Return a state without the versions above ``version``. Raise NotFound."""
        lineage = self.lineage_of(version)
        older = self.lineages[: self.lineages.index(lineage)]
        lineages = (*older, lineage.roll_back(version))
        return replace(self, lineages=lineages, rollbacks=self.rollbacks + 1)
