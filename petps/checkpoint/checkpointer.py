"""Write versions of a model in training, one at a time; a policy chooses which rows.

Owns:        Source (the rows of a trainer), Checkpointer, Decision, decide_next().
Never does:  track changes (petps.train.tracker); restore.
Called by:   trainers, publish, demo, bench.
Threads:     write() from one thread at a time; cancel() from any.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from petps.checkpoint.bundle import CHUNK_BYTES
from petps.checkpoint.chunk import Bytes, Floats, Keys, Mask, Rows, Table
from petps.checkpoint.policy import Policy
from petps.checkpoint.quantise import (
    Sample,
    choose_tables,
    describe,
    has_too_few_bits,
    prepare_columns,
    sample_keys,
)
from petps.checkpoint.shares import commit_shares, write_share
from petps.checkpoint.state import State, Version
from petps.checkpoint.store import BASE, DELTA, Store
from petps.errors import FailedPrecondition

__all__ = ["Checkpointer", "Decision", "Source", "decide_next"]

_log = logging.getLogger("petps.checkpoint")


class Source(Protocol):
    """The rows of a model in training."""

    def keys(self, table: str, since: int | None) -> Keys:
        """Return uint64[n], ascending: all keys, or those written or deleted after ``since``."""

    def rows(self, table: str, keys: Keys) -> tuple[Mapping[str, Floats | Bytes], Mask | None]:
        """Return the columns of those keys, and bool[n]: which keys are deleted (None: no key is).

        A column is float32[n, dim], or uint8[n, width] as the trainer stores it, not quantised.
        """


@dataclass(frozen=True, slots=True)
class Decision:
    """How to write the next version: rows changed after ``since`` (None: all), as ``tables``.

    tables: Empty if they are not chosen yet. choose: Then chooses them, in any thread.
    """

    kind: str
    since: int | None
    tables: Mapping[str, Table]
    choose: Callable[[], Mapping[str, Table]] | None = field(default=None, compare=False)


def decide_next(store: Store, policy: Policy, sample: Sample, *, later: bool = False) -> Decision:
    """Return how to write the next version.

    The policy decides, except that a base is due when the lineage has too few bits for the number
    of times that the training has resumed. later: take the samples of a quantised base now, but let
    Decision.choose() choose by them, which takes tens of milliseconds.
    """
    state = store.state
    quantising = state.quantising
    kind = policy.kind(store)
    if (
        kind != BASE
        and quantising is not None
        and has_too_few_bits(state.lineage.tables, state.tables, quantising, state.restores)
    ):
        kind = BASE
    if kind == BASE:
        if later and quantising is not None:
            samples = {name: sample(name, quantising.seed) for name in state.tables}
            choose = partial(_choose_tables, state, lambda name, seed: samples[name])
            return Decision(kind, None, {}, choose)
        return Decision(kind, None, _choose_tables(state, sample))
    since = state.newest_version if kind == DELTA else state.lineage.base_version
    return Decision(kind, since, state.lineage.tables)


def _choose_tables(state: State, sample: Sample) -> Mapping[str, Table]:
    stored = choose_tables(state.tables, state.quantising, state.restores, sample)
    if state.quantising is not None:
        _log.info("[checkpoint] %s", "; ".join(describe(stored)))
    return stored


class Checkpointer:
    """Writer of a source's versions to a store, as a policy decides."""

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
        """Write a version and commit it. arrange() may follow at any time before the next one.

        Raise FailedPrecondition if another write is running or cancel() was called, and the errors
        of Store.write.
        """
        with self._writing():
            decision = decide_next(self._store, self._policy, self._sample)
            return self._store.write(
                version,
                self._rows(decision),
                kind=decision.kind,
                tables=decision.tables,
                parts=parts,
                raise_if_cancelled=self._check,
            )

    def next(self) -> Decision:
        """Return how to write the next version; one rank calls this and sends it to the others."""
        self._store.refresh()  # another rank may be the one that commits
        return decide_next(self._store, self._policy, self._sample)

    def share(
        self,
        version: int,
        decision: Decision,
        rank: int,
        ranks: int,
        parts: Mapping[str, bytes] | None = None,
        *,
        replace_own: bool = False,
    ) -> Version:
        """Write this rank's share of a version; the source holds only this rank's keys.

        Refresh the store first, so that all ranks write above the same version. See write_share.
        """
        with self._writing():
            self._store.refresh()
            return write_share(
                self._store,
                version,
                self._rows(decision),
                rank=rank,
                ranks=ranks,
                kind=decision.kind,
                tables=decision.tables,
                parts=parts,
                raise_if_cancelled=self._check,
                replace_own=replace_own,
            )

    def commit(self, version: int) -> Version:
        """Commit a version when all ranks have written their shares. See commit_shares."""
        with self._writing():
            return commit_shares(self._store, version)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise FailedPrecondition("a checkpoint is being written: cancel it, or wait for it")
        try:
            self._cancelled.clear()
            yield
        finally:
            self._busy.release()

    def arrange(self) -> None:
        """Split, merge and remove files: the work behind the trainer. Change no version."""
        with self._busy:
            self._policy.arrange(self._store)
            self._store.tidy()

    def cancel(self) -> None:
        """Cancel the version being written: write() raises, and the store stays as it was."""
        self._cancelled.set()

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise FailedPrecondition("the checkpoint was cancelled")

    def _rows(self, decision: Decision) -> dict[str, Iterator[Rows]]:
        return {table: self._pieces(table, decision) for table in decision.tables}

    def _pieces(self, name: str, decision: Decision) -> Iterator[Rows]:
        own, stored = self._store.state.tables[name], decision.tables[name]
        keys = self._source.keys(name, decision.since)
        step = max(1, self._chunk_bytes // (8 + own.width))
        for start in range(0, len(keys), step):
            part = keys[start : start + step]
            columns, deleted = self._source.rows(name, part)
            yield Rows.of(stored, part, prepare_columns(own, stored, columns), deleted)

    def _sample(self, table: str, seed: int) -> tuple[Keys, Mapping[str, Floats | Bytes]]:
        all_keys = self._source.keys(table, None)
        keys = sample_keys(lambda: [all_keys], seed)
        if len(keys) == 0:
            return keys, {}
        return keys, self._source.rows(table, keys)[0]
