"""Every order of events of small clusters: two controllers, kills, leases that end, returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from petps.cluster import steps
from petps.cluster.limits import Step
from petps.cluster.maps import ClusterMap
from petps.cluster.records import Drop, Move, Settings, Wish, dump
from tests.python.cluster import simulated
from tests.python.cluster.simulated import KEYS, MODEL, Broken, SimulatedServer, World

STATES_MAX = 60_000


def make_world(
    owners: tuple[tuple[str, ...], ...],
    *,
    servers: str = "ab",
    kills: int,
    replicas: int = 1,
    is_lost_replaced: bool = True,
    controllers: int = 2,
) -> World[SimulatedServer]:
    """Return a world whose owners have their partitions whole."""
    simulated = [
        SimulatedServer(
            name, whole={number for number, present in enumerate(owners) if name in present}
        )
        for name in servers
    ]
    world = World(
        simulated, ClusterMap(MODEL, 2, owners), kills, is_lost_replaced=is_lost_replaced,
        controllers=controllers,
    )  # fmt: skip
    world.etcd.commit((), {KEYS.settings: dump(Settings(replicas))})
    return world


def explore(start: World[Any], limit: int = STATES_MAX, *, settles: bool = True) -> int:
    """Try every order of events. Return the number of states.

    settles: from each state, the cluster must be able to settle if nothing more dies.
    """
    numbers = {start.key(): 0}
    paths: list[tuple[object, ...]] = [()]
    befores: list[list[int]] = [[]]  # of each state: those before it, without a death between
    settled = [0] if start.is_settled() else []
    queue = deque([(start, 0)])
    while queue:
        world, number = queue.popleft()
        for name, action in world.actions():
            after = world.clone()
            path = (paths[number], name)
            try:
                action(after)
                after.check()
            except Broken as error:
                raise Broken(_text(error, path)) from None
            key = after.key()
            if key not in numbers:
                numbers[key] = len(paths)
                paths.append(path)
                befores.append([])
                if after.is_settled():
                    settled.append(numbers[key])
                assert len(paths) <= limit, f"more than {limit} states"
                queue.append((after, numbers[key]))
            if after.kills == world.kills:
                befores[numbers[key]].append(number)
    if settles:
        _check_settled(paths, befores, settled)
    return len(paths)


def _check_settled(
    paths: Sequence[tuple[object, ...]], befores: Sequence[Sequence[int]], settled: Sequence[int]
) -> None:
    """Raise Broken unless a settled state can be reached from each state."""
    is_able = [False] * len(paths)
    found = list(settled)
    while found:
        number = found.pop()
        if not is_able[number]:
            is_able[number] = True
            found += befores[number]
    if not all(is_able):
        raise Broken(_text("the cluster can never settle", paths[is_able.index(False)]))


def _text(error: object, path: tuple[object, ...]) -> str:
    return f"{error}\n" + "\n".join(_flat(path))


def _flat(path: tuple[object, ...]) -> list[str]:
    names: list[str] = []
    while path:
        path, name = path  # type: ignore[assignment]
        names.append(str(name))
    return names[::-1]


def drain_a(kills: int) -> World[SimulatedServer]:
    world = make_world((("a",),), kills=kills)
    world.etcd.commit((), {KEYS.drained("a"): "{}"})
    return world


def lose_a(kills: int) -> World[SimulatedServer]:
    return make_world((("a",),), kills=kills + 1, controllers=1)


def gain_a_replica(kills: int) -> World[SimulatedServer]:
    return make_world((("a",),), kills=kills, replicas=2)


def lose_a_replica(kills: int) -> World[SimulatedServer]:
    return make_world((("a", "b"),), kills=kills, replicas=1)


def wish_a_move(kills: int) -> World[SimulatedServer]:
    """Return a world in which an operator wants one move."""
    world = make_world((("a",),), kills=kills)
    world.etcd.commit((), {KEYS.wish(0): dump(Wish(0, "a", "b"))})
    return world


WORLDS: dict[str, tuple[Callable[[int], World[SimulatedServer]], int]] = {
    "drain": (drain_a, 1),
    "lost": (lose_a, 1),
    "one more replica": (gain_a_replica, 1),
    "one replica less": (lose_a_replica, 1),
    "wish": (wish_a_move, 1),
}


@pytest.mark.parametrize("name", WORLDS)
def test_no_order_of_events_breaks_a_rule(name: str) -> None:
    make, kills = WORLDS[name]
    states = explore(make(kills))
    print(f"{name}: {states} states")


def test_two_partitions_at_once() -> None:
    world = make_world((("a",), ("a",)), kills=0)
    world.etcd.commit((), {KEYS.drained("a"): "{}"})
    explore(world)


# ---- each rule of the controller is needed: without it, some order of events breaks something


def test_a_controller_without_a_fence_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "is_fenced", False)
    with pytest.raises(Broken, match="not elected changed the cluster"):
        explore(drain_a(1))


def test_an_early_switch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps._Work, "_has_caught_up", lambda *_: True)
    with pytest.raises(Broken, match="no owner of partition 0 has it whole"):
        explore(drain_a(0))


def test_an_order_that_ignores_the_map_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order to remove rows, given with the switch already: the server may have the old map."""
    original = steps._Work._switch

    def switch(work: steps._Work, move: Move) -> Step:
        step = original(work, move)
        assert move.source is not None
        order = dump(Drop(move.source, move.partition, 0))
        puts = {**step.puts, KEYS.drop(move.source, move.partition): order}
        return Step(step.text, step.event, step.compares, puts, step.deletes)

    monkeypatch.setattr(steps._Work, "_switch", switch)
    with pytest.raises(Broken, match="shall remove partition 0, which it has"):
        explore(drain_a(0))


@pytest.fixture(autouse=True)
def forget_plans() -> None:
    """Forget the steps that a changed rule has planned."""
    simulated.forget_plans()
