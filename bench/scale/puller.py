"""A process that pulls 500 keys at a time until its standard input ends: `puller.py URL ROWS FILE`.

A process of its own, because what the bench does beside the pulls would take the interpreter from
them. FILE gets the begin (time.perf_counter) and the seconds of each pull, and the errors.
"""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import petps_client

from bench.pull.grpc import DIM, REQUEST_KEYS

PULLS = 200  # different ones


def main(url: str, rows: int, path: str) -> None:
    """Pull until the standard input ends; print a line when the first pull was answered."""
    random = np.random.default_rng(3)
    requests = random.integers(0, rows, (PULLS, REQUEST_KEYS)).astype(np.uint64)
    out = np.empty((REQUEST_KEYS, DIM), np.float32)
    is_over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=wait, daemon=True).start()
    latencies: list[tuple[float, float]] = []
    failures: list[str] = []
    number = 0
    with petps_client.connect(url, hot_sample_every=0) as client:
        while not is_over.is_set():
            number += 1
            keys = requests[number % PULLS]
            begin = time.perf_counter()
            try:
                client.pull("items", keys, out=out)
            except petps_client.PetpsError as error:
                failures.append(str(error))
                continue
            latencies.append((begin, time.perf_counter() - begin))
            if out[0, 0] != keys[0]:
                failures.append("a pull returned a wrong row")
            if len(latencies) == 1:
                print("pulling", flush=True)
    np.savez(path, latencies=np.array(latencies).reshape(-1, 2), failures=np.array(failures, str))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
