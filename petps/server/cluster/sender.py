"""The source of a copy: it writes the push-fed rows of a partition into the store, part by part.

First all rows, then again and again those that pushes have changed meanwhile, so that few are left.
On request it pauses the pushes, writes the last rows, and promises to take no more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from petps import _native
from petps.errors import PetpsError
from petps.log import WARNING, Line
from petps.server.cluster.parts import (
    Changes,
    Keys,
    folder_of,
    keys_of,
    path_of,
    pushed_tables,
    write_part,
)
from petps.server.cluster.pauses import Pauses, PushControl

if TYPE_CHECKING:
    from petps.checkpoint.files import Files

__all__ = ["Place", "Progress", "Sender"]

PART_BYTES: Final = 16 << 20
CLOSE_ROWS: Final = 10_000  # so few rows are read and written in some milliseconds
LOOK_SECONDS: Final = 0.02
RETRY_SECONDS: Final = 2.0  # after an error, or a handover that took too long


@dataclass(frozen=True)
class Place:
    """A server's tables, and the store through which partitions move.

    control: see PushControl. held: a context in which no rows are loaded or applied. log: takes
    lines. partitions: of the model.
    """

    tables: _native.Tables
    model: str
    partitions: int
    files: Files
    control: PushControl
    pauses: Pauses
    held: Callable[[], AbstractContextManager[None]]
    log: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a sender is. released: the attempt in which it has promised; 0: it has not."""

    parts: int
    rows: int
    is_close: bool
    released: int
    error: str


class Sender:
    """A thread that sends one partition, until close(). After an error, is_over is true."""

    def __init__(self, place: Place, partition: int, copy: str) -> None:
        self.copy = copy
        self._place, self._partition = place, partition
        self._lock = threading.Lock()  # over the members up to _error
        self._parts, self._rows = 0, 0
        self._is_close = False
        self._is_holding = False  # pushes are paused, or kept so
        self._held_at = 0.0
        self._wanted: tuple[int, float] | None = None  # attempt, and seconds of its first part
        self._released = 0
        self._error = ""
        self._retry_at = 0.0
        self._pending: dict[int, list[Keys]] = {}  # by table: pushed and not sent yet
        self._is_removed = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"petps-send-{partition}", daemon=True
        )
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Return whether the thread has ended."""
        return not self._thread.is_alive()

    @property
    def is_holding(self) -> bool:
        """Return whether the pauses of the partition are those of this sender."""
        with self._lock:
            return self._is_holding

    def progress(self) -> Progress:
        """Return how far it is."""
        with self._lock:
            return Progress(
                self._parts, self._rows, self._is_close, self._released, self._error
            )  # fmt: skip

    def finish(self, attempt: int, seconds: float) -> None:
        """Hand over in this attempt: pause pushes for at most ``seconds``, and promise."""
        with self._lock:
            self._wanted = (attempt, seconds)

    def limit_pause(self) -> None:
        """Take pushes again if the last rows are not in the store in time. Raises IoError."""
        with self._lock:
            if not self._is_holding or self._released or self._wanted is None:
                return
            if time.monotonic() - self._held_at > self._wanted[1]:
                self._place.pauses.resume(self._partition)
                self._is_holding = False

    def take_back(self) -> None:
        """Take pushes again after a promise that nobody relies on. Raises IoError."""
        with self._lock:
            self._wanted, self._released = None, 0
            self._place.pauses.resume(self._partition)
            self._is_holding = False

    def close(self, *, is_removed: bool) -> None:
        """Stop soon. is_removed: remove the copy from the store, because the move has ended."""
        self._is_removed = is_removed
        self._stopping.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        _native.lower_priority()
        try:
            self._copy()
        except PetpsError as error:
            self._end()
            with self._lock:
                self._error = str(error)
            text = f"partition {self._partition} cannot be sent: {error}"
            self._place.log(Line(text, "copy_failed", WARNING, partition=self._partition))
            self._stopping.wait(RETRY_SECONDS)
        else:
            self._end()

    def _end(self) -> None:
        """Let pushes go on that nobody was promised not to take, and leave nothing behind."""
        try:
            with self._lock:
                if self._is_holding and not self._released:
                    self._place.pauses.resume(self._partition)
                    self._is_holding = False
            self._place.control.track_pushes(self._partition, False)
            if self._is_removed:
                self._remove_files(self.copy)  # another server may send the partition by now
        except PetpsError as error:
            text = f"the end of the copy of partition {self._partition}: {error}"
            self._place.log(Line(text, "copy_failed", WARNING, partition=self._partition))

    def _copy(self) -> None:
        self._place.control.track_pushes(self._partition, True)
        with self._place.held():  # rows that are loaded now are read below
            pass
        self._remove_files("")
        self._send_all()
        while not self._stopping.is_set():
            with self._lock:
                wanted, released = self._wanted, self._released
            if not released:
                self._take_pushed()
                if wanted is not None and time.monotonic() >= self._retry_at:
                    self._hand_over(*wanted)
                elif sum(map(_count, self._pending.values())) > CLOSE_ROWS:
                    self._send_pending()
                else:
                    with self._lock:
                        self._is_close = True
            self._stopping.wait(LOOK_SECONDS)

    def _send_all(self) -> None:
        for record, table in pushed_tables(self._place.tables):
            keys = keys_of(table, self._partition, self._place.partitions)
            self._send_keys(record.name, table, keys)

    def _hand_over(self, attempt: int, seconds: float) -> None:
        begun = time.monotonic()
        with self._lock:
            self._is_holding, self._held_at = True, begun
            self._place.pauses.pause(self._partition)
        self._take_pushed()
        rows = sum(map(_count, self._pending.values()))
        self._send_pending()
        if self._stopping.is_set():
            return  # rows may be missing
        took = time.monotonic() - begun
        with self._lock:
            is_late = took > seconds or not self._is_holding
            if is_late:
                self._place.pauses.resume(self._partition)
                self._is_holding = False
            else:
                self._place.pauses.keep(self._partition, pulls=True)
                self._released = attempt
        if is_late:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            text = (
                f"partition {self._partition}: {rows} last rows took {took:.2f} s, more than "
                f"cluster.handover_seconds ({seconds:g}); pushes go on, and it is tried again"
            )
            self._place.log(Line(text, "handover_late", WARNING, partition=self._partition))
            return
        text = (
            f"partition {self._partition} takes no more pushes here: its last {rows} rows are in "
            f"the store after {took:.2f} s"
        )
        self._place.log(Line(text, "pushes_released", partition=self._partition, seconds=took))

    def _take_pushed(self) -> None:
        for table, keys in self._place.control.take_pushed(self._partition).items():
            self._pending.setdefault(table, []).append(keys)

    def _send_pending(self) -> None:
        """Send the rows that the pending keys have now."""
        by_id = {table.id: (record, table) for record, table in pushed_tables(self._place.tables)}
        pending, self._pending = self._pending, {}
        for number, keys in pending.items():
            if number in by_id:  # else the table has been dropped
                record, table = by_id[number]
                self._send_keys(record.name, table, np.unique(np.concatenate(keys)))

    def _send_keys(self, instance: str, table: _native.Table, keys: Keys) -> None:
        step = max(1, PART_BYTES // (table.row_bytes + keys.itemsize))
        for start in range(0, len(keys), step):
            if self._stopping.is_set():
                return
            part = np.ascontiguousarray(keys[start : start + step])
            self._write([Changes.of(instance, table, part)])

    def _write(self, changes: Iterable[Changes]) -> None:
        changes = list(changes)
        place = self._place
        path = path_of(place.model, self._partition, self.copy, self._parts + 1)
        write_part(place.files, path, changes)
        with self._lock:
            self._parts += 1
            self._rows += sum(len(change.keys) for change in changes)

    def _remove_files(self, copy: str) -> None:
        """Remove the parts of a copy; '': of all copies."""
        folder = folder_of(self._place.model, self._partition)
        for name in self._place.files.list(folder):
            if name.startswith(copy):
                self._place.files.remove(f"{folder}/{name}")


def _count(arrays: list[Keys]) -> int:
    return sum(map(len, arrays))
