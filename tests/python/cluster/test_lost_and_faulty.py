"""What the controller does about owners that die during a move, and about members with a fault."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from petps.cluster.etcd import Compare
from petps.cluster.obstacles import refusal_of_move
from petps.cluster.records import Drop, Settings, Wish, dump
from petps.cluster.steps import find_step
from tests.python.cluster.simulated import KEYS, LIMITS, FixedTimes
from tests.python.cluster.test_controller import Rig, step_of, switched_rig


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
    one.tick()
    rig.clock.now += 4.9
    one.tick()
    assert rig.map().owners == ((other,),)
    rig.clock.now += 0.2
    assert one.tick()
    # Now the one that is away is the replica that is given up.
    assert rig.map().owners == ((gone,),)
    assert rig.state().drops == {(other, 0): Drop(other, 0, rig.map().version)}


@pytest.mark.parametrize("others", ["", "c"])
def test_a_target_that_dies_after_the_switch_gives_way_soon_if_nobody_else_has_the_rows(
    others: str,
) -> None:
    rig = Rig((("a", *others),), members="abc")
    rig.etcd.commit((), {KEYS.settings: dump(Settings(1 + len(others)))})
    one = rig.begin_move()
    for name in "abc":
        rig.report(name)
    one.tick()
    assert "b" in rig.map().owners[0]
    rig.report("a")
    rig.report("c")
    rig.leave("b")
    one.tick()
    rig.clock.now += 5.1
    one.tick()
    if others:
        assert rig.move().phase == "switch"
        rig.report("c", is_caught_up=False)
        one.tick()
        rig.clock.now += 60.1
        one.tick()
    assert set(rig.map().owners[0]) == {*others, "a"}
    assert rig.state().drops == {("b", 0): Drop("b", 0, rig.map().version)}


def test_what_was_pushed_to_the_new_owner_is_not_given_back() -> None:
    """A table that pushes feed was created during a move without a copy."""
    rig, _ = switched_rig()
    rig.report("a")
    rig.leave("b")
    rig.register("b", is_pushed=True, has_store=True)
    assert step_of(rig, away=1e9) == ""


def test_rows_that_only_a_server_without_the_partition_has_are_followed_there_again() -> None:
    """It keeps them while no owner has them: for ever, if all owners are lost."""
    rig = Rig((("a",),))
    drop = KEYS.drop("b", 0)
    rig.etcd.commit((), {drop: dump(Drop("b", 0, 2)), KEYS.drained("a"): "{}"})
    assert step_of(rig) == ""
    rig.etcd.commit((), {}, (KEYS.drained("a"),))
    rig.leave("a")
    assert step_of(rig, away=59.0) == ""
    state = rig.state()
    step = find_step(state, KEYS, LIMITS, FixedTimes(state, 60.0))
    assert step is not None
    assert (step.event, step.deletes) == ("move_begun", (drop,))
    assert Compare(drop, state.revisions[drop]) in step.compares


def test_a_drained_server_that_is_away_for_a_minute_is_replaced() -> None:
    rig = Rig((("a",),))
    never = replace(LIMITS, replace_after=math.inf)
    rig.leave("a")
    for drained in (False, True):
        if drained:
            rig.etcd.commit((), {KEYS.drained("a"): "{}"})
        for away in (59.0, 61.0):
            state = rig.state()
            step = find_step(state, KEYS, never, FixedTimes(state, away))
            assert (step is not None) == (drained and away > 60.0)


def test_a_new_run_while_the_owner_is_away_is_waited_for_until_it_is_given_up() -> None:
    """It may be of another log, and the owner could tell."""
    rig = Rig((("a",),))
    rig.report("a", run=5)
    rig.begin_move()
    assert rig.move().run == 5
    rig.report("b", run=6)
    rig.leave("a")
    drained = KEYS.drained("a")
    for is_drained in (True, False):
        rig.etcd.commit((), {drained: "{}"} if is_drained else {}, () if is_drained else (drained,))
        for away in (1.0, 59.0, 61.0, 3601.0):
            state = rig.state()
            never = replace(LIMITS, replace_after=3600.0)
            step = find_step(state, KEYS, never, FixedTimes(state, away))
            is_switched = step is not None and step.event == "partition_switched"
            assert is_switched == (away > (60.0 if is_drained else 3600.0))
    rig.report("b", run=5)
    assert step_of(rig, away=1.0) == "partition_switched"


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


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_neither_drains_nor_keeps_from_being_drained(fault: dict[str, Any]) -> None:
    rig = Rig((("b",),), members="abc")
    rig.report("b", error=fault.get("error", ""))
    rig.register("b", partitions=fault.get("partitions", 1))
    assert step_of(rig, away=1e9) == ""
    rig.etcd.commit((), {KEYS.drained("b"): "{}"})
    assert step_of(rig) == "move_begun"


def test_a_fault_ends_neither_a_wish_nor_a_rebalancing() -> None:
    rig = Rig((("a",), ("a",)))
    rig.report("b", error="the map is wrong")
    rig.etcd.commit((), {KEYS.rebalance: "{}", KEYS.wish(0): dump(Wish(0, "a", "b"))})
    assert step_of(rig) == ""
    rig.report("b")
    one = rig.controller("one")
    one.tick()
    assert rig.move().reason == "wish"


def test_a_member_with_a_fault_is_no_reason_to_do_without_a_replica() -> None:
    """Its zone does not count as one that a replica may go to."""
    rig = Rig((("a",),), members="abc")
    for name, zone in zip("abc", ("z1", "z2", "z1"), strict=True):
        rig.register(name, zone=zone)
    rig.report("b", error="the map is wrong")
    rig.etcd.commit((), {KEYS.settings: dump(Settings(2))})
    rig.controller("one").tick()
    assert rig.move().target == "c"


@pytest.mark.parametrize("fault", [{"error": "the map is wrong"}, {"run": 900}])
def test_a_target_with_a_lasting_fault_gives_its_place_to_other_moves(fault: Any) -> None:
    rig = Rig((("a",),))
    one = rig.begin_move()
    rig.report("a", run=5)
    rig.report("b", **{"run": 5, "is_caught_up": "run" in fault, **fault})
    one.tick()
    rig.clock.now += 59.0
    one.tick()
    assert rig.move().phase == "follow"
    rig.clock.now += 1.1
    one.tick()
    drop = Drop("b", 0, rig.map().version, is_foreign="run" in fault)
    assert rig.state().drops == {("b", 0): drop}
    assert any("so the move is abandoned" in line for line in rig.lines)


@pytest.mark.parametrize(("of_a", "of_b"), [
    ({"run": 5}, {"run": 5}), ({"run": 0}, {"run": 9}), ({"run": 5}, {"run": 0}),
])  # fmt: skip
def test_runs_that_cannot_be_compared_stop_no_move(of_a: Any, of_b: Any) -> None:
    rig = Rig((("a",),))
    rig.begin_move()
    rig.report("a", **of_a)
    rig.report("b", **of_b)
    assert step_of(rig) == "partition_switched"


def test_a_target_that_reads_older_runs_is_waited_for() -> None:
    rig = Rig((("a",),))
    one = rig.begin_move()
    rig.report("a", run=5)
    rig.report("b", run=3, is_caught_up=False)
    for _ in range(3):
        one.tick()
        rig.clock.now += 61.0
    assert rig.move().phase == "follow"


def test_the_runs_of_one_whole_owner_are_enough() -> None:
    rig = Rig((("a", "c"),), members="abc")
    rig.etcd.commit((), {KEYS.settings: dump(Settings(3))})
    rig.controller("one").tick()
    rig.report("a", run=5)
    rig.report("b", run=5)
    rig.report("c", run=900)
    assert step_of(rig) == "partition_switched"


def test_an_owner_that_starts_its_ingest_is_waited_for_but_not_for_ever() -> None:
    """Its runs say whether those of the target are of another log."""
    rig = Rig((("a",),))
    one = rig.begin_move()
    rig.report("a", run=5, is_caught_up=False)
    rig.report("b", run=9)
    one.tick()
    rig.clock.now += 59.0
    one.tick()
    assert rig.move().phase == "follow"
    rig.clock.now += 1.1
    one.tick()
    assert rig.move().phase == "switch"


def test_each_time_that_an_owner_starts_its_ingest_is_waited_for() -> None:
    rig = Rig((("a",),))
    one = rig.begin_move()
    rig.report("b", run=900)
    for _ in range(4):
        rig.report("a", run=5, is_caught_up=False)
        one.tick()
        rig.report("a", run=5)
        one.tick()
        rig.clock.now += 40.0
        rig.report("a", run=5, is_caught_up=False)
        one.tick()
        assert rig.map().owners == (("a",),)


def test_a_target_that_starts_its_ingest_begins_the_wait_anew() -> None:
    rig = Rig((("a",),))
    one = rig.begin_move()
    rig.report("a", run=5, is_caught_up=False)
    for is_caught_up in (True, False, True):
        rig.report("b", run=900, is_caught_up=is_caught_up)
        one.tick()
        rig.clock.now += 31.0
    one.tick()
    assert rig.map().owners == (("a",),)


@pytest.mark.parametrize("is_foreign", [False, True])
def test_an_order_that_waits_for_an_owner_who_is_behind_gives_way(is_foreign: bool) -> None:
    """A drained owner can never be whole, and the target keeps the rows of an abandoned move."""
    rig = Rig((("a",),))
    drop = Drop("b", 0, 2, is_foreign=is_foreign)
    rig.etcd.commit((), {KEYS.drop("b", 0): dump(drop), KEYS.drained("a"): "{}"})
    assert step_of(rig) == ""
    rig.report("a", is_caught_up=False)
    assert step_of(rig) == ("" if is_foreign else "move_begun")


def test_rows_that_were_kept_are_not_removed_as_those_of_another_log() -> None:
    rig = Rig((("a",),))
    one = rig.controller("one")
    rig.etcd.commit((), {KEYS.drop("b", 0): dump(Drop("b", 0, 2)), KEYS.drained("a"): "{}"})
    rig.report("a", is_caught_up=False, run=5)
    one.tick()
    assert rig.move().has_kept
    rig.report("a", run=5)
    rig.report("b", run=6)
    one.tick()
    rig.clock.now += 60.1
    one.tick()
    assert rig.state().drops == {("b", 0): Drop("b", 0, rig.map().version)}
