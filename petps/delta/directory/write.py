"""Writer of one partition of a directory log: lock, torn-tail recovery, append, fsync, roll."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
from pathlib import Path

from petps.delta.directory.frame import (
    MAX_PAYLOAD_BYTES,
    SEGMENT_HEADER_BYTES,
    check_segment_header,
    pack_frame,
    pack_segment_header,
)
from petps.delta.directory.read import find_end
from petps.delta.directory.segments import list_segments, segment_path
from petps.delta.errors import DeltaError, Fault, LogLocked
from petps.delta.files import sync_folder
from petps.delta.headers import Message
from petps.errors import FailedPrecondition, IoError, ResourceExhausted

__all__ = ["PartitionWriter"]

_log = logging.getLogger("petps.delta")


class PartitionWriter:
    """The only writer of a partition. It holds the lock until close() or the process exits."""

    def __init__(
        self, folder: Path, partition: int, *, segment_bytes: int, retention_bytes: int | None
    ) -> None:
        self._folder = folder
        self._partition = partition
        self._segment_bytes = segment_bytes
        self._retention_bytes = retention_bytes
        self._descriptor = -1
        self._dirty = False
        self._broken = ""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> int:
        path = self._folder / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise LogLocked(
                f"process {owner or 'unknown'} writes {self._folder}, and a partition has one "
                "writer: stop that process first"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

    def _recover(self) -> None:
        """Go to the end of the newest segment, and cut a frame that a crash left incomplete."""
        segments = list_segments(self._folder)
        if not segments:
            self._start_segment(0)
            return
        first = segments[-1]
        path = segment_path(self._folder, first)
        size = path.stat().st_size
        if size < SEGMENT_HEADER_BYTES:
            self._start_segment(first)
            return
        descriptor = os.open(path, os.O_RDWR)
        self._descriptor = descriptor
        header = os.pread(descriptor, SEGMENT_HEADER_BYTES, 0)
        check_segment_header(str(path), header, self._partition, first)
        self._at, self._next = find_end(descriptor, first)
        if self._at < size:
            _log.warning(
                "[delta] %s: cut %d bytes after offset %d, an incomplete frame of a crash; no "
                "reader has received them",
                path,
                size - self._at,
                self._next - 1,
            )
            os.ftruncate(descriptor, self._at)
        # Frames that the last writer did not flush may only be in the page cache.
        os.fsync(descriptor)
        os.lseek(descriptor, self._at, os.SEEK_SET)

    def _start_segment(self, first: int) -> None:
        """Create the segment that begins at ``first``, even if a crash left one unfinished."""
        path = segment_path(self._folder, first)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.write(descriptor, pack_segment_header(self._partition, first))
            os.fsync(descriptor)
            sync_folder(self._folder)
        except OSError as error:
            os.close(descriptor)
            raise _as_petps(error, path) from error
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor
        self._at, self._next = SEGMENT_HEADER_BYTES, first

    @property
    def broken(self) -> str:
        """Return why the writer accepts no more messages; empty while it accepts them."""
        return self._broken

    def append(self, message: Message) -> None:
        """Append one message; it is durable after flush(). A failed write leaves nothing behind."""
        self._check()
        if self._at >= self._segment_bytes:
            self._roll()
        pieces = pack_frame(self._next, message)
        total = sum(len(piece) for piece in pieces)
        if total > MAX_PAYLOAD_BYTES:
            raise DeltaError(
                Fault.TOO_LARGE, f"a message of {total} bytes; a frame holds {MAX_PAYLOAD_BYTES}"
            )
        try:
            self._write_all(pieces, total)
        except OSError as error:
            self._undo()
            raise _as_petps(error, self._folder) from error
        self._at += total
        self._next += 1
        self._dirty = True

    def _write_all(self, pieces: list[bytes | memoryview], total: int) -> None:
        written = os.writev(self._descriptor, pieces)
        if written < total:  # a full disk or a signal: write the rest in one piece
            rest = memoryview(b"".join(pieces))[written:]
            while len(rest):
                rest = rest[os.write(self._descriptor, rest) :]

    def _undo(self) -> None:
        try:
            os.ftruncate(self._descriptor, self._at)
            os.lseek(self._descriptor, self._at, os.SEEK_SET)
        except OSError as error:
            self._broken = f"a failed append could not be undone ({error})"

    def flush(self) -> None:
        """Wait until all appended messages are durable."""
        self._check()
        if not self._dirty:
            return
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            # The kernel may have dropped the pages, and a second fdatasync would still succeed.
            self._broken = f"fdatasync failed ({error})"
            raise _as_petps(error, self._folder) from error
        self._dirty = False

    def _check(self) -> None:
        if self._broken:
            raise FailedPrecondition(
                f"{self._folder}: {self._broken}; close the log, fix the disk, begin a new run"
            )
        if self._lock < 0:
            raise FailedPrecondition(f"{self._folder}: the log is closed")

    def _roll(self) -> None:
        self.flush()
        self._start_segment(self._next)
        if self._retention_bytes is not None:
            self._retain(self._retention_bytes)

    def _retain(self, limit: int) -> None:
        segments = list_segments(self._folder)
        sizes = [segment_path(self._folder, first).stat().st_size for first in segments]
        total_bytes = sum(sizes)
        for first, size in zip(segments[:-1], sizes[:-1], strict=True):
            if total_bytes <= limit:
                return
            segment_path(self._folder, first).unlink()
            total_bytes -= size

    def trim(self, before: int) -> None:
        """Remove the segments that only hold offsets below ``before``; never the newest."""
        segments = list_segments(self._folder)
        for first, following in itertools.pairwise(segments):
            if following <= before:
                segment_path(self._folder, first).unlink()
        sync_folder(self._folder)

    def close(self) -> None:
        """Release the file and the lock; does not flush."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _as_petps(error: OSError, path: Path) -> ResourceExhausted | IoError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted(f"{path}: no space left for the delta log: {error.strerror}")
    return IoError(f"{path}: {error.strerror}")
