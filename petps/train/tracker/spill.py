"""Files of segments whose ids exceed the memory budget. TRACKER.md, "Spill tier".

Owns:        SpillFolder, SpilledSet.
Never does:  decide what to spill (tracker.py); keep a file beyond its process.
Called by:   tracker.py.
Invariants:  a file is whole or does not exist; a folder belongs to one tracker at a time.
Threads:     one at a time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from petps.errors import DataLoss, FailedPrecondition, IoError, ResourceExhausted
from petps.train.tracker.sets import BitSet, IdSet, Touched, TouchedSet, concatenate

__all__ = ["SpillFolder", "SpilledSet"]

SUFFIX: Final = ".segment"


@dataclass(frozen=True, slots=True)
class SpilledSet:
    """A compact set in a file: uint64 ids and their states, or bits."""

    path: Path
    offset: int
    count: int  # number of ids; bytes of bits if ``rows`` is set
    rows: int | None
    state_dtype: np.dtype[np.generic] | None
    state_shape: tuple[int, ...]

    @property
    def resident_bytes(self) -> int:
        """See TouchedSet."""
        return 0

    def load(self) -> IdSet | BitSet:
        """Read the set. Raise IoError, DataLoss."""
        if self.rows is not None:
            return BitSet(self.rows, self._read(np.dtype(np.uint8), self.count, self.offset))
        ids = self._read(np.dtype(np.uint64), self.count, self.offset)
        state = None
        if self.state_dtype is not None:
            values = self.count * int(np.prod(self.state_shape))
            state = self._read(self.state_dtype, values, self.offset + ids.nbytes)
            state = state.reshape(self.count, *self.state_shape)
        return IdSet(Touched(ids, state))

    def parts(self) -> Iterator[Touched]:
        """See TouchedSet."""
        return self.load().parts()

    def _read(self, dtype: np.dtype[np.generic], count: int, offset: int) -> np.ndarray:
        try:
            values = np.fromfile(self.path, dtype, count, offset=offset)
        except OSError as error:
            raise IoError(f"spilled ids {self.path}: {error.strerror}") from error
        if len(values) != count:
            raise DataLoss(f"spilled ids {self.path}: another program cut the file off")
        return values


class SpillFolder:
    """A folder of spilled segments; opening and closing it remove all of them."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._number = 0
        self._sizes: dict[Path, int] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise IoError(f"spill folder {self._folder}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise FailedPrecondition(
                f"spill folder {self._folder} belongs to another tracker: give each its own"
            ) from None
        for leftover in self._folder.glob(f"*{SUFFIX}"):  # left by a process that was killed
            leftover.unlink(missing_ok=True)

    @property
    def stored_bytes(self) -> int:
        """Return the size of all files in bytes."""
        return sum(self._sizes.values())

    def write(self, sets: Iterable[tuple[str, TouchedSet]]) -> dict[str, TouchedSet]:
        """Write compact sets to one file, one in memory at a time; return the spilled sets.

        Raise ResourceExhausted if the disk refuses; then no file is left.
        """
        self._number += 1
        path = self._folder / f"{self._number:08}{SUFFIX}"
        out: dict[str, TouchedSet] = {}
        try:
            with open(path, "xb") as file:
                for name, touched_set in sets:
                    out[name] = _write(path, file, touched_set)
                size = file.tell()
            self._sizes[path] = size  # after the close, which may fail to flush
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ResourceExhausted(
                f"ids cannot be spilled to {self._folder}: {error.strerror}. They stay in memory, "
                "and none is lost: free space there, or let the tenants read"
            ) from error
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return out

    def size(self, sets: Mapping[str, TouchedSet]) -> int:
        """Return the size of the file that holds these sets, in bytes; 0 if they are in memory."""
        return sum(self._sizes[path] for path in _paths(sets))

    def remove(self, sets: Mapping[str, TouchedSet]) -> None:
        """Remove the file of these sets, if they have one."""
        for path in _paths(sets):
            self._sizes.pop(path, None)
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all files and unlock the folder."""
        for path in self._sizes:
            path.unlink(missing_ok=True)
        self._sizes.clear()
        os.close(self._lock)


def _paths(sets: Mapping[str, TouchedSet]) -> set[Path]:
    return {
        touched_set.path for touched_set in sets.values() if isinstance(touched_set, SpilledSet)
    }


def _write(path: Path, file: BinaryIO, touched_set: TouchedSet) -> SpilledSet:
    offset = file.tell()
    touched_set = touched_set.load() if isinstance(touched_set, SpilledSet) else touched_set
    if isinstance(touched_set, BitSet):
        file.write(touched_set.bits.data)
        return SpilledSet(path, offset, len(touched_set.bits), touched_set.rows, None, ())
    touched = concatenate(touched_set)
    file.write(np.ascontiguousarray(touched.ids).data)
    if touched.state is None:
        return SpilledSet(path, offset, len(touched.ids), None, None, ())
    state = np.ascontiguousarray(touched.state)
    file.write(state.data)
    return SpilledSet(path, offset, len(touched.ids), None, state.dtype, state.shape[1:])
