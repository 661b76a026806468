"""The commands of the README, one after another, each in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.system.test_serve import Process, started

# A dozen processes with their imports take minutes on a machine that builds at the same time.
pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
__all__ = ["started"]

DIM = 8
WAIT_SECONDS = 120.0


def petps(*arguments: object) -> Any:
    """Return the JSON report of a command that must succeed."""
    process = subprocess.run(
        [sys.executable, "-m", "petps.cli", *(str(argument) for argument in arguments), "--json"],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def save(path: Path, first: int, last: int, value: float) -> Path:
    keys = np.arange(first, last, dtype=np.uint64)
    np.savez(path, keys=keys, rows=np.full((last - first, DIM), value, np.float32))
    return path


def wait_for(url: str, version: int) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        status: dict[str, Any] = petps("status", url)
        if status["instances"][0]["applied_version"] >= version:
            return status
        assert time.monotonic() < deadline, status["ingest"]
        time.sleep(0.05)


def first_numbers(url: str, *keys: int) -> list[tuple[bool, float]]:
    rows = petps("pull", url, "items", *keys)["rows"]
    return [(row["found"], row["row"][0]) for row in rows]


def test_load_publish_serve_export_catch_up(tmp_path: Path, started: list[Process]) -> None:
    pool, log = tmp_path / "pool", tmp_path / "log"
    petps("create", pool, "--table", f"items:{DIM}:f32:10k", "--feed", "delta", "--partitions", 4)
    petps("load", pool, "items", save(tmp_path / "first.npz", 0, 100, 1.0))
    first_publish = petps(
        "publish", log, "items", save(tmp_path / "a.npz", 50, 150, 2.0), "--partitions", 4
    )

    process = Process(pool, "--log", log)
    started.append(process)
    url = f"petps://127.0.0.1:{process.wait_ready()['port']}"
    wait_for(url, first_publish["version"])
    second_publish = petps("publish", log, "items", "--dim", DIM, "--delete", 0, "--delete", 149)
    wait_for(url, second_publish["version"])
    assert first_numbers(url, 0, 1, 50, 148, 149) == [
        (False, 0.0), (True, 1.0), (True, 2.0), (True, 2.0), (False, 0.0),
    ]  # fmt: skip
    process.stop()

    # A second server starts empty, from a base of the first and the log after it.
    base = petps("export", pool, tmp_path / "bases/one")
    assert (base["version"], base["tables"]) == (
        second_publish["version"],
        [{"name": "items", "rows": 148}],
    )
    third_publish = petps(
        "publish",
        log,
        "items",
        save(tmp_path / "b.npz", 1, 2, 3.0),
        "--base",
        tmp_path / "bases/one",
    )
    other_pool = tmp_path / "other"
    petps(
        "create",
        other_pool,
        "--table",
        f"items:{DIM}:f32:10k",
        "--feed",
        "delta",
        "--partitions",
        4,
    )
    petps("load", other_pool, "items", save(tmp_path / "c.npz", 9000, 9010, 9.0))
    second = Process(other_pool, "--log", log)
    started.append(second)
    url = f"petps://127.0.0.1:{second.wait_ready()['port']}"
    status = wait_for(url, third_publish["version"])
    while status["ingest"]["version"] < third_publish["version"]:  # updated every second
        status = petps("status", url)
    assert {entry["state"] for entry in status["ingest"]["partitions"]} == {"following"}
    assert first_numbers(url, 1, 2, 60, 149, 9000) == [
        (True, 3.0), (True, 1.0), (True, 2.0), (False, 0.0), (False, 0.0),
    ]  # fmt: skip
    second.stop()
    assert petps("verify", other_pool)["rows"] == 148
