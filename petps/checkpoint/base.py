"""A base: every row of an instance in a folder of sorted chunk files and a manifest. FORMAT.md.

Owns:        BaseWriter, Base (reading), BaseFolder (finding bases), manifest.json.
Never does:  apply rows; decide when a base is due.
Called by:   cli export and load, publish's callers, ingest's catch-up (through its own Protocols).
Invariants:  a base exists when its manifest does, and the manifest is written last, atomically; a
             chunk holds rows of one partition, sorted by key, each key once; what does not fit its
             checksum is never given to a caller.
Threads:     a BaseWriter belongs to one thread; a Base may be read from several.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from petps.delta.chunk import decode_rows, encode_rows
from petps.delta.errors import DeltaError
from petps.delta.files import publish_file
from petps.delta.schema import MAX_PARTITIONS, TableSchema, check_name, partition_of
from petps.errors import (
    AlreadyExists,
    DataLoss,
    InvalidArgument,
    IoError,
    NotFound,
    PetpsError,
    Unimplemented,
)

__all__ = ["MANIFEST", "Base", "BaseFolder", "BaseWriter", "Manifest"]

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

MANIFEST: Final = "manifest.json"
FORMAT_NAME: Final = "petps-base"
FORMAT: Final = 1
# Bytes of rows in a chunk file: what a reader and a writer hold at a time.
CHUNK_BYTES: Final = 32 << 20
MAX_MANIFEST_BYTES: Final = 256 << 20
_U64 = Annotated[int, Field(ge=0, lt=1 << 64)]


class _Model(BaseModel):
    # Unknown fields are allowed: a later release may add some without a new format number.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class ChunkFile(_Model):
    """One chunk file: rows of one partition, sorted by key."""

    file: str
    partition: Annotated[int, Field(ge=0, lt=MAX_PARTITIONS)]
    rows: Annotated[int, Field(ge=1)]
    bytes: Annotated[int, Field(ge=1)]
    min_key: _U64
    max_key: _U64
    checksum: str  # xxh3-64 of the file, 16 hex digits


class TableEntry(_Model):
    """One table: its schema and its chunk files, by partition and then by key."""

    name: str
    dtype: str
    dim: int
    rows: Annotated[int, Field(ge=0)]
    files: list[ChunkFile]


class PositionEntry(_Model):
    """Up to where the base holds a partition's deltas: at least everything to {run, seq}."""

    partition: Annotated[int, Field(ge=0, lt=MAX_PARTITIONS)]
    run: _U64
    seq: _U64


class Manifest(_Model):
    """manifest.json, checked."""

    format: str
    model: str
    instance: str
    version: _U64
    created_ns: _U64
    partitions: Annotated[int, Field(ge=1, le=MAX_PARTITIONS)]
    positions: list[PositionEntry]
    tables: list[TableEntry]
    dense: str | None = None


class BaseWriter:
    """Writes a base into a new folder: add_table() for each table, then commit().

    discard() instead of commit() removes what was written.

    ``positions``: (run, seq) by partition, read **before** the first row was, so that deltas after
    it make good whatever the rows missed; partitions left out are at (0, 0).
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: str,
        instance: str,
        partitions: int,
        positions: Mapping[int, tuple[int, int]],
        version: int,
        dense: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        check_name("model", model)
        if not 1 <= partitions <= MAX_PARTITIONS:
            raise InvalidArgument(f"{partitions} partitions are outside 1..{MAX_PARTITIONS}")
        self._folder = Path(folder)
        if (self._folder / MANIFEST).exists():
            raise AlreadyExists(f"{self._folder} holds a base already: name a new folder")
        self._made_folder = not self._folder.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._written: list[Path] = []
        self._partitions = partitions
        self._chunk_bytes = chunk_bytes
        self._tables: list[dict[str, Any]] = []
        self._manifest: dict[str, Any] = {
            "format": f"{FORMAT_NAME}-{FORMAT}",
            "model": model,
            "instance": instance,
            "version": version,
            "partitions": partitions,
            "positions": [
                {"partition": partition, "run": run, "seq": seq}
                for partition, (run, seq) in sorted(positions.items())
            ],
            "dense": dense,
        }

    @property
    def folder(self) -> Path:
        """Where the base is written."""
        return self._folder

    def add_table(
        self,
        schema: TableSchema,
        keys: Keys,
        rows_of: Callable[[Keys], tuple[Rows, Mask | None]],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Writes one table; returns its rows.

        keys: uint64[n] in any order, each once; ``rows_of`` gives (uint8[m, row_bytes], bool[m] or
        None) for m of them: rows, and which of them are there (a key deleted meanwhile is not).
        ``progress`` is told of each m that is done.
        """
        if any(table["name"] == schema.name for table in self._tables):
            raise AlreadyExists(f"table {schema.name} is in the base already")
        partitions = partition_of(keys, self._partitions)
        order = np.lexsort((keys, partitions))
        keys = keys[order]
        bounds = np.searchsorted(partitions[order], np.arange(self._partitions + 1))
        step = max(1, self._chunk_bytes // (8 + schema.row_bytes))
        files: list[dict[str, Any]] = []
        for partition in range(self._partitions):
            for start in range(int(bounds[partition]), int(bounds[partition + 1]), step):
                part = keys[start : min(start + step, int(bounds[partition + 1]))]
                files += self._write_chunk(schema, partition, len(files), part, rows_of)
                if progress is not None:
                    progress(len(part))
        total: int = sum(file["rows"] for file in files)
        self._tables.append(
            {
                "name": schema.name,
                "dtype": schema.dtype,
                "dim": schema.dim,
                "rows": total,
                "files": files,
            }
        )
        return total

    def _write_chunk(
        self,
        schema: TableSchema,
        partition: int,
        number: int,
        keys: Keys,
        rows_of: Callable[[Keys], tuple[Rows, Mask | None]],
    ) -> list[dict[str, Any]]:
        rows, present = rows_of(keys)
        if present is not None and not present.all():
            keys, rows = keys[present], rows[present]
        if len(keys) == 0:
            return []
        if len(keys) > 1 and not (keys[1:] > keys[:-1]).all():
            raise InvalidArgument(f"table {schema.name}: a key stands twice in the rows of a base")
        body = encode_rows(keys, rows)
        name = f"{schema.name}-p{partition:04d}-{number:06d}.arrow"

        def write(file: BinaryIO) -> None:
            file.write(body)

        self._written.append(self._folder / name)
        publish_file(self._folder / name, write)
        return [
            {
                "file": name,
                "partition": partition,
                "rows": len(keys),
                "bytes": len(body),
                "min_key": int(keys[0]),
                "max_key": int(keys[-1]),
                "checksum": xxhash.xxh3_64_hexdigest(body),
            }
        ]

    def discard(self) -> list[Path]:
        """Removes the files that it wrote, and the folder if it made it. Returns what is left."""
        left: list[Path] = []
        for path in self._written:
            try:
                path.unlink(missing_ok=True)
            except OSError:
                left.append(path)
        if self._made_folder and not left:
            try:
                self._folder.rmdir()
            except OSError:  # somebody else put something there
                left.append(self._folder)
        return left

    def commit(self) -> Path:
        """Writes the manifest: now the base exists. Returns its folder."""
        values = {**self._manifest, "created_ns": time.time_ns(), "tables": self._tables}
        values["checksum"] = _manifest_checksum(values)
        text = json.dumps(values, indent=1, sort_keys=True)
        publish_file(self._folder / MANIFEST, text.encode() + b"\n", exclusive=True)
        return self._folder


def _manifest_checksum(values: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in values.items() if name != "checksum"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


class Base:
    """A base on disk. Opening checks the manifest; every chunk is checked when it is read."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._manifest = _read_manifest(self._folder / MANIFEST)
        self._tables = {
            table.name: (TableSchema(table.name, table.dtype, table.dim), table)
            for table in self._manifest.tables
        }
        self._positions = {
            entry.partition: (entry.run, entry.seq) for entry in self._manifest.positions
        }

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"base {self._folder}"

    @property
    def manifest(self) -> Manifest:
        """What manifest.json says."""
        return self._manifest

    @property
    def model(self) -> str:
        """The model whose rows it holds."""
        return self._manifest.model

    @property
    def instance(self) -> str:
        """The instance whose rows it holds; the model's plain name: of any."""
        return self._manifest.instance

    @property
    def version(self) -> int:
        """The version it holds."""
        return self._manifest.version

    @property
    def dense(self) -> str | None:
        """Where the dense weights of that version are."""
        return self._manifest.dense

    @property
    def partitions(self) -> int:
        """P of the model."""
        return self._manifest.partitions

    def position(self, partition: int) -> tuple[int, int]:
        """(run, seq) up to which it holds the partition's deltas."""
        return self._positions.get(partition, (0, 0))

    def schemas(self) -> dict[str, TableSchema]:
        """Its tables, by name."""
        return {name: schema for name, (schema, _) in self._tables.items()}

    def rows(self, table: str) -> int:
        """Rows of a table."""
        return self._entry(table)[1].rows

    def chunks(
        self, table: str, partitions: Collection[int] | None = None
    ) -> Iterator[tuple[Keys, Rows]]:
        """keys uint64[m] and rows uint8[m, row_bytes], sorted by key within each partition.

        Of some partitions or of all. Raises DataLoss when a file is missing, cut or altered.
        """
        schema, entry = self._entry(table)
        for file in entry.files:
            if partitions is None or file.partition in partitions:
                yield self._read_chunk(schema, file)

    def _entry(self, table: str) -> tuple[TableSchema, TableEntry]:
        if table not in self._tables:
            raise NotFound(f"{self.name} has no table {table!r}; it has: {', '.join(self._tables)}")
        return self._tables[table]

    def _read_chunk(self, schema: TableSchema, file: ChunkFile) -> tuple[Keys, Rows]:
        path = self._folder / file.file
        if path.parent != self._folder:
            raise DataLoss(f"{self.name}: file name {file.file!r} leaves the folder")
        try:
            # Read, not mapped: a lost mount is an error here and would be SIGBUS there.
            body = path.read_bytes()
        except OSError as error:
            raise DataLoss(
                f"{path} can't be read ({error}): restore it or take another base"
            ) from error
        if len(body) != file.bytes or xxhash.xxh3_64_hexdigest(body) != file.checksum:
            raise DataLoss(f"{path} does not fit its checksum: restore it or take another base")
        try:
            keys, rows, deleted = decode_rows(body, schema.row_bytes)
        except DeltaError as error:
            raise DataLoss(f"{path}: {error}") from error
        if len(keys) != file.rows or deleted is not None:
            raise DataLoss(f"{path} holds {len(keys)} rows, its manifest says {file.rows}")
        return keys, rows


def _read_manifest(path: Path) -> Manifest:
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise DataLoss(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes: no manifest")
        text = path.read_bytes()
    except FileNotFoundError:
        raise NotFound(
            f"{path.parent} holds no base: there is no {MANIFEST} (an export that did not finish?)"
        ) from None
    except OSError as error:
        raise IoError(f"{path}: {error.strerror}") from error
    try:
        values = json.loads(text)
        name, _, number = str(values["format"]).rpartition("-")
        if name == FORMAT_NAME and number.isdigit() and int(number) > FORMAT:
            raise Unimplemented(f"{path} has format {number}, this release reads {FORMAT}: upgrade")
        if values["format"] != f"{FORMAT_NAME}-{FORMAT}":
            raise DataLoss(f"{path} is not the manifest of a petps base")
        if values.get("checksum") != _manifest_checksum(values):
            raise DataLoss(f"{path} does not fit its checksum: restore it or take another base")
        return Manifest.model_validate(values)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DataLoss(f"{path} is not the manifest of a petps base") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataLoss(f"{path}: {where}: {first['msg']}") from None


class BaseFolder:
    """Finds bases: each is a folder with a manifest, directly below ``root``."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)

    def open(self, location: str) -> Base:
        """The base at an absolute path, a file:// URL, or a path below the root. Raises as Base."""
        return Base(self._root / location.removeprefix("file://"))

    def of_model(self, model: str) -> Sequence[Base]:
        """The model's bases that can be read, newest first by version, then by time."""
        found = []
        for path in self._root.glob(f"*/{MANIFEST}"):
            try:
                base = Base(path.parent)
            except PetpsError:
                continue  # one that is being removed or is damaged hides no other
            if base.model == model:
                found.append(base)
        found.sort(key=lambda base: (base.version, base.manifest.created_ns), reverse=True)
        return found
