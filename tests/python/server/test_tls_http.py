"""HTTPS: certificates of both sides, replaced certificates, and peers that take places."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petps import _native
from petps.server import http as http_door
from petps.server import tls
from petps.server.http import MAX_CONNECTIONS, MAX_CONNECTIONS_PER_PEER, HttpServer
from petps.server.tls import TlsFiles
from tests.certificates import Authority, Pair, replace
from tests.python.server.test_tls_files import Opened
from tests.python.waiting import wait_until

# How a client sees the end of its connection depends on what it was doing.
REFUSED = r"(?i)alert|reset|broken|eof|closed"


@contextlib.contextmanager
def door(files: TlsFiles | None, host: str = "127.0.0.1") -> Iterator[HttpServer]:
    server = HttpServer(
        host,
        0,
        gate=_native.Gate("open"),
        status=dict,
        metrics=lambda accepted: (b"", "text/plain"),
        fault=lambda: None,
        ready=lambda: None,
        shard_map=dict,
        tls=files,
    )
    with contextlib.closing(server):
        yield server


def ask(port: int, context: ssl.SSLContext, source: str = "127.0.0.1") -> bytes:
    """Return the answer of /readyz. Raises OSError."""
    connection = http.client.HTTPSConnection(
        "127.0.0.1", port, context=context, timeout=30, source_address=(source, 0)
    )
    with contextlib.closing(connection):
        connection.request("GET", "/readyz")
        return connection.getresponse().read()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.issue("server")


def required(authority: Authority, kind: str = "required") -> dict[str, Any]:
    return {"client_ca": authority.certificate, "client_certificates": kind}


def test_a_client_that_trusts_the_ca_is_answered_by_tls_1_3_only(
    authority: Authority, pair: Pair
) -> None:
    with door(Opened(pair).files) as server:
        context = authority.client_context()
        assert ask(server.port, context) == b"ok\n"
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
            ask(server.port, context)
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(server.port, ssl.create_default_context())


def test_client_certificates(
    authority: Authority, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, ...]] = []

    def record(certificate: Any) -> tuple[str, ...]:
        seen.append(certificate_names(certificate))
        return seen[-1]

    certificate_names = tls.certificate_names
    good = authority.issue("client", "DNS:client.example")
    other = Authority(tmp_path, "other-ca").issue("other")
    expired = authority.issue("expired", days=-1)
    for kind in ("required", "optional"):
        opened = Opened(pair, **required(authority, kind))
        monkeypatch.setattr(tls, "certificate_names", record)
        with door(opened.files) as server:
            assert ask(server.port, authority.client_context(good)) == b"ok\n"
            assert seen == [("client.example",)]
            for bad in (other, expired):
                with pytest.raises(OSError, match=REFUSED):
                    ask(server.port, authority.client_context(bad))
            if kind == "optional":
                assert ask(server.port, authority.client_context()) == b"ok\n"
                assert seen.pop() == ()
            else:
                with pytest.raises(OSError, match=REFUSED):
                    ask(server.port, authority.client_context())
        assert seen == [("client.example",)], "a refused client reached a handler"
        seen.clear()
        monkeypatch.undo()


def test_a_plain_request_at_the_tls_port_says_so(pair: Pair) -> None:
    with door(Opened(pair).files) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            assert answer.status == 400
            assert answer.read() == b"this port speaks HTTPS: use https://\n"


def test_it_listens_on_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with door(None, "::1") as server:
        connection = http.client.HTTPConnection("::1", server.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/readyz")
            assert connection.getresponse().read() == b"ok\n"


def test_tls_at_a_plain_port_is_closed(authority: Authority) -> None:
    with door(None) as server, pytest.raises(OSError, match=REFUSED):
        ask(server.port, authority.client_context())


def test_silent_peers_stop_neither_the_door_nor_others(authority: Authority, pair: Pair) -> None:
    with door(Opened(pair).files) as server, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        silent = [
            stack.enter_context(
                socket.create_connection(address, timeout=30, source_address=("127.0.0.2", 0))
            )
            for _ in range(MAX_CONNECTIONS + 8)
        ]
        # Those beyond the peer's places are closed; the others wait for their handshake.
        assert [peer.recv(1) for peer in silent[MAX_CONNECTIONS_PER_PEER:]] == [b""] * (
            len(silent) - MAX_CONNECTIONS_PER_PEER
        )
        context = authority.client_context()
        assert ask(server.port, context) == b"ok\n"
        with pytest.raises(OSError, match=REFUSED):
            ask(server.port, context, "127.0.0.2")
        for peer in silent:
            peer.close()
        wait_until(lambda: not server._server._peers)
        assert ask(server.port, context, "127.0.0.2") == b"ok\n"


@pytest.mark.parametrize("greets", [True, False], ids=["request", "handshake"])
def test_a_client_that_sends_a_byte_now_and_then_is_disconnected(
    authority: Authority, pair: Pair, monkeypatch: pytest.MonkeyPatch, greets: bool
) -> None:
    monkeypatch.setattr(http_door, "CONNECTION_SECONDS", 0.5)
    with door(Opened(pair).files) as server:
        address = ("127.0.0.1", server.port)
        with socket.create_connection(address, timeout=30) as slow:
            if greets:
                slow = authority.client_context().wrap_socket(slow, server_hostname="127.0.0.1")
            slow.sendall(b"G" if greets else b"\x16")

            def is_refused() -> bool:
                try:  # within a header, or a record of 768 bytes
                    slow.sendall(b"\x03")
                except OSError:
                    return True
                return False

            wait_until(is_refused)
            slow.close()
        wait_until(lambda: not server._server._peers)


def test_a_flood_from_many_addresses_keeps_nobody_out(authority: Authority, pair: Pair) -> None:
    with door(Opened(pair).files) as server, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        silent = [
            stack.enter_context(
                socket.create_connection(address, timeout=30, source_address=(source, 0))
            )
            for source in ("127.0.0.2", "127.0.0.3")
            for _ in range(MAX_CONNECTIONS // 2)
        ]
        wait_until(lambda: len(server._server._open) == MAX_CONNECTIONS)
        assert ask(server.port, authority.client_context()) == b"ok\n"
        assert silent[0].recv(1) == b"", "the oldest of an address with the most makes room"
        silent[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[1].recv(1)


def test_certificates_are_replaced_under_load_without_a_failed_request(
    authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    opened = Opened(pair)
    issued = [authority.issue(f"server-{number}") for number in range(5)]
    done = threading.Event()
    errors: list[BaseException] = []
    serials: set[str] = set()

    def load(port: int) -> None:
        context = authority.client_context()
        while not done.is_set():
            try:
                connection = http.client.HTTPSConnection(
                    "127.0.0.1", port, context=context, timeout=60
                )
                with contextlib.closing(connection):
                    connection.request("GET", "/readyz")
                    assert isinstance(connection.sock, ssl.SSLSocket)
                    certificate: Any = connection.sock.getpeercert()
                    serials.add(certificate["serialNumber"])
                    assert connection.getresponse().read() == b"ok\n"
            except BaseException as error:
                errors.append(error)
                return

    with door(opened.files) as server:
        threads = [threading.Thread(target=load, args=(server.port,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for number, new in enumerate(issued):
                wait_until(lambda: errors or len(serials) > number)  # noqa: B023
                replace(pair, new)
                opened.files.check()
            wait_until(lambda: errors or len(serials) > len(issued))
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert errors == []
    assert len(serials) == 1 + len(issued)
