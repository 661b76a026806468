"""Wake: a wait that a signal handler may end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from petps.wake import Wake

# A signal arrives at every point of a wait, one after another.
EVERYWHERE = """
import os, signal, sys
sys.path.insert(0, {root!r})
from petps.wake import Wake
from petps.server.process import Signals

wake, points, at = Wake(), 0, 0

def interrupt(frame, event, argument):
    global points
    frame.f_trace_opcodes = True
    points += 1
    if points == at:
        sys.settrace(None)
        os.kill(os.getpid(), signal.SIGTERM)
    return interrupt

ended = 0
while True:
    with Signals() as signals:
        points, at = 0, at + 1
        sys.settrace(interrupt)
        signals.wait(0)
        sys.settrace(None)
        if points < at:
            break
        assert not signals.wait(0), at
        ended += 1
print(ended)
"""


def test_a_signal_at_any_point_of_a_wait_ends_the_process() -> None:
    script = EVERYWHERE.format(root=".")
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 20


@pytest.mark.parametrize("count", [1, 3])
def test_several_wakes_end_one_wait(count: int) -> None:
    wake = Wake()
    for _ in range(count):
        wake.send()
    wake.wait(600)
    threading.Timer(0.01, wake.send).start()
    wake.wait(600)
    wake.wait(0)
