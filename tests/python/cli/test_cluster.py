"""petps cluster plan: from a shard map's file to the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from petps.server.shard_map import parse
from tests.python.cli.conftest import Command

A, B, C = "h1:7070", "h2:7070", "h3:7070"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    servers = [
        {"address": A, "grpc_address": "h1:7071", "partitions": ["0-3"]},
        {"address": B, "partitions": ["4-7"], "follows": [0]},
    ]
    document = {"model": "default", "version": 7, "partitions": 8, "servers": servers}
    path = tmp_path / "shards.json"
    path.write_text(json.dumps(document))
    return path


def servers_of(path: Path) -> dict[str, Any]:
    parse(path.read_bytes(), str(path))  # as a server reads it
    return {server["address"]: server for server in json.loads(path.read_text())["servers"]}


def test_the_plan_is_shown_and_written(run: Command, path: Path) -> None:
    out = path.with_name("new.json")
    text = run("cluster", "plan", path, "--add", f"{C},weight=2,grpc=h3:9071", "--output", out)
    for part in (
        "4 (at least 4)", "copies to servers", "100.0%", "0.0%", "balance",
        "is version 8 of the map: the new owners", "a map moves no rows",
    ):  # fmt: skip
        assert part in text
    assert json.loads(out.read_text())["version"] == 8
    new = servers_of(out)
    assert new[C] == {"address": C, "grpc_address": "h3:9071", "partitions": new[C]["partitions"]}
    assert new[A]["grpc_address"] == "h1:7071"
    owners = parse(out.read_bytes(), "new").owners
    assert [len(owners.owned_by(address)) for address in (A, B, C)] == [2, 2, 4]
    assert parse(path.read_bytes(), "old").owners.version == 7


def test_the_map_before_lets_the_new_owners_follow(run: Command, path: Path) -> None:
    first, second = path.with_name("first.json"), path.with_name("second.json")
    change = ("--add", C)
    text = run("cluster", "plan", path, *change, "--follow", "--output", first)
    assert "is version 8 of the map: the owners of now, and the new ones follow" in text
    old = servers_of(first)
    assert old[A]["partitions"] == ["0-3"]
    assert old[B]["follows"] == [0]
    assert old[C]["partitions"] == []
    run("cluster", "plan", first, *change, "--output", second)
    assert json.loads(second.read_text())["version"] == 9
    new = servers_of(second)
    assert new[C] == {"address": C, "partitions": old[C]["follows"]}


def test_json_has_the_map_and_every_move(run: Command, path: Path) -> None:
    report = run.json("cluster", "plan", path, "--drain", B)
    assert report["copies"] == report["regrouped"] == report["lower_bound"] == 4
    assert {(m["partition"], m["source"], m["target"], m["reason"]) for m in report["moves"]} == {
        (partition, B, A, "drain") for partition in range(4, 8)
    }
    assert [move["wave"] for move in report["moves"]] == [0, 0, 1, 1]
    assert report["map"]["servers"] == [
        {"address": A, "grpc_address": "h1:7071", "partitions": ["0-7"]},
    ]
    assert report["imbalance_after"] == 0.0
    assert report["warnings"] == []


def test_nothing_to_do_says_so(run: Command, path: Path) -> None:
    assert "nothing has to move" in run("cluster", "plan", path)


def test_warnings_are_shown(run: Command, path: Path) -> None:
    text = run("cluster", "plan", path, "--replicas", 3)
    assert "warning: 3 replicas need 3 members, and only 2 may own partitions" in text


def test_servers_need_not_share_all_partitions(run: Command, path: Path) -> None:
    out = path.with_name("new.json")
    run("cluster", "plan", path, "--replicas", 2, "--add", C, "--output", out)
    owners = parse(out.read_bytes(), "new").owners
    assert sorted(len(owners.owned_by(address)) for address in (A, B, C)) == [5, 5, 6]
    assert "nothing has to move" in run("cluster", "plan", out)


def test_partitions_with_different_numbers_of_owners_need_an_answer(
    run: Command, path: Path
) -> None:
    document = json.loads(path.read_text())
    document["servers"][1]["partitions"] = ["3-7"]
    path.write_text(json.dumps(document))
    message = run.fails(2, "cluster", "plan", path)
    assert "have 1 to 2 owners: say with --replicas how many" in message
    assert run.json("cluster", "plan", path, "--replicas", 1)["copies"] == 0


def test_the_zones_of_the_map_count_and_stay(run: Command, path: Path) -> None:
    document = json.loads(path.read_text())
    for server in document["servers"]:
        server["zone"] = "east"
    path.write_text(json.dumps(document))
    change = ("--replicas", 2, "--add", f"{C},zone=west")
    report = run.json("cluster", "plan", path, *change)
    servers = {server["address"]: server for server in report["map"]["servers"]}
    assert servers[C]["partitions"] == ["0-7"]
    assert {address: server["zone"] for address, server in servers.items()} == {
        A: "east", B: "east", C: "west",
    }  # fmt: skip
    assert "h3:7070 have no zone" in run.fails(2, "cluster", "plan", path, "--add", C)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (
            ["--drain", "x:1"],
            2,
            "no such server owns partitions in the map; owners are h1:7070, h2:7070",
        ),
        (["--lost", "x:1"], 2, "--lost x:1: no such server owns"),
        (["--server", f"{C},zone=a"], 2, f"--server {C}: no such server owns"),
        (["--add", f"{C},zone=a"], 2, "h1:7070, h2:7070 have no zone, but other servers have one"),
        (["--add", A], 2, "the map has this server already"),
        (["--add", C, "--add", C], 2, f"--add {C} is given twice"),
        (["--drain", A, "--lost", A], 2, "h1:7070 is given twice to --drain and --lost"),
        (["--add", "h3"], 2, "write HOST:PORT"),
        (["--add", f"{C},grpc=h3"], 2, "write HOST:PORT"),
        (["--add", f"{C},weight=0"], 2, "weight must be a number above 0, got 0"),
        (["--add", f"{C},weight=x"], 2, "weight must be a number above 0, got x"),
        (["--add", f"{C},weight=nan"], 2, "weight must be a number above 0, got nan"),
        (["--add", f"{C},color=red"], 2, "'color=red' is none of zone=NAME"),
        (["--add", f"{C},zone="], 2, "'zone=' is none of"),
        (["--drain", A, "--drain", B], 6, "no member is left that may own partitions"),
        (["--replicas", "0"], 2, "replicas"),
        (["--follow"], 2, "--follow is about the map that --output writes"),
    ],
)
def test_wrong_options_are_refused(
    run: Command, path: Path, options: list[str], code: int, message: str
) -> None:
    assert message in run.fails(code, "cluster", "plan", path, *options)


def test_a_wrong_map_is_refused(run: Command, path: Path) -> None:
    assert "No such file" in run.fails(3, "cluster", "plan", path.with_name("none.json"))
    path.write_text("{}")
    assert "model is missing" in run.fails(2, "cluster", "plan", path)


def test_no_file_is_overwritten(run: Command, path: Path) -> None:
    before = path.read_bytes()
    message = run.fails(4, "cluster", "plan", path, "--drain", A, "--output", path)
    assert "exists already: choose another name" in message
    assert path.read_bytes() == before


def test_the_last_version_has_no_next_one(run: Command, path: Path) -> None:
    document = json.loads(path.read_text()) | {"version": (1 << 64) - 1}
    path.write_text(json.dumps(document))
    out = path.with_name("new.json")
    assert "version" in run.fails(2, "cluster", "plan", path, "--drain", A, "--output", out)
    assert not out.exists()


def test_a_plan_depends_on_its_input_only(path: Path) -> None:
    command = [sys.executable, "-m", "petps.cli", "cluster", "plan", str(path), "--json"]
    command += ["--replicas", "2", "--add", f"{C},zone=a", "--add", "h4:7070,zone=b"]
    command += ["--server", f"{A},zone=a", "--server", f"{B},zone=b"]
    reports = {
        subprocess.run(
            command, capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(reports) == 1
