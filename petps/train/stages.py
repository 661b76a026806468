"""Stages on threads of their own, each of which hands its batch to the next: from loader to rows.

Owns:        Chain; works_ahead().
Never does:  know what a stage does.
Called by:   lookup.py; write_back.py, ranks.py (works_ahead).
Invariants:  batches leave in the order in which they entered; a stage works on one batch at a
             time and is at most one ahead of the next stage; an error leaves in place of its
             batch and ends all stages.
Threads:     one for each stage; one thread calls next(), drain() and give_up().
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from petps import _native
from petps.errors import DeadlineExceeded

__all__ = ["Chain", "works_ahead"]

_END: Final = object()
_POLL_SECONDS: Final = 0.05  # the longest time until a stage notices that the chain gave up
# The links limit how long the work of a stage takes; this is more than all those limits together.
CLOSE_SECONDS: Final = 300.0


def works_ahead() -> None:
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
        first, *others = [("prefetch", lambda _: source()), *stages]
        self._threads = [
            threading.Thread(
                target=self._first, args=(first[1], queues[0]), name=f"{name}-{first[0]}"
            )
        ]
        for number, (stage, work) in enumerate(others):
            self._threads.append(
                threading.Thread(
                    target=self._work,
                    args=(work, queues[number], queues[number + 1]),
                    name=f"{name}-{stage}",
                )
            )
        for thread in self._threads:
            thread.daemon = True  # a peer that hangs must not keep the process
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
                raise DeadlineExceeded(f"stage {thread.name} does not end")

    def _first(self, source: Callable[[Any], Any | None], out: queue.Queue[Any]) -> None:
        works_ahead()
        while not self._stopped.is_set():
            item = self._try(source, None)
            self._hand(out, item)
            if item is _END or isinstance(item, _Failure):
                return

    def _work(
        self, work: Callable[[Any], Any | None], into: queue.Queue[Any], out: queue.Queue[Any]
    ) -> None:
        works_ahead()
        ended = False
        while not self._stopped.is_set():
            try:
                item = into.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            last = item is _END or isinstance(item, _Failure)
            if not ended:  # drop items behind an end, so that the stage before can finish
                result = item if last else self._try(work, item)
                self._hand(out, result)
                ended = result is _END or isinstance(result, _Failure)
            if last:
                return

    @staticmethod
    def _try(work: Callable[[Any], Any | None], item: Any) -> Any:
        try:
            result = work(item)
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
