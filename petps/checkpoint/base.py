"""A base: every row of an instance, in a folder of sorted chunk files with a manifest. FORMAT.md.

Owns:        BaseWriter, Base (reading), BaseFolder (finding bases), manifest.json.
Never does:  apply rows; decide when a base is due.
Called by:   cli export and load, callers of publish, the catch-up of ingest (through its own
             Protocols).
Invariants:  a base exists when its manifest exists, and the manifest is written last, atomically;
             a chunk holds rows of one partition, sorted by key, each key once; data that does not
             match its checksum is never returned to a caller.
Threads:     a BaseWriter belongs to one thread; several threads may read one Base.
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

from petps.delta.arrow import decode_rows, encode_rows
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
# Bytes of rows in a chunk file; a reader or writer holds this much at a time.
CHUNK_BYTES: Final = 32 << 20
MAX_MANIFEST_BYTES: Final = 256 << 20
_U64 = Annotated[int, Field(ge=0, lt=1 << 64)]


class _Model(BaseModel):
    # Ignore unknown fields: a later release may add some without a new format number.
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
    """One table: its schema, and its chunk files in the order of partition and then key."""

    name: str
    dtype: str
    dim: int
    rows: Annotated[int, Field(ge=0)]
    files: list[ChunkFile]


class PositionEntry(_Model):
    """A partition's position: the base holds at least every delta up to {run, seq}."""

    partition: Annotated[int, Field(ge=0, lt=MAX_PARTITIONS)]
    run: _U64
    seq: _U64


class Manifest(_Model):
    """The contents of manifest.json, validated."""

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
    """Writer of a base into a new folder.

    Call add_table() for each table, then commit(), or discard() to remove what was written.

    ``positions``: (run, seq) by partition. Read them **before** the first row, so that
    replaying the deltas after them corrects every row that changed during the export. A partition
    that is left out is at (0, 0).
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
        self._is_new_folder = not self._folder.exists()
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
        """Return the folder that the base is written to."""
        return self._folder

    def add_table(
        self,
        schema: TableSchema,
        keys: Keys,
        rows_of: Callable[[Keys], tuple[Rows, Mask | None]],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Write one table and return its number of rows.

        keys: uint64[n] in any order, each once. ``rows_of`` takes m of them and returns
        (uint8[m, row_bytes], bool[m] or None): the rows, and which of the keys still exist (a key
        may be deleted during the export). ``progress`` is called with each m that is done.
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
            raise InvalidArgument(f"table {schema.name}: a key appears twice in the rows of a base")
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
        """Remove the files written, and the folder if it is new. Return the paths that remain."""
        remaining: list[Path] = []
        for path in self._written:
            try:
                path.unlink(missing_ok=True)
            except OSError:
                remaining.append(path)
        if self._is_new_folder and not remaining:
            try:
                self._folder.rmdir()
            except OSError:  # another program put a file there
                remaining.append(self._folder)
        return remaining

    def commit(self) -> Path:
        """Write the manifest, with which the base begins to exist. Return its folder."""
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
    """A base on disk. Opening it checks the manifest; each read of a chunk checks the chunk."""

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
        """Return the name for messages."""
        return f"base {self._folder}"

    @property
    def manifest(self) -> Manifest:
        """Return the contents of manifest.json."""
        return self._manifest

    @property
    def model(self) -> str:
        """Return the model whose rows the base holds."""
        return self._manifest.model

    @property
    def instance(self) -> str:
        """Return the instance of the rows, or the model's plain name for any instance."""
        return self._manifest.instance

    @property
    def version(self) -> int:
        """Return the version that the base holds."""
        return self._manifest.version

    @property
    def dense(self) -> str | None:
        """Return where the dense weights of that version are."""
        return self._manifest.dense

    @property
    def partitions(self) -> int:
        """Return P, the number of partitions of the model."""
        return self._manifest.partitions

    def position(self, partition: int) -> tuple[int, int]:
        """Return (run, seq): the base holds the partition's deltas up to it."""
        return self._positions.get(partition, (0, 0))

    def schemas(self) -> dict[str, TableSchema]:
        """Return the schemas of the tables, by name."""
        return {name: schema for name, (schema, _) in self._tables.items()}

    def rows(self, table: str) -> int:
        """Return the number of rows of a table."""
        return self._entry(table)[1].rows

    def chunks(
        self, table: str, partitions: Collection[int] | None = None
    ) -> Iterator[tuple[Keys, Rows]]:
        """Yield keys uint64[m] and rows uint8[m, row_bytes] of the given partitions (None: all).

        They are sorted by key within each partition. Raise DataLoss when a file is missing, cut or
        altered.
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
            # Read, do not map: a lost mount is an error here, but SIGBUS in mapped memory.
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
    """The bases in a folder: each is a folder with a manifest directly below ``root``."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)

    def open(self, location: str) -> Base:
        """Open the base at an absolute path, a file:// URL, or a path below the root.

        Raise the errors of Base(): NotFound, DataLoss, IoError, Unimplemented.
        """
        return Base(self._root / location.removeprefix("file://"))

    def of_model(self, model: str) -> Sequence[Base]:
        """Return the readable bases of a model, newest first: by version, then by time."""
        bases = []
        for path in self._root.glob(f"*/{MANIFEST}"):
            try:
                base = Base(path.parent)
            except PetpsError:
                continue  # a base that is damaged or being removed must not hide the others
            if base.model == model:
                bases.append(base)
        bases.sort(key=lambda base: (base.version, base.manifest.created_ns), reverse=True)
        return bases
