"""Packing and parsing of a directory log's frames and segment headers. FORMAT.md defines them."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from petps.delta.headers import Message
from petps.errors import DataLoss, Unimplemented

__all__ = [
    "FRAME_HEADER_BYTES",
    "MAX_PAYLOAD_BYTES",
    "SEGMENT_HEADER_BYTES",
    "Frame",
    "State",
    "Walk",
    "check_segment_header",
    "find_frame",
    "pack_frame",
    "pack_segment_header",
    "parse_frame_header",
    "unpack_message",
    "walk",
]

FORMAT: Final = 1
SEGMENT_SIGNATURE: Final = b"PETPSLOG"
FRAME_SIGNATURE: Final = b"PTLF"
_SEGMENT: Final = struct.Struct("<8sIIQQ")  # signature, format, partition, first offset, check
_FRAME: Final = struct.Struct("<4sIQQQ")  # signature, payload bytes, offset, payload check, check
_COUNTS: Final = struct.Struct("<II")  # number of headers, offset of the body
_FIELD: Final = struct.Struct("<II")  # bytes of the name, bytes of the value
SEGMENT_HEADER_BYTES: Final = _SEGMENT.size
FRAME_HEADER_BYTES: Final = _FRAME.size
# Twice the largest message, because other programs may add headers. No frame is longer.
MAX_PAYLOAD_BYTES: Final = 2 << 20
MAX_HEADERS: Final = 1024  # a message has 15; others may add some


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame in a buffer: its log offset, and the positions of its parts."""

    offset: int
    start: int  # position of the frame
    payload: int  # position of the payload
    end: int  # position of the next frame
    length: int
    payload_check: int


class State(enum.Enum):
    """Reason why a walk ended."""

    END = "end"  # the data ends directly after a frame
    INCOMPLETE = "incomplete"  # the data ends within a frame, whose rest may follow later
    BAD = "bad"  # the next bytes are not a frame with the expected offset


@dataclass(frozen=True, slots=True)
class Walk:
    """The whole frames of a buffer, and the reason why the walk ended after them."""

    frames: list[Frame]
    state: State


def _padded(length: int) -> int:
    return (length + 7) & ~7


def pack_segment_header(partition: int, first_offset: int) -> bytes:
    """Return the 32 bytes that begin every segment file."""
    fields = _SEGMENT.pack(SEGMENT_SIGNATURE, FORMAT, partition, first_offset, 0)[:-8]
    return fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))


def check_segment_header(name: str, data: bytes, partition: int, first_offset: int) -> None:
    """Raise DataLoss (no segment of this log) or Unimplemented (newer format), naming the file."""
    signature, number, header_partition, header_offset, check = _SEGMENT.unpack(data)
    if signature != SEGMENT_SIGNATURE:
        raise DataLoss(f"{name} is no segment of a petps directory log: move it out of the folder")
    if number > FORMAT:
        raise Unimplemented(f"{name} has log format {number}, this release reads {FORMAT}: upgrade")
    if xxhash.xxh3_64_intdigest(data[:-8]) != check:
        raise DataLoss(f"{name}: the segment's header is damaged; restore the file from a copy")
    if (header_partition, header_offset) != (partition, first_offset):
        raise DataLoss(
            f"{name} was written as offset {header_offset} of partition {header_partition}: "
            "the file was renamed or copied from elsewhere"
        )


def pack_frame(offset: int, message: Message) -> list[bytes | memoryview]:
    """Return a message's frame as pieces for writev; their total length is a multiple of 8."""
    fields = bytearray()
    for name, value in message.headers:
        encoded = name.encode()
        fields += _FIELD.pack(len(encoded), len(value)) + encoded + value
    body_at = _padded(_COUNTS.size + len(fields))
    fields += bytes(body_at - _COUNTS.size - len(fields))
    head = _COUNTS.pack(len(message.headers), body_at) + bytes(fields)
    length = len(head) + len(message.body)
    hasher = xxhash.xxh3_64(head)
    hasher.update(message.body)
    front = _FRAME.pack(FRAME_SIGNATURE, length, offset, hasher.intdigest(), 0)[:-8]
    front += struct.pack("<Q", xxhash.xxh3_64_intdigest(front))
    return [front + head, message.body, bytes(_padded(length) - length)]


def parse_frame_header(data: bytes | memoryview, at: int = 0, base: int = 0) -> Frame | None:
    """Return the frame whose header is at ``at``, or None. Add ``base`` to its positions."""
    signature, length, offset, payload_check, check = _FRAME.unpack_from(data, at)
    if signature != FRAME_SIGNATURE or length > MAX_PAYLOAD_BYTES or length < _COUNTS.size:
        return None
    if xxhash.xxh3_64_intdigest(data[at : at + FRAME_HEADER_BYTES - 8]) != check:
        return None
    start = base + at
    payload = start + FRAME_HEADER_BYTES
    return Frame(offset, start, payload, payload + _padded(length), length, payload_check)


def _is_whole(data: memoryview, frame: Frame) -> bool:
    payload = data[frame.payload : frame.payload + frame.length]
    return xxhash.xxh3_64_intdigest(payload) == frame.payload_check


def walk(data: memoryview, at: int, expected: int) -> Walk:
    """Return the frames from ``at`` on whose checksums match; the first has offset ``expected``."""
    frames: list[Frame] = []
    size = len(data)
    while True:
        if at == size:
            return Walk(frames, State.END)
        if size - at < FRAME_HEADER_BYTES:
            return Walk(frames, State.INCOMPLETE)
        frame = parse_frame_header(data, at)
        if frame is None or frame.offset != expected:
            return Walk(frames, State.BAD)
        if frame.end > size:
            return Walk(frames, State.INCOMPLETE)
        if not _is_whole(data, frame):
            return Walk(frames, State.BAD)
        frames.append(frame)
        at = frame.end
        expected += 1


def find_frame(data: memoryview, at: int, above: int) -> Frame | None:
    """Return the first whole frame from ``at`` on with a log offset above ``above``, or None.

    Used to continue after damage.
    """
    content = bytes(data[at:])
    index = content.find(FRAME_SIGNATURE)
    while index >= 0:
        position = at + index
        if position % 8 == 0 and position + FRAME_HEADER_BYTES <= len(data):
            frame = parse_frame_header(data, position)
            if (
                frame is not None
                and frame.offset > above
                and frame.end <= len(data)
                and _is_whole(data, frame)
            ):
                return frame
        index = content.find(FRAME_SIGNATURE, index + 1)
    return None


def unpack_message(payload: memoryview) -> Message:
    """Return the Message of a payload; its body is a view. Raises DataLoss for wrong lengths."""
    count, body_at = _COUNTS.unpack_from(payload)
    if count > MAX_HEADERS or body_at > len(payload):
        raise DataLoss("a frame's header list is longer than the frame")
    headers: list[tuple[str, bytes]] = []
    at = _COUNTS.size
    for _ in range(count):
        if at + _FIELD.size > body_at:
            raise DataLoss("a frame's header list is longer than the frame")
        name_bytes, value_bytes = _FIELD.unpack_from(payload, at)
        at += _FIELD.size
        if at + name_bytes + value_bytes > body_at:
            raise DataLoss("a frame's header is longer than the frame")
        name = bytes(payload[at : at + name_bytes]).decode(errors="replace")
        at += name_bytes
        headers.append((name, bytes(payload[at : at + value_bytes])))
        at += value_bytes
    return Message(headers, payload[body_at:])
