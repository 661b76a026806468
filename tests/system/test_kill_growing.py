"""Ten kills of a server whose tables grow, under pulls, pushes and deltas.

A table that deltas feed and one that is pushed to get more capacity without pause, while clients
pull, another process (this one) reads the pool beside the server, and both tables are written. The
server is killed with -9 at a random moment of a growth and started again. Then every row is
compared with the model, and each table has the capacity from before or from after the growth: from
after, if the command had returned. The seed is printed; PETPS_SEED repeats it. PETPS_TEST_SCALE=3
kills thirty times.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import petps_client
import pytest

import petps
from petps.admin.client import AdminClient
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.errors import FailedPrecondition, InUse, Unavailable
from petps.publish import Publisher
from tests.ports import stable_port
from tests.system import servers
from tests.system.servers import PARTITIONS, Puller, Server, wait_until
from tests.system.test_kill import (
    ALL_KEYS,
    DIM,
    KEYS,
    Keys,
    Trainer,
    check_whole,
    pull_random,
    rows_of,
)

pytestmark = pytest.mark.system

KILLS = max(3, round(10 * float(os.environ.get("PETPS_TEST_SCALE", "1"))))
PUSHED = 200  # keys of a push


class Pusher:
    """Pushes to `users` until its server is killed. It keeps the model as Trainer does."""

    def __init__(self, url: str, rng: np.random.Generator) -> None:
        self.url, self.rng = url, rng
        self.version = 0
        self.version_of = np.zeros(KEYS, dtype=np.int64)
        self.unanswered: Keys = np.empty(0, np.uint64)  # keys of a push without an answer
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with petps_client.connect(self.url) as client:
                while True:
                    self.version += 1
                    self.unanswered = self.rng.choice(KEYS, PUSHED, replace=False).astype(np.uint64)
                    versions = np.full(PUSHED, self.version, dtype=np.int64)
                    client.push("users", self.unanswered, rows_of(self.unanswered, versions))
                    self.version_of[self.unanswered.astype(np.int64)] = self.version
                    self.unanswered = np.empty(0, np.uint64)
        except (petps_client.Unavailable, petps_client.DeadlineExceeded):
            pass  # the server was killed
        except BaseException as error:
            self.error = error

    def check(self, client: petps_client.Client) -> None:
        """Compare all rows. Keys without an answer may have the old row or the new one."""
        rows, found = client.pull("users", ALL_KEYS, return_mask=True)
        check_whole(ALL_KEYS, rows, found)
        versions = np.where(found, rows[:, 0], 0).astype(np.int64)
        unanswered = self.unanswered.astype(np.int64)
        is_new = versions[unanswered] == self.version
        self.version_of[unanswered[is_new]] = self.version
        np.testing.assert_array_equal(versions, self.version_of)


class Grower:
    """Grows both tables, in turn, until its server is killed."""

    def __init__(self, pool: Path) -> None:
        self.pool = pool
        self.capacities = {"items": KEYS, "users": KEYS}
        self.trying = dict(self.capacities)
        self.grown = 0
        self.copied = 0  # of the growth in progress
        self.error: BaseException | None = None

    def run(self) -> None:
        def note(copied: int, buckets: int) -> bool:
            self.copied = copied
            return True

        try:
            with AdminClient(self.pool) as client:
                while True:
                    table = min(self.capacities, key=lambda name: self.capacities[name])
                    self.trying[table] = self.capacities[table] + KEYS
                    client.grow(table, self.trying[table], progress=note)
                    self.capacities[table] = self.trying[table]
                    self.grown += 1
                    self.copied = 0
        except (Unavailable, InUse, FileNotFoundError):
            pass  # the server was killed
        except FailedPrecondition as error:
            if "was cancelled" not in str(error):
                self.error = error
        except BaseException as error:
            self.error = error

    def check(self, client: petps_client.Client) -> None:
        """Check that each table has the capacity that was acknowledged, or the one in progress."""
        for record in client.status()["tables"]:
            name, capacity = record["name"], record["capacity"]
            assert capacity in (self.capacities[name], self.trying[name])
            self.capacities[name] = self.trying[name] = capacity


def serve_both_tables(
    serve: Callable[..., Server], pool: Path, seed: int
) -> tuple[Server, Trainer, Pusher]:
    """Create a pool with `items`, which deltas feed, and `users`, which pushes feed; serve it.

    Return the server and who feeds the tables. `items` has a version already.
    """
    folder = pool.parent
    servers.petps(
        *("create", pool, "--table", f"items:{DIM}:f32:{KEYS}", "--feed", "delta"),
        *("--partitions", PARTITIONS),
    )
    servers.petps("create", pool, "--add", "--table", f"users:{DIM}:f32:{KEYS}")
    log = DirectoryLog(folder / "log", partitions=PARTITIONS)
    publisher = Publisher(log, "default", tables=[TableSchema("items", "f32", DIM)])
    publisher.begin_continue(None)
    trainer = Trainer(publisher, np.random.default_rng(seed))
    trainer.publish_one()
    settings = ("--log", folder / "log", "--no-http", "--no-grpc", "--port", stable_port())
    server = serve(pool, *settings, folder=folder)
    pusher = Pusher(server.url, np.random.default_rng(seed + 1))
    return server, trainer, pusher


class LiveReader(threading.Thread):
    """Reads the pool beside its server until stop(); no row may be wrong."""

    def __init__(self, pool: Path, rng: np.random.Generator) -> None:
        super().__init__(daemon=True)
        self.pool, self.rng = pool, rng
        self.reads = 0
        self.error: BaseException | None = None
        self._done = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            while not self._done.is_set():
                # While no server has the pool open, there is nothing to read beside.
                with suppress(FailedPrecondition), petps.open_live(self.pool) as live:
                    while not self._done.is_set():
                        keys = self.rng.integers(0, KEYS, 500).astype(np.uint64)
                        for table in ("items", "users"):
                            check_whole(keys, *live.pull(table, keys, return_mask=True))
                        self.reads += 1
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._done.set()
        self.join(servers.WAIT_SECONDS)
        assert self.error is None, self.error


@pytest.mark.timeout(600)
def test_kills_during_growth_lose_nothing(
    serve: Callable[..., Server], tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    pool = tmp_path / "pool"
    server, trainer, pusher = serve_both_tables(serve, pool, seed)
    grower = Grower(pool)
    reader = LiveReader(pool, np.random.default_rng(seed + 2))
    hit = 0  # kills in the middle of a copy
    with Puller(server.url, pull_random(np.random.default_rng(seed + 3))) as puller:
        for number in range(KILLS):
            grown = grower.grown
            trainer.stop.clear()
            threads = [threading.Thread(target=part.run) for part in (trainer, pusher, grower)]
            for thread in threads:
                thread.start()
            if number % 3 == 2:  # behind the end of a growth, and perhaps within the next one
                wait_until("a growth has ended", lambda: grower.grown > grown)  # noqa: B023
            time.sleep(chance.uniform(0.05, 0.6))
            server.kill()
            trainer.stop.set()
            for thread in threads:
                thread.join()
            for part in (trainer, pusher, grower):
                assert part.error is None, part.error
            hit += grower.copied > 0  # progress comes every 50 ms, so some are not counted
            grower.copied = 0
            server.restart()
            with servers.connect(server.url) as client:
                trainer.compare(client)
                pusher.check(client)
                grower.check(client)
            puller.check()
            assert reader.error is None, reader.error
    reader.stop()
    server.stop()
    with petps.open(pool) as opened:
        assert opened.verify().clean
    assert puller.pulls > KILLS
    assert reader.reads > KILLS
    assert grower.grown > 0
    print(
        f"{trainer.publisher.version} versions, {pusher.version} pushes, {grower.grown} growths, "
        f"{hit} of {KILLS} kills within a copy, {puller.pulls} pulls, {reader.reads} reads beside "
        "the server"
    )
