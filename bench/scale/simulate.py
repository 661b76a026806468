"""A simulation of a cluster's moves, event by event: how long they will take, without servers.

The controller is the real one (petps.cluster), over an etcd in memory and a clock of its own. The
servers are models: each looks at its orders as a server does, and follows and removes partitions at
rates that were measured. bench/scale/prediction.py compares it with
servers.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from petps.cluster.controller import TICK_SECONDS, Controller
from petps.cluster.limits import Limits
from petps.cluster.maps import ClusterMap
from petps.cluster.records import (
    Keys,
    Member,
    PartitionReport,
    Registration,
    Settings,
    State,
    dump,
    read_state,
)
from petps.server.cluster.membership import LOOK_SECONDS
from petps.server.cluster.removal import LOOK_SECONDS as REMOVAL_LOOK_SECONDS
from tests.python.cluster.simulated import FakeEtcd

__all__ = ["Rates", "Simulation"]

PREFIX: Final = "/petps"
MODEL: Final = "default"
INSTANCE: Final = "default@0"
LEASE_SECONDS: Final = 10


@dataclass(frozen=True)
class Rates:
    """Measurements of one server. Rates are in rows a second.

    restart_seconds: from a map that changes what a server follows until its ingest says where it
    is. follow: rows read from the log or a base and applied. remove: rows of a partition removed.
    """

    restart_seconds: float
    follow: float
    remove: float


class _Server:
    """A server: its looks at etcd, what it follows, and what it removes."""

    def __init__(
        self,
        simulation: Simulation,
        address: str,
        zone: str,
        first_map: ClusterMap,
        first_look: float,
    ) -> None:
        self.address = address
        self._simulation, self._etcd = simulation, simulation.etcd
        self._lease = self._etcd.grant(LEASE_SECONDS)
        self._map_version = first_map.version
        # When each partition that it follows is caught up.
        self._whole_at = dict.fromkeys(first_map.ingested_by(address), 0.0)
        self._restarted_at = 0.0
        self._orders: dict[int, int] = {}  # partitions to remove, and from which map on
        self._removed: list[int] = []  # of these
        self._is_removing = False
        self._sent = ""
        keys = simulation.keys
        registration = Registration(
            address, None, zone, 1.0, address, "simulated", is_pushed=False,
            partitions=len(simulation.partition_rows),
        )  # fmt: skip
        self._etcd.commit((), {keys.registration(address): dump(registration)})
        simulation.at(first_look, self._look)

    def _look(self) -> None:
        state = self._simulation.state()
        if state.map is not None and state.map.version > self._map_version:
            # The server's main thread uses it after this look.
            self._simulation.at(self._simulation.now, partial(self._use, state.map))
        self._take_orders(state)
        self._report()
        self._simulation.at(self._simulation.now + LOOK_SECONDS, self._look)

    def _use(self, cluster_map: ClusterMap) -> None:
        now, rates = self._simulation.now, self._simulation.rates
        self._map_version = cluster_map.version
        wanted = cluster_map.ingested_by(self.address)
        if wanted == set(self._whole_at):
            return
        # Ingest starts again. What it had not read yet, it reads one after the other.
        self._restarted_at = at = now + rates.restart_seconds
        before, self._whole_at = self._whole_at, {}
        for partition in sorted(wanted):
            is_new = partition not in before
            left = (
                self._simulation.partition_rows[partition] / rates.follow
                if is_new
                else max(before[partition] - now, 0.0)
            )
            at += left
            self._whole_at[partition] = at if left else self._restarted_at

    def _take_orders(self, state: State) -> None:
        self._orders = {
            partition: drop.map_version
            for (address, partition), drop in state.drops.items()
            if address == self.address
        }
        for partition in [done for done in self._removed if done in self._orders]:
            del self._orders[partition]
            self._etcd.commit((), {}, (self._simulation.keys.drop(self.address, partition),))
        self._removed.clear()
        if self._orders and not self._is_removing:
            self._is_removing = True
            self._simulation.at(self._simulation.now, self._remove)

    def _remove(self) -> None:
        """Remove what is ordered by the map in use, one partition after the other, then rest."""
        simulation = self._simulation
        end = simulation.now
        for partition, version in sorted(self._orders.items()):
            if version <= self._map_version and partition not in self._removed:
                end += simulation.partition_rows[partition] / simulation.rates.remove
                simulation.at(end, partial(self._removed.append, partition))
        simulation.at(end, self._rest)

    def _rest(self) -> None:
        if set(self._orders) - set(self._removed):
            self._simulation.at(self._simulation.now + REMOVAL_LOOK_SECONDS, self._remove)
        else:
            self._is_removing = False

    def _report(self) -> None:
        now = self._simulation.now
        reports = {
            partition: PartitionReport(1, is_caught_up=whole_at <= now)
            for partition, whole_at in self._whole_at.items()
            if self._restarted_at <= now
        }
        member = Member(self.address, self.address, self._map_version, INSTANCE, reports)
        if (text := dump(member)) != self._sent:
            key = self._simulation.keys.member(self.address)
            self._etcd.commit((), {key: text}, lease=self._lease)
            self._sent = text


class Simulation:
    """Servers whose partitions a map divides, and the real controller. run_until() lets time pass.

    partition_rows: the rows of each partition. owners: the addresses that own each partition.
    ``phases`` gives numbers from 0 to 1: where in its period each server and the controller are.
    """

    def __init__(
        self,
        zones: dict[str, str],
        partition_rows: Sequence[int],
        owners: Sequence[Sequence[str]],
        rates: Rates,
        limits: Limits,
        phases: Callable[[], float],
    ) -> None:
        self.now = 0.0
        self.etcd = FakeEtcd()
        self.keys = Keys(PREFIX, MODEL)
        self.partition_rows, self.rates = partition_rows, rates
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        first = ClusterMap(MODEL, 2, tuple(map(tuple, owners)))
        settings = Settings(replicas=len(owners[0]))
        self.etcd.commit((), {self.keys.map: first.dump(), self.keys.settings: dump(settings)})
        self._controller = Controller(
            self.etcd, PREFIX, limits, name="simulated", lease_seconds=LEASE_SECONDS,
            log=lambda line: None, clock=lambda: self.now,
        )  # fmt: skip
        for address, zone in zones.items():
            _Server(self, address, zone, first, phases() * LOOK_SECONDS)
        self.at(phases() * TICK_SECONDS, self._tick)

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Let something happen at a time. Events of one time happen in the order of the calls."""
        heapq.heappush(self._events, (time, next(self._order), event))

    def state(self) -> State:
        """Return the state in etcd."""
        values = self.etcd.read(self.keys.root).values
        return read_state(
            self.keys,
            {key: value.text for key, value in values.items()},
            {key: value.changed for key, value in values.items()},
        )

    def put(self, values: dict[str, str]) -> None:
        """Write as an operator's command does."""
        self.etcd.commit((), values)

    def run_until(self, is_over: Callable[[State], bool], seconds: float) -> float:
        """Let time pass until a state is reached, and return the seconds from the call.

        Raises RuntimeError if it is not reached within ``seconds`` of the simulation's time.
        """
        begun = self.now
        while not is_over(self.state()):
            self.now, _, event = heapq.heappop(self._events)
            if self.now - begun > seconds:
                raise RuntimeError(f"not over after {seconds:g} simulated seconds")
            event()
        return self.now - begun

    def _tick(self) -> None:
        self._controller.tick()
        self.at(self.now + TICK_SECONDS, self._tick)
