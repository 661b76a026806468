"""Checks of a log in Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from petps.config.duration import duration_text
from petps.doctor.finding import Finding, fault, note, ok, warning
from petps.doctor.registry import check
from petps.doctor.subject import Subject
from petps.errors import NotFound, PetpsError

TOPIC: Final = "Kafka"
DAY_SECONDS: Final = 86_400
MESSAGE_BYTES: Final = 1_048_588  # with Kafka's own overhead; petps/delta/kafka/options.py
REPLICAS_WANTED: Final = 2


@check(
    "kafka-topic",
    TOPIC,
    looks_at="the brokers of ingest.log, the topic and its number of partitions",
    why="A server whose brokers are away serves rows that grow old, and is not ready after "
    "ready_lag_seconds. With another number of partitions than the model's it refuses the log.",
)
def kafka_topic(subject: Subject) -> Iterator[Finding]:
    """Ask the brokers about the topic, within a bounded time."""
    topic, config = subject.topic, subject.config
    if topic is None or config is None:
        return
    if isinstance(topic, NotFound):
        yield fault(
            str(topic),
            f"start the publisher, or create the topic with {config.model.partitions} partitions",
        )
    elif isinstance(topic, PetpsError):
        yield fault(
            str(topic),
            f"docs/runbook/broker-unreachable.md; the reference of errors explains [{topic.code}]",
        )
    elif topic.partitions != config.model.partitions:
        yield fault(
            f"the topic has {topic.partitions} partitions, and the model has "
            f"{config.model.partitions}",
            f"use a topic with {config.model.partitions} partitions: the number of a model never "
            "changes",
        )
    else:
        yield ok(f"{config.ingest.log} answers and has {topic.partitions} partitions")


@check(
    "kafka-retention",
    TOPIC,
    looks_at="retention.ms, retention.bytes and cleanup.policy, against backup.every",
    why="A server that was away, or a pool that was restored from a backup, reads the log from "
    "where it stopped. What the log has deleted by then must come from a base.",
)
def kafka_retention(subject: Subject) -> Iterator[Finding]:
    """Compare the retention with what a restart or a restore needs."""
    topic, config = subject.topic, subject.config
    if config is None or topic is None or isinstance(topic, PetpsError):
        return
    settings = topic.settings
    if not settings:
        yield note(
            "the settings of the topic may not be read",
            "ask for the right DescribeConfigs on the topic, to check them here",
        )
        return
    policy = settings.get("cleanup.policy", "delete")
    if "compact" in policy:
        yield fault(
            f"cleanup.policy is {policy}: Kafka deletes messages in the middle of the log",
            "set cleanup.policy to delete",
        )
    kept_ms = int(settings.get("retention.ms") or -1)
    kept = "for ever" if kept_ms < 0 else f"for {duration_text(kept_ms // 1000)}"
    every = config.backup.every_seconds() if config.backup.store is not None else 0
    needed = max(2 * every, DAY_SECONDS)
    if 0 <= kept_ms < 1000 * every:
        yield fault(
            f"the topic keeps messages {kept}, and a backup is made every "
            f"{duration_text(every)}: after a restore, messages are missing",
            f"set retention.ms to {1000 * needed} or more",
        )
    elif 0 <= kept_ms < 1000 * needed:
        yield warning(
            f"the topic keeps messages {kept}: a server that is away for longer needs a base",
            f"set retention.ms to {1000 * needed} or more, longer than your longest outage",
        )
    else:
        yield ok(f"the topic keeps messages {kept}")
    if int(settings.get("retention.bytes") or -1) >= 0:
        yield note(
            f"retention.bytes is {settings['retention.bytes']} a partition: a busy trainer may "
            "fill it before the time is over",
            "set retention.bytes to -1, or watch the disk of the brokers and the lag",
        )
    longest = int(settings.get("max.message.bytes") or MESSAGE_BYTES)
    if longest < MESSAGE_BYTES:
        yield warning(
            f"max.message.bytes is {longest}: the broker refuses petps's long messages",
            f"set max.message.bytes to {MESSAGE_BYTES} or more",
        )


@check(
    "kafka-replicas",
    TOPIC,
    looks_at="the replicas of the topic, and min.insync.replicas",
    why="A message is durable when all in-sync replicas have it. With one replica, the loss of one "
    "broker's disk loses messages.",
)
def kafka_replicas(subject: Subject) -> Iterator[Finding]:
    """Look at the replicas of the partition that has the fewest."""
    topic = subject.topic
    if topic is None or isinstance(topic, PetpsError):
        return
    least = int(topic.settings.get("min.insync.replicas") or 1)
    if topic.in_sync < min(least, topic.replicas):
        yield fault(
            f"a partition has {topic.in_sync} replicas in sync, and min.insync.replicas is {least}"
            ": nothing can be published",
            "start the brokers that are down",
        )
    elif topic.in_sync < topic.replicas:
        yield warning(
            f"a partition has {topic.in_sync} of {topic.replicas} replicas in sync",
            "start the brokers that are down, or look at their disks",
        )
    elif topic.replicas < REPLICAS_WANTED:
        yield warning("the topic has one replica", "use 3 replicas, and min.insync.replicas of 2")
    else:
        yield ok(f"{topic.replicas} replicas, all in sync")
