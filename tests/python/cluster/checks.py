"""What every plan must keep, and a lower bound of its copies, both without the planner's code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from petps.cluster import Member, Model, Owners, Plan

TOLERANCE = 0.05


class Case:
    """The input of a plan."""

    def __init__(
        self,
        members: Sequence[Member],
        models: Sequence[Model],
        owners: Owners,
        *,
        replicas: int = 1,
        replace_after: float = 3600.0,
        parallel: int = 2,
    ) -> None:
        self.members = {member.name: member for member in members}
        self.models = models
        self.replicas, self.replace_after, self.parallel = replicas, replace_after, parallel
        self.now = {
            (model.name, partition): tuple(
                owners[model.name][partition] if owners.get(model.name) else ()
            )
            for model in models
            for partition in range(model.partitions)
        }
        self.pushed = {model.name for model in models if model.is_pushed}
        self.receivers = [member for member in members if member.state == "in"]

    def is_live(self, name: str) -> bool:
        return self.members[name].state != "away"

    def may_stay(self, model: str, name: str) -> bool:
        """Return whether an owner may go on to own a partition."""
        member = self.members[name]
        is_away = member.state == "away"
        return (
            member.state == "in"
            or (is_away and member.away_seconds < self.replace_after)
            or (is_away and model in self.pushed)
        )

    def staying(self, key: tuple[str, int]) -> list[str]:
        return [name for name in self.now[key] if self.may_stay(key[0], name)]

    def goal(self, model: str) -> int:
        """Return the wanted replicas of a partition, whether or not there are enough members."""
        if model in self.pushed:
            return 1
        return next(m.replicas for m in self.models if m.name == model) or self.replicas

    def replica_count(self, key: tuple[str, int]) -> int:
        away = sum(self.members[name].state == "away" for name in self.staying(key))
        draining = sum(self.members[name].state == "draining" for name in self.now[key])
        return max(1, min(self.goal(key[0]), len(self.receivers) + away + draining))

    def away_kept(self, key: tuple[str, int]) -> int:
        """Return how many owners that are away stay: as many as the live ones leave room for."""
        away = sum(self.members[name].state == "away" for name in self.staying(key))
        live = sum(map(self.is_live, self.now[key]))
        return min(away, max(0, self.replica_count(key) - live))

    def zone_limit(self, model: str) -> int:
        """Return how many replicas a zone may hold: one, if there are enough zones."""
        members = Counter(
            member.zone
            for member in self.members.values()
            if member.state == "in"
            or (member.state == "away" and member.away_seconds < self.replace_after)
        )
        wanted = min(self.goal(model), sum(members.values()))
        limit = 1
        assert sum(members.values()) >= wanted
        while sum(min(limit, count) for count in members.values()) < wanted:
            limit += 1
        return limit


def bounds(share: float) -> tuple[int, int]:
    """Return the fewest and the most partitions of a member that are balanced."""
    low = min(math.floor(share + 1e-6), math.ceil(share * (1 - TOLERANCE) - 1e-6))
    high = max(math.ceil(share - 1e-6), math.floor(share * (1 + TOLERANCE) + 1e-6))
    return low, high


def check_owners(case: Case, plan: Plan) -> None:
    """Check replicas, zones and members of every partition."""
    for model in case.models:
        limit = case.zone_limit(model.name)
        for partition, owners in enumerate(plan.owners[model.name]):
            key = (model.name, partition)
            assert len(set(owners)) == len(owners) == case.replica_count(key), (key, owners)
            for name in owners:
                may = case.members[name].state == "in" or (
                    name in case.now[key] and case.may_stay(model.name, name)
                )
                assert may, (key, name)
            zones = Counter(case.members[name].zone for name in owners)
            assert max(zones.values()) <= limit, (key, owners)


def check_balance(case: Case, plan: Plan) -> None:
    loads = Counter(name for lists in plan.owners.values() for owners in lists for name in owners)
    assert plan.shares.keys() == {member.name for member in case.receivers}
    for name, share in plan.shares.items():
        low, high = bounds(share)
        assert low <= loads[name] <= high, (name, share, loads[name])


def check_moves(case: Case, plan: Plan) -> None:
    """Make the moves, and check each step: live replicas, waves, acknowledgements."""
    owners = {key: list(now) for key, now in case.now.items()}
    live = {key: sum(map(case.is_live, now)) for key, now in case.now.items()}
    waves = []
    for wave, grouped in groupby(plan.moves, key=lambda move: move.wave):
        waves.append(wave)
        moves = list(grouped)
        keys = [(move.model, move.partition) for move in moves]
        assert len(set(keys)) == len(keys), "two moves of one partition at the same time"
        sources = Counter(
            move.source for move in moves if move.source and case.is_live(move.source)
        )
        targets = Counter(move.target for move in moves if move.target)
        for count in (*sources.values(), *targets.values()):
            assert count <= case.parallel
        for move, key in zip(moves, keys, strict=True):
            at_least = min(live[key], case.replica_count(key))
            if move.target is not None:
                assert case.members[move.target].state == "in"
                assert move.target not in owners[key]
                owners[key].append(move.target)
            is_handover = move.model in case.pushed and move.source is not None
            assert move.needs_acknowledgement == is_handover
            if move.source is not None:
                assert not is_handover or case.is_live(move.source)
                owners[key].remove(move.source)
            assert sum(map(case.is_live, owners[key])) >= at_least, move
    assert waves == list(range(len(waves)))
    for (model, partition), reached in owners.items():
        assert sorted(reached) == sorted(plan.owners[model][partition])


def copies(case: Case, plan: Plan) -> int:
    return sum(
        name not in case.now[model, partition]
        for model, lists in plan.owners.items()
        for partition, owners in enumerate(lists)
        for name in owners
    )


def lower_bound(case: Case, plan: Plan) -> int:
    """Return copies that every plan within the bounds has; of the plan, only the shares are used.

    A replica that no present owner can be is a copy. So is one that replaces an owner with too
    many partitions. Each partition that a member has too few is a copy too.
    """
    missing = 0
    fixed: Counter[str] = Counter()  # partitions that a member gives away only by a copy
    possible: Counter[str] = Counter()
    for key in case.now:
        staying = case.staying(key)
        here = [name for name in staying if case.members[name].state == "in"]
        zones = Counter(case.members[name].zone for name in here)
        limit = case.zone_limit(key[0])
        away = case.away_kept(key)
        in_zones = sum(min(limit, count) for count in zones.values())
        keepable = min(case.replica_count(key), in_zones + away)
        missing += case.replica_count(key) - keepable
        possible.update(staying)
        if keepable == len(staying):
            fixed.update(staying)
    excess = sum(max(0, fixed[name] - bounds(share)[1]) for name, share in plan.shares.items())
    lacking = sum(max(0, bounds(share)[0] - possible[name]) for name, share in plan.shares.items())
    return max(missing + excess, lacking)
