"""What a controller may do at a time, the times that it measures, and one step of its work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from petps.cluster.etcd import Compare
from petps.cluster.records import Move

__all__ = ["Limits", "Step", "Times"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a controller does at a time, and when it gives up on a member."""

    moves: int = 2
    drain_seconds: float = 5.0
    replace_after: float = 3600.0
    pause_seconds: float = 1.0
    """Between the beginnings of two moves."""
    handover_seconds: float = 2.0
    """Of each of the two parts of a handover, in which pushes to a partition pause."""


class Times(Protocol):
    """Times that a controller has measured. Its successor measures again, so it acts later."""

    def away_seconds(self, address: str) -> float:
        """Return for how long a server has been away; 0: it is not, or that is not known."""

    def held_seconds(self, move: Move, condition: str, *, holds: bool) -> float:
        """Return for how long a condition on a move in its phase has held; 0 unless ``holds``."""

    def may_begin(self) -> bool:
        """Return whether the pause after the last move that began is over."""


@dataclass(frozen=True)
class Step:
    """One transaction: what it compares, writes and deletes. text: what it does, for the log."""

    text: str
    event: str
    compares: tuple[Compare, ...]
    puts: Mapping[str, str]
    deletes: tuple[str, ...] = ()
