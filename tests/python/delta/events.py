"""Messages that tests write into logs, and functions that read them back."""

from __future__ import annotations

import time

from petps.delta import Delivery, DeltaLog, Event, Message, Subscription
from petps.delta.kafka import KafkaLog, parse_address


def message(number: int, size: int = 100) -> Message:
    return Message([("n", str(number).encode())], number.to_bytes(8, "little") * (size // 8))


def publish(log: DeltaLog, *sequence: int, partition: int = 0, size: int = 100) -> None:
    """Publish the messages of these numbers, and flush."""
    for number in sequence:
        log.publish(partition, message(number, size))
    log.flush()


def numbers(events: list[Event]) -> list[int | str]:
    return [
        int(event.message.headers[0][1]) if isinstance(event, Delivery) else type(event).__name__
        for event in events
    ]


def read(log: KafkaLog, count: int, *, partition: int = 0, start: int = 0) -> list[Event]:
    """Return ``count`` events, or fewer after 60 s."""
    subscription = log.subscribe({partition: start})
    events: list[Event] = []
    deadline = time.monotonic() + 60
    while len(events) < count and time.monotonic() < deadline:
        events += subscription.poll(max_bytes=1 << 20, timeout=0.2)
    subscription.close()
    return events


def take(subscription: Subscription, events: list[Event], count: int) -> None:
    """Append events of the subscription until there are ``count``."""
    deadline = time.monotonic() + 60
    while len(events) < count:
        assert time.monotonic() < deadline, numbers(events)
        events += subscription.poll(max_bytes=1 << 20, timeout=0.2)


def topic_of(log: KafkaLog) -> str:
    return parse_address(log.name.removeprefix("Kafka log ")).topic
