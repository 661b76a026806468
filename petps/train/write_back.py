"""The write-back of trained rows to the pool, removals, and the compaction of what was tracked.

Owns:        WriteBack.
Never does:  wait for a peer, except for keep_rows, which counts the rows of all ranks.
Called by:   pipeline.py; lookup.py, which waits for rows.
Invariants:  batches are written in the order of training; the first error is kept. A batch counts
             as written once the rows that its step removes are removed.
Threads:     in modes that run ahead, one thread writes; any thread may wait.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from petps.errors import FailedPrecondition
from petps.train.agree import gather_array
from petps.train.buffer import Buffer
from petps.train.options import Resources
from petps.train.stages import give_way
from petps.train.streams import Handoff
from petps.train.timeline import Span

__all__ = ["WriteBack"]


class WriteBack:
    """The write-back of a pipeline's batches."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._written = resources.options.first_step - 1
        self._error: BaseException | None = None
        self._end_reason = ""
        self._last: int | None = None  # no later batch is trained
        self._changed = threading.Condition()
        name = f"{resources.thread_name}-write-back"
        self._thread = (
            ThreadPoolExecutor(1, name, give_way) if resources.options.runs_ahead else None
        )

    def start(self, buffer: Buffer, updated: Handoff | None) -> None:
        """Write a batch's rows to the pool. Without a thread, return once they are there."""
        if self._thread is not None:
            self._thread.submit(self._write, buffer, updated)
            return
        self._write(buffer, updated)
        self.check()

    def check(self) -> None:
        """Raise what writing raised."""
        if self._error is not None:
            raise self._error

    def wait(self, number: int) -> bool:
        """Wait until the rows of batch ``number`` are in the pool. Raise what writing raised.

        Return False if end_after() excludes that batch. Raise FailedPrecondition if the pipeline
        ends before.
        """
        with self._changed:
            while self._written < number and self._error is None:
                if self._end_reason:
                    raise FailedPrecondition(f"the pipeline has ended: {self._end_reason}")
                if self._last is not None and number > self._last:
                    return False
                self._changed.wait()
            self.check()
            return True

    def end_after(self, number: int) -> None:
        """End the waits for batches after ``number``, which are not trained."""
        with self._changed:
            self._last = number
            self._changed.notify_all()

    def stop_waits(self, reason: str) -> None:
        """Fail all waits for batches that are not written yet, because none may come."""
        with self._changed:
            self._end_reason = reason
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until the rows of all trained batches are in the pool; stop the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _write(self, buffer: Buffer, updated: Handoff | None) -> None:
        error: BaseException | None = None
        lane = self._resources.lanes.write_back
        try:
            span = self._resources.timeline.span("write-back", "write-back", buffer.batch)
            with span, lane.use():
                lane.take(updated)
                buffer.write_back(self._resources.tables, lane)
            self._remove(buffer.batch)
        except BaseException as failure:
            error = failure
        with self._changed:
            self._written = buffer.batch
            self._error = self._error or error
            self._changed.notify_all()
        if self._error is None:
            self._compact(buffer.batch)

    def _remove(self, batch: int) -> None:
        resources, lane = self._resources, self._resources.lanes.write_back
        if resources.tables.removes_at(batch):
            with resources.timeline.span("write-back", "remove", batch), lane.use():
                resources.tables.remove(batch, self._sum_over_ranks)

    def _sum_over_ranks(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        # Nothing else uses this link now: the training waits for the removal (Pipeline).
        sums: Any = np.sum(gather_array(self._resources.links.dense, counts), axis=0)
        return sums  # type: ignore[no-any-return]

    def _compact(self, batch: int) -> None:
        """Compact the tracked keys, behind the batch if this has a thread of its own."""
        begin, used = time.monotonic(), time.thread_time()
        try:
            dropped = self._resources.tables.tracker.compact()
        except BaseException as failure:
            with self._changed:
                self._error = self._error or failure
                self._changed.notify_all()
            return
        if dropped > 0:  # most calls find too few ids to begin
            used = time.thread_time() - used
            self._resources.timeline.add(
                Span("write-back", "compact", batch, begin, time.monotonic(), None, used)
            )
