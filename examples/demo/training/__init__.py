"""The demo with --train: train, stream, serve, kill and compare a DLRM.

Owns:        the task, the trainer's two processes, the process that tends the store, scoring by
             served rows and by the trainer's, the course with its two kills, the comparison, the
             plots.
Never does:  anything that petps does: it uses petps.train, the store, the log, the server and
             petps_client.torch as any user would; duplicate what examples.demo has (child
             processes, traffic, comparison, screen).
Called by:   examples.demo.command.
Invariants:  The trainer never trains on a held-out sample. Exit status 0 means that trainer and
             server were both killed and restarted, that every served row of one version was the
             trainer's, bit by bit, that one scorer gave every held-out sample the same score with
             the rows of either, that versions were staged, quantised, merged and purged and batches
             clustered and compacted, and that every kept version restores to the trainer's rows,
             rounded.
Threads:     the main thread; traffic.py's; one that scores (live.py); one for the output of each
             trainer process (ranks.py). rank.py, model.py and scoring.py need torch (pip install
             petps[torch]). The command imports them after it has found PyTorch.
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
