"""Locations of the dense weights of each instance, from commit records and bases.

A file stores them for restarts: {instance: {"version": v, "dense": location}}.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final

from petps.delta.files import publish_file

__all__ = ["DenseNames"]

_log = logging.getLogger("petps.server.ingest")

MAX_NAMES: Final = 64  # a pool holds at most this many instances; older entries are dropped

Dense = tuple[int, str | None]


class DenseNames:
    """The (version, location) of each instance's newest version.

    ``path``: the file; None keeps them in memory only. If the file cannot be read or written, a
    warning is logged and the caller continues.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._names: dict[str, Dense] = {}
        if path is None or not path.exists():
            return
        try:
            for instance, entry in json.loads(path.read_bytes()).items():
                self._names[str(instance)] = (int(entry["version"]), str(entry["dense"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("[ingest] %s holds no locations of dense weights: %s", path, error)
            self._names = {}

    def of(self, instance: str) -> Dense:
        """Return (version, location) of an instance; (0, None) if it is unknown."""
        return self._names.get(instance, (0, None))

    def set(self, instance: str, dense: Dense) -> None:
        """Set an instance's (version, location). Durable on return."""
        before = self.of(instance)
        if dense == before:
            return
        self._names.pop(instance, None)
        self._names[instance] = dense
        while len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]
        if self._path is None or (dense[1] is None and before[1] is None):
            return
        known = {
            name: {"version": version, "dense": location}
            for name, (version, location) in self._names.items()
            if location is not None
        }
        try:
            publish_file(self._path, json.dumps(known, indent=1).encode() + b"\n")
        except OSError as error:
            _log.warning("[ingest] %s was not written: %s", self._path, error)
