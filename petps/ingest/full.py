"""Partitions whose rows could not be stored: how they stop, when they are tried again.

A refusal stops a partition before the first record that has no room. Its progress, and so its
version, stands before that record; other partitions go on. The record is tried again, longer apart
each time, and at once after a restart.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from petps.ingest.partition import PartitionState, Refusal
from petps.ingest.status import Mode
from petps.ingest.store import BaseReader, StoreTable

__all__ = ["full_reason", "harms", "is_due", "is_over", "stop_full", "try_again", "wait_longer"]

FIRST_SECONDS: Final = 0.1
LAST_SECONDS: Final = 10.0


def full_reason(table: StoreTable, rows: int) -> str:
    """Why rows of new keys were not stored, and what helps."""
    return (
        f"table '{table.schema.name}' is full (capacity {table.capacity:,}): {rows:,} new keys "
        "have no room. Nothing is skipped; they are stored once rows are deleted. Otherwise begin "
        "an instance (model@name) with a base, or load a base into a pool with a larger capacity"
    )


def stop_full(state: PartitionState, refusal: Refusal) -> None:
    """Stops a partition that followed. It is tried again at once the first time, then later."""
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
    """Puts the next try off, for twice as long as last time."""
    state.retry_wait = min(max(FIRST_SECONDS, 2 * state.retry_wait), LAST_SECONDS)
    state.retry_at = time.monotonic() + state.retry_wait


def is_over(state: PartitionState) -> bool:
    """Whether progress has passed the rows that had no room."""
    recorded, full = state.recorded, state.full
    return full is not None and state.following and (recorded.run, recorded.seq) >= full.until


def is_due(state: PartitionState, tables: Mapping[str, StoreTable]) -> bool:
    """Whether rows that had no room are to be tried again now."""
    full = state.full
    if full is None or state.mode is not Mode.FULL or state.refused is None:
        return False
    if time.monotonic() < state.retry_at:
        return False
    table = tables.get(full.table)
    tables_fault = table is not None and full.reason == full_reason(table, full.rows)  # or a disk's
    if state.retry_wait and table is not None and tables_fault and not table.has_room():
        wait_longer(state)
        return False
    return True


def try_again(state: PartitionState) -> None:
    """Follows again from what is recorded. Nothing of the partition may be under way."""
    state.refused = None
    state.mode = Mode.FOLLOWING


def harms(state: PartitionState, base: BaseReader, tables: Mapping[str, StoreTable]) -> bool:
    """Whether rows that are whole as of a version would become half a base's, for lack of room."""
    whole = state.mode is Mode.FULL and not state.standing.needs_base
    schemas = base.schemas()
    return whole and any(
        name in tables and base.rows(name) > tables[name].capacity for name in schemas
    )
