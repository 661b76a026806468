"""petps create."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import petps
from tests.python.cli.conftest import Command


def test_tables_from_flags(petps_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "p"
    report = petps_command.json(
        "create", path, "--table", "a:64:f32:1.5m", "--table", "b:3:int8:2_000", "--model", "m",
        "--partitions", 3,
    )  # fmt: skip
    assert report["created"]
    assert [(t["name"], t["dim"], t["dtype"], t["capacity"]) for t in report["tables"]] == [
        ("a", 64, "f32", 1_500_000),
        ("b", 3, "int8", 2000),
    ]
    with petps.open(path) as pool:
        assert pool.native.resolve("m").partitions == 3
        assert [info.name for info in pool.tables("m")] == ["a", "b"]


def test_from_a_configuration(petps_command: Command, tmp_path: Path) -> None:
    file = tmp_path / "petps.toml"
    file.write_text(
        f'[pool]\npath = "{tmp_path}/p"\ndurability = "process"\n[model]\nname = "m"\n'
        "[tables.a]\ndim = 2\ncapacity = 10\ndefault = [0.5, 1.0]\nfeed = 'delta'\n"
    )
    petps_command("create", "--config", file)
    with petps.open(tmp_path / "p") as pool:
        assert pool.status()["pool"]["durability"] == "process"
        assert pool.pull("a", [1]).tolist() == [[0.5, 1.0]]
        assert pool.tables()[0].feed == "delta"
    message = petps_command.fails(2, "create", "--config", file, "--table", "a:2:f32:10")
    assert "table 'a' is both in --table and in" in message


def test_only_a_device_is_replaced(petps_command: Command, pool: Path) -> None:
    message = petps_command.fails(2, "create", pool, "--replace", "--table", "x:1:f32:10")
    assert "--replace is for a new pool on a device; remove a pool's file yourself" in message
    message = petps_command.fails(4, "create", "/dev/null", "--table", "x:1:f32:10")
    assert "/dev/null holds data already; add tables to it with --add, or overwrite" in message


def test_add_is_repeatable(petps_command: Command, pool: Path) -> None:
    message = petps_command.fails(4, "create", pool, "--table", "x:1:f32:10")
    assert f"{pool} exists already; add tables to it with --add" in message
    report = petps_command.json("create", pool, "--add", "--table", "x:1:f32:10")
    assert (report["created"], report["tables"][0]["added"]) == (False, True)
    report = petps_command.json("create", pool, "--add", "--table", "x:1:f32:10")
    assert not report["tables"][0]["added"]
    message = petps_command.fails(4, "create", pool, "--add", "--table", "x:2:f32:10")
    assert "table 'x' exists already, with dim 1 f32 and capacity 10" in message
    with petps.open(pool) as opened:
        assert [info.name for info in opened.tables()] == ["items", "x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "a:2:f32"], "--table a:2:f32: write NAME:DIM:DTYPE:CAPACITY"),
        (["--table", "a:x:f32:1"], "dim 'x' is no number"),
        (["--table", "a:2:f32:lots"], "capacity 'lots' is no number of rows"),
        (["--table", "a:2:f32:1e999"], "capacity '1e999' is no number of rows"),
        (["--table", "a:2:f64:10"], "dtype 'f64' is unknown"),
        (["--table", "a:5000:f32:10"], "dim 5000 is outside 1..4096"),
        (["--table", "a:2:f32:0"], "capacity"),
        (["--table", "a b:2:f32:10"], "a b"),
        (["--table", "a:2:f32:10", "--table", "a:3:f32:10"], "appears twice"),
        (["--table", "a:2:f32:10", "--feed", "x"], "feed 'x' is unknown"),
        (["--partitions", "2000"], "2000"),
        (["--durability", "disk"], "durability 'disk' is unknown"),
    ],
)
def test_bad_input_leaves_nothing(
    petps_command: Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in petps_command.fails(2, "create", tmp_path / "p", *arguments)
    assert not (tmp_path / "p").exists()


def test_without_a_path(petps_command: Command) -> None:
    assert "name the new pool" in petps_command.fails(2, "create")


def test_folder_that_is_not_there(petps_command: Command, tmp_path: Path) -> None:
    message = petps_command.fails(3, "create", tmp_path / "no/p")
    assert str(tmp_path / "no") in message


def test_disk_full(petps_command: Command, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("cannot mount a small disk here")
    try:
        message = petps_command.fails(5, "create", disk / "p", "--table", "a:64:f32:1m")
        assert str(disk / "p") in message
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
