"""What the controller does about owners that die during a move, and about members with a fault."""

from __future__ import annotations

from typing import Any

import pytest

from petps.cluster.obstacles import refusal_of_move
from petps.cluster.records import Drop, Settings, Wish, dump
from tests.python.cluster.simulated import KEYS
from tests.python.cluster.test_controller import Rig, step_of


def test_the_last_owner_with_the_rows_owns_the_partition_again() -> None:
    rig = Rig((("a", "b"),))
    rig.etcd.commit((), {KEYS.settings: dump(Settings(1))})
    one = rig.controller("one")
    one.tick()
    gone = str(rig.move().source)
    other = {"a": "b", "b": "a"}[gone]
    assert rig.map().owners == ((other,),)
    rig.report(gone)
    rig.leave(other)
    rig.report(gone, is_caught_up=False)
    assert step_of(rig) == ""
    rig.report(gone)
    assert step_of(rig) == "move_undone"
    rig.etcd.commit((), {KEYS.settings: dump(Settings(2))})  # so that none is given up again
    one.tick()
    assert set(rig.map().owners[0]) == {"a", "b"}
    assert (rig.map().follows, rig.state().moves, rig.state().drops) == ({}, {}, {})


def test_a_target_that_dies_after_the_switch_gives_way_at_once_if_nobody_else_is_there() -> None:
    rig = Rig((("a",),))
    one = rig.controller("one")
    rig.etcd.commit((), {KEYS.wish(0): dump(Wish(0, "a", "b"))})
    one.tick()
    for name in "ab":
        rig.report(name)
    one.tick()
    assert rig.map().owners == (("b",),)
    rig.report("a")
    rig.leave("b")
    one.tick()
    assert rig.map().owners == (("a",),)
    assert rig.state().drops == {("b", 0): Drop("b", 0, rig.map().version)}


FAULTS = [{"error": "the map is wrong"}, {"partitions": 4}]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_member_with_a_fault_gets_nothing_and_keeps_what_it_has(fault: dict[str, Any]) -> None:
    rig = Rig((("a",), ("c",)), members="abc")
    rig.report("b", error=fault.get("error", ""))
    rig.register("b", partitions=fault.get("partitions", 2))
    rig.etcd.commit((), {KEYS.drained("a"): "{}"})
    rig.controller("one").tick()
    assert {move.target for move in rig.state().moves.values()} == {"c"}
    assert "b can own nothing now" in refusal_of_move(rig.state(), 0, "a", "b")
    rig.leave("c")
    assert step_of(rig) == "move_abandoned"


@pytest.mark.parametrize("fault", [{"error": "the map is wrong"}, {"run": 900}])
def test_a_target_with_a_lasting_fault_gives_its_place_to_other_moves(fault: Any) -> None:
    rig = Rig((("a",),))
    one = rig.controller("one")
    rig.etcd.commit((), {KEYS.wish(0): dump(Wish(0, "a", "b"))})
    one.tick()
    rig.report("a", run=5)
    rig.report("b", **{"run": 5, "is_caught_up": "run" in fault, **fault})
    one.tick()
    rig.clock.now += 59.0
    one.tick()
    assert rig.move().phase == "follow"
    rig.clock.now += 1.1
    one.tick()
    assert rig.state().drops == {("b", 0): Drop("b", 0, rig.map().version)}
    assert any("so the move is abandoned" in line for line in rig.lines)


@pytest.mark.parametrize(("of_a", "of_b"), [
    ({"run": 5}, {"run": 5}), ({"run": 0}, {"run": 9}), ({"run": 5}, {"run": 0}),
    ({"run": 5, "is_caught_up": False}, {"run": 9}),
])  # fmt: skip
def test_runs_that_cannot_be_compared_stop_no_move(of_a: Any, of_b: Any) -> None:
    rig = Rig((("a",),))
    rig.etcd.commit((), {KEYS.wish(0): dump(Wish(0, "a", "b"))})
    rig.controller("one").tick()
    rig.report("a", **of_a)
    rig.report("b", **of_b)
    assert step_of(rig) == "partition_switched"
