"""Whether a member follows the same log as the owners of a partition, by the runs of reports."""

from __future__ import annotations

from petps.cluster.records import PartitionReport, State

__all__ = ["has_other_runs"]


def has_other_runs(state: State, partition: int, target: str) -> bool:
    """Return whether a member is at the end of the log with another run than whole owners.

    A pool that followed another log, with newer runs, passes over all messages of this one. Owners
    count that serve the member's instance. A run of 0 is not known, and says nothing.
    """
    own = _at_end(state, partition, target)
    if own is None or not own.run or state.map is None:
        return False
    instance = state.members[target].instance
    reports = (
        _at_end(state, partition, owner)
        for owner in state.map.owners[partition]
        if owner in state.members and state.members[owner].instance == instance
    )
    runs = {report.run for report in reports if report is not None} - {0}
    return bool(runs) and own.run not in runs


def _at_end(state: State, partition: int, address: str) -> PartitionReport | None:
    member = state.members.get(address)
    report = None if member is None else member.partitions.get(partition)
    return report if report is not None and report.is_caught_up else None
