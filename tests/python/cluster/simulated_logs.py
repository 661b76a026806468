"""Servers whose pools follow a log: its runs and versions, restarts of ingest, and faults.

In World a partition that is followed becomes whole at once. Here a server reads the log to its end
each time that it starts or follows something else. Its pool may be of another log with newer runs,
and then it passes over every message. It may have rows that are newer than what the log gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Self

from petps.cluster.maps import ClusterMap
from petps.cluster.records import Member, Move, PartitionReport, State, dump
from petps.server.cluster.newest import find_newer
from tests.python.cluster.simulated import (
    KEYS,
    MODEL,
    Actions,
    Broken,
    FixedTimes,
    SimulatedServer,
    World,
    act,
)

RUN: Final = 5  # of the publisher of the log
OTHER_RUN: Final = 900  # of another log's publisher
LOG_VERSION: Final = 1  # the one that a server has after it has read the log
FAULT: Final = "the map is wrong"


@dataclass
class LogServer(SimulatedServer):
    """A server whose pool has applied a run and a version of each partition.

    ``whole``: those of which it has rows of this log.
    """

    applied: dict[int, tuple[int, int]] = field(default_factory=dict)
    at_end: set[int] = field(default_factory=set)
    error: str = ""

    def report(self) -> str:
        """Return its record."""
        ingested = set() if self.map is None else self.map.ingested_by(self.address)
        reports = {p: self.report_of(p, is_caught_up=p in self.at_end) for p in ingested}
        version = 0 if self.map is None else self.map.version
        pool = f"pool of {self.address}"
        return dump(Member(self.address, pool, version, MODEL, reports, self.error))

    def report_of(self, partition: int, *, is_caught_up: bool) -> PartitionReport:
        """Return what it says of a partition."""
        run, version = self.applied.get(partition, (0, 0))
        return PartitionReport(version, is_caught_up, run)


@dataclass
class LogTimes(FixedTimes):
    """Whether what may last has lasted long enough for the controller to act."""

    is_late: bool = False

    def held_seconds(self, move: Move, condition: str, *, holds: bool) -> float:
        """See Times."""
        if holds and self.is_late and condition in ("faulty", "unserved"):
            return 60.0
        return super().held_seconds(move, condition, holds=holds)


class LogWorld(World[LogServer]):
    """Everything, with a log.

    faults: how many maps a server may still fail to use. The controller does not die here:
    test_interleavings.py has that.
    """

    def __init__(
        self,
        servers: Sequence[LogServer],
        cluster_map: ClusterMap,
        kills: int,
        *,
        faults: int = 0,
        is_lost_replaced: bool = True,
        fragile: str | None = None,
    ) -> None:
        self.faults = faults
        for server in servers:
            server.at_end = {
                n for n, names in enumerate(cluster_map.owners) if server.address in names
            }
            for number in server.at_end:
                server.applied.setdefault(number, (RUN, LOG_VERSION))
            server.whole = {n for n, (run, _) in server.applied.items() if run == RUN}
        super().__init__(
            servers, cluster_map, kills, controllers=1, is_lost_replaced=is_lost_replaced,
            fragile=fragile, has_fragile_controllers=False,
        )  # fmt: skip
        self.newest = max(
            version for s in servers for run, version in s.applied.values() if run == RUN
        )

    def clone(self) -> Self:
        other = super().clone()
        for server in other.servers.values():
            server.applied, server.at_end = dict(server.applied), set(server.at_end)
        return other

    def key(self) -> object:
        servers = tuple(
            (tuple(sorted(s.applied.items())), tuple(sorted(s.at_end)), s.error)
            for s in self.servers.values()
        )
        return super().key(), servers, self.faults

    def moments(self) -> Iterator[tuple[float, ...]]:
        """Yield the moments of World, and those after a minute in which every server has spoken."""
        is_quiet = all(map(self._has_spoken, self.servers.values()))
        for (away,) in super().moments():
            yield away, 0.0
            if is_quiet:
                yield away, 1.0

    def _has_spoken(self, server: LogServer) -> bool:
        if not server.is_running or server.lease not in self.etcd.leases:
            return True
        record = self.etcd.values.get(KEYS.member(server.address))
        is_late = not server.error and server.map_text != self.etcd.values[KEYS.map].text
        return not is_late and record is not None and record.text == server.report()

    def times(self, state: State, moment: tuple[float, ...]) -> LogTimes:
        return LogTimes(state, moment[0], moment[1] > 0)

    # ---- servers

    def _server_actions(self, address: str, server: LogServer) -> Actions:
        for name, action in super()._server_actions(address, server):
            if server.error and name.endswith(" takes the map"):
                continue
            if "catches up" not in name:
                yield name, action
        if not server.is_running:
            return
        if server.map is not None:
            for number in server.map.ingested_by(address) - server.at_end:
                yield (
                    f"{address} reads the log of {number} to its end",
                    partial(act, "_catch_up", address=address, partition_number=number),
                )
        if server.error:
            yield f"{address} is able again", partial(act, "_set_error", address=address, error="")
        elif self.faults:
            yield f"{address} has a fault", partial(act, "_set_error", address=address, error=FAULT)

    def _set_error(self, address: str, error: str) -> None:
        self.faults -= bool(error)
        self.servers[address].error = error

    def _catch_up(self, address: str, partition_number: int) -> None:
        server = self.servers[address]
        server.at_end.add(partition_number)
        run, version = server.applied.get(partition_number, (0, 0))
        if run <= RUN:
            server.applied[partition_number] = (RUN, max(version, LOG_VERSION))
            server.whole.add(partition_number)

    def _kill_server(self, address: str) -> None:
        super()._kill_server(address)
        self.servers[address].at_end.clear()

    def _take_map(self, server: LogServer) -> None:
        before = set() if server.map is None else server.map.ingested_by(server.address)
        super()._take_map(server)
        assert server.map is not None
        if before and server.map.ingested_by(server.address) != before:
            server.at_end.clear()  # its ingest starts again

    def _remove(self, address: str, partition_number: int) -> None:
        """See World. The rows stay while no owner has them."""
        server, state = self.servers[address], self.state()
        drop = state.drops[address, partition_number]
        assert state.map is not None
        owners = [name for name in state.map.owners[partition_number] if name != address]
        is_kept = not drop.is_foreign and find_newer(
            lambda _: server.report_of(partition_number, is_caught_up=False),
            MODEL, partition_number, owners, state,
        )  # fmt: skip
        if is_kept and partition_number not in server.removed:
            return
        before = set(server.removed)
        super()._remove(address, partition_number)
        if server.removed > before:
            run, _ = server.applied.get(partition_number, (0, 0))
            server.applied[partition_number] = (0 if drop.is_foreign else run, 0)

    # ---- rules

    def check(self) -> None:
        super().check()
        cluster_map = self.state().map
        assert cluster_map is not None
        for number, owners in enumerate(cluster_map.owners):
            for owner in owners:
                if self.servers[owner].applied.get(number, (0, 0))[0] == OTHER_RUN:
                    raise Broken(f"{owner} owns partition {number}, and has rows of another log")
            versions = [
                server.applied[number][1]
                for server in self.servers.values()
                if server.applied.get(number, (0, 0))[0] == RUN
            ]
            if max(versions, default=0) < self.newest:
                raise Broken(f"the newest rows of partition {number} are nowhere")
