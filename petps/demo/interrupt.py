"""Ctrl-C and SIGTERM: one of them ends the demo, none leaves a child behind.

A KeyboardInterrupt comes between any two steps of the main thread. Two places may not be cut in
two: starting a child (the process would be there, and nobody would know its id), and the cleaning
up itself.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

__all__ = ["interrupted_once", "uninterrupted"]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupted_once() -> Iterator[None]:
    """The first signal raises KeyboardInterrupt; later ones are ignored until the process ends.

    What cleans up, and what then says so, is therefore never interrupted itself.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [(each, signal.signal(each, interrupt)) for each in _SIGNALS]
    try:
        yield
    finally:
        for each, handler in before:
            if signal.getsignal(each) is interrupt:
                signal.signal(each, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A signal that comes within is delivered at the end. Of the main thread only."""
    came: list[int] = []
    before = [
        (each, signal.signal(each, lambda number, frame: came.append(number))) for each in _SIGNALS
    ]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)
    if came:
        signal.raise_signal(came[0])
