"""Two shards follow a real Kafka while servers, broker and publisher are killed with -9.

There are 300 versions of 5,000 rows with deletions in 8 partitions. Servers are killed at 20 random
points, the broker and the publisher at 3 each, while a client pulls and checks that every row is
whole. At the end every served row equals the publisher's state, each shard holds exactly its half
of the keys, no version is missing and the counters add up. The seed is printed; PETPS_SEED repeats
it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import petps_client
import pytest

import petps
from petps import _native
from petps.delta import Delivery, Kind, open_log, read_header
from tests.kafka.broker import Broker
from tests.ports import stable_port
from tests.python.publish.trainer_process import DIM, KEYS, PARTITIONS, load, rows_of
from tests.system.patience import connect_when_up
from tests.system.test_serve import Process

pytestmark = pytest.mark.system

SERVERS = 2
SERVER_KILLS = 20
BROKER_KILLS = 3
TRAINER_KILLS = 3
VERSIONS = 300
WAIT_SECONDS = 120.0
ALL = np.arange(KEYS, dtype=np.uint64)


class Trainer:
    """The publisher's process, which is killed by its id and restarted."""

    def __init__(self, folder: Path, place: str, seed: int) -> None:
        self.folder = folder
        self._arguments = [str(folder), place, str(seed)]
        self._errors = folder / "trainer.log"
        self.start()

    def start(self) -> None:
        with self._errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.python.publish.trainer_process", *self._arguments],
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def kill(self) -> None:
        assert self.process.poll() is None, self._errors.read_text()
        self.process.kill()
        self.process.wait()

    def finish(self, version: int) -> None:
        (self.folder / "enough").write_text(str(version))
        assert self.process.wait(WAIT_SECONDS) == 0, self._errors.read_text()


class Shards:
    """The servers, each with its half of the partitions."""

    def __init__(self, folder: Path, place: str) -> None:
        self.folder = folder
        self.config = folder / "petps.toml"
        self.config.write_text(
            f'[pool]\npath = "unused"\n[ingest]\nlog = "{place}"\nbases = "{folder / "bases"}"\n'
        )
        self.map_file = folder / "shards.json"
        self._write_map(["127.0.0.1:1"])
        self.pools = [folder / f"server{i}" / "pool" for i in range(SERVERS)]
        for path in self.pools:
            path.parent.mkdir()
            with petps.create(path, durability="process") as pool:
                pool.create_table("items", dim=DIM, capacity=KEYS, feed="delta")
        self.processes = [self._process(i, "--port", stable_port()) for i in range(SERVERS)]
        self.facts = [process.wait_ready() for process in self.processes]
        self._write_map([f"127.0.0.1:{facts['port']}" for facts in self.facts])

    def _write_map(self, addresses: list[str]) -> None:
        share = PARTITIONS // len(addresses)
        servers = [
            {"address": address, "partitions": list(range(i * share, (i + 1) * share))}
            for i, address in enumerate(addresses)
        ]
        document = {
            "model": "default",
            "version": len(addresses),
            "partitions": PARTITIONS,
            "servers": servers,
        }
        temporary = self.map_file.with_suffix(".new")
        temporary.write_text(json.dumps(document))
        temporary.replace(self.map_file)

    def _process(self, number: int, *arguments: object) -> Process:
        settings = ("--config", self.config, "--shard-map", self.map_file)
        return Process(self.pools[number], *settings, *arguments)

    @property
    def url(self) -> str:
        addresses = (f"127.0.0.1:{facts['port']}" for facts in self.facts)
        return f"petps://{','.join(addresses)}/default"

    def kill_and_restart(self, number: int) -> None:
        self.processes[number].kill()
        port = self.facts[number]["port"]
        self.processes[number] = self._process(number, "--port", port)
        self.facts[number] = self.processes[number].wait_ready()

    def status(self, number: int) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.facts[number]['http_port']}/status.json"
        with urllib.request.urlopen(url, timeout=30) as reply:
            status: dict[str, Any] = json.loads(reply.read())
        return status

    def print_diagnosis(self) -> None:
        """Print facts that show why a server lags, for a failed test."""
        for number, process in enumerate(self.processes):
            print(f"---- server {number} printed:\n{process.errors}")
            try:
                print(json.dumps(self.status(number)["ingest"], indent=1))
            except OSError as error:
                print(f"the server does not answer: {error}")

    def end(self) -> None:
        for process in self.processes:
            if process.child.poll() is None:
                process.child.kill()
                process.child.wait()


class Puller:
    """Thread that pulls random keys of both shards. An answer may be late, but never wrong."""

    def __init__(self, url: str, seed: int) -> None:
        self.pulls = 0
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url, np.random.default_rng(seed)))
        self._thread.start()

    def _run(self, url: str, rng: np.random.Generator) -> None:
        try:
            with connect_when_up(url, self._stop) as client:
                while not self._stop.is_set():
                    keys = rng.integers(0, KEYS, 500).astype(np.uint64)
                    try:
                        rows, found = client.pull("items", keys, return_mask=True)
                    except (petps_client.Unavailable, petps_client.DeadlineExceeded):
                        continue  # a server is down at this moment
                    np.testing.assert_array_equal(
                        rows[found], rows_of(keys[found], rows[found, 0].astype(np.int64))
                    )
                    self.pulls += 1
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_SECONDS)


@pytest.fixture
def place(kafka: Broker, topic: Callable[[], str]) -> str:
    return f"kafka://{kafka.address}/{topic()}"


@pytest.fixture
def shards(tmp_path: Path, place: str) -> Iterator[Shards]:
    servers = Shards(tmp_path, place)
    yield servers
    servers.end()


@pytest.fixture
def trainer(tmp_path: Path, place: str, seed: int) -> Iterator[Trainer]:
    publisher = Trainer(tmp_path, place, seed)
    yield publisher
    if publisher.process.poll() is None:
        publisher.process.kill()
        publisher.process.wait()


@pytest.mark.timeout(600)
def test_kills_of_everything_lose_nothing(
    kafka: Broker, place: str, shards: Shards, trainer: Trainer, seed: int
) -> None:
    chance = random.Random(seed)
    kills = ["server"] * SERVER_KILLS + ["broker"] * BROKER_KILLS + ["trainer"] * TRAINER_KILLS
    chance.shuffle(kills)
    puller = Puller(shards.url, seed)
    try:
        for kill in kills:
            time.sleep(chance.uniform(0.05, 0.6))
            if kill == "server":
                shards.kill_and_restart(chance.randrange(SERVERS))
            elif kill == "broker":
                kafka.restart()
            else:
                trainer.kill()
                trainer.start()
        trainer.finish(VERSIONS)
        with petps_client.connect(shards.url, deadline_ms=round(1e3 * WAIT_SECONDS)) as client:
            version = int(load(trainer.folder).max())
            assert version >= VERSIONS
            rows, found = client.pull(
                "items",
                ALL,
                return_mask=True,
                min_version=version,
                wait_ms=round(1e3 * WAIT_SECONDS),
            )
    except Exception:
        shards.print_diagnosis()
        raise
    finally:
        puller.stop()
    assert puller.error is None, puller.error
    assert puller.pulls > 0
    state = load(trainer.folder)
    np.testing.assert_array_equal(found, state > 0)
    np.testing.assert_array_equal(rows[found], rows_of(ALL[found], state[found]))
    _check_status(shards, state, version)
    _check_log(place, version)
    print(f"{version} versions, {puller.pulls} pulls through {len(kills)} kills")


def _check_status(shards: Shards, state: np.ndarray[Any, np.dtype[np.int64]], version: int) -> None:
    """Check that each shard has exactly its keys, and nothing was refused or left out."""
    owner = _native.partition_of(ALL, PARTITIONS) // (PARTITIONS // SERVERS)
    for number in range(SERVERS):
        status = shards.status(number)
        row_counts = {table["name"]: table["rows"] for table in status["tables"]}
        assert row_counts["items"] == np.count_nonzero(state[owner == number])
        ingest = status["ingest"]
        assert ingest["version"] == version
        assert ingest["dense"] == f"dense/{version}"
        assert not any(ingest["refused"].values())
        assert len(ingest["partitions"]) == PARTITIONS // SERVERS
        for partition in ingest["partitions"]:
            assert partition["state"] == "following", partition
            assert partition["version"] == version
            for counter in ("lag_records", "gaps", "zombies", "conflicts", "dead_letters"):
                assert partition[counter] == 0, partition
    for number, process in enumerate(shards.processes):
        process.child.terminate()
        assert process.child.wait(WAIT_SECONDS) == 0, process.errors
        with petps.open(shards.pools[number]) as pool:
            assert pool.verify().clean


def _check_log(place: str, version: int) -> None:
    """Check that every version is in every partition, as a commit or as the base of a run."""
    log = open_log(place, partitions=PARTITIONS)
    subscription = log.subscribe(log.start_offsets(range(PARTITIONS)))
    ends = log.end_offsets(range(PARTITIONS))
    versions_of: dict[int, set[int]] = {partition: set() for partition in range(PARTITIONS)}
    while any(subscription.positions()[p] < ends[p] for p in range(PARTITIONS)):
        for event in subscription.poll(max_bytes=8 << 20, timeout=1.0):
            assert isinstance(event, Delivery), event
            header = read_header(event.message)
            if header.kind in (Kind.COMMIT, Kind.BASE):
                versions_of[event.partition].add(header.version)
    subscription.close()
    log.close()
    last = [max(versions) for versions in versions_of.values()]
    assert last == [version] * PARTITIONS
    # A publisher that is killed during a commit leaves a version in only some partitions. The base
    # of its next run, which is a version too, replaces it.
    in_all, in_any = set.intersection(*versions_of.values()), set.union(*versions_of.values())
    assert in_any == set(range(1, version + 1))
    assert len(in_any - in_all) <= TRAINER_KILLS
