"""Functions that train on Ray's workers, which import them by name."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch

from petps.checkpoint import POLICIES, Store
from petps.errors import FailedPrecondition
from petps.train.optimizer import Adam
from petps.train.ranks import RankedOutput
from petps.train.ray import Worker
from petps.train.schedule import Every
from tests.train.rank_threads import Ranker, read_slots
from tests.train.train_ranks import PARTITIONS, SEED, TABLES, resume

# How long processes that Ray starts may take on a machine that is busy.
STARTS_SECONDS: Final = 600
VERSION_STEPS: Final = 5


def train(worker: Worker, folder: Path, steps: int, holds: Sequence[int]) -> list[int]:
    """Train up to ``steps``; return the last step before each try, on rank 0.

    In each try that ``holds`` has a step for, each rank leaves its process id after the step, and
    waits. No version is in flight when the next one is due, however slowly they are written: else
    that one would begin later, and perhaps after the step at which the ranks wait.
    """
    assert (worker.world, worker.folder.name) == (2, f"rank-{worker.rank}-of-2")
    addresses = {
        entry.laddr.ip
        for entry in psutil.Process().net_connections()
        if entry.status == psutil.CONN_LISTEN
    }
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, addresses
    torch.set_num_threads(1)
    model = Ranker()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with worker.open_tables(TABLES, Adam(0.05), partitions=PARTITIONS, seed=SEED) as tables:
        output = RankedOutput(
            tables, worker.links, store=Store.open(folder / "store"), policy=POLICIES["2d"](),
            checkpoint=Every(steps=VERSION_STEPS), model=model, optimizer=optimizer,
        )  # fmt: skip
        first = output.restore().step
        tries = folder / f"tries-{worker.rank}"
        with tries.open("a") as file:
            file.write(f"{first}\n")
        number = len(tries.read_text().split()) - 1
        loop = resume(worker.rank, worker.links, model, optimizer, tables, output, first, steps)
        with output, loop:
            for step in loop:
                if step.number % VERSION_STEPS == VERSION_STEPS - 1:
                    output.wait()
                if number < len(holds) and step.number == holds[number]:
                    output.wait()
                    (folder / f"{worker.rank}-{number}.pid").write_text(str(os.getpid()))
                    time.sleep(STARTS_SECONDS)
        results: dict[str, Any] = {
            f"dense{i}": parameter.detach().numpy()
            for i, parameter in enumerate(model.parameters())
        }
        for table in tables:
            results[f"{table.name}.keys"], results[f"{table.name}.slots"] = read_slots(table)
        np.savez(folder / f"{worker.rank}.npz", **results)
    return [int(line) for line in tries.read_text().split()]


def fail(worker: Worker) -> None:
    """Fail on one rank, as a training with a bad batch would."""
    if worker.rank == 1:
        raise FailedPrecondition("batch 7 is bad")
