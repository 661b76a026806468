"""The publishers of a training's run of the log.

Owns:        publisher_of().
Never does:  publish.
Called by:   trainers, demo, bench.
Invariants:  all ranks publish the same run, which rank 0 chooses.
Threads:     the pipeline's caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from petps.delta import DeltaLog, TableSchema
from petps.publish import Publisher
from petps.train.agree import fail_together, gather_bytes
from petps.train.behind import GIVE_UP_AFTER_SECONDS, PatientLog
from petps.train.link import Link
from petps.train.lone import Tables
from petps.train.table import ROW, widths_of

__all__ = ["publisher_of"]


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
    run = int(gather_bytes(link, str(own_run).encode())[0])
    # No rank begins before all have read the state of the log.
    with fail_together(link, "the log's run was not begun"):
        return make(run, tables.owned_partitions())
