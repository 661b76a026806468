"""Stages on threads of their own. Each stage hands its batch to the next one.

Owns:        Chain; give_way().
Never does:  know what a stage does.
Called by:   lookup.py; write_back.py, ranks.py (give_way).
Invariants:  batches leave in the order in which they entered; a stage works on one batch at a
             time and is at most one ahead of the next stage; an error takes the place of its
             batch and stops all stages.
Threads:     one for each stage; one thread calls next(), drain() and give_up().
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from petps import _native
from petps.errors import DeadlineExceeded

__all__ = ["Chain", "give_way"]

_END: Final = object()
_POLL_SECONDS: Final = 0.05  # the longest time until a stage notices that the chain gave up
# More than the work of a stage takes: the links limit its time, and this exceeds all those limits.
CLOSE_SECONDS: Final = 300.0


def give_way() -> None:
    """Let the calling thread give way to the threads that a step waits for (link.py)."""
    _native.set_time_slice(short=False)


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class Chain:
    """A chain of stages. source() returns the next item, or None at the end.

    Each stage turns an item into another item, or into None, which ends the chain at that item.
    """

    def __init__(
        self,
        source: Callable[[], Any | None],
        stages: Sequence[tuple[str, Callable[[Any], Any | None]]],
        name: str,
    ) -> None:
        self._stopped = threading.Event()
        queues: list[queue.Queue[Any]] = [queue.Queue(1) for _ in range(len(stages) + 1)]
        self._out = queues[-1]
        runs: list[tuple[str, Callable[[], None]]] = [
            ("prefetch", partial(self._run_source, source, queues[0]))
        ]
        for number, (stage, work) in enumerate(stages):
            runs.append((stage, partial(self._run_stage, work, queues[number], queues[number + 1])))
        self._threads = [  # daemons, because a peer that hangs must not keep the process
            threading.Thread(target=run, name=f"{name}-{stage}", daemon=True) for stage, run in runs
        ]
        for thread in self._threads:
            thread.start()

    def next(self) -> Any | None:
        """Return the next item, or None at the end. Raise what a stage raised."""
        item = self._out.get()
        if item is _END or isinstance(item, _Failure):
            self._out.put(item)  # a later call returns or raises the same
        if isinstance(item, _Failure):
            self._stopped.set()
            raise item.error
        return None if item is _END else item

    def give_up(self) -> None:
        """Stop the stages as soon as they notice, and drop items in flight. Does not wait."""
        self._stopped.set()

    def drain(self) -> None:
        """Wait until the end of the source has come through. Raise what a stage raised."""
        while self.next() is not None:
            pass
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                raise DeadlineExceeded(
                    f"thread {thread.name} did not end within {CLOSE_SECONDS:g} s: a peer may hang"
                )

    def _run_source(self, source: Callable[[], Any | None], out: queue.Queue[Any]) -> None:
        give_way()
        while not self._stopped.is_set():
            item = self._try(source)
            self._hand(out, item)
            if item is _END or isinstance(item, _Failure):
                return

    def _run_stage(
        self, work: Callable[[Any], Any | None], into: queue.Queue[Any], out: queue.Queue[Any]
    ) -> None:
        give_way()
        has_ended = False
        while not self._stopped.is_set():
            try:
                item = into.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            is_last = item is _END or isinstance(item, _Failure)
            if not has_ended:  # drop items after the end, so that the stage before can finish
                result = item if is_last else self._try(partial(work, item))
                self._hand(out, result)
                has_ended = result is _END or isinstance(result, _Failure)
            if is_last:
                return

    @staticmethod
    def _try(work: Callable[[], Any | None]) -> Any:
        try:
            result = work()
        except BaseException as error:
            return _Failure(error)
        return _END if result is None else result

    def _hand(self, out: queue.Queue[Any], item: Any) -> None:
        while not self._stopped.is_set():
            try:
                out.put(item, timeout=_POLL_SECONDS)
                return
            except queue.Full:
                continue
