"""The shard map's file (FORMAT.md): the owners of a model's partitions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from petps import _native
from petps.delta.schema import MAX_PARTITIONS
from petps.errors import InvalidArgument, NotFound
from petps.regular_file import read_regular_file

__all__ = ["MAX_MAP_BYTES", "MapFile", "ShardMap", "check_address", "parse", "ranges"]

MAX_MAP_BYTES: Final = 1 << 20  # a map of 1,024 servers with one partition each has 80 KiB
MAX_PORT: Final = 65_535

MAX_ADDRESS_BYTES: Final = 255  # as of the native address, native/wire/wire.h kMaxNameBytes
MAX_ZONE_BYTES: Final = 255

_RANGE: Final = re.compile(r"(\d{1,4})-(\d{1,4})")
_ADDRESS: Final = re.compile(r"\S+:([0-9]{1,5})")


def _expand_ranges(items: Any) -> Any:
    """Replace each range in a list of partitions by its numbers."""
    if not isinstance(items, list):
        return items
    partitions: list[Any] = []
    for item in items:
        if not isinstance(item, str):
            partitions.append(item)
            continue
        span = _RANGE.fullmatch(item)
        if span is None or int(span[1]) > int(span[2]):
            raise ValueError(f"'{item}' is no range of partitions; write for instance \"0-3\"")
        partitions += range(int(span[1]), int(span[2]) + 1)
        if len(partitions) > MAX_PARTITIONS:
            raise ValueError(f"a server has at most {MAX_PARTITIONS:,} partitions, each once")
    return partitions


def check_address(address: str) -> str:
    """Return the address, or raise ValueError if it is no HOST:PORT."""
    parts = _ADDRESS.fullmatch(address)
    if (
        parts is None
        or not 0 < int(parts[1]) <= MAX_PORT
        or len(address.encode()) > MAX_ADDRESS_BYTES
    ):
        raise ValueError(f"'{address}' is no address; write HOST:PORT, for instance \"h1:7071\"")
    return address


def _check_zone(zone: str) -> str:
    if not 0 < len(zone.encode()) <= MAX_ZONE_BYTES:
        raise ValueError(f"a zone has 1 to {MAX_ZONE_BYTES} bytes, got {len(zone.encode())}")
    return zone


_U32 = Annotated[int, Field(ge=0, lt=1 << 32)]
_Partitions = Annotated[list[_U32], BeforeValidator(_expand_ranges)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)


class _ServerEntry(_Model):
    address: str
    grpc_address: Annotated[str, AfterValidator(check_address)] | None = None
    zone: Annotated[str, AfterValidator(_check_zone)] | None = None
    partitions: _Partitions
    follows: _Partitions | None = None


class _Document(_Model):
    model: str
    version: Annotated[int, Field(ge=0, lt=1 << 64)]
    partitions: _U32
    servers: list[_ServerEntry]


@dataclass(frozen=True)
class ShardMap:
    """Content of the file: the owners, and the partitions that each address only follows.

    ``grpc`` has the address of the gRPC port by that of the native port, where the file gives it;
    ``zones`` the zone of each server that has one.
    """

    owners: _native.ShardMap
    follows: Mapping[str, Sequence[int]]
    grpc: Mapping[str, str] = field(default_factory=dict)
    zones: Mapping[str, str] = field(default_factory=dict)

    def names(self, address: str) -> bool:
        """Return whether the map has a server at ``address``, even one that owns nothing."""
        return address in self.follows or any(known == address for known, _ in self.owners.servers)

    def owned_by(self, address: str) -> list[int]:
        """Return the partitions that the server at ``address`` owns."""
        return self.owners.owned_by(address)

    def ingested_by(self, address: str) -> list[int]:
        """Return the partitions of the log that the server at ``address`` applies."""
        return sorted({*self.owned_by(address), *self.follows.get(address, ())})

    def groups(self) -> list[tuple[list[int], list[str]]]:
        """Return (partitions, addresses of their owners), by the lowest partition."""
        owners: list[list[str]] = [[] for _ in range(self.owners.partitions)]
        for address, owned in self.owners.servers:
            for partition in owned:
                owners[partition].append(address)
        partitions: dict[tuple[str, ...], list[int]] = {}
        for partition, addresses in enumerate(owners):
            partitions.setdefault(tuple(addresses), []).append(partition)
        return [(of_owners, list(addresses)) for addresses, of_owners in partitions.items()]

    def others(self, address: str) -> list[tuple[str, str]]:
        """Return (address, partitions as text) of the servers but the one at ``address``."""
        owned = dict(self.owners.servers)
        return [
            (other, ", ".join(map(str, ranges(owned.get(other, [])))) or "follows only")
            for other in sorted({*owned, *self.follows} - {address})
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the map in the form of the file."""
        servers: dict[str, dict[str, Any]] = {
            address: {"address": address, "partitions": ranges(owned)}
            for address, owned in self.owners.servers
        }
        for address, followed in self.follows.items():
            server = servers.setdefault(address, {"address": address, "partitions": []})
            server["follows"] = ranges(followed)
        for address, grpc_address in self.grpc.items():
            servers[address]["grpc_address"] = grpc_address
        for address, zone in self.zones.items():
            servers[address]["zone"] = zone
        return {
            "model": self.owners.model,
            "version": self.owners.version,
            "partitions": self.owners.partitions,
            "servers": list(servers.values()),
        }


class MapFile:
    """Reader of a map's file, which it reads again when the file changes. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> ShardMap:
        """Return the map. Raises NotFound, or InvalidArgument (file, key, remedy)."""
        seen = self._signature()
        try:
            content = read_regular_file(self._path, MAX_MAP_BYTES)
        except OSError as error:
            raise InvalidArgument(f"shard map {self._path}: {error.strerror}") from None
        if len(content) > MAX_MAP_BYTES:
            raise InvalidArgument(
                f"shard map {self._path} is too long: it may have at most {MAX_MAP_BYTES:,} bytes"
            )
        shard_map = parse(content, str(self._path))
        self._seen = seen
        return shard_map

    def follow(self, use: Callable[[ShardMap], None]) -> None:
        """Pass the map to ``use`` if the file has changed since it was last read and used.

        Raises the errors of reading and of ``use``; the next call tries again.
        """
        if self._signature() == self._seen:
            return
        shard_map = self.read()
        seen, self._seen = self._seen, None
        use(shard_map)
        self._seen = seen

    def _signature(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError as error:
            raise NotFound(f"shard map {self._path}: {error.strerror}") from None
        return (stat.st_mtime_ns, stat.st_size, stat.st_ino)


def parse(content: bytes, source: str) -> ShardMap:
    """Return the map in ``content`` (JSON). InvalidArgument names ``source`` and the key."""
    try:
        document = _Document.model_validate(json.loads(content))
        return _build_map(document)
    except ValidationError as error:
        fault = _describe(error.errors()[0])
    except InvalidArgument as error:
        fault = str(error).removeprefix("shard map: ")
    except (ValueError, RecursionError) as error:
        fault = f"not valid JSON: {error}"
    raise InvalidArgument(f"shard map {source}: {fault}")


def _build_map(document: _Document) -> ShardMap:
    servers: list[tuple[str, list[int]]] = []
    follows: dict[str, list[int]] = {}
    grpc: dict[str, str] = {}
    zones: dict[str, str] = {}
    for server in document.servers:
        if server.address in follows:
            raise InvalidArgument(f"{server.address} appears twice; give each server one entry")
        if server.follows is not None:
            follows[server.address] = server.follows
        if server.grpc_address is not None:
            grpc[server.address] = server.grpc_address
        if server.zone is not None:
            zones[server.address] = server.zone
        if server.partitions or server.follows is None:  # otherwise the server only follows
            servers.append((server.address, server.partitions))
    owners = _native.ShardMap(
        model=document.model,
        version=document.version,
        partitions=document.partitions,
        servers=servers,
        zones=zones,
    )
    for address, followed in follows.items():
        for partition in followed:
            if partition >= owners.partitions:
                raise InvalidArgument(
                    f"{address} follows partition {partition}, but partitions are 0 to "
                    f"{owners.partitions - 1}"
                )
    _check_grpc(owners, grpc)
    return ShardMap(owners, follows, grpc, zones)


def _check_grpc(owners: _native.ShardMap, grpc: Mapping[str, str]) -> None:
    """Refuse one gRPC address for servers of different partitions: it reaches one of them."""
    users: dict[str, tuple[str, list[int]]] = {}
    for address, owned in owners.servers:
        if address not in grpc:
            continue
        user, partitions = users.setdefault(grpc[address], (address, owned))
        if partitions != owned:
            raise InvalidArgument(
                f"{user} and {address} own different partitions, but both have the grpc_address "
                f"{grpc[address]}"
            )


def _describe(fault: Any) -> str:
    """Return one of pydantic's faults as text."""
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"])
    where = where.removeprefix(".") or "the file"
    if fault["type"] == "extra_forbidden":
        known = _ServerEntry if len(fault["loc"]) > 1 else _Document
        return f"{where} is not a known key; known are {', '.join(known.model_fields)}"
    if fault["type"] == "missing":
        return f"{where} is missing"
    if fault["type"] in ("model_type", "dict_type"):
        return f"{where} should be an object, not {fault['input']!r}"
    message = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    given = "" if fault["type"] == "value_error" else f", not {fault['input']!r}"
    return f"{where}: {message}{given}"


def ranges(partitions: Sequence[int]) -> list[int | str]:
    """Return partitions as numbers and ranges: [0, 1, 2, 7] -> ["0-2", 7]."""
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
