"""Traces of real servers at an OpenTelemetry collector: of pulls, and of published versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan

import petps
import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from petps.delta import DeltaLog, TableSchema, open_log
from petps.publish import Publisher
from tests.kafka.broker import Broker
from tests.otel.collector import Collector, Received
from tests.otel.sdk import program
from tests.ports import stable_port
from tests.system.servers import PARTITIONS, WAIT_MS, Fleet, Server, connect, wait_until
from tests.system.servers import petps as run_petps

pytestmark = pytest.mark.system

DIM = 4
KEYS = 500
ALL = np.arange(KEYS, dtype=np.uint64)
# Both clocks are this machine's; a span's times come from two readings of each.
SLACK_NS = 20_000_000
LATE_NS = 10_000_000_000  # a server reads the end of its span after it has sent the reply


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def make_pool(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    with petps.create(path, durability="process") as pool:
        pool.create_table("items", dim=DIM, capacity=4 * KEYS)
        pool.create_table("fed", dim=DIM, capacity=4 * KEYS, feed="delta")
        pool.push("items", ALL, np.ones((KEYS, DIM), np.float32))
    return path


def environment(collector: Collector, **others: str) -> dict[str, str]:
    return {"PETPS_OTEL_ENDPOINT": collector.endpoint, **others}


def id_of(span: ReadableSpan) -> bytes:
    context = span.get_span_context()
    assert context is not None
    return context.span_id.to_bytes(8, "big")


def trace_of(span: ReadableSpan) -> bytes:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id.to_bytes(16, "big")


def check_within(inner: Received, start_ns: int | None, end_ns: int | None) -> None:
    assert start_ns is not None
    assert end_ns is not None
    assert start_ns - SLACK_NS <= inner.start_ns <= inner.end_ns <= end_ns + LATE_NS


class TracedFleet(Fleet):
    """Two servers that export spans."""

    def __init__(
        self, serve: Callable[..., Server], folder: Path, collector: Collector, otel: str = ""
    ) -> None:
        pools = [make_pool(folder / f"server{i}" / "pool") for i in range(2)]
        section = f'[otel]\nendpoint = "{collector.endpoint}"\nservice_name = "rows"\n{otel}'
        super().__init__(serve, folder, pools, section)


def test_a_pull_is_one_trace_through_client_shards_and_servers(
    serve: Callable[..., Server], tmp_path: Path, collector: Collector
) -> None:
    fleet = TracedFleet(serve, tmp_path, collector)
    fleet.own(["0-3"], ["4-7"])
    with program() as traced, connect(fleet.url(0)) as client:
        client.pull("items", ALL)  # outside of a span: no trace
        with traced.span("request"):
            client.pull("items", [*range(KEYS), 1_000_000])
            client.pull_many({"items": ALL})
        (request,) = traced.spans("request")
        pulls = traced.spans("petps.pull")
        shards = traced.spans("petps.pull.shard")
    assert len(pulls) == 2
    assert len(shards) == 4
    first = pulls[0]
    assert dict(first.attributes or {}) == {
        "petps.tables": ("items",),
        "petps.keys": KEYS + 1,
        "petps.misses": 1,
        "petps.version": 0,
        "petps.model": "default",
        "petps.instance": first.attributes["petps.instance"] if first.attributes else "",
    }
    for pull in pulls:
        assert pull.parent is not None
        assert pull.parent.span_id.to_bytes(8, "big") == id_of(request)
    served = collector.wait_for("petps.serve.pull", 4)
    by_id = {id_of(shard): shard for shard in shards}
    assert {span.parent_id for span in served} == set(by_id)  # one for each shard's part
    for span in served:
        shard = by_id[span.parent_id]
        assert span.trace_id == trace_of(request)
        assert span.service == "rows"
        assert not span.is_error
        assert span.attributes["petps.tables"] == ["items"]
        assert span.attributes["petps.door"] == "tcp"
        assert span.attributes["petps.model"] == "default"
        facts = dict(shard.attributes or {})
        assert f"{facts['server.address']}:{facts['server.port']}" in fleet.addresses
        assert facts["petps.keys"] == span.attributes["petps.keys"]
        assert facts["petps.misses"] == span.attributes["petps.misses"]
        assert facts["petps.retries"] == 0
        check_within(span, shard.start_time, shard.end_time)
    keys = sum(span.attributes["petps.keys"] for span in served)
    assert keys == 2 * KEYS + 1
    for server in fleet.servers:
        server.stop()
    # The pull outside of a span has none, also among the last ones that were exported at the stop.
    assert len(collector.spans()) == 4


def test_a_pull_that_is_not_sampled_has_no_span(
    serve: Callable[..., Server], tmp_path: Path, collector: Collector
) -> None:
    server = serve(make_pool(tmp_path / "pool"), environment=environment(collector))
    with program(is_sampling=False) as traced, connect(server.url) as client:
        with traced.span():
            client.pull("items", ALL)
        assert traced.spans() == []
    server.stop()
    assert collector.spans() == []


def test_a_grpc_call_with_traceparent_has_a_span(
    serve: Callable[..., Server], tmp_path: Path, collector: Collector
) -> None:
    server = serve(make_pool(tmp_path / "pool"), environment=environment(collector))
    port = server.wait_ready()["grpc_port"]
    request = messages.PullRequest(table="items", keys=ALL.tobytes())
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    refused = [
        f"00-{trace_id}-{span_id}-00",  # not sampled
        f"00-{'0' * 32}-{span_id}-01",
        f"00-{trace_id}-{'0' * 16}-01",
        f"00-{trace_id}-{span_id}-01-more",
        f"ff-{trace_id}-{span_id}-01",
        "00-\u00b9-01",
        "x" * 3000,
        "",
    ]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = stubs.PetpsStub(channel)
        for value in refused:
            metadata = (("traceparent", value.encode("ascii", "replace").decode()),)
            assert stub.Pull(request, metadata=metadata, wait_for_ready=True).rows.rows_found
        metadata = (("traceparent", f"00-{trace_id}-{span_id}-01"),)
        assert stub.Pull(request, metadata=metadata).rows.rows_found == KEYS
        with pytest.raises(grpc.RpcError):
            stub.Pull(
                messages.PullRequest(table="items", keys=b"", min_version=9), metadata=metadata
            )
    good, bad = collector.wait_for("petps.serve.pull", 2)
    for span in (good, bad):
        assert span.trace_id == bytes.fromhex(trace_id)
        assert span.parent_id == bytes.fromhex(span_id)
        assert span.attributes["petps.door"] == "grpc"
    assert good.attributes["petps.keys"] == KEYS
    assert bad.is_error
    assert bad.attributes["petps.code"] == "STALE"


def test_a_server_that_samples_begins_traces_of_its_own(
    serve: Callable[..., Server], tmp_path: Path, collector: Collector
) -> None:
    server = serve(
        make_pool(tmp_path / "pool"), environment=environment(collector, PETPS_OTEL_SAMPLE="1")
    )
    with connect(server.url) as client:
        for _ in range(3):
            client.pull("items", ALL)
    spans = collector.wait_for("petps.serve.pull", 3)
    assert {span.parent_id for span in spans} == {b""}
    assert len({span.trace_id for span in spans}) == 3


def publish_version(log: DeltaLog) -> int:
    publisher = Publisher(log, "default", tables=[TableSchema("fed", "f32", DIM)])
    publisher.begin_continue(None)
    publisher.publish("fed", ALL, np.ones((KEYS, DIM), np.float32))
    return publisher.commit()


def check_delta(
    serve: Callable[..., Server], folder: Path, collector: Collector, log: DeltaLog, place: str
) -> None:
    server = serve(
        make_pool(folder / "pool"),
        environment=environment(collector, PETPS_INGEST_LOG=place),
    )
    server.wait_ready()
    with program() as traced:
        with traced.span("train"):
            version = publish_version(log)
        (train,) = traced.spans("train")
        (published,) = traced.spans("petps.publish")
    assert published.parent is not None
    assert published.parent.span_id.to_bytes(8, "big") == id_of(train)
    facts = dict(published.attributes or {})
    assert (facts["petps.version"], facts["petps.rows"]) == (version, KEYS)
    ingested = collector.wait_for("petps.ingest", PARTITIONS)
    assert {span.attributes["petps.partition"] for span in ingested} == set(range(PARTITIONS))
    assert sum(span.attributes["petps.rows"] for span in ingested) == KEYS
    for span in ingested:
        assert span.trace_id == trace_of(train)
        assert span.parent_id == id_of(published)
        assert span.attributes["petps.version"] == version
        assert span.attributes["petps.model"] == "default"
        assert span.attributes["petps.since_commit_ms"] >= 0
        assert published.start_time is not None
        assert published.start_time - SLACK_NS <= span.start_ns <= span.end_ns
    # A version without a trace has no span.
    publisher = Publisher(log, "default", tables=[TableSchema("fed", "f32", DIM)])
    publisher.begin_continue(publisher_position(log))
    publisher.publish("fed", ALL, np.zeros((KEYS, DIM), np.float32))
    newest = publisher.commit()
    with connect(server.url) as client:
        client.pull("fed", ALL, min_version=newest, wait_ms=WAIT_MS)
    server.end()  # the client of Kafka may have warned
    assert len(collector.spans("petps.ingest")) == PARTITIONS


def publisher_position(log: DeltaLog) -> Any:
    from petps.publish import end_of

    return end_of(log, "default")


def test_a_version_is_one_trace_from_publish_to_servable(
    serve: Callable[..., Server], tmp_path: Path, collector: Collector
) -> None:
    place = str(tmp_path / "log")
    log = open_log(place, partitions=PARTITIONS)
    check_delta(serve, tmp_path, collector, log, place)
    log.close()


def test_a_version_in_kafka_is_one_trace(
    serve: Callable[..., Server], tmp_path: Path, collector: Collector, kafka: Broker
) -> None:
    place = f"kafka://{kafka.address}/traced-{tmp_path.name}"
    log = open_log(place, partitions=PARTITIONS)
    check_delta(serve, tmp_path, collector, log, place)
    log.close()


def test_commands_are_traced_by_the_standard_variables(
    serve: Callable[..., Server],
    tmp_path: Path,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "log"
    open_log(str(place), partitions=PARTITIONS).close()
    server = serve(
        make_pool(tmp_path / "pool"),
        environment=environment(collector, PETPS_INGEST_LOG=str(place)),
    )
    url = server.url
    np.savez(tmp_path / "rows.npz", keys=ALL, rows=np.ones((KEYS, DIM), np.float32))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    run_petps("publish", place, "fed", tmp_path / "rows.npz")
    (published,) = collector.wait_for("petps publish", 1)
    assert {s.trace_id for s in collector.wait_for("petps.ingest", PARTITIONS)} == {
        published.trace_id
    }
    run_petps("pull", url, "items", "1", "2")
    (pulled,) = collector.wait_for("petps pull", 1)
    (served,) = collector.wait_for("petps.serve.pull", 1)
    assert served.trace_id == pulled.trace_id
    assert pulled.service == "petps"


def test_a_collector_that_is_away_disturbs_nobody(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    endpoint = f"http://127.0.0.1:{stable_port()}"
    variables = {"PETPS_OTEL_ENDPOINT": endpoint, "PETPS_OTEL_SAMPLE": "1"}
    server = serve(make_pool(tmp_path / "pool"), environment=variables)

    def dropped() -> float:
        lines = server.read("metrics").decode().splitlines()
        wanted = 'petps_otel_dropped_spans_total{reason="export"} '
        return next((float(li.removeprefix(wanted)) for li in lines if li.startswith(wanted)), 0)

    with connect(server.url) as client:
        client.pull("items", ALL)
        wait_until("spans are dropped", dropped)
        client.pull("items", ALL)
    assert server.status()["otel"]["error"]
    assert server.status()["otel"]["exported"] == 0
    assert b"petps_otel_export_failed 1.0" in server.read("metrics")
    server.end()
    assert "spans are not exported to http://127.0.0.1:" in server.output
