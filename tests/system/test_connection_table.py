"""Tries every row of "Connections" in docs/reference/access.md: what clients of each door see.

The certificates are real, the doors are those of whole servers, and the token is always right. So
only the connection decides.
"""

from __future__ import annotations

import contextlib
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import petps_client
import pytest

import petps
import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from petps import config
from petps.admin.client import AdminClient
from petps.config import RouterConfig, TlsConfig
from petps.errors import PetpsError
from petps.router.process import Routing
from petps.server import Serving
from petps.server.access_file import AccessFile, Entry, hash_of
from tests.certificates import Authority, Pair
from tests.system.access_document import rows_of

SECONDS: Final = 60.0
TOKEN: Final = "the-token-of-this-test"
DOORS: Final = ("native", "gRPC", "HTTP", "admin port")
ROUTER: Final = "router's "  # its doors are those of a server, without an admin port


@dataclass(frozen=True)
class Row:
    door: str
    connection: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.door}-{self.connection}"

    def allows(self, seen: str, text: str) -> bool:
        """Return whether the outcome is what was seen, with the quoted part in its text."""
        word, _, part = self.outcome.partition(" ")
        return word == seen and part.strip('"') in text


ROWS: Final = [Row(*cells) for cells in rows_of("Connections")]


@dataclass(frozen=True)
class Seen:
    """A client: what it trusts and shows."""

    speaks_tls: bool = True
    ca: Authority | None = None
    pair: Pair | None = None


@dataclass(frozen=True)
class World:
    servers: dict[str, Serving]
    routers: dict[str, Routing]
    authority: Authority
    other: Authority
    client: Pair
    token_file: Path

    def case(self, row: Row) -> tuple[Any, Seen]:
        """Return the server or router, and the client of a row."""
        of: Mapping[str, Any] = self.routers if row.door.startswith(ROUTER) else self.servers
        plain, required, elsewhere = (of[name] for name in ("plain", "required", "elsewhere"))
        good = Seen(ca=self.authority, pair=self.client)
        return {
            "all as it should be": (required, good),
            "no client certificate": (required, Seen(ca=self.authority)),
            "an expired client certificate": (
                required,
                Seen(ca=self.authority, pair=self.authority.issue("expired", days=-1)),
            ),
            "a client certificate of another CA": (
                required,
                Seen(ca=self.authority, pair=self.other.issue("stranger")),
            ),
            "plain text to a TLS port": (required, Seen(speaks_tls=False)),
            "TLS to a plain port": (plain, good),
            "the server's certificate is of an unknown CA": (
                required,
                Seen(ca=self.other, pair=self.client),
            ),
            "the server's certificate has another name": (elsewhere, good),
        }[row.connection]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("connections")
    authority, other = Authority(folder), Authority(folder, "other-ca")
    file = folder / "access.json"
    AccessFile(file).add(
        Entry(name="all", token_sha256=hash_of(TOKEN), roles=["read", "admin"], models="*")
    )
    (folder / "token").write_text(TOKEN)
    with contextlib.ExitStack() as stack:

        def serve(name: str, alternatives: str = "") -> Serving:
            path = folder / f"{name}.pool"
            with petps.create(path, durability="process") as pool:
                pool.create_table("items", dim=4, capacity=100)
                pool.push("items", [1], np.ones((1, 4), np.float32))
            sections: dict[str, Any] = {
                "pool": {"path": path},
                "server": {"port": 0, "http_port": 0, "grpc_port": 0, "admin_port": 0},
                "access": {"file": file},
            }
            if alternatives:
                pair = authority.issue(name, alternatives)
                sections["tls"] = {
                    "certificate": pair.certificate,
                    "key": pair.key,
                    "client_ca": authority.certificate,
                    "client_certificates": "required",
                }
            serving = Serving(config.merge(None, sections, "test"), log=lambda line: None)
            return stack.enter_context(serving)

        def route(tls: TlsConfig) -> Routing:
            url = f"petps://127.0.0.1:{servers['plain'].port}"
            router = {"servers": url, "port": 0, "http_port": 0, "grpc_port": 0}
            settings = RouterConfig.model_validate(router)
            return stack.enter_context(Routing(settings, tls, log=lambda line: None))

        servers = {
            "plain": serve("plain"),
            "required": serve("required", "DNS:localhost,IP:127.0.0.1"),
            "elsewhere": serve("elsewhere", "DNS:elsewhere.example"),
        }
        routers = {"plain": route(TlsConfig())}
        for name in ("required", "elsewhere"):
            files = servers[name]._config.tls
            routers[name] = route(TlsConfig(certificate=files.certificate, key=files.key))
        client = authority.issue("client")
        yield World(servers, routers, authority, other, client, folder / "token")


def native(serving: Serving | Routing, client: Seen) -> tuple[str, str]:
    tls = None
    if client.speaks_tls:
        assert client.ca is not None
        pair = client.pair
        tls = petps_client.Tls(
            client.ca.certificate,
            *(("", "") if pair is None else (pair.certificate, pair.key)),
        )
    scheme = "petps+tls" if client.speaks_tls else "petps"
    try:
        with petps_client.connect(
            f"{scheme}://127.0.0.1:{serving.port}/default",
            token=TOKEN,
            tls=tls,
            deadline_ms=round(1e3 * SECONDS),
        ) as connected:
            assert connected.pull("items", [1])[0, 0] == 1
    except PetpsError as error:
        return error.code, str(error)
    return "yes", ""


def by_grpc(serving: Serving | Routing, client: Seen) -> tuple[str, str]:
    address = f"127.0.0.1:{serving.grpc_port}"
    options = [("grpc.use_local_subchannel_pool", 1)]
    if client.speaks_tls:
        assert client.ca is not None
        pair = client.pair
        credentials = grpc.ssl_channel_credentials(
            client.ca.certificate.read_bytes(),
            None if pair is None else pair.key.read_bytes(),
            None if pair is None else pair.certificate.read_bytes(),
        )
        channel = grpc.secure_channel(address, credentials, options)
    else:
        channel = grpc.insecure_channel(address, options)
    with contextlib.closing(channel):
        try:
            stubs.PetpsStub(channel).Pull(
                messages.PullRequest(table="items", keys=np.array([1], "<u8").tobytes()),
                metadata=(("authorization", f"Bearer {TOKEN}"),),
                timeout=SECONDS,
            )
        except grpc.RpcError as error:
            return error.code().name, str(error.details())
    return "yes", ""


def by_http(serving: Serving | Routing, client: Seen) -> tuple[str, str]:
    context = None
    if client.speaks_tls:
        assert client.ca is not None
        context = client.ca.client_context(client.pair)
    url = f"http{'s' if client.speaks_tls else ''}://127.0.0.1:{serving.http_port}/metrics"
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"})
    try:
        with urllib.request.urlopen(request, context=context, timeout=SECONDS):
            return "yes", ""
    except urllib.error.HTTPError as error:
        with error:
            return str(error.code), error.read().decode()
    except OSError as error:
        # urllib wraps what happens until the request is sent, and not what happens later.
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            return "refused", str(reason)
        return "closed", str(reason)


def administer(
    serving: Serving, client: Seen, monkeypatch: pytest.MonkeyPatch, token_file: Path
) -> tuple[str, str]:
    variables: dict[str, Path | None] = {
        "PETPS_TLS_CA": None if client.ca is None else client.ca.certificate,
        "PETPS_TLS_CERTIFICATE": None if client.pair is None else client.pair.certificate,
        "PETPS_TLS_KEY": None if client.pair is None else client.pair.key,
        "PETPS_TOKEN_FILE": token_file,
    }
    for name, path in variables.items():
        monkeypatch.setenv(name, "" if path is None else str(path))
    scheme = "petps+admin+tls" if client.speaks_tls else "petps+admin"
    try:
        with contextlib.closing(AdminClient(f"{scheme}://127.0.0.1:{serving.admin_port}")) as admin:
            admin.status()
    except PetpsError as error:
        return error.code, str(error)
    return "yes", ""


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row(row: Row, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    serving, client = world.case(row)
    attempts: dict[str, Callable[[], tuple[str, str]]] = {
        "native": lambda: native(serving, client),
        "gRPC": lambda: by_grpc(serving, client),
        "HTTP": lambda: by_http(serving, client),
        "admin port": lambda: administer(serving, client, monkeypatch, world.token_file),
    }
    seen, text = attempts[row.door.removeprefix(ROUTER)]()
    assert row.allows(seen, text), f"{seen}: {text}"


def test_the_table_has_every_door_with_every_connection(world: World) -> None:
    connections = {row.connection for row in ROWS}
    assert len(connections) == 8
    of_routers = {text for text in connections if "client certificate" not in text}
    assert {(row.door, row.connection) for row in ROWS} == {
        *((door, connection) for door in DOORS for connection in connections),
        *((ROUTER + door, text) for door in DOORS[:-1] for text in of_routers),
    }
