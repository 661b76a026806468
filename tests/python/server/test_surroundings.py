"""What a server sees of the clock and of the disk."""

from __future__ import annotations

import time

import pytest

from petps.server.surroundings import Clock
from tests.python.server.conftest import Start


def test_a_jump_of_the_clock_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    assert clock.check() is None
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    jump = clock.check()
    assert jump == pytest.approx(-3600, abs=0.5)
    assert clock.check() is None, "a jump counts once"
    monkeypatch.setattr(time, "time", real)
    assert clock.check() == pytest.approx(3600, abs=0.5)
    assert clock.status()["jumps"] == 2


def test_the_status_has_the_disk_of_the_pool(start: Start) -> None:
    status = start().status()
    disk = status["disk"]
    assert 0 <= disk["free_bytes"] < disk["bytes"]
    assert status["clock"]["jumps"] == 0
