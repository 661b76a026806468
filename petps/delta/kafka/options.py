"""What a user may set: the address kafka://host:port[,host:port]/topic, and options by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from petps.errors import InvalidArgument, NotFound

__all__ = ["SCHEME", "KafkaAddress", "KafkaOptions", "parse_address"]

SCHEME: Final = "kafka://"
MAX_TOPIC_BYTES: Final = 249  # Kafka's own limit
_TOPIC: Final = re.compile(r"[A-Za-z0-9._\-]+")
_BROKER: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._\-]+)(:\d{1,5})?")

# Ours, because the log's promises stand on them.
OWNED: Final = {
    "bootstrap.servers": "name the brokers in the address",
    "metadata.broker.list": "name the brokers in the address",
    "enable.idempotence": "a log is written without duplicates, always",
    "acks": "a message is durable when all in-sync replicas have it",
    "request.required.acks": "a message is durable when all in-sync replicas have it",
    "auto.offset.reset": "a position that is gone is reported, never replaced by another",
    "enable.auto.commit": "positions are kept by the pool",
    "enable.auto.offset.store": "positions are kept by the pool",
    "allow.auto.create.topics": "the first publisher makes the topic",
    "enable.partition.eof": "not an option of a log",
    "enable.gapless.guarantee": "a log is written without gaps, always",
    "partitioner": "the key decides the partition",
    "transactional.id": "a version is complete with its commit record, not with a transaction",
    "compression.codec": "write compression.type",
    "message.max.bytes": "write topic.max.message.bytes",
}
# Options that only one kind of client knows; librdkafka warns about them elsewhere.
PRODUCER: Final = (
    "compression.", "linger.ms", "queue.buffering.", "batch.", "message.timeout.ms",
    "delivery.timeout.ms", "request.timeout.ms", "retries", "message.send.max.retries",
    "retry.backoff", "max.in.flight", "sticky.",
)  # fmt: skip
CONSUMER: Final = (
    "fetch.", "max.partition.fetch.bytes", "queued.", "group.", "isolation.level", "check.crcs",
    "session.timeout.ms", "heartbeat.interval.ms", "client.rack",
)  # fmt: skip
TOPIC: Final = "topic."
PASSWORD_FILE: Final = "sasl.password.file"
GROUP: Final = "group.id"

# librdkafka refuses a larger message before the broker is asked; brokers take this by default.
MESSAGE_BYTES_MAX: Final = 1_048_588
PRODUCER_DEFAULTS: Final[dict[str, Any]] = {
    "enable.idempotence": True,
    "acks": "all",
    # Nothing is delivered behind a message that was not.
    "enable.gapless.guarantee": True,
    # Measured in FORMAT.md on rows of float32.
    "compression.type": "lz4",
    # Messages are up to 1 MB already: waiting longer for more of them brings nothing.
    "linger.ms": 2,
    # Back-pressure: publish() waits while this much is not acknowledged yet.
    "queue.buffering.max.kbytes": 64 << 10,
    "message.timeout.ms": 120_000,
}
CONSUMER_DEFAULTS: Final[dict[str, Any]] = {
    "auto.offset.reset": "error",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "allow.auto.create.topics": False,
    # A message carries a checksum of its own over all of it, which is held before it is applied.
    # librdkafka 2.16 cannot read on behind a batch whose CRC does not fit: it takes what follows
    # for batches, and mostly ends the process over one.
    "check.crcs": False,
    # Read ahead of ingest, at most: what a few polls take.
    "queued.max.messages.kbytes": 32 << 10,
    # How long a full queue is left alone; the default of a second would leave it empty.
    "fetch.queue.backoff.ms": 5,
    # A seek waits for the question that is under way; brokers answer at once when there is news.
    "fetch.wait.max.ms": 100,
    # A partition is assigned for good: ingest may be busy with a base for hours.
    "max.poll.interval.ms": 86_400_000,
}
TOPIC_DEFAULTS: Final[dict[str, str]] = {
    "replication.factor": "-1",  # the brokers' default
    # A week: how long a server may be away before it needs a base.
    "retention.ms": str(7 * 24 * 3600 * 1000),
    "cleanup.policy": "delete",
    # The producer's choice is kept; recompressing would cost the broker a pass over every message.
    "compression.type": "producer",
    "max.message.bytes": str(MESSAGE_BYTES_MAX),
    # A record's own time stands in its headers.
    "message.timestamp.type": "LogAppendTime",
}


@dataclass(frozen=True, slots=True)
class KafkaAddress:
    """Where a log is: brokers as host:port, and the topic."""

    brokers: str
    topic: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.brokers}/{self.topic}"


def parse_address(location: str) -> KafkaAddress:
    """kafka://host:port[,host:port]/topic -> its parts. Raises InvalidArgument."""
    brokers, _, topic = location.removeprefix(SCHEME).partition("/")
    if not location.startswith(SCHEME) or not topic or not brokers:
        raise InvalidArgument(
            f"{location!r} is no address of a Kafka log: write kafka://host:port[,host:port]/topic"
        )
    for broker in brokers.split(","):
        if not _BROKER.fullmatch(broker):
            raise InvalidArgument(
                f"{location!r}: {broker!r} is no broker's host:port (user and password are options:"
                " sasl.username, sasl.password)"
            )
    if not _TOPIC.fullmatch(topic) or len(topic) > MAX_TOPIC_BYTES or topic in (".", ".."):
        raise InvalidArgument(
            f"{location!r}: topic {topic!r}; a topic has 1 to {MAX_TOPIC_BYTES} letters, digits, "
            "'.', '_' and '-'"
        )
    return KafkaAddress(brokers, topic)


class KafkaOptions:
    """Options by librdkafka's names, checked; names of ours: topic.<name>, sasl.password.file."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        given = {name: _text(value) for name, value in (options or {}).items()}
        for name in given:
            if name in OWNED:
                raise InvalidArgument(f"Kafka option {name} cannot be set: {OWNED[name]}")
            if name.endswith("_cb") or name == "plugin.library.paths":
                raise InvalidArgument(f"Kafka option {name} cannot be set")
        if PASSWORD_FILE in given:
            given["sasl.password"] = _read_password(given.pop(PASSWORD_FILE))
        self.topic = {
            **TOPIC_DEFAULTS,
            **{n.removeprefix(TOPIC): v for n, v in given.items() if n.startswith(TOPIC)},
        }
        self._common = {n: v for n, v in given.items() if not n.startswith(TOPIC)}
        self.group = self._common.pop(GROUP, None)
        if "replication.factor" in self.topic:
            _number("topic.replication.factor", self.topic["replication.factor"])
        _number("topic.max.message.bytes", self.topic["max.message.bytes"])

    def common(self, address: KafkaAddress) -> dict[str, Any]:
        """Settings of every client."""
        ours = {
            name: value
            for name, value in self._common.items()
            if not name.startswith(PRODUCER) and not name.startswith(CONSUMER)
        }
        return {"client.id": "petps", **ours, "bootstrap.servers": address.brokers}

    def producer(self, address: KafkaAddress) -> dict[str, Any]:
        """Settings of the producer."""
        chosen = {n: v for n, v in self._common.items() if n.startswith(PRODUCER)}
        limit = max(MESSAGE_BYTES_MAX, int(self.topic["max.message.bytes"]))
        return {
            **PRODUCER_DEFAULTS,
            **chosen,
            **self.common(address),
            "message.max.bytes": limit,
        }

    def consumer(self, address: KafkaAddress) -> dict[str, Any]:
        """Settings of a consumer."""
        chosen = {n: v for n, v in self._common.items() if n.startswith(CONSUMER)}
        # A group is asked for by librdkafka; without one of the user's, nothing is committed to it.
        group = self.group or "petps-unused"
        return {**CONSUMER_DEFAULTS, **chosen, **self.common(address), GROUP: group}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(name: str, value: str) -> int:
    check: Callable[[str], int] = int
    try:
        return check(value)
    except ValueError:
        raise InvalidArgument(f"Kafka option {name} is {value!r}, not a number") from None


def _read_password(path: str) -> str:
    try:
        return Path(path).read_text().rstrip("\n")
    except OSError as error:
        raise NotFound(f"Kafka option {PASSWORD_FILE}: {path}: {error.strerror}") from None
