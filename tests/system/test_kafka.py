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
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import petps_client
import pytest

import petps
from petps import _native
from petps.delta import Delivery, Kind, open_log, read_header
from tests.kafka.broker import Broker
from tests.python.publish.trainer_process import DIM, KEYS, PARTITIONS, load, rows_of
from tests.system.servers import WAIT_MS, WAIT_SECONDS, Fleet, Puller, Server, connect, wait_until

pytestmark = pytest.mark.system

SERVERS = 2
SERVER_KILLS = 20
BROKER_KILLS = 3
TRAINER_KILLS = 3
VERSIONS = 300
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
        written = self.folder / "enough.new"
        written.write_text(str(version))
        written.replace(self.folder / "enough")  # never read half written
        assert self.process.wait(WAIT_SECONDS) == 0, self._errors.read_text()


def print_diagnosis(fleet: Fleet) -> None:
    """Print facts that show why a server lags, for a failed test."""
    for number, server in enumerate(fleet.servers):
        print(f"---- server {number} printed:\n{server.errors}")
        try:
            print(json.dumps(server.status()["ingest"], indent=1))
        except OSError as error:
            print(f"the server does not answer: {error}")


def pull_random(rng: np.random.Generator) -> Callable[[petps_client.Client], None]:
    """Return a function that pulls random keys of both shards and checks the rows."""

    def pull(client: petps_client.Client) -> None:
        keys = rng.integers(0, KEYS, 500).astype(np.uint64)
        rows, found = client.pull("items", keys, return_mask=True)
        np.testing.assert_array_equal(
            rows[found], rows_of(keys[found], rows[found, 0].astype(np.int64))
        )

    return pull


@pytest.fixture
def place(kafka: Broker, topic: Callable[[], str]) -> str:
    return f"kafka://{kafka.address}/{topic()}"


@pytest.fixture
def fleet(serve: Callable[..., Server], tmp_path: Path, place: str) -> Fleet:
    """Return two servers, each with half of the partitions."""
    pools = [tmp_path / f"server{i}" / "pool" for i in range(SERVERS)]
    for path in pools:
        path.parent.mkdir()
        with petps.create(path, durability="process") as pool:
            pool.create_table("items", dim=DIM, capacity=KEYS, feed="delta")
    fleet = Fleet(serve, tmp_path, pools, f'log = "{place}"\nbases = "{tmp_path / "bases"}"')
    fleet.own(["0-3"], ["4-7"])
    return fleet


@pytest.fixture
def trainer(tmp_path: Path, place: str, seed: int) -> Iterator[Trainer]:
    publisher = Trainer(tmp_path, place, seed)
    yield publisher
    if publisher.process.poll() is None:
        publisher.process.kill()
        publisher.process.wait()


@pytest.mark.timeout(1800)
def test_kills_of_everything_lose_nothing(
    kafka: Broker, place: str, fleet: Fleet, trainer: Trainer, seed: int
) -> None:
    chance = random.Random(seed)
    kills = ["server"] * SERVER_KILLS + ["broker"] * BROKER_KILLS + ["trainer"] * TRAINER_KILLS
    chance.shuffle(kills)
    url = fleet.url(0, 1)
    try:
        with Puller(url, pull_random(np.random.default_rng(seed))) as puller:
            for kill in kills:
                time.sleep(chance.uniform(0.05, 0.6))
                if kill == "server":
                    chance.choice(fleet.servers).restart()
                elif kill == "broker":
                    kafka.restart()
                else:
                    trainer.kill()
                    trainer.start()
            trainer.finish(VERSIONS)
            with connect(url) as client:
                version = int(load(trainer.folder).max())
                assert version >= VERSIONS
                rows, found = client.pull(
                    "items", ALL, return_mask=True, min_version=version, wait_ms=WAIT_MS
                )
    except Exception:
        print_diagnosis(fleet)
        raise
    assert puller.pulls > 0
    state = load(trainer.folder)
    np.testing.assert_array_equal(found, state > 0)
    np.testing.assert_array_equal(rows[found], rows_of(ALL[found], state[found]))
    _check_status(fleet, state, version)
    _check_log(place, version)
    print(f"{version} versions, {puller.pulls} pulls through {len(kills)} kills")


def _check_status(fleet: Fleet, state: np.ndarray[Any, np.dtype[np.int64]], version: int) -> None:
    """Check that each shard has exactly its keys, and nothing was refused or left out."""
    owner = _native.partition_of(ALL, PARTITIONS) // (PARTITIONS // SERVERS)
    for number, server in enumerate(fleet.servers):
        wait_until("it has asked the brokers again", partial(_is_following, server))
        status = server.status()
        row_counts = {table["name"]: table["rows"] for table in status["tables"]}
        assert row_counts["items"] == np.count_nonzero(state[owner == number])
        ingest = status["ingest"]
        assert ingest["version"] == version
        assert ingest["dense"] == f"dense/{version}"
        assert not any(ingest["refused"].values())
        assert len(ingest["partitions"]) == PARTITIONS // SERVERS
        for partition in ingest["partitions"]:
            assert partition["version"] == version
            for counter in ("lag_records", "gaps", "zombies", "conflicts", "dead_letters"):
                assert partition[counter] == 0, partition
    for server in fleet.servers:
        server.end()
        with petps.open(server.pool) as pool:
            assert pool.verify().clean


def _is_following(server: Server) -> bool:
    """Return whether the last requests to the brokers succeeded: those before saw them killed."""
    return all(of["state"] == "following" for of in server.status()["ingest"]["partitions"])


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
