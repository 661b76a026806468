"""petps report: a server by its address, a pool without a server, and what it writes."""

from __future__ import annotations

import json
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from petps import config
from petps.cli.commands import report as command
from petps.doctor import registry, report
from petps.server import Serving
from tests.python.cli.conftest import Command
from tests.python.cli.test_server_target import settings


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not make a part late."""
    monkeypatch.setattr(registry, "CHECK_SECONDS", 200.0)
    monkeypatch.setattr(report, "REPORT_SECONDS", 200.0)


def contents(path: Path) -> dict[str, Any]:
    """Return the JSON files of a report by name."""
    with tarfile.open(path) as archive:
        return {
            Path(name).name: json.load(archive.extractfile(name))  # type: ignore[arg-type]
            for name in archive.getnames()
            if name.endswith(".json")
        }


def test_a_server_by_its_address(run: Command, pool: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.tar.gz"
    with Serving(settings(pool)) as serving:
        url = f"petps://127.0.0.1:{serving.port}"
        answer = run.json("report", url, "--output", output)
    assert answer["file"] == str(output)
    files = contents(output)
    assert files["status.json"]["tables"][0]["name"] == "items"
    assert "pool.json" not in files, "the pool is the server's"
    assert set(answer["members"]) >= {"status.json", "doctor.json", "machine.txt"}
    assert "give --metrics URL" in files["contents.json"]["left_out"]["metrics.txt"]


def test_the_metrics_of_a_server_by_its_address(run: Command, pool: Path, tmp_path: Path) -> None:
    given: dict[str, dict[str, Any]] = {
        "pool": {"path": pool},
        "server": {"port": 0, "http_port": 0, "grpc": False},
    }
    with Serving(config.merge(None, given, "test")) as serving:
        url = f"petps://127.0.0.1:{serving.port}"
        metrics = f"http://127.0.0.1:{serving.http_port}/metrics"
        answer = run.json("report", url, "--metrics", metrics, "--output", tmp_path / "r.tar.gz")
    assert "metrics.txt" in answer["members"]


def test_what_is_in_it_is_listed_before_it_is_written(
    run: Command, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    monkeypatch.setattr(command, "note", lambda line: lines.append(line))

    def write(path: Path, result: report.Report) -> int:
        lines.append("written")
        return 5

    monkeypatch.setattr("petps.doctor.bundle.write_bundle", write)
    run("report", pool, "--log", "/no/such/file")
    written = lines.index("written")
    listed = "\n".join(lines[:written])
    for name in ("pool.json", "doctor.json", "log.txt"):
        assert name in listed
    assert "left out: /no/such/file: No such file" in listed
    assert "writing petps-report-" in lines[written - 1]


def test_the_file_is_new_and_private(run: Command, pool: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.tar.gz"
    run("report", pool, "--output", output)
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert contents(output)["pool.json"]["tables"][0]["capacity"] == 10_000
    assert "exists: choose another file" in run.fails(4, "report", pool, "--output", output)


@pytest.mark.parametrize(
    ("target", "code", "text"),
    [
        ("none.pool", 3, "no such pool or configuration file"),
        ("s3://bucket/x", 2, "'s3://' is unknown"),
        ("petps+admin://127.0.0.1:7073", 2, "name a pool or a configuration file"),
    ],
)
def test_what_is_no_target(run: Command, target: str, code: int, text: str) -> None:
    assert text in run.fails(code, "report", target)
