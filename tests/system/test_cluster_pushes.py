"""Push-fed partitions move between real servers, while clients push and pull and processes die."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.cluster.controller import Controller
from petps.cluster.etcd import Etcd
from petps.cluster.limits import Limits, Step
from tests.etcd.server import EtcdServers
from tests.system.clusters import KEYS, Cluster
from tests.system.pushers import Pusher
from tests.system.servers import PARTITIONS, WAIT_SECONDS, Puller, Server, wait_until
from tests.system.test_cluster import check_all, owned_by, pull

pytestmark = pytest.mark.system

MakeCluster = Callable[..., Cluster]
PHASES = ("follow", "handover", "switch", "open")


@pytest.fixture
def make_cluster(
    serve: Callable[..., Server], make_etcd: Callable[..., EtcdServers], tmp_path: Path
) -> Iterator[MakeCluster]:
    clusters: list[Cluster] = []

    def make(count: int = 2, **options: Any) -> Cluster:
        options = {"feeds": ("push",), **options}
        clusters.append(Cluster(serve, make_etcd(1), tmp_path, count, **options))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


def move_all(cluster: Cluster, number: int) -> dict[str, Any]:
    """Move every partition of another server to the one with this number."""
    report = cluster.status()
    there = owned_by(report, cluster.addresses[number])
    for partition in set(range(PARTITIONS)) - set(there):
        cluster.petps("move", partition, "--to", cluster.addresses[number])
    return cluster.settle()


def phase_of(cluster: Cluster, partition: int = 0) -> str | None:
    """Return the phase of a partition's move; None: there is none."""
    move = cluster.state().moves.get(partition)
    return None if move is None else move.phase


def settle_and_remove(cluster: Cluster) -> dict[str, Any]:
    """Wait until nothing moves, and servers that were away have removed their rows too."""
    wait_until("all is removed", lambda: cluster.status()["settled"] and not cluster.state().drops)
    return cluster.settle()


class Steps:
    """A controller of this process, which takes one step at a time."""

    def __init__(self, cluster: Cluster, *, handover_seconds: float = 60.0) -> None:
        self._cluster = cluster
        self._etcd = Etcd(cluster.etcd.access(), seconds=WAIT_SECONDS, patience=WAIT_SECONDS)
        limits = Limits(
            drain_seconds=0.0, pause_seconds=0.0, handover_seconds=handover_seconds
        )  # fmt: skip
        self._controller = Controller(
            self._etcd, "/petps", limits, name="steps", lease_seconds=600, log=lambda line: None
        )
        self._controller.tick()
        assert self._controller.is_elected

    def go(self, partition: int, phase: str) -> None:
        """Take steps until the move of a partition is in a phase. Then another may be elected."""

        def step() -> bool:
            move = self._cluster.state().moves.get(partition)
            if move is not None and move.phase == phase:
                return True
            if (step := self._controller.plan_step("default")) is not None:
                assert self._controller.execute("default", step)
            return False

        wait_until(f"the phase {phase}", step)

    def plan(self, event: str) -> Step:
        """Wait until the next step is of this event, and return it; execute() takes it."""
        planned: list[Step] = []

        def is_next() -> bool:
            step = self._controller.plan_step("default")
            planned[:] = [step] if step is not None and step.event == event else []
            return bool(planned)

        wait_until(f"the step {event}", is_next)
        return planned[0]

    def execute(self, step: Step) -> None:
        assert self._controller.execute("default", step)

    def close(self) -> None:
        self._controller.close()
        self._etcd.close()


def test_moves_under_pushes_lose_nothing(make_cluster: MakeCluster, seed: int) -> None:
    cluster = make_cluster(settings="moves = 4\n")
    cluster.start()
    cluster.control()
    with Pusher(cluster.url(), seed, through_kills=False) as pusher:
        for number in (0, 1):
            move_all(cluster, number)
            pusher.wait_for_pushes()
            assert cluster.rows(1 - number) == 0
            assert cluster.rows(number) == KEYS
        cluster.petps("rebalance")
        report = cluster.settle()
        pusher.wait_for_pushes()
        cluster.petps("drain", cluster.addresses[0])
        report = cluster.settle()
        assert owned_by(report, cluster.addresses[0]) == []
    pusher.check_all()
    copies = cluster.folder / "store"
    wait_until("the copies are removed", lambda: not any(copies.rglob("*.npz")))
    print(f"{pusher.pushes} pushes, the longest took {pusher.longest_seconds:.2f} s")


@pytest.mark.parametrize(("phase", "number"), list(itertools.product(PHASES, (0, 1))))
def test_a_server_that_dies_in_a_phase(
    make_cluster: MakeCluster, seed: int, phase: str, number: int
) -> None:
    """The source (0) or the target (1) is killed, and comes back when the others know it."""
    cluster = make_cluster()
    cluster.start(owners=[0])
    steps = Steps(cluster)
    with Pusher(cluster.url(), seed, through_kills=True) as pusher:
        cluster.petps("move", 0, "--to", cluster.addresses[1])
        steps.go(0, phase)
        cluster.servers[number].kill()
        steps.close()
        cluster.control()
        if phase in ("follow", "handover"):
            cluster.end_lease(number)
            wait_until("it is known", lambda: _is_away(cluster, number))
        cluster.servers[number].restart()
        report = settle_and_remove(cluster)
        pusher.wait_for_pushes()
    pusher.check_all()
    owner = owned_by(report, cluster.addresses[1])
    if phase in ("switch", "open"):
        assert owner == [0]
    elif phase == "follow":
        assert owner == []  # the move was abandoned
    assert cluster.rows(0) + cluster.rows(1) == KEYS


@pytest.mark.parametrize("phase", PHASES)
def test_the_next_controller_continues(make_cluster: MakeCluster, seed: int, phase: str) -> None:
    cluster = make_cluster()
    cluster.start(owners=[0])
    steps = Steps(cluster)
    with Pusher(cluster.url(), seed, through_kills=False) as pusher:
        cluster.petps("move", 0, "--to", cluster.addresses[1])
        steps.go(0, phase)
        steps.close()
        cluster.control()
        report = cluster.settle()
        pusher.wait_for_pushes()
    pusher.check_all()
    assert owned_by(report, cluster.addresses[1]) == [0]


def test_a_source_that_starts_without_etcd_keeps_its_promise(
    make_cluster: MakeCluster, seed: int
) -> None:
    cluster = make_cluster()
    cluster.start(owners=[0])
    steps = Steps(cluster)
    with Pusher(cluster.url(), seed, through_kills=True) as pusher:
        cluster.petps("move", 0, "--to", cluster.addresses[1])
        steps.go(0, "handover")
        wait_until("the promise", lambda: cluster.state().sent[0].is_released)
        cluster.servers[0].kill()
        cluster.etcd.pause()
        cluster.servers[0].launch()
        status = wait_until("it serves", lambda: cluster.servers[0].wait_ready() and
                            cluster.servers[0].status())  # fmt: skip
        assert status["cluster"]["paused"] == [0]
        cluster.etcd.resume()
        steps.close()
        cluster.control()
        cluster.settle()
        pusher.wait_for_pushes()
    pusher.check_all()


def test_a_handover_that_the_target_does_not_finish_is_taken_back(
    make_cluster: MakeCluster, seed: int
) -> None:
    cluster = make_cluster(lease_seconds=600)  # the target is stopped, and must not count as gone
    cluster.start(owners=[0])
    steps = Steps(cluster, handover_seconds=3.0)
    with Pusher(cluster.url(), seed, through_kills=False) as pusher:
        cluster.petps("move", 0, "--to", cluster.addresses[1])
        steps.go(0, "follow")
        begin = steps.plan("handover_begun")
        cluster.servers[1].child.send_signal(signal.SIGSTOP)
        steps.execute(begin)
        steps.go(0, "follow")
        assert cluster.state().moves[0].attempt == 2
        pusher.wait_for_pushes()  # the source takes them again
        cluster.servers[1].child.send_signal(signal.SIGCONT)
        steps.close()
        cluster.control()
        report = cluster.settle()
        pusher.wait_for_pushes()
    pusher.check_all()
    assert owned_by(report, cluster.addresses[1]) == [0]


def test_tables_of_both_kinds_move_together(make_cluster: MakeCluster, seed: int) -> None:
    cluster = make_cluster(feeds=("delta", "push"))
    version = cluster.start(owners=[0])
    cluster.control()
    with (
        Pusher(cluster.url(), seed, through_kills=False) as pusher,
        _puller(cluster, version, seed),
    ):
        report = move_all(cluster, 1)
        pusher.wait_for_pushes()
    pusher.check_all()
    check_all(cluster, version)
    assert owned_by(report, cluster.addresses[1]) == list(range(PARTITIONS))
    assert cluster.rows(0) == 0
    assert cluster.rows(1) == 2 * KEYS


def _is_away(cluster: Cluster, number: int) -> bool:
    """Return whether a server's lease has ended, and a move that had not promised is abandoned."""
    state = cluster.state()
    move = state.moves.get(0)
    is_given_up = move is None or move.phase in ("switch", "open") or move.attempt > 1
    return cluster.addresses[number] not in state.members and is_given_up


def _puller(cluster: Cluster, version: int, seed: int) -> Any:
    return Puller(cluster.url(), partial(pull, version=version, seed=seed), through_kills=False)


def test_kills_at_random_lose_nothing(make_cluster: MakeCluster, seed: int) -> None:
    cluster = make_cluster(3, settings="moves = 4\n")
    cluster.start()
    cluster.control("0")
    random = np.random.default_rng(seed)
    with Pusher(cluster.url(), seed, through_kills=True) as pusher:
        for number in range(6):
            target = int(random.integers(0, 3))
            report = cluster.status()
            there = owned_by(report, cluster.addresses[target])
            moving = set(range(PARTITIONS)) - set(there) - set(cluster.state().moves)
            for partition in moving:
                cluster.petps("move", partition, "--to", cluster.addresses[target])
            wait_until("a copy", lambda: cluster.state().sent or not cluster.state().wishes)
            if random.integers(0, 3) == 0:
                cluster.controllers[-1].kill()
                cluster.control(str(number + 1))
            else:
                killed = cluster.servers[int(random.integers(0, 3))]
                killed.kill()
                killed.restart()
                cluster.wait_registered(cluster.servers.index(killed))
            settle_and_remove(cluster)
            pusher.wait_for_pushes()
    pusher.check_all()
    assert sum(map(cluster.rows, range(3))) == KEYS
