"""petps load --on ray, on a real Ray cluster of this machine, whose workers are killed.

Run by `make test-train`. Does not cover clusters of several machines. The rules of rows and errors
are in tests/python/cli/test_load_on_ray.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import petps
from petps.checkpoint import Store, Table
from petps.checkpoint.bulk import NewBase
from petps.checkpoint.files import LocalFiles
from petps.checkpoint.ray_tasks import RayTasks
from petps.cli.bulk import Input, Report, load_base, open_parquet
from petps.cli.sources import Columns
from petps.errors import Unavailable, Unimplemented
from tests.s3.server import BUCKET, Server
from tests.train.ray_files import DeadlyFiles, GatedFiles

Keys = npt.NDArray[np.uint64]
ROWS, FILES, DIM, PARTITIONS, WORKERS = 200_000, 4, 16, 16, 2
ITEMS = Table.of("items", DIM)
SECONDS = 300
PETPS = (sys.executable, "-m", "petps.cli")
pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster(ray_environment: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide two workers at the same time, however many processors this machine has."""
    try:
        connection = tasks(processors=WORKERS)
    except Unimplemented as error:
        pytest.skip(str(error))
    with connection:
        yield


def tasks(**options: Any) -> RayTasks:
    return RayTasks(purpose="this test", remedy="no base was written", **options)


def rows_of(keys: Keys) -> npt.NDArray[np.float32]:
    """Return rows that identify their key."""
    factors = np.arange(1, 2 * DIM, 2, dtype=np.uint64)
    rows: npt.NDArray[np.float32] = (keys[:, None] * factors >> np.uint64(40)).astype(np.float32)
    return rows


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of Parquet files with ROWS keys that are spread over all numbers."""
    folder = tmp_path_factory.mktemp("rows")
    keys = np.arange(ROWS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for number, part in enumerate(np.split(keys, FILES)):
        values = pa.FixedSizeListArray.from_arrays(pa.array(rows_of(part).ravel()), DIM)
        table = pa.table({"key": part, "row": values})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=10_000)
    return folder


def load(store: Path | LocalFiles, files: Path, bar: Any = None, **options: Any) -> Report:
    sources = open_parquet([str(files / "*.parquet")], Columns(), "items")
    base = NewBase(store, "default", [ITEMS], PARTITIONS)
    bars = {} if bar is None else {"bar": bar}
    with tasks(**options) as cluster:
        return load_base(cluster, base, [Input(ITEMS, sources)], workers=WORKERS, **bars)


def check(folder: Path) -> None:
    """Check that the base has every row of the files, and its folder nothing else."""
    store = Store.open(folder)
    assert store.verify() == []
    restored = store.restore()["items"]
    keys = np.arange(ROWS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert (restored.keys == np.sort(keys)).all()
    assert (restored.columns["row"].view(np.float32) == rows_of(restored.keys)).all()
    named = {path for path in store.state.files() if path.startswith("data/")}
    assert {f"data/{path.name}" for path in (folder / "data").iterdir()} == named


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Killer(threading.Thread):
    """Kills one of two workers that stop within a file, once a phase of the load begins."""

    def __init__(self, store: GatedFiles, phase: str) -> None:
        super().__init__(daemon=True)
        self._store, self._phase = store, phase
        self.killed = 0
        self.spills: list[str] = []
        """The names of the spills when the second phase began."""

    @contextlib.contextmanager
    def bar(self, text: str, rows: int) -> Iterator[Callable[[int], None]]:
        if text == "writing":
            names = os.listdir(f"{self._store.name}/data")
            self.spills = [name for name in names if name.endswith(".spill")]
        if text == self._phase:
            self._store.gate.touch()
            self.start()
        yield lambda count: None

    def run(self) -> None:
        until(lambda: len(self._store.waiting()) == WORKERS)
        victim = self._store.waiting().pop()
        os.kill(victim, signal.SIGKILL)
        self.killed = victim
        until(lambda: len(self._store.waiting()) == WORKERS + 1)  # another one has begun it again
        self._store.gate.unlink()


@pytest.mark.parametrize("phase", ["reading", "writing"])
def test_a_killed_worker_costs_its_part_only(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setattr("petps.cli.bulk.pieces.SPILL_BYTES", 20_000 * 72)  # of the plan: 12 pieces
    monkeypatch.setattr("petps.checkpoint.bulk.PART_BYTES", 1)
    store = GatedFiles(tmp_path / "base")
    killer = Killer(store, phase)
    report = load(store, files, killer.bar)
    killer.join(SECONDS)
    assert killer.killed
    assert (report.rows, report.tables[0].keys) == (ROWS, ROWS)
    # Each piece is one spill; the killed worker left the beginning of one more.
    assert len(killer.spills) == 12 + (phase == "reading")
    check(tmp_path / "base")


def test_a_load_whose_workers_all_die_leaves_no_base(files: Path, tmp_path: Path) -> None:
    store = DeadlyFiles(tmp_path / "base")
    store.own()
    with pytest.raises(Unavailable) as failure:
        load(store, files, retries=1)
    assert "is given up: its Ray worker died 2 times (" in str(failure.value)
    assert str(failure.value).endswith("; no base was written")
    assert list((tmp_path / "base").rglob("*.*")) == []
    load(tmp_path / "base", files)
    check(tmp_path / "base")


def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_memory_monitor_refresh_ms": "0"}
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.run(
        [*PETPS, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=SECONDS,
    )
    assert process.returncode == code, process.stdout + process.stderr
    return process


def test_the_command_loads_and_a_pool_restores(files: Path, tmp_path: Path) -> None:
    store, pool = tmp_path / "base", tmp_path / "my.pool"
    on_ray = ("--on", "ray", "--workers", WORKERS, "--partitions", PARTITIONS)
    done = run("load", store, "items", files / "*.parquet", *on_ray)
    assert f"{store} is a base of model default in 16 partitions" in done.stderr
    assert "items │     4 │ 200,000 │ 200,000 │" in done.stdout
    assert "200,000 rows in " in done.stderr
    check(store)
    run("create", pool, "--table", f"items:{DIM}:f32:250k", "--partitions", PARTITIONS)
    report = json.loads(run("load", pool, "items", store, "--json").stdout)
    assert report["inserted"] == ROWS
    keys = np.arange(ROWS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    with petps.open(pool) as opened:
        assert (opened.pull("items", keys) == rows_of(keys)).all()


@pytest.mark.timeout(900)
def test_an_interrupted_load_leaves_nothing(files: Path, tmp_path: Path) -> None:
    """Ctrl-C while a worker is in the middle of a spill."""
    text = """
import signal, sys
from petps.checkpoint.bulk import NewBase
from tests.train.ray_files import GatedFiles
from tests.train.train_load_on_ray import load
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
try:
    load(GatedFiles(sys.argv[1]), Path(sys.argv[2]), processors=2)
except KeyboardInterrupt:
    print("interrupted")
"""
    store = GatedFiles(tmp_path / "base")
    store.gate.touch()
    environment = {**os.environ}
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        [sys.executable, "-c", text, store.name, str(files)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            until(store.waiting)
            process.send_signal(signal.SIGINT)
            output = process.communicate(timeout=2 * SECONDS)[0]
        finally:
            process.kill()
        assert output.strip() == "interrupted"
    assert list((tmp_path / "base").rglob("*.*")) == []


def test_files_and_base_on_s3(files: Path, tmp_path: Path, s3: Server) -> None:
    import fsspec

    for path in files.iterdir():
        with fsspec.open(f"s3://{BUCKET}/bulk/{path.name}", "wb") as file:
            file.write(path.read_bytes())
    url = f"s3://{BUCKET}/base"
    run("load", url, "items", f"s3://{BUCKET}/bulk/*.parquet", "--on", "ray", "--workers", WORKERS)
    store = Store.open(url)
    assert store.verify() == []
    restored = store.restore()["items"]
    assert (
        len(restored),
        (restored.columns["row"].view(np.float32) == rows_of(restored.keys)).all(),
    ) == (ROWS, True)
    assert set(store.files.list("data")) == {
        path.removeprefix("data/") for path in store.state.files() if path.startswith("data/")
    }
