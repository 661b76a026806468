"""petps backup and petps restore, of a closed pool and of a served one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import petps
from petps.delta import open_log
from petps.publish import Publisher
from petps.server import Serving
from tests.python.cli.conftest import COUNT, Command
from tests.python.server.conftest import settings


@pytest.mark.parametrize("is_served", [False, True])
def test_a_backup_and_its_restore(
    run: Command, filled: Path, tmp_path: Path, is_served: bool
) -> None:
    store, new = tmp_path / "store", tmp_path / "new"
    with Serving(settings(filled), log=lambda _: None) if is_served else nullcontext():
        first = run.json("backup", filled, store)
        assert (first["kind"], first["rows_written"]) == ("full", COUNT)
        run("push", filled, "items", "7=1,2,3,4")
        second = run.json("backup", filled, store)
        assert (second["kind"], second["rows_written"]) == ("increment", 1)
        assert run.json("backup", filled, store, "--full")["why_full"] == "it was asked for"
        assert "backup" in run("status", filled) or not is_served
    listed = run.json("restore", store, "--list")
    assert [entry["kind"] for entry in listed] == ["full", "increment", "full"]
    assert "increment" in run("restore", store, "--list")
    for entry, row in zip(listed, (None, [1, 2, 3, 4], [1, 2, 3, 4]), strict=True):
        report = run.json("restore", store, new, "--version", entry["version"])
        assert report["tables"] == [{"name": "items", "rows": COUNT}]
        pulled = run.json("pull", new, "items", 7)["rows"][0]["row"]
        assert (pulled == row) == (row is not None)
        new.unlink()


def test_the_log_is_checked(run: Command, tmp_path: Path) -> None:
    pool, store, log = tmp_path / "pool", tmp_path / "store", tmp_path / "log"
    with petps.create(pool) as opened:
        opened.create_model("default", 2)
        opened.create_table("fed", dim=4, capacity=10, feed="delta")
    delta_log = open_log(log, partitions=2)
    publisher = Publisher(delta_log, "default", tables=[petps.delta.TableSchema("fed", "f32", 4)])
    publisher.begin_continue(None)
    publisher.publish("fed", [1, 2, 3], np.ones((3, 4), np.float32))
    version = publisher.commit()
    with Serving(settings(pool, ingest={"log": str(log)}), log=lambda _: None) as serving:
        assert serving._ingest.ingest.wait_for(version, 60)
        run("backup", pool, store)
    assert run.json("restore", store, "--list", "--log", log)[0]["follows_log"] is True
    report = run.json("restore", store, tmp_path / "new", "--log", log)
    assert report["log"] == {"name": f"directory log {log}", "gone": [], "ahead": []}
    delta_log.close()
    other = tmp_path / "other"
    open_log(other, partitions=2).close()
    assert run.json("restore", store, "--list", "--log", other)[0]["follows_log"] is False
    text = run("restore", store, tmp_path / "third", "--log", other)
    assert "warning: directory log" in text
    assert "ends before the backup in" in text
    run.fails(3, "restore", store, tmp_path / "fourth", "--log", tmp_path / "nowhere")
    assert not (tmp_path / "fourth").exists()


def test_what_is_refused(run: Command, filled: Path, tmp_path: Path) -> None:
    assert "name the new pool" in run.fails(2, "restore", tmp_path / "store")
    assert "neither POOL" in run.fails(2, "restore", tmp_path / "store", filled, "--list")
    run.fails(3, "restore", tmp_path / "store", tmp_path / "new")
    assert "for clients" in run.fails(2, "backup", "petps://127.0.0.1:1", tmp_path / "store")
    run("backup", filled, tmp_path / "store")
    assert "name a new file" in run.fails(4, "restore", tmp_path / "store", filled)
    message = run.fails(2, "restore", tmp_path / "store", tmp_path / "new", "--log", filled)
    assert "no position in a log" in message
