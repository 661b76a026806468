"""What a server sees of the clock, of the disk and of the other servers of the shard map."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from petps.server.surroundings import Clock, Surroundings, reachable
from tests.ports import stable_port
from tests.python.server.conftest import Start
from tests.python.waiting import wait_until


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


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_servers_are_reachable_if_they_accept_a_connection(listening: str) -> None:
    silent = f"127.0.0.1:{stable_port()}"
    found = reachable([listening, silent, "[::1]:1", "no-such-host.invalid:7070"])
    assert found == {
        listening: True, silent: False, "[::1]:1": False, "no-such-host.invalid:7070": False,
    }  # fmt: skip
    assert reachable([]) == {}


def test_changes_of_the_other_servers_are_logged(tmp_path: Path) -> None:
    lines: list[str] = []
    port = stable_port()
    member = f"127.0.0.1:{port}"
    surroundings = Surroundings(tmp_path, lambda: [member], lines.append)
    with contextlib.closing(surroundings):
        wait_until(lambda: surroundings.status()["shard_members"] == {member: False})
        with socket.create_server(("127.0.0.1", port)):
            surroundings._look_at_members()
        assert surroundings.status()["shard_members"] == {member: True}
    assert lines == [
        f"the server {member} of the shard map does not accept connections",
        f"the server {member} of the shard map answers again",
    ]


def test_the_status_has_the_disk_of_the_pool(start: Start) -> None:
    status = start().status()
    disk = status["disk"]
    assert 0 <= disk["free_bytes"] < disk["bytes"]
    assert status["clock"]["jumps"] == 0
    assert status["shard_members"] == {}
