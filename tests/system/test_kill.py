"""Thirty kills of a real server under pulls and deltas; after each, every row equals the model.

A publisher commits versions to a directory log without pause, and clients pull and check that every
row is whole. The server is killed with -9 at a random moment and started again. Then the publisher
pauses, the server drains the log, and all rows are compared. The seed is printed; PETPS_SEED
repeats it. PETPS_TEST_SCALE reduces the kills. PETPS_TEST_POOL is the pool's path, for example a
device (tests/lab).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import petps_client
import pytest

import petps
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.publish import Publisher
from tests.ports import stable_port
from tests.system.patience import connect_when_up

PETPS = str(Path(sys.executable).parent / "petps")
KILLS = max(3, round(30 * float(os.environ.get("PETPS_TEST_SCALE", "1"))))
KEYS = 20_000
DIM = 32
CHANGED = 1_500  # keys that a version changes, a fifth of them deletions
PARTITIONS = 8
WAIT_SECONDS = 120.0


def connect(url: str) -> petps_client.Client:
    """Connect with a deadline that no busy machine exceeds: the calls are expected to succeed."""
    return petps_client.connect(url, deadline_ms=int(WAIT_SECONDS * 1000))


Keys = npt.NDArray[np.uint64]


def rows_of(keys: Keys, versions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return rows float32[n, DIM] of the version, then mixes of key and version.

    So a row identifies its key and version.
    """
    columns = np.arange(DIM, dtype=np.int64)
    mixed = (
        keys.astype(np.int64)[:, None] * 7919 + versions[:, None] * 104_729 + columns * 31
    ) % 1_000_003
    mixed[:, 0] = versions
    return mixed.astype(np.float32)


class Server:
    """A `petps serve` child, started and killed by its id."""

    def __init__(
        self, folder: Path, pool: Path | None = None, *, log: bool = True, doors: bool = False
    ) -> None:
        """doors: Whether to start HTTP and gRPC, on ports that the system chooses."""
        self.doors = doors
        self.folder = folder
        self.pool = pool or folder / "pool"
        self.log = ["--log", str(folder / "log")] if log else []
        self.ready_file = folder / "ready"
        self.process: subprocess.Popen[bytes] | None = None
        self.port = stable_port()

    def start(self) -> None:
        """Start the server, and return when it is ready."""
        self.launch()
        assert self.process is not None
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.ready_file.exists():
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < deadline, "the server did not become ready"
            time.sleep(0.01)

    def launch(self) -> None:
        self.ready_file.unlink(missing_ok=True)
        command = [PETPS, "serve", str(self.pool), *self.log]
        command += ["--port", str(self.port)]
        command += (
            ["--http-port", "0", "--grpc-port", "0"] if self.doors else ["--no-http", "--no-grpc"]
        )
        command += ["--ready-file", str(self.ready_file)]
        with (self.folder / "server.log").open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = None


class Trainer:
    """Publisher of versions. It keeps the model: version_of[key], 0 where the key is deleted."""

    def __init__(self, publisher: Publisher, rng: np.random.Generator) -> None:
        self.publisher = publisher
        self.rng = rng
        self.version_of = np.zeros(KEYS, dtype=np.int64)
        self.stop = threading.Event()
        self.error: BaseException | None = None

    def publish_one(self) -> None:
        version = self.publisher.version + 1
        keys = self.rng.choice(KEYS, CHANGED, replace=False).astype(np.uint64)
        deleted = self.rng.random(CHANGED) < 0.2
        versions = np.full(CHANGED, version, dtype=np.int64)
        self.publisher.publish("items", keys, rows_of(keys, versions), deleted)
        assert self.publisher.commit() == version
        self.version_of[keys.astype(np.int64)] = np.where(deleted, 0, version)

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.publish_one()
        except BaseException as error:
            self.error = error


def pull_all(client: petps_client.Client) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    rows, found = client.pull("items", np.arange(KEYS, dtype=np.uint64), return_mask=True)
    return rows, found


def check_whole(keys: Keys, rows: npt.NDArray[np.float32], found: npt.NDArray[np.bool_]) -> None:
    """Check that every row found is whole, and is one that the trainer wrote for its key."""
    np.testing.assert_array_equal(
        rows[found], rows_of(keys[found], rows[found, 0].astype(np.int64))
    )


class Puller:
    """Client that pulls random keys through kills. An answer may be late, but never wrong."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.rng = np.random.default_rng(seed)
        self.stop = threading.Event()
        self.pulls = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with connect_when_up(self.url, self.stop) as client:
                while not self.stop.is_set():
                    keys = self.rng.integers(0, KEYS, 500).astype(np.uint64)
                    try:
                        rows, found = client.pull("items", keys, return_mask=True)
                    except (petps_client.Unavailable, petps_client.DeadlineExceeded):
                        continue  # the server is down at this moment
                    check_whole(keys, rows, found)
                    self.pulls += 1
        except BaseException as error:
            self.error = error


def wait_for_version(client: petps_client.Client, version: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    applied = -1
    while applied < version:
        assert time.monotonic() < deadline, (
            f"version {applied} after {WAIT_SECONDS} s, {version} is published"
        )
        applied = min(entry["applied_version"] for entry in client.status()["instances"])
        time.sleep(0.01)


def applied_by(path: Path) -> int:
    """Return the version of a pool that no server has open."""
    with petps.open(path, read_only=True) as pool:
        return min(int(entry["applied_version"]) for entry in pool.status()["instances"])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pool = Path(os.environ.get("PETPS_TEST_POOL", tmp_path / "pool"))
    create = [PETPS, "create", str(pool), "--feed", "delta"]
    create += ["--table", f"items:{DIM}:f32:{KEYS}", "--partitions", str(PARTITIONS)]
    subprocess.run(create, check=True, capture_output=True)
    new_server = Server(tmp_path, pool)
    yield new_server
    if new_server.process is not None:
        new_server.kill()


@pytest.mark.timeout(600)
def test_thirty_kills_lose_nothing(server: Server, seed: int) -> None:
    chance = random.Random(seed)
    log = DirectoryLog(server.folder / "log", partitions=PARTITIONS)
    publisher = Publisher(log, "default", tables=[TableSchema("items", "f32", DIM)])
    publisher.begin_continue(None)
    trainer = Trainer(publisher, np.random.default_rng(seed))
    trainer.publish_one()
    server.start()
    url = f"petps://127.0.0.1:{server.port}/default"
    puller = Puller(url, seed + 1)
    pulling = threading.Thread(target=puller.run)
    pulling.start()
    lags = []
    try:
        for _ in range(KILLS):
            trainer.stop.clear()
            training = threading.Thread(target=trainer.run)
            training.start()
            time.sleep(chance.uniform(0.02, 0.5))
            server.kill()
            trainer.stop.set()
            training.join()
            assert trainer.error is None, trainer.error
            lags.append(publisher.version - applied_by(server.pool))
            server.start()
            with connect(url) as client:
                wait_for_version(client, publisher.version)
                rows, found = pull_all(client)
            np.testing.assert_array_equal(found, trainer.version_of != 0)
            keys = np.arange(KEYS, dtype=np.uint64)
            np.testing.assert_array_equal(
                rows[found], rows_of(keys[found], trainer.version_of[found])
            )
            assert puller.error is None, puller.error
    finally:
        puller.stop.set()
        pulling.join()
    assert puller.error is None, puller.error
    assert puller.pulls > KILLS
    # The test aims at kills during an apply: some restart must have had versions to apply.
    assert max(lags) > 0, lags
    print(f"{publisher.version} versions, {puller.pulls} pulls, versions left at restart: {lags}")
