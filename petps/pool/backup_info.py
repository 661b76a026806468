"""What a backup records beside the rows: the part `petps.backup`, and what the pool's file knows.

BACKUP.md has the format of the part.
"""

from __future__ import annotations

import errno
import json
import os
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, cast

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.checkpoint.published import JsonModel
from petps.checkpoint.state import Version
from petps.delta.files import publish_file
from petps.pool.beside import FILE_MODE, file_beside
from petps.pool.damage import DamageLog

__all__ = [
    "BACKUP_PART",
    "INCOMPLETE_BASE_PART",
    "NEEDS_BASE",
    "BackupInfo",
    "Known",
    "ProgressFacts",
    "TableFacts",
    "read_known",
    "write_known",
]

BACKUP_PART: Final = "petps.backup"
# In place of the part of a base, if rows are missing: servers that caught up would delete them.
INCOMPLETE_BASE_PART: Final = "petps.backup.base"
# States of a partition whose rows are a mixture, or older than its progress (ingest's Standing).
NEEDS_BASE: Final = ("catching_up", "incomplete", "conflict", "lost_power")
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class TableFacts(JsonModel):
    """Describes a table, so that it can be made again.

    default_row: the stored bytes in hex; "": zeros.
    """

    name: str
    id: int
    dim: int
    dtype: str
    capacity: int
    feed: Literal["push", "delta"]
    default_row: str
    expire_after: int

    @classmethod
    def of(cls, table: _native.Table) -> TableFacts:
        """Return the facts of a table, with the capacity that it has now."""
        record = table.record
        default = table.default_row()
        return cls(
            name=table.name,
            id=table.id,
            dim=table.dim,
            dtype=table.dtype,
            capacity=table.status().capacity,
            feed=cast(Literal["push", "delta"], record.feed),
            default_row=default.tobytes().hex() if default.any() else "",
            expire_after=table.status().expire_after,
        )

    @property
    def identity(self) -> tuple[object, ...]:
        """Return what is the same in two backups of the same table."""
        return (self.name, self.id, self.dim, self.dtype, self.feed)


class ProgressFacts(JsonModel):
    """The progress of a partition, as the pool records it (native/pool/FORMAT.md)."""

    partition: int
    run: int
    seq: int
    offset: int
    version: int
    state: str
    target: int
    publisher: int


class BackupInfo(JsonModel):
    """The pool and the instance whose rows a version has.

    full: it does not build on an earlier backup. first_version: the first version of the store that
    the backup wrote. boot: identifies the start of the machine on which it was written. missing: by
    table, the number of rows that were damaged and removed.
    """

    format: Literal[1] = 1
    full: bool
    first_version: int
    pool: str
    boot: str
    durability: Literal["power", "process"]
    model: str
    instance: str
    instance_id: int
    partitions: int
    aliases: list[str]
    tables: list[TableFacts]
    progress: list[ProgressFacts]
    missing: dict[str, int]

    @classmethod
    def of(
        cls,
        native: _native.Tables,
        instance: _native.InstanceRecord,
        tables: Iterable[_native.Table],
        *,
        full: bool,
        first_version: int,
    ) -> BackupInfo:
        """Return the facts of an instance with these tables, as of now."""
        info, tables = native.info(), list(tables)
        progress = []
        for entry in native.all_progress():
            if entry.instance == instance.id:
                values = entry.as_dict()
                del values["instance"]
                progress.append(ProgressFacts(**values))
        return cls(
            full=full,
            first_version=first_version,
            pool=info.uuid,
            boot=BOOT_ID.read_text().strip() if BOOT_ID.exists() else "",
            durability=cast(Literal["power", "process"], info.durability),
            model=instance.model,
            instance=instance.name,
            instance_id=instance.id,
            partitions=instance.partitions,
            aliases=sorted(name for name, to in native.aliases().items() if to == instance.id),
            tables=[TableFacts.of(table) for table in tables],
            progress=progress,
            missing=_count_missing(native, tables),
        )

    @property
    def warnings(self) -> list[str]:
        """Return what an operator must know of the rows, in a list."""
        return [
            f"{count:,} rows of table '{name}' were damaged and are missing: native/table/SCRUB.md"
            for name, count in self.missing.items()
        ]

    @staticmethod
    def is_in(entry: Version) -> bool:
        """Return whether a version of a store is a backup."""
        return BACKUP_PART in entry.parts

    def to_json(self) -> bytes:
        """Return the bytes of the part."""
        return self.model_dump_json().encode()


def _count_missing(native: _native.Tables, tables: Iterable[_native.Table]) -> dict[str, int]:
    damage = DamageLog(native)
    counts = {
        table.name: max(damage.count_of(table.id), table.status().missing_rows) for table in tables
    }
    return {name: count for name, count in counts.items() if count > 0}


@dataclass(slots=True)
class Known:
    """The rows of a table in a backup.

    keys: uint64[n], ascending. hashes: uint64[n], of the rows and their stamps.
    """

    keys: npt.NDArray[np.uint64]
    hashes: npt.NDArray[np.uint64]

    @classmethod
    def nothing(cls) -> Known:
        """Return the rows of an empty table."""
        return cls(np.empty(0, np.uint64), np.empty(0, np.uint64))


def _identity(store: str, version: Version) -> str:
    return json.dumps([store, version.version, version.created_ns])


def read_known(
    pool: str | PathLike[str], model: str, store: str, version: Version
) -> dict[str, Known] | None:
    """Return what the file beside the pool knows of a version's rows, by table.

    None if there is no such file, if it is damaged, or if it knows another version.
    """
    path = file_beside(pool, f"backup.{model}")
    if path is None:
        return None
    try:
        with zipfile.ZipFile(path) as arrays:
            if str(_read_array(arrays, "identity")) != _identity(store, version):
                return None
            names = json.loads(str(_read_array(arrays, "tables")))
            return {
                name: Known(
                    _read_array(arrays, f"keys.{number}"), _read_array(arrays, f"hashes.{number}")
                )
                for number, name in enumerate(names)
            }
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile):
        return None  # RuntimeError: a damaged flag says that it is encrypted


def _read_array(arrays: zipfile.ZipFile, name: str) -> Any:
    """Return an array of an .npz file. Raise BadZipFile if its CRC-32 is wrong."""
    with arrays.open(f"{name}.npy") as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
        file.read()  # to the end, where the CRC-32 is compared
        return array


def write_known(
    pool: str | PathLike[str], model: str, store: str, version: Version, known: dict[str, Known]
) -> None:
    """Write the file that the next backup reads instead of the store. Raise OSError."""
    path = file_beside(pool, f"backup.{model}")
    if path is None:
        return
    if path.exists() and not _is_known_file(path):
        raise OSError(errno.EEXIST, "is no file of a backup: move it away", str(path))
    arrays: dict[str, Any] = {
        "identity": np.array(_identity(store, version)),
        "tables": np.array(json.dumps(list(known))),
    }
    for number, rows in enumerate(known.values()):
        arrays[f"keys.{number}"], arrays[f"hashes.{number}"] = rows.keys, rows.hashes

    def write(file: BinaryIO) -> None:
        os.fchmod(file.fileno(), FILE_MODE)
        np.savez(file, **arrays)

    publish_file(path, write)


def _is_known_file(path: Path) -> bool:
    """Return whether a file is one that write_known() wrote, perhaps damaged since."""
    with open(path, "rb") as file:
        return path.is_file() and file.read(64).startswith(b"PK\x03\x04")
