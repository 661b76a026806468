"""Two and three `petps serve` processes, each with a part of the keys, and a client of all."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
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
from tests.ports import stable_port
from tests.system.test_serve import Process

pytestmark = pytest.mark.system

PARTITIONS = 8  # the default of a new pool
DIM = 8
KEYS = 3000
MANY_KEYS = 60_000
WAIT_SECONDS = 60.0
ALL = np.arange(KEYS, dtype=np.uint64)


def rows_of(keys: npt.NDArray[np.uint64], version: int) -> npt.NDArray[np.float32]:
    """Return rows float32[n, DIM] that identify their key and version."""
    columns = np.arange(DIM, dtype=np.float32)
    return (keys.astype(np.float32)[:, None] + columns * np.float32(version)).astype(np.float32)


class Fleet:
    """Servers of one model, with one log and one shard map."""

    def __init__(self, folder: Path, count: int, rows_per_second: int = 0) -> None:
        self.config = folder / "petps.toml"
        self.config.write_text(
            f'[pool]\npath = "unused"\n[ingest]\nrows_per_second = {rows_per_second}\n'
        )
        self.map_file = folder / "shards.json"
        self.log_folder = folder / "log"
        self.pools = [folder / f"server{i}" / "pool" for i in range(count)]
        self.version = 0
        self.log = DirectoryLog(self.log_folder, partitions=PARTITIONS)
        self.publisher = Publisher(self.log, "default", tables=[TableSchema("fed", "f32", DIM)])
        self.publisher.begin_continue(None)
        # No server owns anything yet: their ports are not known before they are up.
        self.write_map({"127.0.0.1:1": list(range(PARTITIONS))})
        for path in self.pools:
            path.parent.mkdir()
            with petps.create(path, durability="process") as opened:
                opened.create_table("items", dim=DIM, capacity=4 * KEYS)
                opened.create_table("fed", dim=DIM, capacity=4 * MANY_KEYS, feed="delta")
        self.processes = [self._process(path, "--port", stable_port()) for path in self.pools]
        self.facts = [process.wait_ready() for process in self.processes]

    def _process(self, path: Path, *arguments: object) -> Process:
        settings = ("--config", self.config, "--shard-map", self.map_file, "--log", self.log_folder)
        return Process(path, *settings, *arguments)

    def address(self, server: int) -> str:
        return f"127.0.0.1:{self.facts[server]['port']}"

    def url(self, *servers: int) -> str:
        return "petps://" + ",".join(self.address(server) for server in servers) + "/default"

    def write_map(
        self, owners: dict[str, list[Any]], follows: dict[str, list[Any]] | None = None
    ) -> None:
        self.version += 1
        servers: list[dict[str, Any]] = []
        for address, partitions in owners.items():
            followed = (follows or {}).get(address)
            if partitions or followed:
                servers.append({"address": address, "partitions": partitions})
            if followed:
                servers[-1]["follows"] = followed
        document = {
            "model": "default",
            "version": self.version,
            "partitions": PARTITIONS,
            "servers": servers,
        }
        temporary = self.map_file.with_suffix(".new")
        temporary.write_text(json.dumps(document))
        temporary.replace(self.map_file)

    def own(self, *partitions: list[Any]) -> None:
        """Give server i its list (none: nothing), and wait until every server has the map."""
        self.write_map({self.address(i): share for i, share in enumerate(partitions)})
        self.wait_for_map()

    def wait_for_map(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        for server in range(len(self.processes)):
            while self.shard_of(server)["map_version"] < self.version:
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def shard_of(self, server: int) -> dict[str, Any]:
        shard: dict[str, Any] = self.ask(server, "status.json")["shard"]
        return shard

    def ask(self, server: int, path: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.facts[server]['http_port']}/{path}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            document: dict[str, Any] = json.loads(reply.read())
        return document

    def publish(self) -> int:
        """Publish the next version: every third key is deleted, the others get its rows."""
        version = self.publisher.version + 1
        self.publisher.publish("fed", ALL, rows_of(ALL, version), version % 3 == ALL % 3)
        return self.publisher.commit()

    def check(
        self, rows: npt.NDArray[np.float32], found: npt.NDArray[np.bool_], version: int
    ) -> None:
        np.testing.assert_array_equal(found, version % 3 != ALL % 3)
        np.testing.assert_array_equal(rows[found], rows_of(ALL, version)[found])

    def kill(self, server: int) -> None:
        self.processes[server].kill()

    def restart(self, server: int) -> None:
        port = self.facts[server]["port"]
        self.processes[server] = self._process(self.pools[server], "--port", port)
        self.facts[server] = self.processes[server].wait_ready()


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[Any]:
    fleets: list[Fleet] = []

    def make(count: int, **settings: int) -> Fleet:
        fleets.append(Fleet(tmp_path, count, **settings))
        return fleets[-1]

    yield make
    for fleet in fleets:
        for process in fleet.processes:
            if process.child.poll() is None:
                process.child.kill()
                process.child.wait()
        fleet.log.close()


def pull(
    client: petps_client.Client, version: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Pull all keys, at least at ``version``, once every shard has it."""
    return client.pull(
        "fed",
        ALL,
        return_mask=True,
        min_version=version,
        wait_ms=round(1e3 * WAIT_SECONDS),
        deadline_ms=round(1e3 * WAIT_SECONDS),
    )


def cli(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "petps.cli", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_SECONDS,
    ).stdout


def test_two_shards_are_one_model(make_fleet: Any) -> None:
    fleet = make_fleet(2)
    fleet.own(["0-3"], ["4-7"])
    version = fleet.publish()
    with petps_client.connect(fleet.url(0)) as client:
        fleet.check(*pull(client, version), version)
        client.push("items", ALL, rows_of(ALL, 5), deadline_ms=30_000)
        rows, found = client.pull("items", ALL, return_mask=True)
        assert found.all()
        np.testing.assert_array_equal(rows, rows_of(ALL, 5))
    # Each server holds exactly its half.
    owner = _native.partition_of(ALL, PARTITIONS) // 4
    for server in range(2):
        status = fleet.ask(server, "status.json")
        assert status["shard"]["owned"] == ("0-3", "4-7")[server]
        assert {p["partition"] for p in status["ingest"]["partitions"]} == set(
            range(4 * server, 4 * server + 4)
        )
        row_counts = {table["name"]: table["rows"] for table in status["tables"]}
        is_ours = owner == server
        assert row_counts["items"] == is_ours.sum()
        assert row_counts["fed"] == (is_ours & (version % 3 != ALL % 3)).sum()
        assert status["instances"][0]["applied_version"] == version
        assert fleet.ask(server, "shard-map")["version"] == fleet.version
    # The command line, with the addresses of all servers.
    report = json.loads(cli("pull", fleet.url(0, 1), "items", "--json", *map(str, range(50))))
    assert report["found"] == 50
    output = cli("status", fleet.url(1))
    assert f"partitions 4-7 of 8, as {fleet.address(1)} in shard map version 2" in " ".join(
        output.split()
    )
    for process in fleet.processes:
        process.stop()


def test_a_killed_shard_comes_back(make_fleet: Any) -> None:
    fleet = make_fleet(2)
    fleet.own([0, 2, 4, 6], [1, 3, 5, 7])
    version = fleet.publish()
    with petps_client.connect(fleet.url(0, 1)) as client:
        fleet.check(*pull(client, version), version)
        for server in (1, 0):
            fleet.kill(server)
            version = fleet.publish()
            with pytest.raises((petps_client.Unavailable, petps_client.DeadlineExceeded)):
                client.pull("fed", ALL, deadline_ms=1000)
            other_keys = ALL[_native.partition_of(ALL, PARTITIONS) % 2 != server]
            client.pull("fed", other_keys, min_version=version, wait_ms=30_000, deadline_ms=60_000)
            fleet.restart(server)
            fleet.check(*pull(client, version), version)


def test_a_replica_stands_in(make_fleet: Any) -> None:
    fleet = make_fleet(3)
    fleet.own(["0-3"], ["4-7"], ["4-7"])
    version = fleet.publish()
    with petps_client.connect(fleet.url(0)) as client:
        fleet.check(*pull(client, version), version)
        with pytest.raises(petps_client.FailedPrecondition, match="are replicas"):
            client.push("items", ALL, rows_of(ALL, 1), deadline_ms=30_000)
        assert not client.pull("items", ALL, return_mask=True)[1].any()
        for server in (1, 2):
            fleet.kill(server)
            version = fleet.publish()
            fleet.check(*pull(client, version), version)
            fleet.restart(server)


class Puller:
    """Client of random keys. No pull may fail, miss a key or return another row than version 1."""

    def __init__(self, url: str, table: str, keys: int, seed: int) -> None:
        self.table = table
        self.keys = keys
        self.random = np.random.default_rng(seed)
        self.stop = threading.Event()
        self.pulls = 0
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(url,))
        self.thread.start()

    def _run(self, url: str) -> None:
        try:
            with petps_client.connect(url) as client:
                while not self.stop.is_set():
                    keys = self.random.integers(0, self.keys, 600).astype(np.uint64)
                    rows, found = client.pull(
                        self.table, keys, return_mask=True, deadline_ms=30_000
                    )
                    assert found.all()
                    np.testing.assert_array_equal(rows, rows_of(keys, 1))
                    self.pulls += 1
        except BaseException as error:
            self.error = error


def test_partitions_move_while_pulls_go_on(make_fleet: Any) -> None:
    fleet = make_fleet(2)
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    # Both servers get every row of the pushed table, because a map moves no rows.
    for owner in (0, 1):
        fleet.own(*([["0-7"], []] if owner == 0 else [[], ["0-7"]]))
        with petps_client.connect(fleet.url(owner)) as client:
            client.push("items", ALL, rows_of(ALL, 1), deadline_ms=30_000)
    version = fleet.publish()
    puller = Puller(fleet.url(0, 1), "items", KEYS, seed)
    try:
        with petps_client.connect(fleet.url(1)) as client:
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
                fleet.check(*pull(client, version), version)
                assert puller.error is None, puller.error
    finally:
        puller.stop.set()
        puller.thread.join()
    assert puller.error is None, puller.error
    assert puller.pulls > 10


def test_partitions_of_the_log_move_without_a_miss(make_fleet: Any) -> None:
    """Follow petps/server/FORMAT.md: the next owner follows a partition before it owns it."""
    # The rate is so low that a partition which changes its owner too early shows as misses.
    fleet = make_fleet(2, rows_per_second=MANY_KEYS // 3)
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    fleet.own(["0-7"], [])
    for keys in np.split(np.arange(MANY_KEYS, dtype=np.uint64), 12):
        fleet.publisher.publish("fed", keys, rows_of(keys, 1))
        version = fleet.publisher.commit()
    with petps_client.connect(fleet.url(0)) as client:
        client.pull("fed", ALL, min_version=version, wait_ms=30_000, deadline_ms=60_000)
    puller = Puller(fleet.url(0), "fed", MANY_KEYS, seed)
    try:
        while puller.pulls == 0 and puller.error is None:
            time.sleep(0.01)
        first, second = fleet.address(0), fleet.address(1)
        for before, after in (
            ({first: ["0-7"], second: []}, {first: ["0-3"], second: ["4-7"]}),
            ({first: ["0-3"], second: ["4-7"]}, {first: [0], second: ["1-7"]}),
            ({first: [0], second: ["1-7"]}, {first: [], second: ["0-7"]}),
        ):
            fleet.write_map(before, follows={second: ["0-7"]})
            deadline = time.monotonic() + WAIT_SECONDS
            while True:
                ingest = fleet.ask(1, "status.json").get("ingest") or {"partitions": []}
                if [p["lag_records"] for p in ingest["partitions"]] == [0] * PARTITIONS and {
                    p["version"] for p in ingest["partitions"]
                } == {version}:
                    break
                assert time.monotonic() < deadline, ingest
                time.sleep(0.02)
            fleet.write_map(after, follows={second: ["0-7"]})
            fleet.wait_for_map()
            assert puller.error is None, puller.error
    finally:
        puller.stop.set()
        puller.thread.join()
    assert puller.error is None, puller.error
    assert puller.pulls > 10
