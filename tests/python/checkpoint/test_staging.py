"""Staged versions: their contents, their resident memory, and errors of the caller.

Every version is compared with a replay, while the trainer continues as soon as write() returns.
Does not cover: failures (test_staging_faults.py, test_staging_crash.py), how long a trainer waits
(bench), a device for torch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.checkpoint import (
    POLICIES,
    Bandwidth,
    Checkpointer,
    Column,
    Quantising,
    SourceDevice,
    StagedCheckpointer,
    Store,
    Table,
    spool,
    stages,
)
from petps.checkpoint.chunk import Keys, Mask
from petps.checkpoint.policy import TwoD
from petps.errors import FailedPrecondition, InvalidArgument
from tests.python.checkpoint.memory import MemoryFiles
from tests.python.checkpoint.replay import Replay, assert_same, check_versions

TABLES = {
    "items": Table("items", (Column("row", "f32", 4), Column("momentum", "f16", 1))),
    "users": Table.of("users", 16),
}
VERSIONS = 8
CHUNK = 1 << 14
GENEROUS = 120.0  # seconds: a timeout for events that must happen


def steps(seed: int, count: int = VERSIONS) -> list[dict[str, Keys]]:
    """Return the changed keys: several chunks a table at first, then one chunk, and once none."""
    rng = np.random.default_rng(seed)
    return [
        {
            "items": np.unique(rng.integers(0, 12_000, 6000 if number < 2 else 200)).astype("<u8"),
            "users": np.unique(rng.integers(0, 900, 700 * (number != 2))).astype("<u8"),
        }
        for number in range(count)
    ]


class GatedFiles(MemoryFiles):
    """Files that stall at each piece of a bundle until go_on is set."""

    def __init__(self) -> None:
        super().__init__()
        self.stalled, self.go_on = threading.Event(), threading.Event()
        self.seen: Callable[[], None] = lambda: None

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""

        def gated() -> Iterator[bytes | memoryview]:
            for piece in pieces:
                self.seen()
                self.stalled.set()
                assert self.go_on.wait(GENEROUS)
                yield piece

        super().write(path, gated() if path.startswith("data/") else pieces)


class Copies(SourceDevice):
    """A device that counts copies, and stops before copy number ``at``."""

    def __init__(self, replay: Replay, at: int = 0) -> None:
        super().__init__(replay, replay.tables)
        self.count, self.at = 0, at
        self.stopped, self.go_on = threading.Event(), threading.Event()
        self.counted = threading.Condition()

    def copy(self, table: str, keys: Keys, out: Mapping[str, np.ndarray]) -> Mask | None:
        """See Device."""
        with self.counted:
            self.count += 1
            self.counted.notify_all()
        if self.count == self.at:
            self.stopped.set()
            assert self.go_on.wait(GENEROUS)
        return super().copy(table, keys, out)

    def came_to(self, count: int) -> bool:
        with self.counted:
            return self.counted.wait_for(lambda: self.count >= count, GENEROUS)


def staged(
    store: Store, replay: Replay, folder: Path, policy: str = "consecutive", **options: Any
) -> StagedCheckpointer:
    device = SourceDevice(replay, replay.tables)
    return StagedCheckpointer(
        store, POLICIES[policy](), device, folder, **{"chunk_bytes": CHUNK, **options}
    )


def whole(writer: StagedCheckpointer, version: int) -> None:
    """Write a version and wait for it: either call may raise the error."""
    writer.write(version)
    writer.wait()


def check(store: Store, replay: Replay, versions: list[int]) -> None:
    check_versions(store, replay, versions)
    assert store.verify() == []


def left_in(folder: Path) -> list[Path]:
    return list(folder.glob("*.staged"))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_version_has_the_rows_of_when_write_began(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "SLICE_ROWS", 100)  # a chunk is copied in several slices
    replay = Replay(TABLES, steps(1), deletes=0.1)
    store = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    with staged(store, replay, tmp_path / "ssd", policy) as writer:
        for version in range(1, VERSIONS + 1):
            replay.now = version
            writer.write(version, {"dense": b"%d" % version})
            replay.now = 0  # the trainer continues: the version's rows can no longer be read
        entry = writer.wait()
        assert entry is not None
        assert entry.version == VERSIONS
        assert writer.wait() is None, "the version is returned once"
        assert 2 <= writer.resident_chunks_max <= 4
    assert left_in(tmp_path / "ssd") == []
    check(Store.open(tmp_path / "store"), replay, list(range(1, VERSIONS + 1)))


@pytest.mark.parametrize("whole", [True, False])
def test_staging_quantises_as_without_staging(tmp_path: Path, whole: bool) -> None:
    """Quantise in place, chunk by chunk, rows of three dtypes with deletions among them."""
    tables = {
        "items": Table("items", (Column("row", "f32", 40), Column("moment", "f32", 24))),
        "half": Table("half", (Column("row", "bf16", 16), Column("count", "f32", 1))),
        "int8": Table.of("int8", 16, "int8"),
    }
    rng = np.random.default_rng(2)
    changes = [
        {name: np.unique(rng.integers(0, 1500, 700)).astype("<u8") for name in tables}
        for _ in range(4)
    ]
    replay = Replay(tables, changes, deletes=0.1)
    wanted = None if whole else Quantising(3, seed=5)
    stores = [
        Store.create(tmp_path / name, "m", list(tables.values()), wanted) for name in ("a", "b")
    ]
    plain = Checkpointer(stores[0], POLICIES["consecutive"](), replay)
    with staged(stores[1], replay, tmp_path / "ssd") as writer:
        for version in range(1, 5):
            replay.now = version
            plain.write(version)
            began = time.monotonic()
            writer.write(version)
            writer.wait()
            times = [began, *(moment for span in writer.quantised for moment in span)]
            assert times == sorted(times)
            assert bool(writer.quantised) != whole
    for version in range(1, 5):
        kinds = [dict(store.tables_of(version)) for store in stores]
        assert kinds[0] == kinds[1]
        assert (kinds[0] == tables) == whole
        one, other = (store.restore(version) for store in stores)
        for name in tables:
            assert_same(other[name], one[name])
    assert stores[1].verify() == []


def test_a_trainer_continues_while_the_store_stalls(tmp_path: Path) -> None:
    """All rows but four buffers are on the SSD; no version is listed before all is uploaded."""
    replay = Replay(TABLES, steps(3), deletes=0.1)
    replay.now = 1
    files = GatedFiles()
    store = Store.create(files, "m", list(TABLES.values()))
    with staged(store, replay, tmp_path / "ssd") as writer:
        writer.write(1, {"dense": b"1"})
        assert files.stalled.wait(GENEROUS)
        assert not any(path.startswith("lines/") for path in files.held)
        assert Store.open(files).state.versions() == []
        files.go_on.set()
        entry = writer.wait()
        assert entry is not None
        assert len(store.state.lineage.chunks) > 4, "or it says nothing about four"
        assert writer.resident_chunks_max <= 4
    check(store, replay, [1])


def test_the_copy_of_small_tables_waits_for_no_other_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six tables fit into a buffer, so their copy ends although the folder takes no chunk."""
    tables = {f"t{number}": Table.of(f"t{number}", 4) for number in range(6)}
    keys = np.arange(20, dtype="<u8")
    replay = Replay(tables, [dict.fromkeys(tables, keys)])
    go_on, write = threading.Event(), spool.Spool.write

    def gated(self: spool.Spool, content: memoryview) -> spool.Spooled:
        assert go_on.wait(GENEROUS)
        return write(self, content)

    monkeypatch.setattr(spool.Spool, "write", gated)
    store = Store.create(tmp_path / "store", "m", list(tables.values()))
    with staged(store, replay, tmp_path / "ssd") as writer, ThreadPoolExecutor(1) as pool:
        replay.now = 1
        written = pool.submit(writer.write, 1, {"dense": b"1"})
        try:
            written.result(GENEROUS / 4)
        finally:
            go_on.set()
        writer.wait()
    check(store, replay, [1])


def test_the_folder_is_bounded_and_the_copy_waits_for_room(tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(3))
    replay.now = 1
    files, device = GatedFiles(), Copies(replay)
    store = Store.create(files, "m", list(TABLES.values()))
    most: list[int] = []

    def seen() -> None:
        sizes = []
        for path in left_in(tmp_path / "ssd"):
            with contextlib.suppress(FileNotFoundError):  # staging removed it after it was listed
                sizes.append(path.stat().st_size)
        most.append(sum(sizes))

    files.seen = seen
    with StagedCheckpointer(
        store, POLICIES["full"](), device, tmp_path / "ssd",
        chunk_bytes=CHUNK, folder_bytes=2 * CHUNK,
    ) as writer, ThreadPoolExecutor(1) as pool:  # fmt: skip
        written = pool.submit(writer.write, 1, {"dense": b"1"})
        assert files.stalled.wait(GENEROUS)
        # Two buffers down and two up, two to three small chunks in the folder, one being copied:
        # at the sixth copy, all buffers are in use.
        assert device.came_to(6)
        assert device.count <= 8
        files.go_on.set()
        written.result(GENEROUS)
        writer.wait()
        assert device.count > 8
        assert 0 < max(most) <= 2 * CHUNK
        assert writer.resident_chunks_max == 4
    check(store, replay, [1])


def test_cancel_while_rows_are_copied(tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(7), deletes=0.1)
    replay.now = 1
    store = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    device = Copies(replay, at=4)
    with StagedCheckpointer(
        store, POLICIES["2d"](), device, tmp_path / "ssd", chunk_bytes=CHUNK
    ) as writer, ThreadPoolExecutor(1) as pool:  # fmt: skip
        written = pool.submit(writer.write, 1)
        assert device.stopped.wait(GENEROUS)
        with pytest.raises(FailedPrecondition, match="is being written: cancel it"):
            writer.write(1)
        writer.cancel()
        device.go_on.set()
        with pytest.raises(FailedPrecondition, match="the checkpoint was cancelled"):
            written.result(GENEROUS)
        assert writer.wait() is None, "the error was raised"
        assert left_in(tmp_path / "ssd") == []
        assert Store.open(tmp_path / "store").state.versions() == []
        assert list((tmp_path / "store").glob("data/*")) == []
        writer.cancel()  # no version is in flight
        writer.write(1, {"dense": b"1"})
    check(store, replay, [1])


def test_cancel_during_the_upload(tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(8), deletes=0.1)
    replay.now = 1
    files = GatedFiles()
    store = Store.create(files, "m", list(TABLES.values()))
    with staged(store, replay, tmp_path / "ssd") as writer:
        writer.write(1)
        assert files.stalled.wait(GENEROUS)
        writer.cancel()
        files.go_on.set()
        with pytest.raises(FailedPrecondition, match="was cancelled"):
            writer.wait()
        assert left_in(tmp_path / "ssd") == []
        assert Store.open(files).state.versions() == []
        writer.write(1, {"dense": b"1"})
        writer.wait()
        writer.cancel()  # too late: the version is committed
    check(store, replay, [1])


@pytest.mark.parametrize("ranks", [False, True])
def test_cancel_while_a_base_is_sampled(tmp_path: Path, ranks: bool) -> None:
    replay = Replay({"users": Table.of("users", 32)}, [{"users": np.arange(700, dtype="<u8")}])
    replay.now = 1
    store = Store.create(tmp_path / "store", "m", list(replay.tables.values()), Quantising(1))
    with staged(store, replay, tmp_path / "ssd") as writer:

        class Cancels(Copies):
            def copy(self, table: str, keys: Keys, out: Mapping[str, np.ndarray]) -> Mask | None:
                if self.count == 0:
                    writer.cancel()
                return super().copy(table, keys, out)

        writer._stager.device = Cancels(replay)
        call = writer.next if ranks else lambda: writer.write(1)
        with pytest.raises(FailedPrecondition, match="was cancelled"):
            call()
        assert writer.wait() is None, "the error was raised"
        assert Store.open(tmp_path / "store").state.versions() == []
        decision = writer.next()
        writer.cancel()  # no version is in flight
        writer.share(1, decision, 0, 1, {"dense": b"1"})
        writer.wait()
        writer.commit(1)
        entry = writer.wait()
        assert entry is not None
        assert entry.version == 1


@pytest.mark.parametrize(
    ("columns", "chunk_bytes"), [(1, CHUNK), (20, CHUNK), (60, 4 * CHUNK), (120, 4 * CHUNK)]
)
def test_a_table_of_many_columns(tmp_path: Path, columns: int, chunk_bytes: int) -> None:
    """The names and paddings of many columns need space in a buffer beside the rows."""
    state = (f"a_long_name_of_a_column_of_the_optimizer_{number:04}" for number in range(columns))
    table = Table("t", (Column("row", "f32", 1), *(Column(name, "int8", 1) for name in state)))
    keys = np.arange(2000, dtype="<u8")
    replay = Replay({"t": table}, [{"t": keys}, {"t": keys}], deletes=0.1)
    store = Store.create(tmp_path / "store", "m", [table])
    with staged(store, replay, tmp_path / "ssd", chunk_bytes=chunk_bytes) as writer:
        for version in (1, 2):
            replay.now = version
            writer.write(version, {"dense": b"%d" % version})
            writer.wait()
    assert len(store.state.lineage.chunks) > 2, "or no buffer was full"
    check(Store.open(tmp_path / "store"), replay, [1, 2])


def test_the_error_names_the_least_buffer_of_many_columns(tmp_path: Path) -> None:
    names = (f"a_long_name_of_a_column_of_the_optimizer_{number:04}" for number in range(120))
    table = Table("t", (Column("row", "f32", 1), *(Column(name, "int8", 1) for name in names)))
    replay = Replay({"t": table}, [{"t": np.arange(30, dtype="<u8")}], deletes=0.1)
    replay.now = 1
    store = Store.create(tmp_path / "store", "m", [table])
    with pytest.raises(InvalidArgument, match=r"no row of table t: set at least \d+") as caught:
        staged(store, replay, tmp_path / "ssd", chunk_bytes=CHUNK)
    least = int(str(caught.value).split()[-1])
    with staged(store, replay, tmp_path / "ssd", chunk_bytes=least) as writer:
        writer.write(1, {"dense": b"1"})
    assert len(store.state.lineage.chunks) > 1
    check(Store.open(tmp_path / "store"), replay, [1])


class Part(SourceDevice):
    """A device with the rows of one of two ranks: the keys are dealt in turn."""

    def __init__(self, replay: Replay, rank: int) -> None:
        super().__init__(replay, replay.tables)
        self.rank = rank

    def keys(self, table: str, since: int | None, at_most: int) -> Iterator[Keys]:
        """See Device."""
        for piece in super().keys(table, since, at_most):
            yield piece[piece % 2 == self.rank]


def test_ranks_stage_their_shares(tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(13), deletes=0.1)
    Store.create(tmp_path / "store", "m", list(TABLES.values()))
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                StagedCheckpointer(
                    Store.open(tmp_path / "store"),
                    TwoD(resets=False),
                    Part(replay, rank),
                    tmp_path / f"ssd{rank}",
                    chunk_bytes=CHUNK,
                )
            )
            for rank in range(2)
        ]
        for version in range(1, VERSIONS + 1):
            replay.now = version
            decision = ranks[0].next()  # the rank that asks need not be the rank that commits
            assert decision.since == (None if version == 1 else version - 1)
            ranks[0].share(version, decision, 0, 2, {"dense": b"%d" % version})
            if version == 3:
                ranks[0].commit(version)
                with pytest.raises(
                    FailedPrecondition, match=r"of 2 ranks there is no share of rank 1"
                ):
                    ranks[0].wait()
            ranks[1].share(version, decision, 1, 2)
            replay.now = 0
            for writer in ranks:
                writer.wait()
            assert Store.open(tmp_path / "store").state.versions()[version - 1 :] == []
            ranks[version % 2].commit(version)
            entry = ranks[version % 2].wait()
            assert entry is not None
            assert entry.version == version
    check(Store.open(tmp_path / "store"), replay, list(range(1, VERSIONS + 1)))


def test_any_filesystem_of_fsspec(tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(12), deletes=0.1)
    url = "memory://petps-test-staging"
    with staged(
        Store.create(url, "m", list(TABLES.values())), replay, tmp_path / "ssd", "2d"
    ) as writer:
        for version in range(1, VERSIONS + 1):
            replay.now = version
            writer.write(version, {"dense": b"%d" % version})
            replay.now = 0
    check(Store.open(url), replay, list(range(1, VERSIONS + 1)))


def test_an_error_in_the_block_cancels(tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(8))
    replay.now = 1
    files = GatedFiles()
    store = Store.create(files, "m", list(TABLES.values()))
    writer = staged(store, replay, tmp_path / "ssd")

    def fails() -> None:
        with writer:
            writer.write(1)
            assert files.stalled.wait(GENEROUS)
            threading.Thread(target=open_gate).start()
            raise ZeroDivisionError

    def open_gate() -> None:
        flight = writer._stager.flight
        assert flight is not None
        with contextlib.suppress(Exception):
            flight.wait_until(lambda: False)  # until it is cancelled
        files.go_on.set()

    with pytest.raises(ZeroDivisionError):
        fails()
    assert left_in(tmp_path / "ssd") == []
    assert Store.open(files).state.versions() == []
    with pytest.raises(FailedPrecondition, match="is closed"):
        writer.write(1)
    writer.close()


class Clock:
    """A clock that only moves when the bandwidth makes the caller wait."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Waited(Bandwidth):
    """A bandwidth that moves the clock instead of waiting; it records the bytes sent by when."""

    def __init__(self, rate: float, clock: Clock) -> None:
        super().__init__(rate, clock)
        self.clock, self.gone = clock, [(0.0, 0)]

    def delay(self, count: int) -> float:
        """See Bandwidth."""
        self.clock.seconds += super().delay(count)
        self.gone.append((self.clock.seconds, self.gone[-1][1] + count))
        return 0.0


def test_the_upload_keeps_within_its_bandwidth(tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(9))
    replay.now = 1
    files = MemoryFiles()
    store = Store.create(files, "m", list(TABLES.values()))
    clock = Clock()
    bandwidth = Waited(10_000.0, clock)
    with staged(store, replay, tmp_path / "ssd", bandwidth=bandwidth) as writer:
        writer.write(1, {"dense": b"1"})
    check(store, replay, [1])
    uploaded = sum(len(body) for path, body in files.held.items() if path.startswith("data/"))
    assert bandwidth.gone[-1][1] == uploaded > 8 * CHUNK
    for (_, before), (seconds, _) in zip(bandwidth.gone, bandwidth.gone[1:], strict=False):
        assert before <= 10_000 * seconds * (1 + 1e-9)
    clock.seconds += 100.0
    assert bandwidth.delay(1) == 0.0, "unused bandwidth is not saved ..."
    clock_then = clock.seconds
    bandwidth.delay(5_000)
    bandwidth.delay(1)
    assert clock.seconds == pytest.approx(clock_then + 0.5001, abs=1e-6), "... by a burst"
    with pytest.raises(InvalidArgument, match="more than 0"):
        Bandwidth(0)


def test_bad_input_is_named(tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(10), deletes=0.1)
    replay.now = 1
    store = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    with pytest.raises(InvalidArgument, match="chunk_bytes 4096 holds no row of table items"):
        staged(store, replay, tmp_path / "ssd", chunk_bytes=4096)
    with pytest.raises(InvalidArgument, match="at least chunk_bytes, 16384, got 100"):
        staged(store, replay, tmp_path / "ssd", folder_bytes=100)
    with staged(store, replay, tmp_path / "ssd") as writer:
        with pytest.raises(FailedPrecondition, match="ssd is in use by another checkpointer"):
            staged(store, replay, tmp_path / "ssd")
        writer.write(1, {"dense": b"1"})
        writer.wait()
        writer.write(1)
        with pytest.raises(InvalidArgument, match="version 1 is not above 1"):
            writer.wait()
    staged(store, replay, tmp_path / "ssd").close()

    class Bad(SourceDevice):
        fault = ""

        def keys(self, table: str, since: int | None, at_most: int) -> Iterator[Keys]:
            pieces = list(super().keys(table, since, at_most))
            if self.fault == "order":
                return iter(pieces[::-1])
            if self.fault == "pieces":
                return iter([np.concatenate(pieces)])
            return iter([piece[::-1] for piece in pieces] if self.fault == "keys" else pieces)

        def copy(self, table: str, keys: Keys, out: Mapping[str, np.ndarray]) -> Mask | None:
            deleted = super().copy(table, keys, out)
            if self.fault == "nan":
                out["row"][3] = np.nan
            if deleted is not None:
                out["row"][deleted] = np.nan  # a deleted row may hold anything
            return np.ones(len(keys), np.bool_) if self.fault == "deleted" else deleted

    device = Bad(replay, TABLES)
    for fault, message in (
        ("order", "the pieces' keys do not ascend"),
        ("pieces", r"table items: \d+ keys in a piece, at most 455"),
        ("keys", "table items: the device's keys do not ascend"),
        ("nan", r"table items, of keys \d+ to \d+: column row: .* is not finite"),
        ("deleted", "a base must not have deleted rows"),
    ):
        with StagedCheckpointer(
            store, POLICIES["full"](), device, tmp_path / "ssd", chunk_bytes=CHUNK
        ) as writer:
            device.fault = fault
            with pytest.raises(InvalidArgument, match=message):
                whole(writer, 2)
            writer.wait()
        device.fault = ""
    check(Store.open(tmp_path / "store"), replay, [1])
    with StagedCheckpointer(
        store, POLICIES["consecutive"](), device, tmp_path / "ssd", chunk_bytes=CHUNK
    ) as writer:
        replay.now = 2
        writer.write(2, {"dense": b"2"})
    check(Store.open(tmp_path / "store"), replay, [1, 2])
