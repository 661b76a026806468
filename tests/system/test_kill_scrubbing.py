"""Ten kills of a server that scrubs, under pushes and deltas, while rows are damaged.

This process flips bits of rows in the pool's file, and the server removes them in passes without
pause. It is killed with -9 at a random moment of a pass. No key is then absent without being listed
in POOL.damage, and the list has no line that cannot be read. The server is started again, and after
one more pass every row equals the model, and the keys without a row are listed. The seed is
printed; PETPS_SEED repeats it. PETPS_TEST_SCALE=3 kills thirty times.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import petps_client
import pytest

import petps
from petps.admin.client import AdminClient
from petps.errors import FailedPrecondition, InUse, Unavailable
from petps.pool.damage import DamageLog
from tests.system import servers
from tests.system.servers import Server, wait_until
from tests.system.test_kill import ALL_KEYS, KEYS, applied_version, rows_of
from tests.system.test_kill_growing import Pusher, serve_both_tables

pytestmark = pytest.mark.system

KILLS = max(3, round(10 * float(os.environ.get("PETPS_TEST_SCALE", "1"))))
# A byte of a row's second value, so that a damaged row still shows its version.
FLIPPED_BYTE = 5
FLIPS_AT_ONCE = 5


class Damager(threading.Thread):
    """Flips a bit of random rows in the pool's file until stop().

    A slot may get another row between the search and the flip. Therefore nobody knows exactly which
    keys are damaged: only how many at most.
    """

    def __init__(self, pool: Path, rows_now: Callable[[], list[bytes]]) -> None:
        super().__init__(daemon=True)
        self._pool, self._rows_now = pool, rows_now
        self.flips = 0
        self.error: BaseException | None = None
        self._done = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with self._pool.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
                while not self._done.wait(0.01):
                    for row in self._rows_now():
                        at = mapped.find(row)
                        if at >= 0:
                            mapped[at + FLIPPED_BYTE] ^= 0x10
                            self.flips += 1
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._done.set()
        self.join(servers.WAIT_SECONDS)
        assert self.error is None, self.error


class ScrubRequests:
    """Scrubs both tables, pass after pass, until its server is killed."""

    def __init__(self, pool: Path) -> None:
        self.pool = pool
        self.passes = self.removed = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with AdminClient(self.pool) as client:
                while True:
                    reports = client.scrub(paced=False)
                    self.passes += 1
                    self.removed += sum(report["removed"] for report in reports)
        except (Unavailable, InUse, FileNotFoundError, FailedPrecondition):
            pass  # the server was killed
        except BaseException as error:
            self.error = error


def read_listed(pool: Path) -> dict[int, set[int]]:
    """Return the keys that POOL.damage lists, by table. Only a torn last line is left out."""
    listed: dict[int, set[int]] = defaultdict(set)
    path = pool.with_name(f"{pool.name}.damage")
    for line in path.read_text().split("\n")[:-1] if path.exists() else ():
        entry = json.loads(line)
        if "key" in entry and "ended" in entry:
            listed[entry["table"]].discard(entry["key"])
        elif "key" in entry:
            listed[entry["table"]].add(entry["key"])
    return listed


def check_killed(pool: Path, pusher: Pusher) -> None:
    """Check what a kill left: each key whose push was acknowledged has a row, or is listed."""
    listed = read_listed(pool)
    with petps.open(pool, read_only=True) as opened:
        _, found = opened.pull("users", ALL_KEYS, return_mask=True)
        table = opened.table("users").id
        assert DamageLog(opened.native).unreadable_lines == 0
    absent = set(ALL_KEYS[(pusher.version_of != 0) & ~found].tolist())
    assert absent <= listed[table]


def check_table(
    client: petps_client.Client,
    table: str,
    version_of: npt.NDArray[np.int64],
    listed: set[int],
) -> int:
    """Compare all rows with the model after a pass. Return how many keys are missing."""
    rows, found = client.pull(table, ALL_KEYS, return_mask=True)
    assert not np.any(found & (version_of == 0))
    np.testing.assert_array_equal(rows[found], rows_of(ALL_KEYS[found], version_of[found]))
    missing = set(ALL_KEYS[(version_of != 0) & ~found].tolist())
    assert missing <= listed
    assert not listed & set(ALL_KEYS[found].tolist())
    return len(missing)


def learn_unanswered(pusher: Pusher, client: petps_client.Client) -> None:
    """Put into the model which keys of the push without an answer have the new row."""
    if len(pusher.unanswered) == 0:
        return
    rows, found = client.pull("users", pusher.unanswered, return_mask=True)
    is_new = found & (rows[:, 0].astype(np.int64) == pusher.version)
    pusher.version_of[pusher.unanswered[is_new].astype(np.int64)] = pusher.version


@pytest.mark.timeout(600)
def test_kills_during_scrubbing_lose_nothing(
    serve: Callable[..., Server], tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    pool = tmp_path / "pool"
    server, trainer, pusher = serve_both_tables(serve, pool, seed)
    requests = ScrubRequests(pool)
    choice = np.random.default_rng(seed + 2)

    def rows_now() -> list[bytes]:
        rows = []
        for version_of in (trainer.version_of, pusher.version_of):
            keys = choice.integers(0, KEYS, FLIPS_AT_ONCE).astype(np.uint64)
            versions = version_of[keys.astype(np.int64)]
            rows += [row.tobytes() for row in rows_of(keys, versions)[versions != 0]]
        return rows

    flips = late = missing = 0
    for number in range(KILLS):
        passes = requests.passes
        trainer.stop.clear()
        damager = Damager(pool, rows_now)
        threads = [threading.Thread(target=part.run) for part in (trainer, pusher, requests)]
        for thread in threads:
            thread.start()
        if number % 3 == 2:  # behind the end of a pass, and within the next one
            wait_until("a pass has ended", lambda: requests.passes > passes)  # noqa: B023
        time.sleep(chance.uniform(0.05, 0.6))
        server.kill()
        damager.stop()
        trainer.stop.set()
        for thread in threads:
            thread.join()
        for part in (trainer, pusher, requests):
            assert part.error is None, part.error
        flips += damager.flips
        check_killed(pool, pusher)
        server.restart()
        newest = trainer.publisher.version
        with servers.connect(server.url) as client, AdminClient(pool) as admin:
            wait_until(f"version {newest}", lambda: applied_version(client) >= newest)  # noqa: B023
            learn_unanswered(pusher, client)
            late += sum(report["removed"] for report in admin.scrub(paced=False))
            listed = read_listed(pool)
            models = {"items": trainer.version_of, "users": pusher.version_of}
            for record in client.status()["tables"]:
                name = record["name"]
                missing += check_table(client, name, models[name], listed[record["id"]])
    server.end()
    with petps.open(pool) as opened:
        assert opened.verify().clean
    assert requests.passes > 0
    assert flips > KILLS
    assert requests.removed > 0
    assert missing > 0
    print(
        f"{trainer.publisher.version} versions, {pusher.version} pushes, {flips} damaged rows, "
        f"{requests.passes} passes removed {requests.removed}, {late} more after {KILLS} kills"
    )
