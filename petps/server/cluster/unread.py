"""Partitions of which the pool was opened without rows, and whose log is not read to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from petps.cluster.records import PartitionReport

if TYPE_CHECKING:
    from petps import _native

__all__ = ["Unread"]


class Unread:
    """Tells the pool which partitions are unread, so that it answers no misses for their keys.

    A pool that was lost and created again has no rows, and the map names its server still. One with
    rows is served at once, however old they are: clients know which version they have seen.
    """

    def __init__(self, tables: _native.Tables, instance: _native.InstanceRecord) -> None:
        """``instance``: the one that the model's name refers to."""
        self._tables = tables
        self._left: set[int] = set()
        recorded = [tables.progress(instance.id, p) for p in range(instance.partitions)]
        fed = [
            table
            for table in tables.tables()
            if table.record.instance == instance.id and table.record.feed == "delta"
        ]
        is_loaded = any(table.status().rows for table in fed)  # if not by the log: `petps load`
        if any(recorded) or not is_loaded:
            self.add(p for p, progress in enumerate(recorded) if not _has_applied(progress))

    def add(self, partitions: Iterable[int]) -> None:
        """Add partitions whose rows were removed."""
        self._left.update(partitions)
        self._tables.set_unread(sorted(self._left))

    def note(self, reports: Callable[[], Mapping[int, PartitionReport]]) -> None:
        """Take out what is caught up by now, as the reports say."""
        if not self._left:
            return
        read = {partition for partition, report in reports().items() if report.is_caught_up}
        if self._left & read:
            self._left -= read
            self._tables.set_unread(sorted(self._left))


def _has_applied(progress: _native.Progress | None) -> bool:
    return progress is not None and (progress.run > 0 or progress.version > 0)
