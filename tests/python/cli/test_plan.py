"""petps plan: its sizes bound those of a full table whose rows change, and its warnings."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import petps
from tests.python.cli.conftest import Command

ROWS = 50_000
SPARE_SLOTS = 1 << 17  # more that any table may take: native/pool/slots.cc


@pytest.mark.parametrize(("dim", "dtype"), [(16, "f32"), (64, "f16"), (3, "int8")])
def test_a_full_table_takes_at_most_what_was_planned(
    run: Command, tmp_path: Path, dim: int, dtype: str
) -> None:
    plan = run.json("plan", "--rows", ROWS, "--dim", dim, "--dtype", dtype, "--folder", tmp_path)
    path = tmp_path / "p"
    run("create", path, "--table", f"t:{dim}:{dtype}:{ROWS}", "--durability", "process")
    rng = np.random.default_rng(1)
    with petps.open(path) as pool:
        for _ in range(4):
            keys = rng.permutation(ROWS).astype(np.uint64)
            pool.push("t", keys, rng.random((ROWS, dim), np.float32))
        status = pool.status()
        (table,) = status["tables"]
        bits = table["slots"] // 8
        rows = table["slots"] * table["row_bytes"] + table["header_bytes"] + bits
        assert table["rows"] == table["capacity"] == ROWS
        unit = status["pool"]["unit_bytes"]
        assert 0 <= plan["index"] - table["index_bytes"] < unit
        spare = SPARE_SLOTS * (table["row_bytes"] + 17)
        # The last extent is as long as those before it together.
        assert rows <= plan["rows"] <= 2 * (1.15 * rows + spare)
        assert status["pool"]["bytes"] <= plan["pool"]
        assert table["allocator_bytes"] - bits <= plan["memory"]
        report = pool.export(tmp_path / "base")
        backup = pool.back_up(tmp_path / "store")
    assert report["bytes"] <= 1.1 * plan["base"] + 10_000
    # Keys that ascend by one take no space.
    assert 0.9 * (plan["backup"] - 8 * ROWS) <= backup["bytes"] <= 1.1 * plan["backup"] + 10_000
    (beside,) = tmp_path.glob("*.backup.default")
    assert plan["beside_pool"] <= beside.stat().st_size <= plan["beside_pool"] + 10_000
    assert plan["pool"] == plan["index"] + plan["rows"] + unit
    assert 1.9 * plan["index"] < plan["while_growing"] - plan["pool"] < 2.1 * plan["index"]


@pytest.mark.parametrize("rows", [100, 1_000_000])
def test_the_file_of_a_loaded_table_is_no_longer_than_planned(
    run: Command, tmp_path: Path, rows: int
) -> None:
    """The extents of a table double, so the last one may have few rows."""
    plan = run.json("plan", "--rows", rows, "--dim", 64, "--dtype", "f16", "--folder", tmp_path)
    path = tmp_path / "p"
    run("create", path, "--table", f"t:64:f16:{rows}", "--durability", "process")
    with petps.open(path) as pool:
        for keys in np.array_split(np.arange(rows, dtype=np.uint64), max(1, rows // 50_000)):
            pool.push("t", keys, np.ones((len(keys), 64), np.float32))
    assert path.stat().st_size <= plan["pool"]


def test_what_is_shown_and_what_does_not_fit(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--dim", 64, "--dtype", "f16", "--folder", tmp_path)
    output = run("plan", "--rows", "1g", "--updates", "50k/s", *arguments)
    for text in ("index in the pool", "while its capacity doubles", "547.2 GiB"):
        assert text in output
    report = run.json("plan", "--rows", "1m", *arguments)
    assert report["log_per_day"] is None
    assert report["warnings"] == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    (warning,) = run.json("plan", "--rows", "1m", *arguments)["warnings"]
    assert "and the disk has 1.0 MiB free" in warning
    output = run("create", tmp_path / "p", "--table", "t:64:f16:1m")
    assert "warning: a full pool takes" in output
    assert (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--rows", "many", "--dim", "4"), "--rows must be a number of rows"),
        (("--rows", "9", "--dim", "4", "--dtype", "f8"), "--dtype f8: write f32"),
        (("--rows", "9", "--dim", "4", "--updates", "x/s"), "--updates must be a number of rows"),
        (("--rows", "9", "--dim", "4", "--folder", "/nowhere"), "there is no such folder"),
    ],
)
def test_bad_arguments_are_named(run: Command, arguments: tuple[str, ...], text: str) -> None:
    assert text in run.fails(2, "plan", *arguments)
