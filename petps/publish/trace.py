"""The span of a published version, in a program that uses OpenTelemetry."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from petps_client.tracing import API

from petps import _native
from petps.delta import MAX_MESSAGE_BYTES, Message
from petps.traceparent import HEADER, format_traceparent

__all__ = ["NO_SPAN", "PublishSpan", "publish_span"]


class PublishSpan:
    """The span of a commit, which the log carries to servers. ``span`` None: there is none."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def carried_by(self, message: Message) -> Message:
        """Return the message with the span's context, if the span is sampled and there is room.

        Readers of all releases ignore headers that they do not know.
        """
        if self._span is None:
            return message
        context = self._span.get_span_context()
        if not context.trace_flags & 1:
            return message
        value = format_traceparent(context.trace_id, context.span_id).encode()
        traced = replace(message, headers=[*message.headers, (HEADER, value)])
        return traced if traced.size <= MAX_MESSAGE_BYTES else message

    def note_rows(self, rows: Mapping[str, int], partitions: int) -> None:
        """Note what this publisher has published, by table."""
        if self._span is not None:
            self._span.set_attribute("petps.tables", list(rows))
            self._span.set_attribute("petps.rows", sum(rows.values()))
            self._span.set_attribute("petps.partitions", partitions)


NO_SPAN: Final = PublishSpan()


@contextmanager
def publish_span(model: str, version: int, begun_ns: int) -> Iterator[PublishSpan]:
    """Run the block in a span that began at ``begun_ns``, since 1970; 0: it begins now.

    Does nothing if the program has not imported OpenTelemetry.
    """
    api = sys.modules.get(API)
    if api is None or not hasattr(api, "get_tracer"):  # while another thread imports it
        yield NO_SPAN
        return
    with api.get_tracer("petps.publish", _native.software).start_as_current_span(
        "petps.publish",
        kind=api.SpanKind.PRODUCER,
        attributes={"petps.model": model, "petps.version": version},
        start_time=begun_ns or time.time_ns(),
    ) as span:
        yield PublishSpan(span)
