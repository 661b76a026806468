"""The Kafka log: a DeltaLog in one topic."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from petps.delta.headers import Message
from petps.delta.kafka.client import KafkaAdmin, LastError, make_client
from petps.delta.kafka.errors import as_petps
from petps.delta.kafka.options import KafkaOptions, parse_address
from petps.delta.kafka.subscription import KafkaSubscription, message_of
from petps.delta.schema import MAX_PARTITIONS
from petps.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)

__all__ = ["KafkaLog"]

POLL_SECONDS: Final = 0.1  # between two checks for errors of the brokers during a wait
CREATE_SECONDS: Final = 30.0  # until all brokers know a topic that was just created
READ_SECONDS: Final = 10.0  # to read the last message of each partition
RETRY_SECONDS: Final = 2.0  # if the brokers are unreachable, requests fail at once for this time


class KafkaLog:
    """A delta log in a Kafka topic, kafka://host:port[,host:port]/topic.

    The log contacts the brokers at its first use, so it can be opened while they are unreachable.

    Args:
        location: The address of the topic.
        partitions: P, if the caller knows it.
        create: Whether to create a missing topic with ``partitions`` partitions.
        options: librdkafka's settings by name, and topic.<setting> for a new topic (FORMAT.md).

    Raises, now or at the first use:
        InvalidArgument: A wrong address or option, or another number of partitions.
        NotFound: The topic does not exist.
        PermissionDenied: A wrong password or certificate, or missing rights.
        Unavailable: The brokers do not answer.
    """

    def __init__(
        self,
        location: str,
        *,
        partitions: int | None = None,
        create: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if partitions is not None and not 1 <= partitions <= MAX_PARTITIONS:
            raise InvalidArgument(f"{partitions} partitions are outside 1..{MAX_PARTITIONS}")
        self._address = parse_address(location)
        self._options = KafkaOptions(options)
        self._expected_partitions = partitions
        self._create = create
        self._admin = KafkaAdmin(self._address, self._options, self.name)
        self._partitions = 0  # 0: not requested yet
        self._last_error = LastError()
        self._producer: Producer | None = None
        self._failed: KafkaError | None = None
        self._has_raised = False  # whether a call has raised the error of _failed
        self._closed = False
        self._unreachable: Unavailable | None = None
        self._unreachable_until = 0.0
        self._mutex = threading.Lock()
        self._connecting = threading.Lock()

    def __enter__(self) -> KafkaLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """See DeltaLog."""
        return f"Kafka log {self._address}"

    @property
    def partitions(self) -> int:
        """See DeltaLog. Returns the number that the caller gave, or else the topic's."""
        return (
            self._expected_partitions if self._expected_partitions is not None else self._connect()
        )

    def _connect(self) -> int:
        """Return P of the topic, and create the topic if allowed. Later calls send no request."""
        with self._connecting:
            if self._partitions == 0:
                try:
                    count = self._admin.partitions()
                except NotFound:
                    if self._expected_partitions is None or not self._create:
                        raise
                    count = self._create_topic(self._expected_partitions)
                if self._expected_partitions is not None and count != self._expected_partitions:
                    raise InvalidArgument(
                        f"{self.name} has {count} partitions, not {self._expected_partitions}: the "
                        "number can never change; use another topic"
                    )
                self._partitions = count
            return self._partitions

    def _create_topic(self, partitions: int) -> int:
        with contextlib.suppress(AlreadyExists):  # another publisher created it first
            self._admin.create(partitions)
        deadline = time.monotonic() + CREATE_SECONDS
        while True:
            try:
                count = self._admin.partitions()
                self._admin.offsets(range(count), start=True)  # succeeds once all have leaders
                return count
            except NotFound:
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL_SECONDS)

    def publish(self, partition: int, message: Message) -> None:
        """See DeltaLog. Waits while the queue of unacknowledged messages is full."""
        self._check_partition(partition)
        with self._mutex:
            self._check()
            producer = self._producer or self._make_producer()
            headers: list[tuple[str, bytes | str | None]] = list(message.headers)
            body = bytes(message.body)
            while True:
                try:
                    producer.produce(
                        self._address.topic, value=body, partition=partition, headers=headers
                    )
                    break
                except BufferError:
                    producer.poll(POLL_SECONDS)
                except KafkaException as error:
                    raise as_petps(error.args[0], self.name) from None
                self._check()
            producer.poll(0)

    def _make_producer(self) -> Producer:
        settings = {
            **self._options.producer(self._address),
            "on_delivery": self._on_delivery,
            "delivery.report.only.error": True,
        }
        self._producer = make_client(Producer, settings, self._last_error)
        return self._producer

    def _on_delivery(self, error: KafkaError | None, message: object) -> None:
        if error is not None and self._failed is None:
            self._failed = error
            # Readers must not receive messages that follow a missing one.
            assert self._producer is not None
            self._producer.purge(blocking=False)

    def flush(self) -> None:
        """See DeltaLog. Returns once all in-sync replicas have acknowledged every message."""
        with self._mutex:
            self._flush()

    def _flush(self) -> None:
        self._check()
        while self._producer is not None and self._producer.flush(POLL_SECONDS):
            self._check()
        self._check()

    def _check(self) -> None:
        if self._closed:
            raise FailedPrecondition(f"{self.name}: the log is closed")
        self._last_error.raise_denied(self.name)
        if self._failed is not None:
            self._has_raised = True
            raise as_petps(self._failed, f"{self.name}: a message was not delivered")

    def _check_partition(self, partition: int) -> None:
        count = self._connect()
        if not 0 <= partition < count:
            raise InvalidArgument(f"{self.name} has partitions 0 to {count - 1}, not {partition}")

    def subscribe(self, positions: Mapping[int, int]) -> KafkaSubscription:
        """See DeltaLog."""
        for partition in positions:
            self._check_partition(partition)
        return KafkaSubscription(
            self.name,
            self._address.topic,
            self._options.consumer(self._address),
            positions,
            self._bounds,
            commits=self._options.group is not None,
        )

    def _bounds(self, partition: int) -> tuple[int, int]:
        return (
            self._admin.offsets([partition], start=True)[partition],
            self._admin.offsets([partition], start=False)[partition],
        )

    def start_offsets(self, partitions: Sequence[int]) -> dict[int, int]:
        """See DeltaLog."""
        return self._offsets(partitions, start=True)

    def end_offsets(self, partitions: Sequence[int]) -> dict[int, int]:
        """See DeltaLog."""
        return self._offsets(partitions, start=False)

    def _offsets(self, partitions: Sequence[int], *, start: bool) -> dict[int, int]:
        # Status calls this every second. It must not block each time while brokers are unreachable.
        unreachable = self._unreachable  # read once, because another thread may clear it
        if unreachable is not None and time.monotonic() < self._unreachable_until:
            raise unreachable
        try:
            for partition in partitions:
                self._check_partition(partition)
            offsets = self._admin.offsets(partitions, start=start)
        except Unavailable as error:
            self._unreachable = error
            self._unreachable_until = time.monotonic() + RETRY_SECONDS
            raise
        self._unreachable = None
        return offsets

    def last_messages(self, partitions: Sequence[int]) -> dict[int, Message]:
        """See DeltaLog. Reads all partitions at once."""
        for partition in partitions:
            self._check_partition(partition)
        starts = self._admin.offsets(partitions, start=True)
        ends = self._admin.offsets(partitions, start=False)
        messages: dict[int, Message] = {}
        missing = [p for p in partitions if ends[p] > starts[p]]
        step = 1
        # The last offsets may be a transaction's markers, so read from further back in each round.
        while missing:
            first_offsets = {p: max(starts[p], ends[p] - step) for p in missing}
            messages.update(self._last_from(first_offsets, ends))
            missing = [p for p in missing if p not in messages and first_offsets[p] > starts[p]]
            step *= 2
        return {partition: messages[partition] for partition in partitions if partition in messages}

    def _last_from(self, first_offsets: dict[int, int], ends: dict[int, int]) -> dict[int, Message]:
        """Return the last message of each partition, if it is at its first offset or later."""
        settings = self._options.consumer(self._address)
        settings |= {"enable.partition.eof": True, "fetch.wait.max.ms": 10}
        last_error = LastError()
        reader: Consumer = make_client(Consumer, settings, last_error)
        messages: dict[int, Message] = {}
        unread = set(first_offsets)
        deadline = time.monotonic() + READ_SECONDS
        try:
            reader.assign(
                [
                    TopicPartition(self._address.topic, p, offset)
                    for p, offset in first_offsets.items()
                ]
            )
            while unread:
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"{self.name}: the last messages could not be read in "
                        f"{READ_SECONDS:.0f} s; check that the brokers are up"
                    )
                message = reader.poll(POLL_SECONDS)
                last_error.raise_denied(self.name)
                if message is None:
                    continue
                partition, error = message.partition(), message.error()
                assert partition is not None
                if error is None:
                    with contextlib.suppress(UnicodeDecodeError):  # not a message of petps
                        messages[partition] = message_of(message)
                    if (message.offset() or 0) >= ends[partition] - 1:
                        unread.discard(partition)
                elif error.code() in (KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET):
                    unread.discard(partition)  # read to its end, or retention removed the offset
                elif not error.retriable():
                    raise as_petps(error, self.name)
        finally:
            reader.close()
        return messages

    def close(self) -> None:
        """See DeltaLog."""
        with self._mutex:
            if self._closed:
                return
            try:
                if not self._has_raised:
                    self._flush()
            finally:
                self._closed = True
                if self._producer is not None:
                    self._producer.purge()
                    self._producer.flush(POLL_SECONDS)
                    self._producer = None
