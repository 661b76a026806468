"""The shard map as the controller changes it: the content of petps/server/FORMAT.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from petps._native import MAX_PARTITIONS, MAX_SHARD_SERVERS

__all__ = ["ClusterMap"]


@dataclass(frozen=True)
class ClusterMap:
    """A shard map. owners: those of each partition. follows: the partitions of each address.

    grpc and zones: of the addresses that have one. Every method returns another map with the next
    version; the caller publishes at most one of each version.
    """

    model: str
    version: int
    owners: tuple[tuple[str, ...], ...]
    follows: Mapping[str, frozenset[int]] = field(default_factory=dict)
    grpc: Mapping[str, str] = field(default_factory=dict)
    zones: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(document: Mapping[str, Any]) -> ClusterMap:
        """Return the map in the document of a valid file. Raises ValueError and the like."""
        partitions, servers = int(document["partitions"]), document["servers"]
        if not 1 <= partitions <= MAX_PARTITIONS or len(servers) > MAX_SHARD_SERVERS:
            raise ValueError(
                f"{partitions} partitions on {len(servers)} servers; there may be 1 to "
                f"{MAX_PARTITIONS} on at most {MAX_SHARD_SERVERS}"
            )
        owners: list[list[str]] = [[] for _ in range(partitions)]
        follows, grpc, zones = {}, {}, {}
        for server in servers:
            address = _text(server["address"])
            for partition in _expanded(server["partitions"], partitions):
                owners[partition].append(address)
            if followed := _expanded(server.get("follows") or [], partitions):
                follows[address] = frozenset(followed)
            if server.get("grpc_address"):
                grpc[address] = _text(server["grpc_address"])
            if server.get("zone"):
                zones[address] = _text(server["zone"])
        for partition, present in enumerate(owners):
            if not present:
                raise ValueError(f"partition {partition} is owned by no server")
        version = int(document["version"])
        model = _text(document["model"])
        return ClusterMap(model, version, tuple(map(tuple, owners)), follows, grpc, zones)

    def dump(self) -> str:
        """Return the JSON of the file."""
        owned: dict[str, list[int]] = {}
        for partition, present in enumerate(self.owners):
            for address in present:
                owned.setdefault(address, []).append(partition)
        servers: list[dict[str, Any]] = []
        for address in sorted({*owned, *self.follows}):
            server: dict[str, Any] = {"address": address}
            if address in self.grpc:
                server["grpc_address"] = self.grpc[address]
            if address in self.zones:
                server["zone"] = self.zones[address]
            server["partitions"] = _ranges(owned.get(address, []))
            if self.follows.get(address):
                server["follows"] = _ranges(self.follows[address])
            servers.append(server)
        return json.dumps(
            {
                "model": self.model,
                "version": self.version,
                "partitions": len(self.owners),
                "servers": servers,
            }
        )

    def owners_of(self, partition: int) -> tuple[str, ...]:
        """Return the owners of a partition; none of one that does not exist."""
        return self.owners[partition] if partition < len(self.owners) else ()

    def ingested_by(self, address: str) -> frozenset[int]:
        """Return the partitions that an address owns or follows."""
        return self.follows.get(address, frozenset()) | {
            partition for partition, present in enumerate(self.owners) if address in present
        }

    def described(self, address: str, grpc_address: str | None, zone: str) -> ClusterMap:
        """Return this map, with the same version, and what is known of an address."""
        grpc = {key: value for key, value in self.grpc.items() if key != address}
        zones = {key: value for key, value in self.zones.items() if key != address}
        if grpc_address is not None:
            grpc[address] = grpc_address
        if zone:
            zones[address] = zone
        return replace(self, grpc=grpc, zones=zones)

    def again(self) -> ClusterMap:
        """Return the same owners and followers."""
        return replace(self, version=self.version + 1)

    def with_follower(self, partition: int, address: str) -> ClusterMap:
        """Return the map in which an address follows the partition too."""
        followed = self.follows.get(address, frozenset()) | {partition}
        return self._next(follows={**self.follows, address: followed})

    def without_follower(self, partition: int, address: str) -> ClusterMap:
        """Return the map in which an address does not follow the partition."""
        return self._next(follows=self._unfollowed(partition, address))

    def with_owner(self, partition: int, source: str | None, target: str | None) -> ClusterMap:
        """Return the map in which ``target`` owns the partition in place of ``source``.

        The source follows it. None: no owner is added, or none ends.
        """
        present = [address for address in self.owners[partition] if address != source]
        if target is not None and target not in present:
            present.append(target)
        follows = self.follows if target is None else self._unfollowed(partition, target)
        if source is not None:
            follows = {**follows, source: follows.get(source, frozenset()) | {partition}}
        owners = list(self.owners)
        owners[partition] = tuple(present)
        return replace(self._next(follows=follows), owners=tuple(owners))

    def _unfollowed(self, partition: int, address: str) -> Mapping[str, frozenset[int]]:
        followed = self.follows.get(address, frozenset()) - {partition}
        others = {key: value for key, value in self.follows.items() if key != address}
        return {**others, address: followed} if followed else others

    def _next(self, *, follows: Mapping[str, frozenset[int]]) -> ClusterMap:
        return replace(self, version=self.version + 1, follows=follows)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is no name or address")
    return value


def _expanded(items: Iterable[Any], count: int) -> list[int]:
    """Return the partitions of a list of numbers and ranges. Raises ValueError."""
    partitions: list[int] = []
    for item in items:
        low, _, high = str(item).partition("-")
        first, last = int(low), int(high or low)
        if not 0 <= first <= last < count or len(partitions) + last - first >= count:
            raise ValueError(f"'{item}' is no range of the partitions 0 to {count - 1}, each once")
        partitions += range(first, last + 1)
    return partitions


def _ranges(partitions: Iterable[int]) -> list[int | str]:
    spans: list[list[int]] = []
    for partition in sorted(partitions):
        if spans and partition == spans[-1][1] + 1:
            spans[-1][1] = partition
        else:
            spans.append([partition, partition])
    return [first if first == last else f"{first}-{last}" for first, last in spans]
