"""Servers, an etcd and controllers as processes: partitions move under pulls, and nothing fails."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import petps_client
import pytest

from petps import _native
from tests.etcd.server import EtcdServers
from tests.system import servers
from tests.system.clusters import ALL, KEYS, Cluster, rows_of
from tests.system.servers import PARTITIONS, WAIT_MS, Puller, Server, wait_until

pytestmark = pytest.mark.system

MakeCluster = Callable[..., Cluster]


@pytest.fixture
def make_cluster(
    serve: Callable[..., Server], make_etcd: Callable[..., EtcdServers], tmp_path: Path
) -> Iterator[MakeCluster]:
    clusters: list[Cluster] = []

    def make(count: int, *, members: int = 1, **options: Any) -> Cluster:
        clusters.append(Cluster(serve, make_etcd(members), tmp_path, count, **options))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


def pull(client: petps_client.Client, version: int, seed: int) -> None:
    """Pull random keys, which must have the rows of this version or a later one."""
    requested = np.random.default_rng(seed).integers(0, KEYS, 600).astype(np.uint64)
    rows, found = client.pull("fed", requested, return_mask=True, deadline_ms=WAIT_MS)
    assert found.all()
    np.testing.assert_array_equal(rows, rows_of(requested, version))


def check_all(cluster: Cluster, version: int) -> None:
    """Check every row, at a version."""
    with servers.connect(cluster.url()) as client:
        rows, found = client.pull(
            "fed", ALL, return_mask=True, min_version=version, wait_ms=WAIT_MS, deadline_ms=WAIT_MS
        )
    assert found.all()
    np.testing.assert_array_equal(rows, rows_of(ALL, version))


def test_a_planned_move_fails_no_pull(make_cluster: MakeCluster, seed: int) -> None:
    cluster = make_cluster(2)
    version = cluster.publish()
    cluster.wait_registered()
    cluster.petps("drain", cluster.addresses[1], "--undo")
    cluster.petps("init")
    check_all(cluster, version)
    before = cluster.settle()
    owned = {member["address"]: member["owned"] for member in before["members"]}
    assert sorted(len(numbers) for numbers in owned.values()) == [4, 4]
    cluster.control()
    with Puller(
        cluster.url(), partial(pull, version=version, seed=seed), through_kills=False
    ) as puller:
        moving = owned[cluster.addresses[0]][0]
        cluster.petps("move", moving, "--to", cluster.addresses[1])
        report = cluster.settle()
        pulls = puller.pulls
        wait_until("more pulls", lambda: puller.pulls > pulls + 5 or puller.error is not None)
        puller.check()
        owned = {member["address"]: member["owned"] for member in report["members"]}
        assert moving in owned[cluster.addresses[1]]
        cluster.petps("drain", cluster.addresses[0])
        report = cluster.settle()
        puller.check()
    owned = {member["address"]: member["owned"] for member in report["members"]}
    assert owned[cluster.addresses[1]] == list(range(PARTITIONS))
    assert cluster.rows(0) == 0
    assert cluster.rows(1) == KEYS
    check_all(cluster, version)


def owned_by(report: dict[str, Any], address: str) -> list[int]:
    """Return the partitions that a server owns, from a report of the cluster."""
    owned = next(member for member in report["members"] if member["address"] == address)["owned"]
    return list(map(int, owned))


def wait_phase(cluster: Cluster, partition: int, phase: str) -> None:
    """Wait until the move of a partition is in a phase."""

    def is_there() -> bool:
        moves = {move.partition: move.phase for move in cluster.state().moves.values()}
        return moves.get(partition) == phase

    wait_until(f"partition {partition} is in phase {phase}", is_there)


@pytest.fixture
def pair(make_cluster: MakeCluster, seed: int) -> Iterator[tuple[Cluster, Puller]]:
    """Yield two servers with a controller, and a client that pulls until the end: no pull fails."""
    cluster = make_cluster(2, drain_seconds=8.0)
    version = cluster.start()
    with Puller(
        cluster.url(), partial(pull, version=version, seed=seed), through_kills=False
    ) as puller:
        wait_until("a pull", lambda: puller.pulls > 0 or puller.error is not None)
        yield cluster, puller
        puller.check()
    check_all(cluster, version)


@contextlib.contextmanager
def held_back(server: Server) -> Iterator[None]:
    """Let a server apply no version, so that a move to it stays in the phase "follow"."""
    servers.petps("ingest", "pause", server.pool)
    yield
    servers.petps("ingest", "resume", server.pool)


def test_the_next_controller_continues_in_each_phase(pair: tuple[Cluster, Puller]) -> None:
    cluster, puller = pair
    first, second = cluster.addresses

    def has_moved(partition: int) -> bool:
        state = cluster.state()
        assert state.map is not None
        return partition not in state.moves and second in state.map.owners[partition]

    moving = owned_by(cluster.status(), first)[:3]
    for number, phase in enumerate(("follow", "switch", None)):
        controller = cluster.control(f"killed-{number}")
        wait_until("it is elected", lambda: cluster.is_elected(controller))  # noqa: B023
        with held_back(cluster.servers[1]) if phase == "follow" else contextlib.nullcontext():
            cluster.petps("move", moving[number], "--to", second)
            if phase is None:
                wait_until("it has another owner", lambda: has_moved(moving[number]))  # noqa: B023
            else:
                wait_phase(cluster, moving[number], phase)
            controller.kill()
        puller.check()
    cluster.control("last")
    report = cluster.settle()
    assert set(moving) <= set(owned_by(report, second))
    assert cluster.rows(0) + cluster.rows(1) == KEYS


def test_a_paused_controller_changes_nothing_when_it_goes_on(
    pair: tuple[Cluster, Puller],
) -> None:
    cluster, _ = pair
    paused = cluster.control("paused")
    wait_until("it is elected", lambda: cluster.is_elected(paused))
    paused.child.send_signal(signal.SIGSTOP)
    other = cluster.control("other", lease_seconds=600)
    wait_until("another one is elected", lambda: cluster.is_elected(other))
    moving = owned_by(cluster.status(), cluster.addresses[0])[0]
    with held_back(cluster.servers[1]):
        cluster.petps("move", moving, "--to", cluster.addresses[1])
        wait_phase(cluster, moving, "follow")
        paused.child.send_signal(signal.SIGCONT)
    report = cluster.settle()
    assert moving in owned_by(report, cluster.addresses[1])
    assert report["controller"] == "other"
    assert not any(word in paused.output for word in ("owns it now", "follows it"))


def test_a_target_that_dies_before_the_switch_gets_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    version = cluster.start(owners=[0])
    servers.petps("ingest", "pause", cluster.servers[1].pool)  # so it does not catch up
    cluster.control()
    cluster.petps("move", 0, "--to", cluster.addresses[1])
    wait_until("the target follows", lambda: cluster.follows(1) == [0])
    cluster.servers[1].kill()
    cluster.end_lease(1)
    wait_until("the move is abandoned", lambda: not cluster.state().moves)
    wait_until("it says so", lambda: "is abandoned" in cluster.controllers[0].output)
    check_all(cluster, version)
    cluster.servers[1].restart()
    wait_until("its rows are removed", lambda: not cluster.state().drops)
    report = cluster.settle()
    assert owned_by(report, cluster.addresses[0]) == list(range(PARTITIONS))
    assert cluster.rows(1) == 0


def test_a_source_that_dies_after_the_switch_removes_its_rows_later(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(2, drain_seconds=8.0)
    version = cluster.start(owners=[0])
    cluster.control()
    cluster.petps("move", 0, "--to", cluster.addresses[1])
    wait_phase(cluster, 0, "switch")
    cluster.servers[0].kill()
    cluster.end_lease(0)
    wait_until("the move ends without it", lambda: not cluster.state().moves)
    assert 0 in owned_by(cluster.status(), cluster.addresses[1])
    before = cluster.rows(1)
    assert before > 0
    cluster.servers[0].restart()
    wait_until("its rows are removed", lambda: not cluster.state().drops)
    assert cluster.rows(0) == KEYS - before
    check_all(cluster, version)


def test_a_target_that_dies_after_the_switch_gives_the_partition_back(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(2, drain_seconds=20.0)
    version = cluster.start(owners=[0])
    cluster.control()
    cluster.petps("move", 0, "--to", cluster.addresses[1])
    wait_phase(cluster, 0, "switch")
    cluster.servers[1].kill()
    cluster.end_lease(1)
    wait_until("it is away", lambda: cluster.addresses[1] not in cluster.state().members)
    wait_until("the source owns it again", lambda: not cluster.state().moves)
    assert owned_by(cluster.status(), cluster.addresses[0]) == list(range(PARTITIONS))
    check_all(cluster, version)
    cluster.servers[1].restart()
    wait_until("it removes its rows", lambda: not cluster.state().drops)
    assert cluster.rows(1) == 0
    check_all(cluster, version)


def test_a_partition_comes_back_with_its_newest_rows(make_cluster: MakeCluster) -> None:
    """The old owner has removed its rows, so it cannot serve what was deleted meanwhile."""
    cluster = make_cluster(2)
    cluster.start(owners=[0])
    cluster.control()
    partitions = _native.partition_of(ALL, PARTITIONS)
    gone = ALL[partitions == 0][:20]
    cluster.petps("move", 0, "--to", cluster.addresses[1])
    cluster.settle()
    cluster.publisher.publish("fed", gone, None, np.ones(len(gone), np.bool_))
    version = cluster.publisher.commit()
    cluster.petps("move", 0, "--to", cluster.addresses[0])
    report = cluster.settle()
    assert owned_by(report, cluster.addresses[0]) == list(range(PARTITIONS))
    with servers.connect(cluster.url()) as client:
        found = client.pull(
            "fed", ALL, return_mask=True, min_version=version, wait_ms=WAIT_MS, deadline_ms=WAIT_MS
        )[1]
    np.testing.assert_array_equal(found, ~np.isin(ALL, gone))
    assert cluster.rows(1) == 0


def test_servers_serve_while_etcd_is_away(pair: tuple[Cluster, Puller]) -> None:
    cluster, puller = pair
    moving = owned_by(cluster.status(), cluster.addresses[0])[0]
    cluster.control()
    cluster.etcd.kill()
    for server in cluster.servers:
        wait_until("the status says so", lambda: server.status()["cluster"]["error"])  # noqa: B023
        assert server.status()["unready"] is None
    pulls = puller.pulls
    wait_until("more pulls", lambda: puller.pulls > pulls + 5 or puller.error is not None)
    puller.check()
    cluster.etcd.start()
    cluster.etcd.wait()
    cluster.wait_registered()
    cluster.petps("move", moving, "--to", cluster.addresses[1])
    report = cluster.settle()
    assert moving in owned_by(report, cluster.addresses[1])
    wait_until(
        "no error is left",
        lambda: not any(server.status()["cluster"]["error"] for server in cluster.servers),
    )


def test_a_server_starts_while_etcd_is_away(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    version = cluster.start()
    cluster.etcd.pause()
    cluster.servers[0].restart()
    check_all(cluster, version)
    status = cluster.servers[0].status()
    assert status["shard"]["map_version"] == cluster.servers[1].status()["shard"]["map_version"]
    cluster.etcd.resume()
    cluster.wait_registered()


def test_one_of_three_members_of_etcd_dies(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, members=3)
    version = cluster.start()
    cluster.control()
    for number in (0, 1):
        cluster.etcd.kill(number)
        cluster.petps("drain", cluster.addresses[number])
        report = cluster.settle()
        assert owned_by(report, cluster.addresses[number]) == []
        cluster.petps("drain", cluster.addresses[number], "--undo")
        cluster.etcd.start(number)
        cluster.etcd.wait()
    check_all(cluster, version)


def test_a_server_that_stays_away_is_replaced(make_cluster: MakeCluster) -> None:
    settings = 'replace_after = "3s"\nmoves = 8\n'
    cluster = make_cluster(3, settings=settings)
    version = cluster.start()
    cluster.control()
    lost = cluster.addresses[2]
    assert owned_by(cluster.status(), lost)
    cluster.servers[2].kill()
    cluster.end_lease(2)
    wait_until("its partitions have owners", lambda: cluster.owners_of(lost) == 0)
    report = cluster.settle()
    assert owned_by(report, cluster.addresses[0]) + owned_by(report, cluster.addresses[1])
    with servers.connect(cluster.url(0, 1)) as client:
        rows, found = client.pull(
            "fed", ALL, return_mask=True, min_version=version, wait_ms=WAIT_MS, deadline_ms=WAIT_MS
        )
    assert found.all()
    np.testing.assert_array_equal(rows, rows_of(ALL, version))


def test_replicas_are_in_different_zones(make_cluster: MakeCluster, seed: int) -> None:
    zones = ("a", "a", "b")
    cluster = make_cluster(3, zones=zones, settings="moves = 8\n")
    version = cluster.start(owners=[0])
    cluster.control()
    with Puller(
        cluster.url(), partial(pull, version=version, seed=seed), through_kills=False
    ) as puller:
        cluster.petps("replicas", 2)
        cluster.settle()
        cluster_map = cluster.state().map
        assert cluster_map is not None
        for present in cluster_map.owners:
            assert {zones[cluster.addresses.index(address)] for address in present} == {"a", "b"}
        puller.check()
        cluster.servers[2].kill()  # each partition has another owner
        pulls = puller.pulls
        wait_until("more pulls", lambda: puller.pulls > pulls + 5 or puller.error is not None)
        puller.check()
