"""Locations of the dense weights of each instance, from commit records and bases.

Dense weights are the parameters of a model that are not rows of tables. A server only reports
where they are. A file stores them for restarts: {instance: {"version": v, "dense": location}}.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final

from petps.delta.files import publish_file

__all__ = ["DenseLocations"]

_log = logging.getLogger("petps.server.ingest")

MAX_INSTANCES: Final = 64  # a pool holds at most this many instances; older entries are dropped

Dense = tuple[int, str | None]


class DenseLocations:
    """The (version, location) of each instance's newest version.

    ``path``: the file; None keeps them in memory only. If the file cannot be read or written, a
    warning is logged and the caller continues.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._newest: dict[str, Dense] = {}
        if path is None or not path.exists():
            return
        try:
            for instance, entry in json.loads(path.read_bytes()).items():
                self._newest[str(instance)] = (int(entry["version"]), str(entry["dense"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("[ingest] %s holds no locations of dense weights: %s", path, error)
            self._newest = {}

    def of(self, instance: str) -> Dense:
        """Return (version, location) of an instance; (0, None) if it is unknown."""
        return self._newest.get(instance, (0, None))

    def set(self, instance: str, dense: Dense) -> None:
        """Set an instance's (version, location). Durable on return."""
        before = self.of(instance)
        if dense == before:
            return
        self._newest.pop(instance, None)
        self._newest[instance] = dense
        while len(self._newest) > MAX_INSTANCES:
            del self._newest[next(iter(self._newest))]
        if self._path is None or (dense[1] is None and before[1] is None):
            return
        known = {
            name: {"version": version, "dense": location}
            for name, (version, location) in self._newest.items()
            if location is not None
        }
        try:
            publish_file(self._path, json.dumps(known, indent=1).encode() + b"\n")
        except OSError as error:
            _log.warning("[ingest] %s was not written: %s", self._path, error)
