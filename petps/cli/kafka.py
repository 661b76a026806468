"""--kafka-option NAME=VALUE, of every command that opens a delta log."""

from __future__ import annotations

from typing import Final

from petps.errors import InvalidArgument

__all__ = ["KAFKA_HELP", "LOG_HELP", "kafka_options"]

LOG_HELP: Final = "a folder, or kafka://HOST:PORT[,HOST:PORT]/TOPIC"
KAFKA_HELP: Final = (
    "NAME=VALUE of librdkafka (security.protocol, sasl.username, ...), or topic.NAME=VALUE for a "
    "topic to be made. Repeatable."
)


def kafka_options(given: list[str] | None) -> dict[str, str]:
    """The options by name. Raises InvalidArgument."""
    options = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidArgument(f"--kafka-option {text!r}: write NAME=VALUE")
        options[name] = value
    return options
