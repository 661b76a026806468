"""Locations of the versions' dense weights, by instance, from commit records and bases.

A file keeps them for a restarted server: {instance: {"version": v, "dense": location}}.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final

from petps.delta.files import publish_file

__all__ = ["DenseNames"]

_log = logging.getLogger("petps.server.ingest")

MAX_NAMES: Final = 64  # a pool holds no more instances; the oldest entries are dropped

Dense = tuple[int, str | None]


class DenseNames:
    """(version, location) of each instance's newest version. ``path`` None: kept in memory only.

    If the file cannot be read or written, a warning is logged and the caller continues.
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
            _log.warning("[ingest] %s tells no dense weights: %s", path, error)
            self._names = {}

    def of(self, instance: str) -> Dense:
        """Return (version, location) of an instance; (0, None) if it is unknown."""
        return self._names.get(instance, (0, None))

    def note(self, instance: str, dense: Dense) -> None:
        """Set an instance's (version, location). A location is durable on return."""
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
