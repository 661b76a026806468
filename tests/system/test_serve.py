"""Tests of `petps serve` as a process: start, requests, kills, stops, and no tracebacks."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

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
from tests.system.servers import PETPS, WAIT_SECONDS, Server, wait_until

pytestmark = pytest.mark.system

Serve = Callable[..., Server]

DIM = 8
COUNT = 5000
SEED = 991


def rows_of(keys: npt.NDArray[np.uint64], salt: int) -> npt.NDArray[np.float32]:
    """Return rows float32[n, DIM] that identify their key and the write that made them."""
    rows = np.empty((len(keys), DIM), np.float32)
    rows[:] = (keys % 65_536).astype(np.float32)[:, None] + np.arange(DIM, dtype=np.float32) * salt
    return rows


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
            table = connection.table_ids()["items"]
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


def test_serves_and_stops_cleanly(pool: Path, serve: Serve) -> None:
    process = serve(pool)
    facts = process.wait_ready()
    with Connection(facts["port"]) as connection:
        keys = np.array([1, 2, 10**9], np.uint64)
        rows, found = connection.pull(connection.table_ids()["items"], DIM, keys)
        assert found.tolist() == [True, True, False]
        assert (rows[:2] == rows_of(keys[:2], 1)).all()
    assert b"petps_server_pulls_total 1.0\n" in process.read("metrics")
    output = process.stop()
    lines = output.splitlines()
    assert lines[0].startswith(f"serving petps://127.0.0.1:{facts['port']}, http://127.0.0.1:")
    assert f", gRPC on 127.0.0.1:{facts['grpc_port']} from " in lines[0]
    assert lines[1:] == ["SIGTERM: draining", "closed cleanly"]
    assert not process.ready_file.exists()
    assert is_clean(pool)


def wait_for_line(process: Server, text: str) -> None:
    wait_until(text, lambda: text in process.output or not process.is_running)
    assert text in process.output, process.output + process.errors


def test_every_port_is_open_once_the_ready_file_exists(pool: Path, serve: Serve) -> None:
    process = serve(pool)
    facts = process.wait_ready()
    for name in ("port", "http_port", "grpc_port"):
        socket.create_connection(("127.0.0.1", facts[name]), timeout=10).close()
    process.read("readyz")  # an error status raises
    process.stop()


def test_signals_that_do_not_stop_the_server(pool: Path, tmp_path: Path, serve: Serve) -> None:
    """Send SIGHUP, which reloads some settings, and USR1, USR2 and PIPE, which change nothing."""
    file = tmp_path / "petps.toml"
    settings = f'[pool]\npath = "{pool}"\n[server]\nready_lag_seconds = {{}}\nworkers = {{}}\n'
    file.write_text(settings.format("60.0", 1))
    process = serve(pool, "--config", file)
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
        _, found = connection.pull(connection.table_ids()["items"], DIM, np.array([1], np.uint64))
        assert found.tolist() == [True]
    assert process.stop().endswith("SIGTERM: draining\nclosed cleanly\n")
    assert is_clean(pool)


def test_sigint_closes_the_pool_cleanly(pool: Path, serve: Serve) -> None:
    process = serve(pool, "--no-http")
    assert process.wait_ready()["http_port"] is None
    assert "SIGINT: draining\nclosed cleanly\n" in process.stop(signal.SIGINT)
    assert is_clean(pool)


def test_kill_and_restart_loses_nothing_acknowledged(pool: Path, serve: Serve) -> None:
    print(f"seed {SEED}")
    random = np.random.default_rng(SEED)
    model = dict.fromkeys(range(COUNT), 1)
    for round_number in range(4):
        process = serve(pool)
        facts = process.wait_ready()
        pusher = Pusher(facts["port"], 2 + round_number, int(random.integers(1 << 30)))
        wait_until("an acknowledged push", lambda: pusher.pushed)  # noqa: B023
        time.sleep(random.random() * 0.3)
        process.kill()
        pusher.stop()
        for keys in pusher.pushed:
            model.update(dict.fromkeys(keys, pusher.salt))
        process = serve(pool)
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
        rows, found = connection.pull(connection.table_ids()["items"], DIM, keys)
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
    pool: Path, tmp_path: Path, serve: Serve
) -> None:
    log_folder = tmp_path / "log"
    process = serve(pool, "--log", log_folder)
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
    process = serve(pool, "--log", log_folder)
    facts = process.wait_ready()
    wait_for_version(facts["port"], version)
    with Connection(facts["port"]) as connection:
        rows, found = connection.pull(connection.table_ids()["fed"], DIM, keys)
        assert found.all()
        assert (rows[:1000] == rows_of(keys[:1000], 2)).all()
        assert (rows[1000:] == rows_of(keys[1000:], 1)).all()
        with pytest.raises(Refused, match="delta") as refused:
            connection.push(connection.table_ids()["fed"], keys[:1], rows[:1])
        assert refused.value.code == 5
    process.stop()


def wait_for_version(port: int, version: int) -> None:
    with Connection(port) as connection:
        wait_until(
            f"version {version}",
            lambda: connection.status()["instances"][0]["applied_version"] >= version,
        )


def test_garbage_and_silent_clients_do_not_disturb_others(pool: Path, serve: Serve) -> None:
    process = serve(pool)
    port = process.wait_ready()["port"]
    with Connection(port) as good, Connection(port) as silent, Connection(port) as garbage:
        silent.send(b"PTPS")
        garbage.send(os.urandom(4096))
        reply = garbage.read_to_end()
        assert b"PTPS" in reply
        table = good.table_ids()["items"]
        rows, found = good.pull(table, DIM, np.array([1], np.uint64))
        assert found.all()
        with pytest.raises(Refused, match="999") as unknown:
            good.pull(999, DIM, np.array([1], np.uint64))
        assert unknown.value.code == 2
        with pytest.raises(Refused, match="dim"):
            good.push(table, np.array([1], np.uint64), np.ones((1, DIM + 1), np.float32))
        assert (good.pull(table, DIM, np.array([1], np.uint64))[0] == rows).all()
    process.stop()


def test_a_second_server_of_a_pool_is_refused(pool: Path, serve: Serve) -> None:
    process = serve(pool)
    process.wait_ready()
    second = serve(pool)
    assert second.child.wait(WAIT_SECONDS) == 6
    assert "is open in another process" in second.errors
    assert "Traceback" not in second.errors
    # The first server's ready file is untouched.
    assert process.wait_ready()["pid"] == process.child.pid
    process.stop()


def test_a_server_whose_pool_is_truncated_exits_with_a_message(pool: Path, serve: Serve) -> None:
    process = serve(pool)
    port = process.wait_ready()["port"]
    with Connection(port) as connection:
        table = connection.table_ids()["items"]
        os.truncate(pool, 4096)
        with pytest.raises(ConnectionError):
            connection.pull(table, DIM, np.arange(COUNT, dtype=np.uint64))
    assert process.child.wait(WAIT_SECONDS) == _native.LOST_POOL_EXIT_STATUS
    message = rf"petps: SIGBUS at byte \d+ of the pool {pool}: the file has only 4096 bytes"
    assert re.search(message, process.errors), process.errors
    assert "Look at `dmesg`" in process.errors
    assert "Traceback" not in process.errors


def test_the_server_exits_if_ingest_cannot_start(pool: Path, tmp_path: Path, serve: Serve) -> None:
    with DirectoryLog(tmp_path / "log", partitions=3):
        pass
    process = serve(pool, "--log", tmp_path / "log")
    assert process.child.wait(WAIT_SECONDS) == 2, process.output
    assert "has 3 partitions, not 8" in " ".join(process.errors.split())
    assert not process.ready_file.exists()
    assert is_clean(pool)


def test_bad_arguments_and_pools_are_refused_with_the_reason(pool: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> tuple[int, str]:
        process = subprocess.run(
            [*PETPS, "serve", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert "Traceback" not in process.stderr
        return process.returncode, process.stderr

    assert run() == (
        2,
        (
            "error: name the pool: `petps serve PATH`, --config FILE, or PETPS_POOL_PATH "
            "[INVALID_ARGUMENT]\n"
        ),
    )
    code, message = run(tmp_path / "none")
    assert code == 3
    assert "create it with `petps create`" in message
    code, message = run(pool, "--port", 70_000)
    assert code == 2
    assert "[server] port" in message
    code, message = run(pool, "--gather", "dma")
    assert code == 2
    assert "gather" in message
    code, message = run(pool, "--ready-file", tmp_path / "no/ready")
    assert code == 2
    assert "there is no folder" in message
    text = tmp_path / "text"
    text.write_text("hello\n" * 100_000)
    code, message = run(text)
    assert code == 2
    assert f"{text}" in message
    with pool.open("r+b") as file:
        file.truncate(pool.stat().st_size // 2)
    code, message = run(pool)
    assert code == 9
    assert "is cut short" in message
