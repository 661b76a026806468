"""Partitions whose log this server has not read to its end since it opened its pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from petps.cluster.records import PartitionReport

if TYPE_CHECKING:
    from petps import _native

__all__ = ["Unread"]


class Unread:
    """Tells the pool which partitions are unread, so that it answers no misses for their keys.

    A pool that was lost and created again has no rows, and the map names its server still. A
    partition of which the pool has applied anything is served at once; unread or not.
    """

    def __init__(self, tables: _native.Tables, partitions: int) -> None:
        self._tables = tables
        self._left = set(range(partitions))
        tables.set_unread(sorted(self._left))

    def note(self, reports: Mapping[int, PartitionReport]) -> None:
        """Take out what is caught up by now."""
        read = {partition for partition, report in reports.items() if report.is_caught_up}
        if self._left & read:
            self._left -= read
            self._tables.set_unread(sorted(self._left))
