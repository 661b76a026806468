"""What attackers of the gRPC and HTTP doors found, and a server must stand."""

from __future__ import annotations

import contextlib
import gc
import http.client
import logging
import os
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from petps import log as process_log
from petps.errors import Unavailable
from petps.server import Serving
from petps.server.access_file import AccessFile, Entry, hash_of
from petps.server.grpc import admission
from petps.server.grpc.door import SERVICE
from petps.server.grpc.limits import OPEN_REQUEST_BYTES
from tests.python.server.conftest import Start
from tests.python.server.grpc_calls import (
    TIMEOUT,
    commit,
    pack_keys,
    refusal_of,
    wait_for_waiting_pulls,
)
from tests.python.server.test_grpc_admission import (
    CREDENTIAL,
    OPEN_METHODS,
    TOKEN,
    Channels,
    access,
    frame,
    guarded,
    literal,
    unfinished,
)
from tests.python.waiting import wait_until

__all__ = ["access", "guarded"]  # fixtures

PULL = messages.PullRequest(table="items", keys=pack_keys(1))


@contextlib.contextmanager
def sent_path(serving: Serving, path: bytes) -> Iterator[None]:
    """Send a request with a path, also one that is no text, which grpcio cannot read."""
    headers = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"petps"),
        (b"te", b"trailers"), (b"content-type", b"application/grpc"),
    ]  # fmt: skip
    port = serving.grpc_port or 0
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
        peer.sendall(frame(1, 5, 1, b"".join(literal(*header) for header in headers)))
        yield


def test_a_path_that_is_no_text_does_not_end_the_door(
    guarded: Serving,
    channels: Channels,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = guarded.grpc_port
    door = guarded._grpc
    assert door is not None
    for _ in range(2):
        before = door.restarts
        with sent_path(guarded, b"/\xff"):
            wait_until(partial(lambda before: door.restarts == before + 1, before))
        stub = stubs.PetpsStub(channels(guarded))
        reply = stub.Pull(PULL, timeout=TIMEOUT, metadata=CREDENTIAL, wait_for_ready=True)
        assert reply.rows.rows_found == 1
    assert guarded.grpc_port == port
    assert caplog.text.count("had ended, and is started again (restarts: 1)") == 1
    # A port that is taken for a while is tried until it is free, with one line.
    tried: list[str] = []

    def taken(server: grpc.aio.Server) -> int:
        tried.append("again")
        raise Unavailable("the port is taken")

    with monkeypatch.context() as patched:
        patched.setattr(door, "_listen", taken)
        with sent_path(guarded, b"/\xff"):
            wait_until(lambda: len(tried) >= 3)
            assert guarded.status()["problems"][0]["key"] == "grpc-failed"
    stub = stubs.PetpsStub(channels(guarded))
    reply = stub.Pull(PULL, timeout=TIMEOUT, metadata=CREDENTIAL, wait_for_ready=True)
    assert reply.rows.rows_found == 1
    assert door.restarts == 3
    assert [problem["key"] for problem in guarded.status()["problems"]] == ["grpc-restarted"]
    assert caplog.text.count("cannot be started again: the port is taken") == 1


def note_receiving(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each call adds its caller's name, before its request is received."""
    names: list[str] = []
    received = admission.Admission._received

    async def noted(self: admission.Admission, host: str, name: str, *rest: Any) -> Any:
        names.append(name)
        return await received(self, host, name, *rest)

    monkeypatch.setattr(admission.Admission, "_received", noted)
    return names


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_refused_call_leaves_nothing_in_memory(guarded: Serving, channels: Channels) -> None:
    stub = stubs.PetpsStub(channels(guarded))
    push = messages.PushRequest(
        table="items", keys=np.arange(1 << 16, dtype="<u8").tobytes(), rows=bytes(16 << 16)
    )

    def refused() -> None:
        code, _, _ = refusal_of(partial(stub.Push, push, timeout=TIMEOUT, metadata=CREDENTIAL))
        assert code is grpc.StatusCode.PERMISSION_DENIED

    with no_collector():
        for _ in range(5):  # what the first calls need once
            refused()
        before = resident_bytes()
        for _ in range(60):
            refused()
        # gRPC's threads free the last ones a moment later.
        wait_until(lambda: resident_bytes() - before < 20 * push.ByteSize())


def test_a_grant_that_is_revoked_while_the_request_arrives_is_refused(
    guarded: Serving, channels: Channels, access: AccessFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, go_on = channels(guarded), threading.Event()
    receiving = note_receiving(monkeypatch)

    def late() -> Iterator[bytes]:
        assert go_on.wait(TIMEOUT)
        yield PULL.SerializeToString()

    call = channel.stream_unary(f"/{SERVICE}/Pull").future(
        late(), timeout=TIMEOUT, metadata=CREDENTIAL
    )
    gate = guarded._credentials.gate
    before = gate.generation
    wait_until(lambda: receiving)
    access.remove("reader")
    wait_until(lambda: gate.generation > before)
    go_on.set()
    code, text, _ = refusal_of(call.result)
    assert (code, text) == (grpc.StatusCode.UNAUTHENTICATED, "the grant of 'reader' was revoked")


def test_a_grant_that_loses_the_model_while_its_pull_waits_gets_no_rows(
    guarded: Serving, channels: Channels, access: AccessFile
) -> None:
    stub = stubs.PetpsStub(channels(guarded))
    request = messages.PullRequest(
        table="items", keys=pack_keys(1), min_version=9, wait_ms=round(1e3 * TIMEOUT)
    )
    waiting = stub.Pull.future(request, timeout=2 * TIMEOUT, metadata=CREDENTIAL)
    wait_for_waiting_pulls(guarded)
    before = guarded._credentials.gate.generation
    access.remove("reader")
    access.add(Entry(name="reader", token_sha256=hash_of(TOKEN), roles=["read"], models=["other"]))
    wait_until(lambda: guarded._credentials.gate.generation > before)
    commit(guarded, 9)
    assert refusal_of(waiting.result)[0] in (
        grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED,
    )  # fmt: skip


def test_a_cancelled_pull_gives_its_place_up(start: Start, channels: Channels) -> None:
    serving = start()
    stub = stubs.PetpsStub(channels(serving))

    def held() -> int:
        return int(serving._server.stats()["memory_used_bytes"])

    before = held()
    request = messages.PullRequest(
        table="items", keys=np.zeros(16_000, "<u8").tobytes(), min_version=9, wait_ms=600_000
    )
    waiting = stub.Pull.future(request, timeout=600)
    wait_for_waiting_pulls(serving)
    assert held() > before
    waiting.cancel()
    wait_until(lambda: held() == before, 30.0)


def test_a_request_without_a_credential_is_short(guarded: Serving, channels: Channels) -> None:
    channel = channels(guarded)
    name = "x" * OPEN_REQUEST_BYTES
    request = health_pb2.HealthCheckRequest(service=name).SerializeToString()
    for path in OPEN_METHODS[:2]:
        call = channel.stream_stream(path)(iter([request]), timeout=TIMEOUT)
        code, text, _ = refusal_of(partial(next, call))
        assert code is grpc.StatusCode.INVALID_ARGUMENT, path
        assert "without a credential, it has at most 4096" in text
    call = channel.stream_stream(OPEN_METHODS[2])(iter([bytes(5000)]), timeout=TIMEOUT)
    code, text, _ = refusal_of(partial(next, call))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "without a credential, it has at most 4096" in text


def test_strangers_do_not_keep_others_from_sending(
    guarded: Serving, channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "OPEN_REQUESTS_RECEIVED", 1)
    receiving = note_receiving(monkeypatch)
    channel = channels(guarded)
    with contextlib.ExitStack() as stack:
        check = channel.stream_stream(OPEN_METHODS[0])
        calls = [
            check(stack.enter_context(unfinished()), timeout=TIMEOUT, wait_for_ready=True)
            for _ in range(4)
        ]
        wait_until(lambda: len(receiving) == 4)
        stub = stubs.PetpsStub(channel)
        assert stub.Pull(PULL, timeout=TIMEOUT, metadata=CREDENTIAL).rows.rows_found == 1
        for call in calls:
            call.cancel()


def test_the_wait_for_a_place_to_send_is_part_of_the_time(
    guarded: Serving, channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "REQUESTS_RECEIVED", 1)
    receiving = note_receiving(monkeypatch)
    channel = channels(guarded)
    pull = channel.stream_unary(f"/{SERVICE}/Pull")
    with unfinished() as never, unfinished() as later:
        first = pull.future(never, timeout=TIMEOUT, metadata=CREDENTIAL)
        wait_until(lambda: len(receiving) == 1)
        monkeypatch.setattr(admission, "REQUEST_SECONDS", 0.1)
        second = pull.future(later, timeout=TIMEOUT, metadata=CREDENTIAL)
        code, text, _ = refusal_of(second.result)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "was not complete after" in text
        first.cancel()


def test_a_dropped_table_tells_no_names(start: Start, channels: Channels) -> None:
    serving = start()
    stub = stubs.PetpsStub(channels(serving))
    assert stub.Pull(PULL, timeout=TIMEOUT).rows.rows_found == 1
    serving._tables.drop_table(serving._tables.find("default@0", "items").record.id)
    code, text, _ = refusal_of(partial(stub.Pull, PULL, timeout=TIMEOUT))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "this pool has" not in text


def answer_to(serving: Serving, head: str) -> tuple[int, str | None]:
    """Return the status of the answer, and its policy for a browser."""
    port = serving.http_port or 0
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as peer:
        peer.sendall(head.encode())
        response = http.client.HTTPResponse(peer)
        response.begin()
        response.read()
        return response.status, response.headers["Content-Security-Policy"]


def test_odd_http_requests_are_refused_without_a_line(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    serving = start()
    long = f"POST /switch HTTP/1.1\r\nHost: localhost\r\nContent-Length: {'9' * 5000}\r\n\r\n"
    assert answer_to(serving, long)[0] == 413
    headers = "".join(f"X-{i}: {'y' * 1000}\r\n" for i in range(80))
    wide = f"GET /livez HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n"
    assert answer_to(serving, wide)[0] == 431
    for head in (long, wide, "BREW / HTTP/1.1\r\n\r\n"):
        assert "default-src" in (answer_to(serving, head)[1] or ""), head
    accept = "application/openmetrics-text;version=abc"
    odd = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n\r\n"
    assert answer_to(serving, odd)[0] == 200
    assert "failed" not in caplog.text


def test_grpcio_writes_nothing_of_what_peers_send() -> None:
    process_log.set_up("text", "info")
    assert not logging.getLogger("grpc._cython.cygrpc").isEnabledFor(logging.CRITICAL)
