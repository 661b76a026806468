"""A version written by several ranks: each writes a share, and one of them commits all. STORE.md.

Owns:        write_share(), commit_shares(), discard_share(), list_pending_shares().
Never does:  pass messages between ranks: callers send one rank's decision to the others.
Called by:   checkpointer.py, staging.py, the CLI's lists.
Invariants:  one state makes a version exist, once all its shares exist; before that state the
             version does not exist.
Threads:     a rank's share is written by one thread.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import numpy as np

from petps.checkpoint.bundle import Encoded, RowsByTable
from petps.checkpoint.chunk import Rows
from petps.checkpoint.fields import check_paths, check_records
from petps.checkpoint.state import Chunk, Lineage, Part, Version
from petps.checkpoint.state_files import encode_document, read_document, read_lineage, write_lineage
from petps.checkpoint.store import Store, WriteOptions
from petps.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PetpsError,
    Unavailable,
)

if TYPE_CHECKING:
    from typing import Unpack  # Python 3.11

__all__ = ["MAX_RANKS", "commit_shares", "discard_share", "list_pending_shares", "write_share"]

MAX_RANKS: Final = 65_536
_SHARE: Final = re.compile(r"(\d{20})-(\d{5})\.json")


@dataclass(frozen=True, slots=True)
class _Header:
    """The contents of a share's file."""

    rank: int
    ranks: int
    # The store's newest version when the share was written; 0: none.
    above: int
    # The store's rollbacks at that time: a share from before a rollback must not be committed.
    rollbacks: int
    line: str  # the file of a lineage that has this version alone


@dataclass(frozen=True, slots=True)
class _Share(_Header):
    lineage: Lineage


def write_share(
    store: Store,
    version: int,
    rows: RowsByTable,
    *,
    rank: int,
    ranks: int,
    replace_own: bool = False,
    **options: Unpack[WriteOptions],
) -> Version:
    """Write the share of one rank, 0 to ``ranks`` - 1, durably, but do not commit the version.

    options: see WriteOptions. No two ranks have the same key of a table, all pass the same ``kind``
    and ``tables``, and no two write a part of the same name. If the rank has written its share
    already, raise AlreadyExists, because another process may act as this rank. A rank that was
    restarted sets ``replace_own``; all tries of a version have the same rows. If the version is the
    store's newest, return the entry of the share.
    """
    if not 1 <= ranks <= MAX_RANKS or not 0 <= rank < ranks:
        raise InvalidArgument(
            f"rank must be from 0 to ranks - 1, and ranks at most {MAX_RANKS:,}, got rank {rank} "
            f"of {ranks}"
        )
    path = _path(version, rank)
    if not replace_own and rank in _list_ranks_of(store, version):
        raise _written_error(store, version, rank)
    newest = store.state.versions()
    if replace_own and newest and newest[-1].version == version:
        own = _find_own(store, version, rank)
        if own is not None:  # a commit without an answer was made: commit_shares() will find it
            _drop(rows)
            return own
    lineage = write_lineage(store.files, store.write_data(version, rows, **options))
    body = encode_document(
        {
            "rank": rank,
            "ranks": ranks,
            "above": newest[-1].version if newest else 0,
            "rollbacks": store.state.rollbacks,
            "line": lineage.file,
        }
    )
    if replace_own:
        store.files.remove(path)
    if replace_own and rank == 0:  # remove shares of ranks that no longer exist
        for other in _list_ranks_of(store, version):
            if other >= ranks:
                store.files.remove(_path(version, other))
    try:
        store.files.create(path, body)
    except AlreadyExists:
        # Equal: the filesystem retried after the first try had created the file.
        if store.files.read(path) != body:
            raise _written_error(store, version, rank) from None
    return lineage.versions[0]


def commit_shares(store: Store, version: int, written: Sequence[int] = ()) -> Version:
    """Commit the shares of a version. One rank calls it, once it knows that all are written.

    written: created_ns of the entries that write_share() returned, by rank; (): not checked. Raise
    Unavailable if a share is another one, which a process may have written that still takes itself
    for the rank, or if the shares are to be written again above ``store.appeared``.

    Raise NotFound if there is no share. Raise FailedPrecondition that names the ranks if a share is
    missing, does not fit the store or the other shares, or has a key of another share. Raise
    DataLoss. After an error the version does not exist, and a share may be written again; after an
    IoError it may exist. If it is the newest version, as these shares or those of a try before them
    whose commit this object takes for failed, do nothing but remove the shares.
    """
    before = store.state
    if store.appeared == version:  # with the shares of an earlier try
        for rank in _list_ranks_of(store, version):
            with contextlib.suppress(PetpsError):
                _discard(store, version, rank)
        return before.versions()[-1]
    shares = [_read(store, version, rank) for rank in sorted(_list_ranks_of(store, version))]
    if not shares:
        raise NotFound(f"{store.name}: no rank has written a share of version {version}")
    first = shares[0]
    missing = sorted(set(range(first.ranks)) - {share.rank for share in shares})
    if missing:
        raise FailedPrecondition(
            f"version {version} is not whole: of {first.ranks} ranks there is no share of "
            f"{_name_ranks(missing)}"
        )
    _check_written(version, shares, written)
    newest = before.versions()
    above = newest[-1].version if newest else 0
    if above == version and all(_is_committed(store, share.lineage) for share in shares):
        _remove(store, version, shares)
        return newest[-1]
    for share in shares:
        if share.rollbacks != before.rollbacks:
            raise FailedPrecondition(
                f"version {version}: rank {share.rank} wrote its share before the store was rolled "
                "back: write it again"
            )
        if share.above != above and store.appeared == above:
            raise Unavailable(
                f"version {version}: rank {share.rank} wrote its share before version {above} "
                "appeared, whose commit had failed without an answer: write it again"
            )
        if share.above != above:
            raise FailedPrecondition(
                f"version {version}: rank {share.rank} wrote its share above version "
                f"{share.above}, the newest is {above}: write it again"
            )
        first_entry, entry = first.lineage.versions[0], share.lineage.versions[0]
        if (share.ranks, entry.kind) != (first.ranks, first_entry.kind) or (
            share.lineage.tables != first.lineage.tables
        ):
            raise FailedPrecondition(
                f"version {version}: rank {share.rank} wrote a {entry.kind} of {share.ranks} "
                f"ranks, rank {first.rank} a {first_entry.kind} of {first.ranks}, or their columns "
                "differ: one rank decides how to write a version, and all write it so"
            )
    _check_files(store, version, shares)
    _check_keys(store, version, shares)
    committed = _join_entries(version, shares)
    chunks = tuple(chunk for share in shares for chunk in share.lineage.chunks)
    lineage = replace(
        first.lineage,
        file="",
        versions=(committed,),
        chunks=chunks,
        history=((version, committed.kind, committed.bytes, committed.seconds),),
    )
    store.add(lineage, before)
    _remove(store, version, shares)
    return committed


def _check_written(version: int, shares: Sequence[_Share], written: Sequence[int]) -> None:
    """Raise Unavailable unless these are the shares that the ranks wrote; see commit_shares."""
    found = [share.lineage.versions[0].created_ns for share in shares]
    others = [rank for rank, (a, b) in enumerate(zip_longest(found, written)) if a != b]
    if written and others:
        raise Unavailable(
            f"version {version}: another process wrote a share as {_name_ranks(others)}: end it, "
            "and write the version again"
        )


def _remove(store: Store, version: int, shares: Iterable[_Share]) -> None:
    """Remove the files of committed shares that no state names."""
    for share in shares:
        with contextlib.suppress(PetpsError):
            store.files.remove(_path(version, share.rank))
            store.files.remove(share.lineage.file)


def _drop(rows: RowsByTable) -> None:
    """Take all rows and drop them. Threads that encode them wait until they are taken."""
    for pieces in rows.values():
        for piece in () if isinstance(pieces, Rows) else pieces:
            for _ in piece.body if isinstance(piece, Encoded) else ():
                pass


def _find_own(store: Store, version: int, rank: int) -> Version | None:
    """Return the entry of a rank's share, or None."""
    try:
        return _read(store, version, rank).lineage.versions[0]
    except (NotFound, DataLoss):
        return None


def _is_committed(store: Store, lineage: Lineage) -> bool:
    """Return whether the store's state has the version of a share.

    Its chunks may have been replaced since, by a merge or a base; its parts stay.
    """
    parts = {part.file for part in lineage.versions[0].parts.values()}
    return (parts or {chunk.file for chunk in lineage.chunks}) <= store.state.files()


def discard_share(store: Store, version: int, rank: int) -> None:
    """Remove the share of a rank and its files, after all ranks know that the version failed.

    Do nothing if the version exists, or there is no share.
    """
    if not any(entry.version == version for entry in store.refresh().versions()):
        _discard(store, version, rank)


def _discard(store: Store, version: int, rank: int) -> None:
    """Remove the share of a rank, and those of its files that the store's state does not name."""
    try:
        share = _read(store, version, rank)
    except (NotFound, DataLoss):
        return
    store.files.remove(_path(version, rank))  # first: then no commit can name the other files
    parts = {part.file for part in share.lineage.versions[0].parts.values()}
    files = {share.line} | parts | {chunk.file for chunk in share.lineage.chunks}
    store.discard(files - store.state.files())


def list_pending_shares(store: Store) -> dict[int, tuple[list[int], int]]:
    """Return, for each uncommitted version, the ranks with a share and the number of ranks."""
    committed = {entry.version for entry in store.state.versions()}
    ranks_by_version: dict[int, list[int]] = {}
    for version, rank in _list_shares(store):
        if version not in committed:
            ranks_by_version.setdefault(version, []).append(rank)
    pending: dict[int, tuple[list[int], int]] = {}
    for version, ranks in sorted(ranks_by_version.items()):
        with contextlib.suppress(NotFound):  # committed or replaced after it was listed
            pending[version] = (sorted(ranks), _read_header(store, version, ranks[0]).ranks)
    return pending


def _path(version: int, rank: int) -> str:
    return f"shares/{version:020d}-{rank:05d}.json"


def _list_shares(store: Store) -> list[tuple[int, int]]:
    matches = map(_SHARE.fullmatch, store.files.list("shares"))
    return [(int(match[1]), int(match[2])) for match in matches if match]


def _list_ranks_of(store: Store, version: int) -> set[int]:
    return {rank for share_version, rank in _list_shares(store) if share_version == version}


def _read_header(store: Store, version: int, rank: int) -> _Header:
    path = _path(version, rank)
    values = read_document(store.files, path)
    header = _Header(*(values.get(name) for name in _Header.__slots__))  # type: ignore[arg-type]
    try:
        check_records([header])
        check_paths([header.line])
    except ValueError as error:
        raise DataLoss(f"{store.name}/{path}: {error}") from error
    if header.rank != rank:
        raise DataLoss(f"{store.name}/{path} is the share of rank {header.rank}: write it again")
    return header


def _read(store: Store, version: int, rank: int) -> _Share:
    header = _read_header(store, version, rank)
    try:
        lineage = read_lineage(store.files, header.line)
    except NotFound as error:
        raise DataLoss(f"version {version}, rank {rank}: {error}: write its share again") from error
    if [entry.version for entry in lineage.versions] != [version]:
        raise DataLoss(f"{store.name}/{_path(version, rank)} holds a share of another version")
    return _Share(**asdict(header), lineage=lineage)


def _written_error(store: Store, version: int, rank: int) -> AlreadyExists:
    return AlreadyExists(
        f"{store.name}: rank {rank} has written its share of version {version} already; a rank "
        "that was restarted sets replace_own=True"
    )


def _name_ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(str(rank) for rank in ranks[:8])
    return f"rank{'s' * (len(ranks) > 1)} {numbers}{', ...' if len(ranks) > 8 else ''}"


def _check_files(store: Store, version: int, shares: Iterable[_Share]) -> None:
    """Raise DataLoss if purge removed a file of a share, which no state has named for two days."""
    for share in shares:
        sizes: dict[str, int] = {}
        for chunk in share.lineage.chunks:
            stop = chunk.bloom_offset + chunk.bloom_length
            sizes[chunk.file] = max(stop, sizes.get(chunk.file, 0))
        sizes |= {part.file: part.bytes for part in share.lineage.versions[0].parts.values()}
        for path, size in sizes.items():
            try:
                is_whole = store.files.size(path) >= size
            except NotFound:
                is_whole = False
            if not is_whole:
                raise DataLoss(
                    f"version {version}, rank {share.rank}: {store.name}/{path} is gone or cut: "
                    "write its share again"
                )


def _check_keys(store: Store, version: int, shares: Iterable[_Share]) -> None:
    """Raise FailedPrecondition if a key is in two shares.

    Read the keys of chunks whose ranges overlap, and no rows.
    """
    by_table: dict[str, list[tuple[Chunk, int]]] = {}
    for share in shares:
        for chunk in share.lineage.chunks:
            by_table.setdefault(chunk.table, []).append((chunk, share.rank))
    for table, chunks in by_table.items():
        chunks.sort(key=lambda pair: pair[0].min_key)
        group: list[tuple[Chunk, int]] = []
        highest = -1
        for chunk, rank in chunks:
            if chunk.min_key > highest:
                _check_group(store, version, table, group)
                group = []
            group.append((chunk, rank))
            highest = max(highest, chunk.max_key)
        _check_group(store, version, table, group)


def _check_group(
    store: Store, version: int, table: str, group: Sequence[tuple[Chunk, int]]
) -> None:
    if len({rank for _, rank in group}) < 2:
        return
    keys = np.concatenate([store.reader.read_keys(chunk) for chunk, _ in group])
    ranks = np.repeat([rank for _, rank in group], [chunk.rows for chunk, _ in group])
    order = np.argsort(keys, kind="stable")
    repeats = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    if len(repeats):
        first_rank, second_rank = (int(ranks[order[repeats[0] + step]]) for step in (0, 1))
        raise FailedPrecondition(
            f"version {version}: key {keys[order[repeats[0]]]} of table {table} is in the shares "
            f"of ranks {first_rank} and {second_rank}: a key belongs to one rank"
        )


def _join_entries(version: int, shares: Sequence[_Share]) -> Version:
    parts: dict[str, Part] = {}
    for share in shares:
        for name, part in share.lineage.versions[0].parts.items():
            if name in parts:
                raise FailedPrecondition(
                    f"version {version}: two ranks wrote a part {name!r}, one of them is rank "
                    f"{share.rank}: put the rank into the name"
                )
            parts[name] = part
    entries = [share.lineage.versions[0] for share in shares]
    return Version(
        version,
        entries[0].kind,
        max(entry.created_ns for entry in entries),
        max(entry.seconds for entry in entries),
        sum(entry.rows for entry in entries),
        sum(entry.bytes for entry in entries),
        parts=parts,
    )
