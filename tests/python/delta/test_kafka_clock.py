"""A reader of Kafka while the system's clock jumps: it waits by no clock that does."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from petps.delta.kafka import subscription as module
from petps.delta.kafka.subscription import KafkaSubscription


class Queue:
    """Stand-in for librdkafka's consumer, whose queue is empty for some looks."""

    def __init__(self, empty: int) -> None:
        self.empty = empty
        self.positions: list[Any] = []
        self.closed = threading.Event()

    def assign(self, positions: list[Any]) -> None:
        self.positions = [(position.partition, position.offset) for position in positions]

    def consume(self, count: int, timeout: float) -> list[Any]:
        assert timeout == 0
        return []

    def poll(self, timeout: float) -> Any:
        assert timeout == 0, "librdkafka waits by the system's clock"
        self.empty -= 1
        if self.empty != 0:
            return None
        return SimpleNamespace(
            error=lambda: None, partition=lambda: 0, offset=lambda: 7, headers=lambda: None,
            key=lambda: None, value=lambda: b"row", timestamp=lambda: (1, 0),
        )  # fmt: skip

    def close(self) -> None:
        self.closed.set()


def subscribe(
    monkeypatch: pytest.MonkeyPatch, empty: int = 0
) -> tuple[KafkaSubscription, list[Queue]]:
    queues: list[Queue] = []

    def make(*arguments: Any) -> Queue:
        queues.append(Queue(empty if not queues else 0))
        return queues[-1]

    monkeypatch.setattr(module, "make_client", make)
    monkeypatch.setattr(module, "message_of", lambda message: message)
    monkeypatch.setattr(module, "_size", lambda event: 1)
    reader = KafkaSubscription("the log", "t", {}, {0: 7}, lambda partition: (0, 0), commits=False)
    return reader, queues


def test_a_message_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, _ = subscribe(monkeypatch, empty=3)
    (event,) = reader.poll(max_bytes=100, timeout=60)
    assert event.offset == 7


@pytest.mark.parametrize("jump", [-86_400.0, -5.0, 5.0, 600.0])
def test_a_jump_of_the_clock_begins_again_where_the_reader_was(
    monkeypatch: pytest.MonkeyPatch, jump: float, caplog: pytest.LogCaptureFixture
) -> None:
    reader, queues = subscribe(monkeypatch, empty=1)
    assert len(reader.poll(max_bytes=100, timeout=60)) == 1
    assert queues[0].positions == [(0, 7)]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert reader.poll(max_bytes=100, timeout=0.02) == []
    assert [queue.positions for queue in queues] == [[(0, 7)], [(0, 8)]]
    assert queues[0].closed.wait(60)
    assert f"clock jumped by {jump:+.1f} s, so the reader of the log" in caplog.text
    assert reader.poll(max_bytes=100, timeout=0.02) == []
    assert len(queues) == 2


def test_a_clock_that_is_slewed_is_no_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, queues = subscribe(monkeypatch)
    real, looks = time.time, [0]

    def slewed() -> float:
        looks[0] += 1
        return real() + looks[0] * 0.5

    monkeypatch.setattr(time, "time", slewed)
    for _ in range(10):
        assert reader.poll(max_bytes=100, timeout=0) == []
    assert len(queues) == 1
