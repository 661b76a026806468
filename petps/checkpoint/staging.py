"""Staged versions: the trainer waits only until their rows are copied out. STAGING.md.

Owns:        Device, SourceDevice (where rows are copied from), Bandwidth, StagedCheckpointer.
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
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from petps.checkpoint.bundle import Encoded, RowsByTable
from petps.checkpoint.checkpointer import Decision, Source, decide_next
from petps.checkpoint.chunk import Bytes, Column, Floats, Keys, Mask, Rows, Table, encode
from petps.checkpoint.flight import Copied, Flight, Stopped
from petps.checkpoint.policy import Policy
from petps.checkpoint.quantise import sample_keys
from petps.checkpoint.shares import commit_shares, write_share
from petps.checkpoint.spool import Spool
from petps.checkpoint.state import Version
from petps.checkpoint.store import Store
from petps.delta.arrow import RESERVED_BYTES
from petps.errors import FailedPrecondition, InvalidArgument, PetpsError

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

__all__ = ["Bandwidth", "Device", "SourceDevice", "StagedCheckpointer"]

_log = logging.getLogger("petps.checkpoint")

# As large as a piece of Checkpointer. Choose a multiple of the SSD's erase block.
CHUNK_BYTES: Final = 32 << 20
CHUNK_BYTES_MIN: Final = 4 * RESERVED_BYTES
FOLDER_BYTES: Final = 64 << 30
BUFFERS: Final = 4
# Bytes that are paced and uploaded at a time.
PIECE_BYTES: Final = 1 << 20
# Values that are quantised and checked at a time.
SLICE_VALUES: Final = 1 << 17

Array = npt.NDArray[np.generic]


class Device(Protocol):
    """The rows of a trainer, on a device."""

    def keys(self, table: str, since: int | None, at_most: int) -> Iterable[Keys]:
        """Return the keys of Source.keys(), in ascending pieces of at most ``at_most`` keys."""

    def copy(self, table: str, keys: Keys, out: Mapping[str, Array]) -> Mask | None:
        """Copy the rows of the keys into the columns ``out``.

        A column is float32[n, dim] if its dtype is f32, otherwise stored bytes uint8[n, width].
        Return bool[n]: which keys are deleted, or None.
        """


class SourceDevice:
    """A device made from a Source; it copies the rows once more than a Device of your own."""

    def __init__(self, source: Source, tables: Mapping[str, Table]) -> None:
        self._source = source
        self._tables = tables

    def keys(self, table: str, since: int | None, at_most: int) -> Iterator[Keys]:
        """See Device."""
        keys = self._source.keys(table, since)
        for start in range(0, len(keys), at_most):
            yield keys[start : start + at_most]

    def copy(self, table: str, keys: Keys, out: Mapping[str, Array]) -> Mask | None:
        """See Device."""
        columns, deleted = self._source.rows(table, keys)
        missing = set(out) - set(columns)
        if missing:
            raise InvalidArgument(f"table {table}: column {min(missing)} is missing")
        for column in self._tables[table].columns:
            values, target = columns[column.name], out[column.name]
            if column.dtype != "f32" or values.dtype == np.uint8:
                values, target = column.stored(values), target.view(np.uint8).reshape(len(keys), -1)
            if values.shape != target.shape:
                raise InvalidArgument(
                    f"table {table}: column {column.name}: values of shape {values.shape}, "
                    f"expected {target.shape}"
                )
            target[:] = values
        return deleted


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
    limit of all chunks in the folder. bandwidth: the limit of the upload.
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
    ) -> None:
        for table in store.state.tables.values():
            if _count_rows(table, chunk_bytes) < 1:
                least = max(CHUNK_BYTES_MIN, _reserved_bytes(table) + _row_bytes(table))
                raise InvalidArgument(
                    f"chunk_bytes {chunk_bytes} holds no row of table {table.name}: "
                    f"set at least {least}"
                )
        if folder_bytes < chunk_bytes:
            raise InvalidArgument(
                f"folder_bytes must be at least chunk_bytes, {chunk_bytes}, got {folder_bytes}"
            )
        self._store = store
        self._policy = policy
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._bandwidth = bandwidth
        self._spool: Spool | None = Spool(folder, folder_bytes)
        self._buffers: list[memoryview] = []
        self._flight: Flight | None = None
        self._writing = threading.Lock()
        self._resident_max = 0

    @property
    def resident_chunks_max(self) -> int:
        """Return the most buffers that were in use at a time."""
        flight = self._flight
        return max(self._resident_max, 0 if flight is None else flight.resident_max)

    def write(self, version: int, parts: Mapping[str, bytes] | None = None) -> None:
        """Copy all rows and return; wait() returns when the version is committed.

        First wait for the version before this one. If that version failed, raise its error and
        write nothing. Raise FailedPrecondition if cancel() was called, IoError if the folder
        failed, and the errors of Store.write that have occurred so far.
        """
        own_parts = dict(parts or {})
        with self._reserve() as spool, self._open_flight() as flight:
            decision = self._choose_next(flight)

            def upload(rows: RowsByTable, raise_if_cancelled: Callable[[], None]) -> Version:
                return self._store.write(
                    version,
                    rows,
                    kind=decision.kind,
                    tables=decision.tables,
                    parts=own_parts,
                    raise_if_cancelled=raise_if_cancelled,
                )

            self._run_stages(flight, spool, decision, upload, self._arrange)

    def next(self) -> Decision:
        """Wait for the version in flight, then return as Checkpointer.next() does."""
        with self._reserve(), self._open_flight() as flight:
            self._store.refresh()  # another rank may be the one that commits
            decision = self._choose_next(flight)
            self._flight = None  # no version is in flight
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
    ) -> None:
        """Stage this rank's share (Checkpointer.share); wait() returns when it is written."""
        own_parts = dict(parts or {})
        with self._reserve() as spool, self._open_flight() as flight:
            self._store.refresh()

            def upload(rows: RowsByTable, raise_if_cancelled: Callable[[], None]) -> Version:
                return write_share(
                    self._store,
                    version,
                    rows,
                    rank=rank,
                    ranks=ranks,
                    kind=decision.kind,
                    tables=decision.tables,
                    parts=own_parts,
                    raise_if_cancelled=raise_if_cancelled,
                    replace_own=replace_own,
                )

            self._run_stages(flight, spool, decision, upload, lambda: None)

    def commit(self, version: int) -> None:
        """Commit a version in the background, after wait() has returned on all ranks."""
        with self._reserve():
            flight = self._flight = Flight([], [])
            flight.start(
                lambda: self._finish(flight, commit_shares(self._store, version), self._arrange)
            )

    @contextlib.contextmanager
    def _reserve(self) -> Iterator[Spool]:
        """Wait until no version is in flight, and raise the error of the last one."""
        if not self._writing.acquire(blocking=False):
            raise FailedPrecondition("a checkpoint is being written: cancel it, or wait for it")
        try:
            self.wait()
            yield self._open_spool()
        finally:
            self._writing.release()

    @contextlib.contextmanager
    def _open_flight(self) -> Iterator[Flight]:
        """Create a flight that cancel() can stop. The block raises its error; wait() does not."""
        self._buffers = self._buffers or [
            np.empty(self._chunk_bytes, np.uint8).data for _ in range(BUFFERS)
        ]
        flight = Flight(self._buffers[: BUFFERS // 2], self._buffers[BUFFERS // 2 :])
        self._flight = flight
        try:
            yield flight
        except BaseException as error:
            flight.fail(error)
            flight.is_error_raised = True
            if isinstance(error, Stopped) and flight.error is not None:
                raise flight.error from None
            raise

    def _choose_next(self, flight: Flight) -> Decision:
        decision = decide_next(self._store, self._policy, self._sample)
        flight.check()
        return decision

    def _run_stages(
        self,
        flight: Flight,
        spool: Spool,
        decision: Decision,
        upload: Callable[[RowsByTable, Callable[[], None]], Version],
        after_commit: Callable[[], None],
    ) -> None:
        """Start the stages and copy all rows out of the device; the stages do the rest."""

        def upload_rows() -> None:
            rows = {name: flight.take_table(name) for name in decision.tables}
            self._finish(flight, upload(rows, flight.check), after_commit)

        flight.start(lambda: self._spool_chunks(flight, spool))
        flight.start(lambda: self._encode_chunks(flight, spool, decision.tables))
        flight.start(upload_rows)
        self._copy_rows(flight, decision.since)
        flight.end(flight.copied)

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

    def _arrange(self) -> None:
        self._policy.arrange(self._store)
        self._store.tidy()

    def wait(self) -> Version | None:
        """Wait until the version in flight is committed, or a share is written, and return it.

        Return None if there was none. If it failed, raise its error, once. An error of splitting or
        merging behind it is only logged, because the version is committed.
        """
        flight = self._flight
        if flight is None:
            return None
        for thread in flight.threads:
            thread.join()
        self._resident_max = self.resident_chunks_max
        self._flight = None
        if flight.committed is None:
            self._open_spool().clear()
        if flight.error is not None and not flight.is_error_raised:
            raise flight.error
        return flight.committed

    def cancel(self) -> None:
        """Cancel the version in flight: write() or wait() raises FailedPrecondition.

        Do nothing if the version is committed.
        """
        flight = self._flight
        if flight is not None:
            flight.fail(FailedPrecondition("the checkpoint was cancelled"))

    def close(self) -> None:
        """Wait for the version in flight, and empty the folder. Raise the errors of wait()."""
        if self._spool is None:
            return
        try:
            self.wait()
        finally:
            spool, self._spool = self._spool, None
            self._buffers = []
            spool.close()

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

    def _open_spool(self) -> Spool:
        if self._spool is None:
            raise FailedPrecondition("the checkpointer is closed")
        return self._spool

    def _sample(self, name: str, seed: int) -> tuple[Keys, Mapping[str, Floats | Bytes]]:
        table = self._store.state.tables[name]
        at_most = _count_rows(table, self._chunk_bytes)
        keys = sample_keys(lambda: self._device.keys(name, None, at_most), seed)
        if len(keys) == 0:
            return keys, {}
        content = np.empty(_count_bytes(table, len(keys)), np.uint8)
        _, columns, _ = _view_buffer(table, content.data, len(keys))
        self._device.copy(name, keys, columns)
        return keys, columns

    # ---- the stages ----

    def _copy_rows(self, flight: Flight, since: int | None) -> None:
        for name, table in self._store.state.tables.items():
            at_most = _count_rows(table, self._chunk_bytes)
            for keys in self._device.keys(name, since, at_most):
                if len(keys) > at_most:
                    raise InvalidArgument(
                        f"table {name}: {len(keys)} keys in a piece, at most {at_most}"
                    )
                if len(keys) == 0:
                    continue
                buffer = flight.lease("down")
                own_keys, columns, own_deleted = _view_buffer(table, buffer, len(keys))
                deleted = self._device.copy(name, keys, columns)
                own_keys[:] = keys
                own_deleted[:] = False if deleted is None else deleted
                deletes = bool(own_deleted.any())
                flight.give(flight.copied, Copied(name, len(keys), deletes, buffer))

    def _spool_chunks(self, flight: Flight, spool: Spool) -> None:
        for chunk in flight.take(flight.copied):
            count = _count_bytes(self._store.state.tables[chunk.table], chunk.rows)
            flight.wait_until(lambda count=count: spool.fits(count))  # type: ignore[misc]
            spooled = spool.write(chunk.buffer[:count])
            flight.release("down", chunk.buffer)
            flight.give(flight.spooled, replace(chunk, buffer=memoryview(b""), spooled=spooled))
        flight.end(flight.spooled)

    def _encode_chunks(self, flight: Flight, spool: Spool, tables: Mapping[str, Table]) -> None:
        for chunk in flight.take(flight.spooled):
            own, stored = self._store.state.tables[chunk.table], tables[chunk.table]
            raw = flight.lease("up")
            assert chunk.spooled is not None
            spool.read(chunk.spooled, raw)
            flight.notify()  # the folder has space again
            rows = _convert_rows(own, stored, raw, chunk)
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


# ---- a chunk in a buffer: keys, columns, deletions; each begins at a multiple of 8 bytes ----


def _align(count: int) -> int:
    return -(-count // 8) * 8


def _row_bytes(table: Table) -> int:
    return 8 + table.width + 1


def _reserved_bytes(table: Table) -> int:
    """Return the bytes that encode() needs beside the rows: column names, offsets, padding."""
    two_rows = Rows(
        np.array([0, 2], np.uint64),  # not 0 and 1, or their column would be left out
        {column.name: np.zeros((2, column.width), np.uint8) for column in table.columns},
    )
    return max(RESERVED_BYTES, len(encode(table, two_rows)) + 8 * (len(table.columns) + 2))


def _count_rows(table: Table, chunk_bytes: int) -> int:
    """Return the number of rows that fit into a buffer both as copied and as encoded."""
    if chunk_bytes < CHUNK_BYTES_MIN:
        return 0
    return (chunk_bytes - _reserved_bytes(table)) // _row_bytes(table)


def _count_bytes(table: Table, rows: int) -> int:
    return 8 * rows + sum(_align(rows * column.width) for column in table.columns) + rows


def _view_buffer(
    table: Table, buffer: memoryview, rows: int
) -> tuple[Keys, dict[str, Floats | Bytes], Mask]:
    """Return the arrays in a buffer: keys, the columns for Device.copy(), and the deletions."""
    flat = np.frombuffer(buffer, np.uint8)
    columns: dict[str, Floats | Bytes] = {}
    at = 8 * rows
    for column in table.columns:
        stored = flat[at : at + rows * column.width]
        if column.dtype == "f32":
            columns[column.name] = stored.view(np.float32).reshape(rows, column.dim)
        else:
            columns[column.name] = stored.reshape(rows, column.width)
        at += _align(rows * column.width)
    return flat[: 8 * rows].view(np.uint64), columns, flat[at : at + rows].view(np.bool_)


def _convert_rows(own: Table, stored: Table, buffer: memoryview, chunk: Copied) -> Rows:
    """Return a chunk's rows as stored, in the buffer that they were read into."""
    keys, columns, deleted = _view_buffer(own, buffer, chunk.rows)
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
