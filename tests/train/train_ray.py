"""Ranks that Ray starts, and starts again after one is killed: the rows are those of one run.

Does not cover: clusters of several machines. A lost node is a killed rank whose folder is gone.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from petps.checkpoint import Store
from petps.checkpoint.ray_cluster import RayCluster
from petps.errors import InvalidArgument, Unavailable, Unimplemented
from petps.train.ray import fit
from petps.train.schedule import Every
from tests.train.rank_threads import in_threads
from tests.train.ray_training import STARTS_SECONDS, fail, train
from tests.train.train_ranks import TABLES, check_same, create, work

STEPS = 17
# By try: the step after which both ranks wait for the Killer, and the newest version there.
HOLDS, VERSIONS = (12, 16), (10, 15)
WORLD = 2
pytestmark = [pytest.mark.usefixtures("one_torch_thread"), pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module", autouse=True)
def cluster(ray_environment: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide room for two workers at the same time, however many processors this machine has."""
    ray_environment.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    try:
        connection = RayCluster(processors=2 * WORLD, purpose="this test")
    except Unimplemented as error:
        pytest.skip(str(error))
    with connection:
        yield


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    """Return the states that the ranks left, as read_state() of train_ranks.py does."""
    results = []
    for rank in range(WORLD):
        with np.load(folder / f"{rank}.npz") as saved:
            count = sum(name.startswith("dense") for name in saved)
            result: dict[str, Any] = {
                "dense": [torch.from_numpy(saved[f"dense{i}"]) for i in range(count)]
            }
            for spec in TABLES:
                keys, slots = saved[f"{spec.name}.keys"], saved[f"{spec.name}.slots"]
                result[spec.name] = dict(zip(keys.tolist(), slots, strict=True))
            results.append(result)
    return results


class Killer(threading.Thread):
    """In the first try kills rank 0 once both ranks hold, in the second rank 1.

    Rank 1 also loses the folder that it has on its node.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self.killed: list[int] = []
        self.start()

    def run(self) -> None:
        for number in range(len(HOLDS)):
            paths = [self._folder / f"{rank}-{number}.pid" for rank in range(WORLD)]
            deadline = time.monotonic() + STARTS_SECONDS
            while not all(path.exists() and path.read_text() for path in paths):
                if time.monotonic() > deadline:
                    return
                time.sleep(0.05)
            victim = number
            if victim == 1:
                shutil.rmtree(self._folder / "pools" / "rank-1-of-2")
            os.kill(int(paths[victim].read_text()), signal.SIGKILL)
            self.killed.append(victim)


# Ray starts about eight processes for each try, which import PyTorch and Ray Train: 10 s of a
# processor each: 156 s on a busy machine.
@pytest.mark.timeout(1800)
def test_a_training_goes_on_after_ranks_are_lost(tmp_path: Path) -> None:
    """It continues with the newest version, from pools with later rows and without a pool."""
    create(tmp_path / "whole")
    reference = in_threads(
        WORLD,
        lambda rank, links: work(
            tmp_path / "whole", rank, links, steps=STEPS, checkpoint=Every(steps=50)
        ),
    )
    folder = tmp_path / "ray"
    create(folder)
    killer = Killer(folder)
    tries = fit(
        functools.partial(train, folder=folder, steps=STEPS, holds=HOLDS),
        workers=WORLD,
        folder=folder / "pools",
        storage=tmp_path / "runs",
    )
    killer.join()
    assert killer.killed == [0, 1]
    first, *later = tries
    assert first == 0
    assert tuple(later) == VERSIONS
    check_same(reference, read_ranks(folder))
    assert Store.open(folder / "store").verify() == []


def test_an_error_that_stays_is_raised_with_its_rank(tmp_path: Path) -> None:
    with pytest.raises(
        Unavailable, match=r"given up after 0 new starts: .*rank 1: .*batch 7 is bad"
    ):
        fit(
            fail, workers=WORLD, folder=tmp_path / "pools", storage=tmp_path / "runs",
            max_failures=0,
        )  # fmt: skip


def test_no_workers_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="workers must be at least 1, got 0"):
        fit(fail, workers=0, folder=tmp_path)


def test_a_folder_that_is_not_absolute_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match=r"folder must be an absolute path.*got pools"):
        fit(fail, workers=1, folder="pools")
