"""What the planner is given, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Member", "Model", "Move", "Owners", "Plan", "Reason"]

# The members that own each partition of each model: owners[model][partition].
Owners: TypeAlias = Mapping[str, Sequence[Sequence[str]]]
Reason: TypeAlias = Literal["lost", "drain", "zone", "balance", "replicas"]


@dataclass(frozen=True, slots=True)
class Member:
    """A server.

    ``weight`` is the member's share of the partitions, relative to that of the others. A member
    that is "in" may own partitions. A "draining" one serves what it owns, and gives it away. An
    "away" one serves nothing; it keeps what it owns until it has been away for `replace_after`.
    """

    name: str
    zone: str = ""
    weight: float = 1.0
    state: Literal["in", "draining", "away"] = "in"
    away_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Model:
    """A model with ``partitions``, each owned by ``replicas`` members (None: as the plan says).

    Pushes have no order across servers, so a partition of a model that ``is_pushed`` has one owner.
    """

    name: str
    partitions: int
    replicas: int | None = None
    is_pushed: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a plan: ``target`` becomes an owner of the partition, then ``source`` ends.

    wave: moves of one wave may run at the same time; the next wave begins after them. source: None
    if the partition only gains a replica; a lost member if it serves nothing any more. target: None
    if the partition has a replica too many. needs_acknowledgement: the partition is push-fed, so
    the source has to acknowledge that it takes no more pushes before the target becomes the owner.
    """

    wave: int
    model: str
    partition: int
    source: str | None
    target: str | None
    reason: Reason
    needs_acknowledgement: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The assignment to reach, and the steps to it.

    owners: after the last move. moves: in their order. copies: partitions that a member gets and
    does not own now; no plan within the same bounds has fewer than ``lower_bound``.
    imbalance_before and imbalance_after: the largest distance of a member from its fair share, as a
    part of it (0.05 is 5 %). shares: the fair number of partitions of each member that may own
    some. warnings: what the plan could not reach. operations: elementary steps of the search, which
    tests count.
    """

    owners: dict[str, list[tuple[str, ...]]]
    moves: list[Move]
    copies: int
    lower_bound: int
    imbalance_before: float
    imbalance_after: float
    shares: dict[str, float]
    warnings: list[str]
    operations: int
