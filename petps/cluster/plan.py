"""The planner: from the owners now to balanced ones, with the fewest copies.

Everything is a function of the arguments: equal input gives an equal plan, on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from typing import Final

from petps.cluster.assign import Assignment, Problem
from petps.cluster.exact import improve
from petps.cluster.model import Member, Model, Move, Owners, Plan, Reason
from petps.cluster.order import Pace, Step, steps_of
from petps.cluster.shares import bounds_of, fair_shares, imbalance, zone_limit
from petps.errors import FailedPrecondition, InvalidArgument

__all__ = ["REPLACE_AFTER_SECONDS", "make_plan"]

PARTITIONS_MAX: Final = 1024  # of a model; native/wire/wire.h kMaxPartitions
REPLACE_AFTER_SECONDS: Final = 3600.0  # longer than a restart, an upgrade or a reboot
PARALLEL_MOVES: Final = 2
EXACT_MAX: Final = 4096  # partitions * members: an exact search of more takes seconds
_NAMED: Final = 5  # a warning that names more partitions is unreadable


def make_plan(
    members: Sequence[Member],
    models: Sequence[Model],
    owners: Owners,
    *,
    replicas: int = 1,
    replace_after: float = REPLACE_AFTER_SECONDS,
    parallel: int = PARALLEL_MOVES,
) -> Plan:
    """Return the assignment with the fewest copies, and the moves to it.

    In it, each partition has its replicas, in different zones if there are enough zones; each
    member's number of partitions is within 5 % of its fair share (or rounded to a whole number);
    no draining member owns anything, nor one that has been away for ``replace_after`` seconds,
    except partitions of models that are pushed: those stay with an owner that is away. Where too
    few members or zones are left, live owners stay, draining ones too, and a warning says so.

    The fewest is exact for problems of up to EXACT_MAX partitions times members. Larger ones are
    searched in time linear in the replicas; Plan.lower_bound says how far from the fewest a plan is
    at most. ``parallel``: in how many moves of a wave a member may give, and in how many receive.

    Raises InvalidArgument for input that contradicts itself, and FailedPrecondition if no member is
    left that may own partitions.
    """
    _check(members, models, owners, replicas, parallel)
    task = _Task(members, models, owners, replicas, replace_after)
    assignment = Assignment(task.problem)
    short = assignment.search()
    lower_bound = task.lower_bound(assignment)
    small = len(task.units) * len(members) <= EXACT_MAX
    if small and (short or assignment.copies() > lower_bound or not _is_bounded(assignment)):
        improve(assignment)
        wanted = task.problem.wanted
        short = [unit for unit in short if len(assignment.owners[unit]) < wanted[unit]]
    task.keep_where_short(assignment, short)
    return task.plan(assignment, short, lower_bound, parallel)


def _check(
    members: Sequence[Member],
    models: Sequence[Model],
    owners: Owners,
    replicas: int,
    parallel: int,
) -> None:
    names = {member.name for member in members}
    for kind, ordered in (
        ("member", sorted(member.name for member in members)),
        ("model", sorted(model.name for model in models)),
    ):
        for name, other in pairwise(ordered):
            if name == other:
                raise InvalidArgument(f"{kind} '{name}' is given twice")
    for member in members:
        if not (isfinite(member.weight) and member.weight > 0):
            raise InvalidArgument(
                f"the weight of {member.name} must be above 0, got {member.weight}: to take its "
                "partitions away, drain it"
            )
    if replicas < 1 or parallel < 1:
        raise InvalidArgument(f"replicas and parallel start at 1, got {replicas} and {parallel}")
    for model in models:
        _check_model(model, owners.get(model.name, ()), names)


def _check_model(model: Model, owners: Sequence[Sequence[str]], names: set[str]) -> None:
    if not 1 <= model.partitions <= PARTITIONS_MAX:
        raise InvalidArgument(
            f"model '{model.name}' has {model.partitions} partitions, expected 1 to "
            f"{PARTITIONS_MAX:,}"
        )
    if model.replicas is not None and model.replicas < 1:
        raise InvalidArgument(f"model '{model.name}': replicas start at 1, got {model.replicas}")
    if owners and len(owners) != model.partitions:
        raise InvalidArgument(
            f"model '{model.name}' has {model.partitions} partitions, but owners of {len(owners)}"
        )
    if model.is_pushed and (model.replicas or 1) > 1:
        raise InvalidArgument(
            f"model '{model.name}' is pushed, so each partition has one owner, not "
            f"{model.replicas}: pushes have no order across servers"
        )
    for partition, present in enumerate(owners):
        where = f"partition {partition} of '{model.name}'"
        if not names.issuperset(present):
            unknown = next(name for name in present if name not in names)
            raise InvalidArgument(f"{where} is owned by {unknown}, which is no member")
        if len(set(present)) != len(present):
            raise InvalidArgument(f"{where} has an owner twice")
        if model.is_pushed and len(present) > 1:
            raise InvalidArgument(
                f"{where} is pushed, but {', '.join(present)} own it: pushes have no order across "
                "servers. Decide which of them has the rows, and let only that one own it"
            )


def _is_bounded(assignment: Assignment) -> bool:
    problem = assignment.problem
    return all(
        low <= load <= high or not can_receive
        for load, low, high, can_receive in zip(
            assignment.loads, problem.low, problem.high, problem.can_receive, strict=True
        )
    )


class _Task:
    """The planner's input as numbers, and its answer as names."""

    def __init__(
        self,
        members: Sequence[Member],
        models: Sequence[Model],
        owners: Owners,
        replicas: int,
        replace_after: float,
    ) -> None:
        self.members, self.models = members, models
        self.is_live = [member.state != "away" for member in members]
        self.can_receive = [member.state == "in" for member in members]
        # Away, but perhaps not for long.
        self.is_expected = [
            member.state == "away" and member.away_seconds < replace_after for member in members
        ]
        if not any(self.can_receive):
            raise FailedPrecondition(
                "no member is left that may own partitions: add one, or drain fewer"
            )
        self.warnings: list[str] = []
        number = {member.name: index for index, member in enumerate(members)}
        self.units = [
            (model, partition) for model in models for partition in range(model.partitions)
        ]
        self.now = [
            [number[name] for name in present]
            for model in models
            for present in owners.get(model.name) or [()] * model.partitions
        ]
        zones = {name: index for index, name in enumerate(sorted({m.zone for m in members}))}
        self.zone = [zones[member.zone] for member in members]
        self.problem = self._state_problem(replicas)

    def _state_problem(self, replicas: int) -> Problem:
        receivers = [member for member, can in enumerate(self.can_receive) if can]
        goals = self._goals(replicas)
        wanted, kept, limits = [], [], []
        demands: Counter[int] = Counter()
        loads = Counter(owner for owners in self.now for owner in owners)
        # Of each member: the fewest and the most partitions that it can own without a copy.
        self.least, self.most = [0] * len(self.members), [0] * len(self.members)
        for (model, _), owners in zip(self.units, self.now, strict=True):
            staying = self._staying(model, owners)
            away = sum(not self.can_receive[owner] for owner in staying)
            live = sum(self.is_live[owner] for owner in owners)
            draining = live - (len(staying) - away)  # they go only after others have come
            count, limit = goals[model.name]
            count = max(min(count, len(receivers) + away + draining), 1)
            for owner in staying:
                self.most[owner] += 1
            # A partition never gives up a live replica for an owner that is away.
            room = max(0, count - live)
            in_zones = len({self.zone[owner] for owner in staying}) == len(staying)
            if len(staying) > count or away > room or not in_zones:
                staying = self._choose(staying, count, limit, room, loads)
                away = sum(not self.can_receive[owner] for owner in staying)
            else:
                for owner in staying:
                    self.least[owner] += 1
            wanted.append(count)
            kept.append(staying)
            limits.append(limit)
            placed = min(count - away, len(receivers))
            if placed > 0:
                demands[placed] += 1
        by_zone: list[list[int]] = [[] for _ in range(max(self.zone) + 1)]
        for member in receivers:
            by_zone[self.zone[member]].append(member)
        weights = [member.weight for member in self.members]
        shares = fair_shares(demands, [zone for zone in by_zone if zone], weights)
        bounds = [bounds_of(share) for share in shares]
        return Problem(
            now=self.now,
            kept=kept,
            wanted=wanted,
            limit=limits,
            zone=self.zone,
            can_receive=self.can_receive,
            share=shares,
            low=[low for low, _ in bounds],
            high=[high for _, high in bounds],
        )

    def _goals(self, replicas: int) -> dict[str, tuple[int, int]]:
        """Return, by model, the replicas of a partition and how many of them a zone may hold."""
        zones = Counter(
            zone
            for zone, can, is_expected in zip(
                self.zone, self.can_receive, self.is_expected, strict=True
            )
            if can or is_expected
        )
        goals = {}
        members = sum(zones.values())
        for count in sorted({1 if m.is_pushed else m.replicas or replicas for m in self.models}):
            if count > members:
                self.warnings.append(
                    f"{count} replicas need {count} members, and only {members} may own partitions"
                )
            elif count > len(zones):
                self.warnings.append(
                    f"{count} replicas need {count} zones to be all in different ones, and there "
                    f"are only {len(zones)}"
                )
            goals[count] = (count, zone_limit(min(count, members), list(zones.values())))
        return {m.name: goals[1 if m.is_pushed else m.replicas or replicas] for m in self.models}

    def _staying(self, model: Model, owners: list[int]) -> list[int]:
        """Return the owners that may go on to own a partition."""
        if model.is_pushed and owners and not self.is_live[owners[0]]:
            return owners  # only this owner has the last pushes
        return [owner for owner in owners if self.can_receive[owner] or self.is_expected[owner]]

    def _choose(
        self, staying: list[int], count: int, limit: int, room: int, loads: Counter[int]
    ) -> list[int]:
        """Return ``count`` owners at most, ``limit`` in a zone, and ``room`` that are away.

        Owners with less load come first.
        """
        live = [owner for owner in staying if self.can_receive[owner]]
        chosen = [owner for owner in staying if not self.can_receive[owner]][:room]
        used = Counter(self.zone[owner] for owner in chosen)
        for owner in sorted(live, key=lambda o: (loads[o] / self.members[o].weight, o)):
            if len(chosen) < count and used[self.zone[owner]] < limit:
                chosen.append(owner)
                used[self.zone[owner]] += 1
            else:
                loads[owner] -= 1  # so that the next partition rather keeps this one
        return [owner for owner in staying if owner in chosen]

    def lower_bound(self, assignment: Assignment) -> int:
        """Return a number of copies that no assignment within the bounds goes below.

        Every missing replica is a copy, and so is one that takes the place of an owner that has too
        much; every partition that a member has too little is a copy too. The search has placed all
        missing replicas that can be placed.
        """
        problem = self.problem
        missing = sum(map(len, assignment.owners)) - sum(map(len, problem.kept))
        receivers = [member for member, can in enumerate(self.can_receive) if can]
        excess = sum(max(0, self.least[member] - problem.high[member]) for member in receivers)
        lacking = sum(max(0, problem.low[member] - self.most[member]) for member in receivers)
        return max(missing + excess, lacking)

    def keep_where_short(self, assignment: Assignment, short: list[int]) -> None:
        """Let live owners keep what nobody else may take, whatever their zone and state."""
        for unit in short:
            owners = assignment.owners[unit]
            for owner in self.now[unit]:
                if (
                    len(owners) < self.problem.wanted[unit]
                    and owner not in owners
                    and self.is_live[owner]
                ):
                    assignment.add(unit, owner)

    def plan(
        self, assignment: Assignment, short: list[int], lower_bound: int, parallel: int
    ) -> Plan:
        """Return the answer in names."""
        self._warn(assignment, short)
        names = [member.name for member in self.members]
        owners: dict[str, list[tuple[str, ...]]] = {model.name: [] for model in self.models}
        steps: list[Step] = []
        for unit, (model, _) in enumerate(self.units):
            now, then = self.now[unit], assignment.owners[unit]
            owners[model.name].append(tuple(names[member] for member in then))
            if now != then:
                steps += self._steps(unit, now, then)
        steps.sort(key=lambda step: (step.urgency, step.live, step.unit))
        pace = Pace(parallel)
        moves = [self._move(step, pace.wave_of(step)) for step in steps]
        moves.sort(key=lambda move: move.wave)
        problem = self.problem
        loads = Counter(owner for present in self.now for owner in present)
        receivers = [member for member, can in enumerate(self.can_receive) if can]
        shares = [problem.share[member] for member in receivers]
        return Plan(
            owners=owners,
            moves=moves,
            copies=assignment.copies(),
            lower_bound=lower_bound,
            imbalance_before=imbalance([loads[member] for member in receivers], shares),
            imbalance_after=imbalance([assignment.loads[member] for member in receivers], shares),
            shares={names[member]: problem.share[member] for member in receivers},
            warnings=self.warnings,
            operations=assignment.operations,
        )

    def _steps(self, unit: int, now: list[int], then: list[int]) -> list[Step]:
        gone = [(owner, self._reason(unit, owner)) for owner in now if owner not in then]
        live = sum(self.is_live[owner] for owner in now)
        return steps_of(unit, live, gone, [owner for owner in then if owner not in now])

    def _reason(self, unit: int, owner: int) -> Reason:
        if self.members[owner].state == "draining":
            return "drain"
        if not self.can_receive[owner] and not self.is_expected[owner]:
            return "lost"
        if owner in self.problem.kept[unit]:
            return "balance"
        staying = self._staying(self.units[unit][0], list(self.now[unit]))
        return "replicas" if len(staying) > self.problem.wanted[unit] else "zone"

    def _move(self, step: Step, wave: int) -> Move:
        model, partition = self.units[step.unit]
        source, target = (
            None if member is None else self.members[member].name
            for member in (step.source, step.target)
        )
        needs_acknowledgement = model.is_pushed and source is not None
        return Move(wave, model.name, partition, source, target, step.reason, needs_acknowledgement)

    def _warn(self, assignment: Assignment, short: list[int]) -> None:
        if short:
            self.warnings.append(
                f"{self._name(short)} cannot have all replicas: no other member may take them"
            )
        stuck = [
            unit
            for unit, ((model, _), owners) in enumerate(zip(self.units, self.now, strict=True))
            if model.is_pushed and owners and not self.is_live[owners[0]]
        ]
        if stuck:
            self.warnings.append(
                f"{self._name(stuck)} is push-fed and unavailable until its owner returns: no "
                "other member has the last pushes"
            )
        if not _is_bounded(assignment):
            self.warnings.append(
                "the zones and replicas leave no assignment that is balanced within 5 %"
            )

    def _name(self, units: list[int]) -> str:
        named = ", ".join(
            f"{partition} of '{model.name}'"
            for model, partition in (self.units[unit] for unit in units[:_NAMED])
        )
        more = f" and {len(units) - _NAMED:,} more" if len(units) > _NAMED else ""
        return f"partition {named}{more}"
