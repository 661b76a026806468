"""`petps serve` as a process: started, used, killed, stopped, and never with a traceback."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import petps
from petps import _native
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.publish import Publisher
from tests.python.native.superblock import is_clean
from tests.system.frames import Connection, Refused

pytestmark = pytest.mark.system

DIM = 8
COUNT = 5000
WAIT_SECONDS = 60.0
SEED = 991
_processes = itertools.count()


def rows_of(keys: npt.NDArray[np.uint64], salt: int) -> npt.NDArray[np.float32]:
    """Return rows float32[n, DIM] that identify their key and the write that made them."""
    rows = np.empty((len(keys), DIM), np.float32)
    rows[:] = (keys % 65_536).astype(np.float32)[:, None] + np.arange(DIM, dtype=np.float32) * salt
    return rows


class Process:
    """A `petps serve` child. It prints to files, since a full pipe would block it."""

    def __init__(self, pool: Path, *arguments: object) -> None:
        self.ready_file = pool.parent / "ready.json"
        number = next(_processes)
        self._output = pool.parent / f"serve.{number}.out"
        self._errors = pool.parent / f"serve.{number}.err"
        command = [sys.executable, "-m", "petps.cli", "serve", str(pool), "--port", "0"]
        command += ["--http-port", "0", "--grpc-port", "0", "--ready-file", str(self.ready_file)]
        command += [str(argument) for argument in arguments]
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self.child = subprocess.Popen(command, stdout=output, stderr=errors)

    @property
    def output(self) -> str:
        """Return its standard output so far."""
        return self._output.read_text()

    @property
    def errors(self) -> str:
        """Return its standard error so far."""
        return self._errors.read_text()

    def wait_ready(self) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.ready_file.exists():
            if self.child.poll() is not None:
                raise AssertionError(self.errors)
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.005)
        facts: dict[str, Any] = json.loads(self.ready_file.read_text())
        assert facts["pid"] == self.child.pid
        return facts

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()
        self.ready_file.unlink()

    def stop(self, number: int = signal.SIGTERM) -> str:
        """Stop a process that must end well, and return its standard output."""
        self.child.send_signal(number)
        assert self.child.wait(WAIT_SECONDS) == 0, self.errors
        assert self.errors == ""
        return self.output


class Pusher:
    """Client that pushes random keys until the server is gone, and records acknowledged pushes."""

    def __init__(self, port: int, salt: int, seed: int) -> None:
        self.salt = salt
        self.pushed: list[list[int]] = []
        self.unanswered: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(port, np.random.default_rng(seed)))
        self._thread.start()

    def _run(self, port: int, random: np.random.Generator) -> None:
        with Connection(port) as connection:
            table = table_ids(connection)["items"]
            while not self._stop.is_set():
                keys = random.integers(0, 3 * COUNT, 200).astype(np.uint64)
                self.unanswered = keys.tolist()
                try:
                    connection.push(table, keys, rows_of(keys, self.salt))
                except OSError:
                    return
                self.pushed.append(self.unanswered)
                self.unanswered = []

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_SECONDS)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    with petps.create(path, durability="process") as opened:
        opened.create_table("items", dim=DIM, capacity=100_000)
        opened.create_table("fed", dim=DIM, capacity=100_000, feed="delta")
        keys = np.arange(COUNT, dtype=np.uint64)
        opened.push("items", keys, rows_of(keys, 1))
    return path


@pytest.fixture
def started() -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for process in processes:
        if process.child.poll() is None:
            process.child.kill()
            process.child.wait()


def table_ids(connection: Connection) -> dict[str, int]:
    return {table["name"]: table["id"] for table in connection.status()["tables"]}


def test_ready_then_a_clean_stop(pool: Path, started: list[Process]) -> None:
    process = Process(pool)
    started.append(process)
    facts = process.wait_ready()
    with Connection(facts["port"]) as connection:
        keys = np.array([1, 2, 10**9], np.uint64)
        rows, found = connection.pull(table_ids(connection)["items"], DIM, keys)
        assert found.tolist() == [True, True, False]
        assert (rows[:2] == rows_of(keys[:2], 1)).all()
    with urllib.request.urlopen(
        f"http://127.0.0.1:{facts['http_port']}/metrics", timeout=10
    ) as reply:
        assert b"petps_server_pulls_total 1.0\n" in reply.read()
    output = process.stop()
    lines = output.splitlines()
    assert lines[0].startswith(f"serving petps://127.0.0.1:{facts['port']}, http://127.0.0.1:")
    assert f", gRPC on 127.0.0.1:{facts['grpc_port']} from " in lines[0]
    assert lines[1:] == ["SIGTERM: draining", "closed cleanly"]
    assert not process.ready_file.exists()
    assert is_clean(pool)


def wait_for_line(process: Process, text: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while text not in process.output:
        assert process.child.poll() is None, process.errors
        assert time.monotonic() < deadline, process.output
        time.sleep(0.01)


def test_every_door_is_open_when_it_says_so(pool: Path, started: list[Process]) -> None:
    process = Process(pool)
    started.append(process)
    facts = process.wait_ready()
    for name in ("port", "http_port", "grpc_port"):
        socket.create_connection(("127.0.0.1", facts[name]), timeout=10).close()
    with urllib.request.urlopen(f"http://127.0.0.1:{facts['http_port']}/readyz", timeout=10) as up:
        assert up.status == 200
    process.stop()


def test_signals_that_do_not_end_it(pool: Path, tmp_path: Path, started: list[Process]) -> None:
    """Send SIGHUP, which reloads some settings, and USR1, USR2 and PIPE, which change nothing."""
    file = tmp_path / "petps.toml"
    settings = f'[pool]\npath = "{pool}"\n[server]\nready_lag_seconds = {{}}\nworkers = {{}}\n'
    file.write_text(settings.format("60.0", 1))
    process = Process(pool, "--config", file)
    started.append(process)
    facts = process.wait_ready()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        process.child.send_signal(number)
    file.write_text(settings.format("30.0", 2))
    process.child.send_signal(signal.SIGHUP)
    wait_for_line(process, "reloaded: server.ready_lag_seconds = 30.0 (was 60.0)")
    wait_for_line(process, "changed, but needs a restart: server.workers")
    file.write_text("[server]\nready_lag = 1\n")
    process.child.send_signal(signal.SIGHUP)
    wait_for_line(process, "nothing is reloaded, and the current settings stay: ")
    with Connection(facts["port"]) as connection:
        _, found = connection.pull(table_ids(connection)["items"], DIM, np.array([1], np.uint64))
        assert found.tolist() == [True]
    assert process.stop().endswith("SIGTERM: draining\nclosed cleanly\n")
    assert is_clean(pool)


def test_interrupt_is_a_clean_stop_too(pool: Path, started: list[Process]) -> None:
    process = Process(pool, "--no-http")
    started.append(process)
    assert process.wait_ready()["http_port"] is None
    assert "SIGINT: draining\nclosed cleanly\n" in process.stop(signal.SIGINT)
    assert is_clean(pool)


def test_kill_and_restart_loses_nothing_acknowledged(pool: Path, started: list[Process]) -> None:
    print(f"seed {SEED}")
    random = np.random.default_rng(SEED)
    model = dict.fromkeys(range(COUNT), 1)
    for round_number in range(4):
        process = Process(pool)
        started.append(process)
        facts = process.wait_ready()
        pusher = Pusher(facts["port"], 2 + round_number, int(random.integers(1 << 30)))
        deadline = time.monotonic() + WAIT_SECONDS
        while not pusher.pushed and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.random() * 0.3)
        process.kill()
        pusher.stop()
        assert pusher.pushed
        for keys in pusher.pushed:
            model.update(dict.fromkeys(keys, pusher.salt))
        process = Process(pool)
        started.append(process)
        facts = process.wait_ready()
        check(facts["port"], model, dict.fromkeys(pusher.unanswered, pusher.salt))
        process.stop()
        assert is_clean(pool)
    with petps.open(pool) as opened:
        report = opened.verify()
        assert report.clean
        assert report.rows == len(model)


def check(port: int, model: dict[int, int], unsure: dict[int, int]) -> None:
    """Check that all rows equal the model, and update the model.

    A key of the push without an answer may have either row.
    """
    keys = np.arange(3 * COUNT, dtype=np.uint64)
    with Connection(port) as connection:
        rows, found = connection.pull(table_ids(connection)["items"], DIM, keys)
    for key, salt in unsure.items():
        if found[key] and (rows[key] == rows_of(keys[key : key + 1], salt)[0]).all():
            model[key] = salt
    assert set(np.flatnonzero(found).tolist()) == set(model)
    salts = np.array([model.get(key, 0) for key in keys.tolist()])
    expected = (keys % 65_536).astype(np.float32)[:, None] + np.multiply.outer(
        salts, np.arange(DIM)
    ).astype(np.float32)
    assert (rows[found] == expected[found]).all()


def test_deltas_reach_pulls_and_a_kill_changes_nothing(
    pool: Path, tmp_path: Path, started: list[Process]
) -> None:
    log_folder = tmp_path / "log"
    process = Process(pool, "--log", log_folder)
    started.append(process)
    facts = process.wait_ready()
    keys = np.arange(2000, dtype=np.uint64)
    with DirectoryLog(log_folder, partitions=8) as log:
        publisher = Publisher(log, "default", tables=[TableSchema("fed", "f32", DIM)])
        publisher.begin_continue(None)
        publisher.publish("fed", keys, rows_of(keys, 1))
        wait_for_version(facts["port"], publisher.commit())
        process.kill()
        publisher.publish("fed", keys[:1000], rows_of(keys[:1000], 2))
        version = publisher.commit()
    process = Process(pool, "--log", log_folder)
    started.append(process)
    facts = process.wait_ready()
    wait_for_version(facts["port"], version)
    with Connection(facts["port"]) as connection:
        rows, found = connection.pull(table_ids(connection)["fed"], DIM, keys)
        assert found.all()
        assert (rows[:1000] == rows_of(keys[:1000], 2)).all()
        assert (rows[1000:] == rows_of(keys[1000:], 1)).all()
        with pytest.raises(Refused, match="delta") as refused:
            connection.push(table_ids(connection)["fed"], keys[:1], rows[:1])
        assert refused.value.code == 5
    process.stop()


def wait_for_version(port: int, version: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    with Connection(port) as connection:
        while connection.status()["instances"][0]["applied_version"] < version:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_garbage_and_silence_hurt_nobody_else(pool: Path, started: list[Process]) -> None:
    process = Process(pool)
    started.append(process)
    port = process.wait_ready()["port"]
    with Connection(port) as good, Connection(port) as silent, Connection(port) as garbage:
        silent.send(b"PTPS")
        garbage.send(os.urandom(4096))
        reply = garbage.read_to_end()
        assert b"PTPS" in reply
        table = table_ids(good)["items"]
        rows, found = good.pull(table, DIM, np.array([1], np.uint64))
        assert found.all()
        with pytest.raises(Refused, match="999") as unknown:
            good.pull(999, DIM, np.array([1], np.uint64))
        assert unknown.value.code == 2
        with pytest.raises(Refused, match="dim"):
            good.push(table, np.array([1], np.uint64), np.ones((1, DIM + 1), np.float32))
        assert (good.pull(table, DIM, np.array([1], np.uint64))[0] == rows).all()
    process.stop()


def test_second_server_of_a_pool(pool: Path, started: list[Process]) -> None:
    process = Process(pool)
    started.append(process)
    process.wait_ready()
    second = Process(pool)
    started.append(second)
    assert second.child.wait(WAIT_SECONDS) == 6
    assert "is open in another process" in second.errors
    assert "Traceback" not in second.errors
    # The first server's ready file is untouched.
    assert process.wait_ready()["pid"] == process.child.pid
    process.stop()


def test_a_server_whose_pool_is_truncated_says_so_and_ends(
    pool: Path, started: list[Process]
) -> None:
    process = Process(pool)
    started.append(process)
    port = process.wait_ready()["port"]
    with Connection(port) as connection:
        table = table_ids(connection)["items"]
        os.truncate(pool, 4096)
        with pytest.raises(ConnectionError):
            connection.pull(table, DIM, np.arange(COUNT, dtype=np.uint64))
    assert process.child.wait(WAIT_SECONDS) == _native.LOST_POOL_EXIT_STATUS
    message = rf"petps: SIGBUS at byte \d+ of the pool {pool}: the file has only 4096 bytes"
    assert re.search(message, process.errors), process.errors
    assert "Look at `dmesg`" in process.errors
    assert "Traceback" not in process.errors


def test_ingest_that_cannot_start_ends_the_server(pool: Path, tmp_path: Path) -> None:
    with DirectoryLog(tmp_path / "log", partitions=3):
        pass
    process = Process(pool, "--log", tmp_path / "log")
    assert process.child.wait(WAIT_SECONDS) == 2, process.output
    assert "has 3 partitions, not 8" in " ".join(process.errors.split())
    assert not process.ready_file.exists()
    assert is_clean(pool)


def test_what_cannot_be_served(pool: Path, tmp_path: Path) -> None:
    def fails(*arguments: object) -> tuple[int, str]:
        process = subprocess.run(
            [
                sys.executable,
                "-m",
                "petps.cli",
                "serve",
                *(str(argument) for argument in arguments),
            ],
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert "Traceback" not in process.stderr
        return process.returncode, process.stderr

    assert fails() == (2, "error: name the pool: `petps serve PATH`, or --config FILE\n")
    code, message = fails(tmp_path / "none")
    assert code == 3
    assert "create it with `petps create`" in message
    code, message = fails(pool, "--port", 70_000)
    assert code == 2
    assert "[server] port" in message
    code, message = fails(pool, "--gather", "dma")
    assert code == 2
    assert "gather" in message
    code, message = fails(pool, "--ready-file", tmp_path / "no/ready")
    assert code == 2
    assert "there is no folder" in message
    text = tmp_path / "text"
    text.write_text("hello\n" * 100_000)
    code, message = fails(text)
    assert code == 2
    assert f"{text}" in message
    with pool.open("r+b") as file:
        file.truncate(pool.stat().st_size // 2)
    code, message = fails(pool)
    assert code == 9
    assert "is cut short" in message
