"""A trainer process that is killed repeatedly: the served rows end as its last state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from petps.checkpoint import BaseFolder
from petps.delta.directory import DirectoryLog
from petps.server.ingest import Ingest
from tests.python.ingest.model import Letters, MemoryTables
from tests.python.publish.trainer_process import PARTITIONS, SCHEMA, load, rows_of

SEED = 11
KILLS = 4


def start_trainer(folder: Path) -> subprocess.Popen[str]:
    module = "tests.python.publish.trainer_process"
    return subprocess.Popen(
        [sys.executable, "-m", module, str(folder), str(folder / "log"), str(SEED)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_killed_trainers_leave_no_row_behind(tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    log = DirectoryLog(tmp_path / "log", partitions=PARTITIONS)
    instance = MemoryTables([SCHEMA], PARTITIONS, "default", "default@1")
    letters = Letters()
    ingest = Ingest(
        log,
        instance,
        dead_letters=letters,
        bases=BaseFolder(tmp_path / "bases"),
        search_seconds=0.05,
    )
    ingest.start()
    version = 0
    for _ in range(KILLS):
        with start_trainer(tmp_path) as process:
            assert process.stdout is not None
            version = int(process.stdout.readline())
            time.sleep(float(rng.uniform(0, 0.2)))
            os.kill(process.pid, signal.SIGKILL)
    (tmp_path / "enough").write_text(str(version + 30))
    with start_trainer(tmp_path) as process:
        lines = process.communicate(timeout=200)[0].splitlines()
    assert process.returncode == 0
    assert ingest.wait_for(int(lines[-1]), 200)
    state = load(tmp_path)
    keys = np.flatnonzero(state).astype(np.uint64)
    expected = zip(keys.tolist(), rows_of(keys, state[state > 0]), strict=True)
    assert instance.by_name["items"].rows == {key: row.tobytes() for key, row in expected}
    status = ingest.status()
    assert ingest.stop(60)
    assert status.error == ""
    assert letters.letters == []
    assert all(p.catch_ups == KILLS + 1 for p in status.partitions)
    log.close()
