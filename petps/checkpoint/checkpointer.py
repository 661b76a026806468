"""Writes versions of a model that is trained: what changed, as the policy wants it, one at a time.

Owns:        Source (what a trainer gives), Checkpointer.
Never does:  track changes (petps.tracker), restore.
Called by:   trainers, publish, demo, bench.
Threads:     write() from one thread at a time; cancel() from any.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from petps.checkpoint.chunk import Bytes, Keys, Mask, Rows
from petps.checkpoint.policy import Policy
from petps.checkpoint.state import Version
from petps.checkpoint.store import DELTA, DIFFERENCE, Store
from petps.errors import FailedPrecondition

__all__ = ["Checkpointer", "Source"]

# Rows in a piece: what is in memory at a time beside the model.
CHUNK_BYTES: Final = 32 << 20


class Source(Protocol):
    """A trained model's rows."""

    def keys(self, table: str, since: int | None) -> Keys:
        """uint64[n], ascending: all keys (None), or those written or deleted after ``since``."""

    def rows(self, table: str, keys: Keys) -> tuple[Mapping[str, Bytes], Mask | None]:
        """Stored columns uint8[n, width] of those keys; bool[n]: which are deleted, or None."""


class Checkpointer:
    """Writes a source's versions to a store by a policy."""

    def __init__(
        self, store: Store, policy: Policy, source: Source, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._store = store
        self._policy = policy
        self._source = source
        self._chunk_bytes = chunk_bytes
        self._busy = threading.Lock()
        self._cancelled = threading.Event()

    def write(self, version: int, parts: Mapping[str, bytes] | None = None) -> Version:
        """Writes and commits a version; arrange() may follow at any time before the next.

        Raises FailedPrecondition when one is being written or was cancelled, and as Store.write.
        """
        if not self._busy.acquire(blocking=False):
            raise FailedPrecondition("a checkpoint is being written: cancel it, or wait for it")
        try:
            self._cancelled.clear()
            kind = self._policy.kind(self._store)
            since = None
            if kind == DELTA:
                since = self._store.state.line.versions[-1].version
            elif kind == DIFFERENCE:
                since = self._store.state.line.began
            rows = {table: self._pieces(table, since) for table in self._store.state.tables}
            return self._store.write(version, rows, kind=kind, parts=parts, goes_on=self._check)
        finally:
            self._busy.release()

    def arrange(self) -> None:
        """What is done behind the trainer: splitting, merging, removing. Changes no version."""
        with self._busy:
            self._policy.arrange(self._store)
            self._store.tidy()

    def cancel(self) -> None:
        """The version that is being written is not: write() raises, and the store is as it was."""
        self._cancelled.set()

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise FailedPrecondition("the checkpoint was cancelled")

    def _pieces(self, table: str, since: int | None) -> Iterator[Rows]:
        keys = self._source.keys(table, since)
        step = max(1, self._chunk_bytes // (8 + self._store.state.tables[table].width))
        for start in range(0, len(keys), step):
            part = keys[start : start + step]
            columns, deleted = self._source.rows(table, part)
            yield Rows.of(self._store.state.tables[table], part, columns, deleted)
