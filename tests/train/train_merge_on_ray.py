"""Merges by a real Ray cluster on this machine: a real trace's versions, killed workers, damage.

Run by `make test-train`. Does not cover clusters of several machines.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from examples.demo.trace import load_trace
from petps.checkpoint import POLICIES, Checkpointer, Column, Rows, Store, Table
from petps.checkpoint.files import LocalFiles
from petps.checkpoint.merge import InPlace, plan_merges
from petps.checkpoint.on_ray import OnRay
from petps.checkpoint.policy import Merged
from petps.checkpoint.store import BASE
from petps.errors import DataLoss, FailedPrecondition, PetpsError, Unavailable, Unimplemented
from tests.python.checkpoint.replay import Replay, assert_same
from tests.train.ray_files import DeadlyFiles, GatedFiles

VERSIONS, ACCESSES, STRIDE = 25, 4000, 2
TABLES = {
    "items": Table("items", (Column("row", "f32", 8), Column("sum", "f32", 1))),
    "users": Table.of("users", 2),
}
SECONDS = 550
CopyStore = Callable[[type[LocalFiles]], Store]
pytestmark = pytest.mark.xdist_group("ray")  # one cluster at a time


@pytest.fixture(scope="module", autouse=True)
def cluster(ray_environment: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide two workers at the same time, however many processors this machine has."""
    try:
        executor = OnRay(processors=2)
    except Unimplemented as error:
        pytest.skip(str(error))
    with executor:
        yield


@pytest.fixture(scope="module")
def replay() -> Replay:
    """Return the changes of each version: accesses of a part of the trace, and sometimes users."""
    accesses = load_trace().accesses
    steps = []
    for number in range(VERSIONS):
        keys = np.unique(accesses[number * ACCESSES : (number + 1) * ACCESSES])
        users = keys[:: 50 + number][: 40 if number % 3 else 0]
        steps.append({"items": keys.astype(np.uint64), "users": users.astype(np.uint64)})
    return Replay(TABLES, steps, deletes=0.05)


@pytest.fixture(scope="module")
def unmerged(replay: Replay, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merge") / "store"
    store = Store.create(folder, "m", list(TABLES.values()))
    writer = Checkpointer(store, POLICIES["consecutive"](), replay, chunk_bytes=1 << 16)
    for version in range(1, VERSIONS + 1):
        replay.now = version
        writer.write(version)
    return folder


@pytest.fixture
def store_of(unmerged: Path, tmp_path: Path) -> CopyStore:
    """Return a function that copies the unmerged store, over files of a given kind."""

    def copied(kind: type[LocalFiles]) -> Store:
        shutil.copytree(unmerged, tmp_path / kind.__name__)
        return Store.open(kind(tmp_path / kind.__name__))

    return copied


def begin_gated_merge(store: Store) -> tuple[GatedFiles, Merging]:
    """Begin a merge whose writes stop at the gate."""
    assert isinstance(store.files, GatedFiles)
    store.files.gate.touch()
    return store.files, Merging(store)


def check(store: Store, replay: Replay) -> None:
    for version in range(1, VERSIONS + 1):
        for name, actual in store.restore(version).items():
            assert_same(actual, replay.at(name, version))
    assert store.verify() == []


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Merging(threading.Thread):
    """A thread that runs arrange_all() on Ray, beside the test."""

    def __init__(self, store: Store, retries: int = 3) -> None:
        super().__init__()
        self.error: PetpsError | None = None
        self._store = store
        self._executor = OnRay(retries=retries)
        self.start()

    def run(self) -> None:
        try:
            Merged(stride=STRIDE, executor=self._executor).arrange_all(self._store)
        except PetpsError as error:
            self.error = error

    def wait(self) -> PetpsError | None:
        self.join(SECONDS)
        assert not self.is_alive()
        return self.error


def test_merging_on_ray_gives_the_versions_of_merging_in_place(
    store_of: CopyStore, replay: Replay, tmp_path: Path
) -> None:
    by_ray = store_of(LocalFiles)
    shutil.copytree(tmp_path / "LocalFiles", tmp_path / "in-place")
    in_place = Store.open(tmp_path / "in-place")
    Merged(stride=STRIDE).arrange_all(in_place)
    merges: list[int] = []
    with OnRay() as executor:
        Merged(stride=STRIDE, executor=executor).arrange_all(by_ray, lambda: merges.append(1))
    assert len(merges) == 22  # 24 deltas: 12 + 6 + 3 + 1
    spans = [
        {(c.table, c.first, c.end, c.layer, c.rows, c.checksum) for c in store.state.lineage.chunks}
        for store in (by_ray, in_place)
    ]
    assert spans[0] == spans[1]
    assert {c.layer for c in by_ray.state.lineage.open_delta_chunks()} == {4, 5}
    check(by_ray, replay)
    check(Store.open(tmp_path / "LocalFiles"), replay)


def test_groups_merge_in_parallel_and_a_killed_worker_is_replaced(
    store_of: CopyStore, replay: Replay
) -> None:
    store = store_of(GatedFiles)
    files, merging = begin_gated_merge(store)
    until(lambda: len(files.waiting()) == 2)
    first, second = files.waiting()
    assert os.getpid() not in (first, second)
    os.kill(first, signal.SIGKILL)
    until(lambda: len(files.waiting()) == 3)  # another worker has begun the merge again
    files.gate.unlink()
    assert merging.wait() is None
    assert {c.layer for c in store.state.lineage.open_delta_chunks()} == {4, 5}
    check(store, replay)


def test_a_merge_whose_workers_all_die_is_given_up(store_of: CopyStore, replay: Replay) -> None:
    store = store_of(DeadlyFiles)
    assert isinstance(store.files, DeadlyFiles)
    store.files.own()
    before = store.state
    error = Merging(store, retries=1).wait()
    assert isinstance(error, Unavailable)
    assert re.fullmatch(
        r"the merge of 2 deltas, \d+ to \d+ is given up: its Ray worker died 2 times \(.*\); "
        "the chunks stay unmerged, merge again or in place",
        str(error),
    )
    assert store.state is before
    check(store, replay)
    Merged(stride=STRIDE).arrange_all(store)
    check(store, replay)


def test_a_merge_of_chunks_that_are_purged_meanwhile_changes_nothing(
    store_of: CopyStore, replay: Replay
) -> None:
    store = store_of(GatedFiles)
    files, merging = begin_gated_merge(store)
    until(files.waiting)
    other = Store.open(LocalFiles(files.name))
    base = {name: replay.at(name, VERSIONS) for name in TABLES}
    other.write(VERSIONS + 1, base, kind=BASE)
    other.purge(1)
    files.gate.unlink()
    error = merging.wait()
    assert isinstance(error, FailedPrecondition)
    assert "was purged, split or rolled back meanwhile; nothing has changed" in str(error)
    assert store.refresh().number == other.state.number
    root = Path(files.name)
    named = other.state.files() | set(other.state.trash)
    left_over = {f"data/{path.name}" for path in (root / "data").iterdir()} - named
    assert len(left_over) == 12, "what was merged in vain"
    for path in (root / "data").iterdir():
        os.utime(path, (1, 1))
    other.purge(1)
    assert {f"data/{path.name}" for path in (root / "data").iterdir()} <= named
    for name, rows in Store.open(Path(files.name)).restore().items():
        assert_same(rows, replay.at(name, VERSIONS))


def test_a_damaged_chunk_is_refused_by_the_worker(store_of: CopyStore, replay: Replay) -> None:
    store = store_of(LocalFiles)
    chunk = next(c for c in store.state.lineage.open_delta_chunks() if c.first == 8)
    path = Path(store.name) / chunk.file
    body = bytearray(path.read_bytes())
    body[chunk.offset + chunk.length // 2] ^= 0x10
    path.write_bytes(body)
    damaged = [plan for plan in plan_merges(store, STRIDE) if chunk in plan.chunks]
    (in_place,) = InPlace().run(damaged)
    error = Merging(store).wait()
    assert type(error) is type(in_place.error) is DataLoss
    assert str(error) == str(in_place.error)
    assert "does not fit its checksum" in str(error)
    # The other groups were merged, and no merge covers the one that failed.
    layers = {c.first: c.layer for c in store.state.lineage.open_delta_chunks()}
    assert layers == {5: 3, 7: 2, 8: 1, 9: 1, 25: 5}
    body[chunk.offset + chunk.length // 2] ^= 0x10
    path.write_bytes(body)
    check(store, replay)


def test_the_command_merges_on_a_cluster_of_its_own(store_of: CopyStore, replay: Replay) -> None:
    """The command starts a cluster of its own, which other processes cannot reach."""
    store = store_of(LocalFiles)
    petps = [sys.executable, "-m", "petps.cli", "checkpoint", "merge", store.name]
    environment = {**os.environ, "RAY_memory_monitor_refresh_ms": "0"}
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        [*petps, "--on", "ray", "--json"], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        output = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 0
    assert '"merges": 22' in output
    store.refresh()
    assert {c.layer for c in store.state.lineage.open_delta_chunks()} == {4, 5}
    check(store, replay)
    refused = subprocess.run(
        [*petps, "--on", "moon"], capture_output=True, text=True, env=environment, check=False
    )
    assert refused.returncode != 0
    assert "--on must be here, ray or ray://HOST:PORT" in " ".join(refused.stderr.split())


def run_alone(text: str) -> str:
    """Run a process of its own that knows no cluster; return its output and errors."""
    environment = {**os.environ}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        env=environment,
        timeout=SECONDS,
        check=False,
    )
    return done.stdout + done.stderr


LISTENING = """
import psutil
from petps.checkpoint.on_ray import OnRay
with OnRay():
    for process in psutil.Process().children(recursive=True):
        for each in process.net_connections("inet"):
            if each.status == psutil.CONN_LISTEN:
                print("listens", each.laddr.ip, each.laddr.port, process.name())
"""


def test_a_cluster_that_is_started_here_listens_here_only() -> None:
    output = [line.split() for line in run_alone(LISTENING).splitlines()]
    addresses = {words[1] for words in output if words[0] == "listens"}
    assert addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_an_earlier_import_of_ray_is_refused() -> None:
    text = """
import os
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
import ray
from petps.checkpoint.on_ray import OnRay
OnRay()
"""
    assert (
        "FailedPrecondition: other machines could reach a cluster started here, "
        "because Ray was imported before this call"
    ) in run_alone(text)


def test_a_missing_cluster_is_named() -> None:
    with pytest.raises(FailedPrecondition, match=r"already: leave out ray://127\.0\.0\.1:1"):
        OnRay("ray://127.0.0.1:1")
    text = "from petps.checkpoint.on_ray import OnRay; OnRay('ray://127.0.0.1:1')"
    assert "Unavailable: no Ray cluster at ray://127.0.0.1:1: " in run_alone(text)


def test_partial_bundles_of_a_dead_worker_are_ignored(store_of: CopyStore, replay: Replay) -> None:
    """A worker that dies leaves partial bundles; the state names none of them."""
    store = store_of(DeadlyFiles)
    assert isinstance(store.files, DeadlyFiles)
    store.files.own()
    Merging(store, retries=0).wait()
    named = {chunk.file for chunk in store.state.lineage.chunks}
    pieces = {f"data/{path.name}" for path in (Path(store.name) / "data").iterdir()} - named
    assert pieces
    assert Store.open(Path(store.name)).verify() == []
    rows = Rows.of(TABLES["users"], [1], {"row": np.ones((1, 2), np.float32)})
    items = replay.at("items", 1)
    store.write(VERSIONS + 1, {"items": items, "users": rows}, kind="delta")
