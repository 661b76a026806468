"""Room checkpoint: the files that a model's rows are kept in.

base.py: one version of an instance in a folder, for bulk load and catch-up (FORMAT.md). The rest: a
store of many versions that share rows (STORE.md), written by a policy, merged here or by Ray
(on_ray.py), and caught up to by servers (served.py).
"""

from petps.checkpoint.base import Base, BaseFolder, BaseWriter
from petps.checkpoint.checkpointer import Checkpointer, Source
from petps.checkpoint.chunk import Column, Rows, Table
from petps.checkpoint.on_ray import OnRay
from petps.checkpoint.policy import POLICIES, Policy
from petps.checkpoint.quantise import Quantising
from petps.checkpoint.staging import Bandwidth, Device, SourceDevice, StagedCheckpointer
from petps.checkpoint.store import Store

__all__ = [
    "POLICIES",
    "Bandwidth",
    "Base",
    "BaseFolder",
    "BaseWriter",
    "Checkpointer",
    "Column",
    "Device",
    "OnRay",
    "Policy",
    "Quantising",
    "Rows",
    "Source",
    "SourceDevice",
    "StagedCheckpointer",
    "Store",
    "Table",
]
