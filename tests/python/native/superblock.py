"""Changes a pool's superblock (native/pool/FORMAT.md) to that of another machine or release."""

from __future__ import annotations

import struct
from pathlib import Path

import xxhash

# Offsets in every format version: before version 3 the second copy was at 128 KiB.
COPIES = (0, 128 << 10, 640 << 10)
HEADER_BYTES = 144
VERSION_AT, LENGTH_AT, CHECKSUM_AT, BOOT_ID_AT, CLEAN_AT = 8, 12, 16, 48, 76


def forge(path: Path, *, version: int | None = None, boot_id: bytes | None = None) -> None:
    """Change fields of both copies, and make the checksums fit."""
    content = bytearray(path.read_bytes())
    for start in COPIES:
        (length,) = struct.unpack_from("<I", content, start + LENGTH_AT)
        if content[start : start + 8] != b"PETPS_01":
            continue
        if version is not None:
            struct.pack_into("<I", content, start + VERSION_AT, version)
        if boot_id is not None:
            content[start + BOOT_ID_AT : start + BOOT_ID_AT + 16] = boot_id
        struct.pack_into("<Q", content, start + CHECKSUM_AT, 0)
        header = xxhash.xxh3_64_intdigest(bytes(content[start : start + HEADER_BYTES]))
        records = xxhash.xxh3_64_intdigest(bytes(content[start + HEADER_BYTES : start + length]))
        checksum = xxhash.xxh3_64_intdigest(struct.pack("<QQ", header, records))
        struct.pack_into("<Q", content, start + CHECKSUM_AT, checksum)
    path.write_bytes(content)


def is_clean(path: Path) -> bool:
    """Return whether the newer copy has the clean flag."""
    content = path.read_bytes()[: COPIES[-1] + HEADER_BYTES]
    copies = []
    for start in COPIES:
        if content[start : start + 8] == b"PETPS_01":
            (sequence,) = struct.unpack_from("<Q", content, start + 24)
            (clean,) = struct.unpack_from("<I", content, start + CLEAN_AT)
            copies.append((sequence, clean))
    return bool(max(copies)[1] == 1)
