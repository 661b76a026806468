"""The HTTP door: health, readiness, metrics, the status and the page."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Literal

import pytest
from prometheus_client.parser import text_string_to_metric_families

from petps import _native
from petps.errors import Unavailable
from petps.server import Serving
from petps.server.http import MAX_CONNECTIONS, HttpServer
from tests.python.server.conftest import Start


def request(serving: Serving, path: str) -> tuple[int, str, str]:
    """Return (code, content type, body) of a reply."""
    url = f"http://127.0.0.1:{serving.http_port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status, reply.headers["Content-Type"], reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def test_health_readiness_and_status(start: Start) -> None:
    serving = start()
    assert request(serving, "/livez")[::2] == (200, "ok\n")
    assert request(serving, "/healthz")[::2] == (200, "ok\n")
    assert request(serving, "/readyz")[::2] == (200, "ok\n")
    code, kind, body = request(serving, "/status.json")
    assert (code, kind) == (200, "application/json; charset=utf-8")
    status = json.loads(body)
    assert {table["name"]: table["rows"] for table in status["tables"]} == {"items": 100, "fed": 0}
    assert {table["dtype"] for table in status["tables"]} == {"f32"}
    code, _, body = request(serving, "/nonsense")
    assert code == 404
    assert "/metrics" in body
    assert request(serving, "/healthz?x=1")[0] == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:7072", 200),
        ("127.0.0.1", 200),
        ("[::1]:7072", 200),
        ("[::1]", 200),
        ("localhost:7072", 200),
        ("LocalHost", 200),
        (None, 200),
        ("evil.example:7072", 403),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:80", 403),
        ("", 403),
    ],
)
def test_an_open_server_answers_no_browser_that_a_name_sends(
    serving: Serving, host: str | None, expected: int
) -> None:
    line = "" if host is None else f"Host: {host}\r\n"
    for path in ("/status.json", "/readyz"):
        with socket.create_connection(("127.0.0.1", serving.http_port or 0), timeout=10) as peer:
            peer.sendall(f"GET {path} HTTP/1.0\r\n{line}\r\n".encode())
            answer = b"".join(iter(lambda: peer.recv(65536), b""))
        assert answer.startswith(f"HTTP/1.0 {expected} ".encode())
        assert expected == 200 or b"use http://127.0.0.1 or http://localhost" in answer


def test_names_are_no_matter_beyond_loopback_or_with_credentials() -> None:
    cases: tuple[tuple[str, Literal["open", "certificates"]], ...]
    cases = (("0.0.0.0", "open"), ("127.0.0.1", "certificates"))
    for host, mode in cases:
        server = HttpServer(
            host,
            0,
            status=dict,
            metrics=lambda accepted: (b"", "text/plain"),
            fault=lambda: None,
            ready=lambda: None,
            shard_map=dict,
            gate=_native.Gate(mode),
        )
        with (
            contextlib.closing(server),
            socket.create_connection(("127.0.0.1", server.port), timeout=10) as peer,
        ):
            peer.sendall(b"GET /healthz HTTP/1.0\r\nHost: petps.example:7072\r\n\r\n")
            assert peer.recv(100).startswith(b"HTTP/1.0 200 ")


def test_prometheus_can_read_the_metrics(start: Start) -> None:
    serving = start()
    code, kind, body = request(serving, "/metrics")
    assert (code, kind.split(";")[0]) == (200, "text/plain")
    families = {family.name: family for family in text_string_to_metric_families(body)}
    for name, family in families.items():
        if name.startswith(("process_", "python_")):
            continue
        assert re.fullmatch(
            r"petps_(server|transport|pool|table|scrub|ingest|shard|cluster|backup|access|tls|"
            r"build|grpc)"
            r"(_[a-z]+)*",
            name,
        ), name
        assert family.documentation.endswith("."), name
    assert families["petps_server_pulls"].type == "counter"
    rows = {sample.labels["table"]: sample.value for sample in families["petps_table_rows"].samples}
    assert rows == {"items": 100, "fed": 0}
    assert families["petps_pool_failed"].samples[0].value == 0


def test_latency_buckets_grow_to_the_count() -> None:
    from petps.server.metrics import latency_buckets

    histogram = {
        "count": 7,
        "sum_ns": 0,
        "buckets": [(20_000, 2), (2**15, 3), (40_000, 5), (2**40, 7)],
    }
    counts = latency_buckets(histogram)
    values = [count for _, count in counts]
    assert values == sorted(values)
    assert values[-1] == 7
    by_bound = dict(counts)
    assert by_bound[repr(2**15 / 1e9)] == 3
    assert by_bound[repr(2**14 / 1e9)] == 0
    assert by_bound[repr(2**34 / 1e9)] == 5


def test_a_draining_server_is_not_ready(start: Start) -> None:
    serving = start()
    serving._draining = True
    code, _, body = request(serving, "/readyz")
    assert (code, body) == (503, "draining\n")
    assert request(serving, "/healthz")[0] == 200


def open_door(
    port: int = 0, fault: str | None = None, stuck: str | None = None
) -> contextlib.closing[HttpServer]:
    return contextlib.closing(
        HttpServer(
            "127.0.0.1",
            port,
            gate=_native.Gate("open"),
            status=dict,
            metrics=lambda accepted: (b"", "text/plain"),
            fault=lambda: fault,
            stuck=lambda: stuck,
            ready=lambda: None,
            shard_map=dict,
        )
    )


def test_a_fault_is_neither_healthy_nor_ready() -> None:
    with open_door(fault="a write-back failed") as door:
        for path in ("healthz", "readyz"):
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(f"http://127.0.0.1:{door.port}/{path}", timeout=10)
            assert error.value.code == 503
            assert error.value.read() == b"a write-back failed\n"
            error.value.close()


def test_only_a_stuck_server_is_not_alive() -> None:
    for stuck, expected in ((None, 200), ("worker 0 has made no progress for 60 s", 503)):
        with open_door(fault="a write-back failed", stuck=stuck) as door:
            connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=10)
            with contextlib.closing(connection):
                connection.request("GET", "/livez")
                assert connection.getresponse().status == expected


def test_an_http_port_in_use_is_refused() -> None:
    with open_door() as door:
        message = rf"HTTP address 127.0.0.1:{door.port} .*--http-port"
        with pytest.raises(Unavailable, match=message):
            open_door(door.port)


def test_many_silent_clients_do_not_stop_the_door() -> None:
    before = threading.active_count()  # with those that other tests have parked
    with open_door() as door:
        with contextlib.ExitStack() as stack:
            peers = [
                stack.enter_context(socket.create_connection(("127.0.0.1", door.port), timeout=5))
                for _ in range(MAX_CONNECTIONS + 20)
            ]
            peers[0].sendall(b"\x00\xff garbage\r\n\r\n")
            time.sleep(0.2)
            assert threading.active_count() < before + MAX_CONNECTIONS + 10
        deadline = time.monotonic() + 20
        while True:  # until the threads have noticed that their connections are closed
            try:
                url = f"http://127.0.0.1:{door.port}/healthz"
                with urllib.request.urlopen(url, timeout=5) as reply:
                    assert reply.read() == b"ok\n"
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
