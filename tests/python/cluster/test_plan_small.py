"""The planner on small problems: every rule, and the fewest copies of all assignments."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petps.cluster import Member, Model, Plan, make_plan
from petps.cluster.shares import fair_shares
from petps.errors import FailedPrecondition, InvalidArgument
from tests.python.cluster.checks import (
    Case,
    bounds,
    check_moves,
    check_owners,
    copies,
    lower_bound,
)

EXAMPLES = 600  # the rules meet in corners
STATES: list[tuple[str, float]] = [
    ("in", 0.0),
    ("in", 0.0),
    ("draining", 0.0),
    ("away", 10.0),
    ("away", 1e9),
]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Member], list[Model], dict[str, Any], int]:
    """Return members, models, owners and replicas; at least one member may own partitions."""
    members = [Member("m0", zone=draw(st.sampled_from("abc")))]
    for number in range(1, draw(st.integers(2, 5))):
        state, seconds = draw(st.sampled_from(STATES))
        members.append(
            Member(
                f"m{number}",
                zone=draw(st.sampled_from("abc")),
                weight=draw(st.sampled_from([1.0, 1.0, 2.0, 0.5])),
                state=state,  # type: ignore[arg-type]
                away_seconds=seconds,
            )
        )
    names = [member.name for member in members]
    models = [Model("fed", draw(st.integers(1, 4)))]
    owners: dict[str, Any] = {
        "fed": [
            draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
            for _ in range(models[0].partitions)
        ]
    }
    if draw(st.booleans()):
        models.append(Model("pushed", 1, is_pushed=True))
        owners["pushed"] = [draw(st.lists(st.sampled_from(names), max_size=1))]
    return members, models, owners, draw(st.integers(1, 3))


def choices(case: Case, plan: Plan, key: tuple[str, int]) -> list[tuple[str, ...]]:
    """Return every set of owners that a partition may have, with as many as possible.

    Which of the owners that are away stay, the plan says.
    """
    limit = case.zone_limit(key[0])
    away = [name for name in case.staying(key) if case.members[name].state != "in"]
    fixed = [name for name in plan.owners[key[0]][key[1]] if name in away]
    assert len(fixed) == case.away_kept(key)
    for count in range(case.replica_count(key) - len(fixed), -1, -1):
        sets = []
        for added in itertools.combinations(case.receivers, count):
            zones = [case.members[name].zone for name in fixed]
            zones += [member.zone for member in added]
            if all(zones.count(member.zone) <= limit for member in added):
                sets.append((*fixed, *(member.name for member in added)))
        if sets:
            return sets
    return [tuple(fixed)]


def cost(case: Case, plan: Plan, owners: Iterator[tuple[tuple[str, int], tuple[str, ...]]]) -> Any:
    """Return (partitions outside of the bounds, copies) of an assignment."""
    loads = dict.fromkeys(plan.shares, 0)
    copied = 0
    for key, names in owners:
        for name in names:
            copied += name not in case.now[key]
            if name in loads:
                loads[name] += 1
    outside = 0
    for name, share in plan.shares.items():
        low, high = bounds(share)
        outside += max(0, low - loads[name]) + max(0, loads[name] - high)
    return outside, copied


@settings(max_examples=EXAMPLES)
@given(problems())
def test_no_assignment_has_fewer_copies(
    problem: tuple[list[Member], list[Model], dict[str, Any], int],
) -> None:
    members, models, owners, replicas = problem
    case = Case(members, models, owners, replicas=replicas)
    plan = make_plan(members, models, owners, replicas=replicas)
    keys = list(case.now)
    sets = [choices(case, plan, key) for key in keys]
    is_short = any(
        len(possible[0]) < case.replica_count(key) for key, possible in zip(keys, sets, strict=True)
    )
    if is_short or math.prod(map(len, sets)) > 1000:
        return  # where replicas cannot be placed, live owners stay against the other rules
    best = min(
        cost(case, plan, zip(keys, assignment, strict=True))
        for assignment in itertools.product(*sets)
    )
    own = {key: plan.owners[key[0]][key[1]] for key in keys}
    for key, possible in zip(keys, sets, strict=True):
        assert sorted(own[key]) in [sorted(names) for names in possible]
    assert cost(case, plan, iter(own.items())) == best
    assert plan.copies == best[1]
    if best[0] == 0:
        assert plan.lower_bound <= plan.copies
        assert lower_bound(case, plan) <= plan.copies  # the bound of the large tests


@settings(max_examples=EXAMPLES)
@given(problems())
def test_moves_keep_the_live_replicas(
    problem: tuple[list[Member], list[Model], dict[str, Any], int],
) -> None:
    members, models, owners, replicas = problem
    case = Case(members, models, owners, replicas=replicas, parallel=1)
    plan = make_plan(members, models, owners, replicas=replicas, parallel=1)
    check_moves(case, plan)
    assert plan.copies == copies(case, plan)
    assert plan == make_plan(members, models, owners, replicas=replicas, parallel=1)
    after = make_plan(members, models, plan.owners, replicas=replicas, parallel=1)
    if not any("balanced within" in text for text in plan.warnings):
        assert after.moves == []  # a plan that was carried out needs no other one


def in_zones(zones: str, **values: Any) -> list[Member]:
    return [Member(f"m{number}", zone=zone, **values) for number, zone in enumerate(zones)]


def test_replicas_move_into_different_zones() -> None:
    members = in_zones("aabb")
    owners = {"m": [("m0", "m1"), ("m2", "m3")]}
    case = Case(members, [Model("m", 2)], owners, replicas=2)
    plan = make_plan(members, [Model("m", 2)], owners, replicas=2)
    check_owners(case, plan)
    check_moves(case, plan)
    assert plan.copies == 2
    assert {move.reason for move in plan.moves} == {"zone"}


def test_too_few_zones_or_members_is_a_warning() -> None:
    plan = make_plan(in_zones("aab"), [Model("m", 4)], {}, replicas=3)
    assert all(len(owners) == 3 for owners in plan.owners["m"])
    assert plan.warnings == [
        "3 replicas need 3 zones to be all in different ones, and there are only 2"
    ]
    plan = make_plan(in_zones("a"), [Model("m", 4)], {}, replicas=2)
    assert plan.owners["m"] == [("m0",)] * 4
    assert plan.warnings == ["2 replicas need 2 members, and only 1 may own partitions"]


def test_a_push_fed_partition_waits_for_its_owner() -> None:
    gone = Member("gone", state="away", away_seconds=1e9)
    models = [Model("m", 2, is_pushed=True)]
    plan = make_plan([*in_zones("a"), gone], models, {"m": [("gone",), ("m0",)]})
    assert plan.owners["m"] == [("gone",), ("m0",)]
    assert plan.moves == []
    assert "partition 0 of 'm' is push-fed and unavailable" in plan.warnings[0]


def test_a_push_fed_partition_moves_with_an_acknowledgement() -> None:
    leaving = Member("leaving", state="draining")
    models = [Model("m", 1, is_pushed=True)]
    (move,) = make_plan([*in_zones("a"), leaving], models, {"m": [("leaving",)]}).moves
    assert (move.source, move.target, move.reason) == ("leaving", "m0", "drain")
    assert move.needs_acknowledgement


def test_a_live_replica_is_not_given_up_for_one_that_is_away() -> None:
    away = Member("away", state="away", away_seconds=10)
    leaving = [Member(name, state="draining") for name in ("d0", "d1")]
    plan = make_plan([*in_zones("a"), away], [Model("m", 1)], {"m": [("m0", "away")]})
    assert plan.owners["m"] == [("m0",)]
    plan = make_plan([*in_zones("a"), away, *leaving], [Model("m", 1)], {"m": [("away", "d0")]})
    assert plan.owners["m"] == [("m0",)]
    owners = {"m": [("d0", "d1", "away")]}
    plan = make_plan([*in_zones("a"), away, *leaving], [Model("m", 1)], owners, replicas=2)
    assert plan.owners["m"] == [("m0", "d0")]
    assert "cannot have all replicas" in plan.warnings[-1]


def test_a_drain_waits_for_members_that_take_over() -> None:
    leaving = [Member(name, state="draining") for name in ("d0", "d1")]
    owners = {"m": [("d0", "d1")]}
    plan = make_plan([*in_zones("a"), *leaving], [Model("m", 1)], owners, replicas=2)
    assert plan.owners["m"] == [("m0", "d0")]
    assert "cannot have all replicas" in plan.warnings[-1]
    plan = make_plan([*in_zones("ab"), *leaving], [Model("m", 1)], owners, replicas=2)
    assert sorted(plan.owners["m"][0]) == ["m0", "m1"]


def test_owners_in_one_zone_stay_while_the_other_zone_is_away() -> None:
    away = Member("away", zone="b", state="away", away_seconds=10)
    members = [*in_zones("aa"), away]
    plan = make_plan(members, [Model("m", 1)], {"m": [("m0", "m1")]}, replicas=2)
    assert sorted(plan.owners["m"][0]) == ["m0", "m1"]
    assert plan.moves == []
    assert (plan.copies, plan.lower_bound) == (0, 0)


def test_repairs_come_before_drains_and_balance() -> None:
    members = [
        *in_zones("aaaa"),
        Member("lost", state="away", away_seconds=1e9),
        Member("leaving", state="draining"),
    ]
    owners = {"m": [("m0",)] * 8 + [("lost",)] * 2 + [("leaving",)] * 2}
    moves = make_plan(members, [Model("m", 12)], owners, parallel=1).moves
    first = {reason: min(m.wave for m in moves if m.reason == reason) for reason in
             ("lost", "drain", "balance")}  # fmt: skip
    assert first["lost"] <= first["drain"]
    assert first["lost"] <= first["balance"]
    assert moves[0].reason == "lost"
    both = {"m": [("leaving", "lost")]}  # also within one partition
    moves = make_plan(members, [Model("m", 1)], both, replicas=2).moves
    assert [move.source for move in moves] == ["lost", "leaving"]


def test_shares_follow_weights_as_far_as_zones_allow() -> None:
    # Zone a has two thirds of the weight, and may hold one of the two replicas of a partition.
    shares = fair_shares(Counter({2: 12}), [[0], [1], [2]], [4.0, 1.0, 1.0])
    assert shares == pytest.approx([12.0, 6.0, 6.0])
    # Partitions with one replica fill up what those with two leave uneven.
    shares = fair_shares(Counter({2: 6, 1: 6}), [[0], [1], [2]], [4.0, 1.0, 1.0])
    assert shares == pytest.approx([12.0, 3.0, 3.0])
    shares = fair_shares(Counter({1: 12}), [[0, 1], [2]], [1.0, 2.0, 3.0])
    assert shares == pytest.approx([2.0, 4.0, 6.0])


@pytest.mark.parametrize(
    ("members", "models", "owners", "message"),
    [
        (in_zones("a") * 2, [Model("m", 1)], {}, "member 'm0' is given twice"),
        (in_zones("a"), [Model("m", 1)] * 2, {}, "model 'm' is given twice"),
        (in_zones("a", weight=0.0), [Model("m", 1)], {}, "the weight of m0 must be above 0"),
        (in_zones("a", weight=math.inf), [Model("m", 1)], {}, "the weight of m0"),
        (in_zones("a"), [Model("m", 0)], {}, "has 0 partitions, expected 1 to 1,024"),
        (in_zones("a"), [Model("m", 1025)], {}, "has 1025 partitions"),
        (in_zones("a"), [Model("m", 1, replicas=0)], {}, "replicas start at 1, got 0"),
        (in_zones("a"), [Model("m", 2)], {"m": [("m0",)]}, "2 partitions, but owners of 1"),
        (in_zones("a"), [Model("m", 1)], {"m": [("x",)]}, "owned by x, which is no member"),
        (in_zones("a"), [Model("m", 1)], {"m": [("m0", "m0")]}, "has an owner twice"),
        (
            in_zones("ab"), [Model("m", 1, is_pushed=True)], {"m": [("m0", "m1")]},
            "is pushed, but m0, m1 own it",
        ),
        (
            in_zones("ab"), [Model("m", 1, replicas=2, is_pushed=True)], {},
            "so each partition has one owner, not 2",
        ),
    ],
)  # fmt: skip
def test_wrong_input_is_refused(members: Any, models: Any, owners: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        make_plan(members, models, owners)


def test_a_cluster_without_members_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match="no member is left"):
        make_plan(in_zones("ab", state="draining"), [Model("m", 1)], {})
    with pytest.raises(InvalidArgument, match="start at 1"):
        make_plan(in_zones("a"), [Model("m", 1)], {}, replicas=0)
