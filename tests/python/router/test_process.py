"""Health and readiness of a router: what its threads and its servers do."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from petps.config import RouterConfig, TlsConfig
from petps.router.process import Routing
from tests.python.waiting import wait_until


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Return a socket that accepts connections, as a server that hangs does."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening


@pytest.fixture
def routing(server: socket.socket) -> Iterator[Routing]:
    config = RouterConfig(
        servers=f"petps://127.0.0.1:{server.getsockname()[1]}",
        port=0, grpc=False, http=False, workers=4,
    )  # fmt: skip
    with Routing(config, TlsConfig(), log=lambda line: None) as routing:
        yield routing


class Workers:
    """Stand-in for the native router: the counts of its workers, and what its callers saw."""

    def __init__(self, routing: Routing) -> None:
        self._native = routing._router
        self.counts = [0, 0, 0, 0]
        self.servers: dict[str, bool] = {}

    def progress(self) -> list[int]:
        return list(self.counts)

    def stats(self) -> dict[str, object]:
        return {"servers": self.servers}

    def __getattr__(self, name: str) -> object:
        return getattr(self._native, name)


def test_workers_that_take_turns_make_progress(
    routing: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle worker counts twice a second, and not at the same time as the others."""
    workers = Workers(routing)
    now = [0.0]
    monkeypatch.setattr(routing, "_router", workers)
    monkeypatch.setattr(routing._progress, "_clock", lambda: now[0])
    for look in range(2000):
        for number in range(4):
            workers.counts[number] += look % 2 == number % 2
        routing.tend()
        now[0] += 0.25
        assert routing.fault() is None, look
    for _ in range(400):
        workers.counts[0] += 1
        routing.tend()
        now[0] += 0.25
    fault = routing.fault()
    assert fault is not None
    assert "has made no progress for" in fault
    assert "restart the router" in fault


def test_a_router_whose_servers_answer_no_caller_is_not_ready(
    routing: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel accepts connections also for a server that hangs."""
    workers = Workers(routing)
    monkeypatch.setattr(routing, "_router", workers)
    wait_until(lambda: routing.unready() is None)
    workers.servers = {"h1:7070": False, "h2:7070": True}
    assert routing.unready() is None
    workers.servers = {"h1:7070": False, "h2:7070": False}
    assert routing.unready() == "no server answers its callers (h1:7070, h2:7070)"
