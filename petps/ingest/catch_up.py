"""Catch-up: makes one partition equal to a base. DESIGN section 9."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from petps.delta.schema import partition_of
from petps.errors import FailedPrecondition, InvalidArgument
from petps.ingest.store import BaseReader, Keys, Progress, Store, StoreTable

__all__ = ["catch_up", "check_base"]


def check_base(store: Store, base: BaseReader, tables: dict[str, StoreTable]) -> None:
    """Raises InvalidArgument, naming the difference, when the base is not of this instance."""
    if base.model != store.model:
        raise InvalidArgument(f"{base.name} is of model {base.model}, not of {store.model}")
    if base.partitions != store.partitions:
        raise InvalidArgument(
            f"{base.name} has {base.partitions} partitions, model {store.model} {store.partitions}"
        )
    schemas = base.schemas()
    for name, schema in schemas.items():
        if name not in tables:
            raise InvalidArgument(f"{base.name} has a table {name}: create it in the pool first")
        ours = tables[name].schema
        if (ours.dtype, ours.dim) != (schema.dtype, schema.dim):
            raise InvalidArgument(
                f"{base.name}: table {name} is {schema.dtype} of dim {schema.dim}, "
                f"in the pool {ours.dtype} of dim {ours.dim}"
            )
    for name in tables:
        if name not in schemas:
            raise InvalidArgument(
                f"{base.name} lacks table {name}: catching up to it would empty the table"
            )


def catch_up(
    store: Store,
    base: BaseReader,
    before: Progress,
    after: Progress,
    *,
    refused: Callable[[str, int], None],
    pace: Callable[[int], None],
) -> None:
    """Makes partition ``after.partition`` equal to the base, then records ``after``.

    First records ``before`` as catching up: a crash resumes this and never the old stream. Rows of
    the base are applied, then keys of the partition that it lacks are deleted; pulls see old or new
    rows meanwhile. ``pace`` is told of rows applied, and may wait; ``refused`` of the rows that a
    full table did not take. Raises PetpsError; while progress says "catching up", rows are mixed.
    """
    if (after.run, after.seq) < (before.run, before.seq):
        raise FailedPrecondition(
            f"{base.name} holds run {after.run} up to seq {after.seq}, and run {before.run} up to "
            f"seq {before.seq} is applied: a base behind the served rows is refused"
        )
    tables = dict(store.tables())
    check_base(store, base, tables)
    store.record_progress(replace(before, catching_up=True, target=base.version))
    stamp = base.version & 0xFFFFFFFF
    for table in tables.values():
        kept, count = _apply_base(table, base, after.partition, stamp, pace)
        _delete_absent(table, kept, after.partition, store.partitions, stamp)
        if count:  # the table was full of rows that are gone now
            count = _apply_base(table, base, after.partition, stamp, pace)[1]
        refused(table.schema.name, count)
    store.record_progress(after)


def _apply_base(
    table: StoreTable, base: BaseReader, partition: int, stamp: int, pace: Callable[[int], None]
) -> tuple[Keys, int]:
    """Applies the base's rows; their keys, and how many a full table refused."""
    kept = [np.empty(0, np.uint64)]
    refused = 0
    for keys, rows in base.chunks(table.schema.name, partition):
        refused += table.apply(keys, rows, None, stamp).refused
        kept.append(keys)
        pace(len(keys))
    return np.sort(np.concatenate(kept)), refused


def _delete_absent(
    table: StoreTable, kept: Keys, partition: int, partitions: int, stamp: int
) -> None:
    """Deletes the partition's keys that are not in ``kept`` (sorted)."""
    # All first: deleting while a scan is open would work, but holds migration off for longer.
    absent = [_absent(page, kept, partition, partitions) for page in table.all_keys()]
    for keys in absent:
        if len(keys):
            table.apply(keys, None, np.ones(len(keys), np.bool_), stamp)


def _absent(page: Keys, kept: Keys, partition: int, partitions: int) -> Keys:
    ours: Keys = page[partition_of(page, partitions) == partition]
    if len(kept) == 0:
        return ours
    at = np.searchsorted(kept, ours)
    at[at == len(kept)] = 0
    absent: Keys = ours[kept[at] != ours]
    return absent
