"""The header ``traceparent`` of W3C Trace Context: which span a request or a message belongs to.

Owns:        writing and reading the header.
Never does:  import OpenTelemetry; raise an error for a header that somebody else wrote.
Called by:   publish (writes it into commits), server and server/ingest (read it).
Invariants:  a caller that is read is sampled, and has ids that are not zeros.
Threads:     pure functions.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

__all__ = ["HEADER", "Caller", "format_traceparent", "parse_traceparent"]

HEADER: Final = "traceparent"
MAX_BYTES: Final = 512  # a later version may append to the 55 bytes of this one
_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Caller(NamedTuple):
    """The span of a caller, whose trace is sampled. Both ids are in network order, not zeros."""

    trace_id: bytes
    """16 bytes."""
    span_id: bytes
    """8 bytes."""


def format_traceparent(trace_id: int, span_id: int) -> str:
    """Return the header of a sampled span."""
    return f"00-{trace_id:032x}-{span_id:016x}-01"


def parse_traceparent(value: str | bytes | None) -> Caller | None:
    """Return the span that the header names; None if there is none, or if it is not sampled.

    Anybody may have written the header, so one that is not valid counts as none.
    """
    if not value or len(value) > MAX_BYTES:
        return None
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest):
        return None
    caller = Caller(bytes.fromhex(trace_id), bytes.fromhex(span_id))
    is_sampled = int(flags, 16) & 1 and any(caller.trace_id) and any(caller.span_id)
    return caller if is_sampled else None
