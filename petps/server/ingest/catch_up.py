"""Catch-up: makes partitions equal to a base."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from petps.delta.schema import partition_of
from petps.errors import FailedPrecondition, InvalidArgument
from petps.server.ingest.full import full_reason
from petps.server.ingest.partition import BaseMarker, PartitionState, Refusal
from petps.server.ingest.protocols import (
    BaseReader,
    Commit,
    InstanceTable,
    InstanceTables,
    Keys,
    Progress,
    Standing,
)

__all__ = ["CatchUp", "catch_up", "check_base", "count_partitions_at_once"]

# A catch-up keeps the base's keys of one table in memory, to delete all other keys of the table. A
# key takes 8 bytes, and exists in a few copies.
KEPT_KEYS_MAX: Final = 1 << 25


@dataclass(slots=True)
class CatchUp:
    """A running catch-up.

    targets: Its partitions, each with the progress to record at the end.
    marker: The base record that named the base; None: a search for bases found it.
    is_new_gap_if_failed: Whether a failure counts as a new gap, because a run begins with the base.
    offset_if_failed: The offset to continue at after a failure; None: the current reading position.
    steps: The generator of catch_up().
    """

    targets: list[tuple[PartitionState, Progress]]
    base: BaseReader
    marker: BaseMarker | None
    is_new_gap_if_failed: bool
    offset_if_failed: int | None
    steps: Generator[None, None, dict[int, Refusal]]


def count_partitions_at_once(base: BaseReader) -> int:
    """Return how many partitions one catch-up to the base may have, so that its keys fit."""
    largest = max((base.rows(name) for name in base.schemas()), default=0)
    return max(1, KEPT_KEYS_MAX * base.partitions // max(1, largest))


def check_base(
    instance: InstanceTables, base: BaseReader, tables: dict[str, InstanceTable]
) -> None:
    """Raise InvalidArgument, naming the difference, if the base does not fit this instance."""
    if base.model != instance.model:
        raise InvalidArgument(f"{base.name} is of model {base.model}, not of {instance.model}")
    if base.partitions != instance.partitions:
        raise InvalidArgument(
            f"{base.name} has {base.partitions} partitions, model {instance.model} has "
            f"{instance.partitions}"
        )
    pushed = instance.pushed_tables()
    schemas = {name: schema for name, schema in base.schemas().items() if name not in pushed}
    for name, schema in schemas.items():
        if name not in tables:
            raise InvalidArgument(f"{base.name} has a table {name}: create it in the pool first")
        own = tables[name].schema
        if (own.dtype, own.dim) != (schema.dtype, schema.dim):
            raise InvalidArgument(
                f"{base.name}: table {name} is {schema.dtype} of dim {schema.dim}, "
                f"in the pool {own.dtype} of dim {own.dim}"
            )
    for name in tables:
        if name not in schemas:
            raise InvalidArgument(
                f"{base.name} lacks table {name}: catching up to it would empty the table"
            )


def catch_up(
    instance: InstanceTables,
    base: BaseReader,
    targets: Sequence[tuple[Progress, Progress]],
    *,
    rows_max: int,
    pace: Callable[[int], None],
) -> Generator[None, None, dict[int, Refusal]]:
    """Make partitions equal to the base, one step per iteration.

    A step applies at most ``rows_max`` rows, so that other partitions need not wait for a large
    base. Between two steps, the caller may apply records of other partitions, but none of these.

    The catch-up first records its partitions as catching up, so that after a restart the catch-up
    begins again, and the old stream does not continue. It then applies the rows of the base, and
    then deletes the partitions' keys that the base lacks. Meanwhile pulls see old or new rows. With
    the progress at the end, it counts the commits that the base lists: so event time is what it
    would be if the partition had read them from the log.

    Args:
        instance: The instance to change.
        base: The base to read.
        targets: For each partition, its recorded progress and the progress to record at the end.
        rows_max: Largest number of rows in one apply.
        pace: Called with the number of rows after each apply; may block.

    Returns:
        {partition: refusal} of the partitions for whose rows the tables have no room. These
        partitions stay recorded as catching up.

    Raises:
        FailedPrecondition: The base is behind the applied rows.
        InvalidArgument: The base does not fit the instance. Nothing has changed.
        PetpsError: The base cannot be read, or an apply failed. If the partitions are recorded as
            catching up, they hold a mixture of old and new rows.
    """
    for before, after in targets:
        # After a power loss the age of the served rows is unknown: any base is better.
        lost_power = before.standing is Standing.LOST_POWER
        if not lost_power and (after.run, after.seq) < (before.run, before.seq):
            raise FailedPrecondition(
                f"{base.name} holds run {after.run} up to seq {after.seq}, and run {before.run} up "
                f"to seq {before.seq} is applied: a base behind the served rows is refused"
            )
    tables = dict(instance.tables())
    check_base(instance, base, tables)
    commits = base.commits()
    instance.record_progress(
        [
            replace(
                before,
                run=min(before.run, after.run),
                standing=Standing.CATCHING_UP,
                target=base.version,
            )
            for before, after in targets
        ]
    )
    partitions = {after.partition for _, after in targets}
    refused: dict[int, Refusal] = {}
    for table in tables.values():
        table_catch_up = _TableCatchUp(instance, table, base, partitions, rows_max, pace)
        yield from table_catch_up.apply()
        yield from table_catch_up.delete_absent()
        if len(table_catch_up.refused):  # the deletions may have made room
            yield from table_catch_up.apply()
        name, reason = table.schema.name, full_reason(table, len(table_catch_up.refused))
        for partition, rows in Counter(
            partition_of(table_catch_up.refused, instance.partitions).tolist()
        ).items():
            refused[partition] = Refusal(reason, name, rows)
    complete = [after for _, after in targets if after.partition not in refused]
    for table in tables.values():
        clocks = base.clocks(table.schema.name)
        for after in complete:
            if after.partition in clocks:
                table.adopt_clock(after.partition, clocks[after.partition])
    if not commits:
        instance.record_progress(complete)
    for after in complete if commits else ():  # a partition at a time, because they may be many
        partition = after.partition
        instance.record_progress(
            [after], [Commit(partition, version, time_ns) for version, time_ns in commits]
        )
    return refused


class _TableCatchUp:
    """One table of a catch-up, processed in steps."""

    def __init__(
        self,
        instance: InstanceTables,
        table: InstanceTable,
        base: BaseReader,
        partitions: Collection[int],
        rows_max: int,
        pace: Callable[[int], None],
    ) -> None:
        self._partition_count = instance.partitions
        self._table = table
        self._base = base
        self._partitions = partitions
        self._stamp = base.version & 0xFFFFFFFF
        self._rows_max = rows_max
        self._pace = pace
        self._kept = np.empty(0, np.uint64)
        self.refused = np.empty(0, np.uint64)
        """Keys that the table refused when they were last applied."""

    def apply(self) -> Iterator[None]:
        """Apply the base's rows."""
        kept = [np.empty(0, np.uint64)]
        self.refused = np.empty(0, np.uint64)
        chunks = self._base.stamped_chunks(self._table.schema.name, self._partitions)
        for keys, rows, stamps in chunks:
            kept.append(keys)
            for start in range(0, len(keys), self._rows_max):
                part = slice(start, start + self._rows_max)
                stamp = self._stamp if stamps is None else np.ascontiguousarray(stamps[part])
                report = self._table.apply(keys[part], rows[part], None, stamp)
                if report.refused:
                    absent = keys[part][~self._table.holds(keys[part])]
                    self.refused = np.concatenate([self.refused, absent])
                self._pace(len(keys[part]))
                yield
        self._kept = np.sort(np.concatenate(kept))

    def delete_absent(self) -> Iterator[None]:
        """Delete the partitions' keys that the base lacks."""
        # Deletions during the scan would work, but make it longer, and the table moves no entries
        # during a scan. So collect all keys first.
        absent = []
        for page in self._table.all_keys():
            is_own = np.isin(partition_of(page, self._partition_count), list(self._partitions))
            absent.append(_find_absent(page[is_own], self._kept))
            yield
        for keys in absent:
            if len(keys):
                self._table.apply(keys, None, np.ones(len(keys), np.bool_), self._stamp)
                yield


def _find_absent(keys: Keys, kept: Keys) -> Keys:
    """Return the keys that are not in ``kept``, which is sorted."""
    if len(kept) == 0:
        return keys
    at = np.searchsorted(kept, keys)
    at[at == len(kept)] = 0
    absent: Keys = keys[kept[at] != keys]
    return absent
