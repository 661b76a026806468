"""The admin port with TLS, and commands as its clients."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from petps import _native
from petps.admin.client import AdminClient
from petps.errors import InvalidArgument, Unavailable
from petps.server.admin import AdminServer
from petps.server.tls import TlsFiles
from tests.certificates import Authority, Pair, replace
from tests.python.server.test_tls_files import Opened

WITHOUT_FORWARD_SECRECY = "AES128-GCM-SHA256"
CBC = "ECDHE-ECDSA-AES128-SHA"
SAFE = "ECDHE-ECDSA-AES128-GCM-SHA256"


class Served:
    def status(self) -> dict[str, Any]:
        return {"answered": True}


@contextlib.contextmanager
def door(files: TlsFiles | None) -> Iterator[int]:
    place = ("127.0.0.1", 0)
    server = AdminServer(place, None, Served(), print, _native.Gate("open"), files)  # type: ignore[arg-type]
    with contextlib.closing(server):
        assert server.port is not None
        yield server.port


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.issue("server")


@pytest.fixture
def ask(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Return a function that asks a port for the status, as a client with this certificate."""

    def ask_now(
        port: int, pair: Pair | None = None, scheme: str = "petps+admin+tls", **options: Any
    ) -> bool:
        variables = {
            "PETPS_TLS_CA": authority.certificate,
            "PETPS_TLS_CERTIFICATE": pair and pair.certificate,
            "PETPS_TLS_KEY": pair and pair.key,
            "PETPS_TLS_SERVER_NAME": None,
        } | options
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, str(value))
        with contextlib.closing(AdminClient(f"{scheme}://127.0.0.1:{port}")) as client:
            return bool(client.status()["answered"])

    return ask_now


def test_a_client_trusts_its_ca_and_the_name(
    authority: Authority, pair: Pair, tmp_path: Path, ask: Callable[..., bool]
) -> None:
    with door(Opened(pair).files) as port:
        assert ask(port)
        assert ask(port, PETPS_TLS_SERVER_NAME="localhost")
        with pytest.raises(Unavailable):
            ask(port, PETPS_TLS_SERVER_NAME="other.example")
        with pytest.raises(Unavailable):
            ask(port, PETPS_TLS_CA=Authority(tmp_path, "other-ca").certificate)
        with pytest.raises(Unavailable):
            ask(port, PETPS_TLS_CA=None)
        with pytest.raises(Unavailable, match=r"if the port speaks TLS, write petps\+admin\+tls"):
            ask(port, scheme="petps+admin")
    with door(None) as port:
        assert ask(port, scheme="petps+admin")
        with pytest.raises(Unavailable):
            ask(port)


def test_wrong_variables_are_named(pair: Pair, tmp_path: Path, ask: Callable[..., bool]) -> None:
    with pytest.raises(InvalidArgument, match=r"PETPS_TLS_CA: .*none cannot be read: No such"):
        ask(1, PETPS_TLS_CA=tmp_path / "none")
    with pytest.raises(InvalidArgument, match="PETPS_TLS_CERTIFICATE and PETPS_TLS_KEY belong"):
        ask(1, PETPS_TLS_KEY=pair.key)


def test_client_certificates(
    authority: Authority, pair: Pair, tmp_path: Path, ask: Callable[..., bool]
) -> None:
    good = authority.issue("client")
    other = Authority(tmp_path, "other-ca").issue("other")
    expired = authority.issue("expired", days=-1)
    config: dict[str, Any] = {"client_ca": authority.certificate}
    with door(Opened(pair, **config, client_certificates="required").files) as port:
        assert ask(port, good)
        for refused in (None, other, expired):
            with pytest.raises(Unavailable):
                ask(port, refused)
    # grpcio cannot ask for a certificate without requiring one, so it asks for none.
    with door(Opened(pair, **config, client_certificates="optional").files) as port:
        assert ask(port)
        assert ask(port, other)


def test_new_connections_use_replaced_certificates(
    authority: Authority, pair: Pair, ask: Callable[..., bool]
) -> None:
    opened = Opened(pair)
    with door(opened.files) as port:
        for number in range(3):
            new = authority.issue(f"next-{number}", f"DNS:next-{number}.example")
            replace(pair, new)
            opened.files.check()
            assert ask(port, PETPS_TLS_SERVER_NAME=f"next-{number}.example")
            with pytest.raises(Unavailable):
                ask(port, PETPS_TLS_SERVER_NAME="localhost")


@pytest.mark.parametrize(
    ("lowest", "highest", "ciphers", "is_accepted"),
    [
        (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_3, None, True),
        (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2, SAFE, True),
        (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2, CBC, False),
        (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2, WITHOUT_FORWARD_SECRECY, False),
        (ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_1, "ALL:@SECLEVEL=0", False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*TLSv1_1 is deprecated:DeprecationWarning")
def test_only_safe_ciphers(
    authority: Authority,
    pair: Pair,
    lowest: ssl.TLSVersion,
    highest: ssl.TLSVersion,
    ciphers: str | None,
    is_accepted: bool,
) -> None:
    context = authority.client_context()
    context.minimum_version, context.maximum_version = lowest, highest
    context.set_alpn_protocols(["h2"])
    if ciphers is not None:
        context.set_ciphers(ciphers)
    expected = (
        contextlib.nullcontext()
        if is_accepted
        else pytest.raises(OSError, match=r"(?i)alert|handshake|protocol|cipher|reset|eof")
    )
    with (
        door(Opened(pair).files) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        expected,
    ):
        context.wrap_socket(plain, server_hostname="localhost").close()
