"""The shard map's file (FORMAT.md): who owns which partitions of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from petps import _native
from petps.errors import InvalidArgument, NotFound

__all__ = ["MapFile", "as_json", "parse", "ranges"]

MAX_MAP_BYTES: Final = 1 << 20  # 1,024 servers of one partition each are 80 KiB

_KEYS: Final = ("model", "version", "partitions", "servers")
_SERVER_KEYS: Final = ("address", "partitions")
_RANGE: Final = re.compile(r"(\d{1,4})-(\d{1,4})")


class MapFile:
    """A map in a file that is read again when it has changed. One thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> _native.ShardMap:
        """The map. Errors: NotFound, InvalidArgument (file, key, remedy)."""
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

    def follow(self, use: Callable[[_native.ShardMap], None]) -> None:
        """Hands the map to ``use`` if the file has changed since it was last read and used.

        Raises what reading or ``use`` raises; the next call tries again.
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


def parse(content: bytes, source: str) -> _native.ShardMap:
    """The map that ``content`` (JSON) describes. InvalidArgument names ``source`` and the key."""

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
    servers = []
    for number, server in enumerate(document["servers"]):
        _check_keys(server, _SERVER_KEYS, f"server {number}", wrong)
        if not isinstance(server["address"], str):
            raise wrong(f"the address of server {number} is no text")
        if not isinstance(server["partitions"], list):
            raise wrong(f"the partitions of {server['address']} are no list")
        owned = [one for item in server["partitions"] for one in _partitions(item, wrong)]
        servers.append((server["address"], owned))
    try:
        return _native.ShardMap(
            model=document["model"],
            version=_number(document["version"], "version", 64, wrong),
            partitions=_number(document["partitions"], "partitions", 32, wrong),
            servers=servers,
        )
    except InvalidArgument as error:
        raise wrong(str(error).removeprefix("shard map: ")) from None


def as_json(found: _native.ShardMap) -> dict[str, Any]:
    """The map as the file would say it."""
    return {
        "model": found.model,
        "version": found.version,
        "partitions": found.partitions,
        "servers": [
            {"address": address, "partitions": ranges(owned)} for address, owned in found.servers
        ],
    }


def ranges(partitions: Sequence[int]) -> list[int | str]:
    """[0, 1, 2, 7] -> ["0-2", 7]."""
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
    given: Any, known: tuple[str, ...], where: str, wrong: Callable[[str], InvalidArgument]
) -> None:
    if not isinstance(given, dict):
        raise wrong(f"{where} is no object with the keys {', '.join(known)}")
    for key in given:
        if key not in known:
            raise wrong(f"{where} has an unknown key '{key}'; known are {', '.join(known)}")
    for key in known:
        if key not in given:
            raise wrong(f"{where} lacks the key '{key}'")


def _number(given: Any, name: str, bits: int, wrong: Callable[[str], InvalidArgument]) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 1 << bits:
        raise wrong(f"{name} is {given!r}, expected a whole number")
    return given


def _partitions(item: Any, wrong: Callable[[str], InvalidArgument]) -> Sequence[int]:
    if isinstance(item, str):
        found = _RANGE.fullmatch(item)
        if found is None or int(found[1]) > int(found[2]):
            raise wrong(f"'{item}' is no range of partitions; write for instance \"0-3\"")
        return range(int(found[1]), int(found[2]) + 1)
    return [_number(item, "a partition", 32, wrong)]
