"""router.cpu_per_row and router.throughput: a router of two servers, against asking them directly.

A pull has 500 keys for each server. The processor time is that of the router for a row, over that
of both servers for the same rows. The throughput is that of THREADS callers of the router over as
many that ask the servers themselves. All share the processors of one machine, and windows of both
alternate.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import petps_client

from bench import DEADLINE_MS
from bench.pull.grpc import DIM, READY_SECONDS, REQUEST_KEYS, ROOT
from bench.scale.cluster import PULLS, Keys, serve_shards

SERVERS: Final = 2
THREADS: Final = 4


class _Window:
    """Measurement of a window: rows a second, and seconds of processor time by process."""

    def __init__(self, rows: int, seconds: float, used: dict[int, float]) -> None:
        self.rows, self.used = rows, used
        self.throughput = rows / seconds

    def ns_per_row(self, *processes: int) -> float:
        return 1e9 * sum(self.used[process] for process in processes) / self.rows


def figures(work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the two results: the medians over the rounds."""
    costs, shares, throughputs, servers_ns, direct_rows = [], [], [], [], []
    with contextlib.ExitStack() as stack:
        addresses, processes = stack.enter_context(serve_shards(SERVERS, int(work["rows"])))
        router = stack.enter_context(_route(addresses))
        random = np.random.default_rng(7)
        requests = random.integers(0, int(work["rows"]), (PULLS, SERVERS * REQUEST_KEYS))
        direct_url = f"petps://{addresses[0]}/default"
        direct = stack.enter_context(_connect(direct_url))
        routed = stack.enter_context(_connect(f"petps://127.0.0.1:{router['port']}/default"))
        everybody = (*processes, router["pid"])
        for _ in range(work["rounds"]):
            straight = _window(direct, requests.astype(np.uint64), work["seconds"], everybody)
            through = _window(routed, requests.astype(np.uint64), work["seconds"], everybody)
            costs.append(through.ns_per_row(router["pid"]))
            servers_ns.append(through.ns_per_row(*processes))
            shares.append(costs[-1] / servers_ns[-1])
            throughputs.append(through.throughput / straight.throughput)
            direct_rows.append(straight.throughput)
    yield {
        "name": "router.cpu_per_row",
        "medium": "file",
        "value": statistics.median(costs),
        "unit": "ns",
        "ratio_to": "the servers of the same rows",
        "ratio": statistics.median(shares),
        "servers": statistics.median(servers_ns),
    }
    yield {
        "name": "router.throughput",
        "medium": "file",
        "value": statistics.median(throughputs) * statistics.median(direct_rows),
        "unit": "rows/s",
        "ratio_to": "clients that ask the servers themselves",
        "ratio": statistics.median(throughputs),
        "direct": statistics.median(direct_rows),
    }


def _connect(url: str) -> petps_client.Client:
    return petps_client.connect(
        url, hot_sample_every=0, keys_per_request=SERVERS * REQUEST_KEYS, deadline_ms=DEADLINE_MS
    )


def _window(
    client: petps_client.Client, requests: Keys, seconds: float, processes: tuple[int, ...]
) -> _Window:
    """Pull with THREADS threads for ``seconds``."""
    counts = [0] * THREADS
    end = 0.0

    def pull(thread: int) -> None:
        rows = np.empty((requests.shape[1], DIM), np.float32)
        while time.perf_counter() < end:
            keys = requests[(counts[thread] * THREADS + thread) % len(requests)]
            client.pull("items", keys, out=rows)
            if rows[0, 0] != keys[0] or rows[-1, 0] != keys[-1]:
                raise SystemExit("a pull returned a wrong row")
            counts[thread] += 1

    before = {process: _cpu_seconds(process) for process in processes}
    began = time.perf_counter()
    end = began + seconds
    threads = [threading.Thread(target=pull, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used = {process: _cpu_seconds(process) - before[process] for process in processes}
    return _Window(sum(counts) * requests.shape[1], time.perf_counter() - began, used)


def _cpu_seconds(process: int) -> float:
    """Return the processor time of all threads, in more than the ticks of /proc/PID/stat."""
    threads = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


@contextlib.contextmanager
def _route(addresses: list[str]) -> Iterator[dict[str, Any]]:
    """Start a router process; yield its facts (the ready file) once it is ready."""
    with tempfile.TemporaryDirectory() as name:
        ready = Path(name, "ready")
        command = [
            sys.executable,
            "-m",
            "petps.cli",
            "router",
            "--port=0",
            "--no-http",
            "--no-grpc",
        ]
        command += [f"--servers=petps://{','.join(addresses)}", "--workers=1"]
        command += [f"--ready-file={ready}"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the router did not become ready")
                time.sleep(0.02)
            facts: dict[str, Any] = json.loads(ready.read_text())
            yield facts
        finally:
            process.terminate()
            process.wait()
