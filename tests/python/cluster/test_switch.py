"""One instance for all servers: when the controller switches a model, and when it does not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from petps.cluster.records import Choice, Move, Wish, dump
from petps.cluster.steps import OUTWAIT_SECONDS, find_step
from petps.cluster.switch import lacking, late, refusal_of_switch, refusal_of_way_back
from tests.python.cluster.simulated import KEYS, LIMITS, FixedTimes
from tests.python.cluster.test_controller import Rig

OLD, NEW = "ranking@1", "ranking@2"


class SwitchRig(Rig):
    """Servers that leave the switch to the cluster; ``loaded``: those that have NEW whole."""

    def __init__(self, owners: tuple[tuple[str, ...], ...], loaded: str, members: str = "ab"):
        super().__init__(owners, members)
        for name in members:
            registration = replace(self.state().registrations[name], is_manual=True)
            self.etcd.commit((), {KEYS.registration(name): dump(registration)})
            self.load(name, is_whole=name in loaded)

    def load(self, name: str, *, is_whole: bool, instance: str = OLD) -> None:
        self.report(name, instance=instance)
        whole = (OLD, NEW) if is_whole else (OLD,)
        member = replace(self.state().members[name], instances=(OLD, NEW), whole=whole)
        self.etcd.commit((), {KEYS.member(name): dump(member)})

    def want(self, instance: str = NEW) -> None:
        self.etcd.commit((), {KEYS.switch: json.dumps({"format": 1, "instance": instance})})

    def step(self) -> str:
        state = self.state()
        step = find_step(state, KEYS, LIMITS, FixedTimes(state, 0.0))
        return "" if step is None else step.event


class LongTimes(FixedTimes):
    """Everything that holds has done so for long."""

    def held_seconds(self, move: Move, condition: str, *, holds: bool) -> float:
        return OUTWAIT_SECONDS if holds else 0.0


def test_one_version_of_the_map_switches_all_when_every_owner_is_whole() -> None:
    rig = SwitchRig((("a",), ("b",)), loaded="a")
    one = rig.controller("one")
    rig.want()
    version = rig.map().version
    one.tick()
    assert rig.state().choice is None
    assert rig.map().version == version
    assert lacking(rig.state(), NEW) == f"b have not loaded {NEW}"
    rig.load("b", is_whole=True)
    one.tick()
    assert rig.state().choice == Choice(NEW, version + 1, OLD)
    assert rig.map().version == version + 1
    assert rig.map().owners == (("a",), ("b",))
    assert rig.state().switch == ""
    assert "model_switched" in [getattr(line, "event", "") for line in rig.lines]
    # Back: the same, with the instance of before.
    for name in "ab":
        rig.load(name, is_whole=True, instance=NEW)
    rig.want(OLD)
    one.tick()
    assert rig.state().choice == Choice(OLD, version + 2, NEW)


def test_a_push_fed_model_has_no_way_back_once_partitions_have_moved() -> None:
    rig = SwitchRig((("a",), ("b",)), loaded="ab")
    for name in "ab":
        pushed = replace(rig.state().registrations[name], is_pushed=True, is_fed=False)
        rig.etcd.commit((), {KEYS.registration(name): dump(pushed)})
    one = rig.controller("one")
    rig.want()
    one.tick()
    assert rig.state().choice is not None
    assert refusal_of_way_back(rig.state(), OLD) == ""
    version = rig.map().version
    moved = replace(rig.map(), version=rig.map().version + 1, owners=(("b",), ("b",)))
    rig.etcd.commit((), {KEYS.map: moved.dump()})
    assert refusal_of_way_back(rig.state(), OLD).startswith(
        f"partitions have moved since the switch to {NEW} (map {version}; now "
    )
    assert lacking(rig.state(), OLD) == refusal_of_way_back(rig.state(), OLD)
    assert refusal_of_way_back(rig.state(), "ranking@3") == ""
    for name in "ab":
        rig.load(name, is_whole=True, instance=NEW)
    rig.want(OLD)
    one.tick()
    assert rig.state().switch == OLD  # it waits
    for name in "ab":  # a log's rows move with its progress
        fed = replace(rig.state().registrations[name], is_pushed=False, is_fed=True)
        rig.etcd.commit((), {KEYS.registration(name): dump(fed)})
    assert lacking(rig.state(), OLD) == ""


def test_a_server_that_owns_nothing_or_is_away_is_not_waited_for() -> None:
    rig = SwitchRig((("a", "c"),), loaded="a", members="abc")
    rig.leave("c")
    rig.want()
    assert rig.step() == "model_switched"


def test_a_partition_without_a_present_owner_waits() -> None:
    rig = SwitchRig((("a",), ("b",)), loaded="ab")
    rig.leave("b")
    rig.want()
    assert rig.step() == ""
    assert lacking(rig.state(), NEW) == "no owner of partitions 1 is present"


def test_moves_come_before_the_switch_and_begin_only_after_it() -> None:
    rig = SwitchRig((("a",), ("a",)), loaded="ab")
    one = rig.controller("one")
    rig.etcd.commit((), {KEYS.wish(0): dump(Wish(0, "a", "b"))})
    one.tick()
    assert rig.state().moves
    rig.want()
    rig.etcd.commit((), {KEYS.wish(1): dump(Wish(1, "a", "b"))})
    assert rig.step() == ""  # the move is not over, and no other begins
    rig.load("a", is_whole=True)
    rig.load("b", is_whole=True)
    assert rig.step() == "partition_switched"
    one.tick()
    for name in "ab":
        rig.load(name, is_whole=True)
    one.tick()
    assert not rig.state().moves
    assert rig.state().choice is not None
    assert rig.step() == "move_begun"


def test_while_an_owner_loads_partitions_still_move() -> None:
    rig = SwitchRig((("a",), ("a",)), loaded="")
    rig.want()
    rig.etcd.commit((), {KEYS.wish(1): dump(Wish(1, "a", "b"))})
    assert rig.step() == "move_begun"


def test_servers_that_switch_on_their_own_are_named() -> None:
    rig = SwitchRig((("a",), ("b",)), loaded="ab")
    rig.register("b")
    assert 'b switch on their own: set ingest.switch = "manual"' in refusal_of_switch(rig.state())
    rig.want()
    assert rig.step() == "switch_refused"
    rig.controller("one").tick()
    assert rig.state().switch == ""
    assert rig.state().choice is None


@pytest.mark.parametrize("changed", ["map", "wish"])
def test_a_step_of_an_older_state_changes_nothing(changed: str) -> None:
    rig = SwitchRig((("a",),), loaded="ab")
    rig.want()
    one = rig.controller("one")
    one.tick()  # elected, and switched
    rig.want(OLD)
    step = one.plan_step("ranking")
    assert step is not None
    if changed == "map":
        rig.etcd.commit((), {KEYS.map: rig.map().again().dump()})
    else:
        rig.want(NEW)
    before = rig.state().choice
    assert not one.execute("ranking", step)
    assert rig.state().choice == before


def test_a_move_that_cannot_end_before_the_switch_gives_way_to_it() -> None:
    """The target reads the base of the new instance, so it never has the old one."""
    rig = SwitchRig((("a",), ("a",)), loaded="a")
    one = rig.controller("one")
    rig.etcd.commit((), {KEYS.wish(0): dump(Wish(0, "a", "b"))})
    one.tick()
    assert rig.state().moves
    rig.want()
    rig.load("a", is_whole=True)
    rig.report("b", is_caught_up=False)
    assert rig.step() == ""  # it may end soon
    state = rig.state()
    step = find_step(state, KEYS, LIMITS, LongTimes(state, 0.0))
    assert step is not None
    assert step.event == "move_abandoned"
    rig.etcd.commit(step.compares, step.puts, step.deletes)
    assert rig.step() == "model_switched"


def test_the_same_switch_twice_keeps_the_way_back() -> None:
    rig = SwitchRig((("a",), ("b",)), loaded="ab")
    one = rig.controller("one")
    rig.want()
    one.tick()
    choice = rig.state().choice
    rig.want()
    assert rig.step() == "switch_ended"
    one.tick()
    assert rig.state().choice == choice
    assert rig.state().switch == ""


def test_the_way_back_is_no_late_owners_instance() -> None:
    rig = SwitchRig((("a",), ("b",)), loaded="ab")
    one = rig.controller("one")
    rig.want()
    one.tick()
    third = "ranking@3"
    for name in "ab":  # a is late: its name refers to the old one
        member = rig.state().members[name]
        whole = (*member.whole, third)
        rig.etcd.commit(
            (), {KEYS.member(name): dump(replace(member, instances=whole, whole=whole))}
        )
    assert late(rig.state()) == f"a, b have not switched to {NEW} yet"
    manual = rig.state().registrations["a"]
    rig.register("a")  # it switches on its own by now, and obeys no order
    assert late(rig.state()) == f"b have not switched to {NEW} yet"
    rig.etcd.commit((), {KEYS.registration("a"): dump(manual)})
    rig.want(third)
    one.tick()
    choice = rig.state().choice
    assert choice is not None
    assert (choice.instance, choice.before) == (third, NEW)
