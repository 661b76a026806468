"""Golden bytes: this release reads the stored segment, and writes the same bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from petps.delta import Delivery, decode_record, encode_record
from petps.delta.directory import DirectoryLog
from tests.python.delta import golden
from tests.python.delta.test_record import assert_same


def test_golden_segment_is_read(tmp_path: Path) -> None:
    DirectoryLog(tmp_path, partitions=4).close()
    shutil.copy(golden.SEGMENT, tmp_path / "p0002" / f"{golden.FIRST_OFFSET:020d}.log")
    log = DirectoryLog(tmp_path)
    subscription = log.subscribe({golden.PARTITION: golden.FIRST_OFFSET})
    events = subscription.poll(max_bytes=1 << 20, timeout=0)
    subscription.close()
    assert len(events) == len(golden.RECORDS)
    for event, expected in zip(events, golden.RECORDS, strict=True):
        assert isinstance(event, Delivery)
        record = decode_record(
            event.message,
            model="ranking",
            partition=golden.PARTITION,
            partitions=4,
            schema_of=lambda name: golden.SCHEMA if name == "user" else None,
        )
        assert_same(record, expected)
    log.close()


def test_golden_segment_is_written() -> None:
    assert golden.segment() == golden.SEGMENT.read_bytes()


def test_headers_are_those_of_format_md() -> None:
    """Compute the checksum as FORMAT.md defines it, without the encoder; compare the names."""
    import xxhash

    text = Path(golden.__file__).parents[3] / "petps" / "delta" / "FORMAT.md"
    table = [line for line in text.read_text().splitlines() if line.startswith("| `")]
    named = [name for line in table for name in _names(line.split("|")[1])]
    message = encode_record(golden.RECORDS[2])
    assert [name for name, _ in message.headers] == named[: len(message.headers)]
    hasher = xxhash.xxh3_64()
    for name, value in message.headers[:-1]:
        for part in (len(name), len(value)):
            hasher.update(part.to_bytes(4, "little"))
        hasher.update(name.encode() + value)
    hasher.update(message.body)
    assert message.headers[-1] == ("checksum", hasher.hexdigest().encode())
    assert json.loads(bytes(message.body)) == {
        "tables": {"user": {"here": 4, "everywhere": 19}},
        "dense": "dense/11.safetensors",
    }


def _names(cell: str) -> list[str]:
    return [part.strip().strip("`") for part in cell.split(",")]
