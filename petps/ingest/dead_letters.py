"""Messages that could not be decoded, kept in a folder for whoever mends the publisher."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Final

from petps.delta import Message
from petps.delta.files import publish_file

__all__ = ["DirectoryDeadLetters"]

# A mad publisher must not fill the disk: 1,000 letters are at most 1 GB, and tell enough.
MAX_LETTERS: Final = 1000


class DirectoryDeadLetters:
    """One <partition>-<offset>.json (where, when, why, headers) and .body a message.

    The same message refused again, as after a restart, replaces its letter. Beyond ``max_letters``
    nothing more is kept; ingest still counts.
    """

    def __init__(self, folder: str | Path, *, max_letters: int = MAX_LETTERS) -> None:
        self._folder = Path(folder)
        self._max_letters = max_letters

    def add(self, partition: int, offset: int, reason: str, message: Message | None) -> None:
        """See DeadLetters."""
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
