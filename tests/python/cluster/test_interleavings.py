"""Every order of events of small clusters: two controllers, kills, leases that end, returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

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
) -> World:
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


def explore(start: World, limit: int = STATES_MAX) -> tuple[int, bool]:
    """Try every order of events. Return the states, and whether a settled one was reached."""
    seen = {start.key()}
    queue: deque[tuple[World, tuple[object, ...]]] = deque([(start, ())])
    is_settled = False
    while queue:
        world, path = queue.popleft()
        for name, action in world.actions():
            after = world.clone()
            steps = (path, name)
            try:
                action(after)
                after.check()
            except Broken as error:
                raise Broken(f"{error}\n" + "\n".join(_flat(steps))) from None
            key = after.key()
            if key in seen:
                continue
            seen.add(key)
            is_settled = is_settled or after.is_settled()
            assert len(seen) <= limit, f"more than {limit} states"
            queue.append((after, steps))
    return len(seen), is_settled


def _flat(path: tuple[object, ...]) -> list[str]:
    names: list[str] = []
    while path:
        path, name = path  # type: ignore[assignment]
        names.append(str(name))
    return names[::-1]


def drain_a(kills: int) -> World:
    world = make_world((("a",),), kills=kills)
    world.etcd.commit((), {KEYS.drained("a"): "{}"})
    return world


def lose_a(kills: int) -> World:
    return make_world((("a",),), kills=kills + 1, controllers=1)


def gain_a_replica(kills: int) -> World:
    return make_world((("a",),), kills=kills, replicas=2)


def lose_a_replica(kills: int) -> World:
    return make_world((("a", "b"),), kills=kills, replicas=1)


def wish_a_move(kills: int) -> World:
    """Return a world in which an operator wants one move."""
    world = make_world((("a",),), kills=kills)
    world.etcd.commit((), {KEYS.wish(0): dump(Wish(0, "a", "b"))})
    return world


WORLDS: dict[str, tuple[Callable[[int], World], int]] = {
    "drain": (drain_a, 1),
    "lost": (lose_a, 1),
    "one more replica": (gain_a_replica, 1),
    "one replica less": (lose_a_replica, 1),
    "wish": (wish_a_move, 1),
}


@pytest.mark.parametrize("name", WORLDS)
def test_no_order_of_events_breaks_a_rule(name: str) -> None:
    make, kills = WORLDS[name]
    states, is_settled = explore(make(kills))
    assert is_settled
    print(f"{name}: {states} states")


def test_two_partitions_at_once() -> None:
    world = make_world((("a",), ("a",)), kills=0)
    world.etcd.commit((), {KEYS.drained("a"): "{}"})
    assert explore(world)[1]


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
