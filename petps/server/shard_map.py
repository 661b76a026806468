"""The shard map's file (FORMAT.md): the owners of a model's partitions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from petps import _native
from petps.errors import InvalidArgument, NotFound

__all__ = ["MapFile", "ShardMap", "parse", "ranges"]

MAX_MAP_BYTES: Final = 1 << 20  # 1,024 servers of one partition each are 80 KiB

_KEYS: Final = ("model", "version", "partitions", "servers")
_SERVER_KEYS: Final = ("address", "partitions")
_FOLLOWS: Final = "follows"
_RANGE: Final = re.compile(r"(\d{1,4})-(\d{1,4})")


@dataclass(frozen=True)
class ShardMap:
    """Content of the file: the owners, and the partitions that servers only follow, by address."""

    owners: _native.ShardMap
    follows: Mapping[str, Sequence[int]]

    def owned_by(self, address: str) -> list[int]:
        """Return the partitions that this server answers for."""
        return self.owners.owned_by(address)

    def ingested_by(self, address: str) -> list[int]:
        """Return the partitions of the log that this server applies."""
        return sorted({*self.owned_by(address), *self.follows.get(address, ())})

    def as_json(self) -> dict[str, Any]:
        """Return the map in the form of the file."""
        servers: list[dict[str, Any]] = []
        for address, owned in self.owners.servers:
            servers.append({"address": address, "partitions": ranges(owned)})
        for address, followed in self.follows.items():
            found = [server for server in servers if server["address"] == address]
            if not found:
                found = [{"address": address, "partitions": []}]
                servers += found
            found[0][_FOLLOWS] = ranges(followed)
        return {
            "model": self.owners.model,
            "version": self.owners.version,
            "partitions": self.owners.partitions,
            "servers": servers,
        }


class MapFile:
    """A map in a file, which is read again when the file changes. One thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> ShardMap:
        """Return the map. Raises NotFound, or InvalidArgument (file, key, remedy)."""
        seen = self._signature()
        try:
            content = self._path.read_bytes()
        except OSError as error:
            raise InvalidArgument(f"shard map {self._path}: {error.strerror}") from None
        if len(content) > MAX_MAP_BYTES:
            raise InvalidArgument(
                f"shard map {self._path} has {len(content):,} bytes, at most {MAX_MAP_BYTES:,}"
            )
        found = parse(content, str(self._path))
        self._seen = seen
        return found

    def follow(self, use: Callable[[ShardMap], None]) -> None:
        """Pass the map to ``use`` if the file has changed since it was last read and used.

        Raises the errors of reading and of ``use``; the next call tries again.
        """
        if self._signature() == self._seen:
            return
        found = self.read()
        seen, self._seen = self._seen, None
        use(found)
        self._seen = seen

    def _signature(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise NotFound(f"shard map {self._path}: {error.strerror}") from None
        return (found.st_mtime_ns, found.st_size, found.st_ino)


def parse(content: bytes, source: str) -> ShardMap:
    """Return the map in ``content`` (JSON). InvalidArgument names ``source`` and the key."""

    def wrong(what: str) -> InvalidArgument:
        return InvalidArgument(f"shard map {source}: {what}")

    try:
        document = json.loads(content)
    except ValueError as error:
        raise wrong(f"no JSON: {error}") from None
    _check_keys(document, _KEYS, "the file", wrong)
    if not isinstance(document["model"], str):
        raise wrong("model is no text")
    if not isinstance(document["servers"], list):
        raise wrong("servers is no list")
    servers: list[tuple[str, list[int]]] = []
    follows: dict[str, list[int]] = {}
    for number, server in enumerate(document["servers"]):
        _check_keys(server, _SERVER_KEYS, f"server {number}", wrong, optional=(_FOLLOWS,))
        address = server["address"]
        if not isinstance(address, str):
            raise wrong(f"the address of server {number} is no text")
        owned = _partitions(server, "partitions", wrong)
        if address in follows:
            raise wrong(f"{address} appears twice")
        if _FOLLOWS in server:
            follows[address] = _partitions(server, _FOLLOWS, wrong)
        if owned or address not in follows:  # a server may only follow
            servers.append((address, owned))
    try:
        owners = _native.ShardMap(
            model=document["model"],
            version=_number(document["version"], "version", 64, wrong),
            partitions=_number(document["partitions"], "partitions", 32, wrong),
            servers=servers,
        )
    except InvalidArgument as error:
        raise wrong(str(error).removeprefix("shard map: ")) from None
    for address, followed in follows.items():
        for partition in followed:
            if partition >= owners.partitions:
                raise wrong(
                    f"{address} follows partition {partition}, but there are 0 to "
                    f"{owners.partitions - 1}"
                )
    return ShardMap(owners, follows)


def ranges(partitions: Sequence[int]) -> list[int | str]:
    """Return partitions with ranges joined: [0, 1, 2, 7] -> ["0-2", 7]."""
    result: list[int | str] = []
    first = last = -2
    for partition in sorted(partitions):
        if partition == last + 1:
            last = partition
            result[-1] = f"{first}-{last}"
        else:
            first = last = partition
            result.append(partition)
    return result


def _check_keys(
    given: Any,
    known: tuple[str, ...],
    where: str,
    wrong: Callable[[str], InvalidArgument],
    *,
    optional: tuple[str, ...] = (),
) -> None:
    if not isinstance(given, dict):
        raise wrong(f"{where} is no object with the keys {', '.join(known)}")
    for key in given:
        if key not in known + optional:
            names = ", ".join(known + optional)
            raise wrong(f"{where} has an unknown key '{key}'; known are {names}")
    for key in known:
        if key not in given:
            raise wrong(f"{where} lacks the key '{key}'")


def _number(given: Any, name: str, bits: int, wrong: Callable[[str], InvalidArgument]) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 1 << bits:
        raise wrong(f"{name} is {given!r}, expected a whole number")
    return given


def _partitions(
    server: dict[str, Any], key: str, wrong: Callable[[str], InvalidArgument]
) -> list[int]:
    if not isinstance(server[key], list):
        raise wrong(f"the {key} of {server['address']} are no list")
    found: list[int] = []
    for item in server[key]:
        if isinstance(item, str):
            span = _RANGE.fullmatch(item)
            if span is None or int(span[1]) > int(span[2]):
                raise wrong(f"'{item}' is no range of partitions; write for instance \"0-3\"")
            found += range(int(span[1]), int(span[2]) + 1)
        else:
            found.append(_number(item, "a partition", 32, wrong))
    return found
