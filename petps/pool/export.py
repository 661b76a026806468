"""Export of a base from an open pool: every row of an instance, for `load` and for catch-up."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.checkpoint.base import BaseWriter
from petps.delta import TableSchema
from petps.errors import IoError, PetpsError, ResourceExhausted

__all__ = ["Bar", "write_base"]

# (table, rows) -> a context; its value is a function to call with n after each n written rows.
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def _no_bar(table: str, rows: int) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda n: None)


def write_base(
    tables: _native.Tables,
    instance: _native.InstanceRecord,
    folder: str | PathLike[str],
    *,
    bar: Bar = _no_bar,
) -> dict[str, Any]:
    """Write the base, which exists once this returns. May run beside pulls, pushes and ingest.

    Raises AlreadyExists (the folder holds a base), ResourceExhausted or IoError (the disk). After
    an error it removes what it wrote, or names the files that it could not remove.
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
    writer = BaseWriter(
        path,
        model=instance.model,
        instance=instance.name,
        partitions=instance.partitions,
        positions=positions,
        version=version,
    )
    own = [table for table in tables.tables() if table.record.instance == instance.id]
    try:
        written = [{"name": table.name, "rows": _write_table(writer, table, bar)} for table in own]
        writer.commit()
    except BaseException as error:
        left = ", ".join(str(file) for file in writer.discard())
        told = f"; remove what is left of it: {left}" if left else "; nothing is left of it"
        if isinstance(error, OSError):
            kind = ResourceExhausted if error.errno in (errno.ENOSPC, errno.EDQUOT) else IoError
            reason = error.strerror or str(error)
            raise kind(f"base {path} was not written: {reason}{told}") from error
        if isinstance(error, PetpsError):
            error.args = (f"{error}{told}",)  # a new error would lose attributes such as report
        raise
    return {
        "folder": str(path),
        "model": instance.model,
        "instance": instance.name,
        "version": version,
        "tables": written,
        "bytes": sum(file.stat().st_size for file in path.iterdir()),
    }


def _write_table(writer: BaseWriter, table: _native.Table, bar: Bar) -> int:
    def rows_of(
        keys: npt.NDArray[np.uint64],
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        rows = np.empty((keys.shape[0], table.row_bytes), np.uint8)
        there = np.empty(keys.shape[0], np.bool_)
        table.pull(np.ascontiguousarray(keys), rows, there)
        return rows, there

    keys = np.unique(table.keys())  # a key deleted and rewritten during the scan may appear twice
    schema = TableSchema(table.name, table.dtype, table.dim)
    with bar(table.name, len(keys)) as advance:
        return writer.add_table(schema, keys, rows_of, progress=advance)
