"""Whether rows that a server shall remove are at another server too, in no older state.

An owner that was away for long is replaced by a server that has read the log, or a base. If the log
is empty by now and the base is older, then only the one that was away has the newest rows. So a
server removes the rows of a partition only when an owner reports at least its version.
"""

from __future__ import annotations

from collections.abc import Sequence

from petps.cluster.records import Member, PartitionReport, State

__all__ = ["find_newer"]


def find_newer(
    own: PartitionReport, instance: str, partition: int, owners: Sequence[str], state: State
) -> str:
    """Return why the rows must stay, or '' if an owner has them.

    own: what this pool has applied. instance: the one that the model's name refers to here.
    """
    if own.version == 0:
        return ""
    present = [state.members[owner] for owner in owners if owner in state.members]
    if any(_has(member, own, instance, partition) for member in present):
        return ""
    known = [m.partitions[partition].version for m in present if partition in m.partitions]
    text = f"version {max(known)}" if known else "no version that is known"
    return (
        f"The rows of partition {partition} are not removed: they are of version {own.version}, "
        f"and its owners ({', '.join(owners)}) have {text}"
    )


def _has(member: Member, own: PartitionReport, instance: str, partition: int) -> bool:
    report = member.partitions.get(partition)
    if report is None or not report.is_caught_up:
        return False
    if member.instance != instance:
        return True  # of which versions cannot be compared; the cluster has decided
    if report.run and own.run and report.run != own.run:
        return report.run > own.run
    return report.version >= own.version
