"""The partitions whose pushes this server refuses because they move, and the file that keeps them.

A server that has told etcd that it takes no more pushes must not take any after a restart either,
also if etcd is away then. So the file is durable before the promise.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from petps.delta.files import publish_file
from petps.errors import InvalidArgument, IoError
from petps.regular_file import read_regular_file

__all__ = ["Pauses", "PushControl"]

FORMAT: Final = 1
FILE_BYTES_MAX: Final = 1 << 16  # 1,024 partitions, twice


class PushControl(Protocol):
    """Pauses and tracks pushes, as moves need it. See petps._native.Server."""

    def set_pauses(self, pushes: list[int], pulls: list[int]) -> None:
        """Refuse pushes, and pulls after keep_pulls()."""

    def keep_pulls(self, until_ns: int) -> None:
        """Answer pulls of paused partitions until this time.monotonic_ns()."""

    def track_pushes(self, partition: int, is_tracked: bool) -> None:
        """Begin, or end, to remember which keys are pushed."""

    def take_pushed(self, partition: int) -> dict[int, npt.NDArray[np.uint64]]:
        """Return the keys pushed since the last call, by table."""


class Pauses:
    """The file POOL.pauses.json, and the pauses of the native server. Any thread may use it."""

    def __init__(self, path: Path) -> None:
        """``path`` may not exist: nothing is paused then."""
        self._path = path
        self._lock = threading.Lock()
        self._kept = self._read()  # by partition: whether pulls end too
        self._passing: set[int] = set()
        self._control: PushControl | None = None

    def at_start(self) -> tuple[list[int], list[int]]:
        """Return the partitions whose pushes, and whose pulls, are paused from the start."""
        with self._lock:
            return self._lists()

    def start(self, control: PushControl) -> None:
        """Pause at this server from now on."""
        with self._lock:
            self._control = control

    @property
    def partitions(self) -> frozenset[int]:
        """Return the partitions of the file."""
        with self._lock:
            return frozenset(self._kept)

    @property
    def paused(self) -> frozenset[int]:
        """Return all partitions whose pushes are refused now."""
        with self._lock:
            return frozenset({*self._kept, *self._passing})

    def keep_pulls(self, until_ns: int) -> None:
        """Answer pulls of the partitions whose pulls end too, until this time.monotonic_ns()."""
        if self._control is not None:
            self._control.keep_pulls(until_ns)

    def pause(self, partition: int) -> None:
        """Refuse pushes to a partition, until a restart at most.

        On return, no push that was accepted before is still being applied.
        """
        with self._lock:
            self._passing.add(partition)
            self._apply()

    def keep(self, partition: int, *, pulls: bool) -> None:
        """Refuse pushes, durably; pulls: also pulls, once keep_pulls() is over. Raises IoError."""
        with self._lock:
            if self._kept.get(partition) == pulls:
                return
            self._write({**self._kept, partition: pulls})
            self._passing.discard(partition)
            self._apply()

    def resume(self, partition: int) -> None:
        """Take pushes to a partition again. Raises IoError."""
        with self._lock:
            if partition in self._kept:
                self._write({key: value for key, value in self._kept.items() if key != partition})
            self._passing.discard(partition)
            self._apply()

    def _lists(self) -> tuple[list[int], list[int]]:
        pulls = sorted(partition for partition, is_pulled in self._kept.items() if is_pulled)
        return sorted({*self._kept, *self._passing}), pulls

    def _apply(self) -> None:
        if self._control is not None:
            self._control.set_pauses(*self._lists())

    def _write(self, kept: dict[int, bool]) -> None:
        pulls = sorted(partition for partition, is_pulled in kept.items() if is_pulled)
        document = {"format": FORMAT, "pushes": sorted(kept), "pulls": pulls}
        try:
            publish_file(self._path, json.dumps(document).encode() + b"\n")
        except OSError as error:
            raise IoError(f"{self._path}: {error.strerror}") from None
        self._kept = kept

    def _read(self) -> dict[int, bool]:
        try:
            document = json.loads(read_regular_file(self._path, FILE_BYTES_MAX))
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']!r}")
            pulls = {int(partition) for partition in document["pulls"]}
            return {int(partition): int(partition) in pulls for partition in document["pushes"]}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidArgument(
                f"{self._path} is damaged ({type(error).__name__}: {error}): it says which "
                "partitions move. Remove it only while no partition of this server moves "
                "(petps cluster status)"
            ) from None
