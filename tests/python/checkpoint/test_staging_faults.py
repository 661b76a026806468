"""Staged versions on stores and disks that fail: errors are raised, committed versions stay.

Does not cover: kill -9 (test_staging_crash.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from petps.checkpoint import POLICIES, SourceDevice, StagedCheckpointer, Store
from petps.errors import FailedPrecondition, IoError
from tests.python.checkpoint.memory import MemoryFiles
from tests.python.checkpoint.replay import Replay
from tests.python.checkpoint.test_staging import (
    CHUNK,
    TABLES,
    VERSIONS,
    GatedFiles,
    check,
    left_in,
    staged,
    steps,
    whole,
)
from tests.seed import SEED


def open_files(folder: Path) -> list[str]:
    """Return the files below a folder that this process has open, deleted ones too."""
    paths = []
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since, as that of the listing
            paths.append(os.readlink(f"/proc/self/fd/{file}"))
    return sorted(path for path in paths if path.startswith(str(folder)))


@pytest.mark.parametrize("every", [3, 5])
def test_files_that_fail_at_every_nth_operation(tmp_path: Path, every: int) -> None:
    """wait() or the next write() raises the upload's error; the next version has the rows."""
    replay = Replay(TABLES, steps(4), deletes=0.1)
    files = MemoryFiles()
    store = Store.create(files, "m", list(TABLES.values()))
    failures = 0
    with staged(store, replay, tmp_path / "ssd") as writer:
        files.fail_every = every
        for version in range(1, VERSIONS + 1):
            replay.now = version
            for attempt in range(6):
                if attempt == 5:
                    files.fail_every = 0  # if every third call fails, no version is ever whole
                before = store.state.versions()
                try:
                    writer.write(version, {"dense": b"%d" % version})
                except IoError:
                    failures += 1
                    continue
                with contextlib.suppress(IoError):
                    writer.wait()
                if store.state.versions() != before:
                    break
                failures += 1
                assert left_in(tmp_path / "ssd") == []
            files.fail_every = every
        files.fail_every = 0
    assert failures
    check(Store.open(files), replay, list(range(1, VERSIONS + 1)))


def test_the_next_write_raises_the_error_and_writes_nothing(tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(5), deletes=0.1)
    files = MemoryFiles()
    store = Store.create(files, "m", list(TABLES.values()))
    with staged(store, replay, tmp_path / "ssd") as writer:
        replay.now = 1
        writer.write(1, {"dense": b"1"})
        writer.wait()
        files.fail_every = 1
        replay.now = 2
        writer.write(2, {"dense": b"2"})
        writer._stager.flight.wait_for_stages()  # type: ignore[union-attr]
        files.fail_every = 0
        replay.now = 3
        with pytest.raises(IoError, match="no space left"):
            writer.write(3, {"dense": b"3"})
        assert writer.wait() is None
        assert store.state.versions()[-1].version == 1
        writer.write(3, {"dense": b"3"})
    check(store, replay, [1, 3])


def test_a_full_disk_below_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(TABLES, steps(6), deletes=0.1)
    store = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    room = 3 * CHUNK
    write = os.write

    def limited(file: int, content: memoryview) -> int:
        nonlocal room
        if not os.readlink(f"/proc/self/fd/{file}").endswith(".staged"):
            return write(file, content)
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(file, content[:room])
        room -= done
        return done

    monkeypatch.setattr(os, "write", limited)
    with staged(store, replay, tmp_path / "ssd") as writer:
        replay.now = 1
        with pytest.raises(IoError, match=r"ssd/\d+\.staged: No space left on device: a version"):
            whole(writer, 1)
        assert writer.wait() is None
        assert left_in(tmp_path / "ssd") == []
        room = 1 << 30
        writer.write(1, {"dense": b"1"})
    check(store, replay, [1])
    assert list((tmp_path / "store" / "data").iterdir()) == [
        tmp_path / "store" / store.state.lineage.chunks[0].file
    ]


def test_a_disk_that_cannot_write_what_it_took_fails_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk reports an error of an earlier chunk only when it is waited for."""
    replay = Replay(TABLES, steps(6), deletes=0.1)
    files = GatedFiles()
    store = Store.create(files, "m", list(TABLES.values()))
    sync = os.fdatasync
    failed: list[str] = []

    def failing(file: int) -> None:
        path = os.readlink(f"/proc/self/fd/{file}")
        if path.endswith(".staged") and not failed:
            failed.append(path)
            raise OSError(errno.EIO, "Input/output error")
        sync(file)

    monkeypatch.setattr(os, "fdatasync", failing)
    with staged(store, replay, tmp_path / "ssd") as writer:
        open_before = open_files(tmp_path)
        replay.now = 1
        # The upload stalls, so chunks wait in the folder: more than may be behind the disk.
        with pytest.raises(IoError, match=r"\.staged: Input/output error"):
            whole(writer, 1)
        files.go_on.set()
        assert writer.wait() is None
        assert len(failed) == 1
        assert left_in(tmp_path / "ssd") == []
        assert open_files(tmp_path) == open_before
        writer.write(1, {"dense": b"1"})
        writer.wait()
        assert open_files(tmp_path) == open_before
    check(store, replay, [1])


def test_a_flipped_bit_on_the_ssd_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = Replay(TABLES, steps(6))
    replay.now = 1
    files = MemoryFiles()
    store = Store.create(files, "m", list(TABLES.values()))
    write = os.write

    def turned(file: int, content: memoryview) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith("2.staged"):
            content = memoryview(bytes(content[:9]) + bytes([content[9] ^ 4]) + bytes(content[10:]))
        return write(file, content)

    monkeypatch.setattr(os, "write", turned)
    with (
        staged(store, replay, tmp_path / "ssd") as writer,
        pytest.raises(IoError, match=r"2\.staged does not fit its checksum"),
    ):
        whole(writer, 1)
    assert Store.open(files).state.versions() == []


def test_an_error_after_the_commit_is_logged_and_the_version_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fails = True

    class Fails(type(POLICIES["consecutive"]())):  # type: ignore[misc]
        def arrange(self, store: Store) -> None:
            if fails:
                raise IoError("nothing is merged today")
            super().arrange(store)

    replay = Replay(TABLES, steps(8), deletes=0.1)
    store = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    device = SourceDevice(replay, TABLES)
    with StagedCheckpointer(store, Fails(), device, tmp_path / "ssd", chunk_bytes=CHUNK) as writer:
        for version in (1, 2, 3):
            fails = version < 3
            caplog.clear()
            replay.now = version
            writer.write(version, {"dense": b"%d" % version})
            entry = writer.wait()
            assert entry is not None
            assert entry.version == version
            messages = [record.getMessage() for record in caplog.records]
            assert any("nothing is merged today" in message for message in messages) == fails
            writer.cancel()  # too late: the version is committed
            assert writer.wait() is None
    check(Store.open(tmp_path / "store"), replay, [1, 2, 3])


class FailsByChance(MemoryFiles):
    """Files whose operations fail at random; bundles also fail between two pieces."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance, self.share = chance, 0.0

    def _step(self) -> bool:
        if self.chance.random() < self.share:
            raise IoError("memory: by chance")
        return super()._step()

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""

        def torn() -> Iterator[bytes | memoryview]:
            for piece in pieces:
                if self.chance.random() < self.share / 4:
                    raise IoError("memory: by chance, in a bundle")
                yield piece

        super().write(path, torn())


@pytest.mark.parametrize("policy", ["2d", "intermittent", "merged"])
def test_after_any_failure_or_cancel_each_listed_version_is_whole(
    tmp_path: Path, policy: str
) -> None:
    """Write versions with random success, error and cancel; cancels come from a second thread."""
    chance = random.Random(SEED)
    count = 30
    replay = Replay(TABLES, steps(SEED, count), deletes=0.1)
    files = FailsByChance(random.Random(SEED + 1))
    store = Store.create(files, "m", list(TABLES.values()))
    outcomes: Counter[str] = Counter()
    over = threading.Event()
    with staged(store, replay, tmp_path / "ssd", policy) as writer:

        def cancels() -> None:
            mine = random.Random(SEED + 2)
            while not over.wait(mine.uniform(0, 0.2)):
                writer.cancel()

        thread = threading.Thread(target=cancels)
        thread.start()
        try:
            for version in range(1, count + 1):
                replay.now = version
                files.share = chance.choice([0.0, 0.0, 0.2])
                for call in (
                    lambda version=version: writer.write(version, {"dense": b"%d" % version}),
                    *((writer.wait,) if chance.random() < 0.5 else ()),
                ):
                    try:
                        call()
                        outcomes["done"] += 1
                    except (IoError, FailedPrecondition) as error:
                        outcomes[type(error).__name__] += 1
        finally:
            over.set()
            thread.join()
        files.share = 0.0
        with contextlib.suppress(IoError, FailedPrecondition):
            writer.wait()
        assert left_in(tmp_path / "ssd") == []
        replay.now = count
        if not store.state.versions() or store.state.versions()[-1].version < count:
            writer.write(count, {"dense": b"%d" % count})
    print(dict(outcomes))
    found = [entry.version for entry in Store.open(files).state.versions()]
    assert found[-1] == count
    check(Store.open(files), replay, found)
