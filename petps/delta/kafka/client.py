"""Requests about one topic: its partitions, their bounds, and its creation."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewTopic

from petps.delta.kafka.errors import DENIED, MOVING, as_petps
from petps.delta.kafka.options import KafkaAddress, KafkaOptions
from petps.errors import AlreadyExists, PermissionDenied, PetpsError, Unavailable

__all__ = ["KafkaAdmin", "LastError", "TopicFacts", "kafka_logger"]

REQUEST_SECONDS = 5.0  # brokers that do not answer for longer count as unreachable
POLL_SECONDS: Final = 0.05

kafka_logger = logging.getLogger("petps.delta.kafka")
# Suppress warnings about options that one kind of client does not know, and messages about failed
# connections: the errors that petps raises give the reason, once.
kafka_logger.addFilter(lambda record: not record.getMessage().startswith(("CONFWARN", "FAIL")))


class LastError:
    """The last error that a client reported outside of calls (librdkafka's error_cb)."""

    def __init__(self) -> None:
        self.last: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        """Store the error. librdkafka calls this during a poll of the client."""
        # "All brokers down" follows the reason, and has less information.
        if self.last is None or error.code() != KafkaError._ALL_BROKERS_DOWN:
            self.last = error

    def raise_denied(self, name: str) -> None:
        """Raise the last error if a retry cannot succeed. ``name`` names the log."""
        if self.last is not None and self.last.code() in DENIED:
            error, self.last = self.last, None
            raise as_petps(error, name)


def make_client(kind: Any, settings: Mapping[str, Any], last_error: LastError) -> Any:
    """Return a client of librdkafka. Raises InvalidArgument that names a refused option."""
    try:
        return kind({**settings, "error_cb": last_error}, logger=kafka_logger)
    except KafkaException as error:
        raise as_petps(error.args[0], "Kafka options") from None


@dataclass(frozen=True)
class TopicFacts:
    """A topic that exists, as the brokers describe it."""

    partitions: int
    replicas: int
    """Of the partition that has the fewest."""
    in_sync: int
    """Replicas that have everything, of the partition that has the fewest."""
    settings: Mapping[str, str]
    """'retention.ms' and the others, by Kafka's names; empty if they may not be read."""


class _Moving(Unavailable):
    """Error of a partition that has no leader yet; the caller retries."""


class KafkaAdmin:
    """Requests to the brokers about one topic. Every request has a time limit."""

    def __init__(self, address: KafkaAddress, options: KafkaOptions, name: str) -> None:
        self._address = address
        self._options = options
        self._name = name
        self._last_error = LastError()
        self._client = self._connect()

    def _connect(self) -> AdminClient:
        client: AdminClient = make_client(
            AdminClient, self._options.common(self._address), self._last_error
        )
        return client

    def partitions(self) -> int:
        """Return P of the topic. Raises NotFound, PermissionDenied, Unavailable."""
        topic = self._address.topic
        topics = TopicCollection([topic])
        futures = self._client.describe_topics(topics, request_timeout=REQUEST_SECONDS)
        return len(self._answer(futures[topic]).partitions)

    def describe(self) -> TopicFacts:
        """Return what is known of the topic. Raises as partitions() does."""
        topic = self._address.topic
        topics = TopicCollection([topic])
        futures = self._client.describe_topics(topics, request_timeout=REQUEST_SECONDS)
        partitions = self._answer(futures[topic]).partitions
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        asked = self._client.describe_configs([resource], request_timeout=REQUEST_SECONDS)
        try:
            entries = self._answer(asked[resource])
        except PermissionDenied:  # to describe a topic and to see its settings are two rights
            entries = {}
        return TopicFacts(
            partitions=len(partitions),
            replicas=min((len(partition.replicas) for partition in partitions), default=0),
            in_sync=min((len(partition.isr) for partition in partitions), default=0),
            settings={name: entry.value or "" for name, entry in entries.items()},
        )

    def create(self, partitions: int) -> None:
        """Create the topic. Raises AlreadyExists, or the brokers' error."""
        settings = dict(self._options.topic)
        replication = int(settings.pop("replication.factor"))
        topic = NewTopic(
            self._address.topic,
            num_partitions=partitions,
            replication_factor=replication,
            config=settings,
        )
        self._answer(
            self._client.create_topics([topic], request_timeout=REQUEST_SECONDS)[
                self._address.topic
            ]
        )

    def offsets(self, partitions: Sequence[int], *, start: bool) -> dict[int, int]:
        """Return by partition the oldest retained offset, or the offset of the next message."""
        if not partitions:
            return {}
        specs: Any = OffsetSpec
        spec = specs.earliest() if start else specs.latest()
        requests = {TopicPartition(self._address.topic, p): spec for p in partitions}
        deadline = time.monotonic() + REQUEST_SECONDS
        while True:
            client = self._client  # keep the client alive until it has answered
            futures = client.list_offsets(
                requests,
                isolation_level=IsolationLevel.READ_COMMITTED,
                request_timeout=REQUEST_SECONDS,
            )
            try:
                return {
                    place.partition: self._answer(future).offset
                    for place, future in futures.items()
                }
            except _Moving as moving:  # the partition is choosing its leader
                if time.monotonic() > deadline:
                    raise self._unreachable(str(moving)) from None
                # Reconnect, because the old client would retry with its old leader epoch.
                self._client = self._connect()
            time.sleep(POLL_SECONDS)

    def _answer(self, future: Future[Any]) -> Any:
        deadline = time.monotonic() + REQUEST_SECONDS
        while True:
            try:
                answer = future.result(POLL_SECONDS)
                break
            except TimeoutError:
                self._client.poll(0)  # calls error_cb
                self._last_error.raise_denied(self._name)
                if time.monotonic() > deadline:
                    raise self._unreachable("no answer") from None
            except KafkaException as error:
                self._client.poll(0)
                self._last_error.raise_denied(self._name)
                if error.args[0].code() in MOVING:
                    raise _Moving(error.args[0].str()) from None
                if error.args[0].code() == KafkaError._NOENT:  # "No leaders found"
                    # Once a client knows a partition without a leader, it may never ask again:
                    # also not when the brokers are back. The next request uses a new client.
                    self._client = self._connect()
                    raise self._unreachable(error.args[0].str()) from None
                raise self._translate(error.args[0]) from None
        self._last_error.last = None
        return answer

    def _translate(self, error: KafkaError) -> PetpsError:
        if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return AlreadyExists(f"{self._name} exists already")
        translated = as_petps(error, self._name)
        if isinstance(translated, Unavailable):
            return self._unreachable(error.str())
        return translated

    def _unreachable(self, text: str) -> PetpsError:
        reason = f" ({self._last_error.last.str()})" if self._last_error.last is not None else ""
        return Unavailable(
            f"{self._name}: {text}{reason}; check the address, and that the brokers are up"
        )
