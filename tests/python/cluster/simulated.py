"""A cluster in one process: an etcd in memory, servers, and controllers, each with small actions.

World.actions() lists what may happen next. The explorer of test_interleavings.py tries every order.
It does not cover: the client of etcd, the election's times, ingest and its log (a partition that is
followed becomes whole in one action), and more than one map per model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Self, TypeVar

from petps.cluster.controller import read_models
from petps.cluster.etcd import Compare, Read, Value
from petps.cluster.limits import Limits, Step, Times
from petps.cluster.maps import ClusterMap
from petps.cluster.records import (
    FOLLOW,
    SWITCH,
    Keys,
    Member,
    Move,
    PartitionReport,
    Registration,
    State,
    dump,
)
from petps.cluster.steps import find_step

PREFIX = "/petps"
MODEL = "ranking"
KEYS = Keys(PREFIX, MODEL)
LIMITS = Limits(moves=2, drain_seconds=0.0, replace_after=60.0)


class FakeEtcd:
    """An etcd of one process, whose leases end when a test says so."""

    def __init__(self) -> None:
        self.revision = 0
        self.values: dict[str, Value] = {}
        self.leases: set[int] = set()
        self._next_lease = 1

    def read(self, prefix: str, *, since: int = 0) -> Read:
        """See Etcd."""
        values = {
            key: value
            for key, value in self.values.items()
            if key.startswith(prefix) and value.changed >= since
        }
        return Read(self.revision, values)

    def holds(self, compare: Compare) -> bool:
        """Return whether a condition holds now."""
        value = self.values.get(compare.key)
        if value is None:
            return compare.revision == 0
        return (value.created if compare.is_created else value.changed) == compare.revision

    def commit(
        self,
        compares: Sequence[Compare],
        puts: Mapping[str, str],
        deletes: Sequence[str] = (),
        *,
        lease: int = 0,
    ) -> int | None:
        """See Etcd."""
        if not all(self.holds(compare) for compare in compares):
            return None
        assert not lease or lease in self.leases
        self.revision += 1
        for key, text in puts.items():
            before = self.values.get(key)
            created = self.revision if before is None else before.created
            self.values[key] = Value(text, self.revision, created, lease)
        for key in deletes:
            self.values.pop(key, None)
        return self.revision

    def grant(self, seconds: int) -> int:
        """See Etcd."""
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        self.leases.add(lease)
        return lease

    def keep_alive(self, lease: int) -> bool:
        """See Etcd."""
        return lease in self.leases

    def revoke(self, lease: int) -> None:
        """See Etcd. It also is how a test ends a lease."""
        if lease not in self.leases:
            return
        self.leases.discard(lease)
        self.revision += 1
        self.values = {key: value for key, value in self.values.items() if value.lease != lease}


@dataclass
class SimulatedServer:
    """A server: the map that it uses and has on its disk, and the partitions that it has whole."""

    address: str
    map: ClusterMap | None = None
    map_text: str = ""
    whole: set[int] = field(default_factory=set)
    is_running: bool = True
    lease: int = 0
    removed: set[int] = field(default_factory=set)  # and the order is not deleted yet

    def report(self) -> str:
        """Return its record."""
        ingested = set() if self.map is None else self.map.ingested_by(self.address)
        return dump(
            Member(
                self.address,
                f"pool of {self.address}",
                0 if self.map is None else self.map.version,
                MODEL,
                {
                    p: PartitionReport(1 if p in self.whole else 0, p in self.whole)
                    for p in ingested
                },
            )
        )


@dataclass
class SimulatedController:
    """A controller: its lease, the fence of its election, and a step that it has not taken yet."""

    is_running: bool = True
    lease: int = 0
    fence: Compare | None = None
    step: Step | None = None


@dataclass
class FixedTimes:
    """Times of a model: a drain is over at once; who is away has been so for ``away``."""

    state: State
    away: float

    def away_seconds(self, address: str) -> float:
        """See Times."""
        return 0.0 if address in self.state.members else self.away

    def held_seconds(self, move: Move, condition: str, *, holds: bool) -> float:
        """See Times."""
        return 5.0 if holds else 0.0  # not as long as what ends a move that waits

    def may_begin(self) -> bool:
        """See Times."""
        return True


S = TypeVar("S", bound=SimulatedServer)
Actions = Iterator[tuple[str, Callable[[Any], None]]]  # of the name and the act of each


def act(method: str, world: World[Any], **arguments: object) -> None:
    """Call a method of a world, or of what derives from it."""
    getattr(world, method)(**arguments)


class Broken(AssertionError):
    """A rule of CONTROLLER.md does not hold."""


class World(Generic[S]):
    """Everything.

    kills: how many processes may still die, or be taken for dead. fragile: the servers that may,
    None: all. has_fragile_controllers: whether controllers may too.
    """

    def __init__(
        self,
        servers: Sequence[S],
        cluster_map: ClusterMap,
        kills: int,
        *,
        controllers: int = 2,
        is_lost_replaced: bool = True,
        fragile: str | None = None,
        has_fragile_controllers: bool = True,
    ) -> None:
        self.etcd = FakeEtcd()
        self.servers = {server.address: server for server in servers}
        self.controllers = [SimulatedController() for _ in range(controllers)]
        self.kills = kills
        self.fragile = frozenset(self.servers if fragile is None else fragile)
        self.has_fragile_controllers = has_fragile_controllers
        self.is_lost_replaced = is_lost_replaced
        self.partitions = len(cluster_map.owners)
        self._read: tuple[int, State] | None = None  # the state at a revision
        self.etcd.commit((), {KEYS.map: cluster_map.dump()})
        for server in servers:
            self._register(server)
            self._take_map(server)
            self._report(server)

    def clone(self) -> Self:
        """Return a copy, which shares nothing that changes."""
        other = copy.copy(self)
        other.etcd = copy.copy(self.etcd)
        other.etcd.values = dict(self.etcd.values)
        other.etcd.leases = set(self.etcd.leases)
        other.servers = {}
        for address, server in self.servers.items():
            own = copy.copy(server)
            own.whole, own.removed = set(server.whole), set(server.removed)
            other.servers[address] = own
        other.controllers = [copy.copy(controller) for controller in self.controllers]
        return other

    def key(self) -> object:
        """Return a value that is equal for worlds with the same future."""
        texts = tuple(sorted((k, v.text, v.lease != 0) for k, v in self.etcd.values.items()))
        servers = tuple(
            (
                server.is_running, server.lease in self.etcd.leases,
                server.map_text,
                tuple(sorted(server.whole)), tuple(sorted(server.removed)),
            )
            for server in self.servers.values()
        )  # fmt: skip
        controllers = []
        for controller in self.controllers:
            fence, step = controller.fence, controller.step
            is_elected = None if fence is None else self.etcd.holds(fence)
            if step is None or not self._may_succeed(controller):
                pending: object = step is not None
            else:
                pending = tuple(sorted(step.puts.items())), step.deletes
            has_lease = controller.lease in self.etcd.leases
            controllers.append((controller.is_running, has_lease, is_elected, pending))
        return texts, servers, tuple(sorted(map(repr, controllers))), self.kills

    def _may_succeed(self, controller: SimulatedController) -> bool:
        step, fence = controller.step, controller.fence
        assert step is not None
        return all(
            compare is not None and self.etcd.holds(compare) for compare in (*step.compares, fence)
        )

    def actions(self) -> Actions:
        """Yield what may happen next: a name, and a function that does it to a clone."""
        for number, controller in enumerate(self.controllers):
            yield from self._controller_actions(number, controller)
        for address, server in self.servers.items():
            yield from self._server_actions(address, server)

    # ---- controllers

    def _controller_actions(self, number: int, controller: SimulatedController) -> Actions:
        name = f"controller {number}"
        may_fail = self.kills > 0 and self.has_fragile_controllers
        if controller.lease in self.etcd.leases and may_fail:
            # It is paused, or cut off: etcd takes it for dead, and it goes on later.
            yield f"{name} loses its lease", partial(act, "_lose_lease", number=number)
        if not controller.is_running:
            yield f"{name} starts", partial(act, "_start_controller", number=number)
            return
        if may_fail:
            yield f"{name} dies", partial(act, "_kill_controller", number=number)
        if controller.step is not None:
            yield f"{name} commits", partial(act, "_commit", number=number)
        elif controller.fence is None:
            if KEYS.election(PREFIX) not in self.etcd.values:
                yield f"{name} is elected", partial(act, "_elect", number=number)
        else:
            for moment in self.moments():
                step = planned(self, moment)
                if step is not None:
                    yield (
                        f"{name} plans: {step.text}",
                        partial(act, "_plan", number=number, moment=moment),
                    )

    def moments(self) -> Iterator[tuple[float, ...]]:
        """Yield what the clock of a controller may show now, for times()."""
        yield (0.0,)
        if self._has_away() and self.is_lost_replaced:
            yield (60.0,)

    def times(self, state: State, moment: tuple[float, ...]) -> Times:
        """Return the times of a moment."""
        return FixedTimes(state, moment[0])

    def state(self) -> State:
        """Return the state as a controller reads it."""
        if self._read is None or self._read[0] != self.etcd.revision:
            state = read_models(PREFIX, self.etcd.read(Keys.models(PREFIX)))[MODEL]
            self._read = (self.etcd.revision, state)
        return self._read[1]

    def _has_away(self) -> bool:
        return any(KEYS.member(address) not in self.etcd.values for address in self.servers)

    def _lose_lease(self, number: int) -> None:
        self.kills -= 1
        self.etcd.revoke(self.controllers[number].lease)

    def _start_controller(self, number: int) -> None:
        self.controllers[number] = SimulatedController()

    def _kill_controller(self, number: int) -> None:
        self.kills -= 1
        self.controllers[number].is_running = False
        self.etcd.revoke(self.controllers[number].lease)
        self.controllers[number] = SimulatedController(is_running=False)

    def _elect(self, number: int) -> None:
        controller = self.controllers[number]
        controller.lease = self.etcd.grant(10)
        key = KEYS.election(PREFIX)
        revision = self.etcd.commit((Compare(key, 0),), {key: "{}"}, lease=controller.lease)
        assert revision is not None
        controller.fence = Compare(key, revision, is_created=True)

    def _plan(self, number: int, moment: tuple[float, ...]) -> None:
        self.controllers[number].step = planned(self, moment)

    def _commit(self, number: int) -> None:
        controller = self.controllers[number]
        step, fence = controller.step, controller.fence
        assert step is not None
        assert fence is not None
        before = self.state()
        controller.step = None
        is_elected = self.etcd.holds(fence)
        compares = (*step.compares, fence) if self.is_fenced else step.compares
        if self.etcd.commit(compares, step.puts, step.deletes) is None:
            controller.fence = fence if is_elected else None
            return
        if not is_elected:
            raise Broken("a controller that is not elected changed the cluster")
        self._check_change(before, self.state())

    phases: Sequence[tuple[str | None, str | None]] = (
        (None, FOLLOW), (FOLLOW, SWITCH), (SWITCH, None), (FOLLOW, None), (None, SWITCH),
    )  # fmt: skip
    """Those of a move before and after a step."""

    is_fenced = True  # a test of the test sets it to False

    def _check_change(self, before: State, after: State) -> None:
        assert before.map is not None
        assert after.map is not None
        if after.map.version not in (before.map.version, before.map.version + 1):
            raise Broken(f"map version {before.map.version} is followed by {after.map.version}")
        if (
            after.map is not before.map
            and after.map != before.map
            and after.map.version == before.map.version
        ):
            raise Broken("the map changed, and its version did not")
        for partition in {*before.moves, *after.moves}:
            old, new = before.moves.get(partition), after.moves.get(partition)
            phases = (old and old.phase, new and new.phase)
            if old != new and phases not in self.phases:
                raise Broken(f"partition {partition}: a move went from {phases[0]} to {phases[1]}")

    # ---- servers

    def _server_actions(self, address: str, server: S) -> Actions:
        may_fail = self.kills > 0 and address in self.fragile
        if server.lease in self.etcd.leases and (not server.is_running or may_fail):
            yield f"{address}'s lease ends", partial(act, "_end_lease", address=address)
        if not server.is_running:
            yield f"{address} starts", partial(act, "_start_server", address=address)
            return
        if may_fail:
            yield f"{address} dies", partial(act, "_kill_server", address=address)
        if server.lease not in self.etcd.leases:
            yield f"{address} registers", partial(act, "_join", address=address)
        text = self.etcd.values[KEYS.map].text
        if server.map_text != text:
            yield f"{address} takes the map", partial(act, "_look", address=address)
        if server.lease in self.etcd.leases:
            record = self.etcd.values.get(KEYS.member(address))
            if record is None or record.text != server.report():
                yield f"{address} reports", partial(act, "_send", address=address)
        if server.map is not None:
            for number in server.map.ingested_by(address) - server.whole:
                yield (
                    f"{address} catches up with {number}",
                    partial(act, "_catch_up", address=address, partition_number=number),
                )
        for drop_address, number in self.state().drops:
            if drop_address == address:
                yield (
                    f"{address} removes {number}",
                    partial(act, "_remove", address=address, partition_number=number),
                )

    def _end_lease(self, address: str) -> None:
        if self.servers[address].is_running:
            self.kills -= 1
        self.etcd.revoke(self.servers[address].lease)

    def _start_server(self, address: str) -> None:
        self.servers[address].is_running = True

    def _kill_server(self, address: str) -> None:
        self.kills -= 1
        self.servers[address].is_running = False

    def _join(self, address: str) -> None:
        self._register(self.servers[address])

    def _look(self, address: str) -> None:
        self._take_map(self.servers[address])

    def _send(self, address: str) -> None:
        self._report(self.servers[address])

    def _catch_up(self, address: str, partition_number: int) -> None:
        self.servers[address].whole.add(partition_number)

    def _remove(self, address: str, partition_number: int) -> None:
        """Remove the rows if the map in use allows it, then delete the order in another action."""
        server, key = self.servers[address], KEYS.drop(address, partition_number)
        drop = self.state().drops[address, partition_number]
        if server.map is None or server.map.version < drop.map_version:
            return
        if partition_number in server.map.ingested_by(address):
            raise Broken(f"{address} shall remove partition {partition_number}, which it has")
        if partition_number in server.removed:
            server.removed.discard(partition_number)
            self.etcd.commit((Compare(key, self.etcd.values[key].changed),), {}, (key,))
            return
        server.whole.discard(partition_number)
        server.removed.add(partition_number)

    def _register(self, server: S) -> None:
        server.lease = self.etcd.grant(10)
        registration = Registration(
            server.address, None, "", 1.0, f"pool of {server.address}", "petps", False,
            self.partitions,
        )  # fmt: skip
        self.etcd.commit((), {KEYS.registration(server.address): dump(registration)})

    def _take_map(self, server: S) -> None:
        cluster_map = self.state().map
        assert cluster_map is not None
        if server.map is not None and cluster_map.version <= server.map.version:
            raise Broken(f"{server.address} shall use an older map than its own")
        server.map, server.map_text = cluster_map, self.etcd.values[KEYS.map].text

    def _report(self, server: S) -> None:
        self.etcd.commit((), {KEYS.member(server.address): server.report()}, lease=server.lease)

    # ---- rules

    def check(self) -> None:
        """Raise Broken unless every rule about states holds."""
        cluster_map = self.state().map
        assert cluster_map is not None
        for number, owners in enumerate(cluster_map.owners):
            if not any(number in self.servers[owner].whole for owner in owners):
                raise Broken(f"no owner of partition {number} has it whole")
        for address, server in self.servers.items():
            for number, owners in enumerate(server.map.owners if server.map else ()):
                if address in owners and number not in server.whole:
                    raise Broken(f"{address} serves partition {number}, which it does not have")

    def is_settled(self) -> bool:
        """Return whether nothing is left to do: no move, order or wish, and the right owners."""
        state = self.state()
        assert state.map is not None
        return not (state.moves or state.drops or state.wishes) and all(
            len(owners) == state.settings.replicas and state.drained.isdisjoint(owners)
            for owners in state.map.owners
        )


_planned: dict[object, Step | None] = {}


def planned(world: World[Any], moment: tuple[float, ...]) -> Step | None:
    """Return the next step. The same contents of etcd have the same step, up to revisions."""
    texts = tuple(sorted((key, value.text) for key, value in world.etcd.values.items()))
    key = (texts, moment)
    if key not in _planned:
        state = world.state()
        _planned[key] = find_step(state, KEYS, LIMITS, world.times(state, moment))
    step = _planned[key]
    if step is None:
        return None
    compares = []
    for compare in step.compares:
        value = world.etcd.values.get(compare.key)
        compares.append(Compare(compare.key, 0 if value is None else value.changed))
    return Step(step.text, step.event, tuple(compares), step.puts, step.deletes)


def forget_plans() -> None:
    """Forget what planned() has computed, because a test changes the rules."""
    _planned.clear()
