"""The SDK of a program that uses petps, with its spans in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased


class Program:
    """The provider of a program."""

    def __init__(self, *, is_sampling: bool) -> None:
        sampler = ParentBased(ALWAYS_ON if is_sampling else ALWAYS_OFF)
        self.provider = TracerProvider(sampler=sampler)
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def spans(self, name: str = "") -> list[ReadableSpan]:
        """Return the spans with this name, or all, that have ended."""
        return [span for span in self._exporter.get_finished_spans() if name in ("", span.name)]

    @contextmanager
    def span(self, name: str = "request") -> Iterator[Any]:
        """Run the block in a span of the program."""
        with self.provider.get_tracer("program").start_as_current_span(name) as span:
            yield span


@contextmanager
def program(*, is_sampling: bool = True) -> Iterator[Program]:
    """Yield the provider of a program, which is the global one during the block."""
    traced = Program(is_sampling=is_sampling)
    # The API allows one provider a process. Other tests must find none.
    before = trace._TRACER_PROVIDER
    trace._TRACER_PROVIDER = traced.provider
    try:
        yield traced
    finally:
        trace._TRACER_PROVIDER = before
        traced.provider.shutdown()
