"""Two and three `petps serve` processes, each with a part of the keys, and a client of all."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import petps_client
import pytest

import petps
from petps import _native
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.publish import Publisher
from tests.system import servers
from tests.system.servers import PARTITIONS, WAIT_MS, Fleet, Puller, Server, wait_until

pytestmark = pytest.mark.system

DIM = 8
KEYS = 3000
MANY_KEYS = 60_000
ALL = np.arange(KEYS, dtype=np.uint64)


MakeFleet = Callable[..., "FedFleet"]


def rows_of(keys: npt.NDArray[np.uint64], version: int) -> npt.NDArray[np.float32]:
    """Return rows float32[n, DIM] that identify their key and version."""
    columns = np.arange(DIM, dtype=np.float32)
    return (keys.astype(np.float32)[:, None] + columns * np.float32(version)).astype(np.float32)


class FedFleet(Fleet):
    """Servers with a table that is pushed and a table that a log feeds."""

    def __init__(
        self, serve: Callable[..., Server], folder: Path, count: int, rows_per_second: int = 0
    ) -> None:
        pools = [folder / f"server{i}" / "pool" for i in range(count)]
        self.log = DirectoryLog(folder / "log", partitions=PARTITIONS)
        self.publisher = Publisher(self.log, "default", tables=[TableSchema("fed", "f32", DIM)])
        self.publisher.begin_continue(None)
        for path in pools:
            path.parent.mkdir()
            with petps.create(path, durability="process") as opened:
                opened.create_table("items", dim=DIM, capacity=4 * KEYS)
                opened.create_table("fed", dim=DIM, capacity=4 * MANY_KEYS, feed="delta")
        ingest = f'log = "{folder / "log"}"\nrows_per_second = {rows_per_second}'
        super().__init__(serve, folder, pools, ingest)

    def publish(self) -> int:
        """Publish the next version: every third key is deleted, the others get its rows."""
        version = self.publisher.version + 1
        self.publisher.publish("fed", ALL, rows_of(ALL, version), version % 3 == ALL % 3)
        return self.publisher.commit()


def check(rows: npt.NDArray[np.float32], found: npt.NDArray[np.bool_], version: int) -> None:
    np.testing.assert_array_equal(found, version % 3 != ALL % 3)
    np.testing.assert_array_equal(rows[found], rows_of(ALL, version)[found])


@pytest.fixture
def make_fleet(serve: Callable[..., Server], tmp_path: Path) -> MakeFleet:
    return partial(FedFleet, serve, tmp_path)


def pull(
    client: petps_client.Client, version: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Pull all keys, at least at ``version``, once every shard has it."""
    return client.pull(
        "fed",
        ALL,
        return_mask=True,
        min_version=version,
        wait_ms=WAIT_MS,
        deadline_ms=WAIT_MS,
    )


def test_two_shards_are_one_model(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2)
    fleet.own(["0-3"], ["4-7"])
    version = fleet.publish()
    with servers.connect(fleet.url(0)) as client:
        check(*pull(client, version), version)
        client.push("items", ALL, rows_of(ALL, 5), deadline_ms=30_000)
        rows, found = client.pull("items", ALL, return_mask=True)
        assert found.all()
        np.testing.assert_array_equal(rows, rows_of(ALL, 5))
    # Each server holds exactly its half.
    owner = _native.partition_of(ALL, PARTITIONS) // 4
    for number, server in enumerate(fleet.servers):
        status = server.status()
        assert status["shard"]["owned"] == ("0-3", "4-7")[number]
        assert {p["partition"] for p in status["ingest"]["partitions"]} == set(
            range(4 * number, 4 * number + 4)
        )
        row_counts = {table["name"]: table["rows"] for table in status["tables"]}
        is_ours = owner == number
        assert row_counts["items"] == is_ours.sum()
        assert row_counts["fed"] == (is_ours & (version % 3 != ALL % 3)).sum()
        assert status["instances"][0]["applied_version"] == version
        assert json.loads(server.read("shard-map"))["version"] == fleet.version
    # The command line, with the addresses of all servers.
    report = json.loads(servers.petps("pull", fleet.url(0, 1), "items", "--json", *range(50)))
    assert report["found"] == 50
    output = servers.petps("status", fleet.url(1))
    assert f"partitions 4-7 of 8, as {fleet.addresses[1]} in shard map version 2" in " ".join(
        output.split()
    )
    for server in fleet.servers:
        server.stop()


def test_a_killed_shard_comes_back(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2)
    fleet.own([0, 2, 4, 6], [1, 3, 5, 7])
    version = fleet.publish()
    with servers.connect(fleet.url(0, 1)) as client:
        check(*pull(client, version), version)
        for server in (1, 0):
            fleet.servers[server].kill()
            version = fleet.publish()
            with pytest.raises((petps_client.Unavailable, petps_client.DeadlineExceeded)):
                client.pull("fed", ALL, deadline_ms=1000)
            other_keys = ALL[_native.partition_of(ALL, PARTITIONS) % 2 != server]
            client.pull("fed", other_keys, min_version=version, wait_ms=30_000, deadline_ms=60_000)
            fleet.servers[server].restart()
            check(*pull(client, version), version)


def test_pulls_continue_at_a_replica(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(3)
    fleet.own(["0-3"], ["4-7"], ["4-7"])
    version = fleet.publish()
    with servers.connect(fleet.url(0)) as client:
        check(*pull(client, version), version)
        with pytest.raises(petps_client.FailedPrecondition, match="are replicas"):
            client.push("items", ALL, rows_of(ALL, 1), deadline_ms=30_000)
        assert not client.pull("items", ALL, return_mask=True)[1].any()
        for server in (1, 2):
            fleet.servers[server].kill()
            version = fleet.publish()
            check(*pull(client, version), version)
            fleet.servers[server].restart()


def pull_random(table: str, keys: int, seed: int) -> Callable[[petps_client.Client], None]:
    """Return a function that pulls random keys, which must have the rows of version 1."""
    random = np.random.default_rng(seed)

    def pull(client: petps_client.Client) -> None:
        requested = random.integers(0, keys, 600).astype(np.uint64)
        rows, found = client.pull(table, requested, return_mask=True, deadline_ms=30_000)
        assert found.all()
        np.testing.assert_array_equal(rows, rows_of(requested, 1))

    return pull


def test_a_new_map_moves_partitions_without_a_miss(make_fleet: MakeFleet, seed: int) -> None:
    fleet = make_fleet(2)
    # Both servers get every row of the pushed table, because a map moves no rows.
    for owner in (0, 1):
        fleet.own(*([["0-7"], []] if owner == 0 else [[], ["0-7"]]))
        with servers.connect(fleet.url(owner)) as client:
            client.push("items", ALL, rows_of(ALL, 1), deadline_ms=30_000)
    version = fleet.publish()
    pull_items = pull_random("items", KEYS, seed)
    with (
        Puller(fleet.url(0, 1), pull_items, through_kills=False) as puller,
        servers.connect(fleet.url(1)) as client,
    ):
        for shares in (
            [["0-3"], ["4-7"]],
            [[0], ["1-7"]],
            [["2-5"], [0, 1, 6, 7]],
            [["0-7"], []],
            [["0-6"], [7]],
        ):
            fleet.own(*shares)
            version = fleet.publish()
            # Both follow the log for their partitions, from their pools' progress on.
            check(*pull(client, version), version)
            puller.check()
    assert puller.pulls > 10


def test_partitions_of_the_log_move_without_a_miss(make_fleet: MakeFleet, seed: int) -> None:
    """Follow petps/server/FORMAT.md: the next owner follows a partition before it owns it."""
    # The rate is so low that a partition which changes its owner too early shows as misses.
    fleet = make_fleet(2, rows_per_second=MANY_KEYS // 3)
    fleet.own(["0-7"], [])
    for keys in np.split(np.arange(MANY_KEYS, dtype=np.uint64), 12):
        fleet.publisher.publish("fed", keys, rows_of(keys, 1))
        version = fleet.publisher.commit()
    with servers.connect(fleet.url(0)) as client:
        client.pull("fed", ALL, min_version=version, wait_ms=30_000, deadline_ms=60_000)
    follows = {fleet.addresses[1]: ["0-7"]}
    shares: list[list[list[Any]]] = [
        [["0-7"], []],
        [["0-3"], ["4-7"]],
        [[0], ["1-7"]],
        [[], ["0-7"]],
    ]

    def has_caught_up() -> bool:
        partitions = (fleet.servers[1].status().get("ingest") or {"partitions": []})["partitions"]
        positions = [(partition["lag_records"], partition["version"]) for partition in partitions]
        return positions == [(0, version)] * PARTITIONS

    pull_fed = pull_random("fed", MANY_KEYS, seed)
    with Puller(fleet.url(0), pull_fed, through_kills=False) as puller:
        wait_until("a pull", lambda: puller.pulls > 0 or puller.error is not None)
        for before, after in pairwise(shares):
            fleet.own(*before, follows=follows)
            wait_until("the second server follows all partitions", has_caught_up)
            fleet.own(*after, follows=follows)
            puller.check()
    assert puller.pulls > 10


def test_a_planned_server_joins_without_a_miss(
    make_fleet: MakeFleet, tmp_path: Path, seed: int
) -> None:
    """Follow docs/how-to/shards.md: plan, let the new owner follow, then give it its part."""
    fleet = make_fleet(3, rows_per_second=MANY_KEYS // 3)
    fleet.own(["0-3"], ["4-7"], [])
    for keys in np.split(np.arange(MANY_KEYS, dtype=np.uint64), 12):
        fleet.publisher.publish("fed", keys, rows_of(keys, 1))
        version = fleet.publisher.commit()
    with servers.connect(fleet.url(0, 1)) as client:
        client.pull("fed", ALL, min_version=version, wait_ms=WAIT_MS, deadline_ms=WAIT_MS)

    def plan(*options: str) -> None:
        planned = tmp_path / "planned.json"
        command = ("cluster", "plan", fleet.map_file, "--add", fleet.addresses[2], *options)
        servers.petps(*command, "--output", planned)
        fleet.use_map(planned)

    def has_caught_up() -> bool:
        ingest = fleet.servers[2].status().get("ingest") or {"partitions": []}
        positions = [(place["lag_records"], place["version"]) for place in ingest["partitions"]]
        return positions == [(0, version)] * 2

    pull_fed = pull_random("fed", MANY_KEYS, seed)
    with Puller(fleet.url(0), pull_fed, through_kills=False) as puller:
        wait_until("a pull", lambda: puller.pulls > 0 or puller.error is not None)
        plan("--follow")
        assert fleet.servers[2].status()["shard"]["owned"] == "none"
        wait_until("the new server follows its part", has_caught_up)
        plan()
        owned = [server.status()["shard"]["owned"] for server in fleet.servers]
        pulls = puller.pulls
        wait_until("more pulls", lambda: puller.pulls > pulls + 5 or puller.error is not None)
        puller.check()
    counts = [len(partitions_in(text)) for text in owned]
    assert sorted(counts) == [2, 3, 3]
    assert counts[2] == 2


def partitions_in(text: str) -> list[int]:
    """Return the partitions of a status: "0-2, 7" -> [0, 1, 2, 7]."""
    spans = [part.partition("-") for part in text.split(", ")]
    return [p for low, _, high in spans for p in range(int(low), int(high or low) + 1)]
