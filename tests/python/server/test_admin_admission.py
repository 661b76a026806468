"""The admin port: nobody without a credential holds a call, and a revoked grant ends its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

import petps.admin.admin_pb2 as messages
from petps import _native
from petps.admin.admin_pb2_grpc import AdminStub
from petps.pool.pool import Pool
from petps.server import Serving, admin, admin_requests
from petps.server.access_file import AccessFile, Entry, hash_of
from tests.python.server.conftest import settings
from tests.python.server.grpc_calls import TIMEOUT, refusal_of

TOKEN = "petps_the-token-of-the-admin"
CREDENTIAL = (("authorization", f"Bearer {TOKEN}"),)
STATUS = "/petps.admin.v1.Admin/Status"

# The second one after too many failed logins.
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.fixture
def access(tmp_path: Path) -> AccessFile:
    file = AccessFile(tmp_path / "access.json")
    file.add(Entry(name="boss", token_sha256=hash_of(TOKEN), roles=["admin"], models="*"))
    return file


@pytest.fixture
def channel(pool: Path, access: AccessFile, tmp_path: Path) -> Iterator[grpc.Channel]:
    configured = settings(pool, server={"admin_port": 0}, access={"file": tmp_path / "access.json"})
    with (
        Serving(configured) as serving,
        grpc.insecure_channel(f"127.0.0.1:{serving.admin_port}") as opened,
    ):
        yield opened


@pytest.fixture
def requests() -> Iterator[Callable[[], Iterator[bytes]]]:
    """Return a function that returns requests which never come."""
    ended = threading.Event()

    def unfinished() -> Iterator[bytes]:
        ended.wait()
        yield from ()

    yield unfinished
    ended.set()


def test_strangers_are_refused_before_their_request(
    channel: grpc.Channel, requests: Callable[[], Iterator[bytes]]
) -> None:
    for _ in range(2 * admin.MAX_CALLS):
        call = partial(channel.stream_unary(STATUS), requests(), timeout=TIMEOUT)
        code, _, _ = refusal_of(call)
        assert code in REFUSED
    stream = channel.stream_stream("/petps.admin.v1.Admin/Verify")(requests(), timeout=TIMEOUT)
    code, _, _ = refusal_of(partial(next, stream))
    assert code in REFUSED
    assert AdminStub(channel).Status(messages.StatusRequest(), metadata=CREDENTIAL).text


def test_a_request_must_arrive_in_time(
    channel: grpc.Channel,
    requests: Callable[[], Iterator[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin_requests, "REQUEST_SECONDS", 0.05)
    call = channel.stream_unary(STATUS)
    # The server cancels the call, which is all that gRPC then tells.
    code, _, _ = refusal_of(partial(call, requests(), metadata=CREDENTIAL, timeout=TIMEOUT))
    assert code is grpc.StatusCode.CANCELLED


def test_requests_that_are_no_messages_leave_no_line(
    channel: grpc.Channel, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("SetLogLevel", "Verify"):
        call = channel.stream_stream(f"/petps.admin.v1.Admin/{name}")
        for sent, expected in (([b"\xff" * 9], "9 bytes are not the message"), ([], "no request")):
            code, text, _ = refusal_of(
                partial(next, call(iter(sent), metadata=CREDENTIAL, timeout=TIMEOUT))
            )
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert expected in text
    assert capfd.readouterr() == ("", "")


def test_long_work_ends_with_its_grant(
    channel: grpc.Channel, access: AccessFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def shrink(pool: Pool, progress: Callable[[int, int], bool]) -> int:
        while progress(1, 2):
            ended.wait(0.01)
        ended.set()
        return 1

    monkeypatch.setattr("petps.server.admin.AuditedPool.shrink", shrink)
    call: Any = AdminStub(channel).Shrink(
        messages.ShrinkRequest(), metadata=CREDENTIAL, timeout=TIMEOUT
    )
    assert next(call).bytes == 2
    access.remove("boss")
    code, text, _ = refusal_of(lambda: list(call))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "the grant was revoked" in text
    assert ended.wait(TIMEOUT)


def test_calls_of_the_open_port_need_no_grant() -> None:
    gate = _native.Gate("open")
    assert gate.renew(gate.authenticate("", [], "1.2.3.4:5")) is not None
