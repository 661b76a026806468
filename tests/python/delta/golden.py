"""The records whose bytes are in tests/golden/delta.

`python -m tests.python.delta.golden` rewrites the files. Only a new format may change them. The old
files then stay beside the new ones, and are still read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from petps.delta import (
    BaseBody,
    CommitBody,
    ContinueBody,
    Kind,
    Record,
    RecordHeader,
    RowsBody,
    TableCount,
    TableSchema,
    encode_record,
)
from petps.delta.directory.frame import pack_frame, pack_segment_header

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "delta"
SEGMENT = FOLDER / "segment-1.log"
SCHEMA = TableSchema("user", "f32", 3)
PARTITION = 2
FIRST_OFFSET = 40

_MARKER = RecordHeader(
    model="ranking",
    kind=Kind.CONTINUE,
    run=1_790_000_000_000,
    publisher="trainer-0",
    step=0,
    seq=1,
    version=11,
    time_ns=1_790_000_000_123_456_789,
    partition=PARTITION,
    partitions=4,
)
RECORDS = [
    Record(_MARKER, ContinueBody(previous_run=1_780_000_000_000, last_seq=977)),
    Record(
        replace(_MARKER, kind=Kind.ROWS, seq=2, step=500, table="user", dtype="f32", dim=3),
        RowsBody(
            np.array([1, 1 << 63, 7, (1 << 64) - 1], dtype=np.uint64),
            np.array([[1, 2, 3], [-0.5, 1e-30, 1e30], [0, 0, 0], [0.1, 0.2, 0.3]], np.float32)
            .view(np.uint8)
            .reshape(4, 12),
            np.array([False, False, True, False]),
        ),
    ),
    Record(
        replace(_MARKER, kind=Kind.COMMIT, seq=3, step=500),
        CommitBody(
            tables={"user": TableCount(here=4, everywhere=19)}, dense="dense/11.safetensors"
        ),
    ),
    Record(
        replace(_MARKER, kind=Kind.BASE, seq=4, step=500), BaseBody(location="bases/ranking-11")
    ),
]


def segment() -> bytes:
    """Return a segment of the directory log that holds RECORDS."""
    pieces: list[bytes | memoryview] = [pack_segment_header(PARTITION, FIRST_OFFSET)]
    for offset, record in enumerate(RECORDS, FIRST_OFFSET):
        pieces += pack_frame(offset, encode_record(record))
    return b"".join(pieces)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    SEGMENT.write_bytes(segment())
