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
import threading
import time
from collections.abc import Callable
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
from tests.system import servers
from tests.system.servers import PARTITIONS, Puller, Server, wait_until

pytestmark = pytest.mark.system

KILLS = max(3, round(30 * float(os.environ.get("PETPS_TEST_SCALE", "1"))))
KEYS = 20_000
DIM = 32
CHANGED = 1_500  # keys that a version changes, a fifth of them deletions

Keys = npt.NDArray[np.uint64]
ALL_KEYS: Keys = np.arange(KEYS, dtype=np.uint64)


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

    def compare(self, client: petps_client.Client) -> None:
        """Wait until the newest version is served, and compare all rows with the model."""
        newest = self.publisher.version
        wait_until(f"version {newest}", lambda: applied_version(client) >= newest)
        rows, found = client.pull("items", ALL_KEYS, return_mask=True)
        np.testing.assert_array_equal(found, self.version_of != 0)
        np.testing.assert_array_equal(rows[found], rows_of(ALL_KEYS[found], self.version_of[found]))


def check_whole(keys: Keys, rows: npt.NDArray[np.float32], found: npt.NDArray[np.bool_]) -> None:
    """Check that every row found is whole, and is one that the trainer wrote for its key."""
    np.testing.assert_array_equal(
        rows[found], rows_of(keys[found], rows[found, 0].astype(np.int64))
    )


def pull_random(rng: np.random.Generator) -> Callable[[petps_client.Client], None]:
    """Return a function that pulls random keys and checks the rows."""

    def pull(client: petps_client.Client) -> None:
        keys = rng.integers(0, KEYS, 500).astype(np.uint64)
        check_whole(keys, *client.pull("items", keys, return_mask=True))

    return pull


def applied_version(client: petps_client.Client | petps.Pool) -> int:
    return min(int(entry["applied_version"]) for entry in client.status()["instances"])


@pytest.mark.timeout(600)
def test_thirty_kills_lose_nothing(serve: Callable[..., Server], tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    pool = Path(os.environ.get("PETPS_TEST_POOL", tmp_path / "pool"))
    table = f"items:{DIM}:f32:{KEYS}"
    servers.petps(
        *("create", pool, "--feed", "delta", "--table", table, "--partitions", PARTITIONS)
    )
    log = DirectoryLog(tmp_path / "log", partitions=PARTITIONS)
    publisher = Publisher(log, "default", tables=[TableSchema("items", "f32", DIM)])
    publisher.begin_continue(None)
    trainer = Trainer(publisher, np.random.default_rng(seed))
    trainer.publish_one()
    settings = ("--log", tmp_path / "log", "--no-http", "--no-grpc", "--port", stable_port())
    server = serve(pool, *settings, folder=tmp_path)
    lags = []
    with Puller(server.url, pull_random(np.random.default_rng(seed + 1))) as puller:
        for _ in range(KILLS):
            trainer.stop.clear()
            training = threading.Thread(target=trainer.run)
            training.start()
            time.sleep(chance.uniform(0.02, 0.5))
            server.kill()
            trainer.stop.set()
            training.join()
            assert trainer.error is None, trainer.error
            with petps.open(pool, read_only=True) as opened:
                lags.append(publisher.version - applied_version(opened))
            server.restart()
            with servers.connect(server.url) as client:
                trainer.compare(client)
            puller.check()
    assert puller.pulls > KILLS
    # The test aims at kills during an apply: some restart must have had versions to apply.
    assert max(lags) > 0, lags
    print(f"{publisher.version} versions, {puller.pulls} pulls, versions left at restart: {lags}")
