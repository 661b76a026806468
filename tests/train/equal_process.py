"""A rank of train_equal.py in a process of its own, over gloo.

python -m tests.train.equal_process KINDS OPTIMIZERS MICRO_BATCHES RANK WORLD FOLDER. It trains each
of the KINDS with each of the OPTIMIZERS, both by comma, from the beginning: that of run_petps(), or
ddp, which is the reference with DistributedDataParallel. It writes its rows and dense weights to
FOLDER/OPTIMIZER-KIND-RANK.npz.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import distributed

from petps.train.link import Links
from tests.train.equal import run_petps, run_reference


def main(
    kinds: list[str], optimizers: list[str], micro_batches: int, rank: int, world: int, out: Path
) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{out}/meet", rank=rank, world_size=world
    )
    for optimizer, kind in itertools.product(optimizers, kinds):
        if kind == "ddp":
            arrays = run_reference(optimizer, micro_batches, world, ddp=True)
        else:
            arrays = run_petps(optimizer, micro_batches, rank, Links.of_processes(), kind=kind)
        np.savez(out / f"{optimizer}-{kind}-{rank}.npz", **cast(dict[str, Any], arrays))
    distributed.destroy_process_group()


if __name__ == "__main__":
    words = sys.argv[1:]
    optimizers = words[1].split(",")
    main(
        words[0].split(","), optimizers, int(words[2]), int(words[3]), int(words[4]), Path(words[5])
    )
