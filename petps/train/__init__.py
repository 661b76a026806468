"""Room train: a trainer's tables, the ids it touched, the rows it writes, and a training loop.

Owns:        ArrayTable (numpy), PyTorch's embeddings (pytorch.py), TorchRec's trackers
             (torchrec.py), and the contract TrainedTable for other trainers; TrackedSource, a
             tenant of a tracker as a Source of checkpoints; TrainerOutput, one gather for
             checkpoints and log; ShardedTables, rows and optimizer state in a pool; Pipeline, the
             loop over them; RankedOutput, their versions (PIPELINE.md), and those of LoneTables,
             which a loop of its own trains in one process; fit(), the loop on a Ray cluster
             (ray.py).
Never does:  decide what a version is written as (petps.checkpoint.policy does); import torch
             before it is needed (pip install petps[torch]).
Called by:   trainers.
Invariants:  a row that changed is in the next checkpoint and in the next version of the log,
             whichever calls failed before, and also after a crash and TrainerOutput.restore().
Threads:     one thread makes all calls of a TrainerOutput, between two steps; any thread may call
             cancel().
"""

from petps.train.batch import Batch, Ragged
from petps.train.clustering import ByKeys
from petps.train.link import Links
from petps.train.lone import LoneTables
from petps.train.optimizer import Adam, RowwiseAdagrad, Sgd, SparseAdam
from petps.train.options import PipelineOptions
from petps.train.output import TrainerOutput
from petps.train.pipeline import Pipeline
from petps.train.ranks import RankedOutput
from petps.train.removal import Removal
from petps.train.runs import publisher_of
from petps.train.schedule import Every
from petps.train.sharded import ShardedTables, TableSpec
from petps.train.source import TrackedSource
from petps.train.stores import open_store, store_tables
from petps.train.table import ArrayTable, Gathered, TrainedTable
from petps.train.timeline import Timeline

__all__ = [
    "Adam",
    "ArrayTable",
    "Batch",
    "ByKeys",
    "Every",
    "Gathered",
    "Links",
    "LoneTables",
    "Pipeline",
    "PipelineOptions",
    "Ragged",
    "RankedOutput",
    "Removal",
    "RowwiseAdagrad",
    "Sgd",
    "ShardedTables",
    "SparseAdam",
    "TableSpec",
    "Timeline",
    "TrackedSource",
    "TrainedTable",
    "TrainerOutput",
    "open_store",
    "publisher_of",
    "store_tables",
]
