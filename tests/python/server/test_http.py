"""The HTTP door: health, readiness, metrics, the status and the page."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from petps.errors import Unavailable
from petps.server import Serving
from petps.server.http import MAX_CONNECTIONS, HttpServer
from tests.python.server.conftest import Start


def ask(serving: Serving, path: str) -> tuple[int, str, str]:
    """Return (code, content type, body)."""
    url = f"http://127.0.0.1:{serving.http_port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status, reply.headers["Content-Type"], reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def test_health_and_status(start: Start) -> None:
    serving = start()
    assert ask(serving, "/healthz")[::2] == (200, "ok\n")
    assert ask(serving, "/readyz")[::2] == (200, "ok\n")
    code, kind, body = ask(serving, "/status.json")
    assert (code, kind) == (200, "application/json; charset=utf-8")
    status = json.loads(body)
    assert {table["name"]: table["rows"] for table in status["tables"]} == {"items": 100, "fed": 0}
    assert {table["dtype"] for table in status["tables"]} == {"f32"}
    code, _, body = ask(serving, "/nonsense")
    assert code == 404
    assert "/metrics" in body
    assert ask(serving, "/healthz?x=1")[0] == 200


def test_metrics_are_what_prometheus_reads(start: Start) -> None:
    serving = start()
    code, kind, body = ask(serving, "/metrics")
    assert (code, kind.split(";")[0]) == (200, "text/plain")
    families = {family.name: family for family in text_string_to_metric_families(body)}
    for name, family in families.items():
        assert re.fullmatch(r"petps_(server|transport|pool|table|ingest)_[a-z_]+", name), name
        assert family.documentation.endswith("."), name
    assert families["petps_server_pulls"].type == "counter"
    rows = {sample.labels["table"]: sample.value for sample in families["petps_table_rows"].samples}
    assert rows == {"items": 100, "fed": 0}
    assert families["petps_pool_failed"].samples[0].value == 0


def test_latency_buckets_grow_to_the_count(start: Start) -> None:
    from petps.server.metrics import _buckets

    histogram = {
        "count": 7,
        "sum_ns": 0,
        "buckets": [(20_000, 2), (2**15, 3), (40_000, 5), (2**40, 7)],
    }
    counts = _buckets(histogram)
    values = [count for _, count in counts]
    assert values == sorted(values)
    assert values[-1] == 7
    by_bound = dict(counts)
    assert by_bound[repr(2**15 / 1e9)] == 3
    assert by_bound[repr(2**14 / 1e9)] == 0
    assert by_bound[repr(2**34 / 1e9)] == 5


def test_page_asks_for_nothing_outside(start: Start) -> None:
    code, kind, body = ask(start(), "/")
    assert (code, kind) == (200, "text/html; charset=utf-8")
    assert "<title>petps</title>" in body
    assert re.findall(r"https?://", body) == []
    assert set(re.findall(r'href="([^"]+)"', body)) == {
        "/status.json", "/metrics", "/healthz", "/readyz",
    }  # fmt: skip


def test_draining_is_not_ready(start: Start) -> None:
    serving = start()
    serving._draining = True
    code, _, body = ask(serving, "/readyz")
    assert (code, body) == (503, "draining\n")
    assert ask(serving, "/healthz")[0] == 200


def door(**changed: object) -> HttpServer:
    settings: dict[str, object] = {
        "status": dict, "metrics": bytes, "fault": lambda: None, "ready": lambda: None,
        "shard_map": dict, **changed,
    }  # fmt: skip
    return HttpServer("127.0.0.1", 0, **settings)  # type: ignore[arg-type]


def test_a_fault_is_neither_healthy_nor_ready() -> None:
    made = door(fault=lambda: "a write-back failed")
    try:
        for path in ("healthz", "readyz"):
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(f"http://127.0.0.1:{made.port}/{path}", timeout=10)
            assert error.value.code == 503
            assert error.value.read() == b"a write-back failed\n"
            error.value.close()
    finally:
        made.close()


def test_port_in_use() -> None:
    made = door()
    try:
        with pytest.raises(Unavailable, match=rf"HTTP address 127.0.0.1:{made.port} .*--http-port"):
            HttpServer(
                "127.0.0.1",
                made.port,
                status=dict,
                metrics=bytes,
                fault=str,
                ready=str,
                shard_map=dict,
            )
    finally:
        made.close()


def test_silent_and_many_peers_do_not_stop_it() -> None:
    made = door()
    peers = []
    try:
        for _ in range(MAX_CONNECTIONS + 20):
            peers.append(socket.create_connection(("127.0.0.1", made.port), timeout=5))
        garbage = peers[0]
        garbage.sendall(b"\x00\xff garbage\r\n\r\n")
        time.sleep(0.2)
        assert threading.active_count() < MAX_CONNECTIONS + 10
        for peer in peers:
            peer.close()
        deadline = time.monotonic() + 20
        while True:  # until the threads have seen the ends of their connections
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{made.port}/healthz", timeout=5
                ) as reply:
                    assert reply.read() == b"ok\n"
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        for peer in peers:
            peer.close()
        made.close()
