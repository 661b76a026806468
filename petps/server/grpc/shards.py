"""ReadShardMap: the map of the native port, as a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import petps.v1.petps_pb2 as messages
from petps.errors import FailedPrecondition, Unavailable

if TYPE_CHECKING:
    from petps import _native
    from petps.server.shard_map import ShardMap

__all__ = ["OlderMap", "Shards", "undivided"]


class OlderMap(Unavailable):
    """The caller's map is newer than the server's."""


def undivided(model: str, partitions: int) -> Any:
    """Return the ReadShardMapReply of a process that answers for all partitions of a model."""
    group = messages.ShardGroup(
        partitions=range(partitions), servers=[messages.ShardServer(answered=True)]
    )
    return messages.ReadShardMapReply(
        model=model,
        partitions=partitions,
        partitioning=messages.PARTITIONING_XXH3_64,
        groups=[group],
    )


class Shards:
    """The shard map that a server uses. Runs in the loop's thread."""

    def __init__(self, shard_map: Callable[[], ShardMap | None], address: str) -> None:
        """``shard_map`` returns the map in use, or None; ``address`` is the server's in it."""
        self._shard_map = shard_map
        self._address = address
        self._encoded: tuple[ShardMap | None, Any] = (None, None)

    @property
    def version(self) -> int:
        """Return the version of the map in use; 0: none."""
        shard_map = self._shard_map()
        return 0 if shard_map is None else shard_map.owners.version

    def reply(self, instance: _native.InstanceRecord, known_version: int) -> Any:
        """Return the ReadShardMapReply for a caller that has the map of ``known_version``.

        Raises OlderMap; FailedPrecondition if the map is of another model.
        """
        shard_map = self._shard_map()
        if shard_map is not None and shard_map.owners.model != instance.model:
            raise FailedPrecondition(
                f"the shard map of this server is not of model '{instance.model}': a server with "
                "a map serves one model; drop the other one"
            )
        version = 0 if shard_map is None else shard_map.owners.version
        if known_version > version:
            have = f"has shard map version {version}" if version else "has no shard map"
            raise OlderMap(
                f"the server {have}, but the caller has version {known_version}: retry, or ask "
                "another server; if it lasts, give this server the newer map"
            )
        if shard_map is None:
            # Without an address: behind a name or a proxy, this server does not know its own.
            return undivided(instance.model, instance.partitions)
        if known_version == version:
            return messages.ReadShardMapReply(model=instance.model, version=version, unchanged=True)
        encoded, reply = self._encoded
        if encoded is not shard_map:
            reply = _encode(shard_map, self._address)
            self._encoded = (shard_map, reply)
        return reply


def _encode(shard_map: ShardMap, answering: str) -> Any:
    owners = shard_map.owners
    reply = messages.ReadShardMapReply(
        model=owners.model,
        version=owners.version,
        partitions=owners.partitions,
        partitioning=messages.PARTITIONING_XXH3_64,
    )
    for partitions, addresses in shard_map.groups():
        group = reply.groups.add(partitions=partitions)
        for address in addresses:
            group.servers.add(
                address=address,
                grpc_address=shard_map.grpc.get(address, ""),
                zone=shard_map.zones.get(address, ""),
                answered=address == answering,
            )
    return reply
