"""The planner with 1,000 servers, 65,536 partitions of 88 models and 3 zones.

The tests count the search's operations; `python -m bench.scale.plan` measures its time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from petps.cluster import Member, Model, Plan, make_plan
from tests.python.cluster.checks import (
    Case,
    check_balance,
    check_moves,
    check_owners,
    copies,
    lower_bound,
)

SERVERS, REPLICAS = 1000, 2
# Elementary steps for each replica, of which there are about 127,000.
OPERATIONS_MAX = 6
GONE = 1e9
MODELS = [
    *(Model(f"fed{number}", 1024) for number in range(56)),
    *(Model(f"small{number}", 256) for number in range(24)),
    *(Model(f"pushed{number}", 256, is_pushed=True) for number in range(8)),
]
PARTITIONS = sum(model.partitions for model in MODELS)
MEMBERS = [Member(f"s{number}", zone="abc"[number % 3]) for number in range(SERVERS)]


def change(condition: Callable[[Member], bool], **values: object) -> list[Member]:
    return [
        replace(member, **values) if condition(member) else member  # type: ignore[arg-type]
        for member in MEMBERS
    ]


@pytest.fixture(scope="module")
def balanced() -> Plan:
    """Return the plan of an empty cluster."""
    return make_plan(MEMBERS, MODELS, {}, replicas=REPLICAS)


def check(members: list[Member], before: Plan) -> Plan:
    """Return the plan for these members, after all checks."""
    case = Case(members, MODELS, before.owners, replicas=REPLICAS)
    plan = make_plan(members, MODELS, before.owners, replicas=REPLICAS)
    check_owners(case, plan)
    check_moves(case, plan)
    bound = lower_bound(case, plan)
    assert plan.copies == copies(case, plan)
    assert plan.copies <= 1.1 * bound
    assert plan.lower_bound <= bound
    check_balance(case, plan)
    assert plan.imbalance_after <= 0.05
    assert plan.operations <= OPERATIONS_MAX * PARTITIONS * REPLICAS
    return plan


def test_an_empty_cluster_is_filled_evenly(balanced: Plan) -> None:
    assert PARTITIONS == 65_536
    case = Case(MEMBERS, MODELS, {}, replicas=REPLICAS)
    check_owners(case, balanced)
    check_balance(case, balanced)
    check_moves(case, balanced)
    replicas = sum(model.partitions * (1 if model.is_pushed else REPLICAS) for model in MODELS)
    assert balanced.copies == balanced.lower_bound == replicas
    assert all(share == pytest.approx(replicas / SERVERS) for share in balanced.shares.values())
    assert balanced.imbalance_after <= 0.05
    assert balanced.operations <= OPERATIONS_MAX * PARTITIONS * REPLICAS
    assert balanced.warnings == []


def test_a_balanced_cluster_stays_as_it_is(balanced: Plan) -> None:
    plan = check(MEMBERS, balanced)
    assert plan.moves == []
    assert plan.owners == balanced.owners


def test_a_new_server_gets_its_part(balanced: Plan) -> None:
    plan = check([*MEMBERS, Member("new", "b")], balanced)
    assert {move.target for move in plan.moves} == {"new"}
    assert plan.imbalance_before == 1.0


@pytest.mark.parametrize("zones", ["abc", "b", "d"])
def test_a_hundred_new_servers(balanced: Plan, zones: str) -> None:
    new = [Member(f"new{i}", zones[i % len(zones)], weight=1 + i % 2) for i in range(100)]
    check([*MEMBERS, *new], balanced)


def test_a_drained_server_gives_all_away(balanced: Plan) -> None:
    plan = check(change(lambda member: member.name == "s7", state="draining"), balanced)
    given = [move for move in plan.moves if move.reason == "drain"]
    assert len(given) == sum(
        "s7" in owners for lists in balanced.owners.values() for owners in lists
    )
    assert {move.needs_acknowledgement for move in given} == {True, False}


def test_a_lost_zone_is_replaced_but_for_push_fed_partitions(balanced: Plan) -> None:
    members = change(lambda member: member.zone == "a", state="away", away_seconds=GONE)
    plan = check(members, balanced)
    assert {move.reason for move in plan.moves} <= {"lost", "balance"}
    gone = {member.name for member in members if member.state == "away"}
    for model in MODELS:
        for before, after in zip(balanced.owners[model.name], plan.owners[model.name], strict=True):
            if model.is_pushed and gone.intersection(before):
                assert after == before
            else:
                assert not gone.intersection(after)
    assert any("is push-fed and unavailable until its owner returns" in w for w in plan.warnings)


def test_a_rolling_upgrade_moves_nothing(balanced: Plan) -> None:
    for zone in "abc":
        members = change(lambda m: m.zone == zone, state="away", away_seconds=60)  # noqa: B023
        plan = make_plan(members, MODELS, balanced.owners, replicas=REPLICAS)
        assert plan.moves == []
        assert plan.owners == balanced.owners


def test_a_zone_is_drained_and_comes_back(balanced: Plan) -> None:
    drained = check(change(lambda member: member.zone == "b", state="draining"), balanced)
    names = {member.name for member in MEMBERS if member.zone == "b"}
    assert not any(
        names.intersection(owners) for lists in drained.owners.values() for owners in lists
    )
    check(MEMBERS, drained)


def test_weights_count(balanced: Plan) -> None:
    members = [replace(member, weight=1 + i % 4) for i, member in enumerate(MEMBERS)]
    plan = check(members, balanced)
    light, heavy = plan.shares["s0"], plan.shares["s3"]
    assert heavy == pytest.approx(4 * light)


def test_zones_that_are_merged(balanced: Plan) -> None:
    check(change(lambda member: member.zone == "c", zone="b"), balanced)


def test_equal_input_gives_an_equal_plan(balanced: Plan) -> None:
    members = change(lambda member: member.name in ("s1", "s2"), state="draining")
    plans = [make_plan(members, MODELS, balanced.owners, replicas=REPLICAS) for _ in range(2)]
    assert plans[0] == plans[1]
