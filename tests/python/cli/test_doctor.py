"""petps doctor: what it takes, what it shows, its exit codes; and that it changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from petps.cli.app import FAULTS_FOUND
from petps.doctor import registry
from petps.server import Serving
from tests.python.cli.conftest import Command
from tests.python.cli.test_server_target import settings


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not make a check late."""
    monkeypatch.setattr(registry, "CHECK_SECONDS", 200.0)


def findings(run: Command, *arguments: object) -> dict[str, list[dict[str, str]]]:
    """Return the findings of a diagnosis by name, whatever its exit code."""
    result = run._run("doctor", *arguments, "--json")
    assert result.exit_code in (0, FAULTS_FOUND), result.output
    report = json.loads(result.stdout)
    named: dict[str, list[dict[str, str]]] = {}
    for finding in report["findings"]:
        named.setdefault(finding["name"], []).append(finding)
    has_faults = any(finding["level"] == "fault" for finding in report["findings"])
    assert (result.exit_code == FAULTS_FOUND) == has_faults == (report["counts"]["fault"] > 0)
    return named


def _picture(folder: Path) -> dict[str, tuple[int, int, str]]:
    return {
        str(path): (
            path.stat().st_mtime_ns,
            path.stat().st_size,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }


def test_a_closed_pool_is_well_and_nothing_changes(run: Command, pool: Path) -> None:
    before = _picture(pool.parent)
    named = findings(run, pool)
    assert _picture(pool.parent) == before
    assert named["pool-lock"][0]["seen"] == "no process has the pool open"
    assert "closed cleanly" in named["pool-format"][0]["seen"]
    assert "ports" not in named, "there is no configuration"


def test_a_pool_that_a_server_has(run: Command, pool: Path) -> None:
    with Serving(settings(pool)):
        named = findings(run, pool)
    assert f"process {os.getpid()}" in named["pool-lock"][0]["seen"]
    assert named["pool-lock"][0]["level"] == "ok"
    assert "the server is ready" in named["server-state"][0]["seen"]


def test_a_configuration(run: Command, pool: Path, tmp_path: Path) -> None:
    file = tmp_path / "petps.toml"
    file.write_text(f'[pool]\npath = "{pool}"\n[tables.items]\ndim = 8\ncapacity = 10000\n')
    named = findings(run, file)
    assert "that has no effect" in named["configuration"][0]["seen"]
    assert "closed cleanly" in named["pool-format"][0]["seen"]
    assert named["host-address"][0]["level"] == "ok"


def test_a_configuration_that_cannot_be_used_is_a_fault(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "petps.conf"
    file.write_text('[pool]\npath = "x"\n[server]\nprot = 1\n')
    named = findings(run, file)
    assert named["configuration"][0]["level"] == "fault"
    assert "did you mean 'port'?" in named["configuration"][0]["seen"]
    assert "pool-file" not in named


def test_a_damaged_pool_is_a_fault(run: Command, pool: Path) -> None:
    content = bytearray(pool.read_bytes())
    content[:2_000_000] = bytes(2_000_000)
    pool.write_bytes(content)
    named = findings(run, pool)
    assert named["pool-format"][0]["level"] == "fault"
    text = run.fails(FAULTS_FOUND, "doctor", pool)
    assert "1 fault" in text


def test_the_text_has_the_reason_and_the_remedy(run: Command, pool: Path) -> None:
    pool.chmod(0o666)
    text = run("doctor", pool)
    assert f"pool-file: {pool} has mode 0666: others may write it" in text
    assert f"do:  chmod go-w {pool}" in text
    assert "why: " in text
    assert "pool-format" not in text, "what is well is shown with --all"
    assert "ok: pool-format" in run("doctor", pool, "--all")


@pytest.mark.parametrize(
    ("target", "code", "text"),
    [
        ("none.pool", 3, "no such pool or configuration file"),
        ("none.toml", 3, "no such configuration file"),
        (".", 2, "is a folder"),
        ("petps://127.0.0.1:7070", 2, "run `petps doctor` on the machine of the server"),
        ("s3://bucket/x", 2, "name a pool or a configuration file of this machine"),
    ],
)
def test_what_is_no_subject(run: Command, target: str, code: int, text: str) -> None:
    assert text in run.fails(code, "doctor", target)
