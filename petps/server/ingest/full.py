"""Partitions whose rows could not be stored: how they stop, and when they are tried again.

A refusal stops a partition before the first record that has no room. Its progress, and so its
version, ends before that record; other partitions continue. The record is tried again at growing
intervals, and immediately after a restart.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from petps.server.ingest.partition import PartitionState, Refusal
from petps.server.ingest.status import Mode
from petps.server.ingest.store import BaseReader, StoreTable

__all__ = ["full_reason", "harms", "is_due", "is_over", "stop_full", "try_again", "wait_longer"]

FIRST_SECONDS: Final = 0.1
LAST_SECONDS: Final = 10.0


def full_reason(table: StoreTable, rows: int) -> str:
    """Return the reason why rows of new keys were not stored, and the remedy."""
    return (
        f"table '{table.schema.name}' is full (capacity {table.capacity:,}): {rows:,} new keys "
        "have no room. Nothing is skipped; they are stored once rows are deleted. Otherwise begin "
        "an instance (model@name) with a base, or load a base into a pool with a larger capacity"
    )


def stop_full(state: PartitionState, refusal: Refusal) -> None:
    """Stop a following partition. The first retry comes at once, the next at growing intervals."""
    if state.full is None:
        state.retry_at = state.retry_wait = 0.0
    else:
        wait_longer(state)
    state.go_back()
    state.mode = Mode.FULL
    state.reason = ""
    state.refusals += 1
    state.full = refusal


def wait_longer(state: PartitionState) -> None:
    """Postpone the next retry, by twice the wait of the last one."""
    state.retry_wait = min(max(FIRST_SECONDS, 2 * state.retry_wait), LAST_SECONDS)
    state.retry_at = time.monotonic() + state.retry_wait


def is_over(state: PartitionState) -> bool:
    """Return whether progress has passed the rows that had no room."""
    recorded, full = state.recorded, state.full
    return full is not None and state.following and (recorded.run, recorded.seq) >= full.until


def is_due(state: PartitionState, tables: Mapping[str, StoreTable]) -> bool:
    """Return whether it is time to retry the rows that had no room."""
    full = state.full
    if full is None or state.mode is not Mode.FULL or state.refused is None:
        return False
    if time.monotonic() < state.retry_at:
        return False
    table = tables.get(full.table)
    # The table refused the rows; otherwise the disk did.
    tables_fault = table is not None and full.reason == full_reason(table, full.rows)
    if state.retry_wait and table is not None and tables_fault and not table.has_room():
        wait_longer(state)
        return False
    return True


def try_again(state: PartitionState) -> None:
    """Follow again from the recorded progress. Nothing of the partition may be in flight."""
    state.refused = None
    state.mode = Mode.FOLLOWING


def harms(state: PartitionState, base: BaseReader, tables: Mapping[str, StoreTable]) -> bool:
    """Return whether the base would damage rows that are consistent at some version.

    This is so if the tables cannot hold all of its rows: only a part of the base would be stored.
    """
    whole = state.mode is Mode.FULL and not state.standing.needs_base
    schemas = base.schemas()
    return whole and any(
        name in tables and base.rows(name) > tables[name].capacity for name in schemas
    )
