"""A base for the run of the log with which a trainer continues from a quantised version.

The store has rounded the rows, and the trainer has the rounded ones after a restore. A server that
follows the log has the rows from before the kill. With a continue marker it would catch up to the
next version of the store, in which rows are rounded that the trainer has exactly. So the run begins
with a base that has what the trainer has; the log has every row that is trained after it.

Owns:        write_restored_base().
Never does:  begin the run.
Called by:   rank.py, on rank 0.
Threads:     the trainer's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from examples.demo.trainer import MODEL
from examples.demo.training.task import PARTITIONS
from petps.checkpoint import BaseInfo, Rows, Store, Table, split_by_partition, write_base
from petps.delta import TableSchema
from petps.train.table import ROW, Keys

__all__ = ["write_restored_base"]


def write_restored_base(folder: Path, store: Store, version: int, log_version: int) -> None:
    """Write the rows of a version of the store, as a restore decodes them, in a new folder.

    The base is divided by partition, because a server loads each partition on its own. It is not a
    version of the store, so no purge deletes it. log_version: what begin_base() is given.
    """
    tables = store.tables_of(version)
    pieces = {}
    for name, rows in store.restore(version).items():
        schema = TableSchema(name, "f32", tables[name].columns[0].dim)
        pieces[schema] = split_by_partition(
            schema, rows.keys, _RowsOf(tables[name], rows), PARTITIONS
        )
    info = BaseInfo(instance=MODEL, version=log_version, partitions=PARTITIONS)
    write_base(folder, MODEL, info, pieces)


class _RowsOf:
    """The rows of keys of a table, as uint8[n, 4 dim]."""

    def __init__(self, table: Table, rows: Rows) -> None:
        self._column = next(column for column in table.columns if column.name == ROW)
        self._rows = rows

    def __call__(self, keys: Keys) -> tuple[npt.NDArray[np.uint8], None]:
        stored = self._rows.columns[ROW][np.searchsorted(self._rows.keys, keys)]
        return self._column.values(stored).view(np.uint8), None
