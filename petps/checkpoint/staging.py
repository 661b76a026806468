"""Staged versions: the trainer waits only until their rows are copied out. STAGING.md.

Owns:        Bandwidth, StagedCheckpointer: what follows the stages of stages.py.
Never does:  keep more than four chunks in memory; list a version before all of it is in the store.
Called by:   trainers, bench.
Invariants:  a version has the rows as they were when write() was called; a version that fails or
             is cancelled leaves the store as it was, and no file in the folder.
Threads:     write(), wait() and close() from one thread; cancel() from any. A version in flight
             has three threads of its own. No other writer may write the store during that time;
             restores may run.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

import numpy as np

from petps.checkpoint.bundle import Encoded, RowsByTable
from petps.checkpoint.checkpointer import Decision, decide_next
from petps.checkpoint.chunk import Bytes, Column, Floats, Keys, Rows, Table, encode
from petps.checkpoint.flight import Copied, Flight
from petps.checkpoint.policy import Policy
from petps.checkpoint.quantise import sample_keys
from petps.checkpoint.shares import commit_shares, write_share
from petps.checkpoint.stages import CHUNK_BYTES, FOLDER_BYTES, Device, Stager, view_buffer
from petps.checkpoint.state import Version
from petps.checkpoint.store import Store
from petps.errors import DeadlineExceeded, InvalidArgument, PetpsError

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

__all__ = ["Bandwidth", "StagedCheckpointer"]

_log = logging.getLogger("petps.checkpoint")

# Bytes that are paced and uploaded at a time.
PIECE_BYTES: Final = 1 << 20
# Values that are quantised and checked at a time.
SLICE_VALUES: Final = 1 << 17
# How long a share waits until it is known how rows are stored. A copy may wait for that.
CHOICE_SECONDS: Final = 300

Tables = Mapping[str, Table]  # by name, as they are stored


class Bandwidth:
    """A limit on the bytes per second: before each send, wait for the time that delay() returns."""

    def __init__(self, bytes_per_second: float, now: Callable[[], float] = time.monotonic) -> None:
        if not bytes_per_second > 0:
            raise InvalidArgument(
                f"bytes_per_second must be more than 0, got {bytes_per_second}: for no limit, pass "
                "no Bandwidth"
            )
        self.bytes_per_second = bytes_per_second
        self._now = now
        self._free = now()  # the time at which all bytes allowed so far have been sent

    def delay(self, count: int) -> float:
        """Return the seconds to wait before the next ``count`` bytes, and count them as sent."""
        now = self._now()
        start = max(now, self._free)
        self._free = start + count / self.bytes_per_second
        return start - now


class StagedCheckpointer:
    """A Checkpointer whose write() returns once the rows are copied. Use ``with``, or call close().

    folder: on a local SSD. chunk_bytes: the size of each of the four buffers. folder_bytes: the
    limit of all chunks in the folder. bandwidth: the limit of the upload. prepare_thread: called
    first in each thread of a version in flight.
    """

    def __init__(
        self,
        store: Store,
        policy: Policy,
        device: Device,
        folder: str | Path,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        folder_bytes: int = FOLDER_BYTES,
        bandwidth: Bandwidth | None = None,
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._policy = policy
        self._bandwidth = bandwidth
        self._quantised: list[tuple[float, float]] = []
        self._stager = Stager(
            store.state.tables,
            device,
            folder,
            chunk_bytes=chunk_bytes,
            folder_bytes=folder_bytes,
            prepare_thread=prepare_thread,
        )

    @property
    def resident_chunks_max(self) -> int:
        """Return the most buffers that were in use at a time."""
        return self._stager.resident_chunks_max

    @property
    def quantised(self) -> list[tuple[float, float]]:
        """Return when the last version's chunks were quantised, in seconds of time.monotonic()."""
        return list(self._quantised)

    def write(self, version: int, parts: Mapping[str, bytes] | None = None) -> None:
        """Copy all rows and return; wait() returns when the version is committed.

        First wait for the version before this one. If that version failed, raise its error and
        write nothing. Raise FailedPrecondition if cancel() was called, IoError if the folder
        failed, and the errors of Store.write that have occurred so far. ``parts`` is first read
        when the rows are in the store, so its values may be computed then.
        """
        with self._stager.reserve(), self._stager.open_flight() as flight:
            decision = self._choose_next(flight)

            def upload(
                tables: Tables, rows: RowsByTable, raise_if_cancelled: Callable[[], None]
            ) -> Version:
                return self._store.write(
                    version,
                    rows,
                    kind=decision.kind,
                    tables=tables,
                    parts=parts,
                    raise_if_cancelled=raise_if_cancelled,
                )

            self._run_stages(flight, decision.since, lambda: decision.tables, upload, self.arrange)

    def next(self, *, refresh: bool = True, later: bool = False) -> Decision:
        """Wait for the version in flight, then return as Checkpointer.next() does.

        refresh: read the store's state first, because another rank may be the one that commits.
        later: see decide_next().
        """
        with self._stager.reserve(), self._stager.open_flight() as flight:
            if refresh:
                self._store.refresh()
            decision = self._choose_next(flight, later)
            self._stager.flight = None  # no version is in flight
            return decision

    def share(
        self,
        version: int,
        decision: Decision,
        rank: int,
        ranks: int,
        parts: Mapping[str, bytes] | None = None,
        *,
        replace_own: bool = False,
        chosen: Future[Tables] | None = None,
    ) -> None:
        """Stage this rank's share (Checkpointer.share); wait() returns when it is written.

        chosen: Will have the decision's tables, which are not chosen yet, or an error.
        """
        with self._stager.reserve(), self._stager.open_flight() as flight:

            def tables() -> Tables:
                if chosen is None:
                    return decision.tables
                if not flight.wait_until(chosen.done, CHOICE_SECONDS):
                    raise DeadlineExceeded(
                        f"version {version}: after {CHOICE_SECONDS} s it is not known how its rows "
                        "are stored, so a rank hangs: see its log"
                    )
                return chosen.result()

            def upload(
                tables: Tables, rows: RowsByTable, raise_if_cancelled: Callable[[], None]
            ) -> Version:
                self._store.refresh()  # all ranks write above the same version
                return write_share(
                    self._store,
                    version,
                    rows,
                    rank=rank,
                    ranks=ranks,
                    kind=decision.kind,
                    tables=tables,
                    parts=parts,
                    raise_if_cancelled=raise_if_cancelled,
                    replace_own=replace_own,
                )

            if chosen is not None:
                chosen.add_done_callback(lambda _: flight.notify())
            self._run_stages(flight, decision.since, tables, upload, lambda: None)

    def commit(self, version: int) -> None:
        """Commit a version in the background, after wait() has returned on all ranks."""
        with self._stager.reserve(), self._stager.open_flight() as flight:
            flight.start(
                lambda: self._finish(flight, commit_shares(self._store, version), self.arrange)
            )

    def _choose_next(self, flight: Flight, later: bool = False) -> Decision:
        decision = decide_next(self._store, self._policy, self._sample, later=later)
        flight.check()
        return decision

    def _sample(self, name: str, seed: int) -> tuple[Keys, Mapping[str, Floats | Bytes]]:
        return self._stager.sample(name, lambda pieces: sample_keys(pieces, seed))

    def _run_stages(
        self,
        flight: Flight,
        since: int | None,
        tables: Callable[[], Tables],
        upload: Callable[[Tables, RowsByTable, Callable[[], None]], Version],
        after_commit: Callable[[], None],
    ) -> None:
        """Start the stages and copy all rows out of the device; the stages do the rest.

        tables: Returns how rows are stored, once that is chosen.
        """

        def upload_rows() -> None:
            stored = tables()
            rows = {name: flight.take_table(name) for name in stored}
            self._finish(flight, upload(stored, rows, flight.check), after_commit)

        self._stager.send(
            flight, since, [lambda: self._encode_chunks(flight, tables()), upload_rows]
        )

    def _finish(self, flight: Flight, entry: Version, after_commit: Callable[[], None]) -> None:
        flight.succeed(entry)
        try:
            after_commit()
        except Exception as error:
            _log.exception(
                "[checkpoint] version %d is committed; splitting or merging after it failed and "
                "is retried after the next version: %s",
                entry.version,
                error,
            )

    def arrange(self) -> None:
        """Split, merge and remove files: the work behind a commit. Change no version."""
        self._policy.arrange(self._store)
        self._store.tidy()

    def measure(self) -> None:
        """Measure what the policy needs, if another process arranges the store."""
        self._policy.measure(self._store)

    def wait(self) -> Version | None:
        """Wait until the version in flight is committed, or a share is written, and return it.

        Return None if there was none. If it failed, raise its error, once. An error of splitting or
        merging behind it is only logged, because the version is committed.
        """
        return self._stager.wait()

    def cancel(self) -> None:
        """Cancel the version in flight: write() or wait() raises FailedPrecondition.

        Do nothing if the version is committed.
        """
        self._stager.cancel()

    def close(self) -> None:
        """Wait for the version in flight, and empty the folder. Raise the errors of wait()."""
        self._stager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self.cancel()
        with contextlib.suppress(PetpsError):
            self.close()

    # ---- the stages behind the spool

    def _encode_chunks(self, flight: Flight, tables: Tables) -> None:
        self._quantised.clear()
        for chunk, raw in self._stager.read_back(flight):
            own, stored = self._store.state.tables[chunk.table], tables[chunk.table]
            begin = time.monotonic()
            rows = _convert_rows(own, stored, raw, chunk)
            if own != stored:
                self._quantised.append((begin, time.monotonic()))
            buffer = flight.lease("up")
            encoded = Encoded.from_body(stored, rows, encode(stored, rows, into=buffer))
            flight.release("up", raw)
            body = self._pace_body(flight, buffer, encoded)
            flight.give(flight.encoded, (chunk.table, replace(encoded, body=body)))
        flight.end(flight.encoded)

    def _pace_body(
        self, flight: Flight, buffer: memoryview, encoded: Encoded
    ) -> Generator[memoryview, None, None]:
        """Yield the body in pieces, paced by the bandwidth; free its buffer after the last."""
        for body in encoded.body:
            for start in range(0, len(body), PIECE_BYTES):
                piece = body[start : start + PIECE_BYTES]
                self._pace(flight, len(piece))
                yield piece
        flight.release("up", buffer)
        self._pace(flight, len(encoded.bloom))

    def _pace(self, flight: Flight, count: int) -> None:
        if self._bandwidth is None:
            flight.check()
        else:
            flight.wait(self._bandwidth.delay(count))


def _convert_rows(own: Table, stored: Table, buffer: memoryview, chunk: Copied) -> Rows:
    """Return a chunk's rows as stored, in the buffer that they were read into."""
    keys, columns, deleted = view_buffer(own, buffer, chunk.rows)
    columns_out = {}
    for own_column, stored_column in zip(own.columns, stored.columns, strict=True):
        values = columns[own_column.name]
        if chunk.deletes:
            values[deleted] = 0
        columns_out[own_column.name] = _convert_column(own, own_column, stored_column, keys, values)
    if not (keys[1:] > keys[:-1]).all():
        raise InvalidArgument(f"table {own.name}: the device's keys do not ascend")
    return Rows(keys, columns_out, deleted if chunk.deletes else None)


def _convert_column(
    table: Table, own_column: Column, stored_column: Column, keys: Keys, values: Floats | Bytes
) -> Bytes:
    """Return a column as stored, written over the values that were read.

    This is safe because a row of ``stored_column`` never takes more bytes than the same row of
    ``own_column``.
    """
    raw = values.view(np.uint8).reshape(-1)
    out = raw[: len(keys) * stored_column.width].reshape(len(keys), stored_column.width)
    step = max(1, SLICE_VALUES // own_column.dim)
    for start in range(0, len(keys), step):
        part = values[start : start + step]
        if own_column.dtype not in ("f32", stored_column.dtype):
            part = own_column.values(part.view(np.uint8))
        try:
            stored = stored_column.stored(part)
        except InvalidArgument as error:
            last = keys[min(start + step, len(keys)) - 1]
            raise InvalidArgument(
                f"table {table.name}, of keys {keys[start]} to {last}: {error}"
            ) from error
        if own_column.dtype != stored_column.dtype:
            out[start : start + step] = stored
    return out
