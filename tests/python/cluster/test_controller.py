"""The election of controllers, their times, and what they leave alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from petps.cluster.controller import TICK_SECONDS, Controller
from petps.cluster.etcd import Compare
from petps.cluster.limits import Limits, Step
from petps.cluster.maps import ClusterMap
from petps.cluster.obstacles import refusal_of_move
from petps.cluster.records import (
    Drop,
    Keys,
    Member,
    Move,
    PartitionReport,
    Received,
    Registration,
    Sent,
    Settings,
    State,
    Wish,
    dump,
)
from petps.cluster.steps import find_step
from petps.errors import Unavailable
from petps.log import Line
from tests.python.cluster.simulated import KEYS, LIMITS, MODEL, PREFIX, FakeEtcd, FixedTimes


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """An etcd in memory with a model, its members, and controllers that log to ``lines``."""

    def __init__(self, owners: tuple[tuple[str, ...], ...], members: str = "ab") -> None:
        self.etcd, self.clock, self.lines = FakeEtcd(), Clock(), list[str]()
        self.etcd.commit((), {KEYS.map: ClusterMap(MODEL, 2, owners).dump()})
        self.version = 2
        for name in members:
            self.register(name)
            self.report(name)

    def controller(self, name: str, limits: Limits = LIMITS) -> Controller:
        return Controller(
            self.etcd, PREFIX, limits, name=name, lease_seconds=9, log=self.lines.append,
            clock=self.clock,
        )  # fmt: skip

    def register(
        self,
        name: str,
        *,
        is_pushed: bool = False,
        has_store: bool = False,
        zone: str = "",
        partitions: int = 0,
    ) -> None:
        count = partitions or len(self.map().owners)
        record = Registration(
            name, f"{name}-grpc:1", zone, 1.0, "pool", "petps", is_pushed, count,
            is_fed=not is_pushed, has_store=has_store,
        )  # fmt: skip
        self.etcd.commit((), {KEYS.registration(name): dump(record)})

    def report(
        self,
        name: str,
        *,
        is_caught_up: bool = True,
        version: int = 7,
        instance: str = MODEL,
        run: int = 0,
        error: str = "",
    ) -> None:
        state = self.state()
        assert state.map is not None
        partitions = {
            number: PartitionReport(version, is_caught_up, run)
            for number in state.map.ingested_by(name)
        }
        member = Member(name, "pool", state.map.version, instance, partitions, error)
        self.etcd.commit((), {KEYS.member(name): dump(member)})

    def begin_move(self, limits: Limits = LIMITS) -> Controller:
        """Let an operator want partition 0 moved from a to b, and a controller begin it."""
        self.etcd.commit((), {KEYS.wish(0): dump(Wish(0, "a", "b"))})
        controller = self.controller("one", limits)
        controller.tick()
        return controller

    def move(self) -> Move:
        return self.state().moves[0]

    def copy(self, *, parts: int, received: int, is_released: bool = False) -> None:
        attempt = self.move().attempt
        sent = Sent(0, "a", "copy", attempt, parts, 0, True, is_released)
        puts = {
            KEYS.sent(0): dump(sent),
            KEYS.received(0): dump(Received(0, "b", "copy", received)),
        }
        self.etcd.commit((), puts)

    def leave(self, name: str) -> None:
        self.etcd.commit((), {}, (KEYS.member(name),))

    def state(self) -> State:
        from petps.cluster.controller import read_models

        return read_models(PREFIX, self.etcd.read(Keys.models(PREFIX)))[MODEL]

    def map(self) -> ClusterMap:
        cluster_map = self.state().map
        assert cluster_map is not None
        return cluster_map


def switched_rig() -> tuple[Rig, Controller]:
    """Return a rig whose partition is in the phase `switch` from a to b."""
    rig = Rig((("a",),))
    one = rig.begin_move()
    for name in "ab":
        rig.report(name)
    one.tick()
    return rig, one


def test_one_controller_is_elected_and_its_successor_continues() -> None:
    rig = Rig((("a",),))
    one, two = rig.controller("one"), rig.controller("two")
    one.tick()
    two.tick()
    assert (one.is_elected, two.is_elected) == (True, False)
    rig.etcd.commit((), {KEYS.wish(0): dump(Wish(0, "a", "b"))})
    assert one.tick()
    assert rig.state().moves[0].phase == "follow"
    one.close()
    two.tick()
    assert two.is_elected
    rig.report("a")
    rig.report("b")
    assert two.tick()
    assert rig.state().moves[0].phase == "switch"
    assert rig.map().owners == (("b",),)
    assert not one.is_elected


def test_an_expired_lease_ends_the_election() -> None:
    rig = Rig((("a",),))
    one, two = rig.controller("one"), rig.controller("two")
    one.tick()
    election = rig.etcd.values[Keys.election(PREFIX)]
    rig.etcd.revoke(election.lease)  # while the process was paused
    two.tick()
    assert two.is_elected
    rig.etcd.commit((), {KEYS.wish(0): dump(Wish(0, "a", "b"))})
    assert not one.tick()  # it still thinks that it is elected
    assert rig.map().version == 2
    rig.clock.now += 10
    one.tick()
    assert not one.is_elected
    assert json.loads(rig.etcd.values[Keys.election(PREFIX)].text)["name"] == "two"


def test_a_conflict_does_not_restart_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig((("a",),), "ab")
    one = rig.controller("one")
    rig.leave("a")
    one.tick()
    rig.clock.now += 50
    step = one.plan_step(MODEL)
    assert step is None
    assert not one.execute(MODEL, _stale_step())
    rig.clock.now += 9.9
    one.tick()
    assert not rig.state().moves
    rig.clock.now += 0.2  # 60.1 s since the member was seen to be away
    one.tick()
    assert rig.state().moves[0].target == "b"


def _stale_step() -> Step:
    return Step("stale", "stale", (Compare(KEYS.map, 999),), {})


def test_etcd_that_is_away_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig((("a",),))
    one = rig.controller("one")
    one.tick()

    def refuse(*_: object, **__: object) -> None:
        raise Unavailable("etcd does not answer: x")

    with monkeypatch.context() as patch:
        patch.setattr(rig.etcd, "read", refuse)
        before = len(rig.lines)
        assert not one.tick()
        assert not one.tick()
        assert [line.event for line in rig.lines[before:] if isinstance(line, Line)] == [
            "etcd_failed"
        ]
    assert not one.tick()
    assert one.is_elected


def test_moves_are_paced() -> None:
    rig = Rig((("a",),) * 4)
    limits = Limits(moves=2, drain_seconds=0.0, replace_after=60.0, pause_seconds=5.0)
    one = rig.controller("one", limits)
    rig.etcd.commit((), {KEYS.drained("a"): "{}"})
    one.tick()
    assert len(rig.state().moves) == 1
    rig.clock.now += 4.9
    one.tick()
    assert len(rig.state().moves) == 1
    rig.clock.now += 0.2
    one.tick()
    assert len(rig.state().moves) == 2
    rig.clock.now += 100.0
    rig.etcd.keep_alive(1)
    one.tick()
    assert len(rig.state().moves) == 2  # the limit


def step_of(rig: Rig, away: float = 0.0) -> str:
    state = rig.state()
    step = find_step(state, KEYS, LIMITS, FixedTimes(state, away))
    return "" if step is None else step.event


@pytest.mark.parametrize("report", [
    {"is_caught_up": False}, {"version": 6}, {"instance": "ranking@9"},
])  # fmt: skip
def test_a_target_that_is_not_whole_does_not_become_the_owner(report: dict[str, object]) -> None:
    rig = Rig((("a",),))
    rig.begin_move()
    assert step_of(rig) == ""  # it does not use the map yet
    rig.report("a")
    rig.report("b", **report)  # type: ignore[arg-type]
    assert step_of(rig) == ""
    rig.report("b")
    assert step_of(rig) == "partition_switched"


def test_the_source_goes_only_when_both_use_the_map_and_the_target_is_whole() -> None:
    rig, one = switched_rig()
    assert rig.state().moves[0].phase == "switch"
    rig.report("a")
    assert step_of(rig) == ""
    rig.report("b", is_caught_up=False)
    assert step_of(rig) == ""
    rig.report("b")
    assert step_of(rig) == "move_ended"
    one.tick()
    assert rig.state().drops == {("a", 0): Drop("a", 0, rig.map().version)}
    assert rig.map().follows == {}
    # No move brings the partition back before its old rows are gone.
    rig.etcd.commit((), {KEYS.wish(0): dump(Wish(0, "b", "a"))})
    assert step_of(rig) == ""
    assert "still removes" in refusal_of_move(rig.state(), 0, "b", "a")


def test_a_replica_is_given_up_only_beside_a_whole_one() -> None:
    rig = Rig((("a", "b"),))
    rig.etcd.commit((), {KEYS.settings: dump(Settings(1))})
    gone = {move.source for move in [rig_plan(rig)]}.pop()
    other = {"a": "b", "b": "a"}[str(gone)]
    rig.report(other, is_caught_up=False)
    assert step_of(rig) == ""
    rig.report(other)
    assert step_of(rig) == "partition_switched"


def rig_plan(rig: Rig) -> Move:
    state = rig.state()
    step = find_step(state, KEYS, LIMITS, FixedTimes(state, 0.0))
    assert step is not None
    return Move(**{k: v for k, v in json.loads(step.puts[KEYS.move(0)]).items() if k != "format"})


def test_a_member_that_comes_back_in_time_keeps_its_partitions() -> None:
    rig = Rig((("a",),))
    rig.leave("a")
    assert step_of(rig, away=59.0) == ""
    assert step_of(rig, away=60.0) == "move_begun"


def test_a_pushed_model_without_a_store_never_moves() -> None:
    rig = Rig((("a",),))
    rig.register("a", is_pushed=True)
    one = rig.controller("one")
    rig.etcd.commit((), {KEYS.drained("a"): "{}"})
    assert not one.tick()
    assert step_of(rig) == ""
    assert any("set cluster.store of all its servers" in line for line in rig.lines)
    assert "set cluster.store of all" in refusal_of_move(rig.state(), 0, "a", "b")


def pushed_rig() -> Rig:
    rig = Rig((("a",),))
    for name in "ab":
        rig.register(name, is_pushed=True, has_store=True)
    return rig


def test_a_push_fed_partition_is_never_replaced() -> None:
    rig = pushed_rig()
    rig.leave("a")
    assert step_of(rig, away=1e9) == ""
    rig.etcd.commit((), {KEYS.drained("a"): "{}"})
    assert step_of(rig, away=1e9) == ""


def test_a_push_fed_partition_moves_in_four_phases() -> None:
    rig = pushed_rig()
    one = rig.begin_move(replace(LIMITS, drain_seconds=5.0))
    assert (rig.move().phase, rig.move().is_copied) == ("follow", True)
    rig.copy(parts=3, received=1)
    assert step_of(rig) == ""
    rig.copy(parts=3, received=2)
    assert step_of(rig) == ""  # b does not use the map
    rig.report("b")
    assert one.tick()
    assert (rig.move().phase, rig.move().pause_ms) == ("handover", 2000)
    assert one.tick_seconds < TICK_SECONDS
    rig.copy(parts=4, received=4)
    assert not one.tick()  # a has promised nothing
    rig.copy(parts=4, received=3, is_released=True)
    assert not one.tick()
    rig.copy(parts=4, received=4, is_released=True)
    assert one.tick()
    assert (rig.move().phase, rig.map().owners) == ("switch", (("b",),))
    assert not rig.state().sent
    assert not rig.state().received
    rig.report("b")
    assert not one.tick()
    rig.report("a")
    assert one.tick()
    assert rig.move().phase == "open"
    rig.clock.now += 5.1
    one.tick()
    assert not rig.state().moves
    assert rig.state().drops == {("a", 0): Drop("a", 0, rig.map().version, is_copied=True)}


def test_a_handover_without_a_target_in_time_is_taken_back() -> None:
    rig = pushed_rig()
    one = rig.begin_move()
    rig.report("b")
    rig.copy(parts=1, received=1)
    one.tick()
    rig.copy(parts=2, received=1, is_released=True)
    one.tick()
    rig.clock.now += 1.9
    assert not one.tick()
    rig.clock.now += 0.2
    assert one.tick()
    assert (rig.move().phase, rig.move().attempt) == ("follow", 2)
    assert not rig.state().sent


def test_a_source_that_is_away_opens_later_than_it_may_answer_pulls() -> None:
    rig = pushed_rig()
    one = rig.begin_move()
    rig.report("b")
    rig.copy(parts=1, received=1)
    one.tick()
    rig.copy(parts=1, received=1, is_released=True)
    rig.leave("a")
    one.tick()
    assert rig.move().phase == "switch"
    rig.clock.now += 2.9
    assert not one.tick()
    rig.clock.now += 0.2
    assert one.tick()
    assert rig.move().phase == "open"


@pytest.mark.parametrize("away", ["a", "b"])
def test_a_copy_is_abandoned_if_source_or_target_is_away(away: str) -> None:
    rig = pushed_rig()
    one = rig.begin_move()
    rig.copy(parts=1, received=1)
    rig.leave(away)
    assert one.tick()
    assert not rig.state().moves
    assert not rig.state().sent
    assert rig.map().owners == (("a",),)
    assert ("b", 0) in rig.state().drops


def test_only_a_rebalancing_moves_for_weight() -> None:
    rig = Rig((("a",),) * 4)
    assert step_of(rig) == ""
    rig.etcd.commit((), {KEYS.rebalance: "{}"})
    assert step_of(rig) == "move_begun"
    rig = Rig((("a",), ("b",)))
    rig.etcd.commit((), {KEYS.rebalance: "{}"})
    assert step_of(rig) == "balanced"


def test_a_replica_goes_to_a_zone_without_one() -> None:
    """The plan balances too, which nobody asked for: what remains of it must fit the zones."""
    rig = Rig((("a",),) * 8, "abc")
    for name, zone in (("a", "1"), ("b", "1"), ("c", "2")):
        rig.register(name, zone=zone)
    rig.etcd.commit((), {KEYS.settings: dump(Settings(2))})
    one = rig.controller("one", Limits(moves=8, drain_seconds=0.0, pause_seconds=0.0))
    one.tick()
    assert {move.target for move in rig.state().moves.values()} == {"c"}
    assert len(rig.state().moves) == 8


def test_wishes_that_cannot_be_are_refused_and_removed() -> None:
    rig = Rig((("a",),))
    one = rig.controller("one")
    rig.etcd.commit((), {KEYS.wish(0): dump(Wish(0, "a", "nobody"))})
    one.tick()
    assert rig.state().wishes == {}
    assert any("no member that is present" in line for line in rig.lines)


@pytest.mark.parametrize(("partition", "source", "target", "reason"), [
    (5, "a", "b", "none of 0 to 0"), (0, "b", "a", "does not own partition 0"),
    (0, "a", "a", "owns partition 0 already"), (0, "a", "c", "present are a, b"),
])  # fmt: skip
def test_a_move_is_refused_with_its_reason(
    partition: int, source: str, target: str, reason: str
) -> None:
    assert reason in refusal_of_move(Rig((("a",),)).state(), partition, source, target)


def test_a_forgotten_server_owns_nothing_and_stays_away() -> None:
    rig = Rig((("a",),))
    rig.leave("b")
    assert step_of(rig, away=59.0) == ""
    one = rig.controller("one")
    one.tick()
    rig.clock.now += 61.0
    one.tick()
    assert set(rig.state().registrations) == {"a"}


def test_the_map_has_the_grpc_address_of_a_new_owner() -> None:
    rig = Rig((("a",),))
    rig.begin_move()
    assert rig.map().grpc == {"b": "b-grpc:1"}


def test_a_record_that_is_not_valid_stops_the_model_and_is_named() -> None:
    rig = Rig((("a",),))
    one = rig.controller("one")
    rig.etcd.commit((), {KEYS.move(0): "{"})
    assert not one.tick()
    assert any("/moves/0 has no valid record" in line for line in rig.lines)
    rig.etcd.commit((), {KEYS.move(0): '{"format": 2}'})
    one.tick()
    assert any("upgrade petps here first" in line for line in rig.lines)


@pytest.mark.parametrize(("key", "text"), [
    (KEYS.wish(7), dump(Wish(7, "a", "b"))),
    (KEYS.wish(0), dump(Wish(1, "a", "b"))),
    (KEYS.wish(0), '{"format": 1, "partition": 0, "source": "a", "target": ["b"]}'),
    (KEYS.move(7), dump(Move(7, "a", "b", "switch", "wish", 2))),
    (KEYS.move(0), dump(Move(0, "a", "b", "gone", "wish", 2))),  # type: ignore[arg-type]
    (KEYS.settings, '{"format": 1, "replicas": "2"}'),
    (KEYS.registration("a"), '{"format": 1, "address": "a", "weight": "2"}'),
])  # fmt: skip
def test_a_wrong_record_stops_its_model_only_and_is_named(key: str, text: str) -> None:
    rig = Rig((("a",),))
    one = rig.controller("one")
    rig.etcd.commit((), {key: text})
    assert not one.tick()
    assert any(
        f"'{MODEL}' is left as it is: etcd's key" in line and "/petps/" in line
        for line in map(str, rig.lines)
    )
    rig.etcd.commit((), {}, (key,))
    rig.register("a")
    one.tick()
    assert rig.state().map is not None


def test_keys_of_no_partition_are_passed_over() -> None:
    rig = Rig((("a",),))
    one = rig.controller("one")
    rig.etcd.commit((), {f"{KEYS.orders}moves/x": "{", f"{KEYS.root}wishes/x": "{"})
    rig.etcd.commit((), {KEYS.wish(0): dump(Wish(0, "a", "b"))})
    assert one.tick()
    assert rig.move().phase == "follow"


def test_nothing_moves_by_a_map_that_is_older_than_that_of_a_server() -> None:
    """etcd was restored from a backup: servers use version 9, and it has an older one."""
    rig = Rig((("a",), ("a",)))
    one = rig.controller("one")
    for name in "ab":
        rig.etcd.commit((), {KEYS.member(name): dump(Member(name, "pool", 9, MODEL, {}))})
    rig.etcd.commit((), {KEYS.wish(1): dump(Wish(1, "a", "b"))})
    assert not one.tick()
    assert not rig.state().moves
    assert any("uses version 9: etcd was restored" in line for line in map(str, rig.lines))
    rig.report("a")
    rig.report("b")
    assert one.tick()


def test_a_move_that_copies_nothing_ends_when_pushes_feed_a_table() -> None:
    rig = Rig((("a",),))
    one = rig.begin_move()
    for name in "ab":
        rig.register(name, is_pushed=True, has_store=True)
        rig.report(name)
    assert one.tick()
    assert not rig.state().moves
    assert rig.map().owners == (("a",),)
    assert any("pushes feed a table now" in line for line in map(str, rig.lines))
