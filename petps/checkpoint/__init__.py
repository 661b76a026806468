"""Room checkpoint: the files that keep a model's rows.

A store holds many versions of a model that share rows (STORE.md). A policy decides what is written
to it, this process or Ray merges its chunks (on_ray.py), and servers catch up to its versions
(served.py). A base is a store with one version, for bulk load and catch-up (base.py, FORMAT.md).
"""

from petps.checkpoint.base import Base, BaseFolder, split_by_partition, write_base
from petps.checkpoint.checkpointer import Checkpointer, Source
from petps.checkpoint.chunk import Column, Rows, Table
from petps.checkpoint.on_ray import OnRay
from petps.checkpoint.policy import POLICIES, Policy
from petps.checkpoint.published import BaseInfo, ClockEntry, list_positions
from petps.checkpoint.quantise import Quantising
from petps.checkpoint.stages import Device, SourceDevice, Stager
from petps.checkpoint.staging import Bandwidth, StagedCheckpointer
from petps.checkpoint.store import Store

__all__ = [
    "POLICIES",
    "Bandwidth",
    "Base",
    "BaseFolder",
    "BaseInfo",
    "Checkpointer",
    "ClockEntry",
    "Column",
    "Device",
    "OnRay",
    "Policy",
    "Quantising",
    "Rows",
    "Source",
    "SourceDevice",
    "StagedCheckpointer",
    "Stager",
    "Store",
    "Table",
    "list_positions",
    "split_by_partition",
    "write_base",
]
