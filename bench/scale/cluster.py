"""cluster.cpu_per_row: processor time of a row pulled from 2 and 4 servers, against one server.

A pull has 500 keys for each server. The time is that of the client and of all servers. Windows of
1, 2 and 4 servers alternate. Of four servers each shares its partitions with two others, so the
client can choose.

Processes that share processors take them from each other, and each finds its caches cold. `in_turn`
is what that alone costs: four servers of their own, each asked by a client of its own, one after
the other. `at_once` is one server that is asked for as many keys as the four.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import petps_client

import petps
from bench import DEADLINE_MS
from bench.pull.grpc import DIM, LOAD_ROWS, REQUEST_KEYS, served
from tests.ports import stable_port

PARTITIONS: Final = 8  # the default of a new pool
# The partitions of each server, by the number of servers.
OWNED: Final[dict[int, list[list[str | int]]]] = {
    1: [["0-7"]],
    2: [["0-3"], ["4-7"]],
    4: [["0-3"], ["2-5"], ["4-7"], ["6-7", "0-1"]],
}
PULLS: Final = 200  # different ones

Keys = npt.NDArray[np.uint64]


class _Cluster:
    """Servers of one map, and a client of them."""

    def __init__(self, client: petps_client.Client, processes: list[int], requests: Keys) -> None:
        self._client = client
        self._requests = requests
        self._rows = np.empty((requests.shape[1], DIM), np.float32)
        self.processes = processes
        self.pull(0)  # connect

    def pull(self, number: int) -> int:
        """Pull one of the requests, and check a row. Return the number of rows."""
        keys = self._requests[number % len(self._requests)]
        self._client.pull("items", keys, out=self._rows)
        if self._rows[0, 0] != keys[0]:
            raise SystemExit("a pull returned a wrong row")
        return len(keys)

    def with_requests(self, requests: Keys) -> _Cluster:
        """Return the same servers and client, with other requests."""
        return _Cluster(self._client, self.processes, requests)


def _cpu_per_row(clusters: Sequence[_Cluster], seconds: float) -> float:
    """Return nanoseconds of processor time per row, over a window of pulls from each in turn."""
    processes = [process for cluster in clusters for process in cluster.processes]
    before = _cpu_seconds(processes)
    end = time.perf_counter() + seconds
    rows = pulls = 0
    while time.perf_counter() < end:
        rows += sum(cluster.pull(pulls) for cluster in clusters)
        pulls += 1
    return 1e9 * (_cpu_seconds(processes) - before) / rows


def _cpu_seconds(processes: Sequence[int]) -> float:
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def figures(work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a result for 2 and for 4 servers: the medians over the rounds."""
    rows = int(work["rows"])
    with contextlib.ExitStack() as stack:
        alone = [stack.enter_context(_serve(1, rows)) for _ in range(max(OWNED))]
        two, four = (stack.enter_context(_serve(count, rows)) for count in (2, 4))
        ways = {
            "one": alone[:1],
            "2": [two],
            "4": [four],
            "in_turn": alone,
            "at_once": [alone[0].with_requests(_requests(max(OWNED), rows))],
        }
        costs: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(work["rounds"]):
            for way, clusters in ways.items():
                costs[way].append(_cpu_per_row(clusters, work["seconds"]))

    def ratio(way: str) -> float:
        return statistics.median(
            many / one for many, one in zip(costs[way], costs["one"], strict=True)
        )

    for way in ("2", "4"):
        yield {
            "name": f"cluster.cpu_per_row.{way}",
            "medium": "file",
            "value": statistics.median(costs[way]),
            "unit": "ns",
            "ratio_to": "one server",
            "ratio": ratio(way),
            "one_server": statistics.median(costs["one"]),
            "in_turn": ratio("in_turn"),
            "at_once": ratio("at_once"),
        }
    from bench.scale.router import figures as router_figures

    yield from router_figures(work)


@contextlib.contextmanager
def _serve(count: int, rows: int) -> Iterator[_Cluster]:
    with contextlib.ExitStack() as stack:
        addresses, processes = stack.enter_context(serve_shards(count, rows))
        url = f"petps://{addresses[0]}/default"
        client = stack.enter_context(
            petps_client.connect(url, hot_sample_every=0, deadline_ms=DEADLINE_MS)
        )
        yield _Cluster(client, processes, _requests(count, rows))


def _requests(count: int, rows: int) -> Keys:
    """Return pulls of REQUEST_KEYS random keys for each of ``count`` servers."""
    random = np.random.default_rng(count)
    return random.integers(0, rows, (PULLS, count * REQUEST_KEYS)).astype(np.uint64)


@contextlib.contextmanager
def serve_shards(count: int, rows: int) -> Iterator[tuple[list[str], list[int]]]:
    """Start servers of one map, each with all rows; yield their addresses and processes."""
    addresses = [f"127.0.0.1:{stable_port()}" for _ in range(count)]
    servers = [
        {"address": address, "partitions": owned}
        for address, owned in zip(addresses, OWNED[count], strict=True)
    ]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        shard_map = Path(name, "shards.json")
        document = {"model": "default", "version": 1, "partitions": PARTITIONS, "servers": servers}
        shard_map.write_text(json.dumps(document))
        processes = []
        for number, address in enumerate(addresses):
            folder = Path(name, str(number))
            folder.mkdir()
            load_pool(folder / "pool", rows)
            port = address.rpartition(":")[2]
            options = (f"--port={port}", f"--shard-map={shard_map}")
            processes.append(stack.enter_context(served(folder, folder / "pool", *options))["pid"])
        yield addresses, processes


def load_pool(pool: Path, rows: int) -> None:
    """Make a pool with a table, each of whose rows has its key in every column."""
    with petps.create(pool, durability="process") as opened:
        opened.create_table("items", dim=DIM, capacity=rows * 5 // 4)
        for first in range(0, rows, LOAD_ROWS):
            keys = np.arange(first, min(first + LOAD_ROWS, rows), dtype=np.uint64)
            opened.push("items", keys, np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1))
