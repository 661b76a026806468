"""The demo with --train: a DLRM is trained, streamed, served, killed and compared.

Owns:        the task, the trainer's two workers, scoring by served rows and by the trainer's, the
             course with its two kills, the comparison, the plots.
Never does:  anything that petps does: it uses petps.train, the store, the log, the server and
             petps_client.torch as any user would; duplicate what examples.demo has (child
             processes, traffic, comparison, screen).
Called by:   examples.demo.command.
Invariants:  no held-out sample is trained on; exit status 0 says that trainer and server were
             both killed and came back, that every served row of one version was the trainer's,
             bit by bit, and that one scorer gave every held-out sample the same score with the
             rows of either.
Threads:     command's; traffic.py's; one that scores (live.py); one that reads each worker's
             output (workers.py). worker.py, model.py and scoring.py import torch (pip install
             petps[torch]); they are imported only once PyTorch is known to be installed.
"""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["RATINGS_MIN", "Data"]

RATINGS_MIN: Final = 10_000  # with fewer, a step has too few samples


class Data(enum.Enum):
    """The source of the samples."""

    RATINGS = "ratings"
    CLICKS = "clicks"
