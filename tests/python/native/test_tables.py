"""petps._native.Tables and Table: operations on a pool, and the errors that they raise."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import petps
from petps import _native
from petps.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    PetpsError,
    Unimplemented,
    class_of,
)
from tests.python.native.superblock import COPIES, forge, is_clean

SEED = 4711
DIM = 4


def rows_of(keys: npt.NDArray[np.uint64], salt: int) -> npt.NDArray[np.float32]:
    """Return rows that identify their key and the write that made them."""
    rows = np.empty((len(keys), DIM), np.float32)
    rows[:, 0] = keys % 65536
    rows[:, 1] = salt
    rows[:, 2:] = rows[:, :1] + rows[:, 1:2]
    return rows


def make(path: Path | str, **settings: object) -> tuple[_native.Tables, _native.Table]:
    tables = _native.Tables.create(str(path), **settings)  # type: ignore[arg-type]
    instance = tables.create_instance("m", "m@0", 2)
    table = tables.create_table("t", instance=instance.id, dim=DIM, dtype="f32", capacity=10_000)
    return tables, table


@pytest.fixture
def pool_path(tmp_path: Path) -> Path:
    """Return the path of a closed pool with 500 rows."""
    path = tmp_path / "pool"
    tables, table = make(path, durability="process")
    keys = np.arange(500, dtype=np.uint64)
    table.apply(keys, _native.encode_rows("f32", rows_of(keys, 1)))
    tables.close()
    return path


@pytest.fixture
def memory() -> Iterator[tuple[_native.Tables, _native.Table]]:
    tables, table = make("")
    yield tables, table
    tables.close()


def test_version_is_the_package_s() -> None:
    assert _native.__version__ == petps.__version__


def test_error_classes_have_the_native_codes() -> None:
    header = Path(__file__).parents[3] / "native/base/status.h"
    codes = re.findall(r"^  k(\w+) = (\d+),", header.read_text(), re.M)
    numbers = {name: int(number) for name, number in codes if name != "Ok"}
    assert len(numbers) == 16
    for name, number in numbers.items():
        kind = class_of(number)
        assert kind.code.replace("_", "") == name.upper()
        assert kind.number == number


def test_apply_and_pull_agree_with_a_slow_model(
    memory: tuple[_native.Tables, _native.Table],
) -> None:
    print(f"seed {SEED}")
    _, table = memory
    random = np.random.default_rng(SEED)
    model: dict[int, int] = {}
    for step in range(60):
        keys = random.integers(0, 400, random.integers(1, 120)).astype(np.uint64)
        deleted = random.random(len(keys)) < 0.3
        stored = _native.encode_rows("f32", rows_of(keys, step))
        report = table.apply(keys, stored, deleted, stamp=step)
        assert sum(report.as_dict().values()) == len(keys)
        for key, is_deleted in zip(keys.tolist(), deleted.tolist(), strict=True):
            if is_deleted:
                model.pop(key, None)
            else:
                model[key] = step
        all_keys = np.arange(400, dtype=np.uint64)
        out = np.empty((400, DIM), np.float32)
        mask = np.empty(400, bool)
        assert table.pull(all_keys, out, mask) == len(model)
        assert set(all_keys[mask].tolist()) == set(model)
        for key, salt in model.items():
            assert (out[key] == rows_of(np.array([key], np.uint64), salt)[0]).all()
        assert (out[~mask] == 0).all()
    assert sorted(table.keys().tolist()) == sorted(model)
    paged = [key for keys, _ in table.scan(buckets_per_page=3) for key in keys.tolist()]
    assert sorted(paged) == sorted(model)


def test_pull_longer_than_a_batch_and_repeated_keys(
    memory: tuple[_native.Tables, _native.Table],
) -> None:
    _, table = memory
    keys = np.arange(9000, dtype=np.uint64)
    table.apply(keys, _native.encode_rows("f32", rows_of(keys, 3)))
    wanted = np.concatenate([keys[::-1], keys, keys[:7]])
    out = np.empty((len(wanted), DIM), np.float32)
    assert table.pull(wanted, out) == len(wanted)
    assert (out == rows_of(wanted, 3)).all()
    stored = np.empty((len(wanted), 4 * DIM), np.uint8)
    table.pull(wanted, stored)
    assert (stored.view(np.float32) == out).all()


def test_a_missing_key_gets_the_default_row() -> None:
    with petps.create() as pool:
        pool.create_table("q", dim=3, dtype="int8", capacity=10, default=[1.0, 2.0, 3.0])
        table = pool.table("q")
        out = np.empty((1, 3), np.float32)
        mask = np.ones(1, bool)
        assert table.pull(np.array([9], np.uint64), out, mask) == 0
        assert not mask[0]
        assert np.allclose(out, [[1, 2, 3]], atol=0.01)
        stored = np.empty((1, table.row_bytes), np.uint8)
        table.pull(np.array([9], np.uint64), stored)
        assert (stored[0] == table.default_row()).all()


def test_the_default_row_survives_a_reopen(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    with petps.create(path, durability="process") as pool:
        pool.create_table("half", dim=3, dtype="f16", capacity=10, default=0.5)
        default_row = pool.table("half").default_row()
    with petps.open(path) as pool:
        assert (pool.table("half").default_row() == default_row).all()
        pool.create_instance("default@1")  # copies its tables, default rows included
        assert (pool.table("half", "default@1").default_row() == default_row).all()
        assert (pool.pull("half", [7], model="default@1") == 0.5).all()


def test_a_closed_pool_raises_an_error(pool_path: Path) -> None:
    tables = _native.Tables.open(str(pool_path))
    table = tables.tables()[0]
    tables.close()
    tables.close()  # a second call does nothing
    assert tables.closed
    for method in (tables.info, table.status, table.keys, tables.verify):
        with pytest.raises(FailedPrecondition, match=f"{pool_path} is closed; open it again"):
            method()
    assert table.name == "t"


def test_a_scan_or_server_prevents_closing_the_pool(pool_path: Path) -> None:
    tables = _native.Tables.open(str(pool_path))
    with tables.tables()[0].scan(buckets_per_page=1) as pages:
        next(pages)
        with pytest.raises(FailedPrecondition, match="in use by a scan of table 't'"):
            tables.close()
    server = _native.Server.start(tables, port=0)
    with pytest.raises(FailedPrecondition, match="in use by a running server; stop that"):
        tables.close()
    server.stop()
    server.stop()
    tables.close()


def test_close_waits_for_pulls_in_progress(pool_path: Path) -> None:
    tables = _native.Tables.open(str(pool_path))
    table = tables.tables()[0]
    keys = np.arange(500, dtype=np.uint64)
    outcomes: list[str] = []

    def pull() -> None:
        out = np.empty((500, DIM), np.float32)
        while True:
            try:
                assert table.pull(keys, out) == 500
                assert (out == rows_of(keys, 1)).all()
            except FailedPrecondition:
                outcomes.append("closed")
                return

    threads = [threading.Thread(target=pull) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    tables.close()
    for thread in threads:
        thread.join(60)
    assert outcomes == ["closed"] * 4


def test_other_threads_run_during_a_long_pull() -> None:
    tables, table = make("")
    keys = np.arange(10_000, dtype=np.uint64)
    table.apply(keys, _native.encode_rows("f32", rows_of(keys, 1)))
    wanted = np.tile(keys, 400)
    out = np.empty((len(wanted), DIM), np.float32)
    done = threading.Event()

    def long_pull() -> None:
        table.pull(wanted, out)
        done.set()

    for _ in range(20):  # a busy machine may run nothing else during one of them
        iterations = 0
        done.clear()
        thread = threading.Thread(target=long_pull)
        thread.start()
        while not done.is_set():
            iterations += 1
            time.sleep(0.0005)
        thread.join()
        if iterations > 3:
            break
    assert iterations > 3
    tables.close()


def test_a_pool_is_opened_for_writing_only_once(pool_path: Path) -> None:
    tables = _native.Tables.open(str(pool_path))
    with pytest.raises(InUse, match=f"{pool_path} is open in another process"):
        _native.Tables.open(str(pool_path))
    tables.close()
    first = _native.Tables.open(str(pool_path), read_only=True)
    second = _native.Tables.open(str(pool_path), read_only=True)
    first.close()
    second.close()


def test_a_read_only_pool_refuses_writes(pool_path: Path) -> None:
    tables = _native.Tables.open(str(pool_path), read_only=True)
    keys = np.array([1], np.uint64)
    with pytest.raises(FailedPrecondition, match="read-only"):
        tables.tables()[0].apply(keys, _native.encode_rows("f32", rows_of(keys, 2)))
    tables.close()


def test_create_refuses_an_existing_file(pool_path: Path) -> None:
    with pytest.raises(AlreadyExists, match=f"{pool_path} already exists"):
        _native.Tables.create(str(pool_path))


def test_open_refuses_files_that_are_not_pools(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="create the pool first"):
        _native.Tables.open(str(tmp_path / "nothing"))
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(PetpsError, match=r"empty .*no pool"):
        _native.Tables.open(str(empty))
    text = tmp_path / "text"
    text.write_text("hello\n" * 1000)
    with pytest.raises(InvalidArgument, match=r"text.*shorter than a pool"):
        _native.Tables.open(str(text))
    zeros = tmp_path / "zeros"
    zeros.write_bytes(bytes(4 << 20))
    with pytest.raises(InvalidArgument, match=r"zeros.*signature is missing"):
        _native.Tables.open(str(zeros))
    with pytest.raises(PetpsError, match=str(tmp_path)):
        _native.Tables.open(str(tmp_path))


def test_open_refuses_half_a_pool(pool_path: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copy(pool_path, half)
    with half.open("r+b") as file:
        file.truncate(pool_path.stat().st_size // 2)
    with pytest.raises(DataLoss, match=r"half.* is cut short.*copy it again"):
        _native.Tables.open(str(half))


def test_open_refuses_another_format_version(pool_path: Path) -> None:
    forge(pool_path, version=9)
    with pytest.raises(
        Unimplemented, match=r"format version 9, this build reads versions 1 to 4;.*export"
    ):
        _native.Tables.open(str(pool_path))


def test_open_refuses_damaged_superblocks(pool_path: Path) -> None:
    content = bytearray(pool_path.read_bytes())
    for start in (COPIES[0], COPIES[-1]):  # the copies of the newest format
        content[start + 40] ^= 1
    pool_path.write_bytes(content)
    with pytest.raises(DataLoss, match=r"both superblock copies .* fail their checksum; restore"):
        _native.Tables.open(str(pool_path))


def leave_unclean(path: Path) -> None:
    """Open the pool in a process that writes and dies without closing."""
    program = (
        "import os, sys, numpy as np\n"
        "from petps import _native\n"
        "tables = _native.Tables.open(sys.argv[1])\n"
        "tables.tables()[0].apply(np.array([7], np.uint64), np.zeros((1, 16), np.uint8))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=60)
    assert not is_clean(path)


def test_open_refuses_a_pool_that_lost_power(pool_path: Path) -> None:
    leave_unclean(pool_path)
    forge(pool_path, boot_id=b"another boot id!")
    with pytest.raises(FailedPrecondition, match=r"machine went down.*petps verify"):
        _native.Tables.open(str(pool_path))
    tables = _native.Tables.open(str(pool_path), read_only=True, allow_lost_power=True)
    assert tables.info().lost_power
    assert tables.verify().clean
    tables.close()
    with pytest.raises(FailedPrecondition, match=r"petps verify"):  # writing is refused
        _native.Tables.open(str(pool_path), allow_lost_power=True)


def test_accepting_a_loss_of_power_resets_progress(pool_path: Path) -> None:
    with_progress = _native.Tables.open(str(pool_path))
    instance = with_progress.instances()[0].id
    progress = _native.Progress(instance=instance, partition=0, run=3, seq=9, offset=11, version=2)
    with_progress.record_progress(progress)
    with_progress.set_durability("process")
    with_progress.close()
    leave_unclean(pool_path)
    forge(pool_path, boot_id=bytes(16))  # a kernel without a boot id
    _native.Tables.open(str(pool_path), accept_lost_power=True).close()
    tables = _native.Tables.open(str(pool_path))
    assert tables.info().was_clean
    after = tables.progress(instance, 0)
    assert after is not None
    assert (after.state, after.run, after.seq, after.offset, after.version) == (
        "lost_power", 3, 0, 0, 0
    )  # fmt: skip
    assert tables.applied_version(instance) == 0
    tables.close()


def test_a_kill_in_the_same_boot_is_no_loss_of_power(pool_path: Path) -> None:
    leave_unclean(pool_path)
    tables = _native.Tables.open(str(pool_path))
    info = tables.info()
    assert not info.was_clean
    assert not info.lost_power
    out = np.empty((1, DIM), np.float32)
    assert tables.tables()[0].pull(np.array([7], np.uint64), out) == 1
    assert (out == 0).all()
    tables.close()


def test_verify_finds_a_flipped_bit(pool_path: Path) -> None:
    row = rows_of(np.array([123], np.uint64), 1).tobytes()
    content = bytearray(pool_path.read_bytes())
    at = content.index(row)
    content[at + 5] ^= 0x10
    pool_path.write_bytes(content)
    tables = _native.Tables.open(str(pool_path), read_only=True)
    report = tables.verify()
    tables.close()
    assert not report.clean
    assert report.problem_count == 1
    assert "123" in report.problems[0]


def test_a_process_may_exit_with_an_open_pool(pool_path: Path) -> None:
    program = (
        "import sys, threading, petps, numpy as np\n"
        "pool = petps.open(sys.argv[1])\n"
        "def pull():\n"
        "    while True: pool.pull('t', np.arange(500, dtype=np.uint64))\n"
        "threading.Thread(target=pull, daemon=True).start()\n"
        "generator = pool.scan('t'); next(generator)\n"
        "raw = petps._native.Tables.create('')\n"
        "print('end')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(pool_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    with petps.open(pool_path) as pool:
        assert pool.verify().clean


def test_progress_and_catalogue_survive(tmp_path: Path) -> None:
    tables, _ = make(tmp_path / "pool")
    instance = tables.resolve("m")
    for partition in range(2):
        tables.record_progress(
            _native.Progress(
                instance=instance.id,
                partition=partition,
                run=5,
                seq=6,
                offset=7,
                version=8 + partition,
                state="incomplete" if partition else "following",
                target=10 * partition,
                publisher=0xFFFFFF * partition,
            )
        )
    tables.set_alias("live", instance.id)
    tables.set_feed(tables.tables()[0].id, "delta")
    assert tables.applied_version(instance.id) == 8
    tables.close()
    tables = _native.Tables.open(str(tmp_path / "pool"))
    assert tables.aliases() == {"live": instance.id}
    assert tables.resolve("live").name == "m@0"
    assert tables.tables()[0].record.feed == "delta"
    record = tables.progress(instance.id, 1)
    assert record is not None
    assert (record.run, record.seq, record.offset, record.version) == (5, 6, 7, 9)
    assert (record.state, record.target, record.publisher) == ("incomplete", 10, 0xFFFFFF)
    with pytest.raises(InvalidArgument, match="mark is at most 16777215, not 16777216"):
        tables.record_progress(
            _native.Progress(
                instance=1, partition=0, run=1, seq=1, offset=1, version=1, publisher=1 << 24
            )
        )
    assert tables.progress(instance.id + 5, 0) is None
    assert len(tables.all_progress()) == 2
    with pytest.raises(NotFound, match="no model, instance or alias 'x'; this pool has: m@0"):
        tables.resolve("x")
    with pytest.raises(NotFound, match="instance 'm@0' has no table 'y'; it has t"):
        tables.find("m@0", "y")
    with pytest.raises(InvalidArgument, match="progress state 'late'"):
        _native.Progress(instance=1, partition=0, run=1, seq=1, offset=1, version=1, state="late")
    tables.close()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"name": "t"}, AlreadyExists, "'t'"),
        *(({"name": name}, InvalidArgument, "name") for name in ("", "a b", "x" * 64, "a/b")),
        *(({"dim": dim}, InvalidArgument, f"dim.*{dim}|{dim}.*dim") for dim in (0, 4097)),
        ({"capacity": 0}, InvalidArgument, "capacity"),
        ({"dtype": "f9"}, InvalidArgument, "dtype 'f9' is unknown"),
        ({"feed": "both"}, InvalidArgument, "feed 'both' is unknown"),
    ],
    ids=str,
)
def test_create_table_refuses_invalid_settings(
    memory: tuple[_native.Tables, _native.Table],
    settings: dict[str, Any],
    error: type[PetpsError],
    message: str,
) -> None:
    tables, _ = memory
    valid: dict[str, Any] = {"name": "x", "instance": 1, "dim": 3, "dtype": "f32", "capacity": 10}
    with pytest.raises(error, match=message):
        tables.create_table(**{**valid, **settings})
    assert len(tables.tables()) == 1


def test_migrate_moves_hot_keys_to_their_home_buckets(
    memory: tuple[_native.Tables, _native.Table],
) -> None:
    tables, table = memory
    keys = np.arange(10_000, dtype=np.uint64)
    table.apply(keys, _native.encode_rows("f32", rows_of(keys, 1)))
    tables.walk()
    reads, found = table.bucket_reads(keys)
    assert found == 10_000
    assert 10_000 <= reads < 12_000
    table.migrate(keys[:500])
    reads_hot, _ = table.bucket_reads(keys[:500])
    assert reads_hot == 500
    table.set_hot_keys(keys[500:600])
    out = np.empty((10_000, DIM), np.float32)
    assert table.pull(keys, out) == 10_000
    assert (out == rows_of(keys, 1)).all()
