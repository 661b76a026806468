"""`petps checkpoint tend` as a process beside a trainer, killed with SIGKILL again and again."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from petps.checkpoint import POLICIES, Checkpointer, Store
from tests.python.checkpoint.replay import Replay, check_versions
from tests.python.checkpoint.test_tend import TABLES, replay_of

VERSIONS = 60
KILLS = 6
WAIT_SECONDS = 120.0


class TendProcess:
    def __init__(self, store: Path) -> None:
        command = [sys.executable, "-m", "petps.cli", "checkpoint", "tend", str(store), "--json"]
        self.process = subprocess.Popen(
            [*command, "--policy", "merged", "--every", "0.01"], stdout=subprocess.PIPE, text=True
        )

    def wait_for_a_round(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), "tend has ended"

    def kill(self) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def test_a_killed_process_changes_no_version_and_stops_no_trainer(tmp_path: Path) -> None:
    replay: Replay = replay_of(VERSIONS)
    store = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    writer = Checkpointer(store, POLICIES["consecutive"](), replay)
    delays = random.Random(3)
    tending = TendProcess(tmp_path / "store")
    try:
        for version in range(1, VERSIONS + 1):
            replay.now = version
            writer.write(version, {"dense": b"%d" % version})
            if version % (VERSIONS // KILLS) == 0:
                tending.wait_for_a_round()
                time.sleep(delays.uniform(0, 0.05))  # any moment of a round
                tending.kill()
                tending = TendProcess(tmp_path / "store")
                tending.wait_for_a_round()
        deadline = time.monotonic() + WAIT_SECONDS
        while len(store.refresh().lineage.open_delta_chunks()) > VERSIONS // 2:
            tending.wait_for_a_round()
            assert time.monotonic() < deadline
    finally:
        tending.kill()
    check_versions(Store.open(tmp_path / "store"), replay, list(range(1, VERSIONS + 1)))
    assert store.verify() == []
