"""petps.open and petps.create: pull and push in this process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import petps
from petps import _native
from petps.checkpoint import Base
from petps.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from petps.pool import MAX_ROWS_PER_APPLY, PushReport
from tests.python.small_disk import mount_small_disk


def test_a_reopened_pool_has_its_rows(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    with petps.create(tmp_path / "p") as pool:
        info = pool.create_table("items", dim=4, capacity=100, default=7)
        assert (info.instance, info.dtype, info.feed) == ("default@0", "f32", "push")
        assert pool.push("items", [1, 2, 3], rows).inserted == 3
    assert pool.closed
    with petps.open(tmp_path / "p") as pool:
        out = np.empty((4, 4), np.float32)
        rows_found, mask = pool.pull("items", [3, 2, 99, 1], out, return_mask=True)
        assert rows_found is out
        assert (out == np.vstack([rows[2], rows[1], np.full(4, 7), rows[0]])).all()
        assert mask.tolist() == [True, True, False, True]
        assert pool.erase("items", [2, 55]).as_dict() == {
            "inserted": 0, "updated": 0, "deleted": 1, "absent": 1, "refused": 0, "superseded": 0,
        }  # fmt: skip
        assert (pool.pull("items", [2]) == 7).all()
        pages = list(pool.scan("items"))
        assert sorted(key for keys, _ in pages for key in keys.tolist()) == [1, 3]
        assert pool.verify().clean
        assert pool.status()["tables"][0]["rows"] == 2


def test_every_float_and_integer_dtype_is_accepted() -> None:
    with petps.create() as pool:
        pool.create_table("t", dim=2, capacity=10)
        for number, kind in enumerate((np.float16, np.float32, np.float64)):
            pool.push("t", np.array([number], np.int32), np.full((1, 2), 1.5, kind))
        assert (pool.pull("t", np.arange(3, dtype=np.uint8)) == 1.5).all()
        pool.push("t", [2**64 - 1], [[1.0, 2.0]])
        assert pool.pull("t", np.array([2**64 - 1], np.uint64)).tolist() == [[1.0, 2.0]]
        # numpy converts this list to floats.
        assert pool.pull("t", [2**64 - 1, 0])[0].tolist() == [1.0, 2.0]
        assert pool.pull("t", []).shape == (0, 2)
        assert pool.push("t", [], np.empty((0, 2))) == PushReport()


def test_bad_arrays_and_names_are_refused() -> None:
    with petps.create() as pool:
        pool.create_table("t", dim=2, capacity=10)
        pool.create_table("d", dim=2, capacity=10, feed="delta")
        good = np.zeros((1, 2), np.float32)
        with pytest.raises(NotFound, match="has no table 'x'; it has t, d"):
            pool.pull("x", [1])
        with pytest.raises(NotFound, match="no model, instance or alias 'm'"):
            pool.pull("t", [1], model="m")
        with pytest.raises(InvalidArgument, match=r"keys\[1\] is -4.*view\(numpy.uint64\)"):
            pool.pull("t", np.array([1, -4]))
        with pytest.raises(InvalidArgument, match=r"keys\[0\] is 1.0, expected a whole number"):
            pool.pull("t", [1.0])
        with pytest.raises(InvalidArgument, match=rf"keys\[\d\] is {2**64}, outside 0"):
            pool.pull("t", [3, 2**64])
        with pytest.raises(InvalidArgument, match="keys are float64, expected integers"):
            pool.pull("t", np.array([1.0]))
        with pytest.raises(InvalidArgument, match=r"shape \(1, 1\)"):
            pool.pull("t", np.array([[1]]))
        with pytest.raises(
            InvalidArgument, match=r"table 't': rows have shape \(2,\), expected \(1, 2"
        ):
            pool.push("t", [1], [0.0, 0.0])
        with pytest.raises(InvalidArgument, match="table 't': rows are int64, expected floats"):
            pool.push("t", [1], [[1, 2]])
        with pytest.raises(InvalidArgument, match=r"row 1 \(key 8\) has a NaN"):
            pool.push("t", [9, 8], [[0.0, 0.0], [0.0, np.nan]])
        with pytest.raises(InvalidArgument, match=r"row 0 \(key 9\)"):
            pool.push("t", [9], [[1e300, 0.0]])
        with pytest.raises(FailedPrecondition, match="only deltas write table 'd': publish"):
            pool.push("d", [1], good)
        with pytest.raises(FailedPrecondition, match="only deltas write table 'd'"):
            pool.erase("d", [1])
        assert pool.status()["tables"][0]["rows"] == 0
        pool.push("t", [9], [[np.nan, np.inf]], allow_not_finite=True)
        assert np.isnan(pool.pull("t", [9])[0, 0])


def test_a_full_table_updates_keys_and_refuses_new_ones() -> None:
    with petps.create() as pool:
        pool.create_table("t", dim=1, capacity=10)
        pool.push("t", range_keys(0, 10), np.ones((10, 1)))
        with pytest.raises(
            ResourceExhausted, match=r"table 't' is full \(capacity 10\): 5 new"
        ) as full:
            pool.push("t", range_keys(5, 15), np.full((10, 1), 2.0))
        assert isinstance(full.value.report, PushReport)
        assert (full.value.report.updated, full.value.report.refused) == (5, 5)
        assert pool.pull("t", range_keys(0, 10))[:, 0].tolist() == [1.0] * 5 + [2.0] * 5


def test_pulls_and_pushes_of_stored_rows_and_of_several_tables() -> None:
    with petps.create() as pool:
        pool.create_table("a", dim=2, capacity=10, dtype="f16")
        pool.create_table("b", dim=1, capacity=10)
        stored = np.array([[1.5, 2.5]], np.float16).view(np.uint8)
        pool.push("a", [1], stored, dtype="stored")
        assert (pool.pull("a", [1], dtype="stored") == stored).all()
        assert pool.pull("a", [1]).tolist() == [[1.5, 2.5]]
        answers = pool.pull_many({"a": [1, 2], "b": [3]}, return_mask=True)
        assert answers["a"][1].tolist() == [True, False]
        assert answers["b"][0].shape == (1, 1)
        assert set(pool.pull_many({"a": [1]})) == {"a"}
        mask = np.ones(1, bool)
        pool.pull("a", [2], mask=mask)
        assert not mask[0]
        with pytest.raises(InvalidArgument, match=r"expected uint8\[1, 4\]"):
            pool.push("a", [1], stored[:, :3], dtype="stored")
        with pytest.raises(InvalidArgument, match=r"row 0 \(key 1\) has a NaN or infinity"):
            pool.push("a", [1], np.array([[np.inf, 0]], np.float16).view(np.uint8), dtype="stored")
        with pytest.raises(InvalidArgument, match=r"row 1 \(key 5\) has a NaN or infinity"):
            pool.push("a", [4, 5], [[1.0, 1.0], [70_000.0, 1.0]])
        with pytest.raises(InvalidArgument, match="dtype 'f64' is unknown"):
            pool.pull("a", [1], dtype="f64")  # type: ignore[call-overload]
        assert pool.pull("a", [1, 4]).tolist() == [[1.5, 2.5], [0.0, 0.0]]


def test_export_during_writes_has_each_key_once(tmp_path: Path) -> None:
    with petps.create() as pool:
        pool.create_table("t", dim=2, capacity=5000)
        keys = range_keys(0, 2000)
        pool.push("t", keys, np.ones((2000, 2)))
        stop = threading.Event()

        def write() -> None:
            while not stop.is_set():
                pool.erase("t", keys[1000:])
                pool.push("t", keys[1000:], np.ones((1000, 2)))

        thread = threading.Thread(target=write)
        thread.start()
        try:
            reports = [pool.export(tmp_path / f"base{number}") for number in range(3)]
        finally:
            stop.set()
            thread.join()
    for number, report in enumerate(reports):
        assert 1000 <= report["tables"][0]["rows"] <= 2000
        base = Base.open(tmp_path / f"base{number}")
        found = [key for part, _ in base.chunks("t") for key in part.tolist()]
        assert len(found) == len(set(found)) == report["tables"][0]["rows"]
        assert set(range(1000)) <= set(found) <= set(range(2000))
    with petps.create() as pool:
        pool.create_table("t", dim=1, capacity=10)
        with pytest.raises(AlreadyExists, match="holds a base already"):
            pool.export(tmp_path / "base0")


def range_keys(start: int, stop: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.arange(start, stop, dtype=np.uint64)


def test_a_push_may_be_longer_than_a_batch() -> None:
    count = 2 * MAX_ROWS_PER_APPLY + 17
    with petps.create() as pool:
        pool.create_table("t", dim=1, capacity=count)
        rows = np.arange(count, dtype=np.float32).reshape(-1, 1)
        assert pool.push("t", range_keys(0, count), rows).inserted == count
        assert (pool.pull("t", range_keys(0, count)) == rows).all()


def test_load_into_a_delta_fed_table_only_before_its_first_delta() -> None:
    with petps.create() as pool:
        pool.create_model("m", 1)
        pool.create_table("d", dim=1, capacity=10, feed="delta", model="m")
        assert pool.load("d", [1], [[1.0]]).inserted == 1
        instance = pool.native.resolve("m").id
        pool.native.record_progress(
            _native.Progress(instance=instance, partition=0, run=1, seq=1, offset=1, version=1)
        )
        with pytest.raises(FailedPrecondition, match="table 'd' has applied deltas already"):
            pool.load("d", [1], [[1.0]])


def test_names_resolve_to_models_instances_and_aliases() -> None:
    with petps.create() as pool:
        assert pool.create_model("a", 2) == "a@0"
        pool.create_model("b")
        pool.create_table("t", dim=1, capacity=10, model="a")
        pool.create_table("t", dim=2, capacity=10, model="b@0")
        pool.native.set_alias("live", pool.native.resolve("b").id)
        assert [info.dim for info in pool.tables("live")] == [2]
        assert pool.pull("t", [1], model="a").shape == (1, 1)
        assert pool.pull("t", [1], model="live").shape == (1, 2)
        with pytest.raises(NotFound, match="'default'; this pool has: a@0, b@0"):
            pool.pull("t", [1])
        with pytest.raises(AlreadyExists):
            pool.create_model("a", 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 0}, "dim 0 is outside 1..4096"),
        ({"dim": 2, "default": [1.0]}, r"default has shape \(1,\), expected one number or \(2,\)"),
        ({"dim": 2, "default": np.nan}, "default has a NaN"),
        ({"dim": 2, "dtype": "i4"}, "dtype 'i4' is unknown"),
        ({"dim": 2, "capacity": 0}, "capacity"),
    ],
)
def test_bad_table_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with petps.create() as pool, pytest.raises(InvalidArgument, match=message):
        pool.create_table("t", **{"capacity": 10, **settings})  # type: ignore[arg-type]


def test_bad_pool_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="durability 'disk' is unknown"):
        petps.create(tmp_path / "p", durability="disk")
    with pytest.raises(InvalidArgument, match="path"):
        petps.open("")
    with petps.create(tmp_path / "q", durability="process") as pool:
        assert pool.status()["pool"]["durability"] == "process"
    assert repr(pool) == "<petps.Pool closed>"


def test_only_read_only_opens_can_share_a_file(tmp_path: Path) -> None:
    with petps.create(tmp_path / "p"), pytest.raises(FailedPrecondition, match="another process"):
        petps.open(tmp_path / "p")
    with petps.open(tmp_path / "p", read_only=True), petps.open(tmp_path / "p", read_only=True):
        pass


def test_importing_petps_loads_nothing_slow() -> None:
    program = (
        "import sys, petps; print(sorted({'numpy', 'pyarrow', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_a_full_disk_is_an_error_and_the_pool_stays_usable(tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "disk", "12m") as disk:
        with petps.create(disk / "p") as pool:
            with pytest.raises(ResourceExhausted, match=f"{disk}/p"):
                pool.create_table("big", dim=8, capacity=10_000_000)
            pool.create_table("t", dim=256, capacity=8_000)
            # Another program takes the space that the table has not used yet.
            (disk / "other").write_bytes(bytes(disk_left(disk) - (4 << 20)))
            rows = np.ones((1000, 256), np.float32)
            pool.push("t", range_keys(0, 1000), rows)
            with pytest.raises(ResourceExhausted, match="disk full: wanted"):
                push_until_refused(pool, rows)
            assert (pool.pull("t", range_keys(0, 1000)) == 1).all()
            pool.erase("t", range_keys(0, 10))
            assert pool.verify().clean
        with petps.open(disk / "p") as pool:
            assert pool.verify().clean
        (disk / "filler").write_bytes(bytes(disk_left(disk)))
        with pytest.raises(ResourceExhausted, match=f"{disk}/q"):
            petps.create(disk / "q")
        assert not (disk / "q").exists()


def disk_left(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


def push_until_refused(
    pool: petps.Pool, rows: np.ndarray[tuple[int, int], np.dtype[np.float32]]
) -> None:
    for batch in range(1, 100):
        pool.push("t", range_keys(1000 * batch, 1000 * batch + 1000), rows)
