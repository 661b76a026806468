"""Room demo, training: `petps demo --train`, a DLRM trained, streamed, served, killed and compared.

Owns:        the task, the trainer's two workers, scoring by served rows and by the trainer's, the
             course with its two kills, the comparison, the plots.
Never does:  anything that petps does: it uses petps.train, the store, the log, the server and
             petps_client.torch as any user would; a second copy of what the demo beside it decides
             (children, traffic, comparison, screen).
Called by:   petps.demo.command.
Invariants:  no held-out sample is trained on; exit status 0 means that both were killed and came
             back, that of one version every served row was the trainer's, bit by bit, and that one
             scorer gave every held-out sample the same score by either.
Threads:     command's; traffic.py's; one that scores (live.py); one that hears each worker
             (workers.py). worker.py, model.py and scoring.py import torch (pip install
             petps[torch]), nothing else does before PyTorch is known to be there.
"""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["RATINGS_MIN", "Data"]

RATINGS_MIN: Final = 10_000  # below, steps have few samples


class Data(enum.Enum):
    """What is trained on."""

    RATINGS = "ratings"
    CLICKS = "clicks"
