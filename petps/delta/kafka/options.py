"""A user's settings: the address kafka://host:port[,host:port]/topic, and options by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from petps.errors import InvalidArgument, NotFound
from petps.regular_file import read_regular_file

__all__ = ["SCHEME", "KafkaAddress", "KafkaOptions", "parse_address"]

SCHEME: Final = "kafka://"
MAX_TOPIC_BYTES: Final = 249  # Kafka's own limit
_TOPIC: Final = re.compile(r"[A-Za-z0-9._\-]+")
_BROKER: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._\-]+)(:\d{1,5})?")

# Options that users cannot set, with the reason or the remedy.
OWNED: Final = {
    "bootstrap.servers": "name the brokers in the address",
    "metadata.broker.list": "name the brokers in the address",
    "enable.idempotence": "petps always writes without duplicates",
    "acks": "a message is durable when all in-sync replicas have it",
    "request.required.acks": "a message is durable when all in-sync replicas have it",
    "auto.offset.reset": "a position that is gone is reported, never replaced by another",
    "enable.auto.commit": "the pool stores the positions",
    "enable.auto.offset.store": "the pool stores the positions",
    "allow.auto.create.topics": "the first publisher creates the topic",
    "enable.partition.eof": "petps sets it where it needs it",
    "enable.gapless.guarantee": "petps always writes without gaps",
    "partitioner": "the key decides the partition",
    "transactional.id": "a version is complete with its commit record, not with a transaction",
    "compression.codec": "write compression.type",
    "message.max.bytes": "write topic.max.message.bytes",
}
# Prefixes of options that only one kind of client knows; librdkafka warns if another gets them.
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
PASSWORD_BYTES_MAX: Final = 1 << 16
GROUP: Final = "group.id"

# librdkafka refuses larger messages itself. Brokers accept messages of this size by default.
MESSAGE_BYTES_MAX: Final = 1_048_588
PRODUCER_DEFAULTS: Final[dict[str, Any]] = {
    "enable.idempotence": True,
    "acks": "all",
    # After a message that failed, deliver no further message.
    "enable.gapless.guarantee": True,
    # FORMAT.md has measurements.
    "compression.type": "lz4",
    # Messages have up to 1 MB, so waiting longer for larger batches gains nothing.
    "linger.ms": 2,
    # Backpressure: publish() waits while this number of KiB is not acknowledged.
    "queue.buffering.max.kbytes": 64 << 10,
    # As long as a training waits for its log (`give_up_after`).
    "message.timeout.ms": 600_000,
}
CONSUMER_DEFAULTS: Final[dict[str, Any]] = {
    "auto.offset.reset": "error",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "allow.auto.create.topics": False,
    # Each message has a checksum over all its bytes, which ingest checks before it applies them.
    # librdkafka 2.16 cannot continue after a batch with a wrong CRC: it interprets the bytes that
    # follow as batches, which usually crashes the process.
    "check.crcs": False,
    # Limit of what librdkafka reads ahead of ingest: a few polls of it.
    "queued.max.messages.kbytes": 32 << 10,
    # Pause of fetching once the queue is full; it would run empty with the default of a second.
    "fetch.queue.backoff.ms": 5,
    # A seek waits for the fetch in flight, so keep fetches short. Brokers that have new messages
    # answer at once anyway.
    "fetch.wait.max.ms": 100,
    # Partitions are assigned permanently, and ingest may load a base for hours between polls.
    "max.poll.interval.ms": 86_400_000,
}
TOPIC_DEFAULTS: Final[dict[str, str]] = {
    "replication.factor": "-1",  # the brokers' default
    # A week: a server that is away for longer needs a base.
    "retention.ms": str(7 * 24 * 3600 * 1000),
    "cleanup.policy": "delete",
    # Keep the producer's compression, because recompressing would cost the broker time.
    "compression.type": "producer",
    "max.message.bytes": str(MESSAGE_BYTES_MAX),
    # The message's own headers have its publishing time.
    "message.timestamp.type": "LogAppendTime",
}


@dataclass(frozen=True, slots=True)
class KafkaAddress:
    """Address of a log: its brokers as host:port, and its topic."""

    brokers: str
    topic: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.brokers}/{self.topic}"


def _without_password(text: str) -> str:
    return re.sub("[^/,]*@", "(hidden)@", text)


def parse_address(location: str) -> KafkaAddress:
    """Split kafka://host:port[,host:port]/topic into its parts. Raises InvalidArgument."""
    brokers, _, topic = location.removeprefix(SCHEME).partition("/")
    shown = _without_password(location)
    if not location.startswith(SCHEME) or not topic or not brokers:
        raise InvalidArgument(
            f"{shown!r} is no address of a Kafka log: write kafka://host:port[,host:port]/topic"
        )
    for broker in brokers.split(","):
        if not _BROKER.fullmatch(broker):
            raise InvalidArgument(
                f"{shown!r}: {_without_password(broker)!r} is no broker's host:port (user and "
                "password are options: sasl.username, sasl.password)"
            )
    if not _TOPIC.fullmatch(topic) or len(topic) > MAX_TOPIC_BYTES or topic in (".", ".."):
        raise InvalidArgument(
            f"{shown!r}: topic {topic!r}; a topic has 1 to {MAX_TOPIC_BYTES} letters, digits, "
            "'.', '_' and '-'"
        )
    return KafkaAddress(brokers, topic)


class KafkaOptions:
    """Checked options by librdkafka's names, with petps's topic.<name> and sasl.password.file."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        values = {name: _text(value) for name, value in (options or {}).items()}
        for name in values:
            if name in OWNED:
                raise InvalidArgument(f"Kafka option {name} cannot be set: {OWNED[name]}")
            if name.endswith("_cb") or name == "plugin.library.paths":
                raise InvalidArgument(f"Kafka option {name} cannot be set")
        if PASSWORD_FILE in values:
            values["sasl.password"] = _read_password(values.pop(PASSWORD_FILE))
        self.topic = {
            **TOPIC_DEFAULTS,
            **{n.removeprefix(TOPIC): v for n, v in values.items() if n.startswith(TOPIC)},
        }
        self._common = {n: v for n, v in values.items() if not n.startswith(TOPIC)}
        self.group = self._common.pop(GROUP, None)
        if "replication.factor" in self.topic:
            _number("topic.replication.factor", self.topic["replication.factor"])
        _number("topic.max.message.bytes", self.topic["max.message.bytes"])

    def common(self, address: KafkaAddress) -> dict[str, Any]:
        """Return the settings of every client."""
        settings = {
            name: value
            for name, value in self._common.items()
            if not name.startswith(PRODUCER) and not name.startswith(CONSUMER)
        }
        return {"client.id": "petps", **settings, "bootstrap.servers": address.brokers}

    def producer(self, address: KafkaAddress) -> dict[str, Any]:
        """Return the settings of the producer."""
        settings = {n: v for n, v in self._common.items() if n.startswith(PRODUCER)}
        limit = max(MESSAGE_BYTES_MAX, int(self.topic["max.message.bytes"]))
        return {
            **PRODUCER_DEFAULTS,
            **settings,
            **self.common(address),
            "message.max.bytes": limit,
        }

    def consumer(self, address: KafkaAddress) -> dict[str, Any]:
        """Return the settings of a consumer."""
        settings = {n: v for n, v in self._common.items() if n.startswith(CONSUMER)}
        # librdkafka requires a group. Nothing is committed to this one if the user gives none.
        group = self.group or "petps-unused"
        return {**CONSUMER_DEFAULTS, **settings, **self.common(address), GROUP: group}


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
        return read_regular_file(path, PASSWORD_BYTES_MAX).decode().rstrip("\n")
    except OSError as error:
        raise NotFound(f"Kafka option {PASSWORD_FILE}: {path}: {error.strerror}") from None
