"""Improves an assignment of a small problem until none has fewer copies.

The assignment is a flow: from each partition through its zones to the members that own it, and from
each member back. A flow has the least cost exactly if its residual graph has no cycle of negative
cost. A cycle is a chain of exchanges: member a gives partition p to b, b gives q to c, and so on.
So this looks for such a cycle (Bellman and Ford), makes its exchanges, and repeats.

Costs, from the largest: a replica that is missing; a partition that a member has beyond its bounds;
a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from petps.cluster.assign import Assignment

__all__ = ["improve"]

OPERATIONS_MAX: Final = 3_000_000  # about a second
_COPY: Final = 1
_OUT_OF_BOUNDS: Final = 1 << 20  # more than all copies of a problem of this size
_MISSING: Final = 1 << 40

# Kind and numbers: ("all", 0, 0), ("member", m, 0), ("partition", p, 0), ("zone", p, zone).
_Node: TypeAlias = tuple[str, int, int]
_ALL: Final = ("all", 0, 0)


class _Edge(NamedTuple):
    """An edge of the residual graph. change: (partition, member, +1 or -1), or None."""

    start: _Node
    end: _Node
    cost: int
    change: tuple[int, int, int] | None


def improve(assignment: Assignment) -> None:
    """Exchange partitions until no assignment within the bounds has fewer copies.

    Stops before that if it takes more than OPERATIONS_MAX operations in all.
    """
    while assignment.operations < OPERATIONS_MAX:
        cycle = _negative_cycle(assignment)
        if not cycle:
            return
        changes = [edge.change for edge in cycle if edge.change is not None]
        for unit, member, _ in (change for change in changes if change[2] < 0):
            assignment.remove(unit, member)
        for unit, member, _ in (change for change in changes if change[2] > 0):
            assignment.add(unit, member)


def _negative_cycle(assignment: Assignment) -> list[_Edge]:
    """Return the edges of a cycle of negative cost; none: []."""
    edges = list(_edges(assignment))
    distance: dict[_Node, int] = {}
    previous: dict[_Node, _Edge] = {}
    for edge in edges:
        distance[edge.start] = distance[edge.end] = 0
    changed: _Node | None = None
    for _ in range(len(distance)):
        assignment.operations += len(edges)
        changed = None
        for edge in edges:
            length = distance[edge.start] + edge.cost
            if length < distance[edge.end]:
                distance[edge.end] = length
                previous[edge.end] = edge
                changed = edge.end
        if changed is None:
            return []
        if assignment.operations >= OPERATIONS_MAX:
            return []
    assert changed is not None
    node = changed
    for _ in range(len(distance)):
        node = previous[node].start  # now a node of the cycle
    cycle = [previous[node]]
    while cycle[-1].start != node:
        cycle.append(previous[cycle[-1].start])
    return cycle


def _edges(assignment: Assignment) -> Iterator[_Edge]:
    problem = assignment.problem
    bounded = [member for member, may in enumerate(problem.can_receive) if may]
    for unit, owners in enumerate(assignment.owners):
        partition = ("partition", unit, 0)
        if len(owners) < problem.wanted[unit]:
            yield _Edge(_ALL, partition, -_MISSING, None)
        used: dict[int, int] = {}
        for owner in owners:
            used[problem.zone[owner]] = used.get(problem.zone[owner], 0) + 1
        for zone in sorted({problem.zone[member] for member in bounded}):
            if used.get(zone, 0) < problem.limit[unit]:
                yield _Edge(partition, ("zone", unit, zone), 0, None)
            if used.get(zone, 0):
                yield _Edge(("zone", unit, zone), partition, 0, None)
        for member in bounded:
            cost = 0 if member in problem.now[unit] else _COPY
            node = ("zone", unit, problem.zone[member])
            if member in owners:
                yield _Edge(("member", member, 0), node, -cost, (unit, member, -1))
            else:
                yield _Edge(node, ("member", member, 0), cost, (unit, member, 1))
    for member in bounded:
        load, low, high = assignment.loads[member], problem.low[member], problem.high[member]
        node = ("member", member, 0)
        yield _Edge(node, _ALL, _cost_of_more(load, low, high), None)
        if load > 0:
            yield _Edge(_ALL, node, -_cost_of_more(load - 1, low, high), None)


def _cost_of_more(load: int, low: int, high: int) -> int:
    """Return what it costs beside copies if a member of this load gets a partition more."""
    return -_OUT_OF_BOUNDS if load < low else _OUT_OF_BOUNDS if load >= high else 0
