"""Whether the other servers of the shard map answer: asked without harm to them."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

import pytest

from petps.config import TlsConfig
from petps.server import Serving
from petps.server import members as members_module
from petps.server.members import Members, find_fault
from tests.certificates import Authority
from tests.ports import stable_port
from tests.python.server.conftest import Start
from tests.python.waiting import wait_until


def is_unharmed(serving: Serving) -> bool:
    """Return whether the question broke no rule and is over."""
    wait_until(lambda: serving._server.stats()["connections"] == 0)
    stats, status = serving._server.stats(), serving.status()
    names = ("errors", "handshakes_failed", "connections_closed_for_cause")
    logins = status["access"]["logins_failed"]
    return not status["incidents"] and not logins and not any(stats[name] for name in names)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for servers that answer as long as a busy machine needs."""
    monkeypatch.setattr(members_module, "ANSWER_SECONDS", 60.0)


@pytest.mark.parametrize("says_hello", [True, False])
def test_a_server_answers_and_is_not_harmed(start: Start, says_hello: bool) -> None:
    serving = start()
    for _ in range(5):
        assert find_fault(f"127.0.0.1:{serving.port}", TlsConfig(), says_hello=says_hello) is None
    assert is_unharmed(serving)


def test_a_server_that_asks_for_certificates_answers(start: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    files = {
        "certificate": pair.certificate, "key": pair.key,
        "client_ca": authority.certificate, "client_certificates": "required",
    }  # fmt: skip
    serving = start(tls=files)
    for _ in range(5):
        tls = TlsConfig(certificate=pair.certificate, key=pair.key)
        assert find_fault(f"127.0.0.1:{serving.port}", tls, says_hello=False) is None
    assert is_unharmed(serving)


def test_a_server_that_is_gone_or_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody answers
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert find_fault(address, TlsConfig(), says_hello=True) == "no answer within 0.2 s"
        assert find_fault(address, TlsConfig(), says_hello=False) is None
    assert find_fault(address, TlsConfig(), says_hello=True) == "Connection refused"
    assert find_fault("nonsense", TlsConfig(), says_hello=True)
    assert find_fault("127.0.0.1:0x", TlsConfig(), says_hello=True)


def test_every_member_is_asked_and_others_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "LOOK_SECONDS", 0.01)
    addresses = [("a:1", "0"), ("b:2", "1-3")]
    faults: dict[str, str | None] = {"a:1": None, "b:2": "Connection refused", "c:3": None}
    lines: list[str] = []
    asked = Members(lambda: addresses, faults.__getitem__, lines.append)
    with contextlib.closing(asked) as members:
        wait_until(lambda: all(entry["asked_at"] for entry in members.status()))
        first, second = members.status()
        assert (first["answers"], first["partitions"], first["fault"]) == (True, "0", "")
        assert (second["answers"], second["fault"]) == (False, "Connection refused")
        faults["b:2"] = None
        wait_until(lambda: members.status()[1]["answers"] is True)
        assert lines == [
            "the server b:2 of the shard map does not answer: Connection refused",
            "the server b:2 of the shard map answers again",
        ]
        addresses[:] = [("c:3", "0-3")]
        assert members.status()[0]["address"] == "c:3"
        wait_until(lambda: members.status()[0]["answers"] is True)
        wait_until(lambda: set(members._found) == {"c:3"})


def test_a_member_that_is_away_is_a_problem(start: Start, tmp_path: Path) -> None:
    away = f"127.0.0.1:{stable_port()}"
    document = {
        "model": "default", "version": 1, "partitions": 8,
        "servers": [
            {"address": "here:7070", "partitions": ["0-6"]},
            {"address": away, "partitions": [7]},
        ],
    }  # fmt: skip
    path = tmp_path / "map.json"
    path.write_text(json.dumps(document))
    serving = start(server={"shard_map": path, "address": "here:7070"})
    wait_until(lambda: bool(serving.status()["problems"]))
    [problem] = serving.status()["problems"]
    assert problem["key"] == f"member:{away}"
    assert "does not answer: Connection refused." in problem["text"]
    assert [entry["address"] for entry in serving.status()["members"]] == [away]
