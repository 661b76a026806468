"""Batches that are damaged on a broker's disk, read through the Kafka log."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import TopicPartition

from petps.delta import Delivery, Event, Lost
from petps.delta.kafka import KafkaLog
from petps.delta.kafka import subscription as kafka_subscription
from petps.delta.kafka.subscription import KafkaSubscription
from tests.kafka.broker import Broker
from tests.python.delta.events import message, numbers, publish, read, take, topic_of
from tests.python.waiting import wait_until


@pytest.fixture
def place(kafka: Broker, topic: Callable[[], str]) -> str:
    return f"kafka://{kafka.address}/{topic()}"


class Damaged:
    """A log of eight messages. ``together`` messages from 3 on are a batch with a flipped bit."""

    def __init__(
        self, kafka: Broker, place: str, where: str, codec: str, together: int = 3
    ) -> None:
        options = {"linger.ms": "10000", "compression.type": codec}
        self.log = KafkaLog(place, partitions=1, options=options)
        for number in range(8):
            self.log.publish(0, message(number, 400))
            if not 3 <= number < 2 + together:
                self.log.flush()
        kafka.stop()
        (segment,) = (kafka.data / f"{topic_of(self.log)}-0").glob("*.log")
        data = bytearray(segment.read_bytes())
        at = 0
        while int.from_bytes(data[at : at + 8]) < 3:
            at += 12 + int.from_bytes(data[at + 8 : at + 12])
        assert int.from_bytes(data[at : at + 8]) == 3
        # The batch's last offset, relative to its first.
        assert int.from_bytes(data[at + 23 : at + 27]) == together - 1
        body = data.find((4).to_bytes(8, "little"), at + 61)
        data[at + 61 if where == "record" else body] ^= 0x40
        segment.write_bytes(data)
        kafka.start()

    def __enter__(self) -> KafkaLog:
        return self.log

    def __exit__(self, *exc: object) -> None:
        self.log.close()


@pytest.mark.parametrize("together", [1, 3])
def test_a_batch_that_cannot_be_decompressed_reports_damage(
    kafka: Broker, place: str, together: int
) -> None:
    """Read at once, and late, when librdkafka has reported the same batch many times."""
    with Damaged(kafka, place, "record", "lz4", together) as log:
        for seconds in (0, 2):
            subscription = log.subscribe({0: 0})
            time.sleep(seconds)
            events: list[Event] = []
            take(subscription, events, 8)
            assert subscription.poll(max_bytes=1 << 20, timeout=1) == []
            subscription.close()
            expected = [n if not 3 <= n < 3 + together else "Damage" for n in range(8)]
            assert numbers(events) == expected
            assert [event.offset for event in events] == list(range(8))


def test_a_damaged_body_is_delivered(kafka: Broker, place: str) -> None:
    """Damage a body. Its own checksum fails; checking Kafka's CRC would crash librdkafka."""
    with Damaged(kafka, place, "body", "none") as log:
        events = read(log, 8)
        assert numbers(events) == list(range(8))
        bodies = [event.message.body for event in events if isinstance(event, Delivery)]
        assert [n for n in range(8) if bodies[n] != message(n, 400).body] == [4]


def test_an_offset_error_within_the_log_is_retried_once(kafka: Broker, place: str) -> None:
    """Report an offset error inside the log, as librdkafka does for a damaged batch's bytes.

    The first error is retried at the same offset. The second error there counts as damage.
    """
    with KafkaLog(place, partitions=1) as log:
        publish(log, *range(3))
        subscription = log.subscribe({0: 0})
        assert isinstance(subscription, KafkaSubscription)
        events: list[Event] = []
        for _ in range(2):
            subscription._add_error(KafkaError(KafkaError._AUTO_OFFSET_RESET), 0)
        take(subscription, events, 3)
        assert numbers(events) == ["Damage", 1, 2]
        subscription.seek(0, 1)
        subscription._add_error(KafkaError(KafkaError.OFFSET_OUT_OF_RANGE), 0)
        take(subscription, events, 5)
        assert numbers(events[3:]) == [1, 2]
        for _ in range(2):  # at the log's end, the message is lost
            subscription._add_error(KafkaError(KafkaError.OFFSET_OUT_OF_RANGE), 0)
        take(subscription, events, 6)
        subscription.close()
        assert numbers(events[5:]) == ["Lost"]


def test_a_reader_at_damaged_lengths_warns_and_continues_after_a_delete(
    kafka: Broker, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kafka_subscription, "STALL_SECONDS", 3.0)
    with Damaged(kafka, place, "record", "none") as log:
        subscription = log.subscribe({0: 0})
        events: list[Event] = []
        take(subscription, events, 4)

        def read_warnings() -> list[str]:
            assert subscription.poll(max_bytes=1 << 20, timeout=0.2) == []
            return [text for text in caplog.messages if "no message from offset 4" in text]

        (text,) = wait_until(read_warnings)
        assert "partition 0: no message from offset 4" in text
        assert "the log ends at 8" in text
        at = TopicPartition(topic_of(log), 0, 6)  # the offset after the batch
        admin = AdminClient({"bootstrap.servers": kafka.address, "log_level": 0})
        admin.delete_records([at])[at].result(30)
        take(subscription, events, 5)
        assert isinstance(events[4], Lost)
        subscription.seek(0, events[4].start)
        take(subscription, events, 7)
        caplog.clear()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:  # everything is read, so no warning is due
            assert subscription.poll(max_bytes=1 << 20, timeout=0.2) == []
        subscription.close()
        assert not [text for text in caplog.messages if "no message from" in text]
        assert numbers(events) == [0, 1, 2, 3, "Lost", 6, 7]
