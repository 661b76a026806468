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


def number_of(event: Event) -> int:
    assert isinstance(event, Delivery), event
    found = event.message
    assert found.headers[1:] == [("binary", b"\x00\xff"), ("empty", b"")]
    number = int(found.headers[0][1])
    assert bytes(found.body) == number.to_bytes(8, "little") * (len(found.body) // 8)
    return number


def read(subscription: Subscription, count: int, max_bytes: int = 1 << 20) -> list[Event]:
    events: list[Event] = []
    deadline = time.monotonic() + 60
    while len(events) < count:
        assert time.monotonic() < deadline, f"{len(events)} of {count} events in 60 s"
        events += subscription.poll(max_bytes=max_bytes, timeout=0.1)
    return events


def test_reads_what_was_published_in_order(opener: Opener) -> None:
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


def test_survives_close_and_open(opener: Opener) -> None:
    for round_number in range(4):
        log = opener()
        for number in range(10):
            log.publish(1, message(round_number * 10 + number, 1000))
        log.flush()
        log.close()
    log = opener()
    assert log.partitions == P
    subscription = log.subscribe({1: 0})
    assert [number_of(event) for event in read(subscription, 40)] == list(range(40))
    subscription.close()
    log.close()


def test_starts_at_any_offset_and_seeks(opener: Opener) -> None:
    log = opener()
    for number in range(60):
        log.publish(0, message(number, 600))
    log.flush()
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


def test_tails(opener: Opener) -> None:
    log = opener()
    subscription = log.subscribe(dict.fromkeys(range(P), 0))
    assert subscription.poll(max_bytes=1 << 20, timeout=0.01) == []
    for number in range(20):
        log.publish(2, message(number))
        log.flush()
        assert [number_of(event) for event in read(subscription, 1)] == [number]
    subscription.close()
    log.close()


def test_poll_waits_for_the_first_message_and_not_longer(opener: Opener) -> None:
    log = opener()
    subscription = log.subscribe({0: 0})
    began = time.monotonic()
    assert subscription.poll(max_bytes=1 << 20, timeout=0.2) == []
    assert 0.15 < time.monotonic() - began < 20

    def publish() -> None:
        time.sleep(0.1)
        log.publish(0, message(1))
        log.flush()

    thread = threading.Thread(target=publish)
    thread.start()
    began = time.monotonic()
    assert len(subscription.poll(max_bytes=1 << 20, timeout=60)) == 1
    assert time.monotonic() - began < 50
    thread.join()
    subscription.close()
    log.close()


def test_a_poll_is_bounded_and_fair(opener: Opener) -> None:
    log = opener()
    for number in range(90):
        log.publish(number % P, message(number, 1000))
    log.flush()
    subscription = log.subscribe(dict.fromkeys(range(P), 0))
    left = dict.fromkeys(range(P), 30)
    seen: set[int] = set()
    deadline = time.monotonic() + 10
    while any(left.values()):
        assert time.monotonic() < deadline, left
        events = subscription.poll(max_bytes=9000, timeout=0.1)
        assert len(events) <= 15
        partitions = {event.partition for event in events}
        # Every partition that has messages is in every poll.
        assert partitions >= {p for p in seen if left[p]}
        seen |= partitions
        for event in events:
            left[event.partition] -= 1
    assert list(left.values()) == [0] * P
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
        log.publish(0, message(number, 1000))
        log.flush()
        last = log.last_messages([0, 1])
        assert list(last) == [0]
        assert last[0].headers[0] == ("n", str(number).encode())
    log.publish(1, message(99))
    log.flush()
    assert [found.headers[0][1] for found in log.last_messages(range(P)).values()] == [b"29", b"99"]
    assert log.end_offsets([0])[0] >= 30
    log.close()


def test_a_position_behind_the_end_is_lost(opener: Opener) -> None:
    log = opener()
    log.publish(0, message(0))
    log.flush()
    end = log.end_offsets([0])[0]
    subscription = log.subscribe({0: end + 5})
    (event,) = read(subscription, 1)
    assert isinstance(event, Lost)
    assert (event.offset, event.end) == (end + 5, end)
    assert "was replaced or lost its end" in event.reason
    assert subscription.poll(max_bytes=1 << 20, timeout=0.05) == []  # nothing comes until seek
    subscription.seek(0, 0)
    assert number_of(read(subscription, 1)[0]) == 0
    subscription.close()
    log.close()


def test_unknown_partition(opener: Opener) -> None:
    log = opener()
    for partition in (-1, P):
        with pytest.raises(InvalidArgument, match=r"has partitions 0 to 2, not"):
            log.publish(partition, message(0))
        with pytest.raises(InvalidArgument, match=r"has partitions 0 to 2, not"):
            log.subscribe({partition: 0})
    log.close()


def test_two_subscriptions_do_not_disturb_each_other(opener: Opener) -> None:
    log = opener()
    for number in range(10):
        log.publish(0, message(number))
    log.flush()
    first, second = log.subscribe({0: 0}), log.subscribe({0: 0})
    assert [number_of(event) for event in read(first, 10)] == list(range(10))
    assert [number_of(event) for event in read(second, 10)] == list(range(10))
    first.close()
    second.close()
    log.close()
