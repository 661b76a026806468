"""petps instances, alias, drop and create --instance, of a pool and of a running server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.server import Serving
from tests.python.cli.conftest import Command
from tests.python.cli.test_server_target import settings


@pytest.fixture(params=["pool", "server"])
def target(request: pytest.FixtureRequest, petps_command: Command, tmp_path: Path) -> Iterator[str]:
    """Yield a pool or server with two instances: rows of default@0 are 1, of default@1 are 2."""
    pool = tmp_path / "p"
    petps_command("create", pool, "--table", "items:4:f32:1k", "--table", "users:2:f16:1k")
    petps_command("create", pool, "--add", "--instance", "default@1")
    for instance, value in (("default@0", 1), ("default@1", 2)):
        for table, dim in (("items", 4), ("users", 2)):
            np.savez(
                tmp_path / "rows.npz",
                keys=np.arange(50),
                rows=np.full((50, dim), value, np.float32),
            )
            petps_command("load", pool, table, tmp_path / "rows.npz", "--model", instance)
    if request.param == "pool":
        yield str(pool)
        return
    with Serving(settings(pool)) as serving:
        yield f"petps://127.0.0.1:{serving.port}"


def value(petps_command: Command, target: str, model: str = "default") -> float:
    rows = petps_command.json("pull", target, "items", 7, "--model", model)["rows"]
    return float(rows[0]["row"][0])


def states(petps_command: Command, target: str) -> dict[str, tuple[Any, ...]]:
    found = petps_command.json("instances", target)["instances"]
    return {each["name"]: (each["state"], each["tables"], each["rows"]) for each in found}


def test_there_and_back_and_gone(petps_command: Command, target: str) -> None:
    assert states(petps_command, target) == {
        "default@0": ("serving", 2, 100),
        "default@1": ("following", 2, 100),
    }
    assert value(petps_command, target) == 1
    assert value(petps_command, target, "default@1") == 2
    message = petps_command.fails(6, "alias", target, "--back")
    assert "has no previous instance" in message
    message = petps_command.fails(6, "drop", target, "default@0")
    assert "name 'default' refers to" in message
    output = petps_command("alias", target, "default@1")
    assert "default means default@1 now, before default@0" in output
    assert value(petps_command, target) == 2
    assert value(petps_command, target, "default@0") == 1
    assert states(petps_command, target)["default@0"][0] == "frozen"
    report = petps_command.json("alias", target, "--back")
    assert report == {"alias": "default", "instance": "default@0", "before": "default@1"}
    assert value(petps_command, target) == 1
    petps_command("alias", target, "--back")
    assert petps_command.json("drop", target, "default@0") == {"dropped": "default@0"}
    assert states(petps_command, target) == {"default@1": ("serving", 2, 100)}
    assert value(petps_command, target) == 2
    assert "default@0" in petps_command.fails(3, "drop", target, "default@0")
    assert "has been dropped" in petps_command.fails(6, "alias", target, "--back")


def test_other_aliases(petps_command: Command, target: str) -> None:
    petps_command("alias", target, "default@1", "--name", "canary")
    assert value(petps_command, target, "canary") == 2
    assert value(petps_command, target) == 1
    found = petps_command.json("instances", target)["instances"]
    assert [each["aliases"] for each in found] == [["default"], ["canary"]]
    assert [each["state"] for each in found] == ["serving", "serving"]
    output = petps_command("instances", target)
    assert "canary" in output
    assert "canary" in petps_command("status", target)


def test_what_makes_no_sense(petps_command: Command, target: str) -> None:
    assert "--back" in petps_command.fails(2, "alias", target)
    assert "--back" in petps_command.fails(2, "alias", target, "default@1", "--back")
    assert "default@9" in petps_command.fails(3, "alias", target, "default@9")
    assert "default@NAME" in petps_command.fails(2, "drop", target, "default")
    assert "no/name" in petps_command.fails(2, "alias", target, "default@1", "--name", "no/name")


def test_instances_are_added_to_a_pool(petps_command: Command, tmp_path: Path) -> None:
    pool = tmp_path / "p"
    petps_command("create", pool, "--table", "items:4:f32:1k")
    assert "--add" in petps_command.fails(2, "create", pool, "--instance", "default@1")
    assert "other" in petps_command.fails(3, "create", pool, "--add", "--instance", "other@1")
    assert "default@0" in petps_command.fails(4, "create", pool, "--add", "--instance", "default@0")
    report = petps_command.json("create", pool, "--add", "--instance", "default@a")
    assert report["tables"] == ["items"]
