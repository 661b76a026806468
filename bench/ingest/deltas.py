"""What all benchmarks of ingest share: deltas, a table that they replace, and one run of ingest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.delta import TableSchema, open_log
from petps.delta.headers import Message
from petps.publish import Publisher
from petps.server.ingest import Ingest
from petps.server.ingest.ingest import ROWS_MAX
from petps.server.ingest.native_tables import NativeInstanceTables

MODEL: Final = "bench"
TABLE: Final = "t"
SCHEMA: Final = TableSchema(TABLE, "f32", 128)
WAIT_SECONDS: Final = 120.0
Keys = npt.NDArray[np.uint64]


def draw_keys(count: int) -> Keys:
    """Return about ``count`` distinct keys."""
    return np.unique(np.random.default_rng(1).integers(1, 1 << 63, count, dtype=np.uint64))


def deltas(keys: Keys, rows: int) -> Iterator[tuple[Keys, npt.NDArray[np.float32]]]:
    """Yield endless deltas of ``rows`` full rows in random order.

    They cost little time, so that they do not slow a publisher down.
    """
    rng = np.random.default_rng(2)
    values = rng.standard_normal((rows, SCHEMA.dim), dtype=np.float32)
    while True:
        shuffled = rng.permutation(keys)
        for begin in range(0, len(keys) - rows + 1, rows):
            yield shuffled[begin : begin + rows], values


def publish(place: str, partitions: int, keys: Keys, rows: int, versions: int) -> int:
    """Publish ``versions`` deltas of ``rows`` rows to a new log. Return the number of rows."""
    with closing(open_log(place, partitions=partitions)) as log:
        publisher = Publisher(log, MODEL, tables=[SCHEMA])
        publisher.begin_continue(None)
        for delta in islice(deltas(keys, rows), versions):
            publisher.publish(TABLE, *delta)
            publisher.commit()
    return rows * versions


@contextmanager
def tables_of(path: Path, keys: Keys, partitions: int) -> Iterator[_native.Tables]:
    """Create a file pool whose table holds every key, so that deltas replace rows."""
    tables = _native.Tables.create(str(path), durability="process")
    try:
        instance = tables.create_instance(MODEL, f"{MODEL}@1", partitions)
        table = tables.create_table(
            TABLE, instance=instance.id, dim=SCHEMA.dim, dtype="f32", capacity=len(keys),
            feed="delta",
        )  # fmt: skip
        rows = np.ones((ROWS_MAX, SCHEMA.row_bytes), np.uint8)
        # The second pass touches the slots that replaced rows will use.
        for pass_number in range(2):
            for begin in range(0, len(keys), ROWS_MAX):
                part = keys[begin : begin + ROWS_MAX]
                table.apply(part, rows[: len(part)], None, pass_number)
        yield tables
    finally:
        tables.close()


def ingest_rate(
    place: str, partitions: int, tables: _native.Tables, total: int, versions: int, *, threads: int
) -> float:
    """Return ingest's rows a second into a file pool, from the first applied version to the last.

    The first versions are left out of the rate if more follow. ``threads``: of each apply.
    """
    with closing(open_log(place, partitions=partitions)) as log:
        instance = NativeInstanceTables(tables, MODEL, threads=threads)
        ingest = Ingest(log, instance, dead_letters=_NoDeadLetters())
        began, first = time.monotonic(), 0
        ingest.start()
        if not ingest.wait_for(1, WAIT_SECONDS):
            raise SystemExit(f"ingest makes no progress: {ingest.status().as_json()}")
        # If all versions are applied already, the topic is too short to leave the first ones out.
        if (applied := ingest.version()) < versions:
            began, first = time.monotonic(), applied
        if not ingest.wait_for(versions, WAIT_SECONDS):
            raise SystemExit(f"ingest makes no progress: {ingest.status().as_json()}")
        seconds = time.monotonic() - began
        ingest.stop()
    return total * (1 - first / versions) / seconds


class _NoDeadLetters:
    """A dead-letter sink that ends the benchmark, because nothing should be refused here."""

    def add(self, partition: int, offset: int, reason: str, message: Message | None) -> None:
        """End the benchmark."""
        raise SystemExit(f"the message at {offset} of partition {partition} was refused: {reason}")
