"""A rank in a process of its own: python -m tests.train.rank_process RANK WORLD FOLDER STEPS.

It trains over gloo, from the newest version in FOLDER's store, with its pool in a file. It prints
each step on standard output, and at the end writes its state to FOLDER/RANK.npz. Environment:
TIMEOUT_S, the limit of the links; MODE; DEVICE, "cuda" for a GPU of its own for each rank, with
rows and gradients over NCCL; WIDE, whether a layer fills a bucket of dense_sums.py; DIE, "before"
or "after": rank 0 kills itself in its first commit, before or after the state exists; TENDED,
whether another process arranges the store; HOLD, "RANK STEP": that rank waits after that step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer imports it, for seconds: not while a peer waits
from torch import distributed

from petps.checkpoint import POLICIES, Store
from petps.errors import PetpsError
from petps.train.batch import Batch
from petps.train.link import Links
from petps.train.ranks import RankedOutput
from petps.train.schedule import Every
from tests.train.rank_threads import Ranker, read_slots
from tests.train.train_ranks import SEED, TABLES, open_tables, resume

MODE: Any = os.environ.get("MODE", "nested")


class Noisy(Ranker):
    """A model whose loss depends on random numbers, which must continue after a restore."""

    def forward(self, lookups: Any, batch: Batch) -> Any:
        return super().forward(lookups, batch) * (1 + 0.1 * torch.rand(()))  # from the host


class Wide(Noisy):
    """A model with 1 MiB of dense gradients, which would take seconds over a slow link."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(512, 512)

    def forward(self, lookups: Any, batch: Batch) -> Any:
        loss = super().forward(lookups, batch)
        return loss + 0.01 * self.wide(torch.ones(512, device=loss.device)).square().mean()


def die_in_commit(store: Store, moment: str) -> None:
    """Let this process kill itself when it creates the next state."""
    create = store.files.create

    def killed(path: str, content: bytes) -> None:
        is_state = path.startswith("states/")
        if moment == "after" or not is_state:
            create(path, content)
        if is_state:
            os.kill(os.getpid(), signal.SIGKILL)

    store.files.create = killed  # type: ignore[method-assign]


def main(rank: int, world: int, folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet-{os.environ['MEETING']}", rank=rank,
        world_size=world,
    )  # fmt: skip
    device = f"cuda:{rank}" if os.environ.get("DEVICE") == "cuda" else "cpu"
    links = Links.of_processes(timeout_s=float(os.environ.get("TIMEOUT_S", "60")), device=device)
    is_wide = "WIDE" in os.environ
    torch.manual_seed(SEED)
    model = (Wide() if is_wide else Noisy()).to(device)
    torch.manual_seed(SEED + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    store = Store.open(folder / "store")
    with open_tables(rank, world, folder / f"{rank}.pool") as tables:
        output = RankedOutput(
            tables, links, store=store, policy=POLICIES["2d"](), checkpoint=Every(steps=5),
            model=model, optimizer=optimizer, arrange="TENDED" not in os.environ,
        )  # fmt: skip
        first = output.restore().step
        if rank == 0 and "DIE" in os.environ:
            die_in_commit(store, os.environ["DIE"])
        loop = resume(rank, links, model, optimizer, tables, output, first, steps, MODE, device)
        assert bool(loop._dense._buckets) == is_wide, "whether buckets cross"
        with output, loop:
            for step in loop:
                print("step", step.number, step.loss, flush=True)
                if os.environ.get("HOLD") == f"{rank} {step.number}":
                    time.sleep(3600)
        results = {
            f"dense{i}": parameter.detach().cpu().numpy()
            for i, parameter in enumerate(model.parameters())
        }
        for spec in TABLES:
            results[f"{spec.name}.keys"], results[f"{spec.name}.slots"] = read_slots(
                tables[spec.name]
            )
        np.savez(folder / f"{rank}.npz", **results)
    distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    except PetpsError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(3)  # threads of the pipeline may still wait for a peer that is gone
