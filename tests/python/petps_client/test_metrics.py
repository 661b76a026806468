"""The metrics of clients in a registry of prometheus_client."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import petps_client
import pytest
from petps_client.errors import NotFound, ResourceExhausted
from prometheus_client import CollectorRegistry

from tests.ports import stable_port
from tests.python.petps_client.served import Served
from tests.python.waiting import wait_until


def test_requests_errors_and_latency_are_counted(served: Served) -> None:
    registry = CollectorRegistry()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"petps_client_{name}", labels)

    with (
        petps_client.connect(served.url, name="a", metrics=registry) as first,
        petps_client.connect(served.url, name="b", metrics=registry) as second,
    ):
        first.pull("f32", [1, 2])
        first.pull("f32", [1], out=np.empty((1, first.describe("f32").dim), np.float32))
        with pytest.raises(NotFound):
            first.pull("nothing", [1], out=np.empty((1, 4), np.float32))
        second.push("small", [1], np.ones((1, 2), np.float32))
        keys = np.arange(1000, dtype=np.uint64)
        with pytest.raises(ResourceExhausted):
            second.push("small", keys, np.ones((1000, 2), np.float32))
        second.erase("small", [1])
        assert [table.name for table in second.tables()], "other calls work as without metrics"
    pulls = {"client": "a", "operation": "pull"}
    pushes = {"client": "b", "operation": "push"}
    assert value("latency_seconds_count", **pulls) == 3
    assert value("latency_seconds_sum", **pulls) > 0  # type: ignore[operator]
    assert value("errors_total", **pulls, code="NOT_FOUND") == 1
    assert value("latency_seconds_count", **pushes) == 2
    assert value("errors_total", **pushes, code="RESOURCE_EXHAUSTED") == 1
    assert value("latency_seconds_count", client="b", operation="erase") == 1


def test_a_forked_child_may_be_scraped(served: Served) -> None:
    registry = CollectorRegistry()
    with petps_client.connect(served.url, name="c", metrics=registry) as client:
        client.pull("f32", [1])
        child = os.fork()
        if child == 0:  # its client has neither threads nor connections
            list(registry.collect())
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def test_a_client_without_metrics_does_not_import_prometheus_client() -> None:
    program = "import sys, petps_client; sys.exit('prometheus_client' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_replica_that_fails_is_seen_though_no_call_does(served: Served) -> None:
    registry = CollectorRegistry()
    dead = f"127.0.0.1:{stable_port()}"

    def value(name: str, server: str) -> float | None:
        labels = {"client": "c", "server": server}
        return registry.get_sample_value(f"petps_client_{name}", labels)

    url = f"petps://{served.address},{dead}/ranking"
    with petps_client.connect(url, name="c", metrics=registry) as client:
        wait_until(lambda: (client.pull("f32", [1, 2]), value("server_live", dead) == 0)[1])
        assert value("server_live", served.address) == 1
        seen = value("server_failures_total", dead)
        assert seen is not None
        assert seen >= 3
        assert value("server_failures_total", served.address) == 0
    last = value("server_failures_total", dead)
    assert last is not None
    assert last >= seen, "the failures of a closed client still count"
    assert value("server_live", dead) is None
    names = {sample.name for metric in registry.collect() for sample in metric.samples}
    assert "petps_client_latency_seconds_count" in names
    assert "petps_client_errors_total" not in names
    with petps_client.connect(url, name="c", metrics=registry):
        again = value("server_failures_total", dead)
    assert again is not None
    assert again >= last
