"""Frames and segment headers of the directory log, packed and parsed. FORMAT.md gives the bytes."""

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
_COUNTS: Final = struct.Struct("<II")  # headers, where the body begins
_FIELD: Final = struct.Struct("<II")  # bytes of the name, of the value
SEGMENT_HEADER_BYTES: Final = _SEGMENT.size
FRAME_HEADER_BYTES: Final = _FRAME.size
# Twice the largest message: room for headers that others add; a length above it is no frame.
MAX_PAYLOAD_BYTES: Final = 2 << 20
MAX_HEADERS: Final = 1024  # a message has 15; others may add some


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame in a buffer: the payload's place and its log offset."""

    offset: int
    start: int  # of the frame
    payload: int  # where the payload begins
    end: int  # where the next frame begins
    length: int
    payload_check: int


class State(enum.Enum):
    """Why a walk ended."""

    END = "end"  # exactly after a frame
    INCOMPLETE = "incomplete"  # in the middle of a frame: not all of it is there (yet)
    BAD = "bad"  # what stands there is no frame with the offset expected


@dataclass(frozen=True, slots=True)
class Walk:
    """Whole frames of a buffer, and why there are no more."""

    frames: list[Frame]
    state: State


def _padded(length: int) -> int:
    return (length + 7) & ~7


def pack_segment_header(partition: int, first_offset: int) -> bytes:
    """The 32 bytes that every segment file begins with."""
    fields = _SEGMENT.pack(SEGMENT_SIGNATURE, FORMAT, partition, first_offset, 0)[:-8]
    return fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))


def check_segment_header(name: str, data: bytes, partition: int, first_offset: int) -> None:
    """Raises DataLoss (no segment of this log) or Unimplemented (newer format), naming the file."""
    signature, number, found_partition, found_offset, check = _SEGMENT.unpack(data)
    if signature != SEGMENT_SIGNATURE:
        raise DataLoss(f"{name} is no segment of a petps directory log: move it out of the folder")
    if number > FORMAT:
        raise Unimplemented(f"{name} has log format {number}, this release reads {FORMAT}: upgrade")
    if xxhash.xxh3_64_intdigest(data[:-8]) != check:
        raise DataLoss(f"{name}: the segment's header is damaged; restore the file from a copy")
    if (found_partition, found_offset) != (partition, first_offset):
        raise DataLoss(
            f"{name} was written as offset {found_offset} of partition {found_partition}: "
            "the file was renamed or copied from elsewhere"
        )


def pack_frame(offset: int, message: Message) -> list[bytes | memoryview]:
    """The frame of a message as pieces for writev; its total length is a multiple of 8."""
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
    """The frame whose header stands at ``at``, or None. Its positions gain ``base``."""
    signature, length, offset, payload_check, check = _FRAME.unpack_from(data, at)
    if signature != FRAME_SIGNATURE or length > MAX_PAYLOAD_BYTES or length < _COUNTS.size:
        return None
    if xxhash.xxh3_64_intdigest(data[at : at + FRAME_HEADER_BYTES - 8]) != check:
        return None
    start = base + at
    payload = start + FRAME_HEADER_BYTES
    return Frame(offset, start, payload, payload + _padded(length), length, payload_check)


def _whole(data: memoryview, frame: Frame) -> bool:
    payload = data[frame.payload : frame.payload + frame.length]
    return xxhash.xxh3_64_intdigest(payload) == frame.payload_check


def walk(data: memoryview, at: int, expected: int) -> Walk:
    """Frames from position ``at`` on, the first with log offset ``expected``, checksums checked."""
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
        if not _whole(data, frame):
            return Walk(frames, State.BAD)
        frames.append(frame)
        at = frame.end
        expected += 1


def find_frame(data: memoryview, at: int, above: int) -> Frame | None:
    """The first whole frame from ``at`` on whose log offset is above ``above``: after damage."""
    content = bytes(data[at:])
    found = content.find(FRAME_SIGNATURE)
    while found >= 0:
        position = at + found
        if position % 8 == 0 and position + FRAME_HEADER_BYTES <= len(data):
            frame = parse_frame_header(data, position)
            if (
                frame is not None
                and frame.offset > above
                and frame.end <= len(data)
                and _whole(data, frame)
            ):
                return frame
        found = content.find(FRAME_SIGNATURE, found + 1)
    return None


def unpack_message(payload: memoryview) -> Message:
    """payload -> Message whose body is a view of it. Raises DataLoss when lengths don't add up."""
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
