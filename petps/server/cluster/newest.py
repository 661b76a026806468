"""Whether rows that a server shall remove are at another server too, in no older state.

An owner that was away for long is replaced by a server that has read the log, or a base. If the log
is empty by now and the base is older, then only the one that was away has the newest rows. So a
server removes the rows of a partition only when an owner reports at least their run and version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from petps.cluster.records import PartitionReport, State

__all__ = ["find_newer"]


def find_newer(
    applied: Callable[[str], PartitionReport],
    instance: str,
    partition: int,
    owners: Sequence[str],
    state: State,
) -> str:
    """Return why the rows must stay, or '' if an owner has them.

    applied: what this pool has of the partition in an instance. instance: the one that the model's
    name refers to here. state: with the reports of the owners.
    """
    own = applied(instance)
    if own.version == 0 and own.run == 0:
        return ""
    present = [state.members[owner] for owner in owners if owner in state.members]
    for member in present:
        report = member.partitions.get(partition)
        if report is not None and _has(report, applied(member.instance)):
            return ""
    known = [m.partitions[partition].version for m in present if partition in m.partitions]
    text = f"version {max(known)}" if known else "no version that is known"
    return (
        f"The rows of partition {partition} are not removed: they are of version {own.version}, "
        f"and its owners ({', '.join(owners)}) have {text}"
    )


def _has(report: PartitionReport, own: PartitionReport) -> bool:
    if report.run and own.run and report.run != own.run:
        return report.is_caught_up and report.run > own.run
    if own.version == 0:  # its rows are those of an unknown state
        return report.is_caught_up
    return report.version >= own.version
