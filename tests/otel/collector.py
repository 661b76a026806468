"""An OpenTelemetry collector in this process: OTLP over HTTP, which keeps the spans it receives.

An exporter sends spans again if the answer came late; each is kept once.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages

from tests.system.servers import wait_until


@dataclass(frozen=True)
class Received:
    """A span as it arrived. Ids are in network order."""

    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    """Empty: it is a root."""
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    service: str
    is_error: bool


class Collector:
    """A collector on a free port, until close()."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[bytes, Received] = {}  # by id
        self.requests = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                is_known = self.path == "/v1/traces"
                if is_known:
                    collector._add(messages.ExportTraceServiceRequest.FromString(body))
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def spans(self, name: str = "") -> list[Received]:
        """Return the spans with this name, or all, in the order of their arrival."""
        with self._lock:
            return [span for span in self._spans.values() if name in ("", span.name)]

    def wait_for(self, name: str, count: int) -> list[Received]:
        """Return the spans with this name, once there are ``count``."""
        wait_until(f"{count} spans {name}", lambda: len(self.spans(name)) >= count)
        spans = self.spans(name)
        assert len(spans) == count, spans
        return spans

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _add(self, request: Any) -> None:
        with self._lock:
            self.requests += 1
            for group in request.resource_spans:
                service = attributes_of(group.resource.attributes)["service.name"]
                for scope in group.scope_spans:
                    for span in scope.spans:
                        self._spans.setdefault(span.span_id, _received(span, service))


def _received(span: Any, service: str) -> Received:
    return Received(
        span.name,
        span.trace_id,
        span.span_id,
        span.parent_span_id,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        attributes_of(span.attributes),
        service,
        span.status.code == 2,
    )


def attributes_of(pairs: Any) -> dict[str, Any]:
    readers: dict[str, Callable[[Any], Any]] = {
        "array_value": lambda value: [_value(item) for item in value.values],
    }

    def _value(value: Any) -> Any:
        kind = value.WhichOneof("value")
        read = readers.get(kind)
        return getattr(value, kind) if read is None else read(getattr(value, kind))

    return {pair.key: _value(pair.value) for pair in pairs}
