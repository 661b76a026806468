"""Removal of a partition that this server does not have any more: its progress, then its rows.

The order is what makes it safe. Once the progress is gone, the pool claims nothing of the
partition: whoever follows it again begins at the start of the log, or with a base, as in a new
pool. So it does not matter after how many rows a crash comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Final

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.cluster.records import Drop
from petps.delta.schema import partition_of
from petps.errors import PetpsError
from petps.log import WARNING, Line

__all__ = ["Removal", "remove_partition"]

ROWS_OF_A_BATCH: Final = 16_384  # as in an apply of ingest: few enough for the latency of pulls
KEYS_OF_A_SCAN: Final = 1 << 20  # 8 MiB; a table moves no entries during a scan
PAUSE_SECONDS: Final = 0.02  # after each batch, so that pulls and ingest come first
LOOK_SECONDS: Final = 0.5

Held = Callable[[], AbstractContextManager[None]]


class Stopped(Exception):
    """Signal that the removal may not go on."""


def remove_partition(
    tables: _native.Tables,
    model: str,
    partition: int,
    *,
    is_copied: bool,
    is_foreign: bool = False,
    held: Held,
    may_go_on: Callable[[], bool],
    pause: Callable[[], None] = lambda: None,
) -> int:
    """Remove the progress, then the rows of a partition. Return the number of rows.

    Frozen instances keep theirs, which are the state of one version. is_copied: also the rows of
    tables that pushes feed, which are nowhere else unless they were copied. is_foreign: the rows
    are of another log, so the next one may have older runs. held: a context in
    which ingest applies nothing. may_go_on: asked in the context before each change; Stopped if
    not.
    """
    with held():
        _check(may_go_on)
        instances = [
            record for record in tables.instances() if record.model == model and not record.frozen
        ]
        recorded = [tables.progress(record.id, partition) for record in instances]
        if begun := [_blank(progress, is_foreign) for progress in recorded if progress]:
            tables.record_all_progress(begun)
    removed = 0
    for record in instances:
        for table in tables.tables():
            if table.record.instance != record.id:
                continue
            if table.record.feed == "push" and not is_copied:
                continue
            while len(keys := _keys_of(table, partition, record.partitions)):
                for start in range(0, len(keys), ROWS_OF_A_BATCH):
                    part = np.ascontiguousarray(keys[start : start + ROWS_OF_A_BATCH])
                    with held():
                        _check(may_go_on)
                        removed += table.apply(part, None, np.ones(len(part), np.bool_)).deleted
                    pause()
    return removed


def _blank(progress: _native.Progress, is_foreign: bool) -> _native.Progress:
    """Return a progress that claims nothing; ``target``: see petps.server.ingest.Progress."""
    applied = max(progress.run, progress.target if progress.state == "following" else 0)
    if is_foreign:
        applied = 0
    return _native.Progress(
        instance=progress.instance, partition=progress.partition, run=0, seq=0, offset=0,
        version=0, state="following", target=applied, publisher=0,
    )  # fmt: skip


def _check(may_go_on: Callable[[], bool]) -> None:
    if not may_go_on():
        raise Stopped


def _keys_of(table: _native.Table, partition: int, partitions: int) -> npt.NDArray[np.uint64]:
    """Return keys of the partition: all, or as many as one scan may hold."""
    found, count = [], 0
    for keys in _pages(table):
        own = keys[partition_of(keys, partitions) == partition]
        found.append(own)
        count += len(own)
        if count >= KEYS_OF_A_SCAN:
            break
    return np.concatenate(found) if found else np.empty(0, np.uint64)


def _pages(table: _native.Table) -> Iterator[npt.NDArray[np.uint64]]:
    with table.scan() as scan:
        for keys, _ in scan:
            yield keys


class Removal:
    """A thread that removes the ordered partitions one after the other, until close().

    may_remove: whether the map in use has at least a version, and does not name this server for a
    partition. A removal that fails or is stopped begins again.
    """

    def __init__(
        self,
        tables: _native.Tables,
        model: str,
        *,
        held: Held,
        may_remove: Callable[[int, int], bool],
        log: Callable[[str], None],
    ) -> None:
        self._tables, self._model, self._held = tables, model, held
        self._may_remove, self._log = may_remove, log
        self._lock = threading.Lock()  # over the next two
        self._orders: dict[int, Drop] = {}
        self._done: list[int] = []
        self._stopping = threading.Event()
        self._wanted = threading.Event()
        self._error = ""
        self._thread = threading.Thread(target=self._run, name="petps-removal", daemon=True)
        self._thread.start()

    def set_orders(self, orders: Mapping[int, Drop]) -> None:
        """See membership.Remover."""
        with self._lock:
            self._orders = dict(orders)
            self._done = [partition for partition in self._done if partition in orders]
        if orders:
            self._wanted.set()

    def take_done(self) -> list[int]:
        """See membership.Remover."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def waiting(self) -> list[int]:
        """See membership.Remover."""
        with self._lock:
            return sorted(self._orders)

    def close(self) -> None:
        """Stop after the running batch."""
        self._stopping.set()
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        _native.lower_priority()  # as ingest, which waits while a batch is removed
        while not self._stopping.is_set():
            self._wanted.wait()
            self._wanted.clear()
            with self._lock:
                orders = [drop for p, drop in self._orders.items() if p not in self._done]
            for drop in sorted(orders, key=lambda drop: drop.partition):
                self._remove(drop)
            with self._lock:
                is_left = any(partition not in self._done for partition in self._orders)
            if is_left and not self._stopping.wait(LOOK_SECONDS):
                self._wanted.set()

    def _pause(self) -> None:
        self._stopping.wait(PAUSE_SECONDS)

    def _remove(self, drop: Drop) -> None:
        partition = drop.partition

        def may_go_on() -> bool:
            with self._lock:
                is_ordered = self._orders.get(partition) == drop
            return (
                is_ordered
                and not self._stopping.is_set()
                and self._may_remove(partition, drop.map_version)
            )

        if not may_go_on():
            return
        error = ""
        try:
            remove_partition(
                self._tables,
                self._model,
                partition,
                is_copied=drop.is_copied,
                is_foreign=drop.is_foreign,
                held=self._held,
                may_go_on=may_go_on,
                pause=self._pause,
            )
            with self._lock:
                self._done.append(partition)
        except Stopped:
            return
        except PetpsError as failure:
            error = f"the rows of partition {partition} are not removed yet: {failure}"
        if error and error != self._error and not self._stopping.is_set():
            self._log(Line(error, "removal_failed", WARNING, partition=partition))
        self._error = error
