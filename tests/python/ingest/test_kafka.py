"""Ingest from a real broker: faulty messages of a plain producer are counted, never applied.

As in test_faulty_streams.py, the rows of a partition are always those after its recorded
{run, seq}. Here the log is in Kafka, and ingest runs in its own threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import TopicPartition

from petps.checkpoint import BaseFolder
from petps.delta import Message, decode_record, encode_record, read_header
from petps.delta.kafka import KafkaLog
from petps.publish import Publisher
from petps.server.ingest import Ingest, IngestStatus, LogDeadLetters, PartitionStatus
from tests.kafka.broker import Broker
from tests.python.ingest.conftest import VERSIONS
from tests.python.ingest.driver import SCHEMAS, P, Stream, rows_by_partition, write_base
from tests.python.ingest.model import MemoryTables
from tests.python.ingest.test_follow import pause
from tests.python.waiting import wait_until


class Site:
    """A topic, its dead letters, a plain producer, and ingest into tables of plain dicts."""

    def __init__(self, broker: Broker, topic: str, folder: Path) -> None:
        self.topic = topic
        self.place = f"kafka://{broker.address}/{topic}"
        self.bases = folder / "bases"
        self.instance = MemoryTables(SCHEMAS, P)
        self.producer = Producer({"bootstrap.servers": broker.address, "log_level": 0})
        self.admin = AdminClient({"bootstrap.servers": broker.address, "log_level": 0})
        with KafkaLog(self.place, partitions=P) as log:
            log.start_offsets([0])
        self.start()

    def start(self) -> None:
        self.log = KafkaLog(self.place, partitions=P, create=False)
        self.letters = LogDeadLetters(
            lambda: KafkaLog(f"{self.place}.dead-letters", partitions=1), self.place
        )
        self.ingest = Ingest(
            self.log,
            self.instance,
            dead_letters=self.letters,
            bases=BaseFolder(self.bases),
            search_seconds=0.05,
        )
        self.ingest.start()

    def stop(self) -> None:
        assert self.ingest.stop(30)
        self.letters.close()
        self.log.close()

    def inject(self, partition: int, messages: list[Message]) -> None:
        for message in messages:
            headers: Any = message.headers
            self.producer.produce(
                self.topic, bytes(message.body), partition=partition, headers=headers
            )
        assert self.producer.flush(30) == 0

    def inject_all(self, messages: dict[int, list[Message]]) -> None:
        for partition, partition_messages in messages.items():
            self.inject(partition, partition_messages)

    def until(self, condition: Callable[[IngestStatus], object]) -> list[PartitionStatus]:
        """Return the partitions' status once the condition holds."""

        def partitions_if_true() -> list[PartitionStatus] | None:
            status = self.ingest.status()
            is_true = len(status.partitions) == P and condition(status)
            return status.partitions if is_true else None

        partitions: list[PartitionStatus] = wait_until(partitions_if_true)
        return partitions

    def settled(self, stream: Stream, state: str = "following") -> list[PartitionStatus]:
        """Wait until partition 0 has this state and the others have everything; check the rows."""

        def is_settled(status: IngestStatus) -> bool:
            first, *others = status.partitions
            is_stopped = first.state != "following"
            return (
                first.state == state
                and (is_stopped or (first.version >= VERSIONS and first.lag_records == 0))
                and all(partition.version >= VERSIONS for partition in others)
            )

        partitions = self.until(is_settled)
        rows = rows_by_partition(self.instance)
        for p in partitions:
            assert rows[p.partition] == stream.rows_at(p.partition, p.run, p.seq)
        return partitions

    def dead_letters(self) -> list[tuple[bytes, bytes, bytes]]:
        """Return (partition, offset, reason) of every dead letter."""
        with KafkaLog(f"{self.place}.dead-letters") as log:
            subscription = log.subscribe({0: 0})
            events: list[Any] = []
            deadline = time.monotonic() + 30
            while not events or len(events) < log.end_offsets([0])[0]:
                assert time.monotonic() < deadline
                events += subscription.poll(max_bytes=1 << 20, timeout=0.2)
            subscription.close()
        names = [f"dead-letter.{name}" for name in ("partition", "offset", "reason")]
        headers = [dict(event.message.headers) for event in events]
        return [(letter[names[0]], letter[names[1]], letter[names[2]]) for letter in headers]


@pytest.fixture
def site(kafka: Broker, topic: Callable[[], str], tmp_path: Path) -> Iterator[Site]:
    site = Site(kafka, topic(), tmp_path)
    yield site
    site.stop()


def flip_bit(message: Message, at: int) -> Message:
    body = bytearray(message.body)
    body[at] ^= 1 << at % 8
    return Message(message.headers, bytes(body))


def replace_header(message: Message, name: str, value: bytes) -> Message:
    return Message([(n, value if n == name else v) for n, v in message.headers], message.body)


def reseal(message: Message, partition: int, **changes: Any) -> Message:
    """Return the message with changed headers and a correct checksum."""
    schemas = {schema.name: schema for schema in SCHEMAS}
    record = decode_record(
        message, model="m", partition=partition, partitions=P, schema_of=schemas.get
    )
    return encode_record(replace(record, header=replace(record.header, **changes)))


Injected = tuple[Callable[[list[Message]], list[Message]], str, dict[str, int], bytes]
CASES: dict[str, Injected] = {
    "duplicated": (lambda m: [*m[:9], *m[2:7], *m[8:]], "following", {"duplicates": 6}, b""),
    "reordered": (
        lambda m: [*m[:4], m[6], m[5], m[4], *m[7:]],
        "following",
        {"gaps": 2, "duplicates": 2},
        b"",
    ),
    "lost": (lambda m: [*m[:9], *m[10:]], "stale", {"gaps": 1}, b""),
    "truncated": (
        lambda m: [*m[:7], Message(m[7].headers, bytes(m[7].body)[:-9]), *m[8:]],
        "stale",
        {"gaps": 1, "dead_letters": 1},
        b"checksum: headers and body do not fit",
    ),
    "flipped in the body": (
        lambda m: [*m[:7], flip_bit(m[7], 333), *m[8:]],
        "stale",
        {"gaps": 1, "dead_letters": 1},
        b"checksum: headers and body do not fit",
    ),
    "flipped in a header": (
        lambda m: [*m[:7], replace_header(m[7], "seq", b"9"), *m[8:]],
        "stale",
        {"gaps": 1, "dead_letters": 1},
        b"checksum: headers and body do not fit",
    ),
    "empty": (
        lambda m: [*m[:7], Message([], b""), *m[8:]],
        "stale",
        {"gaps": 1, "dead_letters": 1},
        b"foreign: no header format",
    ),
    "foreign between": (
        lambda m: [*m[:7], Message([("a", b"b")], b"{}"), *m[7:]],
        "following",
        {"gaps": 1, "dead_letters": 1},
        b"foreign: no header format",
    ),
    "a zombie continues to write": (
        lambda m: [*m[:9], *(reseal(message, 0, run=4) for message in m[3:7]), *m[9:]],
        "following",
        {"zombies": 4},
        b"",
    ),
    "two publishers of one run": (
        lambda m: [*m[:9], reseal(m[9], 0, publisher="b"), *m[9:]],
        "conflict",
        {"conflicts": 1},
        b"",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_faulty_messages_of_a_plain_producer(site: Site, stream: Stream, name: str) -> None:
    change, state, counters, reason = CASES[name]
    messages = {**stream.messages, 0: change(stream.messages[0])}
    site.inject_all(messages)
    first = site.settled(stream, state)[0]
    expected = dict.fromkeys(
        ("duplicates", "gaps", "zombies", "conflicts", "dead_letters", "catch_ups"), 0
    )
    assert {name: getattr(first, name) for name in expected} == {**expected, **counters}
    if reason:
        ((partition, offset, letter_reason),) = site.dead_letters()
        assert (partition, offset) == (b"0", b"7")
        assert letter_reason.startswith(reason)
    if state != "stale":
        assert state == "conflict" or rows_by_partition(site.instance) == stream.final()
        return
    # A restart keeps the state; a base ends the stop.
    site.stop()
    site.start()
    restarted = site.settled(stream, state)[0]
    assert (restarted.run, restarted.seq, restarted.offset) == (first.run, first.seq, first.offset)
    position = stream.position
    positions = {p: (position.run, position.seqs[p]) for p in range(P)}
    write_base(site.bases / "b", stream.final(), positions, position.version)
    assert site.settled(stream)[0].catch_ups == 1
    assert rows_by_partition(site.instance) == stream.final()


def test_a_new_run_continues_and_the_old_one_is_rejected(site: Site, stream: Stream) -> None:
    site.inject_all(stream.messages)
    site.settled(stream)
    with KafkaLog(site.place) as log:
        publisher = Publisher(log, "m", tables=SCHEMAS)
        publisher.begin_continue(stream.position)
        keys = np.arange(60, dtype=np.uint64)
        publisher.publish("user", keys, np.full((60, 4), 7, np.float32))
        version = publisher.commit()
    assert version == VERSIONS + 1
    site.until(lambda status: status.version == version)
    late = [reseal(message, 0, seq=999) for message in stream.messages[0][-3:]]
    site.inject(0, late)
    partitions = site.until(lambda status: status.partitions[0].zombies == 3)
    assert {(p.state, p.run) for p in partitions} == {("following", publisher.run)}
    stored = site.instance.by_name["user"].rows
    assert all(stored[key] == np.full(4, 7, np.float32).tobytes() for key in range(60))


def test_messages_removed_by_retention_are_a_gap_until_a_base(site: Site, stream: Stream) -> None:
    """Remove messages that were not applied: the partition stops, and catches up to a base."""
    half = {p: messages[: len(messages) // 2] for p, messages in stream.messages.items()}
    site.inject_all(half)
    reached = {p: read_header(messages[-1]).seq for p, messages in half.items()}
    site.until(lambda status: all(s.seq == reached[s.partition] for s in status.partitions))
    site.stop()
    site.inject_all({p: messages[len(half[p]) :] for p, messages in stream.messages.items()})
    at = TopicPartition(site.topic, 0, len(stream.messages[0]) - 3)
    site.admin.delete_records([at])[at].result(30)
    site.start()
    first = site.settled(stream, "stale")[0]
    assert (first.seq, first.gaps) == (reached[0], 1)
    assert (
        f"offsets {reached[0]} to {at.offset - 1} are gone from the log: retention" in first.reason
    )
    assert first.lag_records == len(stream.messages[0]) - reached[0]
    # Write a base of the middle. The log still holds the messages that follow it.
    position = stream.position
    seqs = {p: position.seqs[p] for p in range(P)}
    seqs[0] = at.offset + 1  # offsets count from 0, seqs from 1
    rows = {p: stream.rows_at(p, position.run, seqs[p]) for p in range(P)}
    write_base(site.bases / "b", rows, {p: (position.run, seqs[p]) for p in range(P)}, 11)
    assert site.settled(stream)[0].catch_ups == 1
    assert rows_by_partition(site.instance) == stream.final()


def test_pause_resume_and_rate_limit(
    site: Site, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause(site.ingest, monkeypatch)
    site.inject_all(stream.messages)
    ends = {p: len(messages) for p, messages in stream.messages.items()}
    partitions = site.until(
        lambda status: all(s.lag_records == ends[s.partition] for s in status.partitions)
    )
    assert all(partition.rows == 0 for partition in partitions)
    site.ingest.set_rate(200)
    start = time.monotonic()
    site.ingest.resume()
    rows = sum(partition.rows for partition in site.settled(stream))
    assert rows > 300
    assert rows_by_partition(site.instance) == stream.final()
    with KafkaLog(site.place) as log:
        publisher = Publisher(log, "m", tables=SCHEMAS)
        publisher.begin_continue(stream.position)
        version = publisher.commit()
    site.until(lambda status: status.version == version)
    assert time.monotonic() - start > rows / 200 - 0.5  # the rows before delay the commit
