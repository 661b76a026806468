"""Stages on threads of their own, each handing its batch to the next: the way from loader to rows.

Owns:        Chain; works_ahead().
Never does:  know what a stage does.
Called by:   pipeline.py; ranks.py (works_ahead).
Invariants:  batches come out in the order in which they went in; a stage works on one at a time,
             and is at most one ahead of the next; an error comes out in its batch's place, and ends
             all.
Threads:     one a stage; next() and close() from one.
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
_POLL_SECONDS: Final = 0.05  # how soon a stage sees that all was given up
# A stage's work ends by the links' own limits; this is beyond all of them together.
CLOSE_SECONDS: Final = 300.0


def works_ahead() -> None:
    """The calling thread gives way to those that a step waits for (link.py)."""
    _native.take_turns(short=False)


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class Chain:
    """source() gives the next item, or None at the end; each stage turns an item into another, or
    into None: it, and all behind it, are the end.
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
        """The next item, or None at the end. Raises what a stage raised."""
        item = self._out.get()
        if item is _END or isinstance(item, _Failed):
            self._out.put(item)  # whoever asks again hears the same
        if isinstance(item, _Failed):
            self._stopped.set()
            raise item.error
        return None if item is _END else item

    def give_up(self) -> None:
        """Stages end as soon as they see it; what is on its way is dropped. Waits for nothing."""
        self._stopped.set()

    def drain(self) -> None:
        """Waits until the source's end has come through. Raises what a stage raised."""
        while self.next() is not None:
            pass
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                raise DeadlineExceeded(f"stage {thread.name} does not end")

    def _first(self, source: Callable[[Any], Any | None], out: queue.Queue[Any]) -> None:
        works_ahead()
        while not self._stopped.is_set():
            item = self._tried(source, None)
            self._hand(out, item)
            if item is _END or isinstance(item, _Failed):
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
            last = item is _END or isinstance(item, _Failed)
            if not ended:  # what comes behind an end is taken, so that who makes it can end
                made = item if last else self._tried(work, item)
                self._hand(out, made)
                ended = made is _END or isinstance(made, _Failed)
            if last:
                return

    @staticmethod
    def _tried(work: Callable[[Any], Any | None], item: Any) -> Any:
        try:
            made = work(item)
        except BaseException as error:
            return _Failed(error)
        return _END if made is None else made

    def _hand(self, out: queue.Queue[Any], item: Any) -> None:
        while not self._stopped.is_set():
            try:
                out.put(item, timeout=_POLL_SECONDS)
                return
            except queue.Full:
                continue
