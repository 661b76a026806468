"""Pulls beside a server: torn rows, the death of either side, the file of readers."""

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

ALL = np.arange(KEYS, dtype=np.uint64)


class Process:
    """A child process of live_processes, whose lines are read one by one."""

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
        said: dict[str, Any] = json.loads(text)
        return said

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            said = self.line()
            if wanted(said):
                return said

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
    begun: list[Process] = []

    def make(*arguments: object) -> Process:
        begun.append(Process(*arguments))
        return begun[-1]

    yield make
    for process in begun:
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


def test_sees_writes_tables_and_switches_at_once(path: Path) -> None:
    with petps.open(path) as server, petps.open_live(path) as reader:
        assert (reader.pull(TABLE, ALL) == rows_of(ALL, 0)).all()
        server.push(TABLE, ALL, rows_of(ALL, 7))
        assert (reader.pull(TABLE, ALL) == rows_of(ALL, 7)).all()
        server.create_table("late", dim=3, capacity=100_000, dtype="f16", default=0.5)
        many = np.arange(100_000, dtype=np.uint64)  # they need extents made after the open
        server.push("late", many, np.ones((100_000, 3), np.float32))
        rows, found = reader.pull("late", [99_999, 1 << 50], return_mask=True)
        assert found.tolist() == [True, False]
        assert rows.tolist() == [[1.0] * 3, [0.5] * 3]
        assert {table.name for table in reader.tables()} == {TABLE, "late"}
        made = server.create_instance("default@1")
        server.push(TABLE, ALL, rows_of(ALL, 8), model=made)
        assert (reader.pull(TABLE, ALL) == rows_of(ALL, 7)).all()
        server.switch_alias("default", made)
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
    with pytest.raises(FailedPrecondition, match="start one"):
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


def test_no_torn_row_under_full_speed(path: Path, begin: Callable[..., Process]) -> None:
    writer = begin("write", path, 0)
    both = [begin("read", path, 4, "kept") for _ in range(2)]
    for reader in both:
        last = reader.until(lambda said: "faults" in said)
        assert last["faults"] == []
        assert last["pulls"] > 0
    done = writer.until(lambda said: said["writes"] > 100)
    # Slots are reused: otherwise a hundred writes would need a hundred times the slots.
    assert done["slots"] < 20 * KEYS


def test_with_its_pins_ignored_it_sees_torn_rows(path: Path, begin: Callable[..., Process]) -> None:
    begin("write", path, 0)
    reader = begin("read", path, 120, "disabled")
    assert reader.until(lambda said: "faults" in said)["faults"]


# ---- deaths


def test_pins_of_a_killed_reader_are_dropped(path: Path, begin: Callable[..., Process]) -> None:
    with petps.open(path) as server:
        holder = begin("hold", path)
        table = server.table(TABLE)
        for write in range(5):
            server.push(TABLE, ALL, rows_of(ALL, write))
        tick = threading.Event()
        tick.wait(0.3)  # time for the background thread to reclaim, which the pin must prevent
        assert table.status().retired_slots >= 4 * KEYS
        holder.kill()
        while table.status().retired_slots > 0:
            tick.wait(0.01)
    assert is_clean(path)


def test_a_killed_server_leaves_its_readers_reading(
    path: Path, begin: Callable[..., Process]
) -> None:
    writer = begin("write", path, 0)
    with petps.open_live(path) as reader:
        for _ in range(5):
            writer.until(lambda said: said["writes"] % 100 == 0)
            writer.kill()
            rows, found = reader.pull(TABLE, ALL, return_mask=True)
            assert faults_of(ALL, rows, found) == []
            writer = begin("write", path, 0)
            rows, found = reader.pull(TABLE, ALL, return_mask=True)
            assert faults_of(ALL, rows, found) == []
    with petps.open_live(path) as late:
        writer.kill()
        with petps.open_live(path) as other:
            for reader in (late, other):
                rows, found = reader.pull(TABLE, ALL, return_mask=True)
                assert faults_of(ALL, rows, found) == []


def test_a_reopened_server_honours_earlier_pins(path: Path, begin: Callable[..., Process]) -> None:
    writer = begin("write", path, 2)
    holder = begin("hold", path)  # pins before any write, so it holds back all of them
    assert writer.child.stdin is not None
    writer.child.stdin.write("go\n")
    writer.child.stdin.flush()
    assert writer.line()["retired"] == 2 * KEYS
    writer.kill()
    with petps.open(path) as server:
        table = server.table(TABLE)
        server.push(TABLE, ALL[:10], rows_of(ALL[:10], 1))
        tick = threading.Event()
        tick.wait(0.5)
        # Neither the slots that the walk finds unreachable nor the retired ones may become free.
        assert not server.status()["pool"]["walked"]
        holder.kill()
        while not server.status()["pool"]["walked"] or table.status().retired_slots > 0:
            tick.wait(0.01)
        assert server.verify().clean
    assert is_clean(path)


def test_close_beside_a_holder_is_not_clean(path: Path, begin: Callable[..., Process]) -> None:
    server = petps.open(path)
    tick = threading.Event()
    while not server.status()["pool"]["walked"]:
        tick.wait(0.01)
    holder = begin("hold", path)
    server.push(TABLE, ALL, rows_of(ALL, 1))
    with pytest.raises(FailedPrecondition, match="holds rows that were replaced"):
        server.close()
    holder.kill()
    assert not is_clean(path)
    with petps.open(path) as server:
        assert server.verify().clean
        assert (server.pull(TABLE, ALL) == rows_of(ALL, 1)).all()


def test_a_forked_child_must_open_it_again(path: Path) -> None:
    with petps.open(path), petps.open_live(path) as reader:
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                reader.pull(TABLE, [1])
                said = b"pulled"
            except FailedPrecondition as error:
                said = str(error).encode()
            os.write(write_end, said)
            os._exit(0)
        os.waitpid(child, 0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as said_by_child:
            assert b"open it again" in said_by_child.read()


def test_pins_of_a_killed_reader_are_dropped_though_its_child_lives(
    path: Path, begin: Callable[..., Process]
) -> None:
    with petps.open(path) as server:
        holder = begin("leave_child", path)
        server.push(TABLE, ALL, rows_of(ALL, 1))
        holder.kill()
        try:
            patience = time.monotonic() + 60
            while server.table(TABLE).status().retired_slots > 0:
                assert time.monotonic() < patience, "the child keeps its parent's pin"
                time.sleep(0.01)
        finally:
            os.kill(holder.first["child"], signal.SIGKILL)


# ---- names


def test_a_link_names_the_same_pool(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    with petps.open(link) as server, petps.open_live(path) as reader:
        server.push(TABLE, ALL, rows_of(ALL, 5))
        assert (reader.pull(TABLE, ALL) == rows_of(ALL, 5)).all()


def test_a_renamed_pool_is_not_written_past_its_readers(
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
        rows, found = reader.pull(TABLE, ALL, return_mask=True)
        assert faults_of(ALL, rows, found) == []
    with petps.open(renamed) as server, petps.open_live(renamed):
        assert server.verify().clean


def test_a_pool_that_takes_its_place_is_noticed(path: Path, tmp_path: Path) -> None:
    with petps.open(path) as server, petps.open_live(path) as reader:
        copy = tmp_path / "copy"
        copy.write_bytes(path.read_bytes())
        copy.replace(path)
        server.create_table("late", dim=1, capacity=10)  # makes the reader read the catalogue again
        with pytest.raises(FailedPrecondition, match="moved or replaced"):
            reader.pull(TABLE, ALL)


# ---- the file


def test_a_server_starts_whoever_knocks(path: Path, begin: Callable[..., Process]) -> None:
    knocker = begin("knock", path)
    unfinished = path.with_name("unfinished")
    for _ in range(100):
        # A server that is killed at its first step leaves such a file. It is put in place by a
        # rename, because a reader may have the old file mapped.
        unfinished.write_bytes(b"")
        unfinished.replace(readers(path))
        server = petps.open(path)
        assert server.status()["pool"]["readers_refused"] == ""
        server.close()
    knocker.until(lambda said: said["knocks"] >= 100)


def test_another_pools_file(path: Path, tmp_path: Path) -> None:
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
    with pytest.raises(DataLoss, match="never finished; start a server"):
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
def test_an_unwritable_file(path: Path) -> None:
    with petps.open(path):
        readers(path).chmod(stat.S_IRUSR)
        with pytest.raises(PermissionDenied, match="it holds the pins of readers"):
            petps.open_live(path)


def test_a_folder_in_its_place(path: Path) -> None:
    readers(path).mkdir()
    with petps.open(path) as server:  # it serves, but without readers
        assert "pool.readers" in server.status()["pool"]["readers_refused"]
        with pytest.raises(FailedPrecondition, match="keeps readers out"):
            petps.open_live(path)
        server.push(TABLE, ALL, rows_of(ALL, 1))
        assert (server.pull(TABLE, ALL) == rows_of(ALL, 1)).all()
    assert is_clean(path)


def test_a_server_without_readers_keeps_out_those_who_would_take_an_old_file(
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


class Meanwhile:
    """The native reader, with an action after each resolution of a call's tables."""

    def __init__(self, reader: Any, happen: Callable[[], None]) -> None:
        self._reader = reader
        self._happen = happen
        self.resolutions = 0

    def find(self, model: str, tables: list[str]) -> Any:
        found = self._reader.find(model, tables)
        self.resolutions += 1
        self._happen()
        return found

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
            self.make(number)
        self.means(1)
        self.live = petps.open_live(self.path)

    def make(self, number: int) -> None:
        self.ids[number] = self.tables.create_instance("m", f"m@{number}", 1).id
        for name in ("t", "u"):
            table = self.tables.create_table(
                name, instance=self.ids[number], dim=2, dtype="f32", capacity=self.ROWS
            )
            rows = np.full((self.ROWS, 2), number, np.float32)
            table.apply(self.KEYS, rows.view(np.uint8).reshape(self.ROWS, 8))

    def means(self, number: int) -> None:
        self.tables.set_alias("m", self.ids[number])

    def meanwhile(self, happen: Callable[[], None]) -> Meanwhile:
        spy = Meanwhile(self.live._native, happen)
        self.live._native = spy  # type: ignore[assignment]
        return spy

    def close(self) -> None:
        self.live.close()
        self.tables.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoInstances]:
    made = TwoInstances(tmp_path)
    yield made
    made.close()


def test_a_switch_during_a_pull_mixes_nothing(two: TwoInstances) -> None:
    spy = two.meanwhile(lambda: two.means(2))
    out = np.zeros((two.ROWS, 2), np.float32)
    assert two.live.pull("t", two.KEYS, out, model="m") is out
    assert np.unique(out).tolist() == [1.0]
    assert spy.resolutions == 1
    two.means(1)
    assert np.unique(two.live.pull("t", two.KEYS, model="m")).tolist() == [1.0]
    two.means(1)
    many = two.live.pull_many({"t": two.KEYS, "u": two.KEYS}, model="m")
    assert [np.unique(rows).tolist() for rows in many.values()] == [[1.0], [1.0]]
    assert spy.resolutions == 3


def test_switches_without_end_mix_nothing(two: TwoInstances) -> None:
    ended = threading.Event()

    def switch() -> None:
        number = 1
        while not ended.is_set():
            number = 3 - number
            two.means(number)

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
    ended.set()
    thread.join()
    assert seen <= {(1.0,), (2.0,)}


def test_a_drop_during_a_pull_begins_it_again(two: TwoInstances) -> None:
    def drop_the_first() -> None:
        if spy.resolutions == 1:
            two.means(2)
            two.tables.drop_instance(two.ids[1])

    spy = two.meanwhile(drop_the_first)
    out = np.zeros((two.ROWS, 2), np.float32)
    two.live.pull("t", two.KEYS, out, model="m")
    assert np.unique(out).tolist() == [2.0]
    assert spy.resolutions == 2


def test_a_drop_each_time_ends(two: TwoInstances) -> None:
    numbers = iter(range(3, 100))

    def replace() -> None:
        old = two.ids[max(two.ids)]
        number = next(numbers)
        two.make(number)
        two.means(number)
        two.tables.drop_instance(old)

    two.means(2)
    two.meanwhile(replace)
    with pytest.raises(Unavailable, match="was dropped during the pull, 8 times: pull again"):
        two.live.pull("t", two.KEYS, model="m")
    with pytest.raises(NotFound, match="there is no model, instance or alias 'm@2'"):
        two.live.pull("t", two.KEYS, model="m@2")
