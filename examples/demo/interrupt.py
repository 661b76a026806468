"""Ctrl-C and SIGTERM: one signal terminates the demo, and no child process stays behind.

A KeyboardInterrupt can come between any two steps of the main thread. It must not interrupt the
start of a child, because the process would exist, but its id would be lost. It must not interrupt
the cleanup either.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

__all__ = ["delay_signals", "interrupt_once"]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupt_once() -> Iterator[None]:
    """Raise KeyboardInterrupt on the first signal; ignore later ones until the process exits.

    So no signal interrupts the cleanup or the message after it.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for to_ignore in _SIGNALS:
            signal.signal(to_ignore, signal.SIG_IGN)
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is interrupt:
                signal.signal(number, handler)


@contextmanager
def delay_signals() -> Iterator[None]:
    """Deliver signals of the block after the block. Only for the main thread."""
    received: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        received.append(number)

    handlers = {number: signal.signal(number, record) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])
