"""The tracker: refused calls, threads, memory, spilled files, disks that refuse.

test_tracker_model.py compares its answers with plain sets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from petps.train.tracker import Touched, Tracker, jagged_unique, sets

SEED = 5051


def new_tracker(**options: object) -> Tracker:
    return Tracker({"dense": 1000, "sparse": None}, tenants=["a"], **options)  # type: ignore[arg-type]


def test_a_tenant_that_fails_loses_nothing() -> None:
    tracker = new_tracker()
    tracker.track("sparse", [3, 1, 3])

    def publish() -> None:
        with tracker.read("a") as reading:
            assert reading.ids("sparse").tolist() == [1, 3]
            raise OSError("the log refused")

    with pytest.raises(OSError, match="log"):
        publish()
    tracker.track("sparse", [2])
    with tracker.read("a") as reading:
        assert reading.ids("sparse").tolist() == [1, 2, 3]
        reading.acknowledge()
    assert tracker.read("a").ids("sparse").tolist() == []
    assert tracker.resident_bytes == 0


def test_a_reading_that_is_over_is_refused() -> None:
    tracker = new_tracker()
    tracker.track("sparse", [1])
    first = tracker.read("a")
    second = tracker.read("a")
    for call in (first.acknowledge, lambda: first.ids("sparse")):
        with pytest.raises(FailedPrecondition, match="reading of tenant a is over"):
            call()
    first.abandon()  # no effect on the second reading
    second.acknowledge()
    with pytest.raises(FailedPrecondition, match=r"call read\(\) again"):
        second.acknowledge()
    third = tracker.read("a")
    tracker.remove_tenant("a")
    with pytest.raises(FailedPrecondition, match="is over"):
        third.ids("sparse")


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, -5], r"sparse: ids\[1\] must be at least 0, got -5"),
        (np.array([1.0]), "sparse: ids must be integers, got float64"),
        ([True], "sparse: ids must be integers, got bool"),
        (["1"], "sparse: ids must be integers, got <U1"),
    ],
)
def test_bad_ids_are_named_and_not_recorded(ids: object, expected: str) -> None:
    tracker = new_tracker()
    with pytest.raises(InvalidArgument, match=expected):
        tracker.track("sparse", ids)  # type: ignore[arg-type]
    assert tracker.read("a").ids("sparse").tolist() == []


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda t: t.track("dense", [5, 1000]),
            InvalidArgument,
            r"ids\[1\] must be below 1000, .*",
        ),
        (lambda t: t.track("other", [1]), NotFound, "no table 'other'; it has: dense, sparse"),
        (lambda t: t.read("a").ids("other"), NotFound, "no table 'other'"),
        (lambda t: t.read("b"), NotFound, "no tenant 'b'; it has: a"),
        (lambda t: t.remove_tenant("b"), NotFound, "no tenant 'b'"),
        (lambda t: t.add_tenant("a"), AlreadyExists, "tenant a exists"),
        (lambda t: t.add_table("dense"), AlreadyExists, "table dense is tracked already"),
        (lambda t: Tracker([("t", None), ("t", 3)]), AlreadyExists, "table t is tracked already"),
        (
            lambda t: t.track("sparse", [1, 2], [0.5]),
            InvalidArgument,
            "one state for each of the 2",
        ),
        (lambda t: t.track("sparse", [1]), InvalidArgument, "is none, before it was float64"),
        (lambda t: new_tracker(keep="newest"), InvalidArgument, "keep must be .*, got 'newest'"),
        (lambda t: Tracker(spill="folder"), InvalidArgument, "needs memory_bytes"),
        (lambda t: t.add_table("t", -1), InvalidArgument, "rows must be above 0 or None, got -1"),
    ],
)
def test_a_bad_call_is_named(call: Any, error: type[Exception], message: str) -> None:
    tracker = new_tracker()
    tracker.track("sparse", [1, 2], [0.5, 0.5])
    with pytest.raises(error, match=message):
        call(tracker)


def test_a_closed_tracker_refuses_calls() -> None:
    tracker = new_tracker()
    tracker.close()
    tracker.close()
    for call in (lambda: tracker.track("dense", [1]), lambda: tracker.read("a"), tracker.compact):
        with pytest.raises(FailedPrecondition, match="closed"):
            call()


def test_given_ids_are_copied_and_returned_ids_are_read_only() -> None:
    tracker = new_tracker()
    ids = np.array([4, 5], np.uint64)
    tracker.track("sparse", ids)
    ids[:] = 9
    found = tracker.read("a").ids("sparse")
    assert found.tolist() == [4, 5]
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


def test_tenants_read_at_their_own_intervals_over_one_storage() -> None:
    tracker = Tracker({"t": None}, tenants=["slow", "fast"])
    one_reading = 8 * 1000
    for step in range(50):
        tracker.track("t", np.arange(1000))  # the same ids in each step: DECK's worst case
        if step % 2:
            reading = tracker.read("fast")
            assert len(reading.ids("t")) == 1000
            reading.acknowledge()
        assert tracker.segments <= 2
        tracker.compact()
        assert tracker.resident_bytes <= 3 * one_reading  # two tenants, and the open segment
    assert len(tracker.read("slow").ids("t")) == 1000


def test_a_dense_table_becomes_bits() -> None:
    rows = 1 << 20
    tracker = Tracker({"t": rows}, tenants=["a"])
    few = rows // 64
    tracker.track("t", np.arange(few))
    tracker.compact()
    assert tracker.resident_bytes == 8 * few == rows // 8
    tracker.track("t", [few])
    for _ in range(2):
        tracker.track("t", np.arange(few))
    tracker.compact()
    assert tracker.resident_bytes == rows // 8
    for start in range(0, rows, rows // 16):  # never more bytes, even without compact()
        tracker.track("t", np.arange(start, start + rows // 16)[::-1])
        assert tracker.resident_bytes == rows // 8
    np.testing.assert_array_equal(tracker.read("a").ids("t"), np.arange(rows))


def test_repeated_ids_stay_bounded_without_compact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petps.train.tracker.tracker.PENDING_IDS", 10_000)
    tracker = new_tracker()
    for _ in range(500):
        tracker.track("sparse", np.arange(1000))
        assert tracker.resident_bytes <= 8 * 12_000
    assert len(tracker.read("a").ids("sparse")) == 1000


def test_ids_tracked_during_a_compaction_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = new_tracker()
    real = sets.find_distinct
    late = iter([300, 301])

    def slow(*arguments: Any) -> dict[str, Touched]:
        found = real(*arguments)
        for table in ("dense", "sparse"):
            tracker.track(table, [next(late)])
            tracker.track(table, [1])
        monkeypatch.undo()
        return found

    for table in ("dense", "sparse"):
        # The dense table becomes bits here.
        tracker.track(table, np.repeat(np.arange(200), 2))
    monkeypatch.setattr("petps.train.tracker.tracker.find_distinct", slow)
    assert tracker.compact() == 400
    reading = tracker.read("a")
    assert reading.ids("dense").tolist() == [*range(200), 300]
    assert reading.ids("sparse").tolist() == [*range(200), 301]


def test_compact_costs_little_however_often_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of ids that pass through compactions is a small multiple of those tracked."""
    seen = 0
    real = jagged_unique

    def counted(values, offsets, **options):  # type: ignore[no-untyped-def]
        nonlocal seen
        seen += len(values)
        return real(values, offsets, **options)

    monkeypatch.setattr(sets, "jagged_unique", counted)
    tracker = new_tracker()
    for step in range(1000):
        tracker.track("sparse", np.arange(step * 100, step * 100 + 100))
        tracker.compact()
    assert len(tracker.read("a").ids("sparse")) == 100_000
    assert seen <= 4 * 100_000


def test_many_threads_track_while_tenants_read(tmp_path: Path) -> None:
    """Every id reaches each tenant, and no id before it was tracked."""
    threads, steps, size = 4, 150, 200
    tracker = Tracker(
        {"t": threads * steps * size, "s": None},
        tenants=["a", "b"],
        memory_bytes=100_000,
        spill=tmp_path,
    )
    failed: list[BaseException] = []
    done = threading.Event()
    seen = {tenant: {"t": [], "s": []} for tenant in ("a", "b")}  # type: ignore[var-annotated]

    def train(number: int) -> None:
        try:
            for step in range(steps):
                start = (number * steps + step) * size
                for table in ("t", "s"):
                    tracker.track(table, np.arange(start, start + size))
                tracker.compact()
        except BaseException as error:
            failed.append(error)

    def read(tenant: str) -> None:
        try:
            last = False
            number = 0
            while not last:
                last = done.is_set()
                number += 1
                with tracker.read(tenant) as reading:
                    found = {table: reading.ids(table) for table in ("t", "s")}
                    if number % 3 or last:  # the other readings are abandoned
                        reading.acknowledge()
                        for table, ids in found.items():
                            seen[tenant][table].append(ids)
        except BaseException as error:
            failed.append(error)

    readers = [threading.Thread(target=read, args=(tenant,)) for tenant in ("a", "b")]
    trainers = [threading.Thread(target=train, args=(number,)) for number in range(threads)]
    for thread in (*readers, *trainers):
        thread.start()
    for trainer in trainers:
        trainer.join(120)
    done.set()
    for reader in readers:
        reader.join(120)
    assert not failed
    for ids_by_table in seen.values():
        for parts in ids_by_table.values():  # no id repeats here, so each is handed out once
            ids = np.concatenate(parts)
            assert len(ids) == threads * steps * size
            np.testing.assert_array_equal(np.sort(ids), np.arange(len(ids)))
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_ids_beyond_the_budget_are_spilled_to_files(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    random = np.random.default_rng(SEED)
    budget = 256 << 10
    tracker = Tracker(
        {"ids": None, "states": None, "bits": 4_000_000},
        tenants=["slow", "fast"],
        memory_bytes=budget,
        spill=tmp_path,
    )
    touched: dict[str, set[int]] = {"ids": set(), "states": set(), "bits": set()}
    states: dict[int, int] = {}
    for step in range(120):
        for table, space in (("ids", 2**63), ("states", 50_000), ("bits", 4_000_000)):
            ids = random.integers(0, space, 2000)
            state = np.full(2000, step, np.int32) if table == "states" else None
            tracker.track(table, ids, state)
            touched[table] |= set(ids.tolist())
            if table == "states":
                states |= dict.fromkeys(ids.tolist(), step)
            assert tracker.resident_bytes <= budget * 9 // 8 + 2000 * 12
        if step % 10 == 9:
            tracker.read("fast").acknowledge()
    assert tracker.spilled_bytes > budget
    files = len(list(tmp_path.iterdir()))
    assert files <= 16  # files are merged when new ones are written
    reading = tracker.read("slow")
    for table, expected in touched.items():
        found = reading.touched(table)
        assert found.ids.tolist() == sorted(expected)
        if table == "states":
            assert found.state is not None
            assert found.state.tolist() == [states[key] for key in sorted(expected)]
    reading.acknowledge()
    tracker.read("fast").acknowledge()
    assert (tracker.spilled_bytes, tracker.resident_bytes) == (0, 0)
    assert list(tmp_path.iterdir()) == []


def test_reading_spilled_ids_takes_one_table_at_a_time(tmp_path: Path) -> None:
    tables = [f"t{number}" for number in range(16)]
    size = 50_000
    tracker = Tracker(dict.fromkeys(tables), tenants=["a"], memory_bytes=size * 8, spill=tmp_path)
    for number, table in enumerate(tables):
        tracker.track(table, np.arange(size) + number)
    tracemalloc.start()
    reading = tracker.read("a")
    for number, table in enumerate(tables):
        assert int(reading.ids(table)[0]) == number
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * size * 8


class Refusing:
    """A disk that is full until ``full`` is False."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = True
        opened = open

        def refuse(path, mode="r", *rest, **named):  # type: ignore[no-untyped-def]
            file = opened(path, mode, *rest, **named)
            if self.full and str(path).endswith(".segment") and "x" in mode:
                file.write(b"half")
                file.flush()
                file.close()
                raise OSError(28, "No space left on device")
            return file

        monkeypatch.setattr("petps.train.tracker.spill.open", refuse, raising=False)


def test_a_full_disk_is_reported_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Refusing(monkeypatch)
    budget = 80_000
    tracker = Tracker({"t": None}, tenants=["a"], memory_bytes=budget, spill=tmp_path)
    refused: list[str] = []
    for step in range(400):
        try:
            tracker.track("t", np.arange(step * 100, step * 100 + 100))
        except ResourceExhausted as error:
            refused.append(str(error))
    assert 5 <= len(refused) < 100  # once for each 1/16 of the budget, not in each call
    assert "No space left on device. They stay in memory, and none is lost" in refused[0]
    assert list(tmp_path.iterdir()) == []
    assert tracker.resident_bytes >= 40 * 8000
    disk.full = False
    tracker.track("t", np.arange(40_000, 41_000))
    assert tracker.resident_bytes <= budget
    np.testing.assert_array_equal(tracker.read("a").ids("t"), np.arange(41_000))


def test_a_file_that_fails_on_close_has_no_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids fit in the file's buffer, so the disk first refuses when the file is closed."""
    opened = open
    full = lambda path, mode: opened("/dev/full", "wb")  # noqa: E731
    monkeypatch.setattr("petps.train.tracker.spill.open", full, raising=False)
    tracker = Tracker({"t": None}, tenants=["a"], memory_bytes=8, spill=tmp_path)
    with pytest.raises(ResourceExhausted, match="No space left on device"):
        tracker.track("t", np.arange(100))
    assert tracker.spilled_bytes == 0


def test_a_file_size_limit_is_reported_and_loses_nothing(tmp_path: Path) -> None:
    """The kernel refuses the write: a file of this process may have 100 KB at most."""
    script = """
import resource, signal, sys
import numpy as np
from petps.errors import ResourceExhausted
from petps.train.tracker import Tracker
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
tracker = Tracker({"t": None}, tenants=["a"], memory_bytes=200_000, spill=sys.argv[1])
try:
    tracker.track("t", np.arange(50_000))
except ResourceExhausted as error:
    print(error)
print(len(tracker.read("a").ids("t")))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"ids cannot be spilled to {tmp_path}: File too large" in done.stdout
    assert done.stdout.endswith("50000\n")
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_track_refuses_ids_beyond_the_budget() -> None:
    tracker = Tracker({"t": None}, tenants=["gone", "a"], memory_bytes=10_000)
    tracker.track("t", np.arange(1000))
    tracker.read("a").acknowledge()
    with pytest.raises(ResourceExhausted, match="tenant gone has waited longest"):
        tracker.track("t", np.arange(1000, 2000))
    assert len(tracker.read("a").ids("t")) == 1000
    tracker.remove_tenant("gone")
    tracker.read("a").acknowledge()
    assert tracker.resident_bytes == 0


def test_a_spill_folder_belongs_to_one_tracker_and_is_cleaned(tmp_path: Path) -> None:
    (tmp_path / "00000007.segment").write_bytes(b"left by a process that was killed")
    (tmp_path / "other.txt").write_bytes(b"not ours")
    first = Tracker({"t": None}, tenants=["a"], memory_bytes=8, spill=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]
    with pytest.raises(FailedPrecondition, match="belongs to another tracker"):
        Tracker(memory_bytes=8, spill=tmp_path)
    first.track("t", np.arange(100))
    assert first.spilled_bytes == 800
    first.close()
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]
    Tracker(memory_bytes=8, spill=tmp_path).close()


def test_a_truncated_spill_file_is_named(tmp_path: Path) -> None:
    tracker = Tracker({"t": None}, tenants=["a"], memory_bytes=8, spill=tmp_path)
    tracker.track("t", np.arange(100))
    (path,) = tmp_path.iterdir()
    os.truncate(path, 50)
    with pytest.raises(DataLoss, match=r"segment: another program cut the file off"):
        tracker.read("a").ids("t")
