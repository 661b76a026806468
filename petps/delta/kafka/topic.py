"""What the brokers say of a log's topic, for an operator. Nothing is created."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petps.delta.kafka.client import KafkaAdmin, TopicFacts
from petps.delta.kafka.options import KafkaOptions, parse_address

__all__ = ["TopicFacts", "describe_topic"]


def describe_topic(location: str, options: Mapping[str, Any]) -> TopicFacts:
    """Return what the brokers say of kafka://host:port/topic.

    Each of two requests has a limit of REQUEST_SECONDS. Raises NotFound, PermissionDenied,
    Unavailable, InvalidArgument.
    """
    address = parse_address(location)
    return KafkaAdmin(address, KafkaOptions(options), location).describe()
