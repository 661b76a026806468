"""The target of a copy: it applies the parts that the source has written, in their order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from petps import _native
from petps.errors import PetpsError
from petps.log import WARNING, Line
from petps.server.cluster.parts import keys_of, path_of, pushed_tables, read_part
from petps.server.cluster.sender import Place

__all__ = ["Receiver"]

LOOK_SECONDS: Final = 0.02
RETRY_SECONDS: Final = 2.0
ROWS_OF_A_BATCH: Final = 16_384  # as in an apply of ingest: few enough for the latency of pulls


class Stopped(Exception):
    """Signal that the receiver may not go on."""


class Receiver:
    """A thread that receives one partition, until close(). It begins without any row.

    is_owner: whether the map in use gives this server the partition; then nothing is written.
    """

    def __init__(
        self, place: Place, partition: int, copy: str, is_owner: Callable[[], bool]
    ) -> None:
        self.copy = copy
        self._place, self._partition, self._is_owner = place, partition, is_owner
        self._offered = 0
        self._parts = 0
        self._error = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"petps-receive-{partition}", daemon=True
        )
        self._thread.start()

    def offer(self, parts: int) -> None:
        """Say that the store has this many parts."""
        self._offered = parts

    @property
    def parts(self) -> int:
        """Return how many parts are applied, durably."""
        return self._parts

    @property
    def error(self) -> str:
        """Return why it does not go on; '': it does."""
        return self._error

    def close(self) -> None:
        """Stop after the running batch."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        _native.lower_priority()
        is_clear = False
        while not self._stopping.is_set():
            try:
                if not is_clear:
                    self._clear()
                    is_clear = True
                if self._parts < self._offered:
                    self._apply_all()
                self._error = ""
            except Stopped:
                return
            except Exception as error:  # of any kind: the move must say why it waits
                kind = "" if isinstance(error, PetpsError) else f"{type(error).__name__}: "
                if self._error != f"{kind}{error}":
                    self._error = f"{kind}{error}"
                    text = f"partition {self._partition} cannot be received: {self._error}"
                    self._place.log(Line(text, "copy_failed", WARNING, partition=self._partition))
                self._stopping.wait(RETRY_SECONDS)
            self._stopping.wait(LOOK_SECONDS)

    def _check(self) -> None:
        if self._stopping.is_set() or self._is_owner():
            raise Stopped

    def _clear(self) -> None:
        """Remove the rows of an earlier life: the owner may have deleted their keys."""
        for _, table in pushed_tables(self._place.tables):
            keys = keys_of(table, self._partition, self._place.partitions)
            for start in range(0, len(keys), ROWS_OF_A_BATCH):
                self._check()
                part = np.ascontiguousarray(keys[start : start + ROWS_OF_A_BATCH])
                table.apply(part, None, np.ones(len(part), np.bool_))

    def _apply_all(self) -> None:
        while self._parts < self._offered:
            self._apply(self._parts + 1)
            self._parts += 1

    def _apply(self, number: int) -> None:
        path = path_of(self._place.model, self._partition, self.copy, number)
        for changes in read_part(self._place.files, path):
            self._check()
            changes.apply(self._place.tables)
