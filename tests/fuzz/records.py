"""Delta records and segments of a directory log, of any bytes.

An input is a byte of flags, then edits of a valid message or segment, or the body itself.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from petps.delta import (
    BaseBody,
    CommitBody,
    ContinueBody,
    DeltaError,
    Kind,
    Message,
    Record,
    RecordHeader,
    RowsBody,
    TableCount,
    TableSchema,
    decode_record,
    encode_record,
    headers,
)
from petps.delta.directory import frame
from petps.delta.record import Body
from petps.errors import PetpsError

ROOT: Final = Path(__file__).resolve().parents[2]
SCHEMA: Final = TableSchema("user", "f32", 2)
KINDS: Final = (Kind.ROWS, Kind.COMMIT, Kind.BASE, Kind.CONTINUE)
SEGMENT: Final = 0x80  # the input is a segment file
FIELDS: Final = 0x40  # the second byte is the number of changed headers
UNSEALED: Final = 0x20  # the checksum is not computed again
SEGMENT_HEADER_BYTES: Final = 32
FRAME_HEADER_BYTES: Final = 32


def header_of(kind: Kind) -> RecordHeader:
    """Return the header of a valid message."""
    rows = kind is Kind.ROWS
    return RecordHeader(
        model="m", kind=kind, run=7, publisher="p", step=1, seq=3, version=2, time_ns=5,
        partition=0, partitions=1, table=SCHEMA.name if rows else "",
        dtype=SCHEMA.dtype if rows else "", dim=SCHEMA.dim if rows else 0,
    )  # fmt: skip


def bodies() -> dict[Kind, Body]:
    """Return a valid body of each kind."""
    keys = np.array([1, 5, 1 << 63], np.uint64)
    rows = np.arange(3 * SCHEMA.row_bytes, dtype=np.uint8).reshape(3, -1)
    return {
        Kind.ROWS: RowsBody(keys, rows, np.array([False, True, False])),
        Kind.COMMIT: CommitBody(tables={"user": TableCount(here=1, everywhere=2)}, dense="a/b"),
        Kind.BASE: BaseBody(location="/base", instance="m@1"),
        Kind.CONTINUE: ContinueBody(previous_run=6, last_seq=9),
    }


def seeds() -> list[bytes]:
    """Return valid inputs."""
    inputs = []
    for number, kind in enumerate(KINDS):
        message = encode_record(Record(header_of(kind), bodies()[kind]))
        inputs.append(bytes([number]) + bytes(message.body))
        inputs.append(bytes([number | FIELDS, 1, 3, 1]) + b"8" + bytes(message.body))
        inputs.append(bytes([number | UNSEALED]) + bytes(message.body))
    golden = (ROOT / "tests/golden/delta/segment-1.log").read_bytes()
    return [*inputs, bytes([SEGMENT]) + golden]


def run(data: bytes) -> None:
    """Decode an input. Any exception but an error of petps is a finding."""
    if not data:
        return
    if data[0] & SEGMENT:
        read_segment(bytearray(data[1:]), seal=not data[0] & UNSEALED)
        return
    kind = KINDS[data[0] & 3]
    values = dict(encode_record(Record(header_of(kind), bodies()[kind])).headers)
    at = 1
    if data[0] & FIELDS and len(data) > 1:
        at = 2
        for _ in range(data[1] & 3):
            if at + 2 > len(data):
                return
            name = headers.FIELDS[data[at] % len(headers.FIELDS)]
            length = data[at + 1] % 32
            values[name] = data[at + 2 : at + 2 + length]
            at += 2 + length
    body = data[at:]
    if not data[0] & UNSEALED:
        with suppress(DeltaError):
            fields = [(name, values[name]) for name in headers.FIELDS if name != "format"]
            decode(headers.seal(fields, body), kind)
        return
    decode(Message(list(values.items()), body), kind)


def decode(message: Message, kind: Kind) -> None:
    """Decode a message. If it is whole, it must be the same after it is encoded again."""
    try:
        record = decode_record(
            message, model="m", partition=0, partitions=1, schema_of={"user": SCHEMA}.get
        )
    except DeltaError:
        return
    again = decode_record(
        encode_record(record), model="m", partition=0, partitions=1, schema_of={"user": SCHEMA}.get
    )
    assert again.header == record.header
    if isinstance(record.body, RowsBody):
        assert isinstance(again.body, RowsBody)
        assert record.body.rows.shape == (len(record.body.keys), SCHEMA.row_bytes)
        assert (record.body.keys == again.body.keys).all()
        # What a deleted row has is not encoded.
        exists = slice(None) if record.body.deleted is None else ~record.body.deleted
        assert (record.body.rows[exists] == again.body.rows[exists]).all()
    else:
        assert record.body == again.body


def read_segment(data: bytearray, *, seal: bool) -> None:
    """Walk the frames of a segment file. seal: compute the checksums of its frames again."""
    if len(data) < SEGMENT_HEADER_BYTES:
        return
    with suppress(PetpsError):
        frame.check_segment_header("segment", bytes(data[:SEGMENT_HEADER_BYTES]), 2, 40)
    if seal:
        seal_frames(data)
    view = memoryview(data)
    walked = frame.walk(view, SEGMENT_HEADER_BYTES, 40)
    frame.find_frame(view, SEGMENT_HEADER_BYTES, 40)
    for part in walked.frames:
        with suppress(PetpsError):
            message = frame.unpack_message(view[part.payload : part.payload + part.length])
            decode(message, Kind.ROWS)


def seal_frames(data: bytearray) -> None:
    """Compute the checksums of the frames again."""
    at, offset = SEGMENT_HEADER_BYTES, 40
    while at + FRAME_HEADER_BYTES <= len(data):
        (length,) = struct.unpack_from("<I", data, at + 4)
        start = at + FRAME_HEADER_BYTES
        end = start + min(length, len(data) - start)
        struct.pack_into("<Q", data, at + 8, offset)
        struct.pack_into("<Q", data, at + 16, xxhash.xxh3_64_intdigest(bytes(data[start:end])))
        struct.pack_into("<Q", data, at + 24, xxhash.xxh3_64_intdigest(bytes(data[at : at + 24])))
        at, offset = start + (length + 7 & ~7), offset + 1
