"""The commands of the README, one after another, each in its own process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.system import servers
from tests.system.servers import Server, wait_until

# A dozen processes with their imports take minutes on a machine that builds at the same time.
pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

DIM = 8
TABLE = ("--table", f"items:{DIM}:f32:10k", "--feed", "delta", "--partitions", 4)


def petps(*arguments: object) -> Any:
    """Return the JSON report of a command that must succeed."""
    return json.loads(servers.petps(*arguments, "--json"))


def save(path: Path, first: int, last: int, value: float) -> Path:
    keys = np.arange(first, last, dtype=np.uint64)
    np.savez(path, keys=keys, rows=np.full((last - first, DIM), value, np.float32))
    return path


def wait_for(url: str, version: int) -> dict[str, Any]:
    """Return the status once the version is applied, also in the report of ingest."""

    def status_if_applied() -> Any:
        status = petps("status", url)
        applied = status["instances"][0]["applied_version"], status["ingest"]["version"]
        return status if min(applied) >= version else None

    status: dict[str, Any] = wait_until(f"version {version}", status_if_applied)
    return status


def first_numbers(url: str, *keys: int) -> list[tuple[bool, float]]:
    rows = petps("pull", url, "items", *keys)["rows"]
    return [(row["found"], row["row"][0]) for row in rows]


def test_load_publish_serve_export_catch_up(tmp_path: Path, serve: Callable[..., Server]) -> None:
    pool, log = tmp_path / "pool", tmp_path / "log"
    petps("create", pool, *TABLE)
    petps("load", pool, "items", save(tmp_path / "first.npz", 0, 100, 1.0))
    first_publish = petps(
        "publish", log, "items", save(tmp_path / "a.npz", 50, 150, 2.0), "--partitions", 4
    )

    first = serve(pool, "--log", log)
    wait_for(first.url, first_publish["version"])
    second_publish = petps("publish", log, "items", "--dim", DIM, "--delete", 0, "--delete", 149)
    wait_for(first.url, second_publish["version"])
    assert first_numbers(first.url, 0, 1, 50, 148, 149) == [
        (False, 0.0), (True, 1.0), (True, 2.0), (True, 2.0), (False, 0.0),
    ]  # fmt: skip
    first.stop()

    # A second server starts empty, from a base of the first and the log after it.
    bases = tmp_path / "bases/one"
    base = petps("export", pool, bases)
    assert base["version"] == second_publish["version"]
    assert base["tables"] == [{"name": "items", "rows": 148}]
    third_publish = petps(
        "publish", log, "items", save(tmp_path / "b.npz", 1, 2, 3.0), "--base", bases
    )
    other_pool = tmp_path / "other"
    petps("create", other_pool, *TABLE)
    petps("load", other_pool, "items", save(tmp_path / "c.npz", 9000, 9010, 9.0))
    second = serve(other_pool, "--log", log)
    status = wait_for(second.url, third_publish["version"])
    assert {entry["state"] for entry in status["ingest"]["partitions"]} == {"following"}
    assert first_numbers(second.url, 1, 2, 60, 149, 9000) == [
        (True, 3.0), (True, 1.0), (True, 2.0), (False, 0.0), (False, 0.0),
    ]  # fmt: skip
    second.stop()
    assert petps("verify", other_pool)["rows"] == 148
