"""A store after a crash at every operation, after kill -9, and on files that fail.

Every committed version restores, no partial version is listed, and the next writer continues. Does
not cover: disks that lie about fsync.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from petps.checkpoint import POLICIES, Checkpointer, Policy, Store, Table
from petps.checkpoint.merge import Executed, InPlace, MergePlan
from petps.checkpoint.policy import Merged, TwoD
from petps.errors import IoError
from tests.python.checkpoint.memory import Crash, MemoryFiles
from tests.python.checkpoint.replay import Replay, check_versions
from tests.seed import SEED

TABLES = {"items": Table.of("items", 2)}
VERSIONS = 8
KILLS = 8


def steps(seed: int, count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [{"items": np.unique(rng.integers(0, 40, 12)).astype(np.uint64)} for _ in range(count)]


def policies() -> dict[str, Policy]:
    return {
        **{name: kind() for name, kind in POLICIES.items()},
        "2d": TwoD(ratio=0.0, resets=False),
        "merged": Merged(stride=2, every=5),
    }


def drive(files: MemoryFiles, policy: Policy, replay: Replay, committed: list[int]) -> None:
    """Run the whole life of a store: versions, splits, merges, resets, keep, rollback, purge."""
    store = Store.create(files, "m", list(TABLES.values()))
    writer = Checkpointer(store, policy, replay)
    for version in range(1, VERSIONS + 1):
        replay.now = version
        writer.write(version, {"dense": b"%d" % version})
        committed.append(version)
        writer.arrange()
    store.keep(2)
    committed.remove(VERSIONS)  # a version being dropped may exist or not
    store.rollback(VERSIONS - 1)
    committed[:] = [2, *committed[-3:]]
    store.purge(3)


def check(files: MemoryFiles, replay: Replay, committed: list[int]) -> None:
    """Assert after a crash that the store opens, restores all versions and can be continued."""
    files.crash_at = 0
    store = Store.open(files)
    versions = [entry.version for entry in store.state.versions()]
    assert set(committed) <= set(versions)
    # One more version may exist: its state was written, and then the crash came before the return.
    check_versions(store, replay, versions)
    assert store.verify() == []
    store.purge(len(versions) or 1)
    named = store.state.files() | set(store.state.trash)
    assert {path for path in files.held if not path.startswith("states/")} <= named
    newest = versions[-1] if versions else 0
    replay.now = newest
    Checkpointer(store, POLICIES["consecutive"](), replay).write(newest + 1, {})


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_crash_at_every_operation(name: str, torn: bool) -> None:
    replay = Replay(TABLES, steps(1, VERSIONS), deletes=0.1)
    whole = MemoryFiles()
    drive(whole, policies()[name], replay, [])
    assert whole.operations > 4 * VERSIONS
    for at in range(2, whole.operations + 1):  # operation 1 creates the store itself
        files = MemoryFiles()
        files.crash_at, files.torn = at, torn
        committed: list[int] = []
        with contextlib.suppress(Crash):
            drive(files, policies()[name], replay, committed)
            raise AssertionError("it did not crash")
        check(files, replay, committed)


class AllFirst:
    """An executor that runs all plans before it yields an outcome, as several workers may."""

    def run(self, plans: Sequence[MergePlan]) -> Iterator[Executed]:
        """See Executor."""
        yield from list(InPlace().run(plans))


def drive_merges(files: MemoryFiles, replay: Replay, committed: list[int]) -> None:
    """Write versions, and merge them only when there are many: all due merges at once."""
    store = Store.create(files, "m", list(TABLES.values()))
    writer = Checkpointer(store, POLICIES["consecutive"](), replay)
    for version in range(1, VERSIONS + 2):
        replay.now = version
        writer.write(version, {"dense": b"%d" % version})
        committed.append(version)
    Merged(stride=2, executor=AllFirst()).arrange_all(store)
    assert {chunk.layer for chunk in store.state.lineage.open_delta_chunks()} == {4}
    committed[:] = committed[-3:]
    store.purge(3)


@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_at_every_operation_of_parallel_merges(torn: bool) -> None:
    replay = Replay(TABLES, steps(5, VERSIONS + 2), deletes=0.1)
    whole = MemoryFiles()
    written: list[int] = []
    drive_merges(whole, replay, written)
    for at in range(2, whole.operations + 1):
        files = MemoryFiles()
        files.crash_at, files.torn = at, torn
        committed: list[int] = []
        with contextlib.suppress(Crash):
            drive_merges(files, replay, committed)
            raise AssertionError("it did not crash")
        check(files, replay, committed)


@pytest.mark.parametrize("every", [7, 11])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_files_that_fail_at_every_nth_operation(name: str, every: int) -> None:
    """Retry each call until it succeeds; a failed call leaves the store as it was."""
    replay = Replay(TABLES, steps(2, VERSIONS), deletes=0.1)
    files = MemoryFiles()
    store = Store.create(files, "m", list(TABLES.values()))
    writer = Checkpointer(store, policies()[name], replay)
    files.fail_every = every
    refused = 0
    for version in range(1, VERSIONS + 1):
        replay.now = version
        done = False
        while not done:
            before = store.state
            try:
                writer.write(version, {"dense": b"%d" % version})
                done = True
            except IoError:
                refused += 1
            assert (store.state is before) != done
        with contextlib.suppress(IoError):
            writer.arrange()
    assert refused
    files.fail_every = 0
    check(files, replay, list(range(1, VERSIONS + 1)))


WRITER = """
import sys
from pathlib import Path
from petps.checkpoint import POLICIES, Checkpointer, Store
from tests.python.checkpoint.replay import Replay
from tests.python.checkpoint.test_store_crash import TABLES, policies, steps
folder, name, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
replay = Replay(TABLES, steps(seed, 1000), deletes=0.1)
store = Store.open(folder)
writer = Checkpointer(store, policies()[name], replay)
versions = store.state.versions()
for version in range(versions[-1].version + 1 if versions else 1, 1000):
    replay.now = version
    writer.write(version, {"dense": b"%d" % version})
    print(version, flush=True)
    writer.arrange()
    if version % 10 == 0:
        store.purge(6)
"""


@pytest.mark.parametrize("name", ["2d", "intermittent", "merged"])
def test_kills_lose_no_committed_version(tmp_path: Path, name: str) -> None:
    chance = random.Random(SEED)
    replay = Replay(TABLES, steps(SEED, 1000), deletes=0.1)
    Store.create(tmp_path / "store", "m", list(TABLES.values()))
    newest = 0
    for _ in range(KILLS):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "store"), name, str(SEED)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline())]
        time.sleep(chance.uniform(0, 0.08))
        process.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in process.stdout.read().split()]
        process.wait()
        process.stdout.close()
        store = Store.open(tmp_path / "store")
        versions = [entry.version for entry in store.state.versions()]
        assert acknowledged[0] > newest or newest == 0
        assert versions[-1] in (acknowledged[-1], acknowledged[-1] + 1)
        check_versions(store, replay, versions)
        assert store.verify() == []
        newest = versions[-1]
    print(f"{newest} versions through {KILLS} kills")
