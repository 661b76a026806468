"""Messages and their headers: sealing, checking, reading. FORMAT.md defines the bytes.

Headers are a list of (name, value), so Kafka carries them unchanged. petps ignores the headers of
other programs (tracing, mirroring): it neither reads them nor includes them in the checksum.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from petps.delta.errors import DeltaError, Fault

__all__ = ["FIELDS", "FORMAT", "MAX_MESSAGE_BYTES", "Fields", "Message", "seal", "unseal"]

# Kafka's default message.max.bytes, for a whole batch, is 1,048,588; the rest is for its framing.
MAX_MESSAGE_BYTES: Final = 1_000_000
# Kafka's overhead: at most 10 bytes of lengths per header, at most 100 per message.
HEADER_OVERHEAD_BYTES: Final = 10
MESSAGE_OVERHEAD_BYTES: Final = 100
MAX_FIELD_BYTES: Final = 255  # names are at most 63 bytes, numbers 20

FORMAT_NAME: Final = "petps-delta"
FORMAT: Final = 1
# The headers of format 1, in the order in which the checksum covers them. Never reorder.
FIELDS: Final = (
    "format",
    "model",
    "table",
    "kind",
    "run",
    "publisher",
    "step",
    "seq",
    "version",
    "time",
    "partition",
    "partitions",
    "dtype",
    "dim",
)
_KNOWN: Final = frozenset((*FIELDS, "checksum"))
_U64_LIMIT: Final = 1 << 64


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a log. ``body`` may be a view of a larger buffer."""

    headers: list[tuple[str, bytes]]
    body: bytes | memoryview

    @property
    def size(self) -> int:
        """Return an upper bound of the bytes that Kafka counts, headers included."""
        header_bytes = sum(
            len(name) + len(value) + HEADER_OVERHEAD_BYTES for name, value in self.headers
        )
        return len(self.body) + header_bytes + MESSAGE_OVERHEAD_BYTES


class Fields:
    """The petps headers of one message. text() and number() check the value that they return."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self._values = values

    def text(self, name: str) -> str:
        """Return a header as text. Raises DeltaError if it is not UTF-8."""
        try:
            return self._values[name].decode()
        except UnicodeDecodeError:
            raise DeltaError(Fault.HEADER_INVALID, f"header {name} is not UTF-8") from None

    def number(self, name: str) -> int:
        """Return a header as a u64. Raises DeltaError if it is not a decimal number below 2**64."""
        value = self._values[name]
        if not 1 <= len(value) <= 20 or not value.isdigit() or int(value) >= _U64_LIMIT:
            raise DeltaError(Fault.HEADER_INVALID, f"header {name} is no u64: {value[:32]!r}")
        return int(value)


def _checksum(values: dict[str, bytes], body: bytes | memoryview) -> bytes:
    hasher = xxhash.xxh3_64()
    for name in FIELDS:
        value = values[name]
        hasher.update(struct.pack("<II", len(name), len(value)) + name.encode() + value)
    hasher.update(body)
    return hasher.hexdigest().encode()


def seal(fields: list[tuple[str, bytes]], body: bytes | memoryview) -> Message:
    """Add format and checksum. Raises DeltaError if no log accepts a message of this size."""
    headers = [("format", f"{FORMAT_NAME}-{FORMAT}".encode()), *fields]
    values = dict(headers)
    headers.append(("checksum", _checksum(values, body)))
    message = Message(headers, body)
    _check_size(message)
    return message


def unseal(message: Message) -> Fields:
    """Check size, format, presence of every header, and the checksum. Raises DeltaError."""
    _check_size(message)
    values: dict[str, bytes] = {}
    for name, value in message.headers:
        if name not in _KNOWN:
            continue
        if name in values:
            raise DeltaError(Fault.HEADER_INVALID, f"header {name} appears twice")
        if len(value) > MAX_FIELD_BYTES:
            raise DeltaError(Fault.HEADER_INVALID, f"header {name} has {len(value)} bytes")
        values[name] = value
    _check_format(values.get("format"))
    for name in (*FIELDS, "checksum"):
        if name not in values:
            raise DeltaError(Fault.HEADER_MISSING, f"no header {name}")
    if _checksum(values, message.body) != values["checksum"]:
        raise DeltaError(
            Fault.CHECKSUM, "headers and body do not fit the checksum: truncated or altered"
        )
    return Fields(values)


def _check_size(message: Message) -> None:
    if message.size > MAX_MESSAGE_BYTES:
        raise DeltaError(
            Fault.TOO_LARGE, f"a message of {message.size} bytes; the limit is {MAX_MESSAGE_BYTES}"
        )


def _check_format(value: bytes | None) -> None:
    if value is None:
        raise DeltaError(Fault.FOREIGN, "no header format: not a message of petps")
    name, _, number = value.rpartition(b"-")
    if name != FORMAT_NAME.encode() or not number.isdigit() or len(number) > 9:
        raise DeltaError(Fault.FOREIGN, f"format {value[:32]!r}: not a message of petps")
    if int(number) > FORMAT:
        raise DeltaError(
            Fault.NEWER_FORMAT,
            f"format {int(number)}, this release reads up to {FORMAT}: upgrade the server first",
        )
    if int(number) < 1:
        raise DeltaError(Fault.FOREIGN, f"format {value[:32]!r}: format numbers begin with 1")
