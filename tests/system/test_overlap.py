"""Servers that share some partitions and not others: kills, stops, zones, other maps."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import petps_client
import pytest

from petps import _native
from tests.seed import SEED
from tests.system.servers import PARTITIONS, WAIT_MS, Puller, Server, wait_until
from tests.system.test_shards import ALL, FedFleet, check, rows_of

pytestmark = pytest.mark.system

# Each partition has two owners, and no two servers the same partitions.
OWNED = (["0-3"], ["2-5"], ["4-7"], ["6-7", "0-1"])
SMALL = ALL[:400]


@pytest.fixture
def fleet(serve: Callable[..., Server], tmp_path: Path) -> Iterator[FedFleet]:
    """Four servers with two owners of each partition, and version 1 of the rows."""
    fleet = partial(FedFleet, serve, tmp_path)(4)
    fleet.own(*OWNED)
    version = fleet.publish()
    wait_for_version(fleet, version)
    yield fleet
    for server in fleet.servers:
        server.child.send_signal(signal.SIGCONT)  # so that it can be stopped


def pull(client: petps_client.Client, version: int, **options: Any) -> None:
    rows, found = client.pull(
        "fed", ALL, return_mask=True, min_version=version, wait_ms=WAIT_MS, **options
    )
    check(rows, found, version)


def wait_for_version(fleet: FedFleet, version: int) -> None:
    for server in fleet.servers:
        wait_until(
            "all have the version",
            lambda: server.status()["instances"][0]["applied_version"] >= version,  # noqa: B023
        )


def pulls_of(server: Server) -> int:
    return sum(table["pulls"] for table in server.status()["tables"])


def test_no_pull_fails_when_a_server_is_killed(fleet: FedFleet) -> None:
    with petps_client.connect(fleet.url(0, 1, 2, 3), deadline_ms=WAIT_MS) as client:
        check(*client.pull("fed", ALL, return_mask=True), 1)
        for server in fleet.servers[:2]:
            server.kill()
            for _ in range(50):
                check(*client.pull("fed", ALL, return_mask=True), 1)
            server.restart()
            wait_for_version(fleet, fleet.publisher.version)


def test_a_stopped_server_holds_no_pull_back(fleet: FedFleet) -> None:
    """Its keys are asked of others: as a hedge, and later because it is silent."""
    with petps_client.connect(fleet.url(0, 1, 2, 3), deadline_ms=WAIT_MS) as client:
        for _ in range(400):
            client.pull("fed", SMALL)
        stopped = fleet.servers[2]
        stopped.child.send_signal(signal.SIGSTOP)
        before = client.pull_counts()["hedges_won"]

        def has_hedged() -> bool:
            rows, found = client.pull("fed", SMALL, return_mask=True)
            np.testing.assert_array_equal(rows[found], rows_of(SMALL, 1)[found])
            return client.pull_counts()["hedges_won"] > before

        wait_until("a hedge was answered", has_hedged)
        for _ in range(100):
            check(*client.pull("fed", ALL, return_mask=True), 1)
        stopped.child.send_signal(signal.SIGCONT)
        for _ in range(100):  # late replies disturb no later pull
            check(*client.pull("fed", ALL, return_mask=True), 1)
        counts = client.pull_counts()
        assert counts["hedges"] <= counts["pulls"] * len(OWNED) / 20


def test_a_client_prefers_its_zone(fleet: FedFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(fleet.map_file.read_text())
    for number, server in enumerate(document["servers"]):
        server["zone"] = "ab"[number % 2]
    path = fleet.map_file.with_suffix(".next")
    path.write_text(json.dumps(document | {"version": fleet.version + 1}))
    fleet.use_map(path)
    assert fleet.servers[1].status()["shard"]["zone"] == "b"
    monkeypatch.setenv("PETPS_ZONE", "b")
    with petps_client.connect(fleet.url(0), hedge=False, deadline_ms=WAIT_MS) as client:

        def asks_only_near_servers() -> bool:
            before = [pulls_of(server) for server in fleet.servers]
            for _ in range(50):
                client.pull("fed", ALL)
            after = [pulls_of(server) for server in fleet.servers]
            return after[0] == before[0] and after[2] == before[2]

        # A near one that a busy machine delays counts as silent for a while.
        wait_until("only near servers are asked", asks_only_near_servers)
        before = [pulls_of(server) for server in fleet.servers]
        fleet.servers[1].kill()
        for _ in range(50):
            check(*client.pull("fed", ALL, return_mask=True, deadline_ms=WAIT_MS), 1)
        assert pulls_of(fleet.servers[0]) > before[0]


def has_pulled(puller: Puller, count: int) -> bool:
    return puller.pulls >= count or puller.error is not None


def test_maps_change_under_pulls(fleet: FedFleet) -> None:
    """Any sets of owners, which all follow the log from the beginning."""
    chance = random.Random(SEED)
    everything = {address: ["0-7"] for address in fleet.addresses}

    def own_at_random() -> None:
        owned: list[set[int]] = [set() for _ in fleet.servers]
        for partition in range(PARTITIONS):
            for number in chance.sample(range(len(owned)), chance.choice((1, 2, 3))):
                owned[number].add(partition)
        for partitions in owned:
            partitions |= set() if partitions else {0}
        fleet.own(*map(sorted, owned), follows=everything)

    fleet.own(*OWNED, follows=everything)
    url = fleet.url(0, 1, 2, 3)
    pull_one = partial(pull, version=1)
    with Puller(url, pull_one, through_kills=False, deadline_ms=WAIT_MS) as puller:
        for _ in range(6):
            enough = puller.pulls + 2
            own_at_random()
            wait_until("pulls by this map", partial(has_pulled, puller, enough))


def test_a_push_needs_one_owner(fleet: FedFleet) -> None:
    fleet.own(["0-3"], ["3-5"], [6], [7])
    partitions = _native.partition_of(ALL, PARTITIONS)
    alone, shared = ALL[partitions != 3], ALL[partitions == 3]
    with petps_client.connect(fleet.url(0), deadline_ms=WAIT_MS) as client:
        client.push("items", alone, rows_of(alone, 2), deadline_ms=WAIT_MS)
        with pytest.raises(petps_client.FailedPrecondition, match="are replicas"):
            client.push("items", shared, rows_of(shared, 2))
