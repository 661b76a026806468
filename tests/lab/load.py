"""The program of a guest that will be killed: it checks the pool and then pushes to a server.

    python -m tests.lab.load POOL ACKNOWLEDGED [--only-check]

The rows of all versions up to ACKNOWLEDGED must be present. Then the program pushes later versions
for ever. It prints "acknowledged VERSION" for each push that the server acknowledged.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from pathlib import Path

import numpy as np
import petps_client

import petps
from tests.system import servers
from tests.system.servers import WAIT_SECONDS, Puller, Server
from tests.system.test_kill import DIM, Keys, check_whole, pull_random, rows_of

KEYS = 20_000
PUSHED = 500  # rows per version


def keys_of(version: int) -> Keys:
    return (np.arange(PUSHED, dtype=np.uint64) * 37 + version * 211) % KEYS


def check(pool: Path, acknowledged: int) -> int:
    """Return the number of rows. Raise AssertionError unless every acknowledged row is right.

    A row is right if it is present, not torn, and not older than its last acknowledged push.
    """
    servers.petps("verify", pool)
    least = np.zeros(KEYS, dtype=np.int64)
    for version in range(1, acknowledged + 1):
        least[keys_of(version).astype(np.int64)] = version
    keys = np.arange(KEYS, dtype=np.uint64)
    with petps.open(pool, read_only=True) as opened:
        rows, found = opened.pull("items", keys, return_mask=True)
    assert found[least > 0].all(), f"{(~found & (least > 0)).sum()} acknowledged rows are missing"
    check_whole(keys, rows, found)
    versions = rows[:, 0].astype(np.int64)
    assert (versions[found] >= least[found]).all(), "a row is older than what was acknowledged"
    assert (versions[found] <= acknowledged + 1).all(), "a row that was never pushed"
    return int(found.sum())


def read_beside(pool: Path, puller: Puller, reading: threading.Event) -> None:
    """Read the pool directly, beside the server, and check the rows. Store an error in `puller`."""
    try:
        keys = np.arange(KEYS, dtype=np.uint64)
        with petps.open_live(pool) as live:
            while True:
                check_whole(keys, *live.pull("items", keys, return_mask=True))
                reading.set()
    except BaseException as error:
        puller.error = error


def push_for_ever(pool: Path, version: int) -> None:
    server = Server(pool, "--no-http", "--no-grpc", folder=Path(tempfile.mkdtemp()))
    reading = threading.Event()
    with (
        Puller(server.url, pull_random(np.random.default_rng(version))) as puller,
        petps_client.connect(server.url) as client,
    ):
        threading.Thread(target=read_beside, args=(pool, puller, reading), daemon=True).start()
        assert reading.wait(WAIT_SECONDS) or puller.error is not None
        while puller.error is None:
            keys = keys_of(version)
            rows = rows_of(keys, np.full(PUSHED, version, dtype=np.int64))
            client.push("items", keys, rows, deadline_ms=60_000)
            print(f"acknowledged {version}", flush=True)
            version += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pool", type=Path)
    parser.add_argument("acknowledged", type=int)
    parser.add_argument("--only-check", action="store_true")
    arguments = parser.parse_args()
    pool: Path = arguments.pool
    if arguments.acknowledged == 0:
        servers.petps("create", pool, "--table", f"items:{DIM}:f32:{2 * KEYS}")
    else:
        print(f"checked {check(pool, arguments.acknowledged)} rows", flush=True)
    if not arguments.only_check:
        push_for_ever(pool, arguments.acknowledged + 1)


if __name__ == "__main__":
    main()
