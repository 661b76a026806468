"""`petps checkpoint tend` as processes beside a trainer: two at once, killed again and again.

In the second test the trainer writes 150 versions of the accesses of Twitter's cluster 52.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from examples.demo.trace import load_trace
from petps.checkpoint import POLICIES, Checkpointer, Column, Store, Table
from petps.checkpoint.policy import LeftToOthers, Merged, TwoD
from petps.checkpoint.store import BASE
from petps.errors import NotFound
from tests.python.checkpoint.replay import Replay, assert_same, check_versions
from tests.python.checkpoint.test_tend import TABLES, replay_of
from tests.seed import SEED

VERSIONS = 60
KILLS = 6
WAIT_SECONDS = 120.0
DELTAS_PER_BASE = 7
TRACE_VERSIONS = 150


class TendProcess:
    """The process. It reports a line for each round, in a file."""

    def __init__(self, store: Path, *options: str) -> None:
        self._path = store.with_name(f"rounds-{time.monotonic_ns()}")
        command = [sys.executable, "-m", "petps.cli", "checkpoint", "tend", str(store), "--json"]
        with self._path.open("wb") as report:
            self.process = subprocess.Popen([*command, "--every", "0.01", *options], stdout=report)

    def wait_for_a_round(self) -> None:
        before = self._path.stat().st_size
        deadline = time.monotonic() + WAIT_SECONDS
        while self._path.stat().st_size == before:
            assert self.process.poll() is None, "tend has ended"
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def test_killed_processes_change_no_version_and_stop_no_trainer(tmp_path: Path) -> None:
    """Two of them arrange and reset one store: of two changes one is made again, or not needed."""
    options = ("--policy", "merged", "--deltas-per-base", str(DELTAS_PER_BASE))
    replay: Replay = replay_of(VERSIONS)
    store = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    writer = Checkpointer(store, LeftToOthers(Merged(every=DELTAS_PER_BASE)), replay)
    delays = random.Random(SEED)
    processes = [TendProcess(tmp_path / "store", *options) for _ in range(2)]
    try:
        for version in range(1, VERSIONS + 1):
            replay.now = version
            writer.write(version, {"dense": b"%d" % version})
            if version % (VERSIONS // KILLS) == 0:
                chosen = delays.randrange(2)
                processes[chosen].wait_for_a_round()
                time.sleep(delays.uniform(0, 0.05))  # any moment of a round
                processes[chosen].kill()
                processes[chosen] = TendProcess(tmp_path / "store", *options)
                processes[chosen].wait_for_a_round()
        deadline = time.monotonic() + WAIT_SECONDS
        while len(store.refresh().lineage.open_delta_chunks()) > DELTAS_PER_BASE:
            processes[0].wait_for_a_round()
            assert time.monotonic() < deadline
    finally:
        for process in processes:
            process.kill()
    check_versions(Store.open(tmp_path / "store"), replay, list(range(1, VERSIONS + 1)))
    assert len(store.state.lineages) > 1
    assert store.verify() == []


@pytest.mark.parametrize("name", POLICIES)
def test_every_kept_version_of_a_trace_restores(tmp_path: Path, name: str) -> None:
    """The process arranges, resets and purges as the policy does, while the trainer writes.

    Rows have a column of optimizer state.
    """
    accesses = load_trace().accesses
    parts = np.array_split(accesses, TRACE_VERSIONS)
    first = np.arange(int(accesses.max()) + 1)
    replay = Replay(
        {"items": Table("items", (Column("row", "f16", 4), Column("sum", "f32", 1)))},
        [{"items": np.unique(part).astype("<u8")} for part in [first, *parts[1:]]],
        deletes=0.02,
    )
    store = Store.create(tmp_path / "store", "m", list(replay.tables.values()))
    policy = Merged(every=DELTAS_PER_BASE) if name == Merged.name else POLICIES[name]()
    writer = Checkpointer(store, LeftToOthers(policy), replay)
    options = ["--policy", name, "--keep", "all=3s,hourly=1h", "--every", "0.1"]
    if name == Merged.name:
        options += ["--deltas-per-base", str(DELTAS_PER_BASE)]
    choose = random.Random(SEED)
    reader = Store.open(tmp_path / "store")
    bases, restored, layers, has_split = set(), 0, set(), False
    process = TendProcess(tmp_path / "store", *options)
    try:
        for version in range(1, TRACE_VERSIONS + 1):
            replay.now = version
            writer.write(version, {"dense": b"%d" % version})
            if version % 10 == 0:
                store.keep(version)
                process.wait_for_a_round()
            if version % 5 == 0:
                entries = reader.refresh().versions()
                bases |= {entry.version for entry in entries if entry.kind == BASE}
                chunks = [chunk for line in reader.state.lineages for chunk in line.chunks]
                layers |= {chunk.layer for chunk in chunks}
                has_split |= any(chunk.layer == 1 and not chunk.is_open for chunk in chunks)
                try:
                    chosen = choose.choice(entries).version
                    assert_same(reader.restore(chosen)["items"], replay.at("items", chosen))
                    restored += 1
                except NotFound:  # it was purged since
                    assert chosen not in [entry.version for entry in reader.refresh().versions()]
        deadline = time.monotonic() + WAIT_SECONDS
        while len(store.refresh().versions()) == TRACE_VERSIONS:
            process.wait_for_a_round()
            assert time.monotonic() < deadline, "nothing was purged"
        process.wait_for_a_round()
        process.wait_for_a_round()
        process.process.send_signal(signal.SIGTERM)
        process.process.wait(WAIT_SECONDS)
    finally:
        process.kill()
    kept = [entry.version for entry in store.refresh().versions()]
    assert set(range(10, TRACE_VERSIONS + 1, 10)) <= set(kept)
    assert TRACE_VERSIONS in kept
    assert restored > TRACE_VERSIONS // 10
    check_versions(Store.open(tmp_path / "store"), replay, kept)
    assert store.verify() == []
    if name == Merged.name:
        assert len(bases) > 1, "no version became a base"
        assert max(layers) > 1, "nothing was merged"
    if name == TwoD.name:
        assert has_split, "nothing was split"
