"""The processes of the chaos suite, each in a namespace of its own, and how to ask them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

import petps
from petps.cluster.controller import read_models
from petps.cluster.etcd import Access, Etcd
from petps.cluster.records import Keys, State
from petps.errors import PetpsError
from tests.chaos.disks import Disk
from tests.chaos.faults import (
    CLIENTS,
    CONTROLLERS,
    ETCD,
    KAFKA,
    NODES,
    PUSH_SERVERS,
    SERVERS,
    TRAINER,
)
from tests.chaos.network import Network
from tests.chaos.process import Process
from tests.chaos.rows import DIM, KEYS, MODEL, PARTITIONS, PUSH_MODEL, PUSH_TABLE, TABLE
from tests.chaos.tools import NotAvailable
from tests.etcd import server as etcd_server
from tests.kafka import broker

ROOT: Final = Path(__file__).resolve().parents[2]
PREFIX: Final = "/petps"
SERVERS_OF: Final = {MODEL: SERVERS, PUSH_MODEL: PUSH_SERVERS}
REPLICAS: Final = {MODEL: 2, PUSH_MODEL: 1}
PUSH_CAPACITY: Final = 100_000
DISK_MEBIBYTES: Final = {MODEL: 96, PUSH_MODEL: 96}
READY_SECONDS: Final = 90.0
FAKETIME: Final = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
NATIVE_PORT: Final = 7070
HTTP_PORT: Final = 7072
KAFKA_PORT: Final = 9092
PULLERS: Final = 2  # of each client node
PUSHERS: Final = 2


def wait_until(event: str, condition: Callable[[], object], seconds: float = READY_SECONDS) -> None:
    """Wait until ``condition()`` is true. Raise TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {seconds:g} s: {event}")
        time.sleep(0.05)


class Fleet:
    """All processes, which are started by start() and ended by close().

    broken: a folder with a sitecustomize that breaks one rule, for the processes of petps.
    client_seconds: the life of a client that pulls.
    """

    def __init__(
        self, folder: Path, seed: int, *, client_seconds: float, broken: Path | None = None
    ) -> None:
        self.folder, self.seed, self._client_seconds = folder, seed, client_seconds
        self.network = Network(NODES)
        self.disks: dict[str, Disk] = {}
        self.processes: dict[str, Process] = {}
        path = [str(ROOT)] if broken is None else [str(broken), str(ROOT)]
        self._environment = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        self._endpoints = [f"http://{self.network.address(name)}:2379" for name in ETCD]
        self.log = f"kafka://{self.network.address(KAFKA)}:{KAFKA_PORT}/deltas"
        self.config = folder / "petps.toml"
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    # ---- what the run asks

    def address(self, name: str) -> str:
        """Return the native address of a server."""
        return f"{self.network.address(name)}:{NATIVE_PORT}"

    def name_of(self, address: str) -> str:
        """Return the name of the server at an address."""
        return next(name for name in NODES if self.address(name) == address)

    def url(self, model: str) -> str:
        """Return the URL of a model at all its servers."""
        return f"petps://{','.join(map(self.address, SERVERS_OF[model]))}/{model}"

    def status(self, name: str, seconds: float = 2.0) -> dict[str, Any]:
        """Return the status of a server by HTTP. Raise OSError."""
        url = f"http://{self.network.address(name)}:{HTTP_PORT}/status.json"
        try:
            with urllib.request.urlopen(url, timeout=seconds) as reply:
                status: dict[str, Any] = json.load(reply)
        except HTTPException as error:  # it was killed in the middle of a reply
            raise OSError(f"{url}: {error!r}") from error
        return status

    def is_ready(self, name: str) -> bool:
        """Return whether the present life of a server has opened its doors."""
        try:
            facts = json.loads((self.folder / f"{name}.ready.json").read_text())
        except (OSError, ValueError):
            return False
        return bool(facts["pid"] == self.processes[name].pid)

    def wait_ready(self, name: str) -> None:
        """Wait until a server is ready. Raise TimeoutError, or RuntimeError if it has ended."""

        def is_ready() -> bool:
            if self.processes[name].pid is None:
                log = self.processes[name].log.read_text()[-1500:]
                raise RuntimeError(f"{name} does not start: {log}")
            return self.is_ready(name)

        wait_until(f"{name} is ready", is_ready)

    def etcd(self) -> Etcd:
        """Return a client of etcd, which the caller closes."""
        return Etcd(Access(tuple(self._endpoints)))

    def state(self, etcd: Etcd, model: str = MODEL) -> State:
        """Return what etcd has of a model. Raise Unavailable."""
        read = etcd.read(Keys(PREFIX, model).root)
        return read_models(PREFIX, read).get(model, State(model))

    def petps(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a command of `petps cluster`, which may fail."""
        command = [sys.executable, "-m", "petps.cli", "cluster", *map(str, arguments)]
        return subprocess.run(
            [*command, "--config", str(self.config)],
            capture_output=True, text=True, check=False, timeout=READY_SECONDS,
        )  # fmt: skip

    def must(self, *arguments: object) -> None:
        """Run a command of `petps cluster`, which must succeed."""
        process = self.petps(*arguments)
        if process.returncode != 0:
            raise RuntimeError(f"petps cluster {arguments}: {process.stdout}{process.stderr}")

    def drop(self, name: str, instance: str) -> str:
        """Drop an old instance of a server, which may fail. Return the command's output."""
        pool = self.disks[name].folder / "pool"
        command = [sys.executable, "-m", "petps.cli", "drop", str(pool), instance, "--yes"]
        process = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=READY_SECONDS
        )
        return (process.stdout + process.stderr)[-300:]

    # ---- start and end

    def start(self) -> None:
        """Start everything but the clients, until each server has the first version."""
        for name in (*ETCD, KAFKA, *SERVERS, *PUSH_SERVERS):
            self.processes[name].start()
        for name in (*SERVERS, *PUSH_SERVERS):
            self.wait_ready(name)
            wait_until(f"{name} is registered", lambda: self._is_registered(name))  # noqa: B023
        self.must("init", self._first_map(MODEL), "--model", MODEL)
        self.must("init", self._first_map(PUSH_MODEL), "--model", PUSH_MODEL)
        for name in (*CONTROLLERS, TRAINER):
            self.processes[name].start()
        for name in SERVERS:
            wait_until(f"{name} has a version", lambda: self.applied(name) >= 1)  # noqa: B023
        for name in PUSH_SERVERS:
            wait_until(
                f"{name} has the map",
                lambda: self.status(name)["shard"]["owned"] != "none",  # noqa: B023
            )

    def start_clients(self) -> None:
        """Start the clients."""
        for name in CLIENTS:
            self.processes[name].start()

    def applied(self, name: str) -> int:
        """Return the version that the model's instance of a server has applied; -1: no answer."""
        try:
            return applied_of(self.status(name))[1]
        except (OSError, ValueError):
            return -1

    def close(self) -> None:
        """End and remove all of it but the folder."""
        for process in self.processes.values():
            process.resume()
            process.kill()
        for disk in self.disks.values():
            disk.close()
        self.network.close()

    def _is_registered(self, name: str) -> bool:
        try:
            return bool(self.status(name)["cluster"]["is_registered"])
        except (OSError, ValueError, KeyError):
            return False

    def _first_map(self, model: str) -> Path:
        servers = SERVERS_OF[model]
        owned: dict[str, list[int]] = {name: [] for name in servers}
        for partition in range(PARTITIONS):
            for replica in range(REPLICAS[model]):
                owned[servers[(partition + replica) % len(servers)]].append(partition)
        entries = [
            {"address": self.address(name), "partitions": numbers}
            for name, numbers in owned.items()
        ]
        document = {"model": model, "version": 1, "partitions": PARTITIONS, "servers": entries}
        path = self.folder / f"{model}.map.json"
        path.write_text(json.dumps(document))
        return path

    # ---- preparation

    def _prepare(self) -> None:
        self.config.write_text(
            f'[pool]\npath = "unused"\n[cluster]\nendpoints = {json.dumps(self._endpoints)}\n'
            f'prefix = "{PREFIX}"\n{_CLUSTER}'
        )
        for number, name in enumerate(ETCD):
            self._add(name, self._etcd_command(number))
        self._prepare_kafka()
        for name in (*SERVERS, *PUSH_SERVERS):
            self._prepare_server(name)
        for name in CONTROLLERS:
            command = ["-m", "petps.cli", "controller", "--config", str(self.config)]
            self._add_petps(name, *command, "--name", name)
        arguments = (str(self.folder), self.log, str(self.seed))
        self._add_petps(TRAINER, "-m", "tests.chaos.trainer", *arguments, has_clock=False)
        for name in CLIENTS:
            self._add_petps(
                name, "-m", "tests.chaos.clients", str(self.folder), name, self.url(MODEL),
                self.url(PUSH_MODEL), str(self.seed), str(self._client_seconds), str(PULLERS),
                str(PUSHERS),
                has_clock=False,
            )  # fmt: skip

    def _add(self, name: str, command: list[str], **options: Any) -> None:
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        command = [*self.network.prefix(name), *command]
        self.processes[name] = Process(name, command, logs, **options)

    def _add_petps(
        self,
        name: str,
        *arguments: str,
        has_clock: bool = True,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        environment = dict(self._environment)
        if has_clock:
            self.set_clock(name, 0)
            environment |= {
                "LD_PRELOAD": str(FAKETIME),
                "FAKETIME_TIMESTAMP_FILE": str(self._clock_file(name)),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        command = [sys.executable, *arguments]
        self._add(name, command, environment=environment, before=before)

    def set_clock(self, name: str, seconds: float) -> None:
        """Let a process see a clock that is wrong by so many seconds, at most a second later."""
        temporary = self._clock_file(name).with_suffix(".new")
        temporary.write_text(f"{seconds:+g}\n")
        temporary.replace(self._clock_file(name))

    def _clock_file(self, name: str) -> Path:
        return self.folder / f"{name}.clock"

    def _etcd_command(self, number: int) -> list[str]:
        own = self.network.address(ETCD[number])
        members = [f"{name}=http://{self.network.address(name)}:2380" for name in ETCD]
        return [
            str(etcd_server.program()), "--name", ETCD[number],
            "--data-dir", str(self.folder / ETCD[number]),
            "--listen-client-urls", f"http://{own}:2379",
            "--advertise-client-urls", f"http://{own}:2379",
            "--listen-peer-urls", f"http://{own}:2380",
            "--initial-advertise-peer-urls", f"http://{own}:2380",
            "--initial-cluster", ",".join(members),
            "--heartbeat-interval", "100", "--election-timeout", "1000",
        ]  # fmt: skip

    def _prepare_kafka(self) -> None:
        home = self.folder / KAFKA
        home.mkdir()
        own = self.network.address(KAFKA)
        (home / "server.properties").write_text(_KAFKA.format(own=own, data=home / "data"))
        (home / "log4j2.properties").write_text(_LOG4J)
        command = [broker.java(), *broker.JAVA_OPTIONS, "-cp", f"{broker.artifacts()}/*"]
        command += [f"-Dlog4j2.configurationFile={home / 'log4j2.properties'}"]
        settings = str(home / "server.properties")
        form = ["kafka.tools.StorageTool", "format", "-t", uuid.uuid4().hex[:22], "-c", settings]
        subprocess.run([*command, *form], check=True, capture_output=True, cwd=home)
        self._add(KAFKA, [*command, "kafka.Kafka", settings])

    def _prepare_server(self, name: str) -> None:
        is_pushed = name in PUSH_SERVERS
        model = PUSH_MODEL if is_pushed else MODEL
        self.disks[name] = Disk(self.folder / name, DISK_MEBIBYTES[model])
        path = self.disks[name].folder / "pool"
        with petps.create(path, durability="process") as pool:
            pool.create_model(model, PARTITIONS)
            if is_pushed:
                pool.create_table(PUSH_TABLE, dim=DIM, capacity=PUSH_CAPACITY, feed="push")
            else:
                pool.create_table(TABLE, dim=DIM, capacity=2 * KEYS, feed="delta")
        config = self.folder / f"{name}.toml"
        ingest = "" if is_pushed else f'[ingest]\nlog = "{self.log}"\n'
        store = f'store = "{self.folder / "moves"}"\n' if is_pushed else ""
        config.write_text(
            f'[pool]\npath = "{path}"\n[model]\nname = "{model}"\npartitions = {PARTITIONS}\n'
            f'[server]\nhost = "{self.network.address(name)}"\ninsecure = true\ngrpc = false\n'
            f'workers = 1\ndrain_seconds = 1.0\n[scrub]\nevery = "never"\n{ingest}'
            f'[cluster]\nendpoints = {json.dumps(self._endpoints)}\nprefix = "{PREFIX}"\n'
            f"{store}{_CLUSTER}"
        )
        ready = self.folder / f"{name}.ready.json"
        self._add_petps(
            name, "-m", "petps.cli", "serve", "--config", str(config), "--ready-file", str(ready),
            before=lambda: ready.unlink(missing_ok=True),
        )  # fmt: skip


def applied_of(status: dict[str, Any]) -> tuple[str, int]:
    """Return the instance that a server's model names, and the version that it has applied."""
    alias = status["aliases"].get(MODEL)  # there is none before the first switch
    record = next(r for r in status["instances"] if alias in (None, r["id"]))
    return str(record["name"]), int(record["applied_version"])


def check_programs() -> None:
    """Raise NotAvailable unless the programs of others are here."""
    try:
        etcd_server.program()
        broker.java()
        broker.artifacts()
    except (etcd_server.NotAvailable, broker.NotAvailable) as error:
        raise NotAvailable(str(error)) from None
    if not FAKETIME.exists():
        raise NotAvailable("libfaketime is missing: deploy/bootstrap.sh chaos installs it")


def remove_folder(folder: Path) -> None:
    """Remove what a run has left of a Fleet."""
    shutil.rmtree(folder, ignore_errors=True)


__all__ = ["Fleet", "PetpsError", "applied_of", "check_programs", "remove_folder", "wait_until"]

_CLUSTER: Final = """lease_seconds = 5
replace_after = "15s"
drain_seconds = 1.0
move_pause_seconds = 0.5
"""
_KAFKA: Final = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{own}:9093
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://{own}:9092,CONTROLLER://{own}:9093
advertised.listeners=PLAINTEXT://{own}:9092
log.dirs={data}
auto.create.topics.enable=true
num.partitions=1
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
log.cleaner.dedupe.buffer.size=2097152
log.index.size.max.bytes=65536
num.network.threads=2
num.io.threads=2
background.threads=2
num.recovery.threads.per.data.dir=1
group.initial.rebalance.delay.ms=0
"""
_LOG4J: Final = """
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %c %m%n
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
"""
