"""What SIGHUP changes in a running server, and what a configuration that cannot be used changes."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from petps import config
from petps.config import changes, replaced
from petps.errors import PetpsError
from petps.log import WARNING, Line
from petps.server import Serving
from petps.server.access_file import hash_of, new_token
from tests.certificates import Authority, Pair
from tests.python.server.conftest import settings
from tests.python.waiting import wait_until


def access_file(path: Path, *names: str) -> Path:
    grants = [
        {"name": name, "token_sha256": hash_of(new_token()), "roles": ["read"], "models": "*"}
        for name in names
    ]
    path.write_text(json.dumps({"format": "petps access 1", "grants": grants}))
    return path


def certificate_of(authority: Authority, port: int | None) -> str:
    """Return the name in the certificate that a port shows."""
    assert port is not None
    context = authority.client_context()
    context.check_hostname = False
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
        context.wrap_socket(connection) as secured,
    ):
        names: Any = secured.getpeercert()
        return str(names["subjectAltName"][0][1])


def test_other_files_of_tls_and_access_are_used_or_none(pool: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    first, second, third = (authority.issue(n, f"DNS:{n}.example") for n in ("one", "two", "three"))
    one = access_file(tmp_path / "one.json", "a")
    two = access_file(tmp_path / "two.json", "a", "b")

    def with_files(pair: Pair, access: Path, **server: Any) -> config.Config:
        tls = {"certificate": pair.certificate, "key": pair.key}
        return settings(pool, tls=tls, access={"file": access}, server=server)

    lines: list[str] = []
    with Serving(with_files(first, one), log=lines.append) as serving:

        def shown() -> tuple[set[str], int]:
            ports = (serving.port, serving.http_port)
            names = {certificate_of(authority, port) for port in ports}
            return names, serving.status()["access"]["grants"]

        assert shown() == ({"one.example"}, 1)
        serving.reload(with_files(second, two, ready_lag_seconds=5.0))
        assert shown() == ({"two.example"}, 2)
        assert not any("needs a restart" in line for line in lines)
        none = tmp_path / "none.json"
        mixed = Pair(third.certificate, second.key)
        for broken in (with_files(third, none, workers=3), with_files(mixed, one, workers=3)):
            reload_fails(serving, broken)
            assert shown() == ({"two.example"}, 2)
            assert serving._config.server.ready_lag_seconds == 5.0
        serving.follow_credentials()  # the files before are still looked at
        access_file(two, "a", "b", "c")
        serving.follow_credentials()
        assert shown() == ({"two.example"}, 3)


def reload_fails(serving: Serving, broken: config.Config) -> None:
    with pytest.raises(PetpsError):
        serving.reload(broken)


def test_doors_that_are_not_safe_are_no_reload(pool: Path) -> None:
    with Serving(settings(pool), log=lambda _: None) as serving:
        beyond = {"host": "0.0.0.0", "ready_lag_seconds": 1.0}
        with pytest.raises(PetpsError, match="nothing is encrypted"):
            serving.reload(settings(pool, server=beyond))
        assert serving._config.server.ready_lag_seconds == 60.0


def test_what_needs_a_restart_is_named_without_values(pool: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    access = access_file(tmp_path / "access.json", "a")
    with Serving(settings(pool), log=lines.append) as serving:
        lines.clear()
        new = settings(
            pool, kafka={"sasl.password": "planted"}, access={"file": access},
            server={"limits": {"pin_ms": 77}, "drain_seconds": 1.0},
        )  # fmt: skip
        serving.reload(new)
        assert serving.status()["access"]["mode"] == "open"
    reloaded, restart = lines[:2]
    assert isinstance(restart, Line)
    assert reloaded == "reloaded: server.drain_seconds = 1.0 (was 5.0)"
    names = ["server.limits.pin_ms", "access.file", "kafka.sasl.password"]
    assert restart == f"changed, but needs a restart: {', '.join(names)}"
    assert (restart.event, restart.level) == ("restart_needed", WARNING)
    assert restart.fields == {"settings": names}


def test_a_table_begins_to_grow(pool: Path) -> None:
    table = {"dim": 4, "capacity": 1000}
    grown = {"items": table | {"grow": "auto", "capacity_max": 2000}}
    full = {"items": table | {"capacity": 110}}
    with Serving(settings(pool, tables=full), log=lambda _: None) as serving:
        serving.reload(settings(pool, tables=grown))
        assert serving._growth._thread.is_alive()
        assert serving._config.tables["items"].capacity_max == 2000
        assert serving._config.tables["items"].capacity == 110


def test_the_schedule_of_backups_changes(pool: Path, tmp_path: Path) -> None:
    lines: list[str] = []

    def every(text: str) -> config.Config:
        return settings(pool, backup={"store": str(tmp_path / "store"), "every": text})

    def backups() -> int:
        return sum("backup" in line and "rows" in line for line in lines)

    with Serving(every("1d"), log=lines.append) as serving:
        wait_until(lambda: backups() == 1)
        serving.reload(every("1s"))
        wait_until(lambda: backups() >= 3)


def test_each_change_has_its_path() -> None:
    begin = '[pool]\npath = "p"\n'
    old = config.parse(begin + "[tables.a]\ndim = 2\ncapacity = 1\n")
    new = config.parse(
        begin + "[server.limits]\npin_ms = 10\n[kafka]\nx.y = 1\n"
        "[tables.a]\ndim = 3\ncapacity = 1\n[tables.b]\ndim = 2\ncapacity = 1\n"
    )
    found = {change.key: (change.old, change.new) for change in changes(old, new)}
    assert found == {
        "server.limits.pin_ms": (5000, 10),
        "kafka.x.y": (None, 1),
        "tables.a.dim": (2, 3),
        "tables.b": (None, new.tables["b"]),
    }
    merged = replaced(old, ("server", "limits", "pin_ms"), 10)
    merged = replaced(merged, ("tables", "a", "dim"), 3)
    assert {change.key for change in changes(merged, new)} == {"kafka.x.y", "tables.b"}
