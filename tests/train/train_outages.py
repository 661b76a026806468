"""Training goes on while what it writes to is away: a broker, a disk. Run by `make test-train`.

Ranks are threads (rank_threads.py). PETPS_AWAY_SECONDS: how long the broker is away.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from petps.checkpoint import POLICIES, Store
from petps.checkpoint.spool import Spool, Spooled
from petps.delta import open_log
from petps.errors import IoError
from petps.train import behind
from petps.train.link import Links
from petps.train.output import PUBLISH
from petps.train.pipeline import Boundary, Hook
from petps.train.ranks import RankedOutput, Written
from petps.train.runs import publisher_of
from petps.train.schedule import Every
from petps.train.source import CHECKPOINT
from tests.kafka.broker import Broker, NotAvailable
from tests.train.rank_threads import Ranker, in_threads
from tests.train.train_ranks import (
    CHUNK_BYTES,
    PARTITIONS,
    WORLD,
    check_served,
    check_store,
    create,
    open_tables,
    read_state,
    resume,
)

AWAY_SECONDS = float(os.environ.get("PETPS_AWAY_SECONDS", "3"))
STEPS = 30
STEPS_AWAY = 10  # the steps that are trained without the broker, at least
pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Outage:
    """A hook that takes the broker away after a step, and brings it back later.

    It also slows the steps down, so that some of them are trained in the meantime.
    """

    def __init__(self, broker: Broker, step: int) -> None:
        self._broker, self._step = broker, step
        self._since: float | None = None
        self.trained = 0
        """The number of steps while the broker was away."""

    def wants(self, step: int) -> bool:
        if step == self._step:
            self._broker.kill()
            self._since = time.monotonic()
        elif self._since is not None:
            self.trained += 1
            time.sleep(AWAY_SECONDS / STEPS_AWAY)
            has_trained = self.trained >= STEPS_AWAY
            if has_trained and time.monotonic() - self._since > AWAY_SECONDS:
                self._broker.start()
                self._since = None
        return False

    def act(self, boundary: Boundary) -> None:
        raise AssertionError

    def end(self, boundary: Boundary) -> None:
        if self._since is not None:
            self._broker.start()


class Idle:
    """The same number of hooks on the other ranks."""

    def wants(self, step: int) -> bool:
        return False

    def act(self, boundary: Boundary) -> None:
        raise AssertionError

    def end(self, boundary: Boundary) -> None:
        pass


def train(
    folder: Path, place: str, rank: int, links: Links, hook: Hook, versions: list[Written]
) -> dict[str, Any]:
    model = Ranker()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    log = open_log(place, partitions=PARTITIONS)
    with open_tables(rank, WORLD) as tables:
        publisher = publisher_of(log, "m", tables, links.dense)
        publisher.begin_continue(None)
        output = RankedOutput(
            tables, links, store=Store.open(folder / "store"), policy=POLICIES["2d"](),
            checkpoint=Every(steps=10), publisher=publisher, publish=Every(steps=2), model=model,
            optimizer=optimizer, chunk_bytes=CHUNK_BYTES,
            on_version=versions.append if rank == 0 else lambda _: None,
        )  # fmt: skip
        with output, resume(
            rank, links, model, optimizer, tables, output, 0, STEPS, more_hooks=[hook]
        ) as loop:  # fmt: skip
            loop.run()
        log.close()
        return read_state(tables, model)


def test_training_goes_on_while_the_broker_is_away(tmp_path: Path) -> None:
    try:
        broker = Broker(tmp_path / "broker")
    except NotAvailable as reason:
        pytest.skip(str(reason))
    place = f"kafka://{broker.address}/deltas"
    versions: list[Written] = []
    try:
        create(tmp_path)
        outage = Outage(broker, step=6)
        hooks: list[Hook] = [outage, Idle()]
        trained = in_threads(
            WORLD, lambda rank, links: train(tmp_path, place, rank, links, hooks[rank], versions)
        )
        assert outage.trained >= STEPS_AWAY
        last = max(written.version for written in versions if written.kind == "publish")
        check_served(tmp_path / "served.pool", place, last, trained)
    finally:
        broker.kill()
    store = Store.open(tmp_path / "store")
    assert store.state.newest_version == STEPS
    check_store(store, STEPS, trained)
    # The versions that were due while the broker was away became one.
    steps = [written.step for written in versions if written.kind == "publish"]
    assert steps == sorted(steps)
    assert max(b - a for a, b in itertools.pairwise(steps)) >= STEPS_AWAY - 2


class LateCommit:
    """The state of a store's second version: refused without an answer, and there a moment later.

    So does an object store that applies a request after its client has given up.
    """

    def __init__(self, folder: Path, store: Store) -> None:
        self._folder, self._store = folder, store
        self._create = store.files.create
        self._path, self._content = "", b""
        self.problems: list[str] | None = None
        """Those of the store when the state had appeared."""
        store.files.create = self.create  # type: ignore[method-assign]

    def create(self, path: str, content: bytes) -> None:
        is_first = not self._path and path.startswith("states/") and self._store.state.versions()
        if is_first or (path == self._path and self.problems is None):
            self._path, self._content = path, content
            raise IoError("no answer")
        self._create(path, content)

    def appear(self) -> None:
        if self._path and self.problems is None:
            self._create(self._path, self._content)
            self.problems = Store.open(self._folder).verify()


def test_a_commit_that_appears_late_has_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks keep the shares of a version that may still appear."""
    create(tmp_path)
    late: list[LateCommit] = []
    fail = behind.Attempts.fail

    def fail_and_appear(attempts: behind.Attempts) -> bool:
        late[0].appear()
        return fail(attempts)

    monkeypatch.setattr(behind.Attempts, "fail", fail_and_appear)
    monkeypatch.setattr(behind, "FIRST_PAUSE_SECONDS", 0.0)

    def work(rank: int, links: Links) -> dict[str, Any]:
        model = Ranker()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with open_tables(rank, WORLD) as tables:
            store = Store.open(tmp_path / "store")
            if rank == 0:
                late.append(LateCommit(tmp_path / "store", store))
            output = RankedOutput(
                tables, links, store=store, policy=POLICIES["consecutive"](),
                checkpoint=Every(steps=10), model=model, optimizer=optimizer,
                chunk_bytes=CHUNK_BYTES,
            )  # fmt: skip
            with output, resume(rank, links, model, optimizer, tables, output, 0, STEPS) as loop:
                loop.run()
            return read_state(tables, model)

    trained = in_threads(WORLD, work)
    assert late[0].problems == []
    store = Store.open(tmp_path / "store")
    assert store.state.newest_version == STEPS
    assert store.verify() == []
    check_store(store, STEPS, trained)


@pytest.mark.parametrize("kind", [CHECKPOINT, PUBLISH])
@pytest.mark.parametrize("full_rank", range(WORLD))
def test_a_full_staging_disk_delays_versions_and_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, full_rank: int
) -> None:
    """Chunks of a rank find no space for a while, those of the store or those of the log."""
    monkeypatch.setattr(behind, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(behind, "PAUSE_SECONDS_MAX", 0.01)
    write = Spool.write
    refused: list[Path] = []

    def full(self: Spool, content: memoryview) -> Spooled:
        is_full = self._folder.match(f"rank-{full_rank}/{kind}*") and len(refused) < 6
        if is_full:
            refused.append(self._folder)
            raise IoError(f"{self._folder}: No space left on device")
        return write(self, content)

    monkeypatch.setattr(Spool, "write", full)
    create(tmp_path)
    place = str(tmp_path / "log")
    open_log(place, partitions=PARTITIONS).close()
    versions: list[Written] = []
    trained = in_threads(
        WORLD, lambda rank, links: train(tmp_path, place, rank, links, Idle(), versions)
    )
    assert len(refused) == 6
    last = max(written.version for written in versions if written.kind == "publish")
    check_served(tmp_path / "served.pool", place, last, trained)
    store = Store.open(tmp_path / "store")
    assert store.state.newest_version == STEPS
    check_store(store, STEPS, trained)
    assert store.verify() == []
