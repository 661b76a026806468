"""Writing of a report as one compressed file that only its owner can read."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import time
from pathlib import Path
from typing import Final

from petps.doctor.report import Member, Report
from petps.errors import AlreadyExists, IoError

__all__ = ["TOTAL_BYTES_MAX", "default_name", "fit", "write_bundle"]

FILE_MODE: Final = 0o600
TOTAL_BYTES_MAX: Final = 32 << 20  # before compression
FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def default_name() -> str:
    """Return the name of a new report."""
    return time.strftime("petps-report-%Y%m%dT%H%M%SZ.tar.gz", time.gmtime())


def fit(report: Report) -> Report:
    """Leave out what would make the report larger than TOTAL_BYTES_MAX."""
    members: list[Member] = []
    left_out = dict(report.left_out)
    total = 0
    for member in report.members:
        if total + len(member.content) > TOTAL_BYTES_MAX:
            left_out[member.name] = f"the report would have more than {TOTAL_BYTES_MAX:,} bytes"
            continue
        total += len(member.content)
        members.append(member)
    return Report(members, left_out)


def write_bundle(path: Path, report: Report) -> int:
    """Write a new file of mode 0600, and return its bytes. Raises AlreadyExists, IoError."""
    try:
        descriptor = os.open(path, FLAGS, FILE_MODE)
    except FileExistsError:
        raise AlreadyExists(f"{path} exists: choose another file with --output") from None
    except OSError as error:
        raise IoError(f"{path}: {error.strerror}") from None
    folder = path.name.removesuffix(".gz").removesuffix(".tar") or "petps-report"
    try:
        os.fchmod(descriptor, FILE_MODE)
        with (
            open(descriptor, "wb") as file,
            tarfile.open(fileobj=file, mode="w:gz") as archive,
        ):
            for member in report.members:
                entry = tarfile.TarInfo(f"{folder}/{member.name}")
                entry.size, entry.mode, entry.mtime = len(member.content), FILE_MODE, time.time()
                archive.addfile(entry, io.BytesIO(member.content))
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise IoError(f"{path}: {error.strerror or error}") from None
    return path.stat().st_size
