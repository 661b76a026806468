"""load.ray.<workers> and load.ray.killed: rows of Parquet files into a base, by workers of Ray.

The limit is one process that decodes the same files and writes their rows once, to one file: no
order, no checksums, no keys looked up. After the loads a pool restores the base, and every row is
compared with the one that its key says. Runs in the environment of `make test-train`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from petps.checkpoint import Table
from petps.checkpoint.bulk import NewBase
from petps.checkpoint.ray_tasks import RayTasks
from petps.cli.bulk import Input, Report, load_base, open_parquet
from petps.cli.sources import Columns
from petps.cli.sources.folders import StoreTable
from petps.pool import Pool

Keys = npt.NDArray[np.uint64]
Result = dict[str, Any]
WORKERS: Final = (1, 2)
COPIES: Final = 5  # of the rows on the disk at the same time: files, spills, base, pool, and room
SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)  # odd, so that number * SPREAD is distinct
STEP: Final = 1 << 20
WORKER_NAMES: Final = ("ray::read_piece", "ray::write_part")
LOOK_SECONDS: Final = 0.1


def figures(work: dict[str, Any]) -> Iterator[Result]:
    """Yield a result for each number of workers, and one for a load whose worker is killed."""
    rows, dim = work["rows"], work["dim"]
    os.environ.setdefault("RAY_worker_niceness", "0")  # by default 15, and that of the limit is 0
    needed = COPIES * rows * (8 + 4 * dim)
    with tempfile.TemporaryDirectory(prefix="petps-bench-", dir=work.get("folder")) as name:
        folder = Path(name)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise SystemExit(f"load needs {needed >> 30} GiB of disk in {folder}, has {free >> 30}")
        _write_files(folder / "files", rows, dim, work["files"], work["group_rows"])
        limit = rows / _copy_seconds(folder)
        loads: dict[int, Report] = {}
        for workers in WORKERS:
            loaded = _Load(folder, dim, workers)
            loads[workers] = report = loaded.run()
            yield {
                "name": f"load.ray.{workers}",
                "value": report.rows_per_second,
                "unit": "rows/s",
                "ratio_to": "decoding the files and writing their rows once, one process",
                "ratio": report.rows_per_second / limit,
                "rows": rows,
                "row_values": dim,
                "limit": limit,
                "speedup": report.rows_per_second / loads[WORKERS[0]].rows_per_second,
                "read_seconds": report.read_seconds,
                "write_seconds": report.write_seconds,
                "worker_peak_mib": loaded.peak_bytes / (1 << 20),
                "base_bytes": report.tables[0].bytes,
            }
            if workers != WORKERS[-1]:
                shutil.rmtree(folder / "base")
        yield _restore(folder, rows, dim)
        if work["kills"]:  # a small load is over before
            shutil.rmtree(folder / "base")
            yield _killed(folder, dim, loads[WORKERS[-1]])
            yield _restore(folder, rows, dim) | {"name": "load.restore.killed"}


def _killed(folder: Path, dim: int, whole: Report) -> Result:
    loaded = _Load(folder, dim, WORKERS[-1], kills=True)
    report = loaded.run()
    if loaded.killed is None:
        raise SystemExit("load.ray.killed: no worker was found to be killed")
    return {
        "name": "load.ray.killed",
        "value": report.seconds,
        "unit": "s",
        "ratio_to": f"the same load of {WORKERS[-1]} workers, of which none is killed",
        "ratio": report.seconds / whole.seconds,
        "killed": loaded.killed,
        "repeated_share": loaded.repeated_share,
    }


def keys_of(first: int, stop: int) -> Keys:
    """Return the keys of rows ``first`` to ``stop`` - 1, spread over all numbers."""
    return np.arange(first, stop, dtype=np.uint64) * SPREAD


def rows_of(keys: Keys, dim: int) -> npt.NDArray[np.float32]:
    """Return rows that identify their key."""
    out = np.empty((len(keys), dim), np.float32)
    for column in range(dim):
        out[:, column] = keys * np.uint64(2 * column + 1) >> np.uint64(40)
    return out


def _write_files(folder: Path, rows: int, dim: int, files: int, group_rows: int) -> None:
    folder.mkdir()
    bounds = np.linspace(0, rows, files + 1).astype(int).tolist()
    kind = pa.list_(pa.float32(), dim)
    schema = pa.schema([("key", pa.uint64()), ("row", kind)])
    for number, (first, stop) in enumerate(itertools.pairwise(bounds)):
        path = folder / f"part-{number:03}.parquet"
        with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
            for start in range(first, stop, group_rows):
                keys = keys_of(start, min(start + group_rows, stop))
                values = pa.FixedSizeListArray.from_arrays(
                    pa.array(rows_of(keys, dim).ravel()), dim
                )
                writer.write_table(pa.table([pa.array(keys), values], schema), group_rows)


def _copy_seconds(folder: Path) -> float:
    path = folder / "copy"
    began = time.perf_counter()
    with open(path, "wb", buffering=0) as out:
        for file in sorted((folder / "files").iterdir()):
            for batch in pq.ParquetFile(file).iter_batches(1 << 16, use_threads=False):
                out.write(batch.column(0).to_numpy())
                out.write(batch.column(1).flatten().to_numpy())
        os.fsync(out.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


class _Load:
    """One load into ``folder``/base, by workers of a new cluster of this machine."""

    def __init__(self, folder: Path, dim: int, workers: int, *, kills: bool = False) -> None:
        self._folder = folder
        self._table = Table.of("items", dim)
        self._workers = workers
        self._kills = kills
        self._needed_bytes = 0  # of all spills
        self._ended = threading.Event()
        self.peak_bytes = 0
        """The most memory that a worker had of its own."""
        self.killed: str | None = None
        self.repeated_share = 0.0
        """The bytes of spills that were written in vain, of those that were needed."""

    def run(self) -> Report:
        """Load all files."""
        names = [str(self._folder / "files" / "*.parquet")]
        sources = open_parquet(names, Columns(), "items")
        base = NewBase(self._folder / "base", "bench", [self._table], 16)
        watcher = threading.Thread(target=self._watch)
        with (
            contextlib.redirect_stdout(sys.stderr),  # Ray prints there that a worker died
            RayTasks(
                purpose="this benchmark", remedy="nothing was measured", processors=self._workers
            ) as tasks,
        ):
            watcher.start()
            try:
                return load_base(
                    tasks,
                    base,
                    [Input(self._table, sources)],
                    workers=self._workers,
                    bar=self._bar,
                )
            finally:
                self._ended.set()
                watcher.join()

    @contextlib.contextmanager
    def _bar(self, text: str, rows: int) -> Iterator[Callable[[int], None]]:
        if text == "reading":
            self._needed_bytes = rows * (8 + self._table.width)
        else:
            self.repeated_share = self._spilled_bytes() / self._needed_bytes - 1
        yield lambda count: None

    def _spilled_bytes(self) -> int:
        paths = (self._folder / "base/data").glob("*.spill")
        return sum(path.stat().st_size for path in paths)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            for process in psutil.process_iter(["name", "cmdline"]):
                with contextlib.suppress(psutil.Error):
                    title = " ".join(process.info["cmdline"] or [])
                    if not title.startswith(WORKER_NAMES):
                        continue
                    memory = process.memory_info()
                    self.peak_bytes = max(self.peak_bytes, memory.rss - memory.shared)
                    is_due = self._kills and self.killed is None
                    # In the middle of reading.
                    if is_due and 2 * self._spilled_bytes() > self._needed_bytes > 0:
                        os.kill(process.pid, signal.SIGKILL)
                        self.killed = title.strip()


def _restore(folder: Path, rows: int, dim: int) -> Result:
    """Load the base into a pool, compare every row, and remove the pool."""
    path = folder / "bench.pool"
    with Pool.create(path, durability="process") as pool:
        pool.create_model("bench", partitions=16)
        pool.create_table("items", dim=dim, capacity=rows + rows // 8, model="bench")
        began = time.perf_counter()
        loaded = 0
        for keys, values in StoreTable(folder / "base", "items", None).chunks():
            loaded += pool.load("items", keys, values).inserted
        seconds = time.perf_counter() - began
        if loaded != rows:
            raise SystemExit(f"load: the base has {loaded:,} keys, the files have {rows:,}")
        for start in range(0, rows, STEP):
            keys = keys_of(start, min(start + STEP, rows))
            pulled, mask = pool.pull("items", keys, return_mask=True)
            if not mask.all() or not (pulled == rows_of(keys, dim)).all():
                raise SystemExit(f"load: a row of rows {start:,} to {start + STEP:,} is wrong")
    path.unlink()
    return {
        "name": "load.restore",
        "value": rows / seconds,
        "unit": "rows/s",
        "ratio_to": None,
        "ratio": None,
        "rows_compared": rows,
    }
