"""Commands through a server's admin port, and what a client's address is not good for."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petps import config
from petps.errors import InvalidArgument, Unavailable
from petps.pool.audited import audit_log_of
from petps.server import Serving
from tests.certificates import Authority
from tests.python.cli.conftest import COUNT, Command
from tests.python.cli.test_served import ignore


def settings(path: Path, **server: Any) -> config.Config:
    given: dict[str, dict[str, Any]] = {
        "pool": {"path": path},
        "server": {"port": 0, "http": False, "grpc": False} | server,
    }
    return config.merge(None, given, "test")


@pytest.fixture
def serving(filled: Path) -> Iterator[Serving]:
    with Serving(settings(filled, admin_port=0, insecure=True), log=ignore) as server:
        yield server


@pytest.fixture(params=["plain", "tls"])
def target(
    request: pytest.FixtureRequest, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    if request.param == "plain":
        serving = request.getfixturevalue("serving")
        yield f"petps+admin://127.0.0.1:{serving.admin_port}"
        return
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    tls = config.TlsConfig(certificate=pair.certificate, key=pair.key)
    given = settings(filled, admin_port=0, insecure=True).model_copy(update={"tls": tls})
    monkeypatch.setenv("PETPS_TLS_CA", str(authority.certificate))
    with Serving(given, log=ignore) as serving:
        yield f"petps+admin+tls://127.0.0.1:{serving.admin_port}"


def test_commands_take_the_admin_port(
    run: Command, filled: Path, target: str, tmp_path: Path
) -> None:
    assert run.json("status", target)["tables"][0]["rows"] == COUNT
    for rows in (("pull", target, "items", 7), ("push", target, "items", "7=1,2,3,4")):
        assert "rows do not cross an admin port" in run.fails(2, *rows)
    assert run.json("create", target, "--add", "--table", "ads:8:f16:2k")["created"] is False
    assert "add tables to its pool with --add" in run.fails(
        2, "create", target, "--table", "x:8:f16:2k"
    )
    run("table", "drop", target, "ads", "--yes")
    run("create", filled, "--add", "--instance", "default@1")
    run("table", "grow", target, "items", "--capacity", "400k")
    assert run.json("alias", target, "default@1", "--yes")["before"] == "default@0"
    run("alias", target, "--back", "--yes")
    assert run.json("drop", target, "default@1", "--yes") == {"dropped": "default@1"}
    assert run.json("shrink", target)["shrunk_bytes"] > 0
    assert run.json("export", target, tmp_path / "base")["tables"][0]["rows"] == COUNT
    assert run.json("verify", target)["rows"] == COUNT
    log = audit_log_of(filled)
    assert log is not None
    lines = log.read_text().splitlines()
    (dropped,) = [line for line in lines if "drop instance default@1" in line]
    assert "ipv4:127.0.0.1:" in dropped
    (created,) = [line for line in lines if "create instance default@1" in line]
    assert "ipv4" not in created, "by the socket"
    assert any("drop table ads of default@0" in line for line in lines)


def test_it_listens_on_loopback_only(serving: Serving) -> None:
    assert serving.admin_port is not None
    found = []
    for table, length in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            address, _, port = line.split()[1].partition(":")
            if int(port, 16) == serving.admin_port and line.split()[3] == "0A":
                assert len(address) == length
                found.append(address)
    assert found in (["0100007F"], ["0000000000000000FFFF00000100007F"])  # or as gRPC maps it


def test_without_it_there_is_no_port(filled: Path) -> None:
    with Serving(settings(filled), log=ignore) as server:
        assert server.admin_port is None


def test_it_needs_insecure(filled: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"admin_port asks nobody.*server.insecure"):
        Serving(settings(filled, admin_port=7073), log=ignore)


def test_a_port_in_use_is_an_error(filled: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"127.0.0.1:{port} is not available"):
            Serving(settings(filled, admin_port=port, insecure=True), log=ignore)


def test_a_pool_without_a_place_for_a_socket_has_the_port(filled: Path) -> None:
    odd = filled.rename(filled.with_name("odd%.pool"))
    lines: list[str] = []
    with Serving(settings(odd, admin_port=0, insecure=True), log=lines.append) as server:
        assert server.admin_port is not None
        assert any("no admin socket: the path" in line for line in lines)


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:7073/m", "unix:/s", ":7073"])
def test_an_address_has_a_host_and_a_port(run: Command, address: str) -> None:
    message = run.fails(2, "status", f"petps+admin://{address}")
    assert "write petps+admin://HOST:PORT" in message


def test_another_port_is_no_admin_port(run: Command, filled: Path) -> None:
    config_ = settings(filled, grpc=True, grpc_port=0)
    with Serving(config_, log=ignore) as server:
        run.fails(1, "status", f"petps+admin://127.0.0.1:{server.grpc_port}")


def test_names_without_end_are_cut_in_the_audit_log(
    run: Command, filled: Path, serving: Serving
) -> None:
    target = f"petps+admin://127.0.0.1:{serving.admin_port}"
    run.fails(2, "alias", target, "default@0", "--name", "x" * 50_000, "--yes")
    log = audit_log_of(filled)
    assert log is not None
    assert max(map(len, log.read_text().splitlines())) < 5000


def test_nobody_answers(run: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    message = run.fails(7, "status", f"petps+admin://127.0.0.1:{port}")
    assert f"petps+admin://127.0.0.1:{port} does not answer" in message


@pytest.mark.parametrize(
    "command",
    [
        ("alias", "default@1", "--yes"),
        ("drop", "default@1", "--yes"),
        ("shrink",),
        ("verify",),
        ("export", "base"),
        ("create", "--add", "--table", "t:4:f32:1k"),
        ("ingest", "pause"),
        ("backup", "store"),
        ("scrub",),
        ("log-level", "info"),
    ],
)
def test_an_address_for_clients_is_refused(run: Command, command: tuple[str, ...]) -> None:
    name, *rest = command
    first = [name, rest.pop(0)] if name == "ingest" else [name]
    message = run.fails(2, *first, "petps://127.0.0.1:7070", *rest)
    assert "name the pool by its path" in message
    assert "petps+admin://" in message
