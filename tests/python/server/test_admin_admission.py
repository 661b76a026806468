"""The admin port: nobody without a credential holds a call, and a revoked grant ends its calls."""

from __future__ import annotations

import json
import re
import socket
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
from petps.errors import ResourceExhausted
from petps.pool.pool import Pool
from petps.server import Serving, admin, admin_requests, refusals
from petps.server.access_file import AccessFile, Entry, hash_of
from tests.python.server.conftest import settings
from tests.python.server.grpc_calls import TIMEOUT, refusal_of

TOKEN = "petps_the-token-of-the-admin"
CREDENTIAL = (("authorization", f"Bearer {TOKEN}"),)
STATUS = "/petps.admin.v1.Admin/Status"
UNARY = ("Status", "CreateModel", "CreateTable", "Load", "SetExpiry", "DropTable", "SwitchAlias")

# The second one after too many failed logins.
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.fixture
def access(tmp_path: Path) -> AccessFile:
    file = AccessFile(tmp_path / "access.json")
    file.add(Entry(name="boss", token_sha256=hash_of(TOKEN), roles=["admin"], models="*"))
    return file


@pytest.fixture
def lines() -> list[str]:
    """Return the lines of the log."""
    return []


@pytest.fixture
def serving(pool: Path, access: AccessFile, tmp_path: Path, lines: list[str]) -> Iterator[Serving]:
    configured = settings(pool, server={"admin_port": 0}, access={"file": tmp_path / "access.json"})
    with Serving(configured, log=lines.append) as started:
        yield started


@pytest.fixture
def channel(serving: Serving) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{serving.admin_port}") as opened:
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


@pytest.mark.parametrize("roles", [[], ["read"]])
def test_long_work_ends_with_its_grant(
    channel: grpc.Channel, access: AccessFile, monkeypatch: pytest.MonkeyPatch, roles: list[Any]
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
    boss = access.remove("boss")
    if roles:
        access.add(boss.model_copy(update={"roles": roles}))
    code, text, _ = refusal_of(lambda: list(call))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "the grant was revoked" in text
    assert ended.wait(TIMEOUT)


@pytest.mark.parametrize("models", ["*", ["default"]])
def test_callers_without_the_role_are_refused_before_their_request(
    channel: grpc.Channel,
    access: AccessFile,
    serving: Serving,
    requests: Callable[[], Iterator[bytes]],
    models: Any,
) -> None:
    token = "petps_the-token-of-a-reader"
    access.add(Entry(name="r", token_sha256=hash_of(token), roles=["read", "write"], models=models))
    serving.follow_credentials()
    credential = (("authorization", f"Bearer {token}"),)
    calls = [channel.stream_unary(f"/petps.admin.v1.Admin/{name}") for name in UNARY]
    grow = channel.stream_stream("/petps.admin.v1.Admin/Grow")
    calls.append(lambda *arguments, **options: next(grow(*arguments, **options)))
    for call in calls:
        refused = partial(call, requests(), metadata=credential, timeout=TIMEOUT)
        code, text, _ = refusal_of(refused)
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert "'r' has no role 'admin'" in text
    assert AdminStub(channel).Status(messages.StatusRequest(), metadata=CREDENTIAL).text


def test_an_admin_of_a_model_that_is_not_there_may_create_it(
    channel: grpc.Channel,
    access: AccessFile,
    serving: Serving,
    requests: Callable[[], Iterator[bytes]],
) -> None:
    token = "petps_the-token-of-a-new-model"
    access.add(Entry(name="new", token_sha256=hash_of(token), roles=["admin"], models=["new"]))
    serving.follow_credentials()
    request = messages.CreateModelRequest(model="new", partitions=1)
    credential = (("authorization", f"Bearer {token}"),)
    AdminStub(channel).CreateModel(request, metadata=credential, timeout=TIMEOUT)
    status = channel.stream_unary(STATUS)  # for which it would need the role for all models
    code, _, _ = refusal_of(partial(status, requests(), metadata=credential, timeout=TIMEOUT))
    assert code is grpc.StatusCode.PERMISSION_DENIED


def test_connections_without_a_call_end(
    pool: Path, access: AccessFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = dict(admin_requests.PORT_LIMITS)
    assert limits[admin_requests.IDLE] == 10_000
    limits[admin_requests.IDLE] = 50
    monkeypatch.setattr("petps.server.admin.PORT_LIMITS", tuple(limits.items()))
    configured = settings(pool, server={"admin_port": 0}, access={"file": tmp_path / "access.json"})
    with (
        Serving(configured) as serving,
        socket.create_connection(
            ("127.0.0.1", serving.admin_port or 0), timeout=TIMEOUT
        ) as connection,
    ):
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        while connection.recv(4096):
            continue  # the settings of the server, and its goodbye


def late_call(
    channel: grpc.Channel, method: str, request: Any, change: Callable[[], None]
) -> tuple[grpc.StatusCode, str]:
    """Return what refuses a request that is sent after its call was admitted and ``change``."""
    admitted = threading.Event()

    def requests() -> Iterator[bytes]:
        admitted.wait()
        change()
        yield request.SerializeToString()

    def read(*arguments: Any) -> Any:
        admitted.set()
        return admin_requests.read_request(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admin, "read_request", read)
        call = channel.stream_unary(f"/petps.admin.v1.Admin/{method}")
        code, text, _ = refusal_of(partial(call, requests(), metadata=CREDENTIAL, timeout=TIMEOUT))
    return code, text


def test_a_grant_that_is_revoked_before_its_request_arrives_changes_nothing(
    channel: grpc.Channel, access: AccessFile, serving: Serving
) -> None:
    def revoke() -> None:
        access.remove("boss")
        serving.follow_credentials()

    request = messages.DropTableRequest(table="items")
    refused = late_call(channel, "DropTable", request, revoke)
    assert refused == (grpc.StatusCode.UNAUTHENTICATED, "the grant of 'boss' was revoked")
    assert {table.name for table in serving._tables.tables()} >= {"items"}


def test_a_grant_that_loses_a_role_before_its_request_arrives_changes_nothing(
    channel: grpc.Channel, access: AccessFile, serving: Serving
) -> None:
    def narrow() -> None:
        boss = access.remove("boss")
        access.add(boss.model_copy(update={"roles": ["read"]}))
        serving.follow_credentials()

    request = messages.DropTableRequest(table="items")
    code, _ = late_call(channel, "DropTable", request, narrow)
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert {table.name for table in serving._tables.tables()} >= {"items"}


@pytest.mark.parametrize(
    ("values", "is_row", "message"),
    [
        ([], False, "default_value has 0 values"),
        ([1.0, 2.0], False, "default_value has 2 values"),
        ([], True, r"default has shape \(0,\)"),
    ],
)
def test_a_table_needs_a_default(
    channel: grpc.Channel, values: list[float], is_row: bool, message: str
) -> None:
    request = messages.CreateTableRequest(
        name="new", dim=4, dtype="f32", capacity=10, feed="push", default_value=values,
        default_is_row=is_row,
    )  # fmt: skip
    call = partial(AdminStub(channel).CreateTable, request, metadata=CREDENTIAL, timeout=TIMEOUT)
    code, text, _ = refusal_of(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert re.search(message, text)


def replies(channel: grpc.Channel, method: str, request: Any) -> list[Any]:
    """Return the replies of a call by the admin."""
    return list(getattr(AdminStub(channel), method)(request, metadata=CREDENTIAL, timeout=TIMEOUT))


@pytest.mark.parametrize(
    ("method", "place", "message"),
    [
        ("Export", "", "the folder has no name"),
        ("Backup", "", "the store has no name"),
        ("Export", "../base", "'../base' is no absolute path"),
        ("Backup", "base", "'base' is no absolute path"),
        ("Export", "s3://bucket/base", "is no absolute path"),
        ("Export", "/srv/a\0b", "has a control character"),
        ("Backup", "memory://a\0b", "has a control character"),
        ("Backup", "/srv/a\nready", "has a control character"),
        ("Backup", "/" + "x" * 5000, "more than 4096 bytes"),
        ("Backup", "s3://bucket/x?token=secret", "has a '\\?' or a '#'"),
        ("Backup", "ftp://me:secret@host/x", "has a password"),
        ("Backup", "nothing://x", "Protocol not known"),
        ("Backup", "reference://", "reference://: "),
        ("Backup", "jupyter://x", "jupyter://x: "),
    ],
)
def test_an_odd_place_is_refused(
    channel: grpc.Channel,
    pool: Path,
    capfd: pytest.CaptureFixture[str],
    method: str,
    place: str,
    message: str,
) -> None:
    of_place = {"folder": place} if method == "Export" else {"store": place}
    request = getattr(messages, f"{method}Request")(**of_place)
    code, text, _ = refusal_of(partial(replies, channel, method, request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert re.search(message, text)
    audit = pool.with_name("pool.audit")
    assert "secret" not in text + (audit.read_text() if audit.exists() else "")
    assert capfd.readouterr() == ("", ""), "a traceback"


@pytest.mark.parametrize("method", ["Export", "Backup"])
def test_rows_that_leave_the_server_are_audited_and_logged(
    channel: grpc.Channel, pool: Path, tmp_path: Path, lines: list[str], method: str
) -> None:
    place = str(tmp_path / "copy")
    of_place = {"folder": place} if method == "Export" else {"store": place}
    request = getattr(messages, f"{method}Request")(model="default", **of_place)
    assert replies(channel, method, request)[-1].done
    what = f"{'export' if method == 'Export' else 'back up'} all rows of model 'default' to {place}"
    audit = [json.loads(line) for line in pool.with_name("pool.audit").read_text().splitlines()]
    assert [line["what"] for line in audit] == [what]
    assert audit[0]["who"].startswith("'boss' at ")
    begin, end = [line for line in lines if "'boss' at" in line]
    assert begin.startswith(f"begin: {what} (for 'boss' at ")
    assert re.match("default@0 is exported|backup .* is written", end)

    broken = getattr(messages, f"{method}Request")(model="none", **of_place)
    refusal_of(partial(replies, channel, method, broken))
    audit = [json.loads(line) for line in pool.with_name("pool.audit").read_text().splitlines()]
    assert len(audit) == 3
    assert "none" in audit[2]["failed"]


def test_refused_changes_leave_few_lines(
    channel: grpc.Channel, pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "REFUSED_MAX", 3)
    stub = AdminStub(channel)

    def change(name: str) -> Any:
        request = messages.CreateTableRequest(
            name=name, dim=4, dtype="f32", capacity=10, feed="push", default_value=[0.0]
        )
        return stub.CreateTable(request, metadata=CREDENTIAL, timeout=TIMEOUT)

    def audit() -> list[dict[str, str]]:
        text = pool.with_name("pool.audit").read_text()
        return [json.loads(line) for line in text.splitlines()]

    codes = [refusal_of(partial(change, f"odd/{number}"))[0] for number in range(9)]
    assert (
        codes == [grpc.StatusCode.INVALID_ARGUMENT] * 3 + [grpc.StatusCode.RESOURCE_EXHAUSTED] * 6
    )
    assert len(audit()) == 3 * 2 + 1
    assert "further changes of 'boss' are refused and not tried" in audit()[-1]["what"]
    assert refusal_of(partial(change, "good"))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert stub.Status(messages.StatusRequest(), metadata=CREDENTIAL, timeout=TIMEOUT).text

    monkeypatch.setattr(refusals, "REFUSED_SECONDS", 0.0)
    assert change("good").text
    assert [line["what"].partition(";")[0].partition(":")[0] for line in audit()[-2:]] == [
        "7 changes of 'boss' were refused and not tried", "create table good",
    ]  # fmt: skip


def test_refused_changes_count_by_the_grant_and_for_a_minute() -> None:
    lines: list[str] = []
    now = [0.0]
    counted = refusals.Refusals(lambda user, text: lines.append(text), clock=lambda: now[0])
    for _ in range(refusals.REFUSED_MAX - 1):
        counted.note("a", ValueError("odd"))
    counted.check("a", "a")
    now[0] = 59.0
    counted.note("a", ValueError("the last one"))
    counted.check("b", "b")
    with pytest.raises(ResourceExhausted, match=r"of 'a' were refused within .* the last one"):
        counted.check("a", "a")
    now[0] = 60.0
    counted.check("a", "a")
    assert len(lines) == 2
    counted.note("a", ValueError("odd"))
    now[0] = 120.0
    counted.check("a", "a")
    for _ in range(refusals.REFUSED_MAX - 1):
        counted.note("a", ValueError("odd"))
    counted.check("a", "a")
    assert len(lines) == 2


def test_calls_of_the_open_port_need_no_grant() -> None:
    gate = _native.Gate("open")
    assert gate.renew(gate.authenticate("", [], "1.2.3.4:5")) is not None
