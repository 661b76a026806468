"""petps shrink, of a closed pool and of one that a server has open."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import petps
from petps.server import Serving
from tests.python.cli.conftest import COUNT, Command, expected, save_rows
from tests.python.cli.test_served import ignore, lines_of
from tests.python.cli.test_server_target import settings

MAP_BYTES = 1 << 16  # of the file system's own, for a file in several pieces


@pytest.mark.parametrize("is_served", [False, True])
def test_the_space_of_an_outgrown_index_takes_no_disk(
    run: Command, pool: Path, tmp_path: Path, is_served: bool
) -> None:
    run("load", pool, "items", save_rows(tmp_path / "rows.npz"))
    run("create", pool, "--add", "--table", "big:4:f32:500k")
    with Serving(settings(pool), log=ignore) if is_served else nullcontext():
        assert run.json("shrink", pool) == {
            "shrunk_bytes": 0,
            "allocated_bytes": pool.stat().st_blocks * 512,
        }
        before = run.json("status", pool)["pool"]
        assert before["allocated_bytes"] >= before["bytes"]
        run("table", "grow", pool, "big", "--capacity", "600k")
        grown = run.json("status", pool)["pool"]
        free = grown["free_bytes"]
        assert free >= 500_000 / 0.8 / 14 * 256
        report = run.json("shrink", pool)
        assert report["shrunk_bytes"] == free
        assert report["allocated_bytes"] == pool.stat().st_blocks * 512
        assert report["allocated_bytes"] <= grown["allocated_bytes"] - free + MAP_BYTES
        assert pool.stat().st_size == grown["bytes"]
        text = run("status", pool)
        assert "on the disk" in text
        assert "are free space" in text
        rows = run.json("pull", pool, "items", 7)["rows"]
        assert rows[0]["row"] == expected(np.array([7], np.uint64))[0].tolist()
    with petps.open(pool) as opened:
        allocated = opened.status()["pool"]["allocated_bytes"]
        assert allocated <= report["allocated_bytes"] + MAP_BYTES
        keys = np.arange(COUNT, dtype=np.uint64)
        assert np.array_equal(opened.pull("items", keys), expected(keys))
        assert opened.verify().clean
    assert {"what": "shrink"} in lines_of(pool)


def test_progress_ends_it(pool: Path) -> None:
    with petps.open(pool) as opened:
        opened.create_table("big", dim=4, capacity=500_000)
        opened.grow("big", 600_000)
        free = opened.status()["pool"]["free_bytes"]
        assert free > 0

        class Stop(Exception):
            pass

        def stop(done: int, total: int) -> bool:
            raise Stop

        with pytest.raises(Stop):
            opened.shrink(stop)
        assert opened.shrink() == free
