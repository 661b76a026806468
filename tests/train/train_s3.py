"""Training goes on while its store's server is dead, and loses no row. Run by `make test-train`.

The store is on a real S3 server on 127.0.0.1 (tests/s3), which is killed with -9. Ranks are threads
(rank_threads.py). Does not cover: a server that answers slowly or loses what it acknowledged.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from petps.checkpoint import POLICIES, Store
from petps.errors import Unavailable
from petps.train import behind, open_store
from petps.train.link import Links
from petps.train.pipeline import Boundary
from petps.train.ranks import RankedOutput
from petps.train.schedule import Every
from tests.s3.server import BUCKET, Server
from tests.train.rank_threads import WAIT_SECONDS, Ranker, in_threads
from tests.train.train_ranks import (
    CHUNK_BYTES,
    WORLD,
    check_same,
    check_store,
    create,
    open_tables,
    read_state,
    resume,
    work,
)

STEPS: Final = 30
EVERY: Final = 5
KILLED_AT: Final = 10  # the version during which the server is killed
BACK_AT: Final = 22  # the step after which it is started again
pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Outage:
    """A hook of rank 0: the server is dead while the steps from KILLED_AT to ``back_at`` train."""

    def __init__(self, server: Server, back_at: int) -> None:
        self._server, self._back_at = server, back_at
        self._killed = threading.Event()
        self.output: RankedOutput | None = None
        self.steps: list[int] = []
        """The steps that were trained while the server was dead."""

    def kill(self) -> None:
        self._server.kill()
        self._killed.set()

    @property
    def has_begun(self) -> bool:
        return self._killed.is_set()

    def wants(self, step: int) -> bool:
        if step < KILLED_AT:
            self._wait_for_version()  # so that the version of KILLED_AT begins after that step
        if step <= KILLED_AT:
            return False
        assert self._killed.wait(WAIT_SECONDS)
        if step < self._back_at:
            self.steps.append(step)
        if step > self._back_at - 5:
            self._wait_for_version()  # so that several versions fail
        if step == self._back_at:
            self._server.start()
        return False

    def _wait_for_version(self) -> None:
        assert self.output is not None
        deadline = time.monotonic() + WAIT_SECONDS
        while self.output._behind["checkpoint"].is_busy:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def act(self, boundary: Boundary) -> None:
        raise AssertionError

    def end(self, boundary: Boundary) -> None:
        pass


class Idle(Outage):
    """The same number of hooks on the other ranks."""

    def wants(self, step: int) -> bool:
        return False


def kill_in_upload(store: Store, rank: int, outage: Outage) -> None:
    """Kill the server while rank 1 uploads its rows; rank 0's share may be whole."""
    write = store.files.write

    def killed(path: str, pieces: Any) -> None:
        if path.startswith("data/") and store.state.versions() and not outage.has_begun:
            outage.kill()
        write(path, pieces)

    if rank == 1:
        store.files.write = killed  # type: ignore[method-assign]


def kill_in_commit(store: Store, rank: int, outage: Outage, *, is_after: bool = False) -> None:
    """Kill the server when rank 0 creates the state of the version, before or after."""
    create_file = store.files.create

    def killed(path: str, content: bytes) -> None:
        has_version = bool(store.state.versions())
        is_due = path.startswith("states/") and has_version and not outage.has_begun
        if is_due and is_after:
            create_file(path, content)
        if is_due:
            outage.kill()
        create_file(path, content)

    if rank == 0:
        store.files.create = killed  # type: ignore[method-assign]


def kill_after_commit(store: Store, rank: int, outage: Outage) -> None:
    """Kill the server when it has the state of the version: its answer is lost."""
    kill_in_commit(store, rank, outage, is_after=True)


def train(
    url: str,
    rank: int,
    links: Links,
    outage: Outage | None,
    kill: Callable[[Store, int, Outage], None] | None = None,
    *,
    steps: int = STEPS,
    give_up_after: float = 600.0,
) -> dict[str, Any]:
    model = Ranker()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with open_tables(rank, WORLD) as tables:
        store = open_store(url, "m", tables, links, quantising=None)
        output = RankedOutput(
            tables, links, store=store, policy=POLICIES["consecutive"](),
            checkpoint=Every(steps=EVERY), model=model, optimizer=optimizer,
            chunk_bytes=CHUNK_BYTES, give_up_after=give_up_after,
        )  # fmt: skip
        with output:
            first = output.restore().step
            if outage is not None and kill is not None:
                kill(store, rank, outage)
                outage.output = output
            hooks = [] if outage is None else [outage if rank == 0 else Idle(outage._server, 0)]
            with resume(
                rank, links, model, optimizer, tables, output, first, steps, more_hooks=hooks
            ) as loop:
                loop.run()
        return read_state(tables, model)


@pytest.fixture
def url(s3: Server) -> str:
    """Return a URL at which no other test writes."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that gets an item for each version that failed."""
    found: list[float] = []
    fail = behind.Attempts.fail

    def counted(attempts: behind.Attempts) -> bool:
        found.append(time.monotonic())
        return fail(attempts)

    monkeypatch.setattr(behind.Attempts, "fail", counted)
    return found


@pytest.mark.parametrize("kill", [kill_in_upload, kill_in_commit, kill_after_commit])
def test_training_goes_on_while_the_server_is_dead(
    s3: Server,
    url: str,
    tmp_path: Path,
    failures: list[float],
    kill: Callable[[Store, int, Outage], None],
) -> None:
    outage = Outage(s3, BACK_AT)
    try:
        trained = in_threads(WORLD, lambda rank, links: train(url, rank, links, outage, kill))
    finally:
        s3.kill()
        s3.start()
    assert outage.steps == list(range(KILLED_AT + 1, BACK_AT))
    assert len(failures) >= 2
    store = Store.open(url)
    versions = [entry.version for entry in store.state.versions()]
    if kill is kill_after_commit:
        versions.remove(KILLED_AT)  # it exists, although the trainer did not learn of it
    assert versions[0] == EVERY
    assert BACK_AT <= versions[1] <= BACK_AT + EVERY
    assert versions[-1] == STEPS
    assert store.verify() == []
    check_store(store, STEPS, trained)
    # The version that follows has the rows of the one that failed.
    create(tmp_path)
    reference = in_threads(WORLD, lambda r, n: work(tmp_path, r, n, steps=versions[1]))
    check_store(store, versions[1], reference)
    # A training that continues from the store is bit by bit one without an outage.
    create(tmp_path / "whole")
    whole = in_threads(WORLD, lambda r, n: work(tmp_path / "whole", r, n, steps=STEPS + 7))
    check_same(whole, in_threads(WORLD, lambda r, n: train(url, r, n, None, steps=STEPS + 7)))


def test_the_answer_to_the_last_commit_is_lost(
    s3: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step follows, so the same version is tried again. It exists, and is not an error."""
    outage = Outage(s3, STEPS)
    fail = behind.Attempts.fail
    failures: list[int] = []

    def fail_and_start(attempts: behind.Attempts) -> bool:
        if not failures:
            s3.start()
        failures.append(1)
        return fail(attempts)

    monkeypatch.setattr(behind.Attempts, "fail", fail_and_start)
    try:
        trained = in_threads(
            WORLD,
            lambda rank, links: train(url, rank, links, outage, kill_after_commit, steps=KILLED_AT),
        )
    finally:
        s3.kill()
        s3.start()
    assert outage.has_begun
    assert failures == [1]
    store = Store.open(url)
    assert [entry.version for entry in store.state.versions()] == [EVERY, KILLED_AT]
    assert store.files.list("shares") == {}
    assert store.verify() == []
    check_store(store, KILLED_AT, trained)


def test_a_server_that_stays_dead_ends_the_training(
    s3: Server, url: str, failures: list[float]
) -> None:
    """After ``give_up_after`` the next step raises on all ranks; what was committed stays."""
    outage = Outage(s3, back_at=STEPS + 1)

    def work_until_error(rank: int, links: Links) -> str:
        try:
            train(url, rank, links, outage, kill_in_upload, give_up_after=0.2)
        except Unavailable as error:
            return str(error)
        return ""

    try:
        errors = in_threads(WORLD, work_until_error)
    finally:
        s3.kill()
        s3.start()
    assert errors[0] == errors[1]
    assert "no checkpoint was written: rank " in errors[0], errors
    assert f"IoError: {url}/" in errors[0], errors
    assert "check that the store's server answers" in errors[0], errors
    assert len(failures) >= 2
    store = Store.open(url)
    assert [entry.version for entry in store.state.versions()] == [EVERY]
    assert store.verify() == []
