"""Ranks that are processes, over gloo: killed, stopped, restarted.

Run by `make test-train`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.checkpoint import Store
from tests.python.checkpoint.test_tend_process import TendProcess
from tests.seed import SEED
from tests.train.train_ranks import TABLES, create

ROOT = Path(__file__).resolve().parents[2]
WORLD, STEPS = 2, 40
WAIT_SECONDS = 400.0


class RankProcess:
    def __init__(
        self,
        rank: int,
        folder: Path,
        meeting: int,
        timeout_s: float,
        environment: dict[str, str],
        inside: Sequence[str],
    ) -> None:
        self.out = folder / f"{rank}-{meeting}.txt"
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-m", "tests.train.rank_process", str(rank),
                 str(WORLD), str(folder), str(STEPS)],
                cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
                env=os.environ | environment
                | {"MEETING": str(meeting), "TIMEOUT_S": str(timeout_s)},
            )  # fmt: skip

    def wait_step(self, number: int) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while f"step {number} " not in self.out.read_text():
            assert self.process.poll() is None, self.out.read_text()
            assert time.monotonic() < deadline, self.out.read_text()
            time.sleep(0.005)

    def ended(self) -> tuple[int, str]:
        return self.process.wait(WAIT_SECONDS), self.out.read_text()


@contextmanager
def run_ranks(
    folder: Path,
    meeting: int,
    timeout_s: float = 60.0,
    environment: dict[str, str] | None = None,
    inside: Sequence[Sequence[str]] = ((),) * WORLD,
) -> Iterator[list[RankProcess]]:
    """inside: for each rank, the prefix of its command."""
    started = [
        RankProcess(rank, folder, meeting, timeout_s, environment or {}, inside[rank])
        for rank in range(WORLD)
    ]
    try:
        yield started
    finally:
        for process in started:
            if process.process.poll() is None:
                process.process.kill()
                process.process.wait()


def read_results(folder: Path) -> list[dict[str, Any]]:
    with_arrays = [np.load(folder / f"{rank}.npz") for rank in range(WORLD)]
    return [{name: arrays[name] for name in arrays.files} for arrays in with_arrays]


def check_same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    for one, two in zip(left, right, strict=True):
        assert one.keys() == two.keys()
        for name in one:
            assert np.array_equal(one[name], two[name]), name


def train(
    folder: Path, inside: Sequence[Sequence[str]] = ((),) * WORLD, **environment: str
) -> list[dict[str, Any]]:
    """Train without a fault."""
    folder.mkdir()
    create(folder)
    with run_ranks(folder, 0, environment=environment, inside=inside) as running:
        for process in running:
            code, output = process.ended()
            assert code == 0, output
    return read_results(folder)


def wait_for_version(folder: Path) -> None:
    """Wait until the store has a version."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not Store.open(folder / "store").state.versions():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def damage_newest(folder: Path) -> None:
    """Damage a chunk that only the newest version needs."""
    state = Store.open(folder / "store").state
    newest = [chunk for chunk in state.lineage.chunks if chunk.first == state.newest_version]
    with (folder / "store" / newest[0].file).open("r+b") as file:
        file.seek(newest[0].offset + newest[0].length // 2)
        file.write(b"damaged!")


@pytest.mark.timeout(1800)
def test_killed_ranks_continue_bit_by_bit(tmp_path: Path) -> None:
    """Kill each rank with SIGKILL at random steps, and rank 0 in a commit.

    The rank's pool then has later rows and keys than the version. Random numbers, counts, dense
    weights and the loader must continue as they were. Buckets of dense gradients cross over gloo.
    In some trainings another process tends the store, and is killed; and once the newest version is
    damaged, so that the training continues from the one before it.
    """
    reference = train(tmp_path / "whole", WIDE="1")
    assert all(len(result[f"{spec.name}.keys"]) > 5 for result in reference for spec in TABLES)
    folder = tmp_path / "killed"
    folder.mkdir()
    create(folder)
    random = np.random.default_rng(SEED)
    last = 5
    for meeting, (victim, moment) in enumerate([(0, ""), (0, "before"), (1, ""), (0, "after")]):
        environment = {"WIDE": "1"} | ({"DIE": moment} if moment else {})
        if not moment:
            # A late kill leaves later versions, and the next start prints no step before them.
            versions = [entry.version for entry in Store.open(folder / "store").state.versions()]
            last = max([last, *versions]) + int(random.integers(5, 9))
            environment["HOLD"] = f"{victim} {last + 10}"  # so that it does not end before its kill
        is_tended = meeting >= 2
        with ExitStack() as ending:
            if is_tended:
                environment["TENDED"] = "1"
                tend = TendProcess(folder / "store", "--policy", "2d")
                ending.callback(tend.kill)
            running = ending.enter_context(run_ranks(folder, meeting, environment=environment))
            if not moment:
                running[victim].wait_step(last)
                wait_for_version(folder)  # there are two when the newest one is damaged
                running[victim].process.send_signal(signal.SIGKILL)
            code, output = running[victim].ended()
            assert code == -signal.SIGKILL, output
            if is_tended:
                tend.wait_for_a_round()
                tend.kill()
            code, output = running[1 - victim].ended()
            assert code == 3, output
            assert "Unavailable: rank" in output
            assert "a peer is gone" in output
            assert "restart the ranks from the last version" in output
    damage_newest(folder)
    with run_ranks(folder, 98, environment={"WIDE": "1"}) as running:
        outputs = [process.ended() for process in running]
        assert [code for code, _ in outputs] == [3, 3], outputs
        assert all("DataLoss: " in output for _, output in outputs), outputs
    command = [sys.executable, "-m", "petps.cli", "checkpoint", "rollback", str(folder / "store")]
    subprocess.run([*command, "--whole", "--yes"], check=True)
    with run_ranks(folder, 99, environment={"WIDE": "1"}) as running:
        for process in running:
            code, output = process.ended()
            assert code == 0, output
            assert "step 1 " not in output
    check_same(reference, read_results(folder))
    assert Store.open(folder / "store").verify() == []


@pytest.mark.timeout(900)
def test_a_hanging_peer_is_reported_within_the_limit(tmp_path: Path) -> None:
    create(tmp_path)
    held = {"HOLD": "0 20"}  # so that it does not end before it is stopped
    with run_ranks(tmp_path, 0, timeout_s=15.0, environment=held) as running:
        running[0].wait_step(3)
        running[0].process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        code, output = running[1].ended()
        waited = time.monotonic() - began
        running[0].process.send_signal(signal.SIGCONT)
    assert code == 3, output
    assert "DeadlineExceeded: rank 1 of 2: a peer did not answer within 15 s" in output
    print(f"told after {waited:.1f} s")
