"""A reader of a dm-log-writes log, which can rebuild a device as it was at any entry.

The format is that of the kernel's dm-log-writes, version 1, little endian. The first sector is a
super block {magic u64, version u64, entries u64, sector bytes u32}. Entries of one sector follow:
{sector u64, sectors u64, flags u64, data bytes u64}, each followed by its data. The text of a mark
is in the sector of its entry.

The kernel records a write at the next flush, after the marks that were set between the write and
that flush. So a mark comes after everything that had to be on the disk when it was set, and before
everything else.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Final

MAGIC: Final = 0x6A736677736872
VERSION: Final = 1
FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8
_SUPER = struct.Struct("<QQQI")
_ENTRY = struct.Struct("<QQQQ")


@dataclass(frozen=True)
class Entry:
    """A write, a flush, a discard, or a mark."""

    sector: int
    sectors: int
    flags: int
    text: str  # of a mark, else empty
    data_at: int  # byte offset in the log

    @property
    def is_durable(self) -> bool:
        """Return whether everything before this entry is on the disk once this entry is."""
        return bool(self.flags & (FLUSH | FUA))

    @property
    def is_write(self) -> bool:
        return self.sectors > 0 and not self.flags & (DISCARD | MARK)


class WriteLog:
    """A complete log, read from the device that it was recorded on."""

    def __init__(self, device: str) -> None:
        self._file = os.open(device, os.O_RDONLY)
        magic, version, count, self._sector_bytes = _SUPER.unpack(
            os.pread(self._file, _SUPER.size, 0)
        )
        if magic != MAGIC or version != VERSION:
            raise RuntimeError(f"{device} has no log: magic {magic:#x}, version {version}")
        self.entries: list[Entry] = []
        offset = self._sector_bytes
        for _ in range(count):
            head = os.pread(self._file, self._sector_bytes, offset)
            sector, sectors, flags, data_bytes = _ENTRY.unpack_from(head)
            text = head[_ENTRY.size : _ENTRY.size + data_bytes] if flags & MARK else b""
            entry = Entry(sector, sectors, flags, text.decode(), offset + self._sector_bytes)
            self.entries.append(entry)
            offset += self._sector_bytes * (1 + (sectors if entry.is_write else 0))

    def replay(self, entry: Entry, device: int) -> None:
        """Write an entry's data to the open device. Ignore discards, which a power cut may lose."""
        if not entry.is_write:
            return
        count = entry.sectors * self._sector_bytes
        data = os.pread(self._file, count, entry.data_at)
        if (
            len(data) != count
            or os.pwrite(device, data, entry.sector * self._sector_bytes) != count
        ):
            raise RuntimeError(f"a short read or write of {entry}")
