"""Failures of ingest, and how the log, status, metrics, /readyz and gRPC health report each."""

from __future__ import annotations

import logging
import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import petps_client
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from petps import _native
from petps.admin.client import AdminClient
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.errors import IoError, Unavailable
from petps.publish import Publisher
from petps.server import Serving
from tests.python.server.conftest import Start, settings
from tests.python.waiting import wait_until

PARTITIONS = 8
SCHEMA = TableSchema("fed", "f32", 4)
SECONDS = 60.0  # to wait for a condition on a busy machine


class FollowingServer:
    """A server that follows a log, and the publisher of that log."""

    def __init__(self, serving: Serving, folder: Path) -> None:
        self.serving = serving
        self.log = DirectoryLog(folder, partitions=PARTITIONS)
        self.publisher = Publisher(self.log, "default", tables=[SCHEMA])
        self.publisher.begin_continue(None)
        self.publish(50)
        self.wait(lambda: serving.status()["ingest"]["version"] == self.publisher.version)
        self.wait(lambda: self.unready() is None)

    def publish(self, keys: int, first: int = 0) -> None:
        values = np.full((keys, 4), 2.5, np.float32)
        self.publisher.publish("fed", np.arange(first, first + keys, dtype=np.uint64), values)
        self.publisher.commit()

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.serving.status()["ingest"]
            time.sleep(0.02)

    def unready(self) -> str | None:
        """Return the reason that /readyz gives; None if the server is ready."""
        url = f"http://127.0.0.1:{self.serving.http_port}/readyz"
        try:
            with urllib.request.urlopen(url, timeout=30):
                return None
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read().decode().strip()}"

    def metrics(self) -> dict[str, list[Any]]:
        url = f"http://127.0.0.1:{self.serving.http_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as reply:
            families = text_string_to_metric_families(reply.read().decode())
            return {family.name: family.samples for family in families}

    def states(self) -> set[str]:
        return {entry["state"] for entry in self.serving.status()["ingest"]["partitions"]}


def full_table(fed: FollowingServer, patch: pytest.MonkeyPatch) -> None:
    fed.publish(1100)


def lost_messages(fed: FollowingServer, patch: pytest.MonkeyPatch) -> None:
    fed.publisher._seqs = [seq + 2 for seq in fed.publisher._seqs]
    fed.publish(50)


def two_publishers(fed: FollowingServer, patch: pytest.MonkeyPatch) -> None:
    """Write the run from another publisher too."""
    fed.publisher._publisher = "somebody-else"
    fed.publish(50)


def damaged_message(fed: FollowingServer, patch: pytest.MonkeyPatch) -> None:
    from petps.delta import Message

    message = fed.log.last_messages([0])[0]
    for partition in range(PARTITIONS):
        fed.log.publish(partition, Message(message.headers, b"no rows"))
    fed.log.flush()


def failing_pool(fed: FollowingServer, patch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise IoError("pool: fdatasync: Input/output error")

    patch.setattr(_native.Tables, "record_all_progress", fail)
    fed.publish(50)


def unreachable_log(fed: FollowingServer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DirectoryLog, "end_offsets", raise_unavailable)


def raise_unavailable(*_: object) -> None:
    raise Unavailable("the brokers do not answer; check the address")


FAILURES: dict[str, tuple[Callable[[FollowingServer, pytest.MonkeyPatch], None], str, str, str]] = {
    # name: (function that causes it, state of the partitions, text of the reason, text in the log)
    "full": (full_table, "full", "table 'fed' is full (capacity 1,000)", "is full"),
    "gap": (lost_messages, "stale", "are missing", "is incomplete"),
    "damage": (damaged_message, "stale", "refused", "is incomplete"),
    "conflict": (
        two_publishers,
        "conflict",
        "has two publishers, somebody-else and another",
        "stopped",
    ),
    "pool": (failing_pool, "blocked", "Input/output error", "apply failed"),
    "away": (unreachable_log, "unreachable", "the brokers do not answer", ""),
}


@pytest.mark.parametrize("name", FAILURES)
def test_every_report_shows_the_failure(
    start: Start,
    channels: Callable[[Serving], grpc.Channel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    cause, state, reason, logged = FAILURES[name]
    monkeypatch.setattr("petps.server.ingest.ingest.END_SECONDS", 0.1)  # far below the lag's limit
    serving = start(ingest={"log": tmp_path / "log"}, server={"ready_lag_seconds": 1.5})
    fed = FollowingServer(serving, tmp_path / "log")
    health = health_pb2_grpc.HealthStub(channels(serving))
    request = health_pb2.HealthCheckRequest()
    is_serving = health_pb2.HealthCheckResponse.SERVING
    fed.wait(lambda: health.Check(request).status == is_serving)
    fed.wait(lambda: fed.metrics()["petps_server_ready"][0].value == 1)
    before = fed.metrics()
    assert before["petps_ingest_partitions_not_following"][0].value == 0
    assert len(before["petps_ingest_lag_seconds"]) == PARTITIONS
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        cause(fed, patch)
        fed.wait(lambda: state in fed.states())
        fed.wait(lambda: reason in (fed.unready() or ""))
        fed.wait(lambda: health.Check(request).status != is_serving)
        fed.wait(lambda: reason in (serving.status()["unready"] or ""))
        status = serving.status()
        stopped = [entry for entry in status["ingest"]["partitions"] if entry["state"] == state]
        assert all(reason in entry["reason"] for entry in stopped)
        metrics = fed.metrics()
        assert metrics["petps_server_ready"][0].value == 0
        assert metrics["petps_ingest_partitions_not_following"][0].value >= len(stopped) > 0
        labels = [sample.labels for sample in metrics["petps_ingest_state"]]
        for entry in stopped:
            assert {"partition": str(entry["partition"]), "state": state} in labels
        fed.wait(lambda: max(s.value for s in fed.metrics()["petps_ingest_lag_seconds"]) > 1.5)
        assert logged in caplog.text
    if name in ("pool", "away"):  # these failures ended with the patch
        fed.wait(lambda: fed.unready() is None)
        fed.wait(lambda: health.Check(request).status == is_serving)
        assert fed.metrics()["petps_ingest_partitions_not_following"][0].value == 0
    fed.log.close()


def test_a_partition_that_was_full_continues_once_the_table_has_grown(
    start: Start, pool: Path, tmp_path: Path
) -> None:
    serving = start(ingest={"log": tmp_path / "log"})
    fed = FollowingServer(serving, tmp_path / "log")
    fed.publish(1100)
    fed.wait(lambda: "full" in fed.states())
    with AdminClient(pool) as client:
        client.grow("fed", 1100)
    fed.wait(lambda: fed.unready() is None)
    assert fed.states() == {"following"}
    with petps_client.connect(f"petps://127.0.0.1:{serving.port}") as client:
        rows, mask = client.pull("fed", np.arange(1100, dtype=np.uint64), return_mask=True)
    assert mask.all()
    assert (rows == 2.5).all()
    fed.log.close()


def test_the_lag_of_a_log_that_never_answered_is_unknown(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectoryLog, "start_offsets", raise_unavailable)
    monkeypatch.setattr(DirectoryLog, "end_offsets", raise_unavailable)
    serving = start(ingest={"log": tmp_path / "log"})
    entries = serving.status()["ingest"]["partitions"]
    assert len(entries) == PARTITIONS
    assert {(entry["state"], entry["lag_seconds"]) for entry in entries} == {("starting", None)}
    assert "partition 0 is starting" in str(serving.unready())
    url = f"http://127.0.0.1:{serving.http_port}/metrics"
    with urllib.request.urlopen(url, timeout=30) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    lag = next(family for family in families if family.name == "petps_ingest_lag_seconds")
    assert [sample.value for sample in lag.samples] == [math.inf] * PARTITIONS


def test_a_server_that_restarts_while_its_log_is_away_serves_if_any_lag_is_allowed(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest: dict[str, Any] = {"log": tmp_path / "log"}
    with Serving(settings(pool, ingest=ingest)) as serving:
        fed = FollowingServer(serving, tmp_path / "log")
        fed.log.close()
    monkeypatch.setattr(DirectoryLog, "start_offsets", raise_unavailable)
    monkeypatch.setattr(DirectoryLog, "end_offsets", raise_unavailable)
    any_lag = settings(pool, ingest=ingest, server={"ready_lag_seconds": 0})
    with Serving(any_lag) as serving:
        wait_until(lambda: serving.unready() is None)
        partitions = serving.status()["ingest"]["partitions"]
        read = {entry["state"] for entry in partitions if entry["offset"]}
        assert read == {"unreachable"}
        with petps_client.connect(f"petps://127.0.0.1:{serving.port}") as client:
            rows = client.pull("fed", np.arange(50, dtype=np.uint64))
        assert (rows == 2.5).all()
    with Serving(settings(pool, ingest=ingest)) as serving:
        wait_until(lambda: "has not reached the log's end yet" in str(serving.unready()))


def test_a_scrape_does_not_wait_for_the_log(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = start(ingest={"log": tmp_path / "log"})
    wait_until(lambda: serving.status()["ingest"]["log_reachable"])
    asked, answers = threading.Event(), threading.Event()

    def never(*_: object) -> None:
        asked.set()
        answers.wait(120)
        raise_unavailable()

    monkeypatch.setattr(DirectoryLog, "end_offsets", never)
    try:
        assert asked.wait(60)
        shown = [serving.status()["ingest"]["partitions"] for _ in range(3)]
        assert not answers.is_set()
        lags = [[partition["lag_seconds"] for partition in entry] for entry in shown]
        assert lags == sorted(lags)
        wait_until(lambda: not serving.status()["ingest"]["log_reachable"])
        partitions = serving.status()["ingest"]["partitions"]
        for partition in partitions:
            assert partition["lag_records"] is None
            assert partition["lag_seconds"] > 3
            assert partition["state"] == "unreachable"
            assert partition["reason"] == "the log does not answer"
    finally:
        answers.set()
