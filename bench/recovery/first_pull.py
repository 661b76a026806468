"""reopen.first_pull: the time from the start of `petps serve` to the first correct pull.

The server is killed with SIGKILL before each start, so that it finds its pool unclean. It has its
default doors, on ports of their own, and no log. The pool is in the page cache, as it is after a
crash of the process alone.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import petps_client

import petps
from bench import DEADLINE_MS
from bench.recovery.reopen import BATCH, PULL, rows_of
from tests.ports import stable_port

ROOT: Final = Path(__file__).resolve().parents[2]
DIM: Final = 128
DEADLINE_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.0005


def figures(work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one result: the median over the rounds, in milliseconds."""
    rows = int(work["rows"])
    with tempfile.TemporaryDirectory() as folder:
        pool = Path(folder) / "pool"
        with petps.create(pool, durability="process") as new_pool:
            new_pool.create_table("t", dim=DIM, capacity=rows)
            for begin in range(0, rows, BATCH):
                keys = np.arange(begin, min(rows, begin + BATCH), dtype=np.uint64)
                new_pool.push("t", keys, rows_of(keys, DIM))
        _start_and_pull(pool, rows)  # the first start finds a pool that was closed
        starts = [_start_and_pull(pool, rows) for _ in range(work["rounds"])]
    yield {
        "name": "reopen.first_pull",
        "medium": "file",
        "value": statistics.median(wall for wall, _ in starts) * 1e3,
        "unit": "ms",
        "lowest": min(wall for wall, _ in starts) * 1e3,
        "highest": max(wall for wall, _ in starts) * 1e3,
        "server_cpu_ms": statistics.median(cpu for _, cpu in starts) * 1e3,
        "rows": rows,
    }


def _start_and_pull(pool: Path, rows: int) -> tuple[float, float]:
    """Start a server, pull, check the rows and kill the server.

    Return the seconds to the reply, and the server's seconds of processor time until then.
    """
    port = stable_port()
    keys = np.random.default_rng(1).integers(0, rows, PULL).astype(np.uint64)
    petps_command = Path(sys.executable).with_name("petps")
    command = [str(petps_command), "serve", str(pool), f"--port={port}", "--grpc-port=0"]
    begun = time.perf_counter()
    server = subprocess.Popen(
        [*command, "--http-port=0"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while True:
            if server.poll() is not None or time.perf_counter() > begun + DEADLINE_SECONDS:
                raise SystemExit(f"the server did not answer (its status is {server.returncode})")
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(POLL_SECONDS)
        with petps_client.connect(
            f"petps://127.0.0.1:{port}/default", deadline_ms=DEADLINE_MS
        ) as client:
            pulled = client.pull("t", keys)
            seconds = time.perf_counter() - begun
            fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
        np.testing.assert_array_equal(pulled, rows_of(keys, DIM))
    finally:
        server.kill()
        server.wait()
    ticks = int(fields[11]) + int(fields[12])
    return seconds, ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    for result in figures({"rows": 100_000, "rounds": 5}):
        print(json.dumps(result))
