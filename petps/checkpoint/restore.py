"""Read the rows of one version: lay its chunks over each other. STORE.md, "Restore".

Owns:        read_layers(), read_pieces(), read_part().
Never does:  write; return rows of two versions.
Called by:   store.py.
Threads:     any, beside the thread that writes the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import xxhash

from petps.checkpoint.chunk import Rows, lay_over
from petps.checkpoint.state import Chunk, Lineage
from petps.checkpoint.verify import describe_newest_whole
from petps.errors import DataLoss, NotFound

if TYPE_CHECKING:
    from petps.checkpoint.store import Store

__all__ = ["read_layers", "read_part", "read_pieces"]


def read_layers(
    store: Store,
    version: int | None,
    tables: Sequence[str] | None,
    *,
    above_base: bool,
) -> dict[str, list[Rows]]:
    """See Store.layers."""
    while True:
        state = store.state
        chosen = state.newest_version if version is None else version
        lineage = state.lineage_of(chosen)
        names = list(state.tables) if tables is None else list(tables)
        _check_tables(store, names)
        chunks = [
            chunk
            for chunk in lineage.chunks_of(chosen)
            if chunk.table in names and not (above_base and chunk.layer == 0)
        ]
        try:
            rows = store.read(chunks, lineage.tables)
        except DataLoss as error:
            if store.refresh().number != state.number:
                continue  # retry: the chunks were split or merged since
            newest = describe_newest_whole(store, chunks)
            raise DataLoss(f"version {chosen}: {error}; {newest}") from error
        layers: dict[str, list[Rows]] = {name: [] for name in names}
        for chunk, chunk_rows in zip(chunks, rows, strict=True):
            layers[chunk.table].append(chunk_rows)
        return layers


def read_part(store: Store, version: int, name: str) -> bytes:
    """See Store.part."""
    parts = store.state.version(version).parts
    if name not in parts:
        raise NotFound(f"version {version} has no part {name!r}; it has: {', '.join(parts)}")
    part = parts[name]
    try:
        body = store.files.read(part.file)
    except NotFound as error:
        raise DataLoss(f"version {version}: {error}") from error
    if len(body) != part.bytes or xxhash.xxh3_64_hexdigest(body) != part.checksum:
        raise DataLoss(f"{store.name}/{part.file} does not fit its checksum")
    return body


def read_pieces(store: Store, table: str, version: int | None) -> Iterator[Rows]:
    """See Store.pieces."""
    _check_tables(store, [table])
    chosen = store.state.newest_version if version is None else version
    created = store.state.version(chosen).created_ns
    start: int | None = 0
    while start is not None:
        state = store.state
        if store.state.version(chosen).created_ns != created:
            raise NotFound(f"{store.name} was rolled back, and another version is {chosen} now")
        windows = _read_windows(store, state.lineage_of(chosen), chosen, table, start)
        try:
            for rows, next_start in windows:
                yield rows
                start = next_start
                del rows  # free it before the next piece is built
        except DataLoss as error:
            if store.refresh().number == state.number:
                needed = state.lineage_of(chosen).chunks_of(chosen)
                newest = describe_newest_whole(store, needed)
                raise DataLoss(f"version {chosen}: {error}; {newest}") from error
            # The chunks were split or merged since: continue at ``start`` with the new state.


def _read_windows(
    store: Store, lineage: Lineage, version: int, table: str, start: int
) -> Iterator[tuple[Rows, int | None]]:
    """Yield (rows, the key at which the next piece starts; None: no piece follows), from ``start``.

    A piece ends where the next chunk of the base begins.
    """
    chunks = [chunk for chunk in lineage.chunks_of(version) if chunk.table == table]
    above = store.read([chunk for chunk in chunks if chunk.layer > 0], lineage.tables)
    base = sorted((chunk for chunk in chunks if chunk.layer == 0), key=lambda chunk: chunk.min_key)
    stops = sorted({chunk.min_key for chunk in base[1:]})
    windows: list[tuple[int | None, list[Chunk]]] = []
    for stop in [*stops, None]:
        if stop is not None and stop <= start:
            continue
        count = next(
            (i for i, chunk in enumerate(base) if stop is not None and chunk.min_key >= stop),
            len(base),
        )
        window_chunks, base = base[:count], base[count:]
        windows.append((stop, [chunk for chunk in window_chunks if chunk.max_key >= start]))
    reads = store.reader.read_ahead([window_chunks for _, window_chunks in windows], lineage.tables)
    base_rows: list[tuple[Chunk, Rows]] = []  # chunks of several ranks may overlap
    for (stop, window_chunks), chunk_rows in zip(windows, reads, strict=True):
        base_rows = [pair for pair in base_rows if pair[0].max_key >= start]
        base_rows += zip(window_chunks, chunk_rows, strict=True)
        layers = [*(rows for _, rows in base_rows), *above]
        parts = [rows.between(start, stop) for rows in layers]
        yield lay_over(lineage.tables[table], parts, keep_deleted=False), stop
        del chunk_rows, layers, parts  # free them before the wait for the next chunks
        start = stop or 0


def _check_tables(store: Store, names: Sequence[str]) -> None:
    for name in names:
        if name not in store.state.tables:
            tables = ", ".join(store.state.tables)
            raise NotFound(f"{store.name} has no table {name!r}; it has: {tables}")
