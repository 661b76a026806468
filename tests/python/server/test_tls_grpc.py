"""gRPC with TLS: certificates of both sides, and replaced certificates under load."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from petps import _native
from petps.server.grpc import GrpcServer
from petps.server.tls import TlsFiles, use_safe_grpc_ciphers
from tests.certificates import Authority, Pair, replace
from tests.python.server.test_tls_files import Opened
from tests.python.waiting import wait_until

SECONDS = 60.0  # a deadline that no busy machine exceeds


class Calls:
    """No native server: health needs none."""

    def __init__(self, descriptor: int) -> None:
        self.ready_descriptor = descriptor

    def hold(self, count: int) -> None:
        """Count nothing."""

    def release(self, count: int) -> None:
        """Count nothing."""


@contextlib.contextmanager
def door(files: TlsFiles | None) -> Iterator[int]:
    descriptor = os.eventfd(0)
    server = GrpcServer(
        "127.0.0.1",
        0,
        None,  # type: ignore[arg-type]
        Calls(descriptor),  # type: ignore[arg-type]
        body_bytes=1 << 20,
        in_flight=64,
        status=dict,
        shard_map=lambda: None,
        address="",
        is_ready=lambda: True,
        tls=files,
        gate=_native.Gate("open"),
    )
    try:
        yield server.port
    finally:
        server.close(0.0)
        os.close(descriptor)


def ask(
    port: int, authority: Authority | None, pair: Pair | None = None, name: str | None = None
) -> None:
    """Ask a new connection for its health; without an authority, in plain text. Raises RpcError."""
    address = f"127.0.0.1:{port}"
    options: list[tuple[str, Any]] = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if name is not None:
        options.append(("grpc.ssl_target_name_override", name))
    if authority is None:
        channel = grpc.insecure_channel(address, options)
    else:
        credentials = grpc.ssl_channel_credentials(
            authority.certificate.read_bytes(),
            None if pair is None else pair.key.read_bytes(),
            None if pair is None else pair.certificate.read_bytes(),
        )
        channel = grpc.secure_channel(address, credentials, options)
    with contextlib.closing(channel):
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=SECONDS
        )
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


def refused(port: int, *arguments: Any) -> None:
    with pytest.raises(grpc.RpcError) as error:
        ask(port, *arguments)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.issue("server")


def test_a_client_trusts_its_ca(authority: Authority, pair: Pair, tmp_path: Path) -> None:
    with door(Opened(pair).files) as port:
        ask(port, authority)
        refused(port, Authority(tmp_path, "other-ca"))
        refused(port, None)
    with door(None) as port:
        ask(port, None)
        refused(port, authority)


def test_client_certificates(authority: Authority, pair: Pair, tmp_path: Path) -> None:
    good = authority.issue("client")
    config: dict[str, Any] = {"client_ca": authority.certificate}
    with door(Opened(pair, **config, client_certificates="required").files) as port:
        ask(port, authority, good)
        refused(port, authority)
        refused(port, authority, Authority(tmp_path, "other-ca").issue("other"))
        refused(port, authority, authority.issue("expired", days=-1))
    with door(Opened(pair, **config, client_certificates="optional").files) as port:
        ask(port, authority)


def test_another_client_ca_counts_for_new_connections(
    authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    clients, next_clients = Authority(tmp_path, "clients"), Authority(tmp_path, "next-clients")
    old, new = clients.issue("old"), next_clients.issue("new")
    opened = Opened(pair, client_ca=clients.certificate, client_certificates="required")
    with door(opened.files) as port:
        ask(port, authority, old)
        refused(port, authority, new)
        os.replace(next_clients.certificate, clients.certificate)
        opened.files.check()
        refused(port, authority, old)
        ask(port, authority, new)


def test_certificates_are_replaced_under_load_without_a_failed_call(
    authority: Authority, pair: Pair
) -> None:
    opened = Opened(pair)
    done = threading.Event()
    errors: list[BaseException] = []
    counts = [0, 0]

    def load(number: int) -> None:
        while not done.is_set():
            try:
                ask(port, authority)
                counts[number] += 1
            except BaseException as error:
                errors.append(error)
                return

    with door(opened.files) as port:
        threads = [threading.Thread(target=load, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        try:
            for number in range(5):
                before = list(counts)
                wait_until(lambda: errors or all(map(int.__gt__, counts, before)))  # noqa: B023
                names = f"DNS:localhost,IP:127.0.0.1,DNS:next-{number}.example"
                replace(pair, authority.issue(f"next-{number}", names))
                opened.files.check()
                ask(port, authority, name=f"next-{number}.example")
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert errors == []


def test_the_environment_cannot_weaken_the_ciphers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_SSL_CIPHER_SUITES", "AES128-SHA")
    use_safe_grpc_ciphers()
    suites = os.environ["GRPC_SSL_CIPHER_SUITES"].split(":")
    assert all(suite.startswith("ECDHE-") for suite in suites)
    assert all("GCM" in suite or "POLY1305" in suite for suite in suites)
