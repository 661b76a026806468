"""Spans as OpenTelemetry's SDK exports them. Imported only by a server with an endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from petps import _native
from petps.config import OtelConfig
from petps.errors import PetpsError
from petps.server.ingest.trace import VersionSpan

__all__ = ["Spans", "open_exporter"]

TRACES_PATH: Final = "/v1/traces"
_NO_PARENT: Final = bytes(8)
_SCOPE: Final = InstrumentationScope("petps.server", _native.software)


def open_exporter(config: OtelConfig, timeout: float) -> SpanExporter:
    """Return the exporter for the endpoint. A request takes at most ``timeout`` seconds.

    Headers and certificates come from the standard variables OTEL_EXPORTER_OTLP_*. Raises what the
    exporter raises.
    """
    assert config.endpoint is not None
    url = urlsplit(config.endpoint)
    if url.scheme in ("http", "https"):
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

        path = TRACES_PATH if url.path in ("", "/") else url.path
        endpoint = url._replace(path=path).geturl()
        return over_http.OTLPSpanExporter(endpoint=endpoint, timeout=timeout)
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

    return over_grpc.OTLPSpanExporter(
        endpoint=url.netloc, insecure=url.scheme == "grpc", timeout=timeout
    )


class Spans:
    """Maker of the SDK's spans. ``address`` is the server's, which its spans carry."""

    def __init__(self, config: OtelConfig, address: str, tables: _native.Tables) -> None:
        self._tables = tables
        self._names: dict[int, str] = {}  # of tables, by id, which is never reused
        self._instances: dict[int, str] = {}
        # OTEL_RESOURCE_ATTRIBUTES may add others.
        self._resource = Resource.create(
            {
                "service.name": config.service_name,
                "service.instance.id": address,
                "service.version": _native.software,
            }
        )

    def of_pull(self, span: _native.Span) -> ReadableSpan:
        """Return the span of a request that a worker answered."""
        attributes: dict[str, Any] = {
            "petps.door": span.source,
            "petps.tables": [self._table(table) for table in span.tables],
            "petps.keys": span.keys,
            "petps.queued_us": span.queued_ns / 1e3,
            "petps.waited_us": span.waited_ns / 1e3,
            "petps.send_us": span.send_ns / 1e3,
        }
        if span.sections > len(span.tables):
            attributes["petps.sections"] = span.sections
        if span.code == "OK":
            instance = self._instance(span.instance)
            attributes |= {
                "petps.lookup_us": span.lookup_ns / 1e3,
                "petps.misses": span.keys - span.rows_found,
                "petps.version": span.version,
                "petps.instance": instance,
                "petps.model": instance.partition("@")[0],
            }
        else:
            attributes["petps.code"] = span.code
        return self._span(
            "petps.serve.pull",
            SpanKind.SERVER,
            span.trace_id,
            span.span_id,
            span.parent_id,
            (span.start_ns, span.start_ns + span.duration_ns),
            attributes,
            error="" if span.code == "OK" else span.code,
        )

    def of_version(self, version: VersionSpan) -> ReadableSpan:
        """Return the span of a version that is served now."""
        attributes: dict[str, Any] = {
            "petps.instance": version.instance,
            "petps.model": version.instance.partition("@")[0],
            "petps.partition": version.partition,
            "petps.version": version.version,
            "petps.since_commit_ms": (version.end_ns - version.published_ns) / 1e6,
        }
        if version.rows is not None:
            attributes["petps.rows"] = version.rows
        return self._span(
            "petps.ingest",
            SpanKind.CONSUMER,
            version.parent.trace_id,
            None,
            version.parent.span_id,
            (version.start_ns, version.end_ns),
            attributes,
        )

    def _span(
        self,
        name: str,
        kind: SpanKind,
        trace_id: bytes,
        span_id: bytes | None,
        parent_id: bytes,
        times: tuple[int, int],
        attributes: Mapping[str, Any],
        *,
        error: str = "",
    ) -> ReadableSpan:
        own_id = _random_id() if span_id is None else span_id
        parent = None if parent_id == _NO_PARENT else _context(trace_id, parent_id, True)
        return ReadableSpan(
            name,
            context=_context(trace_id, own_id, False),
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            kind=kind,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=times[0],
            end_time=times[1],
            instrumentation_scope=_SCOPE,
        )

    def _table(self, id: int) -> str:
        name = self._names.get(id)
        if name is None:
            try:
                name = self._tables.find_id(id).name
            except PetpsError:  # unknown, dropped, or the pool is closed
                return str(id)
            self._names[id] = name
        return name

    def _instance(self, id: int) -> str:
        if id not in self._instances:
            try:
                self._instances |= {record.id: record.name for record in self._tables.instances()}
            except PetpsError:  # the pool is closed
                return str(id)
        return self._instances.get(id, str(id))


def _context(trace_id: bytes, span_id: bytes, is_remote: bool) -> SpanContext:
    return SpanContext(
        int.from_bytes(trace_id, "big"),
        int.from_bytes(span_id, "big"),
        is_remote=is_remote,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _random_id() -> bytes:
    return RandomIdGenerator().generate_span_id().to_bytes(8, "big")
