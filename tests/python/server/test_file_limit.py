"""The limit of open files of a server: raised, or reported; and what happens at the limit."""

from __future__ import annotations

import errno
import os
import resource
import socket
import time
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from petps import _native
from petps.config import merge
from petps.errors import Unauthenticated
from petps.server import access_file, http
from petps.server.access import Access
from petps.server.access_file import AccessFile, Entry, hash_of
from petps.server.http import HttpServer
from petps.server.process import OPEN_FILES, raise_file_limit
from tests.python.waiting import wait_until

TOKEN = "petps_the-token-of-the-reader"


@pytest.mark.parametrize(
    "limits",
    [
        (1024, 1 << 20),
        (1024, resource.RLIM_INFINITY),
        (1024, 4096),
        (1024, 1024),
        (1 << 20, 1 << 20),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_limit_is_raised_to_what_the_system_permits(
    limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    lines: list[str] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: given.append(both))
    raise_file_limit(lines.append)
    soft, hard = limits
    assert given == ([(hard, hard)] if soft != hard else [])
    is_short = hard != resource.RLIM_INFINITY and hard < OPEN_FILES
    assert [line[:7] for line in lines] == (["WARNING"] if is_short else [])


def test_a_limit_that_cannot_be_raised_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int, both: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    lines: list[str] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1 << 30))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_file_limit(lines.append)
    (line,) = lines
    assert "may open 1024 files" in line


def test_a_revocation_is_read_once_there_are_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "access.json"
    file = AccessFile(path)
    file.add(Entry(name="reader", token_sha256=hash_of(TOKEN), roles=["read"], models="*"))
    lines: list[str] = []
    config = merge(None, {"pool": {"path": tmp_path / "pool"}, "access": {"file": path}}, "test")
    access = Access(config, log=lines.append)
    access.gate.authenticate(TOKEN, [], "1.2.3.4:5")
    file.remove("reader")

    def no_descriptors(*arguments: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(access_file, "read_regular_file", no_descriptors)
        access.check()
        access.check()
    assert access.status()["error"].endswith("Too many open files")
    access.check()  # the file has not changed since
    assert access.status()["error"] == ""
    assert len(lines) == 2
    with pytest.raises(Unauthenticated):
        access.gate.authenticate(TOKEN, [], "1.2.3.4:5")


def test_http_does_not_spin_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    fails = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))] * 3

    def get_request(self: Any) -> Any:
        if fails:
            raise fails.pop()
        return accept(self)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds / 50)

    accept = ThreadingHTTPServer.get_request
    monkeypatch.setattr(ThreadingHTTPServer, "get_request", get_request)
    clock = SimpleNamespace(sleep=pause, monotonic=time.monotonic)
    monkeypatch.setattr(http, "time", clock)
    server = HttpServer(
        "127.0.0.1",
        0,
        status=dict,
        metrics=lambda accepted: (b"", "text/plain"),
        fault=lambda: None,
        ready=lambda: None,
        shard_map=dict,
        gate=_native.Gate("open"),
    )
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as peer:
            peer.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert peer.recv(100).startswith(b"HTTP/1.0 200")
        wait_until(lambda: len(pauses) >= 3)
        assert pauses[:3] == [http.ACCEPT_PAUSE_SECONDS] * 3
    finally:
        server.close()
