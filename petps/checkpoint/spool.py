"""A folder on a local SSD in which chunks wait for the upload. STAGING.md.

Owns:        Spool: its files, their total size, and the lock that gives one process the folder.
Never does:  know what is in a chunk; wait for space.
Called by:   staging.py.
Invariants:  read() returns only chunks that were written whole and match their checksum; none of
             its files outlives close(), or the opening of the next Spool of the folder.
Threads:     one writes, one reads.
"""

from __future__ import annotations

import fcntl
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from petps.errors import FailedPrecondition, IoError

__all__ = ["Spool", "Spooled"]

SUFFIX: Final = ".staged"
# Chunks that may be in the page cache while the disk writes them. More wait for the disk.
BEHIND_CHUNKS: Final = 4


@dataclass(frozen=True, slots=True)
class Spooled:
    """A chunk in the folder."""

    path: Path
    bytes: int
    checksum: int


class Spool:
    """A folder of chunk files, each written and read once, of at most ``most_bytes`` together."""

    def __init__(self, folder: str | Path, most_bytes: int) -> None:
        self._folder = Path(folder)
        self._most_bytes = most_bytes
        self._bytes = 0
        self._changed = threading.Lock()
        self._number = 0
        self._unwritten: dict[Path, int] = {}  # files that the disk has not written, oldest first
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise IoError(f"{self._folder}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise FailedPrecondition(
                f"{self._folder} is in use by another checkpointer: give each its own folder"
            ) from None
        self.clear()

    def fits(self, count: int) -> bool:
        """Return whether ``count`` more bytes are allowed."""
        with self._changed:
            return self._bytes + count <= self._most_bytes

    def write(self, content: memoryview) -> Spooled:
        """Write a chunk. Wait for the disk only if it is BEHIND_CHUNKS behind.

        The disk begins to write at once, and what it has written leaves the page cache. On IoError
        the chunk does not exist.
        """
        self._number += 1
        path = self._folder / f"{self._number}{SUFFIX}"
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            with self._changed:
                self._unwritten[path] = file
            done = 0
            while done < len(content):
                done += os.write(file, content[done:])
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # begins to write
            self._wait_for_disk()
        except OSError as error:
            self._forget(path)
            path.unlink(missing_ok=True)
            raise IoError(
                f"{path}: {error.strerror}: a version waits in this folder for its upload"
            ) from error
        with self._changed:
            self._bytes += len(content)
        return Spooled(path, len(content), xxhash.xxh3_64_intdigest(content))

    def _wait_for_disk(self) -> None:
        with self._changed:
            if len(self._unwritten) <= BEHIND_CHUNKS:
                return
            path, file = next(iter(self._unwritten.items()))
            del self._unwritten[path]
        try:
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)

    def _forget(self, path: Path) -> None:
        """Close a file that was read back or removed; the disk need not write it any more."""
        with self._changed:
            file = self._unwritten.pop(path, None)
        if file is not None:
            os.close(file)

    def read(self, spooled: Spooled, into: memoryview) -> None:
        """Read a chunk and remove its file. Raise IoError, also if it is not what was written."""
        content = into[: spooled.bytes]
        try:
            with open(spooled.path, "rb", buffering=0) as file:
                done = 0
                while done < len(content):
                    count = file.readinto(content[done:])
                    if not count:
                        break
                    done += count
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            spooled.path.unlink()
            self._forget(spooled.path)
        except OSError as error:
            raise IoError(f"{spooled.path}: {error.strerror}") from error
        if done < len(content) or xxhash.xxh3_64_intdigest(content) != spooled.checksum:
            raise IoError(f"{spooled.path} does not fit its checksum: check the disk")
        with self._changed:
            self._bytes -= spooled.bytes

    def clear(self) -> None:
        """Remove all chunks: those of a version that failed, or those left by a crash."""
        for path in list(self._unwritten):
            self._forget(path)
        try:
            for path in self._folder.glob(f"*{SUFFIX}"):
                path.unlink()
        except OSError as error:
            raise IoError(f"{self._folder}: {error.strerror}") from error
        with self._changed:
            self._bytes = 0

    def close(self) -> None:
        """Remove all chunks and unlock the folder."""
        try:
            self.clear()
        finally:
            os.close(self._lock)
