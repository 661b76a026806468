"""The simulation of a cluster's moves: it follows the rates and the limits that it is given."""

from __future__ import annotations

import random

import pytest

from bench.scale.simulate import Rates, Simulation
from petps.cluster.limits import Limits
from petps.cluster.records import State

ADDRESSES = ("a:1", "b:1", "c:1", "d:1")
FAST = Rates(restart_seconds=0.0, follow=1e9, remove=1e9)


def seconds_to_drain(rates: Rates, limits: Limits, within: float = 1000) -> float:
    """Return the simulated seconds until the first server owns nothing and has removed its rows."""
    owners = [(ADDRESSES[n % 4], ADDRESSES[(n + 1) % 4]) for n in range(8)]
    simulation = Simulation(
        dict.fromkeys(ADDRESSES, ""), [1000] * 8, owners, rates, limits,
        random.Random(1).random,
    )  # fmt: skip
    simulation.put({simulation.keys.drained(ADDRESSES[0]): "{}"})

    def is_over(state: State) -> bool:
        assert state.map is not None
        is_owner = any(ADDRESSES[0] in present for present in state.map.owners)
        return not (is_owner or state.moves or state.drops)

    return simulation.run_until(is_over, within)


@pytest.mark.parametrize(
    ("rates", "limits", "least", "most"),
    [
        # Looks alone: of the server, of the controller, and of the thread that removes.
        (FAST, Limits(moves=8, drain_seconds=0, pause_seconds=0), 0.5, 3.0),
        # Four partitions of 1,000 rows, two at a time: two targets, each follows for 100 s.
        (Rates(0, 10, 1e9), Limits(moves=2, drain_seconds=0, pause_seconds=0), 200, 420),
        # Four moves, one after the other, each with its pause or its drain.
        (FAST, Limits(moves=1, drain_seconds=0, pause_seconds=60), 180, 190),
        (FAST, Limits(moves=1, drain_seconds=60, pause_seconds=0), 240, 250),
        # One thread removes 4 x 1,000 rows.
        (Rates(0, 1e9, 10), Limits(moves=8, drain_seconds=0, pause_seconds=0), 400, 410),
        # A server that follows another map starts again, eight times in all.
        (Rates(10, 1e9, 1e9), Limits(moves=1, drain_seconds=0, pause_seconds=0), 40, 110),
    ],
)
def test_the_slowest_part_decides(rates: Rates, limits: Limits, least: float, most: float) -> None:
    assert least <= seconds_to_drain(rates, limits) <= most


def test_what_never_ends_is_said() -> None:
    with pytest.raises(RuntimeError, match="not over after 9 simulated seconds"):
        seconds_to_drain(FAST, Limits(moves=0), within=9)
