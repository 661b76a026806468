"""Worlds in which pushes feed the partitions: the real Handovers, with senders of small actions.

A row is a number: how many pushes were applied. A push is acknowledged when it is applied. A commit
of a server may be lost and arrive later, also after its process has died. Not covered: the threads
of senders and receivers, the files of the store, the native server's queue of pushes, and reports
of a map that are late.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from petps.cluster.etcd import Compare
from petps.cluster.maps import ClusterMap
from petps.cluster.records import (
    FOLLOW,
    HANDOVER,
    OPEN,
    SWITCH,
    Member,
    Move,
    Registration,
    State,
    dump,
)
from petps.errors import Unavailable
from petps.server.cluster.handover import Handovers
from petps.server.cluster.sender import Progress
from tests.python.cluster.simulated import (
    KEYS,
    MODEL,
    Actions,
    Broken,
    FixedTimes,
    SimulatedServer,
    World,
)

LATE = 1e9  # seconds: the limit of every wait is over
PAUSE_MS = 2000


@dataclass
class FakeSender:
    """A sender whose thread does one step when the explorer says so."""

    copy: str
    parts: int = 0
    released: int = 0
    is_holding: bool = False
    wanted: int = 0
    is_over: bool = False
    server: PushServer | None = None
    partition: int = 0

    def progress(self) -> Progress:
        return Progress(self.parts, 0, self.parts > 0, self.released, "")

    def finish(self, attempt: int, seconds: float) -> None:
        self.wanted = attempt

    def limit_pause(self) -> None:
        """A pause ends earlier only by what the world does."""

    def take_back(self) -> None:
        self.wanted = self.released = 0
        self.is_holding = False
        assert self.server is not None
        self.server.kept.pop(self.partition, None)

    def close(self, *, is_removed: bool) -> None:
        self.is_over = True


@dataclass
class FakeReceiver:
    """A receiver whose thread does one step when the explorer says so."""

    copy: str
    offered: int = 0
    parts: int = 0
    error: str = ""

    def offer(self, parts: int) -> None:
        self.offered = parts

    def close(self) -> None:
        pass


@dataclass
class PushServer(SimulatedServer):
    """A server: rows on its disk, pauses in its file, and what its process knows."""

    rows: dict[int, int] = field(default_factory=dict)
    kept: dict[int, bool] = field(default_factory=dict)  # in its file; whether pulls end too
    passing: set[int] = field(default_factory=set)
    is_answering: bool = False  # pulls of partitions whose pulls end: the time is not over
    offered_map: str = ""  # read, and not used yet
    senders: dict[int, FakeSender] = field(default_factory=dict)
    receivers: dict[int, FakeReceiver] = field(default_factory=dict)
    starts: int = 0
    names: int = 0

    def report(self) -> str:
        version = 0 if self.map is None else self.map.version
        return dump(Member(self.address, f"pool of {self.address}", version, MODEL, {}))

    def owns(self, partition: int) -> bool:
        return (
            self.is_running and self.map is not None and self.address in self.map.owners[partition]
        )

    def takes_pushes(self, partition: int) -> bool:
        paused = partition in self.kept or partition in self.passing
        return self.owns(partition) and not paused

    def answers_pulls(self, partition: int) -> bool:
        return self.owns(partition) and (not self.kept.get(partition, False) or self.is_answering)

    def key(self) -> object:
        return (
            tuple(sorted(self.rows.items())), tuple(sorted(self.kept.items())),
            tuple(sorted(self.passing)), self.is_answering, self.offered_map, self.starts,
            tuple((p, s.copy, s.parts, s.released, s.is_holding, s.wanted, s.is_over)
                  for p, s in sorted(self.senders.items())),
            tuple((p, r.copy, r.offered, r.parts) for p, r in sorted(self.receivers.items())),
        )  # fmt: skip


class FakePauses:
    """The pauses of a server, as Handovers sees them."""

    def __init__(self, server: PushServer) -> None:
        self._server = server

    @property
    def partitions(self) -> frozenset[int]:
        return frozenset(self._server.kept)

    def keep(self, partition: int, *, pulls: bool) -> None:
        self._server.kept[partition] = pulls

    def resume(self, partition: int) -> None:
        self._server.kept.pop(partition, None)
        self._server.passing.discard(partition)

    def keep_pulls(self, until_ns: int) -> None:
        self._server.is_answering = until_ns > time.monotonic_ns()


class LossyEtcd:
    """The etcd of one look. lost: which commit is lost on its way; it arrives later."""

    def __init__(self, world: PushWorld, lost: bool) -> None:
        self._world, self._lost = world, lost

    def commit(
        self, compares: Sequence[Compare], puts: Mapping[str, str], deletes: Sequence[str] = ()
    ) -> int | None:
        if self._lost:
            self._world.in_flight = (tuple(compares), tuple(sorted(puts.items())))
            raise Unavailable("etcd does not answer")
        return self._world.etcd.commit(compares, puts, deletes)


class SimulatedHandovers(Handovers):
    """The real ones, around the state of a PushServer."""

    def __init__(self, world: PushWorld, server: PushServer, lost: bool) -> None:
        place: Any = object()
        etcd: Any = LossyEtcd(world, lost)
        pauses: Any = FakePauses(server)
        super().__init__(
            etcd, KEYS, server.address, pauses, place,
            used_version=lambda: 0 if server.map is None else server.map.version,
            owns=server.owns, log=lambda line: None,
        )  # fmt: skip
        self._server = server
        self._senders: Any = server.senders
        self._receivers: Any = server.receivers

    def _new_name(self) -> str:
        self._server.names += 1
        return f"{self._server.address}{self._server.starts}.{self._server.names}"

    def _new_sender(self, partition: int, copy: str) -> Any:
        return FakeSender(copy, server=self._server, partition=partition)

    def _new_receiver(self, partition: int, copy: str) -> Any:
        self._server.rows.pop(partition, None)
        return FakeReceiver(copy)


@dataclass
class PushTimes(FixedTimes):
    """Whether the waits of handovers are over, and whether the source's pulls have ended."""

    is_late: bool = False
    is_fenced: bool = False

    def held_seconds(self, move: Move, condition: str, *, holds: bool) -> float:
        if condition == "released":
            return LATE if holds and self.is_late else 0.0
        if condition == "fenced":
            return LATE if holds and self.is_fenced else 0.0
        return 1.0 if holds else 0.0


class PushWorld(World[PushServer]):
    """Everything, with pushes.

    pushes: how many may still come. delays: how many commits may be late. takes_back: how many
    handovers may be taken back. fragile: the servers that may die, or whose commits may be late.
    has_lost_leases: False if a server that dies always starts again before its lease ends.
    """

    phases = (
        (None, FOLLOW), (FOLLOW, HANDOVER), (HANDOVER, FOLLOW), (HANDOVER, SWITCH),
        (SWITCH, OPEN), (OPEN, None), (FOLLOW, None), (HANDOVER, None),
    )  # fmt: skip

    def __init__(
        self,
        servers: Sequence[PushServer],
        cluster_map: ClusterMap,
        kills: int,
        *,
        pushes: int,
        delays: int = 0,
        takes_back: int = 0,
        fragile: str = "ab",
        has_lost_leases: bool = True,
    ) -> None:
        self.pushes, self.delays, self.takes_back = pushes, delays, takes_back
        self.has_lost_leases = has_lost_leases
        self.acknowledged = [1] * len(cluster_map.owners)
        for server in servers:
            server.rows = {
                number: 1
                for number, owners in enumerate(cluster_map.owners)
                if server.address in owners
            }
        self.store: dict[tuple[int, str, int], int | None] = {}
        self.in_flight: tuple[tuple[Compare, ...], tuple[tuple[str, str], ...]] | None = None
        super().__init__(
            servers, cluster_map, kills, controllers=1, fragile=fragile,
            has_fragile_controllers=False,
        )  # fmt: skip

    def clone(self) -> Self:
        other = super().clone()
        other.acknowledged = list(self.acknowledged)
        other.store = dict(self.store)
        for server in other.servers.values():
            server.rows, server.kept = dict(server.rows), dict(server.kept)
            server.passing = set(server.passing)
            server.senders = {p: replace(s, server=server) for p, s in server.senders.items()}
            server.receivers = {p: copy.copy(r) for p, r in server.receivers.items()}
        return other

    def key(self) -> object:
        in_flight: object = None
        if self.in_flight is not None:
            compares, puts = self.in_flight
            in_flight = (all(map(self.etcd.holds, compares)), puts)
        return (
            super().key(), tuple(server.key() for server in self.servers.values()),
            tuple(self.acknowledged), self.pushes, self.delays, self.takes_back,
            tuple(sorted(self.store.items())), in_flight,
        )  # fmt: skip

    # ---- the clock of a controller

    def moments(self) -> Iterator[tuple[float, ...]]:
        is_fenced = 0.0 if any(server.is_answering for server in self.servers.values()) else 1.0
        for (away,) in super().moments():
            for late in (0.0, 1.0) if self.takes_back else (0.0,):
                yield away, late, is_fenced

    def times(self, state: State, moment: tuple[float, ...]) -> PushTimes:
        return PushTimes(state, moment[0], moment[1] > 0, moment[2] > 0)

    def _check_change(self, before: State, after: State) -> None:
        super()._check_change(before, after)
        for number, move in after.moves.items():
            if number in before.moves and before.moves[number].attempt < move.attempt:
                self.takes_back -= 1

    # ---- servers

    def actions(self) -> Actions:
        yield from super().actions()
        if self.in_flight is not None:
            yield "a late commit arrives", partial(PushWorld._arrive)

    def _server_actions(self, address: str, server: PushServer) -> Actions:
        for name, action in super()._server_actions(address, server):
            if "lease ends" in name and not self.has_lost_leases:
                continue
            if not name.endswith((" takes the map", " reports")) and "catches up" not in name:
                yield name, action
        if server.is_answering:
            yield f"{address}: time passes", partial(PushWorld._expire, address=address)
        if not server.is_running:
            return
        if server.offered_map not in ("", server.map_text):
            yield f"{address} uses the map", partial(PushWorld._use, address=address)
        yield f"{address} looks", partial(PushWorld._look_at_orders, address=address, lost=False)
        if self.delays and self.in_flight is None and address in self.fragile:
            yield (
                f"{address} looks, and a commit is late",
                partial(PushWorld._look_at_orders, address=address, lost=True),
            )
        for number in range(len(self.acknowledged)):
            if server.takes_pushes(number) and self.pushes:
                yield (
                    f"{address} takes a push to {number}",
                    partial(PushWorld._push, address=address, number=number),
                )
        yield from self._copy_actions(server)

    def _copy_actions(self, own: PushServer) -> Actions:
        address = own.address
        for number, sender in own.senders.items():
            if sender.is_over or sender.released:
                continue
            act = partial(PushWorld._step_sender, address=address, number=number)
            last = self.store.get((number, sender.copy, sender.parts))
            if not sender.is_holding and (not sender.parts or last != own.rows.get(number)):
                yield f"{address} sends {number}", partial(act, step="send")
            if sender.parts and sender.wanted and not sender.is_holding:
                yield f"{address} pauses {number}", partial(act, step="pause")
            if sender.is_holding:
                yield f"{address} promises {number}", partial(act, step="promise")
                yield f"{address} is late with {number}", partial(act, step="resume")
        for number, receiver in own.receivers.items():
            if receiver.parts < receiver.offered:
                yield (
                    f"{address} receives {number}",
                    partial(PushWorld._step_receiver, address=address, number=number),
                )

    def _arrive(self) -> None:
        assert self.in_flight is not None
        compares, puts = self.in_flight
        self.in_flight = None
        self.etcd.commit(compares, dict(puts))

    def _expire(self, address: str) -> None:
        self.servers[address].is_answering = False

    def _use(self, address: str) -> None:
        server = self.servers[address]
        offered = ClusterMap.of(json.loads(server.offered_map))
        if server.map is not None and offered.version <= server.map.version:
            raise Broken(f"{address} shall use an older map than its own")
        server.map, server.map_text = offered, server.offered_map
        if server.lease in self.etcd.leases:
            self._report(server)

    def _join(self, address: str) -> None:
        super()._join(address)
        self._report(self.servers[address])

    def _look_at_orders(self, address: str, lost: bool) -> None:
        server = self.servers[address]
        state = self.state()
        if lost:
            self.delays -= 1
        try:
            SimulatedHandovers(self, server, lost).look(state, time.monotonic())
        except Unavailable:
            return
        server.offered_map = self.etcd.values[KEYS.map].text

    def _push(self, address: str, number: int) -> None:
        server = self.servers[address]
        server.rows[number] = server.rows.get(number, 0) + 1
        self.acknowledged[number] += 1
        self.pushes -= 1

    def _step_sender(self, address: str, number: int, step: str) -> None:
        server = self.servers[address]
        sender = server.senders[number]
        if step == "pause":
            sender.is_holding = True
            server.passing.add(number)
        elif step == "resume":
            sender.is_holding = False
            server.passing.discard(number)
            sender.wanted = 0
        if step in ("send", "promise"):
            last = self.store.get((number, sender.copy, sender.parts))
            if not sender.parts or last != server.rows.get(number):
                sender.parts += 1
                self.store[number, sender.copy, sender.parts] = server.rows.get(number)
        if step == "promise":
            server.kept[number] = True
            server.passing.discard(number)
            sender.released = sender.wanted

    def _step_receiver(self, address: str, number: int) -> None:
        server = self.servers[address]
        receiver = server.receivers[number]
        if server.owns(number):
            raise Broken(f"{address} receives partition {number}, which it owns")
        receiver.parts += 1
        value = self.store[number, receiver.copy, receiver.parts]
        server.rows.pop(number, None)
        if value is not None:
            server.rows[number] = value

    def _kill_server(self, address: str) -> None:
        super()._kill_server(address)
        server = self.servers[address]
        server.senders, server.receivers = {}, {}
        server.passing, server.is_answering, server.offered_map = set(), False, ""
        server.starts, server.names = server.starts + 1, 0

    def _remove(self, address: str, partition_number: int) -> None:
        server = self.servers[address]
        before = self.state().drops.get((address, partition_number))
        super()._remove(address, partition_number)
        if before is not None and partition_number in server.removed:
            server.rows.pop(partition_number, None)

    def _register(self, server: PushServer) -> None:
        server.lease = self.etcd.grant(10)
        registration = Registration(
            server.address, None, "", 1.0, f"pool of {server.address}", "petps", True,
            self.partitions,
            is_fed=False, has_store=True,
        )  # fmt: skip
        self.etcd.commit((), {KEYS.registration(server.address): dump(registration)})

    # ---- rules

    def check(self) -> None:
        for number, count in enumerate(self.acknowledged):
            taking = [s.address for s in self.servers.values() if s.takes_pushes(number)]
            if len(taking) > 1:
                raise Broken(f"{' and '.join(taking)} take pushes to partition {number}")
            for server in self.servers.values():
                is_serving = server.takes_pushes(number) or server.answers_pulls(number)
                has = server.rows.get(number, 0)
                if is_serving and has != count:
                    raise Broken(
                        f"{server.address} serves partition {number} with {has} of {count} "
                        "acknowledged pushes"
                    )

    def is_settled(self) -> bool:
        return super().is_settled() and not any(server.kept for server in self.servers.values())
