"""From owners now to owners then: the moves, in an order that never costs a live replica."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from petps.cluster.model import Reason

__all__ = ["Pace", "Step", "steps_of"]

# What comes first: partitions without all their replicas, then members that wait to leave.
_URGENCY: Final[dict[Reason, int]] = {
    "lost": 0, "replicas": 1, "drain": 2, "zone": 3, "balance": 4,
}  # fmt: skip
_DROP: Final = 5  # a replica too many disturbs nobody


@dataclass(frozen=True, slots=True)
class Step:
    """A move with numbers in place of names.

    Steps come in the order of their urgency, and then of the replicas that serve now (live).
    """

    urgency: int
    live: int
    unit: int
    source: int | None
    target: int | None
    reason: Reason


def steps_of(
    unit: int, live: int, gone: Iterable[tuple[int, Reason]], new: Iterable[int]
) -> list[Step]:
    """Return the steps of one partition, the most urgent first.

    gone: the owners that end, with the reason. new: the members that become owners. Each new owner
    replaces one that ends, the most urgent first; those that remain gain a replica, or lose one too
    many. So no step takes a live replica before it has added one, except where that was the aim.
    """
    leaving: list[tuple[int | None, Reason]] = sorted(
        gone, key=lambda pair: (_URGENCY[pair[1]], pair[0])
    )
    steps = []
    urgency = 0
    for target in new:
        source, reason = leaving.pop(0) if leaving else (None, "replicas")
        urgency = max(urgency, _URGENCY[reason])  # in this order also among other partitions
        steps.append(Step(urgency, live, unit, source, target, reason))
    steps += [Step(_DROP, live, unit, source, None, reason) for source, reason in leaving]
    return steps


class Pace:
    """Assigns waves: in each, a member takes part in at most ``parallel`` moves in each direction.

    A member that receives loads rows, and one that gives serves them, beside its requests.
    """

    def __init__(self, parallel: int) -> None:
        self._parallel = parallel
        self._slots: dict[tuple[str, int], tuple[int, int]] = {}  # (next wave, moves in it)
        self.waves = 0

    def wave_of(self, step: Step) -> int:
        """Return the wave of a step; steps of one partition come one after the other."""
        parties = [("unit", step.unit)]
        if step.source is not None and step.reason != "lost":
            parties.append(("from", step.source))
        if step.target is not None:
            parties.append(("to", step.target))
        wave = max(self._slots.get(party, (0, 0))[0] for party in parties)
        for party in parties:
            first, used = self._slots.get(party, (0, 0))
            used = used + 1 if first == wave else 1
            full = party[0] == "unit" or used >= self._parallel
            self._slots[party] = (wave + 1, 0) if full else (wave, used)
        self.waves = max(self.waves, wave + 1)
        return wave
