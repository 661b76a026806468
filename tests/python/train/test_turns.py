"""Short time slices on a busy processor: threads that a step waits for have them, others do not."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from petps import _native
from petps.train.stages import Chain, works_ahead

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}.get(platform.machine())
SHORT_NS = 300_000  # native/base/time_slice.h


def turn_ns() -> int:
    """Return the calling thread's time slice in ns, as the kernel reports it."""
    words = ctypes.create_string_buffer(48)
    call = ctypes.CDLL(None, use_errno=True).syscall
    if SCHED_GETATTR is None or call(SCHED_GETATTR, 0, words, 48, 0) != 0:
        pytest.skip(f"no sched_getattr here: {os.strerror(ctypes.get_errno())}")
    return int(struct.unpack("IIQiIQQQ", words.raw)[5])


def on_a_thread(work: Callable[[], Any]) -> Any:
    """Return the result of ``work`` on a thread of its own, whose time slice ends with it."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def short_and(work: Callable[[], Any]) -> Any:
    """Return the result of ``work`` on a thread that uses short time slices."""

    def both() -> Any:
        _native.set_time_slice(short=True)
        return work()

    return on_a_thread(both)


@pytest.fixture(autouse=True)
def skip_without_own_time_slices() -> None:
    turn_ns()
    if short_and(turn_ns) != SHORT_NS:
        pytest.skip("this kernel keeps no turns of a thread's own: Linux 6.12 and later do")


def test_heirs_take_short_turns_until_they_work_ahead() -> None:
    def ahead() -> int:
        works_ahead()
        return turn_ns()

    assert on_a_thread(turn_ns) != SHORT_NS
    assert short_and(lambda: on_a_thread(turn_ns)) == SHORT_NS
    assert short_and(lambda: on_a_thread(ahead)) != SHORT_NS


def test_stages_work_ahead_of_who_takes_short_turns() -> None:
    def stages() -> list[int]:
        drawn = iter([0])
        chain = Chain(
            lambda: None if next(drawn, None) is None else [turn_ns()],
            [("route", lambda turns: [*turns, turn_ns()])],
            "turns",
        )
        turns: list[int] | None = chain.next()
        chain.give_up()
        assert turns is not None
        return turns

    turns = short_and(stages)
    assert len(turns) == 2
    assert SHORT_NS not in turns
