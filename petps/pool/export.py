"""Export of a base from an open pool: every row of an instance, for `load` and for catch-up."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from petps import _native, checkpoint
from petps.checkpoint import BaseInfo, ClockEntry, Rows, list_positions, split_by_partition
from petps.delta import TableSchema
from petps.errors import DataLoss, FailedPrecondition
from petps.pool.damage import DamageLog

__all__ = [
    "Bar",
    "clock_entries",
    "count_removed",
    "distinct",
    "no_bar",
    "pull_whole",
    "write_base",
]

# (table, rows) -> a context; its value is a function to call with n after each n written rows.
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def no_bar(table: str, rows: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show nothing."""
    return nullcontext(lambda n: None)


def clock_entries(tables: _native.Tables, table: _native.Table) -> list[ClockEntry]:
    """Return the event times of a table whose rows expire."""
    return [
        ClockEntry(
            partition=partition,
            cell_ns=cell,
            time_ns=time,
            version=version,
            bounds=bounds,
            shown_ns=shown,
            debt_ns=debt,
        )
        for partition, (cell, time, version, bounds, shown, debt) in enumerate(
            tables.clocks(table.id)
        )
        if time > 0
    ]


def write_base(
    tables: _native.Tables,
    instance: _native.InstanceRecord,
    folder: str | PathLike[str],
    *,
    bar: Bar = no_bar,
) -> dict[str, Any]:
    """Write the base, which exists once this returns. May run beside pulls, pushes and ingest.

    Raises the errors of petps.checkpoint.write_base(), DataLoss at a damaged row, and
    FailedPrecondition if rows of a table that deltas feed are missing: servers that catch up to the
    base would delete them.
    """
    # Read the positions before the first row: the rows may be newer than they, but never older. The
    # deltas after these positions then supply what the rows missed.
    positions = {
        progress.partition: (progress.run, progress.seq)
        for progress in tables.all_progress()
        if progress.instance == instance.id
    }
    version = tables.applied_version(instance.id)
    path = Path(folder)
    own = [table for table in tables.tables() if table.record.instance == instance.id]
    _check_complete(tables, own)
    # After the positions, because the clocks must cover them. A commit that a clock counts and a
    # position does not is read again, and not counted again.
    clocks = {
        table.name: clock_entries(tables, table)
        for table in own
        if table.status().expire_after > 0 and table.record.feed == "delta"
    }
    info = BaseInfo(
        instance=instance.name,
        version=version,
        partitions=instance.partitions,
        positions=list_positions(positions),
        clocks=clocks,
    )
    rows = {
        TableSchema(table.name, table.dtype, table.dim): _read(
            tables, table, instance.partitions, bar, stamped=table.name in clocks
        )
        for table in own
    }
    counts = checkpoint.write_base(path, instance.model, info, rows, stamped=clocks)
    return {
        "folder": str(path),
        "model": instance.model,
        "instance": instance.name,
        "version": version,
        "tables": [{"name": name, "rows": count} for name, count in counts.items()],
        "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
    }


def distinct(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the distinct keys, ascending. np.unique() takes ten times as long."""
    ordered = np.sort(keys)
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    chosen: npt.NDArray[np.uint64] = ordered[is_first]
    return chosen


def pull_whole(
    table: _native.Table,
    keys: npt.NDArray[np.uint64],
    rows: npt.NDArray[np.uint8],
    exists: npt.NDArray[np.bool_],
    stamps: npt.NDArray[np.uint32] | None,
) -> None:
    """Pull stored rows, as Table.pull() does. Raise DataLoss at a damaged row."""
    own_keys = np.ascontiguousarray(keys)
    damaged = own_keys[table.find_damaged(own_keys)]
    if len(damaged):
        raise DataLoss(
            f"the row of key {damaged[0]} in table '{table.name}' is damaged: remove it with "
            "`petps scrub`, then try again"
        )
    table.pull(own_keys, rows, exists, stamps)


def count_removed(tables: Iterable[_native.Table]) -> int:
    """Return how many damaged rows of these tables were removed since the open."""
    return sum(table.status().damaged_slots for table in tables)


def _check_complete(tables: _native.Tables, own: list[_native.Table]) -> None:
    damage = DamageLog(tables)
    for table in own:
        count = max(damage.count_of(table.id), table.status().missing_rows)
        if table.record.feed == "delta" and count > 0:
            raise FailedPrecondition(
                f"{count:,} rows of table '{table.name}' were damaged and are missing, so a base "
                "would lack them: serve the pool until a base or a checkpoint version has "
                "restored them (petps status)"
            )


def _read(
    tables: _native.Tables, table: _native.Table, partitions: int, bar: Bar, *, stamped: bool
) -> Generator[Rows]:
    def rows_of(
        keys: npt.NDArray[np.uint64],
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        rows = np.empty((keys.shape[0], table.row_bytes), np.uint8)
        exists = np.empty(keys.shape[0], np.bool_)
        pull_whole(table, keys, rows, exists, None if stamps is None else stamps[: len(keys)])
        return rows, exists

    removed = count_removed([table])
    keys = distinct(table.keys())  # a key deleted and rewritten during the scan may appear twice
    stamps = np.empty(len(keys), np.uint32) if stamped else None
    schema = TableSchema(table.name, table.dtype, table.dim)
    with bar(table.name, len(keys)) as advance:
        yield from split_by_partition(
            schema, keys, rows_of, partitions, stamps=stamps, progress=advance
        )
    _check_complete(tables, [table])
    if count_removed([table]) != removed:  # and perhaps restored, after they were not found here
        raise FailedPrecondition(
            f"damaged rows of table '{table.name}' were removed during the export: export again"
        )
