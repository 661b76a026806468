"""Pulls beside a server: no torn rows, kills of either side, the file of readers."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import petps
from petps.errors import (
    DataLoss,
    FailedPrecondition,
    NotFound,
    PermissionDenied,
    PetpsError,
    Unavailable,
    Unimplemented,
)
from tests.python.native.superblock import is_clean
from tests.python.pool.live_processes import DIM, KEYS, TABLE, faults_of, rows_of
from tests.python.waiting import wait_until

ALL = np.arange(KEYS, dtype=np.uint64)


class Process:
    """A child process of live_processes, which reports facts line by line."""

    def __init__(self, *arguments: object) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.python.pool.live_processes", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first = self.line()
        assert self.first["ready"]

    def line(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        text = self.child.stdout.readline()
        assert text, f"the process ended with {self.child.wait()}"
        facts: dict[str, Any] = json.loads(text)
        return facts

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            facts = self.line()
            if condition(facts):
                return facts

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self.child.wait()
        for stream in (self.child.stdin, self.child.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def begin() -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def start(*arguments: object) -> Process:
        processes.append(Process(*arguments))
        return processes[-1]

    yield start
    for process in processes:
        if process.child.poll() is None:
            process.kill()
        process.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    with petps.create(path, durability="process") as pool:
        pool.create_table(TABLE, dim=DIM, capacity=KEYS)
        pool.push(TABLE, ALL, rows_of(ALL, 0))
    return path


def readers(path: Path) -> Path:
    return path.with_name(path.name + ".readers")


# ---- visibility


def test_a_reader_sees_writes_tables_and_switches_at_once(path: Path) -> None:
    with petps.open(path) as server, petps.open_live(path) as reader:
        assert (reader.pull(TABLE, ALL) == rows_of(ALL, 0)).all()
        server.push(TABLE, ALL, rows_of(ALL, 7))
        assert (reader.pull(TABLE, ALL) == rows_of(ALL, 7)).all()
        server.create_table("late", dim=3, capacity=100_000, dtype="f16", default=0.5)
        many = np.arange(100_000, dtype=np.uint64)  # they need extents made after the open
        server.push("late", many, np.ones((100_000, 3), np.float32))
        rows, mask = reader.pull("late", [99_999, 1 << 50], return_mask=True)
        assert mask.tolist() == [True, False]
        assert rows.tolist() == [[1.0] * 3, [0.5] * 3]
        assert {table.name for table in reader.tables()} == {TABLE, "late"}
        instance = server.create_instance("default@1")
        server.push(TABLE, ALL, rows_of(ALL, 8), model=instance)
        assert (reader.pull(TABLE, ALL) == rows_of(ALL, 7)).all()
        server.switch_alias("default", instance)
        assert (reader.pull(TABLE, ALL) == rows_of(ALL, 8)).all()
        server.drop_instance("default@0")
        with pytest.raises(NotFound, match="default@0"):
            reader.pull(TABLE, ALL, model="default@0")
        answers = reader.pull_many({TABLE: [1, 2], "late": [3]}, return_mask=True)
        assert answers[TABLE][1].all()
        assert (
            reader.pull(TABLE, [3], dtype="stored").view(np.float32) == rows_of(ALL[3:4], 8)
        ).all()
        with pytest.raises(NotFound, match="has no table 'none'; it has"):
            reader.pull("none", [1])


def test_a_clean_close_leaves_no_file(path: Path) -> None:
    with petps.open(path):
        assert readers(path).exists()
    assert not readers(path).exists()
    assert is_clean(path)
    with pytest.raises(FailedPrecondition, match="start a server on the pool"):
        petps.open_live(path)


def test_a_reader_outlives_a_clean_close(path: Path) -> None:
    server = petps.open(path)
    with petps.open_live(path) as reader:
        server.close()
        assert is_clean(path)
        assert (reader.pull(TABLE, ALL) == rows_of(ALL, 0)).all()
        with petps.open(path) as server:
            server.push(TABLE, ALL, rows_of(ALL, 3))
            assert (reader.pull(TABLE, ALL) == rows_of(ALL, 3)).all()
        reader.close()
        with pytest.raises(FailedPrecondition, match="closed"):
            reader.pull(TABLE, ALL)


# ---- no torn rows


def test_readers_see_no_torn_row_at_full_speed(path: Path, begin: Callable[..., Process]) -> None:
    writer = begin("write", path, 0)
    readers_at_work = [begin("read", path, 4, "kept") for _ in range(2)]
    for reader in readers_at_work:
        last = reader.until(lambda facts: "faults" in facts)
        assert last["faults"] == []
        assert last["pulls"] > 0
    done = writer.until(lambda facts: facts["writes"] > 100)
    # Slots are reused: otherwise a hundred writes would need a hundred times the slots.
    assert done["slots"] < 20 * KEYS


def test_a_reader_without_pins_sees_torn_rows(path: Path, begin: Callable[..., Process]) -> None:
    begin("write", path, 0)
    reader = begin("read", path, 120, "disabled")
    assert reader.until(lambda facts: "faults" in facts)["faults"]


# ---- kills


def test_pins_of_a_killed_reader_are_dropped(path: Path, begin: Callable[..., Process]) -> None:
    with petps.open(path) as server:
        holder = begin("hold", path)
        table = server.table(TABLE)
        for write in range(5):
            server.push(TABLE, ALL, rows_of(ALL, write))
        time.sleep(0.3)  # time for the background thread to reclaim, which the pin must prevent
        assert table.status().retired_slots >= 4 * KEYS
        holder.kill()
        wait_until(lambda: table.status().retired_slots == 0)
    assert is_clean(path)


def test_readers_continue_when_the_server_is_killed(
    path: Path, begin: Callable[..., Process]
) -> None:
    writer = begin("write", path, 0)
    with petps.open_live(path) as reader:
        for _ in range(5):
            writer.until(lambda facts: facts["writes"] % 100 == 0)
            writer.kill()
            rows, mask = reader.pull(TABLE, ALL, return_mask=True)
            assert faults_of(ALL, rows, mask) == []
            writer = begin("write", path, 0)
            rows, mask = reader.pull(TABLE, ALL, return_mask=True)
            assert faults_of(ALL, rows, mask) == []
    with petps.open_live(path) as late:
        writer.kill()
        with petps.open_live(path) as other:
            for reader in (late, other):
                rows, mask = reader.pull(TABLE, ALL, return_mask=True)
                assert faults_of(ALL, rows, mask) == []


def test_a_reopened_pool_honours_earlier_pins(path: Path, begin: Callable[..., Process]) -> None:
    writer = begin("write", path, 2)
    holder = begin("hold", path)  # its pin precedes every write, so it protects all old rows
    assert writer.child.stdin is not None
    writer.child.stdin.write("go\n")
    writer.child.stdin.flush()
    assert writer.line()["retired"] == 2 * KEYS
    writer.kill()
    with petps.open(path) as server:
        table = server.table(TABLE)
        server.push(TABLE, ALL[:10], rows_of(ALL[:10], 1))
        time.sleep(0.5)
        # Neither the slots that the walk finds unreachable nor the retired ones may become free.
        assert not server.status()["pool"]["walked"]
        holder.kill()
        wait_until(lambda: server.status()["pool"]["walked"] and not table.status().retired_slots)
        assert server.verify().clean
    assert is_clean(path)


def test_a_close_beside_a_pin_is_not_clean(path: Path, begin: Callable[..., Process]) -> None:
    server = petps.open(path)
    wait_until(lambda: server.status()["pool"]["walked"])
    holder = begin("hold", path)
    server.push(TABLE, ALL, rows_of(ALL, 1))
    with pytest.raises(FailedPrecondition, match="holds rows that were replaced"):
        server.close()
    holder.kill()
    assert not is_clean(path)
    with petps.open(path) as server:
        assert server.verify().clean
        assert (server.pull(TABLE, ALL) == rows_of(ALL, 1)).all()


def test_a_forked_child_must_open_the_pool_again(path: Path) -> None:
    with petps.open(path), petps.open_live(path) as reader:
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                reader.pull(TABLE, [1])
                result = b"pulled"
            except FailedPrecondition as error:
                result = str(error).encode()
            os.write(write_end, result)
            os._exit(0)
        os.waitpid(child, 0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as result_of_child:
            assert b"open it again" in result_of_child.read()


def test_pins_of_a_killed_reader_are_dropped_even_if_its_child_lives(
    path: Path, begin: Callable[..., Process]
) -> None:
    with petps.open(path) as server:
        holder = begin("leave_child", path)
        server.push(TABLE, ALL, rows_of(ALL, 1))
        holder.kill()
        try:
            wait_until(lambda: server.table(TABLE).status().retired_slots == 0)
        finally:
            os.kill(holder.first["child"], signal.SIGKILL)


# ---- names


def test_a_link_names_the_same_pool(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    with petps.open(link) as server, petps.open_live(path) as reader:
        server.push(TABLE, ALL, rows_of(ALL, 5))
        assert (reader.pull(TABLE, ALL) == rows_of(ALL, 5)).all()


def test_a_renamed_pool_with_readers_cannot_be_opened(
    path: Path, begin: Callable[..., Process]
) -> None:
    writer = begin("write", path, 0)
    with petps.open_live(path) as reader:
        writer.kill()
        renamed = path.rename(path.with_name("renamed"))
        for _ in range(2):  # the second time with a file of readers that belongs to another pool
            with pytest.raises(FailedPrecondition, match=r"renamed\.readers"):
                petps.open(renamed)
            readers(renamed).write_bytes(readers(path).read_bytes())
        rows, mask = reader.pull(TABLE, ALL, return_mask=True)
        assert faults_of(ALL, rows, mask) == []
    with petps.open(renamed) as server, petps.open_live(renamed):
        assert server.verify().clean


def test_a_reader_notices_a_replaced_pool(path: Path, tmp_path: Path) -> None:
    with petps.open(path) as server, petps.open_live(path) as reader:
        copy = tmp_path / "copy"
        copy.write_bytes(path.read_bytes())
        copy.replace(path)
        server.create_table("late", dim=1, capacity=10)  # makes the reader read the catalogue again
        with pytest.raises(FailedPrecondition, match="moved or replaced"):
            reader.pull(TABLE, ALL)


# ---- the file


def test_a_pool_opens_beside_readers_that_open_it(
    path: Path, begin: Callable[..., Process]
) -> None:
    opener = begin("open_repeatedly", path)
    unfinished = path.with_name("unfinished")
    for _ in range(100):
        # A server that is killed at its first step leaves an empty file. Rename it into place,
        # because a reader may have the old file mapped.
        unfinished.write_bytes(b"")
        unfinished.replace(readers(path))
        server = petps.open(path)
        assert server.status()["pool"]["readers_refused"] == ""
        server.close()
    opener.until(lambda facts: facts["opens"] >= 100)


def test_a_file_of_readers_of_another_pool_is_refused(path: Path, tmp_path: Path) -> None:
    with petps.create(tmp_path / "other"):
        readers(path).write_bytes(readers(tmp_path / "other").read_bytes())
    with pytest.raises(FailedPrecondition, match="belongs to another pool"):
        petps.open_live(path)
    with petps.open(path), petps.open_live(path) as reader:
        assert (reader.pull(TABLE, ALL) == rows_of(ALL, 0)).all()


def damage(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


@pytest.mark.parametrize(
    ("at", "content", "kind", "text"),
    [
        (0, b"x" * 8, DataLoss, "is not a readers file"),
        (8, b"\xff\x00\x00\x00", Unimplemented, "format version 255"),
        (16, b"y" * 16, FailedPrecondition, "belongs to another pool"),
    ],
)
def test_a_damaged_file_is_refused(
    path: Path, at: int, content: bytes, kind: type[PetpsError], text: str
) -> None:
    with petps.open(path):
        damage(readers(path), at, content)
        with pytest.raises(kind, match=text):
            petps.open_live(path)
    with petps.open(path), petps.open_live(path):  # the file was created again
        pass


def test_a_short_file_is_refused(path: Path) -> None:
    readers(path).write_bytes(b"")
    with pytest.raises(DataLoss, match="its creation was interrupted; start a server"):
        petps.open_live(path)
    readers(path).unlink()


def test_a_server_refuses_readers_of_another_format(path: Path) -> None:
    server = petps.open(path)
    with petps.open_live(path):
        server.close()
        damage(readers(path), 8, b"\xff\x00\x00\x00")
        with pytest.raises(Unimplemented, match="end the processes that read the pool"):
            petps.open(path)
    petps.open(path).close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_an_unwritable_file_is_refused(path: Path) -> None:
    with petps.open(path):
        readers(path).chmod(stat.S_IRUSR)
        with pytest.raises(PermissionDenied, match="it holds the pins of readers"):
            petps.open_live(path)


def test_a_pool_without_a_file_of_readers_refuses_readers(path: Path) -> None:
    readers(path).mkdir()
    with petps.open(path) as server:  # the pool opens, but has no readers
        assert "pool.readers" in server.status()["pool"]["readers_refused"]
        with pytest.raises(FailedPrecondition, match="keeps readers out"):
            petps.open_live(path)
        server.push(TABLE, ALL, rows_of(ALL, 1))
        assert (server.pull(TABLE, ALL) == rows_of(ALL, 1)).all()
    assert is_clean(path)


def test_a_pool_without_readers_refuses_readers_with_an_old_file(
    path: Path, begin: Callable[..., Process]
) -> None:
    begin("write", path, 0).kill()  # its file of readers stays
    old = readers(path).read_bytes()
    readers(path).unlink()
    readers(path).mkdir()
    with petps.open(path):
        readers(path).rmdir()
        readers(path).write_bytes(old)
        with pytest.raises(FailedPrecondition, match="keeps readers out"):
            petps.open_live(path)


class InterposedReader:
    """The native reader, with an action after each resolution of a call's tables."""

    def __init__(self, reader: Any, action: Callable[[], None]) -> None:
        self._reader = reader
        self._action = action
        self.resolutions = 0

    def find(self, model: str, tables: list[str]) -> Any:
        records = self._reader.find(model, tables)
        self.resolutions += 1
        self._action()
        return records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class TwoInstances:
    """Tables "t" and "u" of m@1 and m@2; every value is the instance's number."""

    ROWS = 20_000
    KEYS = np.arange(ROWS, dtype=np.uint64)

    def __init__(self, folder: Path) -> None:
        self.path = folder / "two.pool"
        self.tables = petps._native.Tables.create(str(self.path), durability="process")
        self.ids: dict[int, int] = {}
        for number in (1, 2):
            self.create(number)
        self.switch_to(1)
        self.live = petps.open_live(self.path)

    def create(self, number: int) -> None:
        self.ids[number] = self.tables.create_instance("m", f"m@{number}", 1).id
        for name in ("t", "u"):
            table = self.tables.create_table(
                name, instance=self.ids[number], dim=2, dtype="f32", capacity=self.ROWS
            )
            rows = np.full((self.ROWS, 2), number, np.float32)
            table.apply(self.KEYS, rows.view(np.uint8).reshape(self.ROWS, 8))

    def switch_to(self, number: int) -> None:
        self.tables.set_alias("m", self.ids[number])

    def interpose(self, action: Callable[[], None]) -> InterposedReader:
        """Run an action after each resolution of a call's tables."""
        spy = InterposedReader(self.live._native, action)
        self.live._native = spy  # type: ignore[assignment]
        return spy

    def close(self) -> None:
        self.live.close()
        self.tables.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoInstances]:
    instances = TwoInstances(tmp_path)
    yield instances
    instances.close()


def test_a_switch_during_a_pull_mixes_nothing(two: TwoInstances) -> None:
    spy = two.interpose(lambda: two.switch_to(2))
    out = np.zeros((two.ROWS, 2), np.float32)
    assert two.live.pull("t", two.KEYS, out, model="m") is out
    assert np.unique(out).tolist() == [1.0]
    assert spy.resolutions == 1
    two.switch_to(1)
    assert np.unique(two.live.pull("t", two.KEYS, model="m")).tolist() == [1.0]
    two.switch_to(1)
    many = two.live.pull_many({"t": two.KEYS, "u": two.KEYS}, model="m")
    assert [np.unique(rows).tolist() for rows in many.values()] == [[1.0], [1.0]]
    assert spy.resolutions == 3


def test_switches_without_end_mix_nothing(two: TwoInstances) -> None:
    is_done = threading.Event()

    def switch() -> None:
        number = 1
        while not is_done.is_set():
            number = 3 - number
            two.switch_to(number)

    thread = threading.Thread(target=switch)
    thread.start()
    out = np.zeros((two.ROWS, 2), np.float32)
    seen = set()
    for _ in range(100):
        two.live.pull("t", two.KEYS, out, model="m")
        seen.add(tuple(np.unique(out)))
        keys = {"t": two.KEYS, "u": two.KEYS}
        for rows, mask in two.live.pull_many(keys, return_mask=True, model="m").values():
            assert mask.all()
            seen.add(tuple(np.unique(rows)))
    is_done.set()
    thread.join()
    assert seen <= {(1.0,), (2.0,)}


def test_a_drop_during_a_pull_restarts_the_pull(two: TwoInstances) -> None:
    def drop_the_first() -> None:
        if spy.resolutions == 1:
            two.switch_to(2)
            two.tables.drop_instance(two.ids[1])

    spy = two.interpose(drop_the_first)
    out = np.zeros((two.ROWS, 2), np.float32)
    two.live.pull("t", two.KEYS, out, model="m")
    assert np.unique(out).tolist() == [2.0]
    assert spy.resolutions == 2


def test_a_pull_fails_after_repeated_drops(two: TwoInstances) -> None:
    numbers = iter(range(3, 100))

    def replace() -> None:
        old = two.ids[max(two.ids)]
        number = next(numbers)
        two.create(number)
        two.switch_to(number)
        two.tables.drop_instance(old)

    two.switch_to(2)
    two.interpose(replace)
    with pytest.raises(Unavailable, match="was dropped during the pull, 8 times: pull again"):
        two.live.pull("t", two.KEYS, model="m")
    with pytest.raises(NotFound, match="there is no model, instance or alias 'm@2'"):
        two.live.pull("t", two.KEYS, model="m@2")
