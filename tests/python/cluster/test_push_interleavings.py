"""Every order of events of a move with pushes: kills, late commits, handovers taken back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from petps.cluster import steps
from petps.cluster.limits import Step
from petps.cluster.maps import ClusterMap
from petps.cluster.records import Drop, Move, Settings, State, Wish, dump
from petps.server.cluster.handover import Handovers
from tests.python.cluster import simulated, simulated_pushes
from tests.python.cluster.simulated import KEYS, MODEL, Broken
from tests.python.cluster.simulated_pushes import PushServer, PushTimes, PushWorld
from tests.python.cluster.test_interleavings import explore

pytestmark = pytest.mark.timeout(900)  # tens of thousands of states, on a machine that is busy
STATES_MAX = 400_000


@pytest.fixture(autouse=True)
def forget_plans() -> None:
    """Forget the steps that a changed rule has planned."""
    simulated.forget_plans()


def move_a_partition(**budget: Any) -> PushWorld:
    """Return a world in which an operator wants partition 0 to move from a to b."""
    world = PushWorld([PushServer("a"), PushServer("b")], ClusterMap(MODEL, 2, (("a",),)), **budget)
    world.etcd.commit((), {KEYS.settings: dump(Settings(1)), KEYS.wish(0): dump(Wish(0, "a", "b"))})
    return world


WORLDS: Mapping[str, Mapping[str, Any]] = {
    "handover taken back": {"kills": 0, "pushes": 2, "takes_back": 1},
    "source dies": {"kills": 1, "pushes": 1, "fragile": "a"},
    "target dies": {"kills": 1, "pushes": 1, "fragile": "b"},
    "late commit of the source": {"kills": 0, "pushes": 1, "delays": 1, "fragile": "a"},
    "late commit of the target": {"kills": 0, "pushes": 1, "delays": 1, "fragile": "b"},
    "source restarts, late commit": {
        "kills": 1,
        "pushes": 1,
        "delays": 1,
        "fragile": "a",
        "has_lost_leases": False,
    },
    "target restarts, late commit": {
        "kills": 1,
        "pushes": 0,
        "delays": 1,
        "fragile": "b",
        "has_lost_leases": False,
    },
}


@pytest.mark.parametrize("name", WORLDS)
def test_no_order_of_events_loses_a_push_or_has_two_owners(name: str) -> None:
    states = explore(move_a_partition(**WORLDS[name]), STATES_MAX)
    print(f"{name}: {states} states")


# ---- each rule is needed: without it, some order of events breaks something


def test_a_switch_before_the_last_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps._Work, "_has_all", lambda *_: True)
    with pytest.raises(Broken, match="acknowledged pushes"):
        explore(move_a_partition(kills=0, pushes=1), STATES_MAX)


def test_a_switch_without_a_promise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps._Work, "_is_released", lambda work, move: move.phase == "handover")
    with pytest.raises(Broken, match=r"acknowledged pushes|take pushes"):
        explore(move_a_partition(kills=0, pushes=1), STATES_MAX)


def test_pauses_that_end_early_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handovers, "_is_free", lambda *_: True)
    with pytest.raises(Broken, match=r"acknowledged pushes|take pushes"):
        explore(move_a_partition(kills=0, pushes=1), STATES_MAX)


def test_pushes_at_the_target_before_the_source_has_the_map_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Handovers._settle

    def settle(handovers: Handovers, moves: Mapping[int, Move], state: State) -> None:
        others = {n: m for n, m in moves.items() if m.phase != "switch"}
        original(handovers, others, state)

    monkeypatch.setattr(Handovers, "_settle", settle)
    with pytest.raises(Broken, match=r"acknowledged pushes|take pushes"):
        explore(move_a_partition(kills=0, pushes=1), STATES_MAX)


def test_pulls_that_a_cut_off_source_goes_on_to_answer_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controller does not wait until a source without a lease has ended its pulls."""

    def held(times: PushTimes, move: Move, condition: str, *, holds: bool) -> float:
        return 1.0 if holds and condition != "released" else 0.0

    monkeypatch.setattr(PushTimes, "held_seconds", held)
    monkeypatch.setattr(steps, "FENCE_SECONDS", -1e6)
    with pytest.raises(Broken, match="a serves partition 0 with 1 of 2 acknowledged pushes"):
        explore(move_a_partition(kills=1, pushes=1, fragile="a"), STATES_MAX)


def test_a_commit_that_ignores_the_move_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(handovers: Handovers, move: Move, key: str, record: Any) -> bool:
        revision = handovers._etcd.commit((), {key: dump(record)})
        assert revision is not None
        handovers._revisions[key] = revision
        return True

    monkeypatch.setattr(Handovers, "_commit", commit)
    with pytest.raises(Broken, match=r"acknowledged pushes|take pushes"):
        explore(move_a_partition(**WORLDS["target restarts, late commit"]), STATES_MAX)


def test_a_promise_that_a_restart_forgets_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PushWorld._kill_server

    def kill(world: PushWorld, address: str) -> None:
        original(world, address)
        world.servers[address].kept.clear()

    monkeypatch.setattr(simulated_pushes.PushWorld, "_kill_server", kill)
    with pytest.raises(Broken, match=r"acknowledged pushes|take pushes"):
        explore(move_a_partition(kills=1, pushes=1, fragile="a"), STATES_MAX)


def test_a_record_of_a_handover_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drop that the controller gives to the owner is refused by the owner's map."""
    original = steps._Work._hand_over

    def hand_over(work: steps._Work, move: Move) -> Step:
        step = original(work, move)
        assert move.source is not None
        order = dump(Drop(move.source, move.partition, 0))
        puts = {**step.puts, KEYS.drop(move.source, move.partition): order}
        return dataclasses.replace(step, puts=puts)

    monkeypatch.setattr(steps._Work, "_hand_over", hand_over)
    with pytest.raises(Broken, match="shall remove partition 0, which it has"):
        explore(move_a_partition(kills=0, pushes=0), STATES_MAX)
