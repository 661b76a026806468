"""`petps load` into tables that deltas feed, while a server has the pool open."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import petps
import petps.admin.admin_pb2 as messages
from petps import config
from petps.admin import client as admin
from petps.admin.client import AdminClient
from petps.delta import DeltaLog, TableSchema, open_log
from petps.errors import InvalidArgument, PetpsError, Unavailable
from petps.publish import Publisher
from petps.server import Serving, lifecycle
from tests.python.cli.conftest import DIM, Command
from tests.python.cli.test_served import ignore
from tests.python.waiting import wait_until

COUNT = 3000


def rows_of(keys: Any, of: float = 0.0) -> Any:
    return (np.asarray(keys, np.float32)[:, None] + of) * np.ones(DIM, np.float32)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    keys = np.arange(COUNT, dtype=np.uint64)
    np.savez(tmp_path / "rows.npz", keys=keys, rows=rows_of(keys))
    return tmp_path / "rows.npz"


@pytest.fixture
def pool(tmp_path: Path, run: Command) -> Path:
    run("create", tmp_path / "p", "--table", f"items:{DIM}:f32:10k", "--feed", "delta")
    return tmp_path / "p"


def publish_halves(log: DeltaLog) -> Publisher:
    """Publish other rows of the first eight keys."""
    publisher = Publisher(log, "default", tables=[TableSchema("items", "f32", DIM)])
    publisher.begin_continue(None)
    publisher.publish("items", np.arange(8, dtype=np.uint64), rows_of(np.full(8, 0.5)))
    publisher.commit(publisher.version + 1, 1)
    return publisher


def follows(pool: Path) -> config.Config:
    given: dict[str, dict[str, Any]] = {
        "pool": {"path": pool},
        "server": {"port": 0, "http": False, "grpc": False},
        "ingest": {"log": pool.parent / "log"},
    }
    return config.merge(None, given, "test")


@pytest.mark.parametrize("bytes_of_a_message", [4 << 20, 400 * (8 + 4 * DIM)])
def test_rows_are_those_of_the_file(
    run: Command, pool: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, bytes_of_a_message: int
) -> None:
    monkeypatch.setattr(admin, "LOAD_BYTES", bytes_of_a_message)
    with Serving(follows(pool), log=ignore):
        report = run.json("load", pool, "items", rows)
        assert (report["inserted"], report["updated"]) == (COUNT, 0)
        assert run.json("load", pool, "items", rows)["updated"] == COUNT
    with petps.open(pool, read_only=True) as opened:
        keys = np.arange(COUNT, dtype=np.uint64)
        assert np.array_equal(opened.pull("items", keys), rows_of(keys))


def test_the_log_writes_over_them_and_then_alone(run: Command, pool: Path, rows: Path) -> None:
    with (
        closing(open_log(str(pool.parent / "log"), partitions=8)) as log,
        Serving(follows(pool), log=ignore) as serving,
    ):
        run("load", pool, "items", rows)
        publisher = publish_halves(log)
        wait_until(lambda: serving.status()["ingest"]["version"] == publisher.version)
        assert run.json("pull", pool, "items", 7)["rows"][0]["row"] == [0.5] * DIM
        assert run.json("pull", pool, "items", 8)["rows"][0]["row"] == [8.0] * DIM
        message = run.fails(6, "load", pool, "items", rows)
        assert "has applied deltas already, so only its log may write it" in message
        assert run.json("pull", pool, "items", 7)["rows"][0]["row"] == [0.5] * DIM


def test_a_new_instance_is_loaded_beside_the_old_one(run: Command, pool: Path, rows: Path) -> None:
    with Serving(follows(pool), log=ignore):
        with AdminClient(pool) as client:
            client.create_instance("default@1")
        run("load", pool, "items", rows, "--model", "default@1")
        assert not run.json("pull", pool, "items", 7)["rows"][0]["found"]
        assert run.json("pull", pool, "items", 7, "--model", "default@1")["rows"][0]["found"]
        run("alias", pool, "default@1", "--yes")
        assert run.json("pull", pool, "items", 7)["rows"][0]["row"] == [7.0] * DIM


def test_a_delta_never_loses_against_a_row_that_is_loaded(
    run: Command, pool: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publish while a load is between its check and its write, which ingest must wait for."""
    checked, go_on = threading.Event(), threading.Event()
    write: Callable[..., Any] = petps.Pool._write

    def slow(*arguments: Any, **options: Any) -> Any:
        checked.set()
        assert go_on.wait(60)
        return write(*arguments, **options)

    monkeypatch.setattr(petps.Pool, "_write", slow)
    with (
        closing(open_log(str(pool.parent / "log"), partitions=8)) as log,
        Serving(follows(pool), log=ignore) as serving,
    ):
        loading = threading.Thread(target=run, args=("load", pool, "items", rows))
        loading.start()
        assert checked.wait(60)
        publisher = publish_halves(log)
        ingest = serving._ingest
        assert ingest is not None
        wait_until(lambda: ingest.ingest.rounds() is None)  # it is held
        assert serving.status()["ingest"]["version"] == 0
        go_on.set()
        loading.join()
        wait_until(lambda: serving.status()["ingest"]["version"] == publisher.version)
        assert run.json("pull", pool, "items", 7)["rows"][0]["row"] == [0.5] * DIM


def test_a_load_does_not_wait_for_ever_for_ingest(
    run: Command, pool: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "HOLD_SECONDS", 0.05)
    with Serving(follows(pool), log=ignore) as serving:
        ingest = serving._ingest
        assert ingest is not None
        with ingest.ingest.held(10.0):
            message = run.fails(7, "load", pool, "items", rows)
            assert "ingest is held for something else" in message
        monkeypatch.undo()
        assert run.json("load", pool, "items", rows)["inserted"] == COUNT


def test_another_ingest_than_the_one_that_is_held_is_noticed(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Serving(follows(pool), log=ignore) as serving:
        ingest = serving._ingest
        assert ingest is not None
        held = ingest.ingest.held

        def replaced(timeout: float) -> Any:
            serving._ingest = None
            return held(timeout)

        monkeypatch.setattr(ingest.ingest, "held", replaced)
        with (
            pytest.raises(Unavailable, match="the shard map changed just now"),
            serving.ingest_held(),
        ):
            pytest.fail("it was held")
        serving._ingest = ingest


@pytest.mark.parametrize(
    ("keys", "values", "error"),
    [
        (b"1234567", b"", "keys have 8 bytes each"),
        (bytes(8), b"123", "values of rows 4 bytes"),
        (b"", b"", "0 values are no rows of 0 keys"),
        (bytes(16), bytes(12), "3 values are no rows of 2 keys"),
        (bytes(8), bytes(4 * DIM + 4), r"rows have shape \(1, 5\), expected \(1, 4\)"),
    ],
)
def test_requests_that_are_no_rows(pool: Path, keys: bytes, values: bytes, error: str) -> None:
    request = messages.LoadRequest(table="items", keys=keys, rows=values)
    with (
        Serving(follows(pool), log=ignore),
        AdminClient(pool) as client,
        pytest.raises(InvalidArgument, match=error),
    ):
        client._ask("Load", request)


def test_rows_that_do_not_fit(run: Command, pool: Path, tmp_path: Path) -> None:
    keys = np.arange(3, dtype=np.uint64)
    np.savez(tmp_path / "bad.npz", keys=keys, rows=rows_of([0, np.nan, 2]))
    np.savez(tmp_path / "wide.npz", keys=keys, rows=np.zeros((3, DIM + 1), np.float32))
    with Serving(follows(pool), log=ignore), AdminClient(pool) as client:
        assert "row 1 (key 1) has a NaN" in run.fails(
            2, "load", pool, "items", tmp_path / "bad.npz"
        )
        run("load", pool, "items", tmp_path / "bad.npz", "--allow-not-finite")
        assert "has rows of dim 5" in run.fails(2, "load", pool, "items", tmp_path / "wide.npz")
        with pytest.raises(InvalidArgument, match="one row for each key"):
            client.load("items", keys, np.zeros((2, DIM), np.float32))
        with pytest.raises(PetpsError, match="no table 'none'"):
            client.load("none", keys, np.zeros((3, DIM), np.float32))
