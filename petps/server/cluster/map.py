"""The copy of the map beside the pool, from which a server starts while etcd is away."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from petps import _native
from petps.delta.files import publish_file
from petps.errors import InvalidArgument, IoError
from petps.regular_file import read_regular_file
from petps.server.members import UNASSIGNED
from petps.server.shard_map import MAX_MAP_BYTES, ShardMap, parse

__all__ = ["MapCopy"]

# Of the map that a server uses before it has one. Version 0 would mean that it owns everything;
# `petps cluster init` writes a higher one.
FIRST_VERSION: Final = 1


class MapCopy:
    """The file POOL.map.json: the last map that this server used."""

    def __init__(self, path: Path, model: str, partitions: int) -> None:
        """``model`` and ``partitions``: of the map that a server has before it knows one."""
        self._path, self._model, self._partitions = path, model, partitions

    def read(self) -> ShardMap:
        """Return the map; without a file, one in which nobody who exists owns anything.

        Raises InvalidArgument for a file that is damaged.
        """
        try:
            content = read_regular_file(self._path, MAX_MAP_BYTES)
        except FileNotFoundError:
            return self._unassigned()
        except OSError as error:
            raise InvalidArgument(f"shard map {self._path}: {error.strerror}") from None
        return parse(content, str(self._path))

    def write(self, text: str) -> None:
        """Replace the file atomically. Durable on return. Raises IoError."""
        try:
            publish_file(self._path, text.encode() + b"\n")
        except OSError as error:
            raise IoError(f"{self._path}: {error.strerror}") from None

    def _unassigned(self) -> ShardMap:
        owners = _native.ShardMap(
            model=self._model,
            version=FIRST_VERSION,
            partitions=self._partitions,
            servers=[(UNASSIGNED, list(range(self._partitions)))],
        )
        return ShardMap(owners, {})
