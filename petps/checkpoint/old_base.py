"""Bases that older releases wrote: a folder of Arrow files with a manifest. FORMAT.md.

Owns:        OldBase, manifest.json.
Never does:  write.
Called by:   base.py.
Invariants:  rows that do not match their checksum are never returned.
Threads:     any.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import xxhash
from pydantic import Field

from petps.checkpoint.chunk import Table
from petps.checkpoint.files import LocalFiles
from petps.checkpoint.published import BASE_PART, BaseInfo, JsonModel, Unsigned
from petps.checkpoint.state import OPEN, Chunk, Lineage, Part, State, Version
from petps.checkpoint.store import BASE, Store
from petps.errors import DataLoss, FailedPrecondition, Unimplemented

__all__ = ["MANIFEST", "OldBase"]

MANIFEST: Final = "manifest.json"
FORMAT_NAME: Final = "petps-base"
FORMAT: Final = 1


class _File(JsonModel):
    file: str
    rows: Annotated[int, Field(ge=1)]
    bytes: Annotated[int, Field(ge=1)]
    min_key: Unsigned
    max_key: Unsigned
    checksum: str  # xxh3-64 of the file, 16 hex digits


class _Table(JsonModel):
    name: str
    dtype: str
    dim: int
    files: list[_File]


class _Manifest(BaseInfo):
    model: str
    created_ns: Unsigned
    tables: list[_Table]


class OldBase(Store):
    """A base of format 1, read as a store with one version, whose part petps.base is the manifest.

    Opening it checks the manifest. Raise NotFound, DataLoss, IoError, Unimplemented (newer format).
    """

    def __init__(self, folder: Path) -> None:
        files = LocalFiles(folder)
        text = files.read(MANIFEST)
        manifest = _parse(text, folder / MANIFEST)
        number = max(1, manifest.version)  # a base may be of version 0, a store has none
        tables = {
            table.name: Table.of(table.name, table.dim, table.dtype) for table in manifest.tables
        }
        chunks = tuple(
            Chunk(
                table.name,
                number,
                OPEN,
                0,
                _check_name(folder, file.file),
                0,
                file.bytes,
                file.bytes,
                0,
                file.rows,
                file.min_key,
                file.max_key,
                file.checksum,
                (),
            )
            for table in manifest.tables
            for file in table.files
        )
        rows, size = sum(chunk.rows for chunk in chunks), sum(chunk.length for chunk in chunks)
        parts = {BASE_PART: Part(MANIFEST, len(text), xxhash.xxh3_64_hexdigest(text))}
        version = Version(number, BASE, manifest.created_ns, 0.0, rows, size, parts=parts)
        lineage = Lineage("", number, (version,), chunks, tables, ())
        super().__init__(files, State(1, manifest.model, tables, (lineage,)))

    def refresh(self) -> State:
        """Return the state, which never changes."""
        return self.state

    def _commit(self, before: State, after: State) -> None:
        raise FailedPrecondition(
            f"{self.name} is a base of an older release, which can only be read"
        )


def _check_name(folder: Path, name: str) -> str:
    if (folder / name).parent != folder:
        raise DataLoss(f"{folder / MANIFEST}: file name {name!r} leaves the folder")
    return name


def _parse(text: bytes, path: Path) -> _Manifest:
    try:
        values: dict[str, Any] = json.loads(text)
        checksum = values.pop("checksum", None)
        name, _, number = str(values["format"]).rpartition("-")
        plain = json.dumps(values, sort_keys=True, separators=(",", ":"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataLoss(f"{path} is not the manifest of a petps base") from error
    if name != FORMAT_NAME or not number.isdecimal() or int(number) < FORMAT:
        raise DataLoss(f"{path} is not the manifest of a petps base")
    if int(number) > FORMAT:
        raise Unimplemented(f"{path} has format {number}, this release reads {FORMAT}: upgrade")
    if checksum != xxhash.xxh3_64_hexdigest(plain.encode()):
        raise DataLoss(f"{path} does not fit its checksum: restore it or take another base")
    return _Manifest.parse(text, str(path))
