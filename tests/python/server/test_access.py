"""The access file, and what each door does with tokens beyond the table of access.md."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import petps_client
import pytest

import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from petps.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from petps.server import Serving
from petps.server.access_file import AccessFile, Entry, hash_of, new_token, read_access_file
from tests.python.cli.conftest import Command
from tests.python.server.conftest import settings
from tests.python.waiting import wait_until

SECONDS = 60.0
TOKEN = "petps_the-token-of-the-reader"


def entry(name: str, token: str | None = None, **fields: Any) -> Entry:
    given = {"token_sha256": hash_of(token or f"token of {name}"), "roles": ["read"], "models": "*"}
    return Entry(name=name, **{**given, **fields})


@pytest.fixture
def file(tmp_path: Path) -> AccessFile:
    access = AccessFile(tmp_path / "access.json")
    access.add(entry("reader", TOKEN))
    return access


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def serving(pool: Path, file: AccessFile, tmp_path: Path, lines: list[str]) -> Iterator[Serving]:
    configured = settings(pool, access={"file": tmp_path / "access.json"})
    with Serving(configured, log=lines.append) as started:
        yield started


def connect(serving: Serving, **options: Any) -> petps_client.Client:
    options = {"token": TOKEN, **options}
    return petps_client.connect(
        f"petps://127.0.0.1:{serving.port}/default", hot_sample_every=0, **options
    )


def ask(
    serving: Serving, path: str, authorization: str | None = None
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", serving.http_port or 0, timeout=SECONDS)
    with contextlib.closing(connection):
        headers = {} if authorization is None else {"Authorization": authorization}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())


# ---- the file


def test_a_token_has_32_random_bytes() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    for token in tokens:
        prefix, _, text = token.partition("_")
        assert prefix == "petps"
        assert len(base64.urlsafe_b64decode(text + "=")) == 32


def test_the_file_has_no_token_and_is_private(file: AccessFile, tmp_path: Path) -> None:
    path = tmp_path / "access.json"
    assert TOKEN not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    file.add(entry("second"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640, "the operator's mode stays"


def test_names_and_certificates_are_given_once(file: AccessFile) -> None:
    with pytest.raises(AlreadyExists, match="a grant named 'reader'"):
        file.add(entry("reader"))
    named = {"token_sha256": None, "certificate": "a.example"}
    file.add(entry("first", **named))
    with pytest.raises(AlreadyExists, match=r"certificate 'a.example': revoke 'first' first"):
        file.add(entry("second", **named))
    with pytest.raises(NotFound, match=r"no grant named 'x'; it has reader, first"):
        file.remove("x")


def test_commands_at_the_same_time_lose_no_grant(tmp_path: Path) -> None:
    access = AccessFile(tmp_path / "access.json")
    threads = [threading.Thread(target=lambda n=n: access.add(entry(f"n{n}"))) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {listed.name for listed in access.entries()} == {f"n{n}" for n in range(16)}


HASH = "0" * 64


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "not valid JSON"),
        ("[]", "the file: "),
        ('{"format": "petps access 2", "grants": []}', "format: .*petps access 1"),
        ('{"format": "petps access 1"}', "grants: Field required"),
        ({"x": 1}, r"grants\[0\].x: Extra inputs"),
        ({"roles": []}, r"grants\[0\].roles: "),
        (
            {"roles": ["root"]},
            r"grants\[0\].roles\[0\]: Input should be 'read', 'write' or 'admin'",
        ),
        ({"models": []}, "models is empty"),
        ({"token_sha256": None}, "either token_sha256 or certificate"),
        ({"certificate": "a"}, "either token_sha256 or certificate"),
        ({"token_sha256": HASH[1:]}, r"grants\[0\].token_sha256: "),
        ({"expires": "tomorrow"}, "expires must be UTC"),
        ({"expires": "2027-02-31T00:00:00Z"}, "day is out of range"),
        ({"requests_per_second": -1}, r"grants\[0\].requests_per_second: "),
        ({"name": "a b"}, r"grants\[0\].name: "),
    ],
)
def test_a_faulty_file_is_refused(
    content: str | dict[str, Any], fault: str, tmp_path: Path
) -> None:
    path = tmp_path / "access.json"
    if isinstance(content, dict):
        grant = {"name": "n", "token_sha256": HASH, "roles": ["read"], "models": "*", **content}
        content = json.dumps({"format": "petps access 1", "grants": [grant]})
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=fault) as error:
        read_access_file(path)
    assert str(path) in str(error.value)
    assert HASH[1:] not in str(error.value)


def test_two_grants_of_one_name_or_token_are_refused(tmp_path: Path) -> None:
    grant = {"name": "n", "token_sha256": HASH, "roles": ["read"], "models": "*"}
    for second in ({**grant, "name": "m"}, {**grant, "token_sha256": "1" * 64}):
        text = json.dumps({"format": "petps access 1", "grants": [grant, second]})
        (tmp_path / "access.json").write_text(text)
        with pytest.raises(InvalidArgument, match="two grants have the same"):
            read_access_file(tmp_path / "access.json")


# ---- the server and its file


def test_a_server_does_not_start_without_its_file(pool: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no access file .*petps token new"):
        Serving(settings(pool, access={"file": tmp_path / "none.json"}))


def test_a_broken_file_keeps_the_grants_and_is_reported(
    serving: Serving, file: AccessFile, tmp_path: Path, lines: list[str]
) -> None:
    path = tmp_path / "access.json"
    good = path.read_bytes()
    for broken in (b"{", None):
        if broken is None:
            path.unlink()
        else:
            path.with_suffix(".new").write_bytes(broken)
            path.with_suffix(".new").replace(path)
        serving.follow_credentials()
        serving.follow_credentials()
        access = serving.status()["access"]
        assert str(path) in access["error"]
        assert access["grants"] == 1
        connect(serving).close()
        reported = [line for line in lines if "the present grants stay in use" in line]
        assert len(reported) == 1
        text = ask(serving, "/metrics", f"Bearer {TOKEN}")[1]
        assert "petps_access_reload_failed 1.0" in text
        path.write_bytes(good)
        serving.follow_credentials()
        assert serving.status()["access"]["error"] == ""
        lines.clear()


def test_a_new_token_is_known_and_a_revoked_one_ends(serving: Serving, file: AccessFile) -> None:
    with connect(serving) as client:
        client.pull("items", [1])
        file.add(entry("second", "another"))
        serving.follow_credentials()
        with connect(serving, token="another") as second:
            second.pull("items", [1])
        file.remove("reader")
        serving.follow_credentials()

        def is_refused() -> bool:
            try:
                client.pull("items", [1])
            except Unauthenticated:
                return True
            return False

        wait_until(is_refused)
    status, text, _ = ask(serving, "/status.json", f"Bearer {TOKEN}")
    assert status == 401
    assert "is revoked or expired" in text


def test_tokens_are_replaced_under_load_without_a_failed_pull(
    serving: Serving, file: AccessFile, tmp_path: Path
) -> None:
    token_file = tmp_path / "reader.token"
    token_file.write_text(TOKEN)
    faults: list[BaseException] = []
    pulled = [0]
    stop = threading.Event()

    def pull(client: petps_client.Client) -> None:
        keys = np.arange(100, dtype=np.uint64)
        try:
            while not stop.is_set():
                assert client.pull("items", keys, deadline_ms=60_000)[0, 0] == 1.0
                pulled[0] += 1
        except BaseException as fault:
            faults.append(fault)

    with connect(serving, token=None, token_file=token_file) as client:
        threads = [threading.Thread(target=pull, args=(client,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        old = "reader"
        for n in range(10):
            token = new_token()
            file.add(entry(f"reader{n}", token))
            serving.follow_credentials()
            temporary = tmp_path / "new.token"
            temporary.write_text(token)
            os.replace(temporary, token_file)
            file.remove(old)
            serving.follow_credentials()
            old = f"reader{n}"
            before = pulled[0]
            wait_until(lambda before=before: pulled[0] > before + 20 or bool(faults))  # type: ignore[misc]
        stop.set()
        for thread in threads:
            thread.join()
    assert not faults
    assert serving.status()["access"]["grants"] == 1


def test_a_watch_ends_with_its_grant(serving: Serving, file: AccessFile) -> None:
    metadata = (("authorization", f"Bearer {TOKEN}"),)
    with grpc.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel:
        watch = stubs.PetpsStub(channel).WatchVersions(
            messages.WatchVersionsRequest(), metadata=metadata, timeout=SECONDS
        )
        next(watch)
        file.remove("reader")
        serving.follow_credentials()
        with pytest.raises(grpc.RpcError) as error:
            for _ in watch:
                pass
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "'reader' was revoked" in error.value.details()


# ---- rights of a model


@pytest.fixture
def two_models(serving: Serving, file: AccessFile) -> Serving:
    serving._tables.create_instance("secret", "secret@0", 2)
    file.add(entry("narrow", "n", models=["default"]))
    serving.follow_credentials()
    return serving


def test_petps_status_shows_grants_and_refusals(
    serving: Serving, file: AccessFile, tmp_path: Path
) -> None:
    file.add(entry("old", expires="1999-01-01T00:00:00Z"))
    serving.follow_credentials()
    ask(serving, "/status.json")
    shown = Command()("status", tmp_path / "pool")
    assert "2 grants; EXPIRED: old; 1 logins failed, 0 requests denied" in shown
    (tmp_path / "access.json").write_text("{")
    serving.follow_credentials()
    assert "access file not used" in Command()("status", tmp_path / "pool")


def test_a_caller_of_one_model_sees_no_other(two_models: Serving) -> None:
    metadata = (("authorization", "Bearer n"),)
    with grpc.insecure_channel(f"127.0.0.1:{two_models.grpc_port}") as channel:
        stub = stubs.PetpsStub(channel)
        listed = stub.ListTables(messages.ListTablesRequest(), metadata=metadata, timeout=SECONDS)
        assert {instance.model for instance in listed.instances} == {"default"}
        # It need not name its only model, although the pool has two.
        keys = np.array([1], "<u8").tobytes()
        request = messages.PullRequest(table="items", keys=keys)
        assert stub.Pull(request, metadata=metadata, timeout=SECONDS).instance == "default@0"
        texts = []
        for model in ("secret", "absent", "secret@0", "absent@0"):
            request = messages.PullRequest(model=model, table="items", keys=keys)
            with pytest.raises(grpc.RpcError) as error:
                stub.Pull(request, metadata=metadata, timeout=SECONDS)
            assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
            texts.append(error.value.details().replace(model, "M"))
        assert len(set(texts)) == 1
    with pytest.raises(NotFound) as missing:
        petps_client.connect(f"petps://127.0.0.1:{two_models.port}/secret", token="n")
    assert "default" in str(missing.value)


# ---- limits


def test_limits_hold_over_all_doors(serving: Serving, file: AccessFile) -> None:
    file.add(entry("slow", "s", requests_per_second=1))
    serving.follow_credentials()
    metadata = (("authorization", "Bearer s"),)
    with grpc.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel:
        stub = stubs.PetpsStub(channel)

        def ask_often() -> None:
            for _ in range(1000):
                stub.Status(messages.StatusRequest(), metadata=metadata, timeout=SECONDS)

        with pytest.raises(grpc.RpcError) as error:
            ask_often()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    answers = (ask(serving, "/metrics", "Bearer s") for _ in range(1000))
    text = next(text for status, text, _ in answers if status == 429)
    assert "'slow' has used up its 1 requests a second" in text

    def connect_often() -> None:
        for _ in range(1000):
            connect(serving, token="s").close()

    with pytest.raises(ResourceExhausted, match="'slow'"):
        connect_often()
    assert serving.status()["access"]["requests_limited"] >= 3


# ---- HTTP


def test_a_browser_is_asked_for_the_token(serving: Serving) -> None:
    status, _, headers = ask(serving, "/")
    assert status == 401
    assert headers["WWW-Authenticate"].startswith("Basic ")
    basic = base64.b64encode(f"anybody:{TOKEN}".encode()).decode()
    status, page, _ = ask(serving, "/", f"Basic {basic}")
    assert status == 200
    assert "<html" in page


def test_a_probe_learns_nothing_but_the_code(
    pool: Path, tmp_path: Path, file: AccessFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Serving, "_unready", lambda serving: "partition 7 is late")
    with Serving(settings(pool, access={"file": tmp_path / "access.json"})) as serving:
        for header in (None, "Bearer wrong", "nonsense"):
            status, text, _ = ask(serving, "/readyz", header)
            assert (status, text) == (503, "")
        status, text, _ = ask(serving, "/readyz", f"Bearer {TOKEN}")
        assert status == 503
        assert "partition 7 is late" in text
        assert ask(serving, "/healthz")[0] == 200
        before = serving.status()["access"]["logins_failed"]
        ask(serving, "/readyz")
        assert serving.status()["access"]["logins_failed"] == before, "a probe is no failed login"


@pytest.mark.parametrize("header", ["Digest x", "Basic ???", "Basic", "Bearer", ""])
def test_an_odd_header_is_refused_without_a_quote(serving: Serving, header: str) -> None:
    status, text, _ = ask(serving, "/status.json", header)
    assert status in (400, 401)
    assert "???" not in text


# ---- clients


def test_a_client_whose_token_was_revoked_meanwhile_reads_the_file_again(
    serving: Serving, tmp_path: Path
) -> None:
    path = tmp_path / "reader.token"
    os.mkfifo(path)  # each read waits for the next token

    def write() -> None:
        path.write_text("the token before")
        wait_until(lambda: serving.status()["access"]["logins_failed"] == 1)
        path.write_text(TOKEN)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    connect(serving, token=None, token_file=path).close()
    writer.join()
    assert serving.status()["access"]["logins_failed"] == 1


def test_a_client_reads_its_tokens_file_at_each_connection(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reader.token"
    path.write_text(f"  {TOKEN}\n\n")
    monkeypatch.setenv("PETPS_TOKEN_FILE", str(path))
    connect(serving, token=None).close()
    with pytest.raises(InvalidArgument, match="either token or token_file"):
        connect(serving, token_file=path)
    for content, error, text in (
        ("", InvalidArgument, "is empty"),
        ("x" * 256, InvalidArgument, "is longer"),
        (None, NotFound, "reader.token"),
    ):
        path.unlink()
        if content is not None:
            path.write_text(content)
        with pytest.raises(error, match=text):
            connect(serving, token=None)


def test_a_writer_may_push_and_not_pull(serving: Serving, file: AccessFile) -> None:
    file.add(entry("writer", "w", roles=["write"]))
    serving.follow_credentials()
    with connect(serving, token="w") as client:
        client.push("items", [1], np.zeros((1, 4), np.float32))
        with pytest.raises(PermissionDenied, match="'writer' has no role 'read' for table"):
            client.pull("items", [1])


def test_no_token_appears_in_what_the_server_says(
    serving: Serving, file: AccessFile, lines: list[str]
) -> None:
    secrets = ["planted-token", hash_of(TOKEN), TOKEN]
    with contextlib.suppress(Unauthenticated):
        connect(serving, token="planted-token")
    ask(serving, "/status.json", "Bearer planted-token")
    texts = [
        json.dumps(serving.status()),
        ask(serving, "/metrics", f"Bearer {TOKEN}")[1],
        ask(serving, "/status.json", f"Bearer {TOKEN}")[1],
        *lines,
        repr(file.entries()),
    ]
    for text in texts:
        assert not any(secret in text for secret in secrets)
