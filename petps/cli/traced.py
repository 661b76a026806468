"""A trace of one command, if OpenTelemetry's standard variables ask for one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

__all__ = ["traced"]

# One of these must be set. OTEL_TRACES_EXPORTER is otlp, console or none.
_VARIABLES: Final = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)


@contextmanager
def traced(name: str) -> Iterator[None]:
    """Run the block in a span of this name, and export its trace at the end.

    Do nothing if no variable asks for it, or if petps[otel] is not installed: the variables may be
    meant for another program of the same environment.
    """
    exporter = _exporter()
    if exporter is None:
        yield
        return
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    service = os.environ.get("OTEL_SERVICE_NAME", "petps")
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    try:
        with trace.get_tracer("petps.cli").start_as_current_span(name):
            yield
    finally:
        provider.shutdown()


def _exporter() -> Any:
    """Return the exporter that the variables name; None: there is none."""
    kind = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_disabled or not any(map(os.environ.get, _VARIABLES)) or kind not in ("otlp", "console"):
        return None
    try:
        if kind == "console":
            from opentelemetry.sdk.trace.export import ConsoleSpanExporter

            return ConsoleSpanExporter(out=sys.stderr)
        protocol = os.environ.get(
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
        )
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

            return over_grpc.OTLPSpanExporter()
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

        return over_http.OTLPSpanExporter()
    except ImportError:
        return None
