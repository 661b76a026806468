"""petps create."""

from __future__ import annotations

from pathlib import Path

import pytest

import petps
from tests.python.cli.conftest import Command
from tests.python.small_disk import mount_small_disk


def test_create_tables_of_options(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "p"
    report = run.json(
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


def test_create_tables_of_a_configuration_file(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "petps.toml"
    file.write_text(
        f'[pool]\npath = "{tmp_path}/p"\ndurability = "process"\n[model]\nname = "m"\n'
        "[tables.a]\ndim = 2\ncapacity = 10\ndefault = [0.5, 1.0]\nfeed = 'delta'\n"
    )
    run("create", "--config", file)
    with petps.open(tmp_path / "p") as pool:
        assert pool.status()["pool"]["durability"] == "process"
        assert pool.pull("a", [1]).tolist() == [[0.5, 1.0]]
        assert pool.tables()[0].feed == "delta"
    message = run.fails(2, "create", "--config", file, "--table", "a:2:f32:10")
    assert "table 'a' is both in --table and in" in message


def test_replace_is_only_for_devices(run: Command, pool: Path) -> None:
    message = run.fails(2, "create", pool, "--replace", "--table", "x:1:f32:10")
    assert "--replace is only for a new pool on a device; delete a pool's file yourself" in message
    message = run.fails(4, "create", "/dev/null", "--table", "x:1:f32:10")
    assert "/dev/null holds data already; add tables to it with --add, or overwrite" in message


def test_add_twice_adds_a_table_once(run: Command, pool: Path) -> None:
    message = run.fails(4, "create", pool, "--table", "x:1:f32:10")
    assert f"{pool} exists already; add tables to it with --add" in message
    report = run.json("create", pool, "--add", "--table", "x:1:f32:10")
    assert (report["created"], report["tables"][0]["added"]) == (False, True)
    report = run.json("create", pool, "--add", "--table", "x:1:f32:10")
    assert not report["tables"][0]["added"]
    message = run.fails(4, "create", pool, "--add", "--table", "x:2:f32:10")
    assert "table 'x' exists already, with dim 1 f32 and capacity 10" in message
    with petps.open(pool) as opened:
        assert [info.name for info in opened.tables()] == ["items", "x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "a:2:f32"], "--table a:2:f32: write NAME:DIM:DTYPE:CAPACITY"),
        (["--table", "a:x:f32:1"], "dim must be a number, got 'x'"),
        (["--table", "a:2:f32:lots"], "capacity must be a number of rows, got 'lots'"),
        (["--table", "a:2:f32:1e999"], "capacity must be a number of rows, got '1e999'"),
        (["--table", "a:2:f64:10"], "dtype 'f64' is unknown"),
        (["--table", "a:5000:f32:10"], "dim 5000 is outside 1..4096"),
        (["--table", "a:2:f32:0"], "capacity"),
        (["--table", "a b:2:f32:10"], "a b"),
        (["--table", "a:2:f32:10", "--table", "a:3:f32:10"], "have the same name"),
        (["--table", "a:2:f32:10", "--feed", "x"], "feed 'x' is unknown"),
        (["--partitions", "2000"], "2000"),
        (["--durability", "disk"], "durability 'disk' is unknown"),
    ],
)
def test_bad_input_creates_no_pool(
    run: Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in run.fails(2, "create", tmp_path / "p", *arguments)
    assert not (tmp_path / "p").exists()


def test_create_needs_a_path(run: Command) -> None:
    assert "name the new pool" in run.fails(2, "create")


def test_a_missing_folder_is_named(run: Command, tmp_path: Path) -> None:
    message = run.fails(3, "create", tmp_path / "no/p")
    assert str(tmp_path / "no") in message


def test_a_full_disk_leaves_no_pool(run: Command, tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "disk", "3m") as disk:
        message = run.fails(5, "create", disk / "p", "--table", "a:64:f32:1m")
        assert str(disk / "p") in message
        assert list(disk.iterdir()) == []


def test_if_missing_creates_once(run: Command, tmp_path: Path) -> None:
    pool = tmp_path / "p"
    leftover = tmp_path / ".p.new"
    leftover.write_bytes(b"of a call that was killed")
    report = run.json("create", pool, "--if-missing", "--table", "x:1:f32:10")
    assert (report["created"], report["pool"]) == (True, str(pool))
    assert not leftover.exists()
    before = pool.stat()
    assert run.json("create", pool, "--if-missing", "--table", "y:1:f32:10") == {
        "pool": str(pool),
        "created": False,
    }
    assert "exists already, and stays as it is" in run(
        "create", pool, "--if-missing", "--table", "x:2:f32:10"
    )
    assert (pool.stat().st_ino, pool.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    message = run.fails(2, "create", pool, "--if-missing", "--add", "--table", "x:2:f32:10")
    assert "give it without --add and --replace" in message
    message = run.fails(3, "create", tmp_path / "none" / "p", "--if-missing")
    assert f"there is no folder {tmp_path}/none" in message


def test_a_pool_appears_with_all_its_tables(run: Command, tmp_path: Path) -> None:
    pool = tmp_path / "p"
    tables = ("--table", "x:1:f32:10", "--table", "bad:0:f32:10")
    run.fails(2, "create", pool, "--if-missing", *tables)
    assert list(tmp_path.iterdir()) == []


def test_if_missing_leaves_a_device_that_holds_data(run: Command) -> None:
    report = run.json("create", "/dev/null", "--if-missing", "--table", "x:1:f32:10")
    assert not report["created"]
