"""A version in flight from a device to a store: what its stages share. STAGING.md.

Owns:        Flight: the four buffers, the channels between stages, their threads, the outcome.
Never does:  know what a stage does.
Called by:   stages.py, staging.py.
Invariants:  the first error stops every stage; a buffer belongs to one stage at a time.
Threads:     one for each stage, and the trainer's; they share one condition variable.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from petps.checkpoint.bundle import Encoded
from petps.checkpoint.spool import Spooled
from petps.checkpoint.state import Version

__all__ = ["Channel", "Copied", "Flight", "Stopped", "start_thread"]

T = TypeVar("T")


# The queues of threads that wait for work. A forked child has none of the threads.
_parked: list[queue.SimpleQueue[tuple[Callable[[], None], str]]] = []
os.register_at_fork(after_in_child=_parked.clear)


def start_thread(work: Callable[[], None], name: str) -> None:
    """Run ``work``, which raises nothing, in a thread that the process's end does not wait for.

    The thread waits for more work afterwards. Thread.start() waits until the new thread runs, and
    on a processor that is busy that takes milliseconds, for which the training would wait.
    """
    try:
        tasks = _parked.pop()
    except IndexError:
        tasks = queue.SimpleQueue()
        threading.Thread(target=_run_tasks, args=(tasks,), daemon=True).start()
    tasks.put((work, name))


def _run_tasks(tasks: queue.SimpleQueue[tuple[Callable[[], None], str]]) -> None:
    thread = threading.current_thread()
    while True:
        work, thread.name = tasks.get()
        work()
        del work
        thread.name = "petps-parked"
        _parked.append(tasks)


class Stopped(Exception):
    """The version has failed or was cancelled; the caller receives the error from Flight.error."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Rows of a table in a buffer, or in the folder once ``spooled`` is set.

    buffer: the part of a buffer that has the rows. whole: the buffer, if no other chunk in it
    follows.
    """

    table: str
    rows: int
    deletes: bool
    buffer: memoryview
    whole: memoryview | None = None
    spooled: Spooled | None = None


class Channel(Generic[T]):
    """The queue from one stage to the next."""

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self.ended = False


class Flight:
    """A version in flight: its buffers, the channels of its stages, and its outcome."""

    def __init__(
        self,
        down: list[memoryview],
        up: list[memoryview],
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._changed = threading.Condition()
        self.free = {"down": down, "up": up}
        self.resident = 0
        self.resident_max = 0
        self.copied: Channel[Copied] = Channel()
        self.spooled: Channel[Copied] = Channel()
        self.encoded: Channel[tuple[str, Encoded]] = Channel()
        self.error: BaseException | None = None
        self.is_error_raised = False
        self.has_succeeded = False
        self.committed: Version | None = None
        self._prepare_thread = prepare_thread
        self._running = 0  # stages that have not ended

    def fail(self, error: BaseException) -> None:
        """Stop all stages. Only the first error counts, and none after succeed()."""
        with self._changed:
            if self.error is None and not self.has_succeeded:
                self.error = error
            self._changed.notify_all()

    def succeed(self, version: Version | None) -> None:
        """Record the commit, and drop the error of a cancel() that came during the commit."""
        with self._changed:
            self.has_succeeded, self.committed, self.error = True, version, None

    def check(self) -> None:
        """Raise Stopped if the version has failed or was cancelled."""
        if self.error is not None:
            raise Stopped

    def wait(self, seconds: float) -> None:
        """Wait for ``seconds``; raise Stopped as soon as the version fails."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None, seconds)
        self.check()

    def wait_until(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until ``ready()``, which another thread makes true; raise Stopped as wait() does.

        Return False after ``seconds``.
        """
        with self._changed:
            is_ready = self._changed.wait_for(lambda: self.error is not None or ready(), seconds)
        self.check()
        return is_ready

    def lease(self, pair: str) -> memoryview:
        """Wait for a free buffer of the pair, and take it."""
        with self._changed:
            free = self.free[pair]
            self._changed.wait_for(lambda: self.error is not None or bool(free))
            self.check()
            self.resident += 1
            self.resident_max = max(self.resident_max, self.resident)
            return free.pop()

    def release(self, pair: str, buffer: memoryview) -> None:
        """Return a buffer to its pair; no stage may read it any more."""
        with self._changed:
            self.free[pair].append(buffer)
            self.resident -= 1
            self._changed.notify_all()

    def give(self, channel: Channel[T], item: T) -> None:
        """Pass an item to the next stage."""
        with self._changed:
            channel.items.append(item)
            self._changed.notify_all()

    def end(self, channel: Channel[T]) -> None:
        """Tell the next stage that no item follows."""
        with self._changed:
            channel.ended = True
            self._changed.notify_all()

    def notify(self) -> None:
        """Wake the waiters of wait_until()."""
        with self._changed:
            self._changed.notify_all()

    def next(self, channel: Channel[T]) -> T | None:
        """Return the first item and leave it in the channel; None: no more items follow."""
        self.wait_until(lambda: bool(channel.items) or channel.ended)
        return channel.items[0] if channel.items else None

    def take_table(self, name: str) -> Iterator[Encoded]:
        """Yield the encoded chunks of table ``name``, and stop at the first of another table."""
        while (item := self.next(self.encoded)) is not None and item[0] == name:
            self.encoded.items.popleft()
            yield item[1]

    def start(self, stage: Callable[[], None]) -> None:
        """Run a stage in a thread of its own; an error that it raises fails the version."""

        def run_stage() -> None:
            try:
                self._prepare_thread()
                stage()
            except Stopped:
                pass
            except BaseException as error:
                self.fail(error)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

        with self._changed:
            self._running += 1
        try:
            start_thread(run_stage, "petps-stage")
        except BaseException:
            with self._changed:
                self._running -= 1
            raise

    def wait_for_stages(self) -> None:
        """Wait until every stage has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)

    def take(self, channel: Channel[T]) -> Iterator[T]:
        """Yield all items of the channel."""
        while (item := self.next(channel)) is not None:
            channel.items.popleft()
            yield item
