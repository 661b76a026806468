"""The server's spans: the extra, the endpoint, and spans that cannot be exported."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

import petps
from petps import _native
from petps.config import Config, OtelConfig
from petps.errors import FailedPrecondition, InvalidArgument
from petps.server import Serving, spans, traces
from petps.server.ingest.trace import VersionSpan
from petps.server.traces import Traces, check_packages
from petps.traceparent import Caller
from tests.python.waiting import wait_until

PARENT = Caller(bytes(15) + b"\1", bytes(7) + b"\2")
VERSION = VersionSpan(PARENT, "m@1", 3, 7, 10, 1_000, 2_000, 5_000)


class Exporter(SpanExporter):
    """Takes spans, or refuses them, as the test says."""

    def __init__(self) -> None:
        self.result: SpanExportResult | Exception = SpanExportResult.SUCCESS
        self.exported: list[Any] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.is_shut_down = threading.Event()

    def export(self, batch: Any) -> SpanExportResult:
        while not self.may_go_on.wait(0.01):
            if self.is_shut_down.is_set():
                return SpanExportResult.FAILURE
        if isinstance(self.result, Exception):
            raise self.result
        if self.result is SpanExportResult.SUCCESS:
            self.exported += batch
        return self.result

    def shutdown(self) -> None:
        self.is_shut_down.set()


class World:
    """Traces of a native server, with an exporter of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(traces, "PERIOD_SECONDS", 0.005)
        self.exporter = Exporter()
        monkeypatch.setattr(spans, "open_exporter", lambda *_: self.exporter)
        self.tables = _native.Tables.create("")
        self.tables.create_instance("m", "m@1", 1)
        self.server = _native.Server.start(self.tables, port=0, trace_sample=0.0)
        self.lines: list[str] = []
        config = OtelConfig(endpoint="http://localhost:4318")
        self.traces = Traces(config, self.lines.append)

    def start(self) -> None:
        self.traces.start(self.server, self.tables)

    def close(self) -> None:
        self.server.stop()
        self.traces.close()
        self.tables.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch)
    yield world
    world.close()


def test_a_missing_extra_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def without(missing: str) -> Callable[..., Any]:
        def find(name: str, *arguments: Any) -> Any:
            return None if name == missing else real(name, *arguments)

        return find

    check_packages(OtelConfig())
    for endpoint in ("http://c:4318", "grpc://c:4317"):
        check_packages(OtelConfig(endpoint=endpoint))
    monkeypatch.setattr(importlib.util, "find_spec", without("opentelemetry.sdk"))
    check_packages(OtelConfig())
    with pytest.raises(FailedPrecondition, match=r"pip install 'petps\[otel\]'"):
        check_packages(OtelConfig(endpoint="http://c:4318"))
    http = "opentelemetry.exporter.otlp.proto.http"
    monkeypatch.setattr(importlib.util, "find_spec", without(http))
    with pytest.raises(FailedPrecondition, match=http):
        check_packages(OtelConfig(endpoint="https://c:4318"))
    check_packages(OtelConfig(endpoint="grpcs://c:4317"))


def test_a_server_without_the_extra_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    petps.create(tmp_path / "pool").close()
    config = Config.model_validate(
        {"pool": {"path": str(tmp_path / "pool")}, "otel": {"endpoint": "http://c:4318"}}
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FailedPrecondition, match=r"petps\[otel\]"):
        Serving(config)


@pytest.mark.parametrize(
    "endpoint",
    ["localhost:4318", "ftp://c", "http://", "http://user:secret@c", "grpc://c/path", "http://c?a"],
)
def test_a_wrong_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_HEADERS"):
        OtelConfig(endpoint=endpoint)


def test_endpoints_become_exporters(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("grpc", "http"):
        exporter = f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter.OTLPSpanExporter"
        monkeypatch.setattr(exporter, dict)  # so that the exporter is its options
    for endpoint, options in (
        ("http://c:4318", {"endpoint": "http://c:4318/v1/traces"}),
        ("https://c:4318/", {"endpoint": "https://c:4318/v1/traces"}),
        ("https://c/otlp/v1/traces", {"endpoint": "https://c/otlp/v1/traces"}),
        ("grpc://c:4317", {"endpoint": "c:4317", "insecure": True}),
        ("grpcs://c:4317", {"endpoint": "c:4317", "insecure": False}),
    ):
        exporter_options: Any = spans.open_exporter(OtelConfig(endpoint=endpoint), 5.0)
        assert exporter_options == {**options, "timeout": 5.0}


@pytest.mark.parametrize("scheme", ["http", "https", "grpc", "grpcs"])
def test_an_exporter_can_be_opened_and_shut_down(scheme: str) -> None:
    spans.open_exporter(OtelConfig(endpoint=f"{scheme}://127.0.0.1:9"), 5.0).shutdown()


def test_a_wrong_variable_of_the_exporter_is_an_error_at_the_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("could not convert string to float: 'soon'")

    monkeypatch.setattr(spans, "open_exporter", fail)
    with pytest.raises(FailedPrecondition, match=r"'soon'.*OTEL_EXPORTER_OTLP"):
        world.start()


def test_a_version_is_exported_as_a_child_of_its_commit(world: World) -> None:
    world.traces.add_version(VERSION)  # before the start: it waits
    world.start()
    wait_until(lambda: len(world.exporter.exported) == 1)
    (span,) = world.exporter.exported
    assert span.name == "petps.ingest"
    assert span.parent.span_id == 2
    assert span.context.trace_id == span.parent.trace_id == 1
    assert (span.start_time, span.end_time) == (2_000, 5_000)
    assert dict(span.attributes) == {
        "petps.instance": "m@1",
        "petps.model": "m",
        "petps.partition": 3,
        "petps.version": 7,
        "petps.rows": 10,
        "petps.since_commit_ms": 0.004,
    }
    wait_until(lambda: world.traces.status()["exported"] == 1)
    assert world.traces.status()["error"] == ""


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, RuntimeError("a fault")])
def test_spans_that_cannot_be_exported_are_counted(
    world: World, result: SpanExportResult | Exception
) -> None:
    world.exporter.result = result
    world.start()
    for _ in range(2):
        before = world.traces.status()["dropped"]["export"]
        world.traces.add_version(VERSION)
        wait_until(lambda: world.traces.status()["dropped"]["export"] == before + 1)  # noqa: B023
    wait_until(lambda: world.traces.status()["error"] != "")
    world.exporter.result = SpanExportResult.SUCCESS
    world.traces.add_version(VERSION)
    wait_until(lambda: world.traces.status()["error"] == "")
    assert world.traces.status()["exported"] == 1
    wait_until(lambda: len(world.lines) == 2)  # one when it began to fail, one when it worked again
    assert "not exported to http://localhost:4318" in world.lines[0]


def test_too_many_spans_are_dropped_and_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "VERSIONS", 3)
    for _ in range(5):
        world.traces.add_version(VERSION)
    assert world.traces.status()["dropped"] == {"full": 2, "export": 0}
    world.start()
    wait_until(lambda: len(world.exporter.exported) == 3)


def test_a_silent_collector_does_not_keep_a_stopping_server(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "CLOSE_SECONDS", 0.05)
    world.exporter.may_go_on.clear()
    world.start()
    world.traces.add_version(VERSION)
    world.traces.close()
    assert world.exporter.is_shut_down.is_set()


def test_close_exports_what_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "PERIOD_SECONDS", 3600)
    world.start()
    world.traces.add_version(VERSION)
    world.close()
    assert len(world.exporter.exported) == 1


def test_names_of_a_closed_pool_are_numbers() -> None:
    tables = _native.Tables.create("")
    tables.create_instance("m", "m@1", 1)
    tables.close()
    maker = spans.Spans(OtelConfig(endpoint="http://c"), "here:1", tables)
    assert maker._table(7) == "7"
    assert maker._instance(1) == "1"


def test_the_sample_is_checked() -> None:
    tables = _native.Tables.create("")
    with pytest.raises(InvalidArgument, match="trace_sample"):
        _native.Server.start(tables, port=0, trace_sample=2.0)
    tables.close()
