"""Messages that tests write into logs, and functions that read them back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from petps.delta import Delivery, Event, Message, Subscription
from petps.delta.kafka import KafkaLog, parse_address


def message(number: int, size: int = 100) -> Message:
    return Message([("n", str(number).encode())], number.to_bytes(8, "little") * (size // 8))


def numbers(events: list[Event]) -> list[int | str]:
    return [
        int(event.message.headers[0][1]) if isinstance(event, Delivery) else type(event).__name__
        for event in events
    ]


def read(log: KafkaLog, count: int, *, partition: int = 0, start: int = 0) -> list[Event]:
    """Return ``count`` events, or those that came within 20 s."""
    subscription = log.subscribe({partition: start})
    events: list[Event] = []
    deadline = time.monotonic() + 20
    while len(events) < count and time.monotonic() < deadline:
        events += subscription.poll(max_bytes=1 << 20, timeout=0.2)
    subscription.close()
    return events


def until(what: Callable[[], Any], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def take(subscription: Subscription, events: list[Event], count: int) -> None:
    deadline = time.monotonic() + 30
    while len(events) < count:
        assert time.monotonic() < deadline, numbers(events)
        events += subscription.poll(max_bytes=1 << 20, timeout=0.2)


def topic_of(log: KafkaLog) -> str:
    return parse_address(log.name.removeprefix("Kafka log ")).topic
