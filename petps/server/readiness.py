"""Why a partition of the log makes a server unready."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from petps._native import Progress
    from petps.server.ingest.status import PartitionHealth
    from petps.server.shard_map import ShardMap

__all__ = ["partition_reason"]


def partition_reason(
    health: Iterable[PartitionHealth],
    served_instance: str,
    limit: float,
    *,
    served_progress: Callable[[int], Progress | None],
    shard_map: ShardMap | None,
    address: str,
) -> str | None:
    """Return why the log makes the server unready, or None. ``limit``: of the lag; 0: none.

    served_progress: of the served instance, whichever instance the log feeds now.
    shard_map: only the partitions count that it gives to ``address``; None: all count. Others
    serve a partition until this server has caught up with it.
    """
    owned = None if shard_map is None else set(shard_map.owned_by(address))
    for partition in health:
        if owned is not None and partition.partition not in owned:
            continue
        if partition.instance != served_instance:
            served = served_progress(partition.partition)
            if served is not None and served.state not in ("following", "passing"):
                return f"partition {partition.partition} of {served_instance} is {served.state}"
            if partition.state == "catching_up":
                continue  # it loads an instance that no client is served from yet
        if reason := _lag_reason(partition, limit):
            return reason
    return None


def _lag_reason(partition: PartitionHealth, limit: float) -> str | None:
    """Return why this partition makes the server unready, or None. ``limit`` 0 means no limit."""
    lag, detail = partition.lag_seconds, f": {partition.reason}" if partition.reason else ""
    if partition.state not in ("following", "passing", "unreachable"):
        return f"partition {partition.partition} is {partition.state}{detail}"
    if limit == 0:
        return None
    if lag is None:
        return f"partition {partition.partition} has not reached the log's end yet{detail}"
    if lag > limit:
        return (
            f"partition {partition.partition} is {lag:.1f} s behind (ready_lag_seconds = "
            f"{limit:g}){detail}"
        )
    return None
