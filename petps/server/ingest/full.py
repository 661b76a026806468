"""Rules for retrying partitions whose rows could not be stored.

A refusal stops a partition before the first record that has no room. Its progress, and so its
version, ends before that record; other partitions continue. Ingest retries the record at growing
intervals, and immediately after a restart.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from petps.server.ingest.partition import PartitionState
from petps.server.ingest.protocols import BaseReader, InstanceTable
from petps.server.ingest.status import Mode

__all__ = ["full_reason", "harms", "is_due", "is_over"]


def full_reason(table: InstanceTable, rows: int) -> str:
    """Return why rows of new keys were not stored, and the remedy."""
    return (
        f"table '{table.schema.name}' is full (capacity {table.capacity:,}): {rows:,} new keys "
        "have no room. No row is skipped: they are stored once rows are deleted, or once the table "
        "has more capacity (petps table grow)"
    )


def is_over(state: PartitionState) -> bool:
    """Return whether progress has passed the rows that had no room."""
    recorded, full = state.recorded, state.full
    return full is not None and state.is_following and (recorded.run, recorded.seq) >= full.until


def is_due(state: PartitionState, tables: Mapping[str, InstanceTable]) -> bool:
    """Return whether it is time to retry the rows that had no room."""
    full = state.full
    if full is None or state.mode is not Mode.FULL or state.refused is None:
        return False
    if time.monotonic() < state.retry_at:
        return False
    table = tables.get(full.table)
    # The table refused the rows, or the disk did. has_room() only tells about the table.
    table_is_full = table is not None and full.reason == full_reason(table, full.rows)
    if state.retry_wait and table is not None and table_is_full and not table.has_room():
        state.wait_longer()
        return False
    return True


def harms(state: PartitionState, base: BaseReader, tables: Mapping[str, InstanceTable]) -> bool:
    """Return whether a catch-up to the base would make consistent rows inconsistent.

    It would if the tables cannot hold all rows of the base, because it would store only a part.
    """
    is_consistent = state.mode is Mode.FULL and not state.standing.needs_base
    return is_consistent and any(
        name in tables and base.rows(name) > tables[name].capacity for name in base.schemas()
    )
