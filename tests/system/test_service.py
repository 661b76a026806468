"""`petps serve` as a service manager and a log collector see it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import petps
import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from petps.admin.client import AdminClient
from tests.python.server.test_progress import Manager
from tests.system.servers import PETPS, WAIT_SECONDS, Server, wait_until

pytestmark = pytest.mark.system

Serve = Callable[..., Server]


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    with petps.create(path, durability="process") as opened:
        opened.create_table("items", dim=4, capacity=1000)
    return path


@pytest.fixture
def manager() -> Iterator[Manager]:
    opened = Manager(f"@petps-{os.getpid()}-{time.monotonic_ns()}")
    yield opened
    opened.close()


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_line_of_the_log_is_a_json_object(
    pool: Path, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PETPS_LOG_FORMAT", "json")
    monkeypatch.setenv("PETPS_SERVER_WORKERS", "1")
    process = serve(pool, "--log-level", "debug")
    facts = process.wait_ready()
    url = f"http://127.0.0.1:{facts['http_port']}/readyz"
    ours = urllib.request.Request(url, headers={"X-Request-Id": "our-http"})
    with urllib.request.urlopen(ours, timeout=30) as reply:
        assert reply.headers["X-Request-Id"] == "our-http"
    with urllib.request.urlopen(url, timeout=30) as reply:
        servers_id = reply.headers["X-Request-Id"]
    with grpc.insecure_channel(f"127.0.0.1:{facts['grpc_port']}") as channel:
        stub: Any = stubs.PetpsStub(channel)
        request = messages.ListTablesRequest()
        _, call = stub.ListTables.with_call(request, metadata=(("x-request-id", "our-grpc"),))
        assert ("x-request-id", "our-grpc") in call.trailing_metadata()
        with pytest.raises(grpc.RpcError) as refused:
            stub.Pull(messages.PullRequest(table="none"), metadata=(("x-request-id", "failed"),))
        assert ("x-request-id", "failed") in refused.value.trailing_metadata()
    with AdminClient(pool) as admin:
        admin.create_table("ads", dim=4, capacity=10)
    with socket.create_connection(("127.0.0.1", facts["port"]), timeout=30) as peer:
        peer.sendall(b"\xff" * 64)  # no frame
        peer.recv(1 << 16)
    wait_until("an incident", lambda: '"incident"' in process.output)
    process.child.send_signal(signal.SIGHUP)
    wait_until("a reload", lambda: '"reloaded"' in process.output)
    lines = lines_of(process.stop())
    assert all({"time", "level", "event", "message"} <= line.keys() for line in lines)
    first = {line["event"]: line for line in reversed(lines)}
    assert lines[0]["event"] == "serving"
    assert [line["event"] for line in lines[-2:]] == ["draining", "closed"]
    assert first["serving"]["doors"][0] == f"petps://127.0.0.1:{facts['port']}"
    ids = [line["request_id"] for line in lines if line["event"] == "http_request"]
    assert ids == ["our-http", servers_id]
    calls = {line["request_id"]: line for line in lines if line["event"] == "grpc_call"}
    assert calls["our-grpc"]["code"] == "OK"
    assert (calls["failed"]["code"], calls["failed"]["call"]) == ("NOT_FOUND", "pull")
    admin_line = first["admin"]
    assert (admin_line["call"], admin_line["user"]) == ("CreateTable", f"uid {os.getuid()}")
    assert len(admin_line["request_id"]) == 16
    assert (first["incident"]["peer"], first["incident"]["level"]) == ("127.0.0.1", "warning")


def test_a_start_that_fails_is_a_json_line_too(tmp_path: Path) -> None:
    def failed(*arguments: object, **environ: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [*PETPS, "serve", *map(str, arguments)],
            capture_output=True, text=True, timeout=WAIT_SECONDS, check=False,
            env=os.environ | environ,
        )  # fmt: skip
        assert done.stderr == ""
        [line] = lines_of(done.stdout)
        assert (line["event"], line["level"]) == ("failed", "error")
        return done.returncode, line

    status, line = failed(tmp_path / "none", "--log-format", "json")
    assert (status, line["code"]) == (3, "NOT_FOUND")
    assert "create it with `petps create`" in line["message"]
    environ = {"PETPS_LOG_FORMAT": "json", "PETPS_SERVER_PROT": "1"}
    status, line = failed(tmp_path / "none", **environ)
    assert (status, line["code"]) == (2, "INVALID_ARGUMENT")
    assert "PETPS_SERVER_PROT is not a known variable" in line["message"]


def test_a_service_manager_is_told_what_happens(
    pool: Path, tmp_path: Path, serve: Serve, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    file = tmp_path / "petps.toml"
    file.write_text('[pool]\npath = "unused"\n')
    process = serve(pool, "--config", file)
    assert manager.next().startswith("EXTEND_TIMEOUT_USEC=")

    def until(text: str) -> list[str]:
        seen: list[str] = []
        while not seen or not seen[-1].startswith(text):
            seen.append(manager.next())
        return seen

    until("READY=1")
    assert process.ready_file.exists()
    until("WATCHDOG=1")
    process.child.send_signal(signal.SIGHUP)
    until("RELOADING=1\nMONOTONIC_USEC=")
    assert until("READY=1")[-1] == "READY=1\nSTATUS=ready"
    process.child.send_signal(signal.SIGTERM)
    until("STOPPING=1")
    assert process.child.wait(WAIT_SECONDS) == 0


def test_sighup_reloads_what_it_can(pool: Path, tmp_path: Path, serve: Serve) -> None:
    file = tmp_path / "petps.toml"
    begin = f'[pool]\npath = "{pool}"\n'
    file.write_text(begin)
    process = serve(pool, "--config", file)
    process.wait_ready()

    def reload(text: str, line: str) -> None:
        file.write_text(begin + text)
        process.child.send_signal(signal.SIGHUP)
        wait_until(line, lambda: line in process.output)

    limits = "[server.limits]\npin_ms = 1000\n"
    reload(limits, "changed, but needs a restart: server.limits.pin_ms")
    reload("[log]\nlevl = 'debug'\n", "nothing is reloaded, and the current settings stay: ")
    reload("[log]\nformat = 'json'\nlevel = 'debug'\n", '"event": "reloaded"')
    process.read("healthz")
    wait_until("a line of level debug", lambda: '"event": "http_request"' in process.output)
    reload("[log]\nlevel = 'info'\n", "reloaded: log.format = 'text' (was 'json')")
    assert process.stop().endswith("SIGTERM: draining\nclosed cleanly\n")
