"""Room checkpoint: the files that keep a model's rows.

base.py holds one version of an instance in a folder, for bulk load and catch-up (FORMAT.md). The
other modules form a store of many versions that share rows (STORE.md). A policy decides what is
written to it, this process or Ray merges its chunks (on_ray.py), and servers catch up to its
versions (served.py).
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
