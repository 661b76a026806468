"""petps token: grants are made, listed and revoked; tokens are shown once."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from petps.server.access_file import hash_of, read_access_file
from tests.python.cli.conftest import Command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "access.json"


def test_a_token_is_made_listed_and_revoked(run: Command, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "reader.token"
    run("token", "new", "reader", "--role", "read", "--out", out, "--file", file)
    token = out.read_text().strip()
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert read_access_file(file)[0].token_sha256 == hash_of(token)
    run(
        "token", "new", "fleet", "--role", "read", "--role", "write", "--model", "ranking",
        "--certificate", "a.example", "--expires", "90d", "--requests-per-second", 5,
        "--file", file,
    )  # fmt: skip
    listed = run("token", "list", "--file", file)
    for part in ("reader", "token", "certificate a.example", "read, write", "5 requests/s"):
        assert part in listed
    reader, fleet = run.json("token", "list", "--file", file)
    assert reader["models"] == "*"
    assert reader["expires"] is None
    assert fleet["models"] == ["ranking"]
    for text in (listed, repr(reader)):
        assert token not in text
        assert hash_of(token) not in text
    run("token", "revoke", "reader", "--file", file, "--yes")
    assert [entry.name for entry in read_access_file(file)] == ["fleet"]


def test_a_printed_token_is_alone_on_standard_output(run: Command, file: Path) -> None:
    result = run._succeed("token", "new", "reader", "--role", "admin", "--file", file)
    assert result.stdout.startswith("petps_")
    assert len(result.stdout.split()) == 1
    assert result.stdout.strip() not in result.stderr


def test_bad_input_changes_nothing(run: Command, file: Path, tmp_path: Path) -> None:
    new = ("token", "new", "a", "--file", file)
    assert "name: " in run.fails(2, "token", "new", "a b", "--role", "read", "--file", file)
    assert "'read', 'write' or 'admin'" in run.fails(2, *new, "--role", "root")
    assert "--expires must be" in run.fails(2, *new, "--role", "read", "--expires", "soon")
    assert "a grant for a certificate has none" in run.fails(
        2, *new, "--role", "read", "--certificate", "c", "--out", tmp_path / "t"
    )
    taken = tmp_path / "taken"
    taken.write_text("kept")
    assert f"{taken} exists" in run.fails(4, *new, "--role", "read", "--out", taken)
    assert taken.read_text() == "kept"
    assert not file.exists()
    assert "no access file" in run.fails(3, "token", "list", "--file", file)
    run(*new, "--role", "read")
    assert "a grant named 'a'" in run.fails(4, *new, "--role", "read")
    assert "it has a" in run.fails(3, "token", "revoke", "b", "--file", file, "--yes")
    assert "confirm it with --yes" in run.fails(6, "token", "revoke", "a", "--file", file)
    assert len(read_access_file(file)) == 1
