"""After kill -9, how soon does the server serve the log's newest version? Prints the times.

The server is killed, versions are published while it is down, and it is started again. From then on
a client pulls without pause. The time counts from the first answer to the first answer of the
newest version. The test fails only if that version, or a row, never comes. PETPS_TEST_SCALE changes
the number of kills.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import petps
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.publish import Publisher
from tests.ports import stable_port
from tests.system.frames import Connection
from tests.system.servers import PARTITIONS, WAIT_SECONDS, Server

pytestmark = pytest.mark.system

KILLS = max(3, round(10 * float(os.environ.get("PETPS_TEST_SCALE", "1"))))
VERSIONS_WHILE_DOWN = 10
CHANGED = 1_500
KEYS = 20_000
DIM = 32


def publish(publisher: Publisher, rng: np.random.Generator) -> int:
    """Publish a version, which the row of key 0 contains."""
    version = publisher.version + 1
    keys = np.union1d(rng.choice(KEYS, CHANGED, replace=False), [0]).astype(np.uint64)
    publisher.publish("items", keys, np.full((len(keys), DIM), version, np.float32))
    assert publisher.commit() == version
    return version


def seconds_until_served(port: int, version: int) -> float:
    """Return the seconds from the first answer of a starting server to one of the version."""
    keys = np.zeros(1, np.uint64)
    first: float | None = None
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        assert time.monotonic() < deadline, f"version {version} is not served"
        try:
            with Connection(port) as connection:
                table = connection.table_ids()["items"]
                while time.monotonic() < deadline:
                    rows, _ = connection.pull(table, DIM, keys)
                    now = time.monotonic()
                    first = first or now
                    if int(rows[0, 0]) == version:
                        return now - first
                    time.sleep(0.001)
        except OSError:  # the server is not up yet
            time.sleep(0.002)


def test_the_newest_version_is_served_soon_after_a_kill(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    with petps.create(tmp_path / "pool", durability="process") as pool:
        pool.create_table("items", dim=DIM, capacity=KEYS, feed="delta")
    rng = np.random.default_rng(13)
    port = stable_port()
    seconds: list[float] = []
    with DirectoryLog(tmp_path / "log", partitions=PARTITIONS) as log:
        publisher = Publisher(log, "default", tables=[TableSchema("items", "f32", DIM)])
        publisher.begin_continue(None)
        version = publish(publisher, rng)
        for _ in range(KILLS):
            server = serve(tmp_path / "pool", "--log", tmp_path / "log", "--port", port)
            seconds.append(seconds_until_served(port, version))
            for _ in range(VERSIONS_WHILE_DOWN // 2):
                version = publish(publisher, rng)
            server.kill()
            for _ in range(VERSIONS_WHILE_DOWN):
                version = publish(publisher, rng)
    milliseconds = np.sort(1e3 * np.array(seconds[1:]))
    print(
        f"newest version served after the first answered pull, {len(milliseconds)} kills: "
        f"median {np.median(milliseconds):.1f} ms, worst {milliseconds[-1]:.1f} ms"
    )
