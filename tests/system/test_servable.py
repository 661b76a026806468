"""After kill -9, how soon does the server serve the log's newest version? Prints the times.

The server is killed, versions are published while it is down, and it is started again. From then on
a client pulls without pause. The time counts from the first answer to the first answer of the
newest version. The test fails only if that version, or a row, never comes. PETPS_TEST_SCALE changes
the number of kills.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import petps
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.publish import Publisher
from tests.system.frames import Connection
from tests.system.test_kill import WAIT_SECONDS, Server
from tests.system.test_serve import table_ids

KILLS = max(3, round(10 * float(os.environ.get("PETPS_TEST_SCALE", "1"))))
MEANWHILE = 10  # versions published while the server is down
CHANGED = 1_500
KEYS = 20_000
DIM = 32
PARTITIONS = 8


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with petps.create(tmp_path / "pool", durability="process") as pool:
        pool.create_table("items", dim=DIM, capacity=KEYS, feed="delta")
    server = Server(tmp_path, doors=True)
    yield server
    if server.process is not None:
        server.kill()


def publish(publisher: Publisher, rng: np.random.Generator) -> int:
    """Publish a version, which the row of key 0 contains."""
    version = publisher.version + 1
    keys = np.union1d(rng.choice(KEYS, CHANGED, replace=False), [0]).astype(np.uint64)
    publisher.publish("items", keys, np.full((len(keys), DIM), version, np.float32))
    assert publisher.commit() == version
    return version


def served_after(server: Server, version: int) -> float:
    """Start the server; return the seconds from its first answer to one of the version."""
    keys = np.zeros(1, np.uint64)
    first: float | None = None
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        assert time.monotonic() < deadline, f"version {version} is not served"
        try:
            with Connection(server.port) as connection:
                table = table_ids(connection)["items"]
                while time.monotonic() < deadline:
                    rows, _ = connection.pull(table, DIM, keys)
                    now = time.monotonic()
                    first = first or now
                    if int(rows[0, 0]) == version:
                        return now - first
                    time.sleep(0.001)
        except OSError:  # the server is not up yet
            time.sleep(0.002)


def test_the_newest_version_is_served_soon_after_a_kill(server: Server) -> None:
    rng = np.random.default_rng(13)
    seconds: list[float] = []
    with DirectoryLog(server.folder / "log", partitions=PARTITIONS) as log:
        publisher = Publisher(log, "default", tables=[TableSchema("items", "f32", DIM)])
        publisher.begin_continue(None)
        version = publish(publisher, rng)
        for _ in range(KILLS):
            server.launch()
            seconds.append(served_after(server, version))
            for _ in range(MEANWHILE // 2):
                version = publish(publisher, rng)
            server.kill()
            for _ in range(MEANWHILE):
                version = publish(publisher, rng)
    milliseconds = np.sort(1e3 * np.array(seconds[1:]))
    print(
        f"newest version served after the first answered pull, {len(milliseconds)} kills: "
        f"median {np.median(milliseconds):.1f} ms, worst {milliseconds[-1]:.1f} ms"
    )
