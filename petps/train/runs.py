"""A training's run of the log: its publishers, and how it begins.

Owns:        publisher_of(), begin_run(), check_bases().
Never does:  publish rows.
Called by:   trainers, demo, bench; ranks.py (begin_run).
Invariants:  all ranks publish the same run, which rank 0 chooses. After it has begun, a server
             that follows the log has the trainer's rows, bit by bit.
Threads:     the pipeline's caller.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from petps.checkpoint import BaseInfo, Column, Store, split_by_partition, write_base
from petps.checkpoint.bundle import CHUNK_BYTES
from petps.checkpoint.chunk import Bytes, Mask
from petps.delta import DeltaLog, TableSchema
from petps.errors import InvalidArgument
from petps.publish import Publisher
from petps.train.agree import fail_together, follow_first
from petps.train.behind import GIVE_UP_AFTER_SECONDS, PatientLog
from petps.train.link import Link
from petps.train.lone import Tables
from petps.train.message import read_bool, read_int
from petps.train.restored import Restored
from petps.train.stamps import Stamps
from petps.train.table import ROW, Keys, TrainedTable, widths_of

__all__ = ["begin_run", "check_bases", "publisher_of"]

# A server may still read the base of the run before.
RUNS_KEPT: Final = 2


def publisher_of(
    log: DeltaLog,
    model: str,
    tables: Tables,
    link: Link,
    *,
    schemas: Iterable[TableSchema] | None = None,
    give_up_after: float = GIVE_UP_AFTER_SECONDS,
) -> Publisher:
    """Make this rank's publisher, for the run that rank 0 chooses.

    All ranks call this; afterwards each one begins the run. schemas: what to publish; None:
    float32 rows of all tables. give_up_after: seconds to wait while the log has no space. Raises as
    Publisher does, or Unavailable, which names the rank whose publisher could not be made.
    """
    published = list(schemas or (TableSchema(t.name, "f32", widths_of(t)[ROW]) for t in tables))
    patient: Any = PatientLog(log, give_up_after)

    def make(run: int | None, own: range | None) -> Publisher:
        return Publisher(patient, model, tables.partitions, tables=published, run=run, own=own)

    with fail_together(link, "the log's run was not begun"):
        own_run = make(None, None).run if link.rank == 0 else 0
    run = follow_first(link, {"run": own_run}, {"run": read_int})["run"]
    # No rank begins before all have read the state of the log.
    with fail_together(link, "the log's run was not begun"):
        return make(run, tables.owned_partitions())


def check_bases(store: Store | None, publisher: Publisher | None, bases: object) -> None:
    """Raise InvalidArgument if a run needs a folder of bases and there is none."""
    is_quantised = store is not None and store.state.quantising is not None
    if is_quantised and publisher is not None and bases is None:
        raise InvalidArgument(
            "a quantised store rounds rows, so a run that continues from it begins with a base: "
            "give bases, a folder that servers read, or a store with quantising=None"
        )


def begin_run(
    publisher: Publisher,
    tables: Tables,
    link: Link,
    restored: Restored,
    bases: Path | None,
    stamps: Stamps,
) -> bool:
    """Begin the run on this rank; return whether it begins with a base. All ranks call it.

    The rows that the trainer has now are those of the log if their version was exact and has a
    position, or if the log is empty. Otherwise each rank writes a base with its own rows into a
    folder of ``bases``, which the markers of its partitions name. The rows keep their ``stamps``
    there, if the store has these and anything was published before; otherwise servers give them the
    base's version. Without ``bases``, servers catch up to the store's next version (bases: None).
    """
    log, is_empty = publisher.log, False
    with fail_together(link, "the log's run was not begun"):
        if link.rank == 0:
            is_empty = not any(log.end_offsets(range(log.partitions)).values())
    can_continue = is_empty if restored.step == 0 else restored.is_exact and bool(restored.position)
    # Rank 0 decides, because another rank may read the log later.
    can_continue = follow_first(link, {"continue": can_continue}, {"continue": read_bool})[
        "continue"
    ]
    if can_continue or bases is None:
        publisher.begin_continue(restored.position)
        return False
    folder = bases.absolute() / f"{publisher.model}-run-{publisher.run}-rank-{link.rank}"
    # Above what servers may have, also of a log whose messages were deleted.
    version = max(publisher.version, restored.position.version if restored.position else 0) + 1
    with fail_together(link, "the log's run was not begun"):
        info = BaseInfo(instance=publisher.model, version=version, partitions=tables.partitions)
        stamped = stamps.cover_all and len(stamps.commits) > 0
        rows = {}
        for table in tables:
            for schema in publisher.schemas:
                if schema.name == table.name:
                    served = _ServedRows(table, schema, stamps if stamped else None)
                    rows[schema] = split_by_partition(
                        schema, table.keys(), served, tables.partitions, stamps=served.stamps
                    )
        write_base(
            folder, publisher.model, info, rows,
            stamped=stamps.names if stamped else (), commits=stamps.commits if stamped else None,
        )  # fmt: skip
    publisher.begin_base(str(folder), version=version, step=restored.step, stamped=stamped)
    if link.rank == 0:
        _remove_old(bases, publisher.model)
    return True


class _ServedRows:
    """The rows of keys of a trained table, as uint8[n, row_bytes], and which of them exist.

    stamps: uint32[n or more], where a call puts those of the rows; None: they have none.
    """

    def __init__(self, table: TrainedTable, schema: TableSchema, known: Stamps | None) -> None:
        self._table = table
        self._column = Column(ROW, schema.dtype, schema.dim)
        self._known = known
        rows = CHUNK_BYTES // (8 + schema.row_bytes) + 1
        self.stamps = None if known is None else np.empty(rows, np.uint32)

    def __call__(self, keys: Keys) -> tuple[Bytes, Mask | None]:
        gathered = self._table.gather(keys)
        rows = self._column.stored(np.ascontiguousarray(gathered.columns[ROW]))
        if self._known is not None and self.stamps is not None:
            self.stamps[: len(keys)] = self._known.of(self._table.name, keys, gathered)
        return rows, None if gathered.deleted is None else ~gathered.deleted


def _remove_old(bases: Path, model: str) -> None:
    """Remove the bases of all but the model's newest runs."""
    own = re.compile(rf"{re.escape(model)}-run-(\d+)-rank-\d+")
    matches = [match for path in bases.iterdir() if (match := own.fullmatch(path.name))]
    newest = sorted({int(match[1]) for match in matches})[-RUNS_KEPT:]
    for match in matches:
        if int(match[1]) not in newest:
            shutil.rmtree(bases / match[0], ignore_errors=True)
