"""What the client takes and returns beside arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

__all__ = [
    "Answer",
    "Form",
    "ManyAnswer",
    "Mask",
    "OnUnavailable",
    "PullOptions",
    "PushReport",
    "Rows",
    "Table",
]

Rows = npt.NDArray[Any]
"""float32[n, dim], or uint8[n, row_bytes] of stored rows."""
Mask = npt.NDArray[np.bool_]
Form = Literal["f32", "stored"]
OnUnavailable = Literal["error", "default"]


@dataclass(frozen=True)
class Table:
    """A table as its server describes it."""

    name: str
    model: str
    instance: str
    dtype: str
    """'f32', 'f16', 'bf16' or 'int8'."""
    dim: int
    row_bytes: int
    """Bytes of one row as stored."""
    takes_pushes: bool
    """False: the table is fed by deltas."""
    capacity: int
    rows: int


@dataclass(frozen=True)
class PushReport:
    """The result of a push, in rows."""

    inserted: int
    updated: int
    deleted: int
    absent: int
    """Deletions of keys that did not exist."""
    refused: int
    """New keys that did not fit into a full table."""


class PullOptions(TypedDict, total=False):
    """The options that all methods for pulls take."""

    deadline_ms: int | None
    """Deadline of this call; None: that of the client."""
    min_version: int
    """Rows must be at least this new on every shard. 0: any version."""
    wait_ms: int
    """How long servers may wait for ``min_version``, within the deadline. 0: not at all."""
    dedup: bool | None
    """Whether to request a repeated key once. None: when it pays."""
    on_unavailable: OnUnavailable | None
    """What to do with the keys of a shard that no server answers for. "error": the pull fails.
    "default": they have the table's default row, and are marked as unavailable. None: as the
    client does."""


class Answer(NamedTuple):
    """The complete result of a pull."""

    rows: Rows
    mask: Mask
    """bool[n]: which keys were found. The others have the table's default row."""
    found: int
    applied_version: int
    """Every row is at least this new: the lowest version of the shards that replied. 0: there were
    no keys, or none of their shards replied."""
    instance: str
    """The instance of all rows ("ranking@7"); may be empty when there were no keys."""
    unavailable: Mask
    """bool[n]: for which keys no server answered, so that it is unknown whether they exist. All
    False unless ``on_unavailable`` is "default"."""


class ManyAnswer(NamedTuple):
    """The complete result of a pull from several tables."""

    rows: dict[str, Rows]
    masks: dict[str, Mask]
    """{table: bool[n]}: which keys were found. The others have the table's default row."""
    found: int
    applied_version: int
    """As in :class:`Answer`."""
    instance: str
    """The instance of all rows ("ranking@7"); may be empty when there were no keys."""
    unavailable: dict[str, Mask]
    """{table: bool[n]}: for which keys no server answered, as in :class:`Answer`."""
