"""The life of a server in this process: open, recover, serve, ingest, drain, close."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import petps
from petps import _native
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PetpsError,
    Unavailable,
)
from petps.publish import Publisher
from petps.server import Serving, native_server
from petps.server.status import normalise_status
from tests.python.native.superblock import is_clean
from tests.python.server.conftest import Start, settings
from tests.python.waiting import wait_until


def test_a_server_waits_for_one_that_was_killed_a_moment_ago(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0
    monkeypatch.setattr(native_server, "DYING_SECONDS", 60.0)

    def count(path: str) -> Any:
        nonlocal tries
        tries += 1
        return opens(path)

    opens = _native.Tables.open
    monkeypatch.setattr(
        native_server, "_native", SimpleNamespace(Tables=SimpleNamespace(open=count))
    )
    dying = petps.open(pool)
    with ThreadPoolExecutor(1) as threads:
        opened = threads.submit(native_server.open_tables, settings(pool))
        wait_until(lambda: tries > 2)
        dying.close()
        opened.result(60).close()


def test_a_server_serves_and_closes_cleanly(start: Start, pool: Path) -> None:
    serving = start()
    assert serving.port > 0
    assert serving.http_port
    assert serving.open_ms < 10_000
    with socket.create_connection(("127.0.0.1", serving.port), timeout=5):
        pass
    with pytest.raises(FailedPrecondition, match="another process"):
        petps.open(pool)
    assert not is_clean(pool)
    serving.close()
    serving.close()
    assert is_clean(pool)
    with petps.open(pool) as opened:
        assert opened.status()["tables"][0]["rows"] == 100


def test_a_missing_pool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        NotFound, match=r"there is no pool at .*none: create it with `petps create`"
    ):
        Serving(settings(tmp_path / "none"))


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        ("port", PetpsError, "{port}"),
        ("http_port", Unavailable, "HTTP address 127.0.0.1:{port} is not available"),
    ],
)
def test_a_port_in_use_leaves_the_pool_clean(
    pool: Path, key: str, kind: type[PetpsError], message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(kind, match=message.format(port=port)):
            Serving(settings(pool, server={key: port}))
    assert is_clean(pool)
    petps.open(pool).close()


def test_http_can_be_switched_off(start: Start) -> None:
    assert start(server={"http": False}).http_port is None


def test_a_server_ingests_and_reports_it(start: Start, tmp_path: Path) -> None:
    serving = start(ingest={"log": tmp_path / "log"})
    schema = TableSchema("fed", "f32", 4)
    with DirectoryLog(tmp_path / "log") as log:  # the server has created it
        assert log.partitions == 8
        publisher = Publisher(log, "default", tables=[schema])
        publisher.begin_continue(None)
        keys = np.arange(50, dtype=np.uint64)
        publisher.publish("fed", keys, np.full((50, 4), 2.5, np.float32))
        version = publisher.commit()
    deadline = time.monotonic() + 30
    # Rows are served before they are counted and before their commit is applied, and the parts of a
    # status are not read at the same time.
    while True:
        status = serving.status()
        versions = {status["instances"][0]["applied_version"], status["ingest"]["version"]}
        if status["ingest"]["rows"] == 50 and versions == {version}:
            break
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    assert {entry["state"] for entry in status["ingest"]["partitions"]} == {"following"}
    url = f"http://127.0.0.1:{serving.http_port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        samples = {family.name: family.samples for family in families}
    assert sum(sample.value for sample in samples["petps_ingest_rows"]) == 50
    assert len(samples["petps_ingest_lag_records"]) == 8
    assert samples["petps_ingest_partitions_not_following"][0].value == 0
    freshness = {s.name: s.value for s in samples["petps_ingest_freshness_seconds"]}
    assert freshness["petps_ingest_freshness_seconds_count"] == status["ingest"]["records"] > 0
    assert 0 < freshness["petps_ingest_freshness_seconds_sum"] < 60
    serving.close()
    with petps.open(serving._config.pool.path) as opened:
        assert (opened.pull("fed", keys) == 2.5).all()


def test_a_status_that_says_ready_has_the_state_of_ingest(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`petps status --wait` shows the first status that says ready."""
    statuses: list[dict[str, Any]] = []

    def report_and_look(serving: Serving) -> None:
        report(serving)
        statuses.append(json.loads(serving._server.status_json()))

    report = Serving._report_unready
    monkeypatch.setattr(Serving, "_report_unready", report_and_look)
    with Serving(settings(pool, ingest={"log": tmp_path / "log"}), log=print) as serving:
        wait_until(lambda: serving.unready() is None)
        serving.report()
    ready = [status for status in statuses if status["unready"] is None]
    assert ready
    assert all(status.get("ingest") for status in ready)


def test_tables_of_the_configuration_that_differ_are_named(pool: Path) -> None:
    lines: list[str] = []
    same = {"dim": 4, "capacity": 1000}
    tables = {"items": same | {"dim": 8, "capacity": 2000}, "fed": same, "more": same}
    with Serving(settings(pool, tables=tables), log=lines.append):
        pass
    warnings = [line.removeprefix("WARNING: ") for line in lines if "WARNING" in line]
    assert warnings == [
        "[tables.items] dim = 8 is ignored: the pool's table has 4, and keeps it",
        "[tables.items] capacity = 2000 is ignored: the pool's table has 1000, and keeps it",
        "[tables.fed] feed = push is ignored: the pool's table has delta, and keeps it",
        "the pool has no table 'more' of the configuration; add it with `petps create --add`",
    ]
    lines.clear()
    with Serving(settings(pool, tables={"items": same}), log=lines.append):
        pass
    assert not any("WARNING" in line for line in lines)


def test_a_log_of_an_unknown_model_says_how_to_name_it(pool: Path, tmp_path: Path) -> None:
    ingest = {"log": tmp_path / "log", "model": "other"}
    with pytest.raises(NotFound, match=r"this pool has: default@0; name the model .* --model"):
        Serving(settings(pool, ingest=ingest))


def test_an_error_in_the_status_of_ingest_does_not_end_the_serving(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    with Serving(settings(pool, ingest={"log": tmp_path / "log"}), log=lines.append) as serving:
        working = serving._ingest.status
        monkeypatch.setattr(serving._ingest, "status", lambda: 1 / 0)
        lines.clear()
        for _ in range(3):
            serving.report()
        (line,) = lines
        assert line.startswith(
            "the status lacks ingest's state, but serving continues: ZeroDivision"
        )
        assert "ingest" in serving.status()
        monkeypatch.setattr(serving._ingest, "status", working)
        assert serving.status()["ingest"]["running"]


def test_status_does_not_show_an_ingest_that_was_stopped(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop ingest, as a change of the shard map does, while another thread requests the status."""
    with Serving(settings(pool, ingest={"log": tmp_path / "log"}), log=print) as serving:
        working = serving._ingest.status

        def stop_during_status() -> Any:
            state = working()
            serving._stop_ingest()
            return state

        monkeypatch.setattr(serving._ingest, "status", stop_during_status)
        serving.report()
        assert serving.status()["ingest"] is None


def test_bad_settings_of_ingest_are_refused(pool: Path, tmp_path: Path) -> None:
    with DirectoryLog(tmp_path / "other", partitions=3):
        pass
    with pytest.raises(InvalidArgument, match="has 3 partitions, not 8"):
        Serving(settings(pool, ingest={"log": tmp_path / "other"}))
    with pytest.raises(NotFound, match="'m'; this pool has: default@0"):
        Serving(settings(pool, ingest={"log": tmp_path / "log", "model": "m"}))
    with petps.open(pool) as opened:
        opened.native.set_feed(opened.table("fed").id, "push")
    with pytest.raises(FailedPrecondition, match="no table with feed 'delta': create one"):
        Serving(settings(pool, ingest={"log": tmp_path / "log"}))
    assert is_clean(pool)


def test_a_damaged_log_does_not_stop_the_serving(start: Start, tmp_path: Path) -> None:
    serving = start(ingest={"log": tmp_path / "log"})
    with DirectoryLog(tmp_path / "log") as log:
        publisher = Publisher(log, "default", tables=[TableSchema("fed", "f32", 4)])
        publisher.begin_continue(None)
        publisher.publish("fed", np.array([1], np.uint64), np.ones((1, 4), np.float32))
        publisher.commit()
        other = Publisher(log, "another", tables=[TableSchema("fed", "f32", 4)])
        other.begin_continue(publisher.position())
    wait_until(
        lambda: sum(p["dead_letters"] for p in serving.status()["ingest"]["partitions"]) == 8
    )
    with socket.create_connection(("127.0.0.1", serving.port), timeout=5):
        pass
    assert list((tmp_path / "dead-letters").iterdir())


def test_normalise_status_replaces_numbers_by_names() -> None:
    status = {
        "instances": [{"id": 3, "model": "m", "name": "m@1", "frozen": False}],
        "aliases": {},
        "tables": [
            {"dtype": 2, "instance": 3},
            {"dtype": 77, "instance": 9},
            {"dtype": "f32", "instance": "x"},
        ],
    }
    assert [(t["dtype"], t["instance"]) for t in normalise_status(status)["tables"]] == [
        ("bf16", "m@1"), ("dtype 77", "9"), ("f32", "x"),
    ]  # fmt: skip
