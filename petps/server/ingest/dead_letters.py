"""Dead letters: undecodable messages, stored in a folder or a log to help fix the publisher."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from petps.delta import MAX_MESSAGE_BYTES, DeltaLog, Message
from petps.delta.files import publish_file
from petps.errors import PetpsError

__all__ = ["DirectoryDeadLetters", "LogDeadLetters"]

_log = logging.getLogger("petps.server.ingest")

# A faulty publisher must not fill the disk: 1,000 letters have at most 1 GB.
MAX_LETTERS: Final = 1000
MAX_REASON_BYTES: Final = 1000


class DirectoryDeadLetters:
    """Folder with one p<partition>-<offset>.json and one .body file for each refused message.

    The JSON has the message's place and headers, the time and the reason. A message that is refused
    again, for example after a restart, replaces its letter. Letters beyond ``max_letters`` are not
    stored, but ingest still counts the messages.
    """

    def __init__(self, folder: str | Path, *, max_letters: int = MAX_LETTERS) -> None:
        self._folder = Path(folder)
        self._max_letters = max_letters

    def add(self, partition: int, offset: int, reason: str, message: Message | None) -> None:
        """See DeadLetters. If the folder cannot be written, log an error and continue."""
        try:
            self._write(partition, offset, reason, message)
        except OSError as error:
            _log.error(
                "[ingest] partition %d: message at offset %d (%s) could not be stored in %s: %s",
                partition,
                offset,
                reason,
                self._folder,
                error,
            )

    def _write(self, partition: int, offset: int, reason: str, message: Message | None) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = f"p{partition:04d}-{offset:020d}"
        path = self._folder / f"{stem}.json"
        if not path.exists() and sum(1 for _ in self._folder.glob("*.json")) >= self._max_letters:
            return
        headers = [] if message is None else message.headers
        letter = {
            "partition": partition,
            "offset": offset,
            "reason": reason,
            "time_ns": time.time_ns(),
            "headers": [
                {"name": name, "base64": base64.b64encode(value).decode(), "text": repr(value)}
                for name, value in headers
            ],
        }
        if message is not None:
            publish_file(self._folder / f"{stem}.body", bytes(message.body))
        publish_file(path, json.dumps(letter, indent=1).encode() + b"\n")

    def close(self) -> None:
        """Do nothing: no resource is held."""


class LogDeadLetters:
    """Log with one message for each dead letter: the refused message with additional headers.

    The headers dead-letter.{reason, log, partition, offset, time} precede the message's own. A
    message that is refused again, for example after a restart, is written again. If the log refuses
    a letter, an error is logged and ingest continues: the count, the reason and the message in the
    delta log remain.
    """

    def __init__(self, open_letters: Callable[[], DeltaLog], source: str) -> None:
        """``open_letters`` opens the log at the first letter. ``source`` names the delta log."""
        self._open_letters = open_letters
        self._source = source
        self._letters: DeltaLog | None = None

    def add(self, partition: int, offset: int, reason: str, message: Message | None) -> None:
        """See DeadLetters."""
        fields = {
            "reason": reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore"),
            "log": self._source,
            "partition": partition,
            "offset": offset,
            "time": time.time_ns(),
        }
        headers = [(f"dead-letter.{name}", str(value).encode()) for name, value in fields.items()]
        if message is not None:
            # If the message was refused because it is too large, its beginning suffices.
            letter = Message([*headers, *message.headers], message.body[:MAX_MESSAGE_BYTES])
        else:
            letter = Message(headers, b"")
        try:
            if self._letters is None:
                self._letters = self._open_letters()
            self._letters.publish(0, letter)
        except PetpsError as error:
            _log.error("[ingest] a dead letter was not stored: %s", error)
            # Without this, the garbage collector would end the Kafka client in any thread, and wait
            # there for the client's threads.
            self.close()
            self._letters = None

    def close(self) -> None:
        """Wait until the letters are durable. Log an error if they cannot be."""
        if self._letters is not None:
            try:
                self._letters.close()
            except PetpsError as error:
                _log.error("[ingest] dead letters were not stored: %s", error)
