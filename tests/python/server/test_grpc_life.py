"""Health, reflection, drain, and hostile bytes at the gRPC port."""

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
from petps.server.ingest.status import PartitionHealth
from tests.python.native.superblock import is_clean
from tests.python.server.conftest import Start, settings
from tests.python.server.grpc_calls import TIMEOUT, await_parked, commit, packed, refused, until

Stub = Any
PULL = messages.PullRequest


# ---- health, reflection, life


def health_of(channel: grpc.Channel, service: str = SERVICE) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    status: int = health_pb2_grpc.HealthStub(channel).Check(request).status
    return status


def await_health(channel: grpc.Channel, wanted: int) -> None:
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    stream = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=TIMEOUT)
    for reply in stream:
        if reply.status == wanted:
            stream.cancel()
            return


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_health(
    start: Start,
    channels: Callable[[Serving], grpc.Channel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving = start()
    channel = channels(serving)
    assert health_of(channel) == SERVING
    assert health_of(channel, "") == SERVING
    code, _, _ = refused(lambda: health_of(channel, "petps.v1.Other"))
    assert code is grpc.StatusCode.NOT_FOUND
    monkeypatch.setattr(serving, "_fault", lambda: "a write-back failed")
    await_health(channel, NOT_SERVING)
    monkeypatch.undo()
    await_health(channel, SERVING)


def test_health_tells_old_rows_when_asked_to(
    start: Start, channels: Callable[[Serving], grpc.Channel], tmp_path: Path
) -> None:
    serving = start(server={"ready_lag_seconds": 5.0}, ingest={"log": tmp_path / "log"})
    channel = channels(serving)
    await_health(channel, SERVING)
    followed = serving._ingest
    for state, lag, wanted in [
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
        serving._ingest = SimpleNamespace(health=lambda found=partition: [found])
        await_health(channel, wanted)
    assert serving._unready() == "partition 3 is stale: why"
    # An instance that is loaded beside the one that clients are served from.
    partition = PartitionHealth(3, "default@2", "catching_up", "", None)
    serving._ingest = SimpleNamespace(health=lambda: [partition])
    await_health(channel, SERVING)
    serving._ingest = followed


def test_reflection(start: Start, channels: Callable[[Serving], grpc.Channel]) -> None:
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
        "SetHotKeys",
        "Status",
        "WatchVersions",
    }


def test_drain_answers_what_is_in_flight(
    start: Start, channels: Callable[[Serving], grpc.Channel], pool: Path
) -> None:
    serving = start()
    channel = channels(serving)
    stub = stubs.PetpsStub(channel)
    watching = stub.WatchVersions(messages.WatchVersionsRequest(), timeout=TIMEOUT)
    next(watching)
    health = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(), timeout=TIMEOUT
    )
    assert next(health).status == SERVING
    waiting = stub.Pull.future(
        PULL(table="items", keys=packed(1), min_version=7, wait_ms=60_000), timeout=TIMEOUT
    )
    await_parked(serving)
    serving.close()
    assert next(health).status == NOT_SERVING
    # As at the native port, a waiting pull gets STALE, and its connection is not cut.
    code, _, details = refused(waiting.result)
    assert (code, details["petps-code"]) == (grpc.StatusCode.UNAVAILABLE, "STALE")
    code, text, _ = refused(lambda: next(watching))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "stopping" in text
    code, _, _ = refused(lambda: stub.Status(messages.StatusRequest()))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert is_clean(pool)


def test_new_calls_are_refused_while_draining(
    start: Start, connect: Callable[[Serving], Stub]
) -> None:
    serving = start()
    serving._grpc.drain()
    code, text, details = refused(lambda: connect(serving).Status(messages.StatusRequest()))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "stopping" in text
    assert details["petps-code"] == "UNAVAILABLE"


def test_without_grpc(start: Start) -> None:
    assert start(server={"grpc": False}).grpc_port is None


def test_port_in_use_undoes_everything(pool: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
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
def test_garbage(start: Start, connect: Callable[[Serving], Stub], garbage: bytes) -> None:
    serving = start()
    with socket.create_connection(("127.0.0.1", serving.grpc_port or 0), TIMEOUT) as peer:
        peer.sendall(garbage)
        assert connect(serving).Pull(PULL(table="items", keys=packed(1))).rows.rows_found == 1


def test_messages_that_are_none(start: Start, channels: Callable[[Serving], grpc.Channel]) -> None:
    channel = channels(start())
    raw = channel.unary_unary(f"/{SERVICE}/Pull")
    for body in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b"\x1a\x05abc"):
        code, _, _ = refused(partial(raw, body))
        assert code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    code, _, _ = refused(lambda: channel.unary_unary(f"/{SERVICE}/Fly")(b""))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert stubs.PetpsStub(channel).Pull(PULL(table="items", keys=packed(1))).rows.rows_found == 1


def test_cancelled_streams_leave_nothing(start: Start, connect: Callable[[Serving], Stub]) -> None:
    serving = start()
    stub = connect(serving)
    service = serving._grpc._service
    for _ in range(50):
        streams = [
            stub.WatchVersions(messages.WatchVersionsRequest(), timeout=TIMEOUT) for _ in range(5)
        ]
        pulls = [
            stub.Pull.future(
                PULL(table="items", keys=packed(1), min_version=99, wait_ms=200), timeout=TIMEOUT
            )
            for _ in range(5)
        ]
        next(streams[0])
        for each in [*streams, *pulls]:
            each.cancel()
    tick = threading.Event()
    while service._watching or service._in_flight or service._versions._watchers:
        tick.wait(0.01)
    while service._calls._futures:
        tick.wait(0.01)
    assert service._versions._task is None
    assert stub.Pull(PULL(table="items", keys=packed(1))).rows.rows_found == 1


def test_too_many_watchers(
    start: Start, connect: Callable[[Serving], Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petps.server.grpc.watch.MAX_WATCHERS", 2)
    stub = connect(start())
    request = messages.WatchVersionsRequest()
    streams = [stub.WatchVersions(request, timeout=TIMEOUT) for _ in range(2)]
    for stream in streams:
        next(stream)
    code, text, _ = refused(lambda: next(stub.WatchVersions(request, timeout=TIMEOUT)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "2 calls watch versions" in text
    for stream in streams:
        stream.cancel()


def test_a_slow_watcher_holds_one_change_an_instance(
    start: Start, connect: Callable[[Serving], Stub]
) -> None:
    serving = start()
    versions = serving._grpc._service._versions
    stream = connect(serving).WatchVersions(messages.WatchVersionsRequest(), timeout=TIMEOUT)
    next(stream)
    (watcher,) = versions._watchers
    for version in range(1, 200):
        commit(serving, version)
    assert len(watcher.pending) <= 1
    until(stream, "default@0", lambda change: change.instance.applied_version == 199)
    stream.cancel()
