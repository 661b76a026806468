"""Traces of versions: from reading their first record to serving them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from petps.delta import Message
from petps.traceparent import HEADER, Caller, parse_traceparent

__all__ = ["TraceSink", "VersionSpan", "VersionTrace", "publisher_of"]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """One partition's part of a version, which is served now. Times: nanoseconds since 1970."""

    parent: Caller
    """The span of the publisher's commit."""
    instance: str
    partition: int
    version: int
    rows: int | None
    """Rows and deletions; None: ingest began to read within the version."""
    published_ns: int
    """By the publisher's clock."""
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class VersionTrace:
    """A version of a partition that is read, but not served yet."""

    parent: Caller
    partition: int
    version: int
    rows: int | None
    published_ns: int
    begun_ns: int
    """When its first record was read, by time.monotonic_ns()."""

    def end(self, instance: str) -> VersionSpan:
        """Return the span, which ends now."""
        now = time.time_ns()
        # The wall clock may have jumped since the beginning, so it is read only once.
        start_ns = now - (time.monotonic_ns() - self.begun_ns)
        return VersionSpan(
            self.parent,
            instance,
            self.partition,
            self.version,
            self.rows,
            self.published_ns,
            start_ns,
            now,
        )


TraceSink = Callable[[VersionSpan], None]
"""Takes a span. It never waits, and never raises."""


def publisher_of(message: Message) -> Caller | None:
    """Return the publisher's span of a commit, if it was sampled."""
    for name, value in message.headers:
        if name == HEADER:
            return parse_traceparent(value)
    return None
