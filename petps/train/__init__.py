"""Room train: a trainer's tables, what it touched of them, and where their rows go.

Owns:        ArrayTable (numpy), PyTorch's embeddings (pytorch.py), TorchRec's trackers
             (torchrec.py), and the contract TrainedTable for other trainers; TrackedSource, a
             tracker's tenant as a Source of checkpoints; Feed, one gather for checkpoints and log.
Never does:  train; decide what a version is written as (petps.checkpoint.policy).
Called by:   trainers.
Invariants:  a row that changed is in the next checkpoint and the next version of the log, whichever
             calls failed before, also after a crash and Feed.restore().
Threads:     a Feed's calls come from one thread, between two steps; cancel() from any.
"""

from petps.train.feed import Feed
from petps.train.source import TrackedSource
from petps.train.table import ArrayTable, Gathered, TrainedTable

__all__ = ["ArrayTable", "Feed", "Gathered", "TrackedSource", "TrainedTable"]
