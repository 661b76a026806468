"""The way of rows out of a trainer: copied, spooled to an SSD and read back. STAGING.md.

Owns:        Device, SourceDevice (where rows are copied from), Stager; a chunk's place in a buffer.
Never does:  encode rows; know stores or logs; keep more than four chunks in memory.
Called by:   staging.py; petps.train.behind, for the rows that a log receives.
Invariants:  what is received has the rows as they were when send() was called; a flight that fails
             or is cancelled leaves no file in the folder.
Threads:     one sends, and one at a time waits or closes; any may call cancel(). A flight has two
             threads or more of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from petps.checkpoint.checkpointer import Source
from petps.checkpoint.chunk import Bytes, Floats, Keys, Mask, Rows, Table, encode
from petps.checkpoint.flight import Copied, Flight, Stopped
from petps.checkpoint.spool import Spool
from petps.checkpoint.state import Version
from petps.delta.arrow import RESERVED_BYTES
from petps.errors import FailedPrecondition, InvalidArgument

__all__ = [
    "CHUNK_BYTES",
    "FOLDER_BYTES",
    "Device",
    "Receive",
    "SourceDevice",
    "Stager",
    "copy_in_slices",
    "view_buffer",
]

# As large as a piece of Checkpointer. Choose a multiple of the SSD's erase block.
CHUNK_BYTES: Final = 32 << 20
CHUNK_BYTES_MIN: Final = 4 * RESERVED_BYTES
FOLDER_BYTES: Final = 64 << 30
BUFFERS: Final = 4
# Rows that a device made from a source copies at a time.
SLICE_ROWS: Final = 1 << 13

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
        return copy_in_slices(lambda *part: self._copy_slice(table, *part), keys, out)

    def _copy_slice(self, table: str, keys: Keys, out: Mapping[str, Array]) -> Mask | None:
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


def copy_in_slices(
    copy: Callable[[Keys, Mapping[str, Array]], Mask | None], keys: Keys, out: Mapping[str, Array]
) -> Mask | None:
    """Copy rows as Device.copy() does, so few at a time that they stay in the cache."""
    all_deleted: Mask | None = None
    for start in range(0, len(keys), SLICE_ROWS):
        part = slice(start, start + SLICE_ROWS)
        deleted = copy(keys[part], {name: values[part] for name, values in out.items()})
        if deleted is not None:
            if all_deleted is None:
                all_deleted = np.zeros(len(keys), np.bool_)
            all_deleted[part] = deleted
    return all_deleted


# Takes the rows of one chunk: table, keys, columns as Device.copy() gave them, and deletions.
Receive = Callable[[str, Keys, Mapping[str, Floats | Bytes], Mask | None], None]


class Stager:
    """Four buffers and a folder through which rows leave a device, one flight at a time.

    tables: the columns that are copied. folder: on a local SSD. chunk_bytes: the size of each of
    the four buffers. folder_bytes: the limit of all chunks in the folder. prepare_thread: called
    first in each thread of a flight.
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        device: Device,
        folder: str | Path,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        folder_bytes: int = FOLDER_BYTES,
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        # By table: the rows that fit into a buffer.
        self._at_most = {name: _count_rows(table, chunk_bytes) for name, table in tables.items()}
        for name, table in tables.items():
            if self._at_most[name] < 1:
                least = max(CHUNK_BYTES_MIN, _reserved_bytes(table) + _row_bytes(table))
                raise InvalidArgument(
                    f"chunk_bytes {chunk_bytes} holds no row of table {table.name}: "
                    f"set at least {least}"
                )
        if folder_bytes < chunk_bytes:
            raise InvalidArgument(
                f"folder_bytes must be at least chunk_bytes, {chunk_bytes}, got {folder_bytes}"
            )
        self.device = device
        self._tables = dict(tables)
        self._chunk_bytes = chunk_bytes
        self._prepare_thread = prepare_thread
        self._spool: Spool | None = Spool(folder, folder_bytes)
        self._buffers: list[memoryview] = []
        self.flight: Flight | None = None
        self._sending = threading.Lock()
        self._resident_max = 0

    @property
    def resident_chunks_max(self) -> int:
        """Return the most buffers that were in use at a time."""
        flight = self.flight
        return max(self._resident_max, 0 if flight is None else flight.resident_max)

    # ---- the trainer's side

    @contextlib.contextmanager
    def reserve(self) -> Iterator[None]:
        """Wait until no flight is under way, and raise the error of the last one."""
        if not self._sending.acquire(blocking=False):
            raise FailedPrecondition("a checkpoint is being written: cancel it, or wait for it")
        try:
            self.wait()
            self._open_spool()
            yield
        finally:
            self._sending.release()

    @contextlib.contextmanager
    def open_flight(self) -> Iterator[Flight]:
        """Create a flight that cancel() can stop. The block raises its error; wait() does not."""
        self._buffers = self._buffers or [
            np.empty(self._chunk_bytes, np.uint8).data for _ in range(BUFFERS)
        ]
        flight = Flight(
            self._buffers[: BUFFERS // 2], self._buffers[BUFFERS // 2 :], self._prepare_thread
        )
        self.flight = flight
        try:
            yield flight
        except BaseException as error:
            flight.fail(error)
            flight.is_error_raised = True
            if isinstance(error, Stopped) and flight.error is not None:
                raise flight.error from None
            raise

    def send(self, flight: Flight, since: int | None, stages: Iterable[Callable[[], None]]) -> None:
        """Start the stages of a flight, each in a thread, and copy all rows out of the device."""
        flight.start(lambda: self._spool_chunks(flight))
        for stage in stages:
            flight.start(stage)
        self._copy_rows(flight, since)
        flight.end(flight.copied)

    def send_to(self, receive: Receive) -> None:
        """Copy all rows of the device and return; ``receive`` takes them in a thread.

        First wait for the flight before this one, and raise its error. wait() returns when all rows
        have been received, and raises what ``receive`` raised.
        """

        def receive_all() -> None:
            for chunk, raw in self.read_back(flight):
                keys, columns, deleted = view_buffer(self._tables[chunk.table], raw, chunk.rows)
                receive(chunk.table, keys, columns, deleted if chunk.deletes else None)
                flight.release("up", raw)
            flight.succeed(None)

        with self.reserve(), self.open_flight() as flight:
            self.send(flight, None, [receive_all])

    def wait(self) -> Version | None:
        """Wait until the flight has ended, and return the version that it wrote, if it wrote one.

        If it failed, raise its error, once.
        """
        flight = self.flight
        if flight is None:
            return None
        flight.wait_for_stages()
        self._resident_max = self.resident_chunks_max
        self.flight = None
        if not flight.has_succeeded:
            self._open_spool().clear()
        if flight.error is not None and not flight.is_error_raised:
            raise flight.error
        return flight.committed

    def cancel(self) -> None:
        """Cancel the flight: its sender or wait() raises FailedPrecondition.

        Do nothing if it has succeeded.
        """
        flight = self.flight
        if flight is not None:
            flight.fail(FailedPrecondition("the checkpoint was cancelled"))

    def close(self) -> None:
        """Wait for the flight, and empty the folder. Raise the errors of wait()."""
        if self._spool is None:
            return
        try:
            self.wait()
        finally:
            spool, self._spool = self._spool, None
            self._buffers = []
            spool.close()

    def _open_spool(self) -> Spool:
        if self._spool is None:
            raise FailedPrecondition("the checkpointer is closed")
        return self._spool

    def sample(
        self, name: str, choose: Callable[[Callable[[], Iterable[Keys]]], Keys]
    ) -> tuple[Keys, Mapping[str, Floats | Bytes]]:
        """Return the rows of the keys that ``choose`` takes from all keys of a table, in pieces."""
        table = self._tables[name]
        keys = choose(lambda: self.device.keys(name, None, self._at_most[name]))
        if len(keys) == 0:
            return keys, {}
        content = np.empty(_count_bytes(table, len(keys)), np.uint8)
        _, columns, _ = view_buffer(table, content.data, len(keys))
        self.device.copy(name, keys, columns)
        return keys, columns

    # ---- the stages

    def _copy_rows(self, flight: Flight, since: int | None) -> None:
        packing = _Packing(flight)
        for name, table in self._tables.items():
            at_most = self._at_most[name]
            for keys in self.device.keys(name, since, at_most):
                if len(keys) > at_most:
                    raise InvalidArgument(
                        f"table {name}: {len(keys)} keys in a piece, at most {at_most}"
                    )
                if len(keys) == 0:
                    continue
                buffer = packing.take(_count_bytes(table, len(keys)))
                own_keys, columns, own_deleted = view_buffer(table, buffer, len(keys))
                deleted = self.device.copy(name, keys, columns)
                own_keys[:] = keys
                own_deleted[:] = False if deleted is None else deleted
                deletes = bool(own_deleted.any())
                packing.add(Copied(name, len(keys), deletes, buffer))
        packing.end()

    def _spool_chunks(self, flight: Flight) -> None:
        spool = self._open_spool()
        for chunk in flight.take(flight.copied):
            count = len(chunk.buffer)
            flight.wait_until(lambda count=count: spool.fits(count))  # type: ignore[misc]
            spooled = spool.write(chunk.buffer)
            if chunk.whole is not None:
                flight.release("down", chunk.whole)
            flight.give(
                flight.spooled, replace(chunk, buffer=memoryview(b""), whole=None, spooled=spooled)
            )
        flight.end(flight.spooled)

    def read_back(self, flight: Flight) -> Iterator[tuple[Copied, memoryview]]:
        """Yield each chunk with a buffer of the pair "up" that holds it; the caller releases it."""
        spool = self._open_spool()
        for chunk in flight.take(flight.spooled):
            raw = flight.lease("up")
            assert chunk.spooled is not None
            spool.read(chunk.spooled, raw)
            flight.notify()  # the folder has space again
            yield chunk, raw


class _Packing:
    """The chunks that are copied into one buffer after another.

    Small tables share a buffer, so that the copy of a small version waits for no other stage. A
    buffer is passed on once it is full: the stage behind takes no processor from the copy into it.
    """

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._buffer: memoryview | None = None
        self._used = 0
        self._chunks: list[Copied] = []

    def take(self, count: int) -> memoryview:
        """Return ``count`` bytes of a buffer, for the next chunk."""
        if self._buffer is not None and self._used + count > len(self._buffer):
            self.end()
        if self._buffer is None:
            self._buffer, self._used = self._flight.lease("down"), 0
        begin, self._used = self._used, _align(self._used + count)
        return self._buffer[begin : begin + count]

    def add(self, chunk: Copied) -> None:
        """Add the chunk whose rows are in the bytes of the last take()."""
        self._chunks.append(chunk)

    def end(self) -> None:
        """Pass the buffer on."""
        chunks, self._chunks = self._chunks, []
        for chunk in chunks[:-1]:
            self._flight.give(self._flight.copied, chunk)
        for chunk in chunks[-1:]:
            self._flight.give(self._flight.copied, replace(chunk, whole=self._buffer))
        self._buffer = None


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


def view_buffer(
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
