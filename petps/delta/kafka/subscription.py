"""Reader of assigned partitions, which takes messages of librdkafka's queue fairly and bounded."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, TopicPartition

from petps.delta.headers import Message
from petps.delta.kafka.client import LastError, kafka_logger, make_client
from petps.delta.kafka.errors import DENIED, as_petps
from petps.delta.log import Damage, Delivery, Event, Lost

__all__ = ["KafkaSubscription", "message_of"]

# Bytes to take from librdkafka at least, so that small polls see all partitions with messages.
BUFFER_BYTES_MIN: Final = 4 << 20
FIRST_SIZE_GUESS: Final = 1 << 20
COMMIT_SECONDS: Final = 1.0  # between two commits for observers
# Between two looks at librdkafka's queue. It is never asked to wait itself: it does so by the
# system's clock, and if that is set back, it waits for as long as the clock goes back.
LOOK_SECONDS: Final = 0.005
CLOCK_JUMP_SECONDS: Final = 1.0  # of the system's clock, between two looks
STALL_SECONDS: float = 30.0  # without a message, although the log has more: log a warning
_BEYOND: Final = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})
_LOST: Final = _BEYOND | {KafkaError._LOG_TRUNCATION}
# librdkafka's errors for a batch with altered bytes: an unknown codec or format. For a wrong length
# it reports that no fetch is large enough.
_DAMAGED: Final = frozenset(
    {
        KafkaError._BAD_MSG,
        KafkaError._BAD_COMPRESSION,
        KafkaError._NOT_IMPLEMENTED,
        KafkaError.INVALID_MSG,
        KafkaError.MSG_SIZE_TOO_LARGE,
    }
)


class KafkaSubscription:
    """See Subscription. ``bounds`` returns (start, end) of a partition; ``name`` is the log's."""

    def __init__(
        self,
        name: str,
        topic: str,
        settings: Mapping[str, Any],
        positions: Mapping[int, int],
        bounds: Callable[[int], tuple[int, int]],
        *,
        commits: bool,
    ) -> None:
        self._name = name
        self._topic = topic
        self._bounds = bounds
        self._commits = commits
        self._commit_at = 0.0
        self._last_error = LastError()
        self._settings = settings
        self._consumer: Consumer = make_client(Consumer, settings, self._last_error)
        self._next = dict(positions)  # offset of the next event to return
        self._tail = dict(positions)  # offset of the next event to take from librdkafka
        self._buffers: dict[int, deque[Event]] = {partition: deque() for partition in positions}
        self._buffered = 0
        self._size_guess = FIRST_SIZE_GUESS
        self._paused: set[int] = set()
        # The partitions that librdkafka reads: neither the paused nor the lost ones. The buffers
        # hold nothing of a paused partition either, since it would take the room of the others.
        self._assigned = set(positions)
        self._rotation = 0
        # By partition: an offset that was assigned a second time.
        self._reassigned: dict[int, int] = {}
        # By partition: its tail, and the time since when the tail has not moved although
        # librdkafka's queue was empty at each poll.
        self._stalled_tails: dict[int, tuple[int, float]] = {}
        self._last_poll = time.monotonic()
        self._pause = threading.Event()  # never set
        self._clock = time.time() - time.monotonic()
        self._consumer.assign([self._place(p, offset) for p, offset in positions.items()])

    def _place(self, partition: int, offset: int) -> TopicPartition:
        return TopicPartition(self._topic, partition, offset)

    def poll(self, *, max_bytes: int, timeout: float) -> list[Event]:
        """See Subscription. Raises errors that a retry does not fix: no rights, no topic."""
        deadline = time.monotonic() + timeout
        while True:
            self._check_clock()
            is_empty = self._take_over(max_bytes)
            events = self._deal(max_bytes)
            remaining = deadline - time.monotonic()
            if events or remaining <= 0:
                self._warn_of_stalls(is_empty)
                self._last_error.raise_denied(self._name)
                return events
            self._pause.wait(min(remaining, LOOK_SECONDS))
            message = self._consumer.poll(0)
            if message is not None:
                self._add(message)
            self._last_error.raise_denied(self._name)

    def _check_clock(self) -> None:
        """Begin again with a new client if the system's clock has jumped.

        The threads of the old one may wait for as long as it jumped.
        """
        before, self._clock = self._clock, time.time() - time.monotonic()
        jump = self._clock - before
        if abs(jump) < CLOCK_JUMP_SECONDS:
            return
        kafka_logger.warning(
            "[kafka] the system's clock jumped by %+.1f s, so the reader of %s begins again with a "
            "new client: check the time service",
            jump, self._name,
        )  # fmt: skip
        threading.Thread(target=self._consumer.close, name="petps-kafka-close", daemon=True).start()
        self._consumer = make_client(Consumer, self._settings, self._last_error)
        self._consumer.assign([self._place(p, self._tail[p]) for p in sorted(self._assigned)])

    def _take_over(self, max_bytes: int) -> bool:
        """Take messages from librdkafka up to a limit. Return whether it has no more."""
        limit = max(max_bytes, BUFFER_BYTES_MIN)
        while self._buffered < limit:
            count = 1 + (limit - self._buffered) // self._size_guess
            messages = self._consumer.consume(min(count, 10_000), 0)
            if not messages:
                return True
            before = self._buffered
            # Ignore the other messages of a reassigned partition: they precede the reassignment.
            reassigned: set[int | None] = set()
            for message in messages:
                if message.partition() not in reassigned and self._add(message):
                    reassigned.add(message.partition())
            self._size_guess = max(100, (self._buffered - before) // len(messages))
        return False

    def _add(self, message: Any) -> bool:
        """Buffer a message. Return whether its partition was reassigned to another offset."""
        error = message.error()
        partition = message.partition()
        if error is not None:
            return self._add_error(error, partition)
        if partition not in self._assigned:
            return False
        offset = message.offset()
        self._tail[partition] = offset + 1
        event: Event
        try:
            event = Delivery(partition, offset, offset + 1, message_of(message))
        except UnicodeDecodeError:
            event = Damage(partition, offset, offset + 1, "a header's name is not UTF-8")
        self._buffered += _size(event)
        self._buffers[partition].append(event)
        return False

    def _add_error(self, error: KafkaError, partition: int | None) -> bool:
        code = error.code()
        if code in _LOST | _DAMAGED and partition in self._buffers:
            if partition not in self._assigned:
                return False
            offset = self._tail[partition]
            if code in _LOST:
                self._unassign(partition)
                start, end = self._bounds(partition)
                is_inside = code in _BEYOND and start <= offset <= end
                if is_inside and self._reassigned.get(partition) != offset:
                    # The error names a false offset of a damaged batch, or is about an earlier
                    # position. Assign the same offset once more.
                    self._reassigned[partition] = offset
                    self._assign(partition, offset)
                    return True
                if not is_inside or offset == end:
                    self._buffers[partition].append(Lost(partition, offset, start, end))
                    return True
            # The number of messages in the damaged batch is unknown, so skip one offset at a time.
            # librdkafka reports the same batch until all of it is skipped. It also reports offsets
            # that it reads from the damaged bytes and that do not exist.
            self._buffers[partition].append(Damage(partition, offset, offset + 1, error.str()))
            self._tail[partition] = offset + 1
            self._assign(partition, offset + 1)
            return True
        if code == KafkaError.GROUP_AUTHORIZATION_FAILED and not self._commits:
            return False  # no group is used
        if code in DENIED or not error.retriable():
            raise as_petps(error, self._name)
        return False

    def _warn_of_stalls(self, is_empty: bool) -> None:
        """Warn once about each partition that makes no progress although its log has more.

        librdkafka does not report unreadable records within a readable batch. The check sends no
        request: every fetch response has the log's end, even if it has no message.
        """
        now = time.monotonic()
        pause_seconds, self._last_poll = now - self._last_poll, now
        if not is_empty or pause_seconds > STALL_SECONDS / 3:
            self._stalled_tails.clear()
            return
        for partition in self._assigned:
            tail = self._tail[partition]
            last_tail, since = self._stalled_tails.get(partition, (None, now))
            if tail != last_tail:
                self._stalled_tails[partition] = tail, now
            elif now - since >= STALL_SECONDS:
                _, end = self._consumer.get_watermark_offsets(
                    self._place(partition, 0), cached=True
                )
                self._stalled_tails[partition] = tail, now
                if tail < end:
                    self._stalled_tails[partition] = tail, math.inf  # warn once
                    kafka_logger.warning(
                        "%s, partition %d: no message from offset %d on for %.0f s, but the log "
                        "ends at %d: brokers or network are slow, only a transaction's markers "
                        'follow, or the log is damaged there ("Damaged lengths" in petps/delta/'
                        "kafka/FORMAT.md)",
                        self._name, partition, tail, now - since, end,
                    )  # fmt: skip

    def _deal(self, max_bytes: int) -> list[Event]:
        """Return buffered events: at most a share for each partition, in rotating order."""
        ready = [p for p, buffer in self._buffers.items() if buffer]
        if not ready:
            return []
        self._rotation = (self._rotation + 1) % len(ready)
        share = max(1, max_bytes // len(ready))
        events: list[Event] = []
        for partition in ready[self._rotation :] + ready[: self._rotation]:
            buffer, dealt_bytes = self._buffers[partition], 0
            while buffer and dealt_bytes < share:
                event = buffer.popleft()
                size = _size(event)
                dealt_bytes += size
                self._buffered -= size
                if not isinstance(event, Lost):
                    self._next[partition] = event.next_offset
                events.append(event)
        return events

    def _assign(self, partition: int, offset: int) -> None:
        """Continue at ``offset``, and drop what librdkafka has read of the partition."""
        self._unassign(partition)
        self._consumer.incremental_assign([self._place(partition, offset)])
        self._assigned.add(partition)

    def _unassign(self, partition: int) -> None:
        if partition in self._assigned:
            self._stalled_tails.pop(partition, None)
            self._consumer.incremental_unassign([self._place(partition, 0)])
            self._assigned.discard(partition)

    def _drop(self, partition: int, offset: int) -> None:
        """Drop the partition's buffer, and make ``offset`` the offset of its next event."""
        buffer = self._buffers[partition]
        self._buffered -= sum(_size(event) for event in buffer)
        buffer.clear()
        self._next[partition] = self._tail[partition] = offset

    def seek(self, partition: int, offset: int) -> None:
        """See Subscription."""
        self._drop(partition, offset)
        if partition not in self._paused:
            self._assign(partition, offset)

    def positions(self) -> dict[int, int]:
        """See Subscription."""
        return dict(self._next)

    def pause(self, partition: int) -> None:
        """See Subscription."""
        self._paused.add(partition)
        self._unassign(partition)
        self._drop(partition, self._next[partition])

    def resume(self, partition: int) -> None:
        """See Subscription."""
        if partition in self._paused:
            self._paused.discard(partition)
            self._assign(partition, self._next[partition])

    def observe(self, positions: Mapping[int, int]) -> None:
        """See Subscription. Commits the positions to the group of option group.id, if it is set."""
        now = time.monotonic()
        if self._commits and now >= self._commit_at:
            self._commit_at = now + COMMIT_SECONDS
            offsets = [self._place(partition, offset) for partition, offset in positions.items()]
            self._consumer.commit(offsets=offsets, asynchronous=True)

    def close(self) -> None:
        """See Subscription."""
        self._consumer.close()


def message_of(message: Any) -> Message:
    """Convert a message of Kafka to one of petps; missing values become empty."""
    headers = [(name, value or b"") for name, value in message.headers() or []]
    return Message(headers, message.value() or b"")


def _size(event: Event) -> int:
    return event.message.size if isinstance(event, Delivery) else 0
