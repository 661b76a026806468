"""Servers of a cluster with a real etcd, and `petps controller` processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import numpy.typing as npt
from typer.testing import CliRunner

import petps
from petps.checkpoint import BaseInfo, split_by_partition, write_base
from petps.cli.app import app
from petps.cli.cluster_target import ClusterTarget
from petps.cluster.etcd import Etcd
from petps.cluster.records import Keys, State
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.publish import Publisher
from tests.etcd.server import EtcdServers
from tests.ports import stable_port
from tests.system import servers
from tests.system.servers import PARTITIONS, PETPS, Server, wait_until

Feed = Literal["delta", "push"]
DIM = 8
KEYS = 3000
ALL = np.arange(KEYS, dtype=np.uint64)
LEASE_SECONDS = 6  # of controllers, whose death others must notice
# Of servers: a busy machine may renew a lease seconds late. A test that needs its end ends it.
LONG_LEASE_SECONDS = 60
NAMES: dict[Feed, str] = {"delta": "fed", "push": "pushed"}  # of tables


def rows_of(keys: npt.NDArray[np.uint64], version: int) -> npt.NDArray[np.float32]:
    """Return rows float32[n, DIM] that identify their key and version."""
    columns = np.arange(DIM, dtype=np.float32)
    return (keys.astype(np.float32)[:, None] + columns * np.float32(version)).astype(np.float32)


def _has_version(server: Server, version: int) -> bool:
    """Return whether a server has applied a version in all partitions that it owns."""
    status = server.status()
    applied = int(status["instances"][0]["applied_version"])
    return bool(status["shard"]["owned"] == "none") or applied >= version


class Controller:
    """A `petps controller` child."""

    def __init__(self, config: Path, folder: Path, name: str, lease_seconds: int) -> None:
        self.name = name
        self._output = folder / f"{name}.out"
        command = [*PETPS, "controller", "--config", str(config), "--name", name]
        with self._output.open("wb") as output:
            environment = {**os.environ, "PETPS_CLUSTER_LEASE_SECONDS": str(lease_seconds)}
            self.child = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    @property
    def output(self) -> str:
        """Return what it has printed."""
        return self._output.read_text()

    def kill(self) -> None:
        """Kill it with -9."""
        self.child.kill()
        self.child.wait()

    def stop(self) -> None:
        """End it; it resigns."""
        self.child.send_signal(signal.SIGTERM)
        assert self.child.wait(servers.WAIT_SECONDS) == 0, self.output


class Cluster:
    """Servers of the model 'default', and an etcd. feeds: of its tables 'fed' and 'pushed'."""

    def __init__(
        self,
        serve: Callable[..., Server],
        etcd: EtcdServers,
        folder: Path,
        count: int,
        *,
        settings: str = "",
        drain_seconds: float = 0.2,
        rows_per_second: int = 0,
        zones: Sequence[str] = (),
        feeds: Sequence[Feed] = ("delta",),
        lease_seconds: int = LONG_LEASE_SECONDS,
        switch: str = "auto",
    ) -> None:
        """Start ``count`` servers. settings: more lines of [cluster]. switch: of [ingest]."""
        self.etcd, self.folder = etcd, folder
        self.log = DirectoryLog(folder / "log", partitions=PARTITIONS)
        self.publisher = Publisher(self.log, "default", tables=[TableSchema("fed", "f32", DIM)])
        self.publisher.begin_continue(None)
        self.config = folder / "petps.toml"
        self.feeds = feeds
        log = f'log = "{folder / "log"}"\n' if "delta" in feeds else ""
        self.config.write_text(
            f'[pool]\npath = "unused"\n[ingest]\n{log}'
            f'rows_per_second = {rows_per_second}\nswitch = "{switch}"\n[cluster]\n'
            f'store = "{folder / "store"}"\n'
            f"endpoints = {json.dumps(etcd.endpoints)}\nlease_seconds = {lease_seconds}\n"
            f"drain_seconds = {drain_seconds}\nmove_pause_seconds = 0.0\n" + settings
        )
        self.servers: list[Server] = []
        self.controllers: list[Controller] = []
        for number in range(count):
            path = folder / f"server{number}" / "pool"
            path.parent.mkdir()
            with petps.create(path, durability="process") as opened:
                for feed in feeds:
                    opened.create_table(NAMES[feed], dim=DIM, capacity=4 * KEYS, feed=feed)
            environment = {"PETPS_CLUSTER_ZONE": zones[number]} if zones else None
            self.servers.append(
                serve(
                    path, "--config", self.config, "--port", stable_port(), environment=environment
                )
            )
        self.addresses = [f"127.0.0.1:{server.wait_ready()['port']}" for server in self.servers]

    def url(self, *numbers: int) -> str:
        """Return the address of the model at the servers with these numbers."""
        numbers = numbers or tuple(range(len(self.addresses)))
        return f"petps://{','.join(self.addresses[number] for number in numbers)}/default"

    def petps(self, *arguments: object) -> str:
        """Return the output of a command of `petps cluster` that must succeed.

        It runs in this process, because to start one takes longer than a move.
        """
        command, *rest = map(str, arguments)
        arguments = ("cluster", command, *rest, "--config", self.config)
        with mock.patch("petps.cli.cluster_target.PATIENCE_SECONDS", servers.WAIT_SECONDS):
            result = CliRunner().invoke(app, [*map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.stdout

    def status(self) -> dict[str, Any]:
        """Return what `petps cluster status` reports."""
        report: dict[str, Any] = json.loads(self.petps("status", "--json"))
        return report

    def settle(self) -> dict[str, Any]:
        """Wait until nothing moves, and return the report."""
        wait = servers.WAIT_SECONDS
        report: dict[str, Any] = json.loads(self.petps("status", "--json", "--wait", wait))
        return report

    def start(self, owners: Sequence[int] | None = None, *, replicas: int = 1) -> int:
        """Publish a version, write the first map, and wait until every server uses it.

        owners: the servers that own partitions; by default all. Return the version.
        """
        version = self.publish() if "delta" in self.feeds else 0
        self.wait_registered()
        if owners is None:
            self.petps("init", "--replicas", replicas)
        else:
            self.petps("init", self.map_of(owners))
        self.settle()
        for server in self.servers:
            wait_until("it has the version", lambda: _has_version(server, version))  # noqa: B023
        return version

    def map_of(self, owners: Sequence[int]) -> Path:
        """Return a file with a map in which the first of ``owners`` owns every partition."""
        path = self.folder / "first.json"
        entry = {"address": self.addresses[owners[0]], "partitions": [f"0-{PARTITIONS - 1}"]}
        document = {"model": "default", "version": 1, "partitions": PARTITIONS, "servers": [entry]}
        path.write_text(json.dumps(document))
        return path

    def state(self) -> State:
        """Return the state in etcd."""
        with closing(self._connect()) as etcd:
            return ClusterTarget(etcd, Keys("/petps", "default")).state()

    def end_lease(self, number: int) -> None:
        """End the lease of a server that was killed, as its time would."""
        key = Keys("/petps", "default").member(self.addresses[number])
        with closing(self._connect()) as etcd:
            etcd.revoke(etcd.read(key).values[key].lease)

    def _connect(self) -> Etcd:
        wait = servers.WAIT_SECONDS
        return Etcd(self.etcd.access(), seconds=wait, patience=wait)

    def is_elected(self, controller: Controller) -> bool:
        """Return whether this controller is the elected one."""
        return bool(self.status()["controller"] == controller.name)

    def follows(self, number: int) -> list[int]:
        """Return the partitions that a server follows, as it reports them."""
        member = self.state().members.get(self.addresses[number])
        return [] if member is None else sorted(member.partitions)

    def received(self, partition: int) -> int:
        """Return how many parts of a copy the target of a move has."""
        received = self.state().received.get(partition)
        return 0 if received is None else received.parts

    def owners_of(self, address: str) -> int:
        """Return how many partitions an address owns."""
        cluster_map = self.state().map
        assert cluster_map is not None
        return sum(address in present for present in cluster_map.owners)

    def control(self, name: str = "first", lease_seconds: int = LEASE_SECONDS) -> Controller:
        """Start a controller."""
        self.controllers.append(Controller(self.config, self.folder, name, lease_seconds))
        return self.controllers[-1]

    def wait_registered(self, *numbers: int) -> None:
        """Wait until these servers are registered."""
        for number in numbers or range(len(self.servers)):
            wait_until(
                f"server {number} is registered",
                lambda: self.servers[number].status()["cluster"]["is_registered"],  # noqa: B023
            )

    def publish(self) -> int:
        """Publish the next version: all rows."""
        version = self.publisher.version + 1
        self.publisher.publish("fed", ALL, rows_of(ALL, version))
        return self.publisher.commit()

    def begin(self, instance: str) -> int:
        """Begin another run with a base of an instance: all rows, at the next version."""
        version = self.publisher.version + 1
        schema = TableSchema("fed", "f32", DIM)
        chunks = split_by_partition(
            schema, ALL, lambda keys: (schema.encode(rows_of(keys, version)), None), PARTITIONS
        )
        info = BaseInfo(instance=instance, version=version, partitions=PARTITIONS)
        write_base(self.folder / "bases" / instance, "default", info, {schema: chunks})
        self.publisher = Publisher(self.log, "default", tables=[schema])
        self.publisher.begin_base(instance, version=version, instance=instance)
        return version

    def rows(self, number: int) -> int:
        """Return how many rows a server has, in all tables."""
        return sum(int(table["rows"]) for table in self.servers[number].status()["tables"])

    def close(self) -> None:
        """Kill the controllers."""
        for controller in self.controllers:
            controller.kill()
