"""Messages that could not be decoded, kept in a folder or in a log for who mends the publisher."""

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

_log = logging.getLogger("petps.ingest")

# A mad publisher must not fill the disk: 1,000 letters are at most 1 GB, and tell enough.
MAX_LETTERS: Final = 1000


MAX_REASON_BYTES: Final = 1000


class DirectoryDeadLetters:
    """One <partition>-<offset>.json (where, when, why, headers) and .body a message.

    The same message refused again, as after a restart, replaces its letter. Beyond ``max_letters``
    nothing more is kept; ingest still counts.
    """

    def __init__(self, folder: str | Path, *, max_letters: int = MAX_LETTERS) -> None:
        self._folder = Path(folder)
        self._max_letters = max_letters

    def add(self, partition: int, offset: int, reason: str, message: Message | None) -> None:
        """See DeadLetters. A folder that cannot be written is reported, and holds nothing up."""
        try:
            self._write(partition, offset, reason, message)
        except OSError as error:
            _log.error(
                "[ingest] partition %d: the message at %d (%s) could not be kept in %s: %s",
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
        """Holds nothing."""


class LogDeadLetters:
    """One message of a log a dead letter: its body and headers as they were, and why, before them.

    ``opened`` opens the log, at the first letter: nobody may ever need it. Headers before the
    message's own: dead-letter.{reason, log, partition, offset, time}. A message refused again, as
    after a restart, stands there again. A log that does not take letters is reported, and does not
    hold ingest up: the count, the reason and the message in its own log remain.
    """

    def __init__(self, opened: Callable[[], DeltaLog], source: str) -> None:
        self._opened = opened
        self._source = source
        self._letters: DeltaLog | None = None

    def add(self, partition: int, offset: int, reason: str, message: Message | None) -> None:
        """See DeadLetters."""
        fields = {
            "reason": reason[:MAX_REASON_BYTES],
            "log": self._source,
            "partition": partition,
            "offset": offset,
            "time": time.time_ns(),
        }
        headers = [(f"dead-letter.{name}", str(value).encode()) for name, value in fields.items()]
        if message is not None:
            # One that is too large for any log was refused for that: its beginning tells enough.
            letter = Message([*headers, *message.headers], message.body[:MAX_MESSAGE_BYTES])
        else:
            letter = Message(headers, b"")
        try:
            if self._letters is None:
                self._letters = self._opened()
            self._letters.publish(0, letter)
        except PetpsError as error:
            _log.error("[ingest] a dead letter was not kept: %s", error)
            self._letters = None

    def close(self) -> None:
        """Returns when the letters are kept, or an error is logged."""
        if self._letters is not None:
            try:
                self._letters.close()
            except PetpsError as error:
                _log.error("[ingest] dead letters were not kept: %s", error)
