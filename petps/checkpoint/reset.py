"""The newest version written again as a base. STORE.md, "2-D chunks".

Owns:        write_again(), has_base().
Never does:  commit.
Called by:   store.py.
Invariants:  the base has the rows of the version as they are stored.
Threads:     the store's writer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from petps.checkpoint.bundle import NewChunk, divide, prepare_chunks
from petps.checkpoint.state import Chunk, Lineage, State

if TYPE_CHECKING:
    from petps.checkpoint.store import Store

__all__ = ["has_base", "write_again"]


def write_again(
    store: Store, kind: str, write_bundle: Callable[[Iterable[NewChunk]], list[Chunk]]
) -> Lineage:
    """Write all rows of the newest version; return a lineage with it alone, of this kind (BASE)."""
    start = time.monotonic()
    number, tables = store.state.newest_version, store.state.lineage.tables
    entry = store.state.version(number)
    rows = {name: divide(tables[name], store.pieces(name, number)) for name in tables}
    chunks = write_bundle(prepare_chunks(number, rows, tables, lambda: None, base=True))
    entry = replace(
        entry,
        kind=kind,
        seconds=time.monotonic() - start,
        rows=sum(chunk.rows for chunk in chunks),
        bytes=sum(chunk.length + chunk.bloom_length for chunk in chunks),
    )
    record = (number, kind, entry.bytes, entry.seconds)
    return Lineage("", number, (entry,), tuple(chunks), tables, (record,))


def has_base(state: State, new: Lineage) -> bool:
    """Return whether a state has the base that write_again() returned."""
    return any(lineage.history[:1] == new.history for lineage in state.lineages)
