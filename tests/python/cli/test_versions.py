"""petps instances, alias, drop and create --instance, of a pool and of a running server.

A server is named by its address, or by the path of its pool; for changes by the path only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.server import Serving
from tests.python.cli.conftest import Command
from tests.python.cli.test_server_target import settings


@pytest.fixture(params=["pool", "server", "path of a server"])
def target(request: pytest.FixtureRequest, run: Command, tmp_path: Path) -> Iterator[str]:
    """Yield a pool or server with two instances: rows of default@0 are 1, of default@1 are 2."""
    pool = tmp_path / "p"
    run("create", pool, "--table", "items:4:f32:1k", "--table", "users:2:f16:1k")
    run("create", pool, "--add", "--instance", "default@1")
    for instance, value in (("default@0", 1), ("default@1", 2)):
        for table, dim in (("items", 4), ("users", 2)):
            np.savez(
                tmp_path / "rows.npz",
                keys=np.arange(50),
                rows=np.full((50, dim), value, np.float32),
            )
            run("load", pool, table, tmp_path / "rows.npz", "--model", instance)
    if request.param == "pool":
        yield str(pool)
        return
    with Serving(settings(pool), log=lambda line: None) as serving:
        is_path = request.param == "path of a server"
        yield str(pool) if is_path else f"petps://127.0.0.1:{serving.port}"


@pytest.fixture
def pool(tmp_path: Path) -> str:
    """Return the path of the pool of ``target``."""
    return str(tmp_path / "p")


def value(run: Command, target: str, model: str = "default") -> float:
    rows = run.json("pull", target, "items", 7, "--model", model)["rows"]
    return float(rows[0]["row"][0])


def states(run: Command, target: str) -> dict[str, tuple[Any, ...]]:
    entries = run.json("instances", target)["instances"]
    return {entry["name"]: (entry["state"], entry["tables"], entry["rows"]) for entry in entries}


def test_switch_there_and_back_and_drop(run: Command, target: str, pool: str) -> None:
    assert states(run, target) == {
        "default@0": ("serving", 2, 100),
        "default@1": ("following", 2, 100),
    }
    assert value(run, target) == 1
    assert value(run, target, "default@1") == 2
    message = run.fails(6, "alias", pool, "--yes", "--back")
    assert "has no previous instance" in message
    message = run.fails(6, "drop", pool, "--yes", "default@0")
    assert "name 'default' refers to" in message
    output = run("alias", pool, "--yes", "default@1")
    assert "default names default@1 now, before default@0" in output
    assert value(run, target) == 2
    assert value(run, target, "default@0") == 1
    assert states(run, target)["default@0"][0] == "frozen"
    report = run.json("alias", pool, "--yes", "--back")
    assert report == {"alias": "default", "instance": "default@0", "before": "default@1"}
    assert value(run, target) == 1
    run("alias", pool, "--yes", "--back")
    assert run.json("drop", pool, "--yes", "default@0") == {"dropped": "default@0"}
    assert states(run, target) == {"default@1": ("serving", 2, 100)}
    assert value(run, target) == 2
    assert "default@0" in run.fails(3, "drop", pool, "--yes", "default@0")
    assert "has been dropped" in run.fails(6, "alias", pool, "--yes", "--back")


def test_a_second_alias_names_another_instance(run: Command, target: str, pool: str) -> None:
    run("alias", pool, "--yes", "default@1", "--name", "canary")
    assert value(run, target, "canary") == 2
    assert value(run, target) == 1
    entries = run.json("instances", target)["instances"]
    assert [entry["aliases"] for entry in entries] == [["default"], ["canary"]]
    assert [entry["state"] for entry in entries] == ["serving", "serving"]
    output = run("instances", target)
    assert "canary" in output
    assert "canary" in run("status", target)


@pytest.mark.usefixtures("target")
def test_bad_arguments_are_refused(run: Command, pool: str) -> None:
    assert "--back" in run.fails(2, "alias", pool)
    assert "--back" in run.fails(2, "alias", pool, "default@1", "--back")
    assert "default@9" in run.fails(3, "alias", pool, "--yes", "default@9")
    assert "default@NAME" in run.fails(2, "drop", pool, "default")
    assert "no/name" in run.fails(2, "alias", pool, "--yes", "default@1", "--name", "no/name")


def test_create_adds_an_instance_to_a_pool(run: Command, tmp_path: Path) -> None:
    pool = tmp_path / "p"
    run("create", pool, "--table", "items:4:f32:1k")
    assert "--add" in run.fails(2, "create", pool, "--instance", "default@1")
    assert "other" in run.fails(3, "create", pool, "--add", "--instance", "other@1")
    assert "default@0" in run.fails(4, "create", pool, "--add", "--instance", "default@0")
    report = run.json("create", pool, "--add", "--instance", "default@a")
    assert report["tables"] == ["items"]
