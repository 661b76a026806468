"""What a call passes before its request is read: nobody without a credential holds anything."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

import petps
import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from petps.errors import ResourceExhausted
from petps.server import Serving
from petps.server.access_file import AccessFile, Entry, hash_of
from petps.server.grpc import admission
from petps.server.grpc.admission import _Places
from petps.server.grpc.door import SERVICE
from tests.python.relay import relayed
from tests.python.server.conftest import Start, settings
from tests.python.server.grpc_calls import (
    TIMEOUT,
    pack_keys,
    refusal_of,
    wait_for_waiting_pulls,
)
from tests.python.waiting import wait_until

TOKEN = "petps_the-token-of-the-reader"
CREDENTIAL = (("authorization", f"Bearer {TOKEN}"),)
OTHER_TOKEN = "petps_the-token-of-another-one"
OTHER_CREDENTIAL = (("authorization", f"Bearer {OTHER_TOKEN}"),)
Channels = Callable[[Serving], grpc.Channel]
OPEN_METHODS = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


@pytest.fixture
def access(tmp_path: Path) -> AccessFile:
    file = AccessFile(tmp_path / "access.json")
    file.add(Entry(name="reader", token_sha256=hash_of(TOKEN), roles=["read"], models="*"))
    return file


@pytest.fixture
def guarded(pool: Path, access: AccessFile, tmp_path: Path) -> Iterator[Serving]:
    with Serving(settings(pool, access={"file": tmp_path / "access.json"})) as started:
        yield started


@contextlib.contextmanager
def unfinished() -> Iterator[Iterator[bytes]]:
    """Yield requests that never come, until the end of the block."""
    ended = threading.Event()

    def requests() -> Iterator[bytes]:
        ended.wait()
        yield from ()

    try:
        yield requests()
    finally:
        ended.set()


def test_strangers_are_refused_before_their_request(guarded: Serving, channels: Channels) -> None:
    channel = channels(guarded)
    for method in ("Pull", "PullMany", "Push", "Status", "ListTables", "SetHotKeys"):
        with unfinished() as requests:
            call = partial(channel.stream_unary(f"/{SERVICE}/{method}"), requests, timeout=TIMEOUT)
            code, _, _ = refusal_of(call)
        assert code is grpc.StatusCode.UNAUTHENTICATED, method
    with unfinished() as requests:
        watch = channel.stream_stream(f"/{SERVICE}/WatchVersions")(requests, timeout=TIMEOUT)
        code, _, _ = refusal_of(partial(next, watch))
    assert code is grpc.StatusCode.UNAUTHENTICATED


def test_a_request_must_arrive_in_time(
    guarded: Serving, channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "REQUEST_SECONDS", 0.05)
    channel = channels(guarded)
    for path in (f"/{SERVICE}/Pull", *OPEN_METHODS[:2]):
        with unfinished() as requests:
            call = channel.stream_stream(path)(requests, timeout=TIMEOUT, metadata=CREDENTIAL)
            code, text, _ = refusal_of(partial(next, call))
        assert (code, text) == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "the request was not complete after 0.05 s",
        ), path


def test_requests_that_are_no_messages_leave_no_line(
    guarded: Serving, channels: Channels, capfd: pytest.CaptureFixture[str]
) -> None:
    channel = channels(guarded)
    for path in (f"/{SERVICE}/Pull", f"/{SERVICE}/WatchVersions", *OPEN_METHODS):
        call = channel.stream_stream(path)(
            iter([b"\xff" * 9]), timeout=TIMEOUT, metadata=CREDENTIAL
        )
        code, text, _ = refusal_of(partial(next, call))
        assert code is grpc.StatusCode.INVALID_ARGUMENT, path
        assert "9 bytes are not the message" in text
        empty = channel.stream_unary(f"/{SERVICE}/Pull")
        code, text, _ = refusal_of(partial(empty, iter([]), timeout=TIMEOUT, metadata=CREDENTIAL))
        assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
    assert capfd.readouterr() == ("", "")


def test_a_peer_has_half_of_the_places() -> None:
    places = _Places(4)
    places.take("a")
    places.take("a")
    with pytest.raises(ResourceExhausted, match="a has its 2 calls of this kind already"):
        places.take("a")
    places.take("b")
    places.take("c")
    with pytest.raises(ResourceExhausted, match="there are 4 calls of this kind already"):
        places.take("d")
    places.give_back("a")
    places.take("d")


def test_a_caller_leaves_an_eighth_of_the_places() -> None:
    places = _Places(8)
    hosts = [host for host in "ab" for _ in range(4)]
    for host in hosts[:7]:
        places.take(host)
        places.take_share("caller x", "x", places.of_caller)
    places.take(hosts[7])
    with pytest.raises(ResourceExhausted, match="x has its 7 calls of this kind already"):
        places.take_share("caller x", "x", places.of_caller)
    places.take_share("caller y", "y", places.of_caller)
    places.give_share_back("caller x")
    places.take_share("caller x", "x", places.of_caller)
    for host in hosts:
        places.give_back(host)
    for owner in "xxxxxxxy":
        places.give_share_back(f"caller {owner}")
    assert not places._shares


@contextlib.contextmanager
def two_addresses(serving: Serving) -> Iterator[list[Any]]:
    """Yield a stub for each of two addresses that the server is called from."""
    with contextlib.ExitStack() as stack:
        targets = [
            stack.enter_context(relayed(serving.grpc_port or 0, source))
            for source in ("127.0.0.2", "127.0.0.3")
        ]
        yield [
            stubs.PetpsStub(stack.enter_context(grpc.insecure_channel(target)))
            for target in targets
        ]


def watch_with(stub: Any, metadata: Any = ()) -> Any:
    return stub.WatchVersions(messages.WatchVersionsRequest(), timeout=TIMEOUT, metadata=metadata)


def test_a_token_leaves_places_to_others_at_all_its_addresses(
    pool: Path, access: AccessFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_WATCHERS", 8)
    other = Entry(name="other", token_sha256=hash_of(OTHER_TOKEN), roles=["read"], models="*")
    access.add(other)
    guarded = Serving(settings(pool, access={"file": tmp_path / "access.json"}))
    with guarded, two_addresses(guarded) as clients:
        callers = [client for client in clients for _ in range(4)][:7]
        streams = [watch_with(client, CREDENTIAL) for client in callers]
        for stream in streams:
            next(stream)
        code, text, _ = refusal_of(partial(next, watch_with(clients[1], CREDENTIAL)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "this caller, from all its addresses, has its 7 calls of this kind" in text
        assert is_accepted(watch_with(clients[1], OTHER_CREDENTIAL))
        streams[0].cancel()
        wait_until(lambda: is_accepted(watch_with(clients[1], CREDENTIAL)))


def test_callers_without_a_name_share_no_places(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_WATCHERS", 4)
    with two_addresses(start()) as clients:
        streams = [watch_with(client) for client in clients for _ in range(2)]
        assert all(is_accepted(stream) for stream in streams)


def test_open_services_leave_places_for_calls(
    start: Start, channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_HEALTH_CALLS", 4)
    channel = channels(start())
    watch = channel.unary_stream(OPEN_METHODS[1])
    request = health_pb2.HealthCheckRequest().SerializeToString()
    streams = [watch(request, timeout=TIMEOUT) for _ in range(2)]
    for stream in streams:
        next(stream)
    code, text, _ = refusal_of(lambda: next(watch(request, timeout=TIMEOUT)))
    assert (code, text) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "127.0.0.1 has its 2 calls of this kind already: end one first",
    )
    pull = messages.PullRequest(table="items", keys=pack_keys(1))
    assert stubs.PetpsStub(channel).Pull(pull).rows.rows_found == 1
    streams[0].cancel()
    wait_until(lambda: is_accepted(watch(request, timeout=TIMEOUT)))


def is_accepted(stream: Any) -> bool:
    try:
        next(stream)
    except grpc.RpcError:
        return False
    return True


def test_requests_and_replies_count_in_the_memory(start: Start, channels: Channels) -> None:
    serving = start(server={"limits": {"body_bytes": 1 << 20, "memory_bytes": 5 << 20}})
    stub = stubs.PetpsStub(channels(serving))
    calls = serving._server.calls
    request = messages.PullRequest(table="items", keys=np.zeros(16_000, "<u8").tobytes())
    before = serving._server.stats()["memory_used_bytes"]
    calls.hold(4 << 20)
    calls.hold((1 << 20) - (100 << 10))
    code, text, _ = refusal_of(lambda: stub.Pull(request))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "memory for requests and replies is used up" in text
    calls.release((5 << 20) - (100 << 10))
    assert stub.Pull(request).rows.rows_found == 16_000
    wait_until(lambda: serving._server.stats()["memory_used_bytes"] == before)


def test_a_pull_that_waits_ends_with_its_grant(
    guarded: Serving, channels: Channels, access: AccessFile
) -> None:
    stub = stubs.PetpsStub(channels(guarded))
    request = messages.PullRequest(
        table="items", keys=pack_keys(1), min_version=9, wait_ms=round(1e3 * TIMEOUT)
    )
    waiting = stub.Pull.future(request, timeout=2 * TIMEOUT, metadata=CREDENTIAL)
    wait_for_waiting_pulls(guarded)
    access.remove("reader")
    code, text, trailing = refusal_of(waiting.result)
    assert (code, text) == (grpc.StatusCode.UNAUTHENTICATED, "the grant of 'reader' was revoked")
    assert trailing["petps-code"] == "UNAUTHENTICATED"


# ---- a peer that reads no reply


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Return a frame of HTTP/2 (RFC 9113, section 4.1)."""
    return (
        struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body
    )


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header field that is not indexed (RFC 7541, section 6.2.2)."""
    assert len(name) < 127
    assert len(value) < 127
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def test_an_unread_reply_counts_until_its_connection_ends(start: Start, tmp_path: Path) -> None:
    with petps.open(tmp_path / "pool") as opened:
        opened.create_table("wide", dim=4096, capacity=100)
        opened.push("wide", np.arange(100, dtype=np.uint64), np.ones((100, 4096), np.float32))
    serving = start()
    keys = pack_keys(*range(100))
    message = messages.PullRequest(table="wide", keys=keys).SerializeToString()
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", f"/{SERVICE}/Pull".encode()),
        (b":authority", b"petps"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
    no_window = struct.pack(">HI", 4, 0)  # SETTINGS_INITIAL_WINDOW_SIZE

    def held() -> int:
        return int(serving._server.stats()["memory_used_bytes"])

    before = held()
    with socket.create_connection(("127.0.0.1", serving.grpc_port or 0), timeout=TIMEOUT) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, no_window))
        peer.sendall(frame(1, 4, 1, b"".join(literal(*header) for header in headers)))
        peer.sendall(frame(0, 1, 1, struct.pack(">BI", 0, len(message)) + message))
        wait_until(lambda: serving._server.stats()["pulls"] == 1)
        wait_until(lambda: not serving._grpc._service._in_flight)  # only the reply is left
        wait_until(lambda: held() >= before + 100 * 4 * 4096)  # a moment after the call's end
    wait_until(lambda: held() == before)
