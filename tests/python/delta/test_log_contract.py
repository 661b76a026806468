"""The contract of every delta log. To test another backend, add it to BACKENDS."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from petps.delta import Delivery, DeltaLog, Event, Lost, Message, Subscription
from petps.delta.directory import DirectoryLog
from petps.delta.kafka import KafkaLog
from petps.errors import InvalidArgument
from tests.kafka.broker import Broker

P = 3
Opener = Callable[[], DeltaLog]


def directory_log(request: pytest.FixtureRequest) -> Opener:
    folder: Path = request.getfixturevalue("tmp_path")
    return lambda: DirectoryLog(folder / "log", partitions=P, segment_bytes=8192)


def kafka_log(request: pytest.FixtureRequest) -> Opener:
    broker: Broker = request.getfixturevalue("kafka")
    location = f"kafka://{broker.address}/{request.getfixturevalue('topic')()}"
    return lambda: KafkaLog(location, partitions=P)


BACKENDS: dict[str, Callable[[pytest.FixtureRequest], Opener]] = {
    "directory": directory_log,
    "kafka": kafka_log,
}


@pytest.fixture(params=["directory", pytest.param("kafka", marks=pytest.mark.xdist_group("kafka"))])
def opener(request: pytest.FixtureRequest) -> Opener:
    return BACKENDS[request.param](request)


def message(number: int, size: int = 100) -> Message:
    body = number.to_bytes(8, "little") * (size // 8)
    return Message([("n", str(number).encode()), ("binary", b"\x00\xff"), ("empty", b"")], body)


def publish(log: DeltaLog, *sequence: int, partition: int = 0, size: int = 100) -> None:
    for number in sequence:
        log.publish(partition, message(number, size))
    log.flush()


def number_of(event: Event) -> int:
    assert isinstance(event, Delivery), event
    headers, body = event.message.headers, event.message.body
    assert headers[1:] == [("binary", b"\x00\xff"), ("empty", b"")]
    number = int(headers[0][1])
    assert bytes(body) == number.to_bytes(8, "little") * (len(body) // 8)
    return number


def read(subscription: Subscription, count: int, max_bytes: int = 1 << 20) -> list[Event]:
    events: list[Event] = []
    deadline = time.monotonic() + 60
    while len(events) < count:
        assert time.monotonic() < deadline, f"{len(events)} of {count} events in 60 s"
        events += subscription.poll(max_bytes=max_bytes, timeout=0.1)
    return events


def test_messages_are_read_in_order(opener: Opener) -> None:
    log = opener()
    for number in range(300):
        log.publish(number % P, message(number, 8 * (number % 50)))
    log.flush()
    subscription = log.subscribe(dict.fromkeys(range(P), 0))
    events = read(subscription, 300)
    for partition in range(P):
        mine = [event for event in events if event.partition == partition]
        assert [number_of(event) for event in mine] == list(range(partition, 300, P))
        offsets = [event.offset for event in mine]
        assert offsets == sorted(set(offsets))
        for event, following in zip(mine, offsets[1:], strict=False):
            assert isinstance(event, Delivery)
            assert event.offset < event.next_offset <= following
    assert subscription.poll(max_bytes=1 << 20, timeout=0) == []
    ends = log.end_offsets(range(P))
    assert subscription.positions() == ends
    subscription.close()
    log.close()


def test_messages_survive_close_and_open(opener: Opener) -> None:
    for round_number in range(4):
        log = opener()
        start = 10 * round_number
        publish(log, *range(start, start + 10), partition=1, size=1000)
        log.close()
    log = opener()
    assert log.partitions == P
    subscription = log.subscribe({1: 0})
    assert [number_of(event) for event in read(subscription, 40)] == list(range(40))
    subscription.close()
    log.close()


def test_a_subscription_starts_at_and_seeks_to_any_offset(opener: Opener) -> None:
    log = opener()
    publish(log, *range(60), size=600)
    everything = log.subscribe({0: 0})
    offsets = [event.offset for event in read(everything, 60)]
    for at in (0, 1, 30, 59):
        subscription = log.subscribe({0: offsets[at]})
        assert subscription.positions() == {0: offsets[at]}
        assert [number_of(event) for event in read(subscription, 60 - at)] == list(range(at, 60))
        subscription.close()
    for at in (59, 3, 58, 0):
        everything.seek(0, offsets[at])
        assert everything.positions() == {0: offsets[at]}
        assert number_of(read(everything, 1, max_bytes=1)[0]) == at
    everything.close()
    log.close()


def test_a_subscription_follows_the_end(opener: Opener) -> None:
    log = opener()
    subscription = log.subscribe(dict.fromkeys(range(P), 0))
    assert subscription.poll(max_bytes=1 << 20, timeout=0.01) == []
    for number in range(20):
        publish(log, number, partition=2)
        assert [number_of(event) for event in read(subscription, 1)] == [number]
    subscription.close()
    log.close()


def test_a_poll_waits_for_the_first_message_or_its_timeout(opener: Opener) -> None:
    log = opener()
    subscription = log.subscribe({0: 0})
    start = time.monotonic()
    assert subscription.poll(max_bytes=1 << 20, timeout=0.2) == []
    assert 0.15 < time.monotonic() - start < 20

    timer = threading.Timer(0.1, publish, (log, 1))
    timer.start()
    start = time.monotonic()
    assert len(subscription.poll(max_bytes=1 << 20, timeout=60)) == 1
    assert time.monotonic() - start < 50
    timer.join()
    subscription.close()
    log.close()


def test_polls_are_bounded_and_fair(opener: Opener) -> None:
    log = opener()
    for number in range(90):
        log.publish(number % P, message(number, 1000))
    log.flush()
    subscription = log.subscribe(dict.fromkeys(range(P), 0))
    remaining = dict.fromkeys(range(P), 30)
    seen: set[int] = set()
    deadline = time.monotonic() + 60
    while any(remaining.values()):
        assert time.monotonic() < deadline, remaining
        events = subscription.poll(max_bytes=9000, timeout=0.1)
        assert len(events) <= 15
        partitions = {event.partition for event in events}
        # Every partition that has messages is in every poll.
        assert partitions >= {p for p in seen if remaining[p]}
        seen |= partitions
        for event in events:
            remaining[event.partition] -= 1
    assert list(remaining.values()) == [0] * P
    subscription.close()
    log.close()


def test_pause_and_resume(opener: Opener) -> None:
    log = opener()
    subscription = log.subscribe({0: 0, 1: 0})
    subscription.pause(0)
    for partition in (0, 1):
        log.publish(partition, message(partition))
    log.flush()
    assert [event.partition for event in read(subscription, 1)] == [1]
    assert subscription.poll(max_bytes=1 << 20, timeout=0.05) == []
    subscription.resume(0)
    assert [event.partition for event in read(subscription, 1)] == [0]
    subscription.close()
    log.close()


def test_bounds_and_last_message(opener: Opener) -> None:
    log = opener()
    assert log.start_offsets([0, 1]) == {0: 0, 1: 0}
    assert log.end_offsets([0, 1]) == {0: 0, 1: 0}
    assert log.last_messages(range(P)) == {}
    for number in range(30):
        publish(log, number, size=1000)
        last = log.last_messages([0, 1])
        assert list(last) == [0]
        assert last[0].headers[0] == ("n", str(number).encode())
    publish(log, 99, partition=1)
    last = log.last_messages(range(P))
    assert [last[p].headers[0][1] for p in last] == [b"29", b"99"]
    assert log.end_offsets([0])[0] >= 30
    log.close()


def test_a_position_beyond_the_end_is_lost(opener: Opener) -> None:
    log = opener()
    publish(log, 0)
    end = log.end_offsets([0])[0]
    subscription = log.subscribe({0: end + 5})
    (event,) = read(subscription, 1)
    assert isinstance(event, Lost)
    assert (event.offset, event.end) == (end + 5, end)
    assert "was replaced or lost its end" in event.reason
    assert subscription.poll(max_bytes=1 << 20, timeout=0.05) == []  # no event until a seek
    subscription.seek(0, 0)
    assert number_of(read(subscription, 1)[0]) == 0
    subscription.close()
    log.close()


def test_an_unknown_partition_is_refused(opener: Opener) -> None:
    log = opener()
    for partition in (-1, P):
        with pytest.raises(InvalidArgument, match=r"has partitions 0 to 2, not"):
            log.publish(partition, message(0))
        with pytest.raises(InvalidArgument, match=r"has partitions 0 to 2, not"):
            log.subscribe({partition: 0})
    log.close()


def test_two_subscriptions_are_independent(opener: Opener) -> None:
    log = opener()
    publish(log, *range(10))
    first, second = log.subscribe({0: 0}), log.subscribe({0: 0})
    assert [number_of(event) for event in read(first, 10)] == list(range(10))
    assert [number_of(event) for event in read(second, 10)] == list(range(10))
    first.close()
    second.close()
    log.close()
