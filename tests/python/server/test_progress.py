"""What the service manager hears, and whether threads make progress."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from petps.server import Serving, process
from petps.server.ingest import Ingest
from petps.server.notify import Notifier
from petps.server.progress import SLOW_STUCK_SECONDS, STUCK_SECONDS, Progress
from tests.python.server.conftest import Start
from tests.python.server.test_http import request
from tests.python.waiting import wait_until


class Manager:
    """A service manager: the other end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1))
        self._socket.settimeout(60)

    def environ(self, **more: str) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.address, **more}

    def next(self) -> str:
        return self._socket.recv(4096).decode()

    def waiting(self) -> list[str]:
        """Return the messages that have arrived."""
        messages = []
        self._socket.setblocking(False)
        try:
            while True:
                messages.append(self._socket.recv(4096).decode())
        except BlockingIOError:
            return messages
        finally:
            self._socket.settimeout(60)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["abstract", "path"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = f"@petps-{os.getpid()}-{time.monotonic_ns()}"
    if request.param == "path":
        address = os.path.relpath(tmp_path / "notify")  # a whole path may be too long
        address = f"/proc/self/cwd/{address}"
    opened = Manager(address)
    yield opened
    opened.close()


def test_messages(manager: Manager) -> None:
    notifier = Notifier(manager.environ())
    notifier.ready("ready")
    assert manager.next() == "READY=1\nSTATUS=ready"
    notifier.set_status("ready")  # as before
    notifier.set_status("not ready: partition 3\nis gone")
    assert manager.next() == "STATUS=not ready: partition 3 is gone"
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.reloading()
    first, second = manager.next().splitlines()
    assert first == "RELOADING=1"
    assert before <= int(second.removeprefix("MONOTONIC_USEC=")) < before + 60_000_000
    notifier.stopping()
    assert manager.next() == "STOPPING=1\nSTATUS=draining"
    notifier.alive()  # the manager has not asked for it
    assert manager.waiting() == []


def test_a_manager_that_is_away_or_missing_stops_nothing(tmp_path: Path) -> None:
    for environ in ({}, {"NOTIFY_SOCKET": f"{tmp_path}/none"}, {"NOTIFY_SOCKET": "vsock:2:1"}):
        notifier = Notifier(environ | {"WATCHDOG_USEC": "1000000"})
        notifier.ready("ready")
        notifier.alive()
        with notifier.extending():
            pass


def test_the_watchdog_is_asked_for_by_the_environment_of_this_process() -> None:
    asked = {"WATCHDOG_USEC": "3000000"}
    assert Notifier(asked).watchdog_seconds == 3
    assert Notifier(asked | {"WATCHDOG_PID": str(os.getpid())}).watchdog_seconds == 3
    assert Notifier(asked | {"WATCHDOG_PID": "1"}).watchdog_seconds is None
    for wrong in ("", "0", "x"):
        assert Notifier({"WATCHDOG_USEC": wrong}).watchdog_seconds is None


def test_a_start_is_extended_only_while_it_works(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = iter([(0.0, 0), (1.0, 0), (1.0, 0), (1.0, 1), (1.001, 1)])
    looks = threading.Semaphore(0)

    def work_done() -> tuple[float, int]:
        looks.release()
        return next(work, (1.001, 1))

    monkeypatch.setattr("petps.server.notify._work_done", work_done)
    monkeypatch.setattr("petps.server.notify.EXTEND_EVERY_SECONDS", 0.001)
    with Notifier(manager.environ()).extending():
        for _ in range(8):
            assert looks.acquire(timeout=60)
    # At once, after the processor was used, and after a page came; not after a millisecond.
    assert manager.waiting() == ["EXTEND_TIMEOUT_USEC=30000000"] * 3


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def looked(watch: Progress, clock: Clock, *times: float) -> list[str]:
    found = []
    for clock.now in times:
        found.append(watch.look())
    return found


@pytest.mark.parametrize(
    ("name", "seconds", "limit"),
    [
        ("worker 1", None, STUCK_SECONDS),
        ("worker 1", 30.0, 15.0),
        ("ingest", 30.0, SLOW_STUCK_SECONDS),
        ("writer of pushes", None, SLOW_STUCK_SECONDS),
    ],
)
def test_a_thread_is_stuck_once_its_count_stands_still(
    name: str, seconds: float | None, limit: float
) -> None:
    clock = Clock()
    counts: dict[str, int | None] = {"other": 0, name: 5}
    watch = Progress(lambda: counts, seconds, clock=clock)

    def look(at: float) -> str:
        clock.now, counts["other"] = at, int(at * 10)
        return watch.look()

    assert [look(at) for at in (0, 1, limit - 1, limit, limit + 5)] == [""] * 5
    assert look(limit + 6) == f"{name} has made no progress for {limit + 6:.0f} s"
    assert watch.stuck() == f"{name} has made no progress for {limit + 6:.0f} s"
    counts[name] = 6
    assert look(limit + 7) == watch.stuck() == ""
    counts[name] = None  # it has nothing to do
    assert [look(limit + at) for at in (8, 1000, 2000)] == [""] * 3


def test_a_process_that_was_stopped_is_not_stuck() -> None:
    clock = Clock()
    counts = {"worker 0": 1}
    watch = Progress(lambda: counts, clock=clock)
    assert looked(watch, clock, 0, 10_000) == ["", ""]
    counts["worker 0"] = 2
    assert looked(watch, clock, 10_001, 10_002) == ["", ""]


def test_a_main_thread_that_looks_no_more_is_stuck() -> None:
    clock = Clock()
    watch = Progress(dict, clock=clock)
    assert watch.stuck() == ""
    watch.look()
    clock.now = STUCK_SECONDS - 1
    assert watch.stuck() == ""
    clock.now = STUCK_SECONDS
    assert watch.stuck() == "the main thread has made no progress for 60 s"


def test_threads_of_an_idle_server_make_progress(start: Start, tmp_path: Path) -> None:
    serving = start(ingest={"log": tmp_path / "log"})
    before = serving.progress()
    assert {"worker 0", "ingest"} <= before.keys()
    assert before["writer of pushes"] is None
    wait_until(
        lambda: all(
            before[name] is None or (count or 0) > (before[name] or 0)
            for name, count in serving.progress().items()
        )
    )


def test_a_stuck_ingest_thread_makes_no_progress_and_no_readiness(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls, go_on = threading.Semaphore(0), threading.Event()
    poll = Ingest._poll

    def wait_then_poll(self: Ingest, subscription: Any) -> None:
        polls.release()
        assert go_on.wait(60)
        poll(self, subscription)

    monkeypatch.setattr(Ingest, "_poll", wait_then_poll)
    monkeypatch.setattr("petps.server.lifecycle.READ_FIRST_SECONDS", 0.0)
    serving: Serving = start(ingest={"log": tmp_path / "log"})
    try:
        assert polls.acquire(timeout=60)
        clock = Clock()
        counts = serving.progress()
        watch = Progress(lambda: {"ingest": serving.progress()["ingest"]}, clock=clock)
        serving.watch(watch.stuck)
        found = looked(watch, clock, 0, 299, 300, 306)
        assert found == ["", "", "", "ingest has made no progress for 306 s"]
        assert serving.progress()["ingest"] == counts["ingest"]
        for path in ("/healthz", "/readyz"):
            code, _, body = request(serving, path)
            assert (code, body) == (503, f"{found[-1]}: restart the server\n")
    finally:
        go_on.set()
    wait_until(lambda: serving.progress()["ingest"] != counts["ingest"])
    clock.now = 307
    assert watch.look() == ""
    wait_until(lambda: request(serving, "/readyz")[0] == 200)


class Signals:
    """Signals that never arrive. Counts the rounds of the main loop."""

    def __init__(self) -> None:
        self.rounds = 0
        self.is_over = False

    def wait(self, seconds: float) -> bool:
        self.rounds += 1
        time.sleep(0.001)
        return not self.is_over

    def take_reload(self) -> bool:
        return False


def test_the_watchdog_hears_nothing_while_a_thread_is_stuck() -> None:
    manager = Manager(f"@petps-{os.getpid()}-{time.monotonic_ns()}")
    signals, lines, is_stuck = Signals(), list[str](), threading.Event()
    count = 0

    def progress() -> dict[str, int]:
        nonlocal count
        count += not is_stuck.is_set()
        return {"worker 0": count}

    def nothing(*_: Any) -> None:
        return None

    serving: Any = SimpleNamespace(
        progress=progress, watch=nothing, unready=nothing, follow_shard_map=nothing,
        report=nothing, log_incidents=nothing,
    )  # fmt: skip
    notifier = Notifier(manager.environ(WATCHDOG_USEC="20000"))
    arguments = (serving, signals, notifier, None, lines.append)
    thread = threading.Thread(target=process._run, args=arguments)
    thread.start()
    try:
        assert manager.next() == "READY=1\nSTATUS=ready"
        assert manager.next() == manager.next() == "WATCHDOG=1"
        is_stuck.set()
        wait_until(lambda: lines)
        assert re.match(r"worker 0 has made no progress for \d+ s: ", lines[0])
        manager.waiting()
        rounds = signals.rounds
        wait_until(lambda: signals.rounds > rounds + 50)
        assert manager.waiting() == []
        is_stuck.clear()
        wait_until(lambda: len(lines) == 2)
        assert manager.next() == "WATCHDOG=1"
    finally:
        signals.is_over = True
        thread.join(60)
        manager.close()


def test_the_log_says_when_a_server_is_not_ready_for_long() -> None:
    lines: list[str] = []
    readiness = process._Readiness(lines.append)
    readiness.look("partition 0 is 60.1 s behind", 10.0)
    readiness.look("partition 0 is 65.0 s behind", 14.9)
    assert lines == []
    readiness.look("partition 0 is 65.1 s behind", 15.0)
    readiness.look("partition 0 is 66.1 s behind", 16.0)
    assert lines == ["not ready: partition 0 is 65.1 s behind"]
    readiness.look(None, 17.0)
    assert lines[1:] == ["ready again"]
    readiness.look("partition 0 is catching_up", 18.0)
    readiness.look(None, 19.0)
    readiness.look("partition 0 is catching_up", 30.0)
    assert len(lines) == 2
