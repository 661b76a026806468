"""The client of etcd against a real etcd: transactions, leases, failover, TLS, credentials."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from petps.cluster import etcd as etcd_module
from petps.cluster.etcd import Access, Compare, Etcd
from petps.errors import FailedPrecondition, InvalidArgument, PermissionDenied, Unavailable
from tests.certificates import Authority
from tests.etcd.server import EtcdServers, NotAvailable
from tests.ports import stable_port

Make = Callable[..., EtcdServers]
SECONDS = 30.0  # for etcd to answer, on a disk that stalls


def test_reads_transactions_and_leases(make_etcd: Make) -> None:
    etcd = Etcd(make_etcd().access(), seconds=SECONDS)
    first = etcd.commit((Compare("/a/x", 0),), {"/a/x": "1", "/a/y": "é"})
    assert first is not None
    assert etcd.commit((Compare("/a/x", 0),), {"/a/x": "2"}) is None
    read = etcd.read("/a/")
    assert {key: value.text for key, value in read.values.items()} == {"/a/x": "1", "/a/y": "é"}
    assert read.revision == first == read.values["/a/x"].changed
    second = etcd.commit((Compare("/a/x", first),), {"/a/x": "2"}, ("/a/y",))
    assert second is not None
    assert etcd.commit((Compare("/a/x", first),), {"/a/x": "3"}) is None
    assert etcd.commit((Compare("/a/x", first, is_created=True),), {"/b": "b"}) is not None
    changed = etcd.read("/a/", since=second)
    assert {key: value.text for key, value in changed.values.items()} == {"/a/x": "2"}
    assert etcd.read("/a/", since=second + 1).values == {}
    lease = etcd.grant(60)
    etcd.commit((), {"/a/leased": "z"}, lease=lease)
    assert etcd.read("/a/leased").values["/a/leased"].lease == lease
    assert etcd.keep_alive(lease)
    etcd.revoke(lease)
    assert etcd.read("/a/leased").values == {}
    assert not etcd.keep_alive(lease)
    with pytest.raises(FailedPrecondition, match="the lease has ended"):
        etcd.commit((), {"/a/leased": "z"}, lease=lease)
    etcd.close()


def test_a_call_turns_to_another_endpoint(make_etcd: Make) -> None:
    servers = make_etcd(3)
    dead = f"http://127.0.0.1:{stable_port()}"
    etcd = Etcd(replace(servers.access(), endpoints=(dead, *servers.endpoints)), patience=60)
    etcd.commit((), {"/k": "1"})
    assert etcd.answered_at is not None
    servers.kill(0)
    etcd.commit((), {"/k": "2"})
    assert etcd.read("/k").values["/k"].text == "2"
    etcd.close()
    servers.kill(1)  # the majority is lost, so a read that must be current has no answer
    impatient = Etcd(servers.access(), seconds=0.3)
    with pytest.raises(Unavailable, match="etcd does not answer: http://") as error:
        impatient.read("/k")
    assert all(endpoint in str(error.value) for endpoint in servers.endpoints)
    impatient.close()


def test_a_silent_endpoint_is_left_after_its_time(make_etcd: Make) -> None:
    servers = make_etcd(3)
    servers.pause(0)
    etcd = Etcd(servers.access(), seconds=0.5, patience=60)
    etcd.commit((), {"/k": "1"})
    servers.resume(0)
    etcd.close()


def test_an_endpoint_of_something_else_is_named() -> None:
    etcd = Etcd(Access((f"http://127.0.0.1:{stable_port()}",)), seconds=0.2)
    with pytest.raises(Unavailable, match="Connection refused"):
        etcd.read("/")
    with pytest.raises(InvalidArgument, match="names no endpoint"):
        Etcd(Access(()))


def test_a_prefix_with_too_many_keys_is_named(
    make_etcd: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module, "KEYS_MAX", 3)
    etcd = Etcd(make_etcd().access(), seconds=SECONDS)
    etcd.commit((), {f"/a/{number}": "x" for number in range(3)})
    assert len(etcd.read("/a/").values) == 3
    last = etcd.commit((), {"/a/3": "x"})
    assert last is not None
    with pytest.raises(Unavailable, match="etcd has 4 keys that begin with '/a/', and at most 3"):
        etcd.read("/a/")
    assert len(etcd.read("/a/", since=last).values) == 1
    etcd.close()


@pytest.mark.parametrize("is_chunked", [False, True], ids=["plain", "chunked"])
@pytest.mark.parametrize("status", [200, 307, 500])
def test_a_reply_without_end_is_left(
    status: int, is_chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module, "REPLY_BYTES_MAX", 1 << 20)
    sent: list[int] = []

    class Endless(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            if is_chunked:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            part = b"10000\r\n" * is_chunked + bytes(1 << 16) + b"\r\n" * is_chunked
            self.close_connection = True
            try:
                while sum(sent) < 256 << 20:  # so that the test ends without a limit too
                    self.wfile.write(part)
                    sent.append(len(part))
            except OSError:
                return

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endless) as endless:
        threading.Thread(target=endless.serve_forever, args=(0.05,), daemon=True).start()
        endpoint = f"http://127.0.0.1:{endless.server_address[1]}"
        etcd = Etcd(Access((endpoint,)), seconds=SECONDS)
        with pytest.raises(Unavailable, match=f"{endpoint}: the reply has more than 1,048,576 b"):
            etcd.read("/petps/")
        etcd.close()
        endless.shutdown()
    assert sum(sent) < 64 << 20  # what was read, and what the kernel holds


class Guarded(EtcdServers):
    """An etcd with TLS."""

    scheme = "https"

    def __init__(self, folder: Path, access: Access, options: tuple[str, ...]) -> None:
        self.secured = access
        super().__init__(folder, 1, options)

    def access(self) -> Access:
        return replace(self.secured, endpoints=tuple(self.endpoints))


@pytest.fixture
def make_guarded(tmp_path: Path) -> Iterator[Callable[..., Guarded]]:
    """Yield a function that starts an etcd with TLS; asks: for a client's certificate."""
    authority = Authority(tmp_path)
    server, client = authority.issue("server"), authority.issue("client")
    running: list[Guarded] = []

    def make(*, asks: bool) -> Guarded:
        access = Access((), ca=authority.certificate)
        options: tuple[str, ...] = (
            "--cert-file", str(server.certificate), "--key-file", str(server.key),
        )  # fmt: skip
        if asks:
            access = replace(access, certificate=client.certificate, key=client.key)
            options += ("--client-cert-auth", "--trusted-ca-file", str(authority.certificate))
        try:
            running.append(Guarded(tmp_path / "etcd", access, options))
        except NotAvailable as reason:
            pytest.skip(f"no etcd: {reason}")
        return running[-1]

    yield make
    for servers in running:
        servers.close()


def enable_users(etcd: Etcd) -> None:
    """Give etcd the user petps, who may use what begins with /petps, and ask for users."""
    permission = {"permType": "READWRITE", "key": "L3BldHBz", "range_end": "L3BldHB0"}
    for path, body in (
        ("auth/user/add", {"name": "root", "password": "a-root-password"}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
        ("auth/user/add", {"name": "petps", "password": "a-password"}),
        ("auth/role/add", {"name": "petps"}),
        ("auth/role/grant", {"name": "petps", "perm": permission}),
        ("auth/user/grant", {"user": "petps", "role": "petps"}),
        ("auth/enable", {}),
    ):
        etcd._call(path, body)


def test_client_certificates(make_guarded: Callable[..., Guarded]) -> None:
    servers = make_guarded(asks=True)
    etcd = Etcd(servers.access(), seconds=SECONDS)
    etcd.commit((), {"/petps/x": "1"})
    for access in (
        replace(servers.access(), certificate=None, key=None),
        replace(servers.access(), ca=None),
    ):
        other = Etcd(access, seconds=SECONDS)
        with pytest.raises(Unavailable, match=r"(?i)ssl|certificate"):
            other.read("/petps/")
        other.close()
    enable_users(etcd)
    with pytest.raises(PermissionDenied, match="without a common name"):
        etcd.read("/petps/")
    etcd.close()


def test_users_and_passwords(make_guarded: Callable[..., Guarded]) -> None:
    servers = make_guarded(asks=False)
    etcd = Etcd(servers.access(), seconds=SECONDS)
    etcd.commit((), {"/petps/x": "1", "/other": "1"})
    enable_users(etcd)
    with pytest.raises(PermissionDenied, match="etcd refuses the request"):
        etcd.read("/petps/")
    access = replace(servers.access(), user="petps", password=lambda: "a-password")
    own = Etcd(access, seconds=SECONDS)
    assert own.read("/petps/").values["/petps/x"].text == "1"
    with pytest.raises(PermissionDenied, match="permission denied"):
        own.read("/other")
    for client in own._clients.values():  # as after five minutes without a call
        client.session.headers["Authorization"] = "forgotten.1"
    assert own.read("/petps/").values["/petps/x"].text == "1"
    wrong = Etcd(replace(access, password=lambda: "another-password"), seconds=SECONDS)
    with pytest.raises(PermissionDenied, match="refuses the user 'petps'") as error:
        wrong.read("/petps/")
    assert "another-password" not in str(error.value)
    assert "a-password" not in repr(access)
    for client in (etcd, own, wrong):
        client.close()
