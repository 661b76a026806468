"""Certificate, CA and token are replaced under load. No pull fails, at any door of `petps serve`.

Each pull has a new connection, which uses the files as they are at that moment.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import petps_client
import pytest

import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from petps.server.access_file import AccessFile, Entry, hash_of, new_token
from tests.certificates import Authority, Pair, replace
from tests.system.frames import Connection
from tests.system.routers import Router
from tests.system.servers import WAIT_MS, WAIT_SECONDS, Server, petps, wait_until
from tests.system.test_router import route

__all__ = ["route"]  # a fixture

pytestmark = pytest.mark.system


def put(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    temporary = path.with_suffix(".new")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def entry(name: str, token: str) -> Entry:
    return Entry(name=name, token_sha256=hash_of(token), roles=["read"], models="*")


class Files:
    """The files of the clients. Each changes atomically, so a client reads no half of a pair."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.ca = folder / "ca.pem"  # of server and clients
        self.pair = folder / "client.pem"  # certificate and key
        self.token = folder / "token"

    def show(self, pair: Pair) -> None:
        put(self.pair, pair.certificate.read_bytes() + pair.key.read_bytes())


class Doors:
    """A pull at each door, over a new connection."""

    def __init__(self, facts: dict[str, Any], files: Files) -> None:
        self._facts, self._files = facts, files
        self.tls = petps_client.Tls(files.ca, files.pair, files.pair)
        self.url = f"petps+tls://127.0.0.1:{facts['port']}/default"

    def native(self) -> None:
        with petps_client.connect(
            self.url, tls=self.tls, token_file=self._files.token, deadline_ms=WAIT_MS
        ) as client:
            assert client.pull("items", [1])[0, 0] == 1.0

    def grpc(self) -> None:
        ca, pair = self._files.ca.read_bytes(), self._files.pair.read_bytes()
        token = self._files.token.read_text()
        options = [("grpc.use_local_subchannel_pool", 1)]
        credentials = grpc.ssl_channel_credentials(ca, pair, pair)
        address = f"127.0.0.1:{self._facts['grpc_port']}"
        with grpc.secure_channel(address, credentials, options) as channel:
            reply = stubs.PetpsStub(channel).Pull(
                messages.PullRequest(table="items", keys=np.array([1], "<u8").tobytes()),
                metadata=(("authorization", f"Bearer {token}"),),
                timeout=WAIT_SECONDS,
            )
        assert reply.rows.rows_found == 1

    def http(self) -> None:
        context = ssl.create_default_context(cafile=str(self._files.ca))
        own = self._files.pair.with_suffix(".http")  # load_cert_chain() reads its file twice
        own.write_bytes(self._files.pair.read_bytes())
        context.load_cert_chain(own)
        request = urllib.request.Request(
            f"https://127.0.0.1:{self._facts['http_port']}/metrics",
            headers={"authorization": f"Bearer {self._files.token.read_text()}"},
        )
        with urllib.request.urlopen(request, context=context, timeout=WAIT_SECONDS) as answer:
            assert answer.status == 200


class Load:
    """Threads that repeat a call until the end of the block. No call may fail."""

    def __init__(self, calls: dict[str, Callable[[], object]]) -> None:
        self._counts = dict.fromkeys(calls, 0)
        self._faults: list[tuple[str, BaseException]] = []
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=call, daemon=True) for call in calls.items()
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        self.wait_for_calls()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
        assert self._faults == []

    def wait_for_calls(self) -> None:
        """Wait until every thread has made two calls: the second began after this moment."""
        before = dict(self._counts)

        def is_done() -> bool:
            assert self._faults == []
            return all(self._counts[name] >= before[name] + 2 for name in before)

        wait_until("every door has answered twice", is_done)

    def _repeat(self, name: str, call: Callable[[], object]) -> None:
        try:
            while not self._done.is_set():
                call()
                self._counts[name] += 1
        except BaseException as fault:
            self._faults.append((name, fault))


@contextmanager
def load_of(doors: Doors, files: Files) -> Iterator[Load]:
    """Yield the load of every door, and of a client that stays."""
    with petps_client.connect(
        doors.url, tls=doors.tls, token_file=files.token, deadline_ms=WAIT_MS
    ) as lasting:
        calls: dict[str, Callable[[], object]] = {
            "a lasting client": lambda: lasting.pull("items", [1]),
            "native": doors.native,
            "gRPC": doors.grpc,
            "HTTP": doors.http,
        }
        with Load(calls) as load:
            yield load


def wait_for_line(process: Server | Router, text: str, count: int = 1) -> None:
    """Wait until the process has printed a text so often."""
    wait_until(text, lambda: process.output.count(text) >= count)


def replace_token(access: AccessFile, files: Files, load: Load, server: Server) -> None:
    """Let the server know a second token before clients have it, then revoke the first."""
    token = new_token()
    access.add(entry("second", token))
    wait_for_line(server, "2 grants are in use")
    put(files.token, token.encode())
    load.wait_for_calls()
    access.remove("first")
    wait_for_line(server, "1 grant is in use")
    load.wait_for_calls()


def test_everything_is_replaced_under_load_without_a_failed_pull(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    folder, files = tmp_path / "certificates", Files(tmp_path / "client")
    folder.mkdir()
    old, new = Authority(folder, "old"), Authority(folder, "new")
    pair = old.issue("server")
    token = new_token()
    access = AccessFile(tmp_path / "access.json")
    access.add(entry("first", token))
    put(files.ca, old.certificate.read_bytes())
    put(files.token, token.encode())
    files.show(old.issue("client"))
    pool = tmp_path / "my.pool"
    petps("create", pool, "--table", "items:4:f32:1k", "--durability", "process")
    petps("push", pool, "items", "1=1,2,3,4")
    settings = tmp_path / "petps.toml"
    settings.write_text(f"""
[pool]
path = "{pool}"
[tls]
certificate = "{pair.certificate}"
key = "{pair.key}"
client_ca = "{files.ca}"
client_certificates = "required"
[access]
file = "{tmp_path / "access.json"}"
""")
    server = serve(pool, "--config", settings)
    doors = Doors(server.wait_ready(), files)

    with load_of(doors, files) as load:
        # The server's certificate and key, which change one after the other.
        names = "DNS:localhost,IP:127.0.0.1,DNS:"
        replace(pair, old.issue("next", f"{names}next.example"))
        wait_for_line(server, "next.example")
        load.wait_for_calls()

        # The CA: both are trusted first, then all certificates change, then the old one goes.
        put(files.ca, old.certificate.read_bytes() + new.certificate.read_bytes())
        wait_for_line(server, "next.example", 2)  # the server uses the bundle
        files.show(new.issue("client-2"))
        load.wait_for_calls()
        replace(pair, new.issue("last", f"{names}last.example"))
        wait_for_line(server, "last.example")
        # A handshake that began with the old certificate must end before its CA is distrusted.
        load.wait_for_calls()
        put(files.ca, new.certificate.read_bytes())
        wait_for_line(server, "last.example", 2)
        load.wait_for_calls()

        replace_token(access, files, load, server)

    files.show(old.issue("late"))
    with pytest.raises(petps_client.Unauthenticated, match="certificate"):
        doors.native()
    server.end()


def test_a_router_uses_new_files_under_load_without_a_failed_pull(
    serve: Callable[..., Server], route: Callable[..., Router], tmp_path: Path
) -> None:
    """Its callers change to another CA, and to another token, whose grant is at the server."""
    folder, files = tmp_path / "certificates", Files(tmp_path / "client")
    folder.mkdir()
    old, new = Authority(folder, "old"), Authority(folder, "new")
    pair, token = old.issue("router"), new_token()
    access = AccessFile(tmp_path / "access.json")
    access.add(entry("first", token))
    put(files.ca, old.certificate.read_bytes() + new.certificate.read_bytes())
    put(files.token, token.encode())
    files.show(old.issue("client"))
    pool = tmp_path / "my.pool"
    petps("create", pool, "--table", "items:4:f32:1k", "--durability", "process")
    petps("push", pool, "items", "1=1,2,3,4")
    of_server, of_router = tmp_path / "petps.toml", tmp_path / "router.toml"
    of_server.write_text(f'[pool]\npath = "{pool}"\n[access]\nfile = "{tmp_path}/access.json"\n')
    of_router.write_text(f'[tls]\ncertificate = "{pair.certificate}"\nkey = "{pair.key}"\n')
    server = serve(pool, "--config", of_server)
    url = f"petps://127.0.0.1:{server.wait_ready()['port']}"
    router = route(url, "--config", of_router)
    doors = Doors(router.wait_ready(), files)

    with load_of(doors, files) as load:
        replace(pair, new.issue("last", "DNS:localhost,IP:127.0.0.1,DNS:last.example"))
        wait_for_line(router, "last.example")
        load.wait_for_calls()
        put(files.ca, new.certificate.read_bytes())
        load.wait_for_calls()
        replace_token(access, files, load, server)
    server.end()


def test_a_revoked_token_ends_at_every_door(serve: Callable[..., Server], tmp_path: Path) -> None:
    """It prints after how many seconds: less than one, unless the machine is busy."""
    pool, access = tmp_path / "pool", AccessFile(tmp_path / "access.json")
    petps("create", pool, "--table", "items:4:f32:100")
    for name in ("stays", "ends"):
        access.add(entry(name, f"the-token-that-{name}"))
    settings = tmp_path / "petps.toml"
    settings.write_text(f'[pool]\npath = "{pool}"\n[access]\nfile = "{tmp_path}/access.json"\n')
    server = serve(pool, "--config", settings)
    facts = server.wait_ready()
    header = "Bearer the-token-that-ends"
    with (
        closing(Connection(facts["port"], WAIT_SECONDS)) as idle,
        grpc.insecure_channel(f"127.0.0.1:{facts['grpc_port']}") as channel,
    ):
        idle.hello("the-token-that-ends")

        def is_refused_by_grpc() -> bool:
            call = stubs.PetpsStub(channel).ListTables
            try:
                call(messages.ListTablesRequest(), metadata=(("authorization", header),))
            except grpc.RpcError as error:
                return error.code() is grpc.StatusCode.UNAUTHENTICATED
            return False

        def is_refused_by_http() -> bool:
            url = f"http://127.0.0.1:{facts['http_port']}/metrics"
            request = urllib.request.Request(url, headers={"Authorization": header})
            try:
                urllib.request.urlopen(request, timeout=WAIT_SECONDS).close()
            except urllib.error.HTTPError as error:
                return error.code == 401
            return False

        assert not is_refused_by_grpc()
        assert not is_refused_by_http()
        seconds: dict[str, float] = {}
        waiting = {
            "native": lambda: idle.read_to_end() is not None,  # it waits for the server's close
            "gRPC": is_refused_by_grpc,
            "HTTP": is_refused_by_http,
        }

        def measure(door: str, condition: Callable[[], bool]) -> None:
            wait_until(f"{door} refuses the token", condition)
            seconds[door] = time.monotonic() - revoked_at

        access.remove("ends")
        revoked_at = time.monotonic()
        threads = [threading.Thread(target=measure, args=case) for case in waiting.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print({door: round(after, 2) for door, after in sorted(seconds.items())})
    assert seconds.keys() == waiting.keys()
    server.end()
