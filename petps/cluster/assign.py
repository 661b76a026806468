"""The greedy search for an assignment with few copies, in time linear in the replicas.

Members and partitions are numbers here. A *copy* is a partition that a member gets and does not own
now. The search has three steps, and each copies only what a bound forces it to:

1. place the replicas that are missing, each at the emptiest member of a zone that may take it;
2. while a member has more than its upper bound, move a partition away from it, if possible to a
   member below its lower bound;
3. while a member has less than its lower bound, move a partition to it, if possible one that is
   copied anyway.

It is not exact: a zone or a replica may stand between the only two members that should exchange a
partition. exact.py then improves the assignment, where the problem is small enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Final

__all__ = ["Assignment", "Problem"]

_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Problem:
    """Describes what has to be assigned.

    Of each partition: ``now`` its owners, of which ``kept`` may stay; ``wanted`` replicas; the
    ``limit`` of replicas in one zone. Of each member: its zone; whether it ``can_receive``; its
    share; the bounds ``low`` and ``high`` of its partitions. A member that cannot receive keeps
    what ``kept`` leaves it, and has no bounds.
    """

    now: Sequence[Sequence[int]]
    kept: Sequence[Sequence[int]]
    wanted: Sequence[int]
    limit: Sequence[int]
    zone: Sequence[int]
    can_receive: Sequence[bool]
    share: Sequence[float]
    low: Sequence[int]
    high: Sequence[int]

    @property
    def members(self) -> int:
        """Return the number of members."""
        return len(self.zone)


class Assignment:
    """Owners of every partition, changed step by step. ``operations`` counts elementary steps."""

    def __init__(self, problem: Problem) -> None:
        """Begin with the owners that may stay."""
        self.problem = problem
        self.owners = [list(kept) for kept in problem.kept]
        self.loads = [0] * problem.members
        self.units: list[list[int]] = [[] for _ in range(problem.members)]  # and some it had
        self.operations = 0
        self._gifts: dict[int, list[int]] = {}  # of each donor: what it may still give
        for unit, owners in enumerate(self.owners):
            for member in owners:
                self.loads[member] += 1
                self.units[member].append(unit)
        self._heaps: list[list[tuple[float, int, int]]] = [[] for _ in range(max(problem.zone) + 1)]
        for member, zone in enumerate(problem.zone):
            if problem.can_receive[member]:
                self._heaps[zone].append(self._entry(member))
        for heap in self._heaps:
            heapify(heap)
        # The zones by their emptiest member; an entry may be out of date, but never too high.
        self._zones = [(heap[0][0], zone) for zone, heap in enumerate(self._heaps) if heap]
        heapify(self._zones)

    def search(self) -> list[int]:
        """Place, relieve and fill. Return the partitions that still lack replicas."""
        short = self._place_missing()
        self._relieve_all()
        self._fill_up()
        self._relieve_all()  # filling has made room in other zones
        return short

    def copies(self) -> int:
        """Return the number of copies."""
        return sum(
            member not in now
            for owners, now in zip(self.owners, self.problem.now, strict=True)
            for member in owners
        )

    def may_own(self, unit: int, member: int, leaving: int | None = None) -> bool:
        """Return whether ``member`` may become an owner, once ``leaving`` has ceased to be one."""
        zone = self.problem.zone
        used = 0
        for owner in self.owners[unit]:
            if owner == member:
                return False
            used += owner != leaving and zone[owner] == zone[member]
        return self.problem.can_receive[member] and used < self.problem.limit[unit]

    def add(self, unit: int, member: int) -> None:
        """Make ``member`` an owner."""
        self.owners[unit].append(member)
        self.units[member].append(unit)
        self._change_load(member, 1)

    def remove(self, unit: int, member: int) -> None:
        """Make ``member`` an owner no more."""
        self.owners[unit].remove(member)
        self._change_load(member, -1)

    # ---- the steps

    def _place_missing(self) -> list[int]:
        short = []
        for unit, wanted in enumerate(self.problem.wanted):
            self.operations += 1
            while len(self.owners[unit]) < wanted:
                target = self._emptiest(unit, None)
                if target is None:
                    short.append(unit)
                    break
                self.add(unit, target)
        return short

    def _relieve_all(self) -> None:
        for member in self._fullest(lambda member: self.loads[member] > self.problem.high[member]):
            self._relieve(member)

    def _relieve(self, member: int) -> None:
        problem, loads = self.problem, self.loads
        for bound in (problem.low, problem.high):  # first to members that need more
            for unit in self._movable(member):
                if loads[member] <= problem.high[member]:
                    return
                target = self._emptiest(unit, member)
                if target is not None and loads[target] < bound[target]:
                    self.remove(unit, member)
                    self.add(unit, target)

    def _fill_up(self) -> None:
        problem, loads = self.problem, self.loads
        empty = self._fullest(lambda member: loads[member] < problem.low[member])
        if not empty:
            return
        donors: dict[int, list[tuple[float, int]]] = {}  # of each zone that receives
        for member in reversed(empty):
            zone = problem.zone[member]
            if zone not in donors:
                donors[zone] = [
                    (-self._ratio(donor), donor)
                    for donor, can_receive in enumerate(problem.can_receive)
                    if can_receive and loads[donor] > problem.low[donor]
                ]
                heapify(donors[zone])
            self._take(member, donors[zone])

    def _take(self, member: int, donors: list[tuple[float, int]]) -> None:
        """Move partitions of the fullest donors to the member, until it has enough.

        Remove donors that can give nothing: what one member of a zone cannot take from another
        zone, its other members cannot take either.
        """
        problem, loads = self.problem, self.loads
        while donors and loads[member] < problem.low[member]:
            fullness, donor = donors[0]
            if loads[donor] <= problem.low[donor]:
                heappop(donors)
            elif fullness != -self._ratio(donor):
                heapreplace(donors, (-self._ratio(donor), donor))
            elif not self._give(donor, member):
                heappop(donors)

    def _give(self, donor: int, member: int) -> bool:
        """Move one partition of the donor to the member, and return True; False if none can go."""
        if donor not in self._gifts:
            self._gifts[donor] = self._movable(donor)[::-1]
        gifts = self._gifts[donor]
        for place in reversed(range(len(gifts))):
            self.operations += 1
            unit = gifts[place]
            if self.may_own(unit, member, donor):
                del gifts[place]
                self.remove(unit, donor)
                self.add(unit, member)
                return True
        return False

    def _movable(self, member: int) -> list[int]:
        """Return the partitions of a member, first those that it does not have yet."""
        units = [unit for unit in self.units[member] if member in self.owners[unit]]
        self.units[member] = units = list(dict.fromkeys(units))
        self.operations += len(units)
        now = self.problem.now
        return sorted(units, key=lambda unit: member in now[unit])

    # ---- the emptiest member

    def _emptiest(self, unit: int, leaving: int | None) -> int | None:
        """Return the emptiest member that may become an owner of the partition, or None."""
        full = self._full_zones(unit, leaving)
        skipped = []
        target = None
        while self._zones and target is None:
            self.operations += 1
            ratio, zone = self._zones[0]
            top = self._top(zone)
            if top is None:
                heappop(self._zones)
            elif top > ratio:
                heapreplace(self._zones, (top, zone))
            elif zone in full or (target := self._first(zone, self.owners[unit])) is None:
                skipped.append(heappop(self._zones))
        for entry in skipped:
            heappush(self._zones, entry)
        return target

    def _full_zones(self, unit: int, leaving: int | None) -> list[int]:
        zone = self.problem.zone
        zones = [zone[owner] for owner in self.owners[unit] if owner != leaving]
        limit = self.problem.limit[unit]
        return zones if limit == 1 else [used for used in zones if zones.count(used) >= limit]

    def _top(self, zone: int) -> float | None:
        """Return how full the emptiest member of a zone is."""
        heap = self._heaps[zone]
        while heap and heap[0][2] != self.loads[heap[0][1]]:
            heappop(heap)  # a load that the member had before
        return heap[0][0] if heap else None

    def _first(self, zone: int, owners: Sequence[int]) -> int | None:
        """Return the emptiest member of a zone that is not one of the owners."""
        heap, aside = self._heaps[zone], []
        while heap:
            self.operations += 1
            _, member, load = heap[0]
            if load == self.loads[member]:
                if member not in owners:
                    break
                aside.append(heap[0])
            heappop(heap)
        target = heap[0][1] if heap else None
        for entry in aside:
            heappush(heap, entry)
        return target

    def _change_load(self, member: int, change: int) -> None:
        self.loads[member] += change
        if not self.problem.can_receive[member]:
            return
        zone, entry = self.problem.zone[member], self._entry(member)
        heappush(self._heaps[zone], entry)
        if change < 0:
            heappush(self._zones, (entry[0], zone))

    def _entry(self, member: int) -> tuple[float, int, int]:
        return (self._ratio(member), member, self.loads[member])

    def _ratio(self, member: int) -> float:
        share = self.problem.share[member]
        return self.loads[member] / share if share > _ROUNDING else inf

    def _fullest(self, condition: Callable[[int], bool]) -> list[int]:
        """Return the members with bounds that meet the condition, the fullest first."""
        members = [
            member
            for member, can_receive in enumerate(self.problem.can_receive)
            if can_receive and condition(member)
        ]
        return sorted(members, key=lambda member: (-self._ratio(member), member))
