"""The gRPC port of a router whose servers are slow: one caller's calls delay nobody else's."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from petps.router.grpc import NAMES_AT_ONCE, RouterGrpcServer
from petps.server.grpc import admission
from tests.python.relay import relayed
from tests.python.waiting import wait_until

TIMEOUT = 30.0  # seconds, against hangs only
THREADS = 4
SLOW, OTHER = ((("authorization", f"Bearer petps_{name}"),) for name in ("slow", "other"))


class Servers:
    """Stand-in for the native router: its servers know each token, and let one caller wait."""

    def __init__(self) -> None:
        self.checks: list[str] = []  # the names of the threads that waited for a status
        self.answers = threading.Semaphore(0)  # to the statuses of the slow caller

    def knows(self, token: str, host: str) -> bool:
        return True

    def names(self, token: str, host: str) -> Any:
        return SimpleNamespace(leave=lambda: None)

    def check_sight(self, token: str, host: str) -> None:
        if token == "petps_slow":
            self.checks.append(threading.current_thread().name)
            assert self.answers.acquire(timeout=2 * TIMEOUT)

    def hold(self, count: int) -> None:
        """Count nothing."""

    def release(self, count: int) -> None:
        """Count nothing."""


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the port answer eight calls at once."""
    monkeypatch.setattr(admission, "MAX_CALLS", 8)


def start(servers: Servers, is_ready: Callable[[], bool]) -> RouterGrpcServer:
    """Return the port of a router before the servers."""
    return RouterGrpcServer(
        "127.0.0.1",
        0,
        cast(Any, servers),
        threads=THREADS,
        body_bytes=1 << 20,
        in_flight=256,
        status=lambda: {"kind": "router"},
        is_ready=is_ready,
        tls=None,
    )


@pytest.fixture
def port(servers: Servers) -> Iterator[int]:
    """Yield the port of a router before the servers."""
    server = start(servers, lambda: True)
    try:
        yield server.port
    finally:
        servers.answers.release(1000)
        server.close(0.0)


@pytest.fixture
def channel(port: int) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


def show_status(channel: grpc.Channel, credential: Any) -> Any:
    """Begin a call, and return its future."""
    status = stubs.PetpsStub(channel).Status
    return status.future(messages.StatusRequest(), timeout=TIMEOUT, metadata=credential)


def is_answered(call: Any) -> bool:
    return bool(json.loads(call.result().json) == {"kind": "router"})


def has_place(channel: grpc.Channel, credential: Any) -> bool:
    try:
        return is_answered(show_status(channel, credential))
    except grpc.RpcError:
        return False


def test_a_status_that_waits_for_a_server_delays_no_call(
    servers: Servers, channel: grpc.Channel
) -> None:
    status = show_status(channel, SLOW)
    wait_until(lambda: servers.checks)
    check = health_pb2_grpc.HealthStub(channel).Check
    reply = check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    assert not status.done()
    servers.answers.release()  # one check is enough, and none is in the loop's thread
    assert is_answered(status)
    assert [name.startswith("petps-grpc-call") for name in servers.checks] == [True]


def test_readiness_that_cannot_be_found_out_ends_no_port(servers: Servers) -> None:
    def is_ready() -> bool:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    server = start(servers, is_ready)
    try:
        server.update_health()
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            reply = check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not server.is_over
    finally:
        server.close(0.0)


def test_one_callers_statuses_leave_threads_to_others(
    servers: Servers, channel: grpc.Channel
) -> None:
    waiting = [show_status(channel, SLOW) for _ in range(3 * NAMES_AT_ONCE)]
    wait_until(lambda: len(servers.checks) >= THREADS // 2)
    for _ in range(10):
        assert is_answered(show_status(channel, OTHER))
    assert len(servers.checks) == THREADS // 2
    assert not any(call.done() for call in waiting)
    servers.answers.release(len(waiting))
    assert all(is_answered(call) for call in waiting)


def test_a_token_leaves_places_to_others_at_all_its_addresses(
    servers: Servers, few_places: None, port: int
) -> None:
    with contextlib.ExitStack() as stack:
        one, two = (
            stack.enter_context(grpc.insecure_channel(stack.enter_context(relayed(port, source))))
            for source in ("127.0.0.2", "127.0.0.3")
        )
        calls = {show_status(channel, SLOW): channel for channel in (one, two) for _ in range(4)}
        wait_until(lambda: any(call.done() for call in calls))
        (refused,) = (call for call in calls if call.done())
        assert "this caller, from all its addresses, has its 7" in refused.exception().details()
        has_room = calls.pop(refused)
        assert is_answered(show_status(has_room, OTHER))
        servers.answers.release(1000)
        assert all(is_answered(call) for call in calls)
        wait_until(lambda: has_place(has_room, SLOW))
