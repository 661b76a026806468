"""A trainer process killed with -9 again and again: what is served ends as its last state."""

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
from petps.ingest import Ingest
from tests.python.ingest.model import Letters, MemoryStore
from tests.python.publish import trainer_process

SEED = 11
KILLS = 4


def trainer(folder: Path, last: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.python.publish.trainer_process", str(folder), str(last)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_killed_trainers_leave_no_row_behind(tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    log = DirectoryLog(tmp_path / "log", partitions=trainer_process.P)
    store = MemoryStore([trainer_process.SCHEMA], trainer_process.P)
    letters = Letters()
    ingest = Ingest(
        log, store, dead_letters=letters, bases=BaseFolder(tmp_path / "bases"), stale_seconds=0.05
    )
    ingest.start()
    version = 0
    for _ in range(KILLS):
        with trainer(tmp_path, 0) as process:
            assert process.stdout is not None
            version = int(process.stdout.readline().split()[1])
            time.sleep(float(rng.uniform(0, 0.2)))
            os.kill(process.pid, signal.SIGKILL)
    with trainer(tmp_path, version + 200) as process:
        lines = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 0
    assert lines[-1].startswith("done ")
    assert ingest.wait_for(int(lines[-1].split()[1]), 30)
    assert store.by_name["user"].rows == trainer_process.load(tmp_path)
    status = ingest.status()
    assert ingest.stop(10)
    assert status.error == ""
    assert letters.letters == []
    assert all(p.catch_ups == KILLS + 1 for p in status.partitions)
    log.close()
