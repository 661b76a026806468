"""The superblock of a pool (native/pool/FORMAT.md), read without opening or locking the pool.

petps cannot open a pool that a server has, and opening one for reading would lock it, so that a
server which starts at that moment would fail. It cannot open a pool of a newer format either.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import xxhash

from petps.errors import DataLoss, InvalidArgument, IoError, NotFound, PermissionDenied

__all__ = ["SIGNATURE", "Superblock", "TableRecord", "parse", "read_superblock"]

SIGNATURE: Final = b"PETPS_01"
KNOWN_FORMATS: Final = (1, 2, 3, 4)
HEADER: Final = struct.Struct("<8sIIQQ16s16sQ8I")
HEADER_BYTES: Final = 144
CHECKSUM_AT: Final = 16
TABLE: Final = struct.Struct("<IIBBHIIIQQQQQQ64s")
INSTANCE: Final = struct.Struct("<II64s64s")
COPY_BYTES: Final = 655_360
# Copy 1 is behind copy 0; before format 3 a copy was shorter.
COPIES: Final = (0, 131_072, COPY_BYTES)
READ_BYTES: Final = 2 << 20  # both copies, and the alignment of a device
DTYPES: Final = ("f32", "f16", "bf16", "int8")  # native/codec/codec.h Dtype


@dataclass(frozen=True)
class TableRecord:
    """One table. ``rows``: as of the last clean close."""

    name: str
    instance: str
    dtype: str
    dim: int
    row_bytes: int
    capacity: int
    rows: int
    feed: str
    expire_after: int


@dataclass(frozen=True)
class Superblock:
    """The newer whole copy."""

    format: int
    uuid: str
    boot_id: bytes
    unit: int
    generation: int
    sequence: int
    is_clean: bool
    durability: str
    tables: tuple[TableRecord, ...]
    """Empty in a format that this build does not know."""
    partitions: dict[str, int]
    """By instance."""
    broken_copies: int = 0
    """Copies that are not whole; one is, after a crash during a write of it."""

    def as_json(self) -> dict[str, Any]:
        """Return the facts that a report has: no rows and no keys."""
        return {
            "format": self.format,
            "uuid": self.uuid,
            "unit_bytes": self.unit,
            "generation": self.generation,
            "sequence": self.sequence,
            "closed_cleanly": self.is_clean,
            "durability": self.durability,
            "broken_copies": self.broken_copies,
            "partitions": self.partitions,
            "tables": [vars(table) for table in self.tables],
        }


def read_superblock(path: str) -> Superblock:
    """Return the superblock of a pool.

    Raises NotFound, PermissionDenied, InvalidArgument, IoError, and DataLoss if no copy is whole.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise NotFound(f"there is no pool at {path}: create it with `petps create`") from None
    except PermissionError:
        raise PermissionDenied(f"{path} may not be read by uid {os.getuid()}") from None
    except OSError as error:
        raise IoError(f"{path}: {error.strerror}") from None
    try:
        return parse(_first_bytes(file, path), path)
    finally:
        os.close(file)


def _first_bytes(file: int, path: str) -> bytes:
    kind = os.fstat(file).st_mode
    if not stat.S_ISCHR(kind) and not stat.S_ISREG(kind):
        raise InvalidArgument(f"{path} is no file and no device, so it is no pool")
    try:
        if stat.S_ISREG(kind):
            return os.pread(file, READ_BYTES, 0)
        # A device-DAX device has no read(), and maps whole multiples of its alignment.
        length = max(READ_BYTES, _alignment_of(path))
        with mmap.mmap(file, length, access=mmap.ACCESS_READ) as device:
            return device[:READ_BYTES]
    except (OSError, ValueError) as error:
        raise IoError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _alignment_of(device: str) -> int:
    name = os.path.basename(os.path.realpath(device))
    try:
        return int(Path(f"/sys/bus/dax/devices/{name}/align").read_text())
    except (OSError, ValueError):
        return 0


def parse(content: bytes, path: str) -> Superblock:
    """Return the newer whole copy in the first bytes of a pool."""
    copies = [content[start : start + COPY_BYTES] for start in COPIES]
    signed = [copy for copy in copies if copy.startswith(SIGNATURE)]
    if not signed:
        raise DataLoss(
            f"{path} does not begin with {SIGNATURE.decode()}: it is no pool, or its first bytes "
            "are damaged"
        )
    whole = [copy for copy in signed if _is_whole(copy)]
    if not whole:
        raise DataLoss(f"{path}: no copy of the superblock fits its checksum")
    newest = max(whole, key=lambda copy: int.from_bytes(copy[24:32], "little"))
    return _superblock_of(newest, len(signed) - len(whole))


def _is_whole(copy: bytes) -> bool:
    _, _, length, checksum, *_ = HEADER.unpack_from(copy)
    if not HEADER_BYTES <= length <= len(copy):
        return False
    header = copy[:CHECKSUM_AT] + bytes(8) + copy[CHECKSUM_AT + 8 : HEADER_BYTES]
    sums = (xxhash.xxh3_64_intdigest(part) for part in (header, copy[HEADER_BYTES:length]))
    return bool(xxhash.xxh3_64_intdigest(struct.pack("<QQ", *sums)) == checksum)


def _superblock_of(copy: bytes, broken_copies: int) -> Superblock:
    (
        _, version, _, _, sequence, uuid, boot_id, unit,
        generation, clean, durability, _, _, table_count, instance_count, _,
    ) = HEADER.unpack_from(copy)  # fmt: skip
    tables: list[TableRecord] = []
    instances: dict[int, tuple[str, int]] = {}
    if version in KNOWN_FORMATS:
        at = HEADER_BYTES + table_count * TABLE.size
        for number in range(instance_count):
            instance, partitions, _, name = INSTANCE.unpack_from(copy, at + number * INSTANCE.size)
            instances[instance] = (_text(name), partitions)
        tables = [
            _table_of(copy, HEADER_BYTES + number * TABLE.size, instances)
            for number in range(table_count)
        ]
    return Superblock(
        format=version,
        uuid=str(UUID(bytes=uuid)),
        boot_id=boot_id,
        unit=unit,
        generation=generation,
        sequence=sequence,
        is_clean=clean == 1,
        durability="process" if durability else "power",
        tables=tuple(tables),
        partitions=dict(instances.values()),
        broken_copies=broken_copies,
    )


def _table_of(copy: bytes, at: int, instances: dict[int, tuple[str, int]]) -> TableRecord:
    (
        _, instance, dtype, feed, _, dim, row_bytes, expire_after,
        capacity, _, _, _, rows, _, name,
    ) = TABLE.unpack_from(copy, at)  # fmt: skip
    return TableRecord(
        name=_text(name),
        instance=instances.get(instance, (str(instance), 0))[0],
        dtype=DTYPES[dtype] if dtype < len(DTYPES) else f"dtype {dtype}",
        dim=dim,
        row_bytes=row_bytes,
        capacity=capacity,
        rows=rows,
        feed="delta" if feed else "push",
        expire_after=expire_after,
    )


def _text(name: bytes) -> str:
    return name.split(b"\0", 1)[0].decode("utf-8", "replace")
