"""petps cluster init --restored: the newest map goes back into an etcd of a backup."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from petps.cli.output import note
from petps.errors import AlreadyExists, FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from petps.cli.cluster_target import ClusterTarget
    from petps.cluster.records import State

__all__ = ["document_of", "put_back"]

OPERATIONS_MAX: Final = 100  # of a transaction; etcd allows 128 by default


def put_back(target: ClusterTarget, state: State, path: Path | None) -> None:
    """Let a map of a server's disk take the place of an older one, and of all orders with it."""
    from petps.cluster.etcd import Compare
    from petps.cluster.maps import ClusterMap
    from petps.cluster.records import Drop, dump

    if path is None:
        raise InvalidArgument(
            "--restored needs MAP: the POOL.map.json with the highest version of all servers"
        )
    newest = ClusterMap.of(document_of(path, state))
    for member in state.members.values():
        if member.map_version > newest.version:
            raise FailedPrecondition(
                f"{path} has version {newest.version}, and {member.address} uses version "
                f"{member.map_version}: give the POOL.map.json of that server"
            )
    restored = replace(newest, version=newest.version + 1, follows={})
    compare = Compare(target.keys.map, state.revisions.get(target.keys.map, 0))
    # Of servers that followed a partition to get it, or to give it away: what pushes did not write
    # comes from the log again.
    drops = {
        target.keys.drop(address, partition): dump(Drop(address, partition, restored.version))
        for address, partitions in newest.follows.items()
        for partition in sorted(partitions)
    }
    old = [
        key
        for key in sorted(state.revisions)
        if key.startswith(target.keys.orders) and key != target.keys.map
    ]
    for start in range(0, len(old), OPERATIONS_MAX):
        part = tuple(old[start : start + OPERATIONS_MAX])
        if target.etcd.commit((compare,), {}, part) is None:
            raise AlreadyExists("somebody else wrote a map just now: petps cluster status")
    if target.etcd.commit((compare,), {target.keys.map: restored.dump(), **drops}) is None:
        raise AlreadyExists("somebody else wrote a map just now: petps cluster status")
    note(f"the map of '{newest.model}' is in etcd again, as version {restored.version}")


def document_of(path: Path, state: State) -> dict[str, Any]:
    """Return the document of a shard map's file. Raises InvalidArgument for another model."""
    from petps.server.shard_map import MapFile

    document = MapFile(path).read().as_json()
    if document["model"] != state.model:
        raise InvalidArgument(
            f"{path} is of model '{document['model']}', and the cluster's is '{state.model}'"
        )
    return document
