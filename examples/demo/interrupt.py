"""Ctrl-C and SIGTERM: one signal ends the demo, and no child process stays behind.

A KeyboardInterrupt can come between any two steps of the main thread. Two places must not be
interrupted: the start of a child (the process would exist, but its id would be lost), and the
cleanup itself.
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
    """Raise KeyboardInterrupt on the first signal; ignore later ones until the process exits.

    So neither the cleanup nor the message after it is ever interrupted.
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
    """Deliver signals that come during the block at its end. For the main thread only."""
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
