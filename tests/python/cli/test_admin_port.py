"""Commands through a server's admin port, and what a client's address is not good for."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps import config
from petps.errors import InvalidArgument, Unavailable
from petps.pool.audited import audit_log_of
from petps.server import Serving
from tests.python.cli.conftest import COUNT, Command, expected, save_rows
from tests.python.cli.test_served import ignore


def settings(path: Path, **server: Any) -> config.Config:
    given: dict[str, dict[str, Any]] = {
        "pool": {"path": path},
        "server": {"port": 0, "http": False, "grpc": False} | server,
    }
    return config.merge(None, given, "test")


@pytest.fixture
def filled(run: Command, pool: Path, tmp_path: Path) -> Path:
    """Return the pool with COUNT rows."""
    run("load", pool, "items", save_rows(tmp_path / "rows.npz"))
    return pool


@pytest.fixture
def serving(filled: Path) -> Iterator[Serving]:
    with Serving(settings(filled, admin_port=0, insecure=True), log=ignore) as server:
        yield server


def test_commands_take_the_admin_port(
    run: Command, filled: Path, serving: Serving, tmp_path: Path
) -> None:
    target = f"petps+admin://127.0.0.1:{serving.admin_port}"
    assert run.json("status", target)["tables"][0]["rows"] == COUNT
    row = run.json("pull", target, "items", 7)["rows"][0]["row"]
    assert row == expected(np.array([7], np.uint64))[0].tolist()
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
    with pytest.raises(InvalidArgument, match=r"admin_port asks nobody.*insecure = true"):
        settings(filled, admin_port=7073)


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
        ("ingest", "pause"),
    ],
)
def test_an_address_for_clients_is_refused(run: Command, command: tuple[str, ...]) -> None:
    name, *rest = command
    first = [name, rest.pop(0)] if name == "ingest" else [name]
    message = run.fails(2, *first, "petps://127.0.0.1:7070", *rest)
    assert "name the pool by its path" in message
    assert "petps+admin://" in message
