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
from petps.train.stages import Chain, give_way

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}.get(platform.machine())
SHORT_NS = 300_000  # native/base/time_slice.h


def time_slice_ns() -> int:
    """Return the calling thread's time slice in ns, as the kernel reports it."""
    words = ctypes.create_string_buffer(48)
    call = ctypes.CDLL(None, use_errno=True).syscall
    if SCHED_GETATTR is None or call(SCHED_GETATTR, 0, words, 48, 0) != 0:
        pytest.skip(f"no sched_getattr here: {os.strerror(ctypes.get_errno())}")
    return int(struct.unpack("IIQiIQQQ", words.raw)[5])


def run_on_thread(work: Callable[[], Any]) -> Any:
    """Return the result of ``work`` on a thread of its own, whose time slice ends with it."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def run_with_short_slices(work: Callable[[], Any]) -> Any:
    """Return the result of ``work`` on a thread that uses short time slices."""

    def both() -> Any:
        _native.set_time_slice(short=True)
        return work()

    return run_on_thread(both)


@pytest.fixture(autouse=True)
def skip_without_own_time_slices() -> None:
    time_slice_ns()
    if run_with_short_slices(time_slice_ns) != SHORT_NS:
        pytest.skip(
            "this kernel gives threads no time slices of their own; Linux 6.12 and later do"
        )


def test_a_child_thread_inherits_short_slices_until_it_gives_way() -> None:
    def ahead() -> int:
        give_way()
        return time_slice_ns()

    assert run_on_thread(time_slice_ns) != SHORT_NS
    assert run_with_short_slices(lambda: run_on_thread(time_slice_ns)) == SHORT_NS
    assert run_with_short_slices(lambda: run_on_thread(ahead)) != SHORT_NS


def test_stages_use_long_slices_beside_a_caller_with_short_ones() -> None:
    def stages() -> list[int]:
        drawn = iter([0])
        chain = Chain(
            lambda: None if next(drawn, None) is None else [time_slice_ns()],
            [("route", lambda slices: [*slices, time_slice_ns()])],
            "slices",
        )
        slices: list[int] | None = chain.next()
        chain.give_up()
        assert slices is not None
        return slices

    slices = run_with_short_slices(stages)
    assert len(slices) == 2
    assert SHORT_NS not in slices


def test_a_thread_of_low_priority_has_long_slices_and_never_more_than_its_niceness() -> None:
    def lower(first: int | None = None) -> tuple[int, int]:
        if first is not None:
            _native.lower_priority(first)
        _native.lower_priority()
        return time_slice_ns(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    usual = run_on_thread(time_slice_ns)
    longer, niceness = run_on_thread(lower)
    assert longer > usual
    assert niceness == 10
    assert run_on_thread(lambda: lower(19)) == (longer, 19)
    assert run_on_thread(time_slice_ns) == usual  # of that thread only
