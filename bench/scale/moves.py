"""cluster.move, cluster.death: what a client notices while partitions move, or a replica dies.

Servers, `petps controller` and an etcd are processes. A client pulls 500 keys of the whole table.
Moves: windows in which nothing moves alternate with windows in which a quarter of the partitions
goes to the other server, or back. Death: one of two replicas is killed with -9.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import petps_client

import petps
from bench import DEADLINE_MS
from bench.pull.grpc import DIM, LOAD_ROWS, ROOT, served
from bench.scale.cluster import PARTITIONS, load_pool
from petps.cluster.etcd import Etcd
from petps.cluster.maps import ClusterMap
from petps.cluster.records import Keys, Settings, State, Wish, dump, read_state
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.publish import Publisher
from tests.etcd.server import EtcdServers, NotAvailable
from tests.ports import stable_port

KEYS: Final = Keys("/petps", "default")
MOVED: Final = PARTITIONS // 4
WAIT_SECONDS: Final = 120.0
LOOK_SECONDS: Final = 0.25  # between two looks at etcd, which take a processor from the pulls
WINDOW_SECONDS: Final = 1.0  # of a p99.9
STEP_SECONDS: Final = 0.1

Feed = Literal["delta", "push"]
FEEDS: Final[tuple[Feed, ...]] = ("delta", "push")
Result = dict[str, Any]


def figures(work: dict[str, Any]) -> Iterator[Result]:
    """Yield cluster.move and cluster.death, with and without pushes."""
    with tempfile.TemporaryDirectory() as name:
        try:
            etcd = EtcdServers(Path(name, "etcd"))
        except NotAvailable as reason:
            print(f"skipped cluster.move: {reason}", file=sys.stderr, flush=True)
        else:
            with contextlib.closing(etcd):
                for feed in FEEDS:
                    yield from _move(work, etcd, Path(name, feed), feed)
    yield from _death(work)


class _Client:
    """A process that pulls (puller.py). A pull that fails is counted."""

    def __init__(self, url: str, rows: int, path: Path) -> None:
        self._path = path
        command = [sys.executable, "-m", "bench.scale.puller", url, str(rows), str(path)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "pulling\n":
            raise SystemExit("the client did not begin to pull")

    def stop(self) -> None:
        """Stop, and read what it measured."""
        if self._process.poll() is None:
            self._process.communicate()
        with np.load(self._path) as measured:
            self._latencies: npt.NDArray[np.float64] = measured["latencies"]
            self.failures: list[str] = measured["failures"].tolist()

    @property
    def pulls(self) -> int:
        """Return the number of pulls that succeeded."""
        return len(self._latencies)

    def between(self, begin: float, end: float) -> npt.NDArray[np.float64]:
        """Return the latencies of pulls that began in a window. Call it after stop()."""
        begun, took = self._latencies.T
        own: npt.NDArray[np.float64] = took[(begin <= begun) & (begun < end)]
        return own


def _move(work: dict[str, Any], etcd: EtcdServers, folder: Path, feed: Feed) -> Iterator[Result]:
    rows = int(work["rows"])
    suffix = "" if feed == "delta" else ".push_fed"
    with contextlib.ExitStack() as stack:
        client_of_etcd = Etcd(etcd.access(), patience=WAIT_SECONDS)
        stack.callback(client_of_etcd.close)
        addresses = _start_cluster(stack, etcd, client_of_etcd, folder, feed, rows)
        client = _Client(f"petps://{','.join(addresses)}/default", rows, folder / "pulls.npz")
        stack.callback(client.stop)
        pauses = _Pushes(stack, addresses, rows) if feed == "push" else None
        windows = []
        for number in range(int(work["moves_rounds"])):
            begin = time.perf_counter()
            time.sleep(work["moves_seconds"])
            end = time.perf_counter()
            source, target = addresses[number % 2], addresses[1 - number % 2]
            _wish(client_of_etcd, source, target)
            _wait(lambda: _is_settled(_state(client_of_etcd)))
            windows.append((begin, end, time.perf_counter()))
        client.stop()
        still = [client.between(begin, end) for begin, end, _ in windows]
        moving = [client.between(end, moved) for _, end, moved in windows]
        seconds = [moved - end for _, end, moved in windows]
        ratios = [
            float(np.quantile(during, 0.99) / np.quantile(before, 0.99))
            for before, during in zip(still, moving, strict=True)
        ]
        yield {
            "name": f"cluster.move.p99{suffix}",
            "medium": "file",
            "value": 1e6 * float(np.quantile(np.concatenate(moving), 0.99)),
            "unit": "us",
            "ratio_to": "p99 while nothing moves",
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "p99_still": 1e6 * float(np.quantile(np.concatenate(still), 0.99)),
            "move_seconds": statistics.median(seconds),
        }
        yield {
            "name": f"cluster.move.failed_pulls{suffix}",
            "medium": "file",
            "value": len(client.failures),
            "unit": "pulls",
            "pulls": client.pulls,
            "failures": client.failures[:3],
        }
        if pauses is not None:
            yield pauses.result()


class _Pushes:
    """A client that pushes all the time: the longest push shows the pause of a handover."""

    def __init__(self, stack: contextlib.ExitStack, addresses: list[str], rows: int) -> None:
        self._seconds: list[float] = []
        self._failures: list[str] = []
        self._is_over = threading.Event()
        client = stack.enter_context(
            petps_client.connect(f"petps://{','.join(addresses)}/default", deadline_ms=DEADLINE_MS)
        )

        def run() -> None:
            random = np.random.default_rng(5)
            while not self._is_over.is_set():
                keys = random.integers(0, rows, 100).astype(np.uint64)
                values = np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1)
                begin = time.perf_counter()
                try:
                    client.push("items", keys, values)
                except petps_client.PetpsError as error:
                    self._failures.append(str(error))
                self._seconds.append(time.perf_counter() - begin)
                self._is_over.wait(0.005)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        stack.callback(self._thread.join)
        stack.callback(self._is_over.set)

    def result(self) -> Result:
        """Return the longest push, which has keys of most partitions."""
        return {
            "name": "cluster.move.push_pause",
            "medium": "file",
            "value": max(self._seconds),
            "unit": "s",
            "pushes": len(self._seconds),
            "failed_pushes": len(self._failures),
            "failures": self._failures[:3],
        }


def _start_cluster(
    stack: contextlib.ExitStack,
    etcd: EtcdServers,
    client: Etcd,
    folder: Path,
    feed: Feed,
    rows: int,
) -> list[str]:
    """Start two servers, a controller and a map of two halves. Return the addresses."""
    folder.mkdir()
    client.commit((), {}, tuple(client.read(KEYS.root).values))
    log = f'log = "{folder / "log"}"\n' if feed == "delta" else ""
    config = folder / "petps.toml"
    config.write_text(
        f'[pool]\npath = "unused"\n[ingest]\n{log}[cluster]\n'
        f"endpoints = {json.dumps(etcd.endpoints)}\nlease_seconds = 5\ndrain_seconds = 0.5\n"
        f'move_pause_seconds = 0.0\nstore = "{folder / "store"}"\n'
    )
    if feed == "delta":
        _publish(folder / "log", rows)
    addresses = [f"127.0.0.1:{stable_port()}" for _ in range(2)]
    for number, address in enumerate(addresses):
        own = folder / str(number)
        own.mkdir()
        with petps.create(own / "pool", durability="process") as opened:
            opened.create_table("items", dim=DIM, capacity=rows * 5 // 4, feed=feed)
        options = (f"--port={address.rpartition(':')[2]}", f"--config={config}")
        stack.enter_context(served(own, own / "pool", *options))
    _wait(lambda: set(addresses) <= set(_state(client).members))
    owners = tuple((addresses[number % 2],) for number in range(PARTITIONS))
    first = ClusterMap("default", 2, owners)
    client.commit((), {KEYS.map: first.dump(), KEYS.settings: dump(Settings())})
    _wait(lambda: _is_settled(_state(client)))
    if feed == "push":
        _push_all(addresses, rows)
    else:
        _wait(lambda: all(
            report.is_caught_up and report.version
            for member in _state(client).members.values() for report in member.partitions.values()
        ))  # fmt: skip
    command = [sys.executable, "-m", "petps.cli", "controller", f"--config={config}"]
    with (folder / "controller.log").open("wb") as output:
        controller = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    stack.callback(controller.wait)
    stack.callback(controller.terminate)
    _wait(lambda: bool(client.read(Keys.election("/petps")).values))
    return addresses


def _publish(log: Path, rows: int) -> None:
    publisher = Publisher(
        DirectoryLog(log, partitions=PARTITIONS), "default",
        tables=[TableSchema("items", "f32", DIM)],
    )  # fmt: skip
    publisher.begin_continue(None)
    for first in range(0, rows, LOAD_ROWS):
        keys = np.arange(first, min(first + LOAD_ROWS, rows), dtype=np.uint64)
        publisher.publish("items", keys, np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1))
    publisher.commit()


def _push_all(addresses: list[str], rows: int) -> None:
    url = f"petps://{','.join(addresses)}/default"
    with petps_client.connect(url, deadline_ms=DEADLINE_MS) as client:
        for first in range(0, rows, LOAD_ROWS):
            keys = np.arange(first, min(first + LOAD_ROWS, rows), dtype=np.uint64)
            client.push("items", keys, np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1))


def _wish(etcd: Etcd, source: str, target: str) -> None:
    cluster_map = _state(etcd).map
    assert cluster_map is not None
    owned = [number for number, owners in enumerate(cluster_map.owners) if source in owners]
    wishes = {KEYS.wish(number): dump(Wish(number, source, target)) for number in owned[:MOVED]}
    etcd.commit((), wishes)


def _state(etcd: Etcd) -> State:
    read = etcd.read(KEYS.root)
    texts = {key: value.text for key, value in read.values.items()}
    return read_state(KEYS, texts, {})


def _is_settled(state: State) -> bool:
    version = 0 if state.map is None else state.map.version
    return (
        not state.moves
        and not state.wishes
        and not state.drops
        and all(member.map_version >= version for member in state.members.values())
    )


def _wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise SystemExit("the cluster did not become ready")
        time.sleep(LOOK_SECONDS)


# ---- the death of a replica


def _death(work: dict[str, Any]) -> Iterator[Result]:
    rows, seconds = int(work["rows"]), float(work["death_seconds"])
    backs: list[float] = []
    failures: list[str] = []
    before: list[float] = []
    for _ in range(int(work["death_rounds"])):
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            folder = Path(name)
            addresses = [f"127.0.0.1:{stable_port()}" for _ in range(2)]
            servers = [{"address": address, "partitions": ["0-7"]} for address in addresses]
            shard_map = folder / "shards.json"
            document = {"model": "default", "version": 1, "partitions": PARTITIONS}
            shard_map.write_text(json.dumps({**document, "servers": servers}))
            processes = []
            for number, address in enumerate(addresses):
                own = folder / str(number)
                own.mkdir()
                load_pool(own / "pool", rows)
                port = address.rpartition(":")[2]
                options = (f"--port={port}", f"--shard-map={shard_map}")
                facts = stack.enter_context(served(own, own / "pool", *options))
                processes.append(int(facts["pid"]))
            client = _Client(f"petps://{','.join(addresses)}/default", rows, folder / "pulls.npz")
            time.sleep(WINDOW_SECONDS)  # connections open, and hedging has seen latencies
            begin = time.perf_counter()
            time.sleep(seconds)
            end = time.perf_counter()
            subprocess.run(["kill", "-9", str(processes[0])], check=True)
            time.sleep(seconds)
            over = time.perf_counter()
            client.stop()
            usual = max(_p999s(client, begin, end - WINDOW_SECONDS))
            before.append(usual)
            after = _p999s(client, end, over - WINDOW_SECONDS)
            backs.append(next(
                (number * STEP_SECONDS for number, value in enumerate(after) if value <= usual),
                float("inf"),
            ))  # fmt: skip
            failures += client.failures
    yield {
        "name": "cluster.death.p999_seconds",
        "medium": "file",
        "value": max(backs),
        "unit": "s",
        "seconds": backs,
        "p999_before_us": [1e6 * value for value in before],
    }
    yield {
        "name": "cluster.death.failed_pulls",
        "medium": "file",
        "value": len(failures),
        "unit": "pulls",
        "failures": failures[:3],
    }


def _p999s(client: _Client, begin: float, end: float) -> list[float]:
    """Return the p99.9 of windows that begin every STEP_SECONDS; inf: no pull began in one."""
    count = max(1, round((end - begin) / STEP_SECONDS))
    windows = [
        client.between(start, start + WINDOW_SECONDS)
        for start in (begin + number * STEP_SECONDS for number in range(count))
    ]
    return [float(np.quantile(took, 0.999)) if len(took) else float("inf") for took in windows]
