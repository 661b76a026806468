"""Help texts of the commands that open a delta log."""

from __future__ import annotations

from typing import Final

__all__ = ["KAFKA_HELP", "LOG_HELP"]

LOG_HELP: Final = "a folder, or kafka://HOST:PORT[,HOST:PORT]/TOPIC"
KAFKA_HELP: Final = (
    "NAME=VALUE of librdkafka (security.protocol, sasl.username, ...), or topic.NAME=VALUE for a "
    "new topic. Repeatable."
)
