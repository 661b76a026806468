"""gRPC: health, reflection, drain, and hostile clients."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from petps.errors import Unavailable
from petps.server import Serving
from petps.server.grpc.door import SERVICE
from petps.server.grpc.limits import CONNECTION_LIMITS
from petps.server.ingest.status import PartitionHealth
from tests.python.native.superblock import is_clean
from tests.python.server.conftest import Start, settings
from tests.python.server.grpc_calls import (
    TIMEOUT,
    commit,
    pack_keys,
    read_until,
    refusal_of,
    wait_for_waiting_pulls,
)

Stub = Any
PULL = messages.PullRequest


# ---- health, reflection, life


def health_of(channel: grpc.Channel, service: str = SERVICE) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    status: int = health_pb2_grpc.HealthStub(channel).Check(request).status
    return status


def wait_for_health(channel: grpc.Channel, expected: int) -> None:
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    stream = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=TIMEOUT)
    for reply in stream:
        if reply.status == expected:
            stream.cancel()
            return


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_health_reports_a_fault_of_the_pool(
    serving: Serving,
    channels: Callable[[Serving], grpc.Channel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = channels(serving)
    assert health_of(channel) == SERVING
    assert health_of(channel, "") == SERVING
    code, _, _ = refusal_of(lambda: health_of(channel, "petps.v1.Other"))
    assert code is grpc.StatusCode.NOT_FOUND
    monkeypatch.setattr(serving, "_fault", lambda: "a write-back failed")
    wait_for_health(channel, NOT_SERVING)
    monkeypatch.undo()
    wait_for_health(channel, SERVING)


def test_health_reports_partitions_that_lag_or_stop(
    start: Start, channels: Callable[[Serving], grpc.Channel], tmp_path: Path
) -> None:
    serving = start(server={"ready_lag_seconds": 5.0}, ingest={"log": tmp_path / "log"})
    channel = channels(serving)
    wait_for_health(channel, SERVING)
    ingest = serving._ingest
    for state, lag, expected in [
        ("following", 4.0, SERVING),
        ("following", 6.0, NOT_SERVING),
        ("following", 0.0, SERVING),
        ("following", None, NOT_SERVING),
        ("unreachable", 4.0, SERVING),
        ("unreachable", 6.0, NOT_SERVING),
        ("passing", 0.0, SERVING),
        ("full", 0.0, NOT_SERVING),
        ("blocked", 0.0, NOT_SERVING),
        ("starting", 0.0, NOT_SERVING),
        ("catching_up", 0.0, NOT_SERVING),
        ("following", 0.0, SERVING),
        ("stale", 0.0, NOT_SERVING),
    ]:
        partition = PartitionHealth(3, "default@1", state, "why", lag)
        serving._ingest = SimpleNamespace(health=lambda partition=partition: [partition])
        wait_for_health(channel, expected)
    assert serving._unready() == "partition 3 is stale: why"
    # An instance that is loaded beside the served one does not count.
    partition = PartitionHealth(3, "default@2", "catching_up", "", None)
    serving._ingest = SimpleNamespace(health=lambda: [partition])
    wait_for_health(channel, SERVING)
    serving._ingest = ingest


def test_reflection_lists_services_and_methods(
    start: Start, channels: Callable[[Serving], grpc.Channel]
) -> None:
    database = ProtoReflectionDescriptorDatabase(channels(start()))
    assert set(database.get_services()) == {
        "petps.v1.Petps",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    file = database.FindFileContainingSymbol("petps.v1.Petps")
    assert {method.name for method in file.service[0].method} == {
        "ListTables",
        "Pull",
        "PullMany",
        "Push",
        "ReadShardMap",
        "SetHotKeys",
        "Status",
        "WatchVersions",
    }


def test_a_drain_answers_calls_in_flight(
    serving: Serving, channels: Callable[[Serving], grpc.Channel], pool: Path
) -> None:
    channel = channels(serving)
    stub = stubs.PetpsStub(channel)
    watching = stub.WatchVersions(messages.WatchVersionsRequest(), timeout=TIMEOUT)
    next(watching)
    health = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(), timeout=TIMEOUT
    )
    assert next(health).status == SERVING
    waiting = stub.Pull.future(
        PULL(table="items", keys=pack_keys(1), min_version=7, wait_ms=60_000), timeout=TIMEOUT
    )
    wait_for_waiting_pulls(serving)
    serving.close()
    assert next(health).status == NOT_SERVING
    # As at the native port, a waiting pull gets STALE instead of a cut connection.
    code, _, details = refusal_of(waiting.result)
    assert (code, details["petps-code"]) == (grpc.StatusCode.UNAVAILABLE, "STALE")
    code, text, _ = refusal_of(lambda: next(watching))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "stopping" in text
    code, _, _ = refusal_of(lambda: stub.Status(messages.StatusRequest()))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert is_clean(pool)


def test_new_calls_are_refused_while_draining(serving: Serving, stub: Stub) -> None:
    serving._grpc.drain()
    code, text, details = refusal_of(lambda: stub.Status(messages.StatusRequest()))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "stopping" in text
    assert details["petps-code"] == "UNAVAILABLE"


def test_grpc_can_be_switched_off(start: Start) -> None:
    assert start(server={"grpc": False}).grpc_port is None


def test_a_grpc_port_in_use_leaves_the_pool_clean(pool: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(Unavailable, match=f"gRPC address 127.0.0.1:{port} is not available"):
            Serving(settings(pool, server={"grpc_port": port}))
    assert is_clean(pool)


# ---- hostile peers


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(256)) * 40,
        bytes(100_000),
        b"\xff" * 7,
    ],
)
def test_garbage_of_one_client_does_not_disturb_others(
    serving: Serving, stub: Stub, garbage: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", serving.grpc_port or 0), TIMEOUT) as peer:
        peer.sendall(garbage)
        assert stub.Pull(PULL(table="items", keys=pack_keys(1))).rows.rows_found == 1


def test_bad_messages_and_unknown_methods_are_refused(
    start: Start, channels: Callable[[Serving], grpc.Channel]
) -> None:
    channel = channels(start())
    raw = channel.unary_unary(f"/{SERVICE}/Pull")
    for body in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b"\x1a\x05abc"):
        code, _, _ = refusal_of(partial(raw, body))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    code, _, _ = refusal_of(lambda: channel.unary_unary(f"/{SERVICE}/Fly")(b""))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert (
        stubs.PetpsStub(channel).Pull(PULL(table="items", keys=pack_keys(1))).rows.rows_found == 1
    )


def test_cancelled_calls_leave_no_state(serving: Serving, stub: Stub) -> None:
    service = serving._grpc._service
    for _ in range(50):
        streams = [
            stub.WatchVersions(messages.WatchVersionsRequest(), timeout=TIMEOUT) for _ in range(5)
        ]
        pulls = [
            stub.Pull.future(
                PULL(table="items", keys=pack_keys(1), min_version=99, wait_ms=200), timeout=TIMEOUT
            )
            for _ in range(5)
        ]
        next(streams[0])
        for call in [*streams, *pulls]:
            call.cancel()
    tick = threading.Event()
    while service._watching or service._in_flight or service._versions._watchers:
        tick.wait(0.01)
    while service._calls._futures:
        tick.wait(0.01)
    assert service._versions._task is None
    assert stub.Pull(PULL(table="items", keys=pack_keys(1))).rows.rows_found == 1


def test_silent_connections_are_closed_and_bounded(
    start: Start, channels: Callable[[Serving], grpc.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"max_allowed_incoming_connections": 2, "server_handshake_timeout_ms": 5000}
    limits = dict(CONNECTION_LIMITS) | {f"grpc.{key}": value for key, value in small.items()}
    assert len(limits) == len(CONNECTION_LIMITS), "the names must be those in use"
    monkeypatch.setattr("petps.server.grpc.door.CONNECTION_LIMITS", tuple(limits.items()))
    serving = start()
    address = ("127.0.0.1", serving.grpc_port)
    peers = [socket.create_connection(address, timeout=TIMEOUT) for _ in range(4)]
    answers = []
    for peer in peers:  # each is closed; one with a place receives the settings of HTTP/2 before
        with peer:
            answers.append(b"".join(iter(lambda: peer.recv(4096), b"")))  # noqa: B023
    assert [bool(answer) for answer in answers] == [True, True, False, False]
    assert health_of(channels(serving)) == SERVING


def test_too_many_watchers_are_refused(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petps.server.grpc.watch.MAX_WATCHERS", 2)
    request = messages.WatchVersionsRequest()
    streams = [stub.WatchVersions(request, timeout=TIMEOUT) for _ in range(2)]
    for stream in streams:
        next(stream)
    code, text, _ = refusal_of(lambda: next(stub.WatchVersions(request, timeout=TIMEOUT)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "2 calls watch versions" in text
    for stream in streams:
        stream.cancel()


def test_a_slow_watcher_holds_one_change_for_each_instance(serving: Serving, stub: Stub) -> None:
    versions = serving._grpc._service._versions
    stream = stub.WatchVersions(messages.WatchVersionsRequest(), timeout=TIMEOUT)
    next(stream)
    (watcher,) = versions._watchers
    for version in range(1, 200):
        commit(serving, version)
    assert len(watcher.pending) <= 1
    read_until(stream, "default@0", lambda change: change.instance.applied_version == 199)
    stream.cancel()
