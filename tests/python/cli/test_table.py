"""petps table grow: on a closed pool, through the server that has it open, and what it refuses."""

from __future__ import annotations

import os
import socket
import stat
import threading
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import petps
from petps import _native
from petps.admin import socket_of
from petps.admin.client import AdminClient
from petps.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from petps.pool.audited import audit_log_of
from petps.server import Serving
from tests.python.cli.conftest import DIM, Command, expected
from tests.python.cli.test_server_target import settings
from tests.python.waiting import wait_until

FIVE = 5
DAY = 86400


@pytest.fixture
def small(tmp_path: Path, run: Command) -> Path:
    """Return a pool whose table is full."""
    path = tmp_path / "small.pool"
    run("create", path, "--table", f"items:{DIM}:f32:{FIVE}", "--durability", "process")
    with petps.open(path) as pool:
        pool.push("items", np.arange(FIVE), expected(np.arange(FIVE, dtype=np.uint64)))
    return path


def push(pool: petps.Pool, first: int, last: int) -> None:
    keys = np.arange(first, last, dtype=np.uint64)
    pool.push("items", keys, expected(keys))


def check(path: Path, rows: int, capacity: int) -> None:
    """Check all rows of the closed pool, its capacity, and that a further key is refused."""
    with petps.open(path) as pool:
        keys = np.arange(rows, dtype=np.uint64)
        found, mask = pool.pull("items", keys, return_mask=True)
        assert mask.all()
        assert (found == expected(keys)).all()
        (table,) = pool.status()["tables"]
        assert (table["rows"], table["capacity"]) == (rows, capacity)
        assert pool.verify().clean
        if rows == capacity:
            with pytest.raises(ResourceExhausted):
                push(pool, rows, rows + 1)


def test_a_closed_pool(run: Command, small: Path) -> None:
    assert "capacity for 2,000 rows now" in run("table", "grow", small, "items", "--capacity", "2k")
    with petps.open(small) as pool:
        push(pool, FIVE, 2000)
    check(small, 2000, 2000)
    report = run.json("table", "grow", small, "items", "--capacity", "2_001", "--unpaced")
    assert report == {"table": "items", "capacity": 2001}
    check(small, 2000, 2001)


def test_a_served_pool(run: Command, small: Path) -> None:
    with Serving(settings(small)) as serving:
        path = socket_of(small)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        url = f"petps://127.0.0.1:{serving.port}"
        assert "full" in run.fails(5, "push", url, "items", "5=5,5,5,5")
        assert "capacity for 1,000 rows" in run("table", "grow", small, "items", "--capacity", "1k")
        (table,) = run.json("status", url)["tables"]
        assert (table["rows"], table["capacity"]) == (FIVE, 1000)
        assert run.json("push", url, "items", "5=5,5.125,5.25,5.375")["inserted"] == 1
    assert not path.exists()
    check(small, 6, 1000)


@pytest.mark.parametrize("served", [False, True])
def test_what_is_refused_is_said_alike_with_and_without_a_server(
    run: Command, small: Path, served: bool
) -> None:
    requests = {
        ("items", "5"): (2, "table 'items' has capacity 5: give it more"),
        ("items", "1"): (2, "table 'items' has capacity 5: give it more"),
        ("other", "10"): (3, "instance 'default@0' has no table 'other'; it has items"),
        ("items", "1000000m"): (5, "of index"),
    }
    with Serving(settings(small)) if served else nullcontext():
        for (table, capacity), (code, text) in requests.items():
            assert text in run.fails(code, "table", "grow", small, table, "--capacity", capacity)
    check(small, FIVE, FIVE)


@pytest.mark.parametrize("capacity", ["", "many", "nan", "0", "1e30", "inf"])
def test_a_capacity_that_is_no_number(run: Command, small: Path, capacity: str) -> None:
    message = run.fails(2, "table", "grow", small, "items", "--capacity", capacity)
    assert "--capacity must be a number of rows" in message


def test_an_address_is_no_pool(run: Command) -> None:
    message = run.fails(2, "table", "grow", "petps://127.0.0.1:7070", "items", "--capacity", "9")
    assert "name the pool by its path" in message


def test_another_process_than_a_server_has_the_pool(run: Command, small: Path) -> None:
    with petps.open(small):
        message = run.fails(6, "table", "grow", small, "items", "--capacity", "9")
        assert "in use by another process" in message
        left = socket.socket(socket.AF_UNIX)  # of a server that was killed
        left.bind(str(socket_of(small)))
        left.close()
        message = run.fails(7, "table", "grow", small, "items", "--capacity", "9")
        assert "does not answer" in message
    with Serving(settings(small)):  # takes the place of the socket that was left
        run("table", "grow", small, "items", "--capacity", "9")
    check(small, FIVE, 9)


def test_a_caller_that_goes_away_leaves_the_table_as_it_was(small: Path) -> None:
    class Gone(Exception):
        pass

    def leave(copied: int, buckets: int) -> bool:
        raise Gone

    with (
        Serving(settings(small)) as serving,
        AdminClient(small) as client,
        serving._tables.find("default@0", "items").scan(),  # holds off the end of a growth
    ):
        with pytest.raises(Gone):
            client.grow("items", 200_000, progress=leave)
        wait_until(lambda: all(thread.name != "petps-grow" for thread in threading.enumerate()))
        (table,) = serving.status()["tables"]
        assert table["capacity"] == FIVE
    with petps.open(small) as pool, pytest.raises(Gone):
        pool.grow("items", 300_000, progress=leave)
    with petps.open(small) as pool:
        with pytest.raises(FailedPrecondition, match="growing was cancelled"):
            pool.grow("items", 300_000, progress=lambda copied, buckets: False)
        assert pool.status()["tables"][0]["capacity"] == table["capacity"]


def test_a_server_that_closes_ends_what_is_in_progress(small: Path) -> None:
    is_copied = threading.Event()
    with Serving(settings(small)) as serving, AdminClient(small) as client:

        def note(copied: int, buckets: int) -> bool:
            if copied == buckets:
                is_copied.set()
            return True

        def ask() -> None:
            with pytest.raises((FailedPrecondition, Unavailable)):
                client.grow("items", 1000, progress=note)

        asking = threading.Thread(target=ask)
        with serving._tables.find("default@0", "items").scan():  # holds off the end of the growth
            asking.start()
            assert is_copied.wait(60)
            for part in serving._upkeep:
                part.close()
            asking.join()
    check(small, FIVE, FIVE)


def test_growing_twice_at_once(small: Path) -> None:
    with petps.open(small) as pool:
        pool.grow("items", 200_000)
        messages = []

        def grow_too(copied: int, buckets: int) -> bool:
            with pytest.raises(FailedPrecondition) as refused:
                pool.grow("items", 400_000)
            messages.append(str(refused.value))
            return True

        pool.grow("items", 300_000, progress=grow_too)
    assert "grows already" in messages[0]
    check(small, FIVE, 300_000)


def test_a_table_that_does_not_exist(small: Path) -> None:
    with petps.open(small) as pool:
        native: _native.Tables = pool.native
        with pytest.raises(NotFound, match="no table with id 99"):
            native.grow(99, 10)
        with pytest.raises(InvalidArgument):
            native.grow(1, FIVE)


def test_another_file_at_the_place_of_the_socket_stays(small: Path) -> None:
    other = socket_of(small)  # a pool may have this name
    petps.create(other).close()
    before = other.read_bytes()
    lines: list[str] = []
    with Serving(settings(small), log=lines.append):
        pass
    assert other.read_bytes() == before
    assert any("no admin socket" in line and "no socket" in line for line in lines)


def test_scans_and_exports_have_all_rows_after_a_growth(small: Path, tmp_path: Path) -> None:
    rows = 40_000
    with petps.open(small) as pool:
        pool.grow("items", 50_000)
        keys = np.arange(rows, dtype=np.uint64)
        pool.push("items", keys, expected(keys))
        table = pool.table("items")
        pool.grow("items", 1_000_000)
        for handle in (table, pool.table("items")):
            assert len(handle.keys()) == rows
        assert sum(len(page) for page, _ in pool.scan("items")) == rows
        (written,) = pool.export(tmp_path / "base")["tables"]
        assert written["rows"] == rows


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("f" * 100)
    folder.mkdir()
    path = folder / "my.pool"
    petps.create(path).close()
    lines: list[str] = []
    with Serving(settings(path), log=lines.append):
        assert not socket_of(path).exists()
    assert any("too long for a socket" in line for line in lines)
    assert os.listdir(folder) == ["my.pool"]


# ---- rows that expire


def age_of(path: Path) -> int:
    with petps.open(path, read_only=True) as pool:
        (table,) = pool.status()["tables"]
        return int(table["expire_after"])


def test_the_age_of_rows_in_a_closed_pool(run: Command, small: Path) -> None:
    assert "never" in run("status", small)
    assert "expire 30d after they were written" in run(
        "table", "expire", small, "items", "--after", "30d"
    )
    assert age_of(small) == 30 * DAY
    assert "30d" in run("status", small)
    report = run.json("table", "expire", small, "items", "--after", "never")
    assert report == {"table": "items", "expire_after": 0}
    assert age_of(small) == 0


def test_the_age_of_rows_in_a_served_pool(run: Command, small: Path) -> None:
    with Serving(settings(small)) as serving:
        run("table", "expire", small, "items", "--after", "90m")
        (table,) = serving.status()["tables"]
        assert table["expire_after"] == 5400
        wait_until(lambda: "90m, late by 0.0 s" in run("status", small))
        run("create", small, "--add", "--table", "young:4:f32:10", "--expire-after", "1h")
        young = next(t for t in serving.status()["tables"] if t["name"] == "young")
        assert young["expire_after"] == 3600
        assert "no table 'none'" in run.fails(3, "table", "expire", small, "none", "--after", "1d")
    assert "90m, late by 0.0 s" in run("status", small)  # closed, and read only
    lines = audit_log_of(small).read_text()  # type: ignore[union-attr]
    assert "let rows of table items of default@0 expire 90m after they were written" in lines


def test_an_age_that_is_none(run: Command, small: Path) -> None:
    for text in ("30", "1w", "-3d", "0h"):
        message = run.fails(2, "table", "expire", small, "items", f"--after={text}")
        assert (
            "--after must be a whole number with its unit, such as 90s, 15m, 6h or 30d" in message
        )
        assert f"'{text}'" in message
    message = run.fails(2, "table", "expire", small, "items", "--after", "9999999999d")
    assert "at most 36600d" in message
    message = run.fails(2, "create", small, "--add", "--expire-after", "1d")
    assert "--expire-after is for the tables of --table" in message
    assert age_of(small) == 0


def test_a_configuration_gives_a_new_table_its_age(run: Command, tmp_path: Path) -> None:
    path, file = tmp_path / "new.pool", tmp_path / "petps.toml"
    file.write_text(
        f'[pool]\npath = "{path}"\n[tables.items]\ndim = 4\ncapacity = 10\nexpire_after = "6h"\n'
    )
    run("create", "--config", file)
    assert age_of(path) == 6 * 3600
    lines: list[str] = []
    with Serving(settings(path, items={"dim": 4, "capacity": 10}), log=lines.append):
        pass
    (line,) = (line for line in lines if "expire_after" in line)
    assert "expire_after = 'never' is ignored: the pool's table has '6h'" in line
    assert "petps table expire" in line
