"""Find the damage in a store, the versions lost by it, and the newest whole one. STORE.md.

Owns:        verify(), check_chunk(), check_parts(), describe_newest_whole().
Never does:  repair, drop.
Called by:   store.py, tend.py.
Threads:     any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from petps.checkpoint.chunk import decode
from petps.checkpoint.state import Chunk, Lineage, Version
from petps.errors import DataLoss

if TYPE_CHECKING:
    from petps.checkpoint.store import Store

__all__ = ["check_chunk", "check_parts", "describe_newest_whole", "verify"]


def verify(store: Store) -> list[str]:
    """See Store.verify."""
    problems: list[str] = []
    damaged: set[Chunk] = set()
    parts: set[int] = set()
    for lineage in store.state.lineages:
        for chunk in lineage.chunks:
            chunk_problems = check_chunk(store, lineage, chunk)
            problems += chunk_problems
            if chunk_problems:
                damaged.add(chunk)
        for version in lineage.versions:
            part_problems = check_parts(store, version)
            problems += part_problems
            if part_problems:
                parts.add(version.version)
    return [*problems, *_describe_loss(store, damaged, parts)] if problems else []


def check_chunk(store: Store, lineage: Lineage, chunk: Chunk) -> list[str]:
    """Read a chunk; return texts that say what is wrong with it."""
    where = f"{chunk.file} at {chunk.offset}"
    try:
        rows = store.read([chunk], lineage.tables)[0]
        body = store.reader.bytes(chunk.file, chunk.offset, chunk.length)
        first_key = None if chunk.has_keys else chunk.min_key
        stream = decode(lineage.tables[chunk.table], body, chunk.file, first_key)
    except DataLoss as error:
        return [str(error)]
    problems = []
    if not rows.equals(stream):
        problems.append(f"{where}: the column offsets (layout) in the lineage are wrong")
    if (
        len(rows) == 0
        or (int(rows.keys[0]), int(rows.keys[-1])) != (chunk.min_key, chunk.max_key)
        or not (rows.keys[1:] > rows.keys[:-1]).all()
    ):
        problems.append(f"{where}: its keys do not ascend, or are not from min_key to max_key")
    return problems


def check_parts(store: Store, version: Version) -> list[str]:
    """Read the parts of a version; return texts that say what is wrong with them."""
    problems = []
    for name in version.parts:
        try:
            store.part(version.version, name)
        except DataLoss as error:
            problems.append(str(error))
    return problems


def _describe_loss(store: Store, damaged: Iterable[Chunk], parts: set[int]) -> list[str]:
    """Return one text: the versions that need a damaged chunk or part, and the newest whole one."""
    versions = [entry.version for entry in store.state.versions()]
    damaged_chunks = set(damaged)
    lost = {
        entry.version
        for lineage in store.state.lineages
        for entry in lineage.versions
        if any(chunk in damaged_chunks for chunk in lineage.chunks_of(entry.version))
    }
    losses = []
    if lost:
        losses.append(f"lost: {_list_versions(versions, lost)}, {len(lost)} of {len(versions)}")
    if parts - lost:
        losses.append(f"only parts lost: {_list_versions(versions, parts - lost)}")
    whole_versions = [version for version in versions if version not in lost | parts]
    last = (
        f"version {whole_versions[-1]} is the newest that is whole"
        if whole_versions
        else "no version is whole"
    )
    return [f"{'; '.join(losses)}; {last}"]


def _list_versions(versions: Sequence[int], chosen: set[int]) -> str:
    """Return the chosen versions as text, with neighbours joined: "versions 2, 5 to 9"."""
    runs: list[list[int]] = []
    for before, version in zip([None, *versions], versions, strict=False):
        if version in chosen:
            if before in chosen and runs:
                runs[-1].append(version)
            else:
                runs.append([version])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"version{'s' * (len(chosen) > 1)} {', '.join(texts)}"


def describe_newest_whole(store: Store, needed: Sequence[Chunk]) -> str:
    """Return the newest version that needs none of the damaged files, as text for an error."""
    damaged_files = {chunk.file for chunk in needed if not store.reader.is_whole(chunk)}
    for lineage in reversed(store.state.lineages):
        for version in reversed(lineage.versions):
            if not any(chunk.file in damaged_files for chunk in lineage.chunks_of(version.version)):
                return f"version {version.version} does not need it"
    return "every version needs it"
