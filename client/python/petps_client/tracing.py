"""OpenTelemetry: a span for each sampled pull, and one for each shard's part of it.

Nothing is imported here from OpenTelemetry: a program with an active span has imported
``opentelemetry.trace`` itself. So a program without OpenTelemetry pays for a look-up in
``sys.modules``, and needs no extra package.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final

from petps_client import _native
from petps_client.errors import PetpsError

__all__ = ["API", "is_sampled", "traced_pull"]

API: Final = "opentelemetry.trace"
MAX_TABLES: Final = 8  # that a span names; a pull may have thousands
_modules: Final = sys.modules


def is_sampled() -> bool:
    """Return whether the active span of OpenTelemetry's context is sampled."""
    if API not in _modules:
        return False
    # None while another thread imports it.
    active = getattr(_modules[API], "get_current_span", None)
    return active is not None and bool(active().get_span_context().trace_flags & 1)


def traced_pull(native: _native.Client, pulls: Any, dtype: str, *options: Any) -> Any:
    """Call ``native.pull(pulls, dtype, *options)`` in a span. Call it only if is_sampled()."""
    from petps_client import __version__

    api = _modules[API]
    pull: Any = native.pull
    tracer = api.get_tracer("petps_client", __version__)
    keys = sum(len(request[1]) for request in pulls)
    tables = [request[0] for request in pulls[:MAX_TABLES]]
    attributes = {"petps.tables": tables, "petps.keys": keys}
    with tracer.start_as_current_span(
        "petps.pull",
        kind=api.SpanKind.CLIENT,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        context = span.get_span_context()
        if not context.trace_flags & 1:  # the program's sampler leaves out these spans
            return pull(pulls, dtype, *options)
        begun_ns = time.time_ns()
        try:
            # A server needs the id of its part's span before the rows arrive: the spans begin now.
            parts = [_begin_part(api, tracer, begun_ns) for _ in range(native.shards())]
            trace = _native.PullTrace(
                context.trace_id.to_bytes(16, "big"),
                context.span_id.to_bytes(8, "big"),
                [part.get_span_context().span_id.to_bytes(8, "big") for part in parts],
            )
            try:
                found, version, instance = answer = pull(pulls, dtype, *options, trace)
            finally:
                for number, facts in enumerate(trace.parts()):
                    # More parts than shards: the shard map changed during the call.
                    is_new = number >= len(parts)
                    part = _begin_part(api, tracer, begun_ns) if is_new else parts[number]
                    _end_part(api, part, *facts)
        except BaseException as error:
            _fail(api, span, error.code if isinstance(error, PetpsError) else "UNKNOWN", str(error))
            raise
        span.set_attribute("petps.misses", keys - found)
        span.set_attribute("petps.version", version)
        span.set_attribute("petps.instance", instance)
        span.set_attribute("petps.model", instance.partition("@")[0])
        return answer


def _begin_part(api: Any, tracer: Any, start_ns: int) -> Any:
    return tracer.start_span("petps.pull.shard", kind=api.SpanKind.CLIENT, start_time=start_ns)


def _end_part(
    api: Any, part: Any, server: str, keys: int, found: int, attempts: int, end_ns: int, code: str
) -> None:
    """End the span of a part. One without keys was not asked, and is never ended nor exported."""
    if keys == 0:
        return
    host, _, port = server.partition(" ")[0].rpartition(":")
    if port.isdigit():
        part.set_attribute("server.address", host.strip("[]"))
        part.set_attribute("server.port", int(port))
    part.set_attribute("petps.keys", keys)
    part.set_attribute("petps.misses", keys - found)
    part.set_attribute("petps.retries", max(0, attempts - 1))
    if code != "OK":
        _fail(api, part, code, "")
    part.end(end_ns)


def _fail(api: Any, span: Any, code: str, text: str) -> None:
    span.set_attribute("petps.code", code)
    span.set_status(api.Status(api.StatusCode.ERROR, text or code))
