"""Processor time of plans for 1,000 servers and 65,536 partitions of 88 models in three zones.

`python -m bench.scale.plan` prints one JSON object for each change of the cluster: the seconds, and
the copies beside their lower bound.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from petps.cluster import Member, Model, Owners, make_plan

SERVERS: Final = 1000
REPLICAS: Final = 2
MODELS: Final = [
    *(Model(f"fed{number}", 1024) for number in range(56)),
    *(Model(f"small{number}", 256) for number in range(24)),
    *(Model(f"pushed{number}", 256, is_pushed=True) for number in range(8)),
]
GONE_SECONDS: Final = 1e9


def changes(members: Sequence[Member]) -> Iterator[tuple[str, list[Member]]]:
    """Yield changes of a balanced cluster: their name, and the members afterwards."""

    def change(zone: str, **values: object) -> list[Member]:
        return [
            replace(member, **values) if member.zone == zone else member  # type: ignore[arg-type]
            for member in members
        ]

    yield "none", list(members)
    yield "upgraded zone", change("a", state="away", away_seconds=60.0)
    yield "lost zone", change("a", state="away", away_seconds=GONE_SECONDS)
    yield "drained zone", change("a", state="draining")
    yield "drained server", [replace(members[0], state="draining"), *members[1:]]
    yield "new server", [*members, Member("new", "a")]
    yield "100 new servers", [*members, *(Member(f"new{i}", "abc"[i % 3]) for i in range(100))]
    yield "new zone", [*members, *(Member(f"new{i}", "d") for i in range(300))]
    yield "weights", [replace(m, weight=1.0 + i % 4) for i, m in enumerate(members)]


def measure(name: str, members: Sequence[Member], owners: Owners) -> Mapping[str, object]:
    """Return the figures of one plan."""
    began = time.process_time()
    plan = make_plan(members, MODELS, owners, replicas=REPLICAS)
    seconds = time.process_time() - began
    return {
        "change": name,
        "seconds": round(seconds, 3),
        "copies": plan.copies,
        "lower_bound": plan.lower_bound,
        "imbalance_after": round(plan.imbalance_after, 4),
        "operations": plan.operations,
    }


def main() -> None:
    """Measure every change."""
    members = [Member(f"s{number}", "abc"[number % 3]) for number in range(SERVERS)]
    print(json.dumps(measure("first plan", members, {})))
    balanced = make_plan(members, MODELS, {}, replicas=REPLICAS).owners
    for name, changed in changes(members):
        print(json.dumps(measure(name, changed, balanced)))


if __name__ == "__main__":
    main()
