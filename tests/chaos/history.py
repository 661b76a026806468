"""Histories: files of one JSON document a line, which processes append to while they are killed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["History", "now_ns", "read_history"]


def now_ns() -> int:
    """Return the time of all histories: that of the machine's monotonic clock, which none jumps."""
    return time.monotonic_ns()


class History:
    """A file that any thread appends records to. A record that is written survives a kill."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()

    def write(self, **record: Any) -> None:
        """Append a record."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._file.write(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; none if it does not exist. A last line that is cut is left."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)
