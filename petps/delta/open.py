"""Opening of a log by its location: a folder, or kafka://host:port/topic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from petps.delta.directory import DirectoryLog
from petps.delta.log import DeltaLog
from petps.errors import InvalidArgument, NotFound

__all__ = ["is_kafka", "open_log"]

KAFKA: Final = "kafka://"


def is_kafka(location: str | Path) -> bool:
    """Return whether a location is in Kafka; otherwise it is a folder."""
    return str(location).startswith(KAFKA)


def open_log(
    location: str | Path,
    *,
    partitions: int | None = None,
    exact: bool = True,
    create: bool = True,
    options: Mapping[str, Any] | None = None,
) -> DeltaLog:
    """Open the log at ``location``.

    Args:
        location: A folder, or kafka://host:port[,host:port]/topic.
        partitions: P, if the caller knows it.
        exact: Whether an existing log must have exactly ``partitions`` partitions.
        create: Whether to create a missing log with ``partitions`` partitions.
        options: Kafka's options, by name (petps/delta/kafka/FORMAT.md).

    Raises:
        InvalidArgument, NotFound.
        PermissionDenied, Unavailable: The brokers refuse or do not answer. With ``exact`` a Kafka
            log contacts them at its first use, so the error comes then.
    """
    if partitions is not None and not exact:
        try:
            existing_log = open_log(location, options=options)
            _ = existing_log.partitions  # contacts the brokers
            return existing_log
        except NotFound:
            return open_log(location, partitions=partitions, create=create, options=options)
    if is_kafka(location):
        from petps.delta.kafka import KafkaLog  # librdkafka takes a moment to load

        return KafkaLog(str(location), partitions=partitions, create=create, options=options)
    if "://" in str(location):
        raise InvalidArgument(
            f"{location}: a delta log is a folder or kafka://host:port[,host:port]/topic"
        )
    if create:
        return DirectoryLog(location, partitions=partitions)
    log = DirectoryLog(location)
    if partitions not in (None, log.partitions):
        raise InvalidArgument(f"{log.name} has {log.partitions} partitions, not {partitions}")
    return log
