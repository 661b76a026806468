"""A part of a copy of push-fed rows: one file of the store. FORMAT.md of petps/cluster has it."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.delta.schema import partition_of
from petps.errors import DataLoss, FailedPrecondition, InvalidArgument, ResourceExhausted
from petps.pool.export import pull_whole

if TYPE_CHECKING:
    from petps.checkpoint.files import Files

__all__ = [
    "Changes", "folder_of", "keys_of", "path_of", "pushed_tables", "read_part", "write_part",
]  # fmt: skip

FORMAT: Final = 1
Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Changes:
    """Rows of a table and keys without one.

    keys: uint64[n]; rows: uint8[n, row_bytes], as stored; stamps: uint32[n]; deleted: uint64[m].
    """

    instance: str
    table: str
    dtype: str
    keys: Keys
    rows: npt.NDArray[np.uint8]
    stamps: npt.NDArray[np.uint32]
    deleted: Keys

    @classmethod
    def of(cls, instance: str, table: _native.Table, keys: Keys) -> Changes:
        """Return what the table has of these keys now. Raises DataLoss for a damaged row."""
        rows = np.empty((len(keys), table.row_bytes), np.uint8)
        exists = np.zeros(len(keys), np.bool_)
        stamps = np.zeros(len(keys), np.uint32)
        pull_whole(table, keys, rows, exists, stamps)
        return cls(
            instance, table.name, table.dtype, keys[exists], rows[exists], stamps[exists],
            keys[~exists],
        )  # fmt: skip

    def apply(self, tables: _native.Tables) -> None:
        """Write the rows and delete the keys. Durable on return.

        Raises FailedPrecondition if the pool has no such table, and ResourceExhausted if it is
        full.
        """
        table = _find(tables, self.instance, self.table)
        if (table.dtype, table.row_bytes) != (self.dtype, self.rows.shape[1]):
            raise FailedPrecondition(
                f"table '{self.table}' has {table.row_bytes} bytes a row ({table.dtype}) here, and "
                f"{self.rows.shape[1]} ({self.dtype}) at the owner of the partition: create it "
                "with the same dtype and dim"
            )
        if len(self.keys) and table.apply(self.keys, self.rows, None, self.stamps).refused:
            raise ResourceExhausted(
                f"table '{self.table}' is full, and the partition that moves here has more rows: "
                "petps table grow"
            )
        if len(self.deleted):
            table.apply(self.deleted, None, np.ones(len(self.deleted), np.bool_))


def _find(tables: _native.Tables, instance: str, name: str) -> _native.Table:
    for record, table in pushed_tables(tables):
        if (record.name, table.name) == (instance, name):
            return table
    raise FailedPrecondition(
        f"this pool has no table '{name}' of instance '{instance}' that pushes feed, and the "
        "owner of the partition has: create it (petps create --add --table)"
    )


def pushed_tables(
    tables: _native.Tables,
) -> list[tuple[_native.InstanceRecord, _native.Table]]:
    """Return the tables that pushes feed, with their instances; not those of frozen instances."""
    instances = {record.id: record for record in tables.instances() if not record.frozen}
    return [
        (instances[table.record.instance], table)
        for table in tables.tables()
        if table.record.feed == "push" and table.record.instance in instances
    ]


def keys_of(table: _native.Table, partition: int, partitions: int) -> Keys:
    """Return all keys of a partition. One that is written meanwhile may be missing."""
    own = []
    with table.scan() as scan:
        for keys, _ in scan:
            own.append(keys[partition_of(keys, partitions) == partition])
    return np.concatenate(own) if own else np.empty(0, np.uint64)


def folder_of(model: str, partition: int) -> str:
    """Return the folder of a partition's copies in the store."""
    return f"moves/{model}/{partition}"


def path_of(model: str, partition: int, copy: str, number: int) -> str:
    """Return the file of a part, whose numbers begin with 1. InvalidArgument: no name of a copy."""
    if not copy.isalnum():
        raise InvalidArgument(f"'{copy}' is no name of a copy: it may have letters and digits only")
    return f"{folder_of(model, partition)}/{copy}-{number:06d}.npz"


def write_part(files: Files, path: str, changes: Iterable[Changes]) -> None:
    """Write a part, durably. Raises IoError."""
    header: list[list[str]] = []
    arrays: dict[str, Any] = {}
    for number, change in enumerate(changes):
        header.append([change.instance, change.table, change.dtype])
        arrays |= {
            f"keys{number}": change.keys,
            f"rows{number}": change.rows,
            f"stamps{number}": change.stamps,
            f"deleted{number}": change.deleted,
        }
    text = json.dumps({"format": FORMAT, "tables": header}).encode()
    content = io.BytesIO()
    np.savez(content, header=np.frombuffer(text, np.uint8), **arrays)
    files.write(path, [content.getbuffer()])


def read_part(files: Files, path: str) -> Iterator[Changes]:
    """Yield what a part has. Raises NotFound, IoError, and DataLoss if it is damaged."""
    content = files.read(path)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            document = json.loads(arrays["header"].tobytes())
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']!r}")
            parts = [
                Changes(
                    instance, table, dtype,
                    arrays[f"keys{number}"], arrays[f"rows{number}"], arrays[f"stamps{number}"],
                    arrays[f"deleted{number}"],
                )
                for number, (instance, table, dtype) in enumerate(document["tables"])
            ]  # fmt: skip
            for part in parts:
                if part.rows.ndim != 2:
                    raise ValueError(f"rows have {part.rows.ndim} dimensions")
    except (
        ValueError, KeyError, TypeError, OSError, EOFError, MemoryError, zipfile.BadZipFile
    ) as error:  # fmt: skip
        raise DataLoss(f"{files.name}/{path} is damaged: {type(error).__name__}: {error}") from None
    yield from parts
