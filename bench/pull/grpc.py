"""pull.grpc: 500-key pulls of 512-byte rows over gRPC, compared with the same by petps_client.

One server process answers one caller, which has one pull in flight. Windows of gRPC and of
petps_client alternate.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt
import petps_client

import petps
import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from bench import DEADLINE_MS

ROOT: Final = Path(__file__).resolve().parents[2]
DIM: Final = 128
REQUEST_KEYS: Final = 500
READY_SECONDS: Final = 120.0
LOAD_ROWS: Final = 50_000

Keys = npt.NDArray[np.uint64]
Pull = Callable[[Keys], npt.NDArray[np.float32]]


def figures(work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one result: the medians over the rounds."""
    rows = int(work["rows"])
    with tempfile.TemporaryDirectory() as folder, _serve_loaded_pool(Path(folder), rows) as facts:
        random = np.random.default_rng(1)
        requests = random.integers(0, rows, (1000, REQUEST_KEYS)).astype(np.uint64)
        options = (("grpc.max_receive_message_length", 16 << 20),)
        address = f"127.0.0.1:{facts['grpc_port']}"
        with (
            grpc.insecure_channel(address, options=options) as channel,
            petps_client.connect(
                f"petps://127.0.0.1:{facts['port']}/default", deadline_ms=DEADLINE_MS
            ) as client,
        ):
            stub = stubs.PetpsStub(channel)

            def pull_by_grpc(keys: Keys) -> npt.NDArray[np.float32]:
                reply = stub.Pull(messages.PullRequest(table="items", keys=keys.tobytes()))
                return np.frombuffer(reply.rows.rows, "<f4").reshape(-1, DIM)

            def pull_by_client(keys: Keys) -> npt.NDArray[np.float32]:
                return client.pull("items", keys)

            for pull in (pull_by_grpc, pull_by_client):  # connect, and check the rows
                if not (pull(requests[0])[:, 1] == requests[0] % (1 << 20)).all():
                    raise SystemExit("a pull returned wrong rows")
            rates: dict[str, list[float]] = {"grpc": [], "native": []}
            for _ in range(work["rounds"]):
                rates["grpc"].append(_rows_per_second(pull_by_grpc, requests, work["seconds"]))
                rates["native"].append(_rows_per_second(pull_by_client, requests, work["seconds"]))
    ratios = [
        grpc_rate / native_rate
        for grpc_rate, native_rate in zip(rates["grpc"], rates["native"], strict=True)
    ]
    yield {
        "name": "pull.grpc",
        "medium": "file",
        "value": statistics.median(rates["grpc"]),
        "unit": "rows/s",
        "ratio_to": "petps_client over TCP",
        "ratio": statistics.median(ratios),
        "native": statistics.median(rates["native"]),
    }


def _rows_per_second(pull: Pull, requests: npt.NDArray[np.uint64], seconds: float) -> float:
    pulls = 0
    start = time.perf_counter()
    while time.perf_counter() < start + seconds:
        pull(requests[pulls % len(requests)])
        pulls += 1
    return pulls * REQUEST_KEYS / (time.perf_counter() - start)


@contextlib.contextmanager
def _serve_loaded_pool(folder: Path, rows: int) -> Iterator[dict[str, Any]]:
    """Load ``rows`` rows into a pool, serve it, and yield the facts of the server process."""
    pool = folder / "pool"
    with petps.create(pool, durability="process") as new_pool:
        new_pool.create_table("items", dim=DIM, capacity=rows * 5 // 4)
        for first in range(0, rows, LOAD_ROWS):
            keys = np.arange(first, min(first + LOAD_ROWS, rows), dtype=np.uint64)
            values = np.repeat((keys % (1 << 20)).astype(np.float32)[:, None], DIM, axis=1)
            new_pool.push("items", keys, values)
    with served(folder, pool) as facts:
        yield facts


@contextlib.contextmanager
def served(folder: Path, pool: Path, *options: str) -> Iterator[dict[str, Any]]:
    """Start a server process of a pool; yield its facts (the ready file) once it is ready."""
    ready = folder / "ready"
    command = [sys.executable, "-m", "petps.cli", "serve", str(pool), "--no-http", "--workers=1"]
    command += ["--port=0", "--grpc-port=0", f"--ready-file={ready}", *options]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        facts: dict[str, Any] = {"grpc_port": None}
        deadline = time.monotonic() + READY_SECONDS
        while facts["grpc_port"] is None:
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not become ready")
            time.sleep(0.02)
            if ready.exists():
                facts = json.loads(ready.read_text())
        yield facts
    finally:
        server.terminate()
        server.wait()
