"""cluster.drain_error: how long it takes to drain one of four servers, and what was predicted.

One partition is moved first, and measured: how long a server needs to follow another map, and at
which rates it reads and removes a partition. From these alone the simulation (simulate.py) predicts
how long it takes to drain a server of the same cluster. Then that is done.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

import petps
from bench.pull.grpc import served
from bench.scale.simulate import Rates, Simulation
from petps.cluster.etcd import Etcd
from petps.cluster.limits import Limits
from petps.cluster.records import Keys, State, Wish, dump, read_state
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.delta.schema import partition_of
from petps.publish import Publisher
from petps.server.cluster.membership import LOOK_SECONDS
from petps.server.cluster.removal import LOOK_SECONDS as REMOVAL_LOOK_SECONDS
from tests.etcd.server import EtcdServers, NotAvailable
from tests.ports import stable_port

SERVERS: Final = 4
PARTITIONS: Final = 16
REPLICAS: Final = 2
DIM: Final = 16
PUBLISHED_ROWS: Final = 1 << 16  # of a call
POLL_SECONDS: Final = 0.01
WAIT_SECONDS: Final = 300.0
SIMULATIONS: Final = 101  # with other phases of the looks; the median counts


class _Cluster:
    """Four servers, an etcd and a controller, as processes."""

    def __init__(
        self, stack: contextlib.ExitStack, folder: Path, rows: int, limits: Limits
    ) -> None:
        etcd = EtcdServers(folder / "etcd", 1)
        stack.callback(etcd.close)
        self._etcd = Etcd(etcd.access(), patience=WAIT_SECONDS)
        stack.callback(self._etcd.close)
        self.keys = Keys("/petps", "default")
        config = folder / "petps.toml"
        config.write_text(
            f'[pool]\npath = "unused"\n[ingest]\nlog = "{folder / "log"}"\n[cluster]\n'
            f"endpoints = {json.dumps(etcd.endpoints)}\nmoves = {limits.moves}\n"
            f"drain_seconds = {limits.drain_seconds}\n"
            f"move_pause_seconds = {limits.pause_seconds}\n"
        )
        self.partition_rows = _publish(folder / "log", rows)
        self.addresses = [f"127.0.0.1:{stable_port()}" for _ in range(SERVERS)]
        for number, address in enumerate(self.addresses):
            pool = folder / f"server{number}" / "pool"
            pool.parent.mkdir()
            with petps.create(pool, durability="process") as opened:
                opened.create_model(partitions=PARTITIONS)
                opened.create_table("fed", dim=DIM, capacity=2 * rows, feed="delta")
            port = address.rpartition(":")[2]
            stack.enter_context(
                served(pool.parent, pool, "--config", str(config), f"--port={port}")
            )
        command = [sys.executable, "-m", "petps.cli"]
        subprocess.run(
            [*command, "cluster", "init", "--replicas", str(REPLICAS), "--config", str(config)],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        controller = subprocess.Popen(
            [*command, "controller", "--config", str(config)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stack.callback(controller.wait)
        stack.callback(controller.send_signal, signal.SIGTERM)

    def state(self) -> State:
        read = self._etcd.read(self.keys.root).values
        return read_state(
            self.keys,
            {key: value.text for key, value in read.items()},
            {key: value.changed for key, value in read.items()},
        )

    def put(self, values: dict[str, str]) -> None:
        self._etcd.commit((), values)

    def start(self) -> None:
        """Wait until each server has what the map gives it."""
        self.wait(
            lambda state: all(
                address in state.members
                and state.map is not None
                and state.members[address].map_version == state.map.version
                and _has_all(state, address)
                for address in self.addresses
            )
        )

    def wait(self, condition: Callable[[State], bool]) -> float:
        """Return the seconds until etcd has such a state."""
        begun = time.monotonic()
        while not condition(self.state()):
            if time.monotonic() - begun > WAIT_SECONDS:
                raise SystemExit(f"the cluster is not there after {WAIT_SECONDS:g} s")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - begun


def _has_all(state: State, address: str) -> bool:
    assert state.map is not None
    reports = state.members[address].partitions
    wanted = state.map.ingested_by(address)
    return set(reports) == wanted and all(reports[number].is_caught_up for number in wanted)


def _is_settled(state: State) -> bool:
    return not (state.moves or state.drops or state.wishes)


def _publish(folder: Path, rows: int) -> list[int]:
    """Write a log of ``rows`` rows, and return the rows of each partition."""
    publisher = Publisher(
        DirectoryLog(folder, partitions=PARTITIONS), "default",
        tables=[TableSchema("fed", "f32", DIM)],
    )  # fmt: skip
    publisher.begin_continue(None)
    keys = np.arange(rows, dtype=np.uint64)
    for first in range(0, rows, PUBLISHED_ROWS):
        part = keys[first : first + PUBLISHED_ROWS]
        publisher.publish("fed", part, np.repeat(part.astype(np.float32)[:, None], DIM, axis=1))
    publisher.commit()
    rows_of = np.bincount(partition_of(keys, PARTITIONS), minlength=PARTITIONS)
    return [int(count) for count in rows_of]


def _measure(cluster: _Cluster, partition: int) -> Rates:
    """Move a partition to a server without it, and return what that shows of a server."""
    state = cluster.state()
    assert state.map is not None
    owners = state.map.owners[partition]
    target = next(address for address in cluster.addresses if address not in owners)
    rows = cluster.partition_rows[partition]

    def reports(state: State) -> bool:
        member = state.members.get(target)
        return member is not None and partition in member.partitions

    cluster.put({cluster.keys.wish(partition): dump(Wish(partition, owners[0], target))})
    cluster.wait(lambda state: partition in state.moves)
    # A look of the server sees the map, and a later one reports: half a period each.
    restart = cluster.wait(reports) - LOOK_SECONDS
    follow = cluster.wait(
        lambda state: reports(state) and state.members[target].partitions[partition].is_caught_up
    )
    cluster.wait(lambda state: bool(state.drops) or _is_settled(state))
    remove = cluster.wait(_is_settled) - LOOK_SECONDS - REMOVAL_LOOK_SECONDS
    return Rates(
        restart_seconds=max(restart, 0.0),
        follow=rows / max(follow, POLL_SECONDS),
        remove=rows / max(remove, POLL_SECONDS),
    )


def _predict(cluster: _Cluster, rates: Rates, limits: Limits, drained: str) -> float:
    """Return the median of the simulated seconds to drain a server."""
    state = cluster.state()
    assert state.map is not None
    lasted = []
    for seed in range(SIMULATIONS):
        simulation = Simulation(
            dict.fromkeys(cluster.addresses, ""), cluster.partition_rows, state.map.owners,
            rates, limits, random.Random(seed).random,
        )  # fmt: skip
        simulation.put({simulation.keys.drained(drained): "{}"})
        lasted.append(simulation.run_until(_is_empty(drained), 24 * 3600.0))
    return statistics.median(lasted)


def _is_empty(address: str) -> Callable[[State], bool]:
    """Return whether a server owns nothing, and nothing moves."""

    def is_over(state: State) -> bool:
        assert state.map is not None
        return _is_settled(state) and not any(address in present for present in state.map.owners)

    return is_over


def figures(work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the seconds that a drain took, with the simulated ones."""
    try:
        yield _figure(work)
    except NotAvailable as reason:
        print(f"skipped cluster.drain: {reason}", file=sys.stderr, flush=True)


def _figure(work: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        limits = Limits(
            moves=int(work["moves"]),
            drain_seconds=float(work["drain_seconds"]),
            pause_seconds=float(work["pause_seconds"]),
        )
        cluster = _Cluster(stack, Path(name), int(work["rows"]), limits)
        cluster.start()
        measured = [_measure(cluster, partition) for partition in range(int(work["rounds"]))]
        rates = Rates(
            statistics.median(rates.restart_seconds for rates in measured),
            statistics.median(rates.follow for rates in measured),
            statistics.median(rates.remove for rates in measured),
        )
        drained = cluster.addresses[0]
        predicted = _predict(cluster, rates, limits, drained)
        cluster.put({cluster.keys.drained(drained): "{}"})
        seconds = cluster.wait(_is_empty(drained))
    return {
        "name": "cluster.drain_error",
        "medium": "file",
        "value": seconds,
        "unit": "s",
        "ratio_to": "the simulated drain: how far off",
        "ratio": abs(seconds / predicted - 1),
        "predicted": predicted,
        "restart_seconds": rates.restart_seconds,
        "followed_rows_per_second": rates.follow,
        "removed_rows_per_second": rates.remove,
    }
