"""A version on its way from a device to a store: what its stages share. STAGING.md.

Owns:        Flight: four buffers, the channels between stages, their threads, how it ended.
Never does:  know what a stage does.
Called by:   staging.py.
Invariants:  the first error stops every stage; a buffer is one stage's at a time.
Threads:     a stage each, and the trainer's; one condition for all that they wait for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from petps.checkpoint.bundle import Encoded
from petps.checkpoint.spool import Spooled
from petps.checkpoint.state import Version

__all__ = ["Channel", "Copied", "Flight", "Stopped"]

T = TypeVar("T")


class Stopped(Exception):
    """The version is not to be: its error is told elsewhere."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Rows of a table in a buffer, or in the folder."""

    table: str
    rows: int
    deletes: bool
    buffer: memoryview
    spooled: Spooled | None = None


class Channel(Generic[T]):
    """From one stage to the next."""

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self.ended = False


class Flight:
    """A version on its way: its buffers, its stages' channels, and what became of it."""

    def __init__(self, down: list[memoryview], up: list[memoryview]) -> None:
        self._changed = threading.Condition()
        self.free = {"down": down, "up": up}
        self.resident = 0
        self.resident_max = 0
        self.copied: Channel[Copied] = Channel()
        self.spooled: Channel[Copied] = Channel()
        self.encoded: Channel[tuple[str, Encoded]] = Channel()
        self.error: BaseException | None = None
        self.told = False
        self.made: Version | None = None
        self.threads: list[threading.Thread] = []

    def fail(self, error: BaseException) -> None:
        """Stops all stages; the first error counts, and none once it is committed."""
        with self._changed:
            if self.error is None and self.made is None:
                self.error = error
            self._changed.notify_all()

    def succeed(self, made: Version) -> None:
        """It is committed: a cancel() since came too late."""
        with self._changed:
            self.made, self.error = made, None

    def check(self) -> None:
        """Raises Stopped where it is not to be."""
        if self.error is not None:
            raise Stopped

    def rest(self, seconds: float) -> None:
        """Waits, but no longer than the version is to be."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None, seconds)
        self.check()

    def until(self, ready: Callable[[], bool]) -> None:
        """Waits for what another stage does."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or ready())
        self.check()

    def lease(self, pair: str) -> memoryview:
        """One of the pair's buffers, once one is free."""
        with self._changed:
            free = self.free[pair]
            self._changed.wait_for(lambda: self.error is not None or bool(free))
            self.check()
            self.resident += 1
            self.resident_max = max(self.resident_max, self.resident)
            return free.pop()

    def release(self, pair: str, buffer: memoryview) -> None:
        """Nobody reads it any more."""
        with self._changed:
            self.free[pair].append(buffer)
            self.resident -= 1
            self._changed.notify_all()

    def give(self, channel: Channel[T], item: T) -> None:
        """To the next stage."""
        with self._changed:
            channel.items.append(item)
            self._changed.notify_all()

    def end(self, channel: Channel[T]) -> None:
        """The next stage has all."""
        with self._changed:
            channel.ended = True
            self._changed.notify_all()

    def changed(self) -> None:
        """What until() waits for may have come."""
        with self._changed:
            self._changed.notify_all()

    def next(self, channel: Channel[T]) -> T | None:
        """Of the stage before, left in the channel; None: there is no more."""
        self.until(lambda: bool(channel.items) or channel.ended)
        return channel.items[0] if channel.items else None

    def of_table(self, name: str) -> Iterator[Encoded]:
        """The encoded chunks up to those of another table."""
        while (item := self.next(self.encoded)) is not None and item[0] == name:
            self.encoded.items.popleft()
            yield item[1]

    def start(self, stage: Callable[[], None]) -> None:
        """In a thread of its own; what it raises is what becomes of the version."""

        def guarded() -> None:
            try:
                stage()
            except Stopped:
                pass
            except BaseException as error:
                self.fail(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        self.threads.append(thread)

    def take(self, channel: Channel[T]) -> Iterator[T]:
        """All of the stage before."""
        while (item := self.next(channel)) is not None:
            channel.items.popleft()
            yield item
