"""Partitions whose log is empty because retention removed all that it had held."""

from __future__ import annotations

from collections.abc import Mapping

from petps.delta import DeltaLog
from petps.delta.log import Event, Lost
from petps.server.ingest.follow import Follower
from petps.server.ingest.partition import PartitionState
from petps.server.ingest.protocols import InstanceTables

__all__ = ["EmptiedLogs"]


class EmptiedLogs:
    """Finds partitions whose rows were published, and that the log does not hold any more.

    A pool without progress of a partition begins to read at the start of the log. If messages
    follow, the first one shows that others are gone. If none does, nothing shows it, and the
    partition would count as caught up without its rows. Only a base brings them.

    ASSUMPTIONS: one thread calls all methods; others read ``undecided``.
    """

    def __init__(self, log: DeltaLog) -> None:
        self._log = log
        self._starts: dict[int, int] = {}  # of partitions that may be emptied
        self.undecided: frozenset[int] = frozenset()
        """The partitions that may be emptied."""

    def begin(self, starts: Mapping[int, int]) -> None:
        """Begin anew. ``starts``: the offset at which the log of each partition begins."""
        self._starts = {partition: start for partition, start in starts.items() if start > 0}
        self.undecided = frozenset(self._starts)

    def find(
        self, states: Mapping[int, PartitionState], followers: Mapping[int, Follower]
    ) -> list[Event]:
        """Return the losses, each once. Call it when the log has delivered nothing.

        An instance with rows and without any progress was filled by ``petps load``.
        """
        unread = [
            partition
            for partition, start in self._starts.items()
            if states[partition].is_unread and states[partition].offset == start
        ]
        if not unread:
            return []
        ends = self._log.end_offsets(unread)
        found: list[Event] = []
        for partition in unread:
            if states[partition].offset < ends[partition]:
                continue  # it will be delivered
            del self._starts[partition]
            instance = followers[partition].instance
            is_fed = any(
                state.has_applied and followers[other].instance.name == instance.name
                for other, state in states.items()
            )
            if is_fed or not _has_rows(instance):
                found.append(Lost(partition, 0, ends[partition], ends[partition]))
        self.undecided = frozenset(self._starts)
        return found


def _has_rows(instance: InstanceTables) -> bool:
    return any(len(keys) for table in instance.tables().values() for keys in table.all_keys())
