"""petps config: the list of keys, and the check of settings with the places that they name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.python.cli.conftest import Command

INVALID_ARGUMENT = 2


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "petps.toml"
    path.write_text(f'[pool]\npath = "{tmp_path}/my.pool"\n')
    return path


def add(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


def faults(run: Command, *arguments: object) -> str:
    return run.reports(INVALID_ARGUMENT, "config", "check", *arguments)


def test_config_shows_the_variable_of_each_key(run: Command) -> None:
    keys = {(key["section"], key["name"]): key for key in run.json("config")}
    assert keys["server", "port"]["variable"] == "PETPS_SERVER_PORT"
    assert "PETPS_SERVER_TLS_CERTIFICATE" in run("config")
    assert "| `PETPS_TABLES__<name>__DIM` |" in run("config", "--markdown")


def test_check_shows_where_each_setting_comes_from(
    run: Command, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "petps.toml"
    file.write_text(f'[pool]\npath = "{pool}"\n[server]\nworkers = 2\nhttp_port = 7072\n')
    monkeypatch.setenv("PETPS_SERVER_PORT", "7171")
    report = run.json("config", "check", file)
    assert (report["faults"], report["notes"]) == ([], [])
    assert [list(setting.values()) for setting in report["settings"]] == [
        ["pool.path", str(pool), str(file)],
        ["server.port", 7171, "PETPS_SERVER_PORT"],
        ["server.workers", 2, str(file)],
    ]
    text = run("config", "check", file)
    assert "PETPS_SERVER_PORT" in text
    assert text.endswith("valid\n")


def test_check_needs_no_file(run: Command, pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETPS_POOL_PATH", str(pool))
    assert run("config", "check").endswith("valid\n")


def test_check_shows_every_fault_of_the_file_and_the_environment(
    run: Command, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(file, "[server]\nprot = 1\nworkers = -1\n")
    monkeypatch.setenv("PETPS_SERVER_GATHER", "dma")
    text = faults(run, file)
    assert f"fault: {file}: [server] prot is not a known key; did you mean 'port'?" in text
    assert f"fault: {file}: [server] workers: should be" in text
    assert "fault: PETPS_SERVER_GATHER: [server] gather: should be 'auto'," in text
    assert text.endswith("3 faults\n")
    monkeypatch.setenv("PETPS_SERVER_PROT", "1")
    assert "fault: PETPS_SERVER_PROT is not a known variable" in faults(run, file)
    assert "no such configuration file" in faults(run, file.with_name("none.toml"))


def test_check_finds_faults_of_each_place(run: Command, file: Path, tmp_path: Path) -> None:
    (tmp_path / "access.json").write_text("{}")
    (tmp_path / "map.json").write_text("{}")
    (tmp_path / "server.pem").write_text("nothing")
    (tmp_path / "server.key").write_text("nothing")
    (tmp_path / "store" / "states").mkdir(parents=True)
    (tmp_path / "store" / "states" / "1").write_text("nothing")
    (tmp_path / "my.pool").mkdir()
    add(
        file,
        f'''[server]
host = "0.0.0.0"
shard_map = "{tmp_path}/map.json"
[tls]
certificate = "{tmp_path}/server.pem"
key = "{tmp_path}/server.key"
[access]
file = "{tmp_path}/access.json"
[ingest]
log = "{tmp_path}/none/log"
store = "nonsense://store"
[backup]
store = "{tmp_path}/{{address}}"
''',
    )
    text = faults(run, file)
    for place in ("pool.path", "tls", "access.file", "server.shard_map", "ingest.log"):
        assert f"fault: {place}: " in text, text
    assert "fault: ingest.store: nonsense://store: " in text
    assert "note: backup.store: " in text
    assert "server.host" not in text.partition("setting")[0], "the doors are safe"


def test_check_reads_certificates_and_grants(run: Command, file: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.issue("server", days=1)
    run("token", "new", "old", "--role", "read", "--file", tmp_path / "access.json")
    add(
        file,
        f'''[server]
host = "0.0.0.0"
admin_port = 0
[tls]
certificate = "{server.certificate}"
key = "{server.key}"
[access]
file = "{tmp_path}/access.json"
''',
    )
    notes = run.json("config", "check", file)["notes"]
    assert any(note.startswith("pool.path: there is no pool at") for note in notes)
    assert any("expires in" in note for note in notes)
    assert any("has the role admin" in note for note in notes)
    text = file.read_text().replace("admin_port", "# admin_port")
    file.write_text(text.replace("[access]\nfile", "# file"))
    assert "fault: server.host: server.host 0.0.0.0 is beyond loopback" in faults(run, file)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_check_finds_a_pool_that_this_user_may_not_write(
    run: Command, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "my.pool").touch(0o400)
    assert "this user may not read and write it" in faults(run, file)


def test_check_opens_no_pool(run: Command, pool: Path, file: Path) -> None:
    before = pool.read_bytes()
    run("config", "check", file)
    assert pool.read_bytes() == before


def test_check_shows_no_secret(run: Command, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETPS_KAFKA_SASL_PASSWORD", "planted")
    monkeypatch.setenv("PETPS_BACKUP_STORE", "s3://me:planted@host/x")
    assert "planted" not in faults(run, file)
