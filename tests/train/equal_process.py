"""A rank of train_equal.py in a process of its own, over gloo.

python -m tests.train.equal_process KIND OPTIMIZER MICRO_BATCHES RANK WORLD FOLDER. KIND: petps, or
ddp, which is the reference with DistributedDataParallel. It writes its rows and dense weights to
FOLDER/KIND-RANK.npz.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import distributed

from petps.train.link import Links
from tests.train.equal import run_petps, run_reference


def main(kind: str, optimizer: str, micro_batches: int, rank: int, world: int, out: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{out}/meet-{kind}", rank=rank, world_size=world
    )
    if kind == "petps":
        arrays = run_petps(optimizer, micro_batches, rank, Links.of_processes())
    else:
        arrays = run_reference(optimizer, micro_batches, world, ddp=True)
    np.savez(out / f"{kind}-{rank}.npz", **cast(dict[str, Any], arrays))
    distributed.destroy_process_group()


if __name__ == "__main__":
    words = sys.argv[1:]
    main(words[0], words[1], int(words[2]), int(words[3]), int(words[4]), Path(words[5]))
