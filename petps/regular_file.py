"""Reading of files that somebody may replace while a server reads them again."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

__all__ = ["read_regular_file"]

# A pipe in the place of the file is not waited for, and a terminal does not become this process's.
OPEN_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
NOT_REGULAR: Final = "it is a pipe, a folder or a device: put a regular file in its place"


def read_regular_file(path: Path | str, bytes_max: int) -> bytes:
    """Return the contents of a file, or its first ``bytes_max`` + 1 bytes if it has more.

    Raises OSError, also for a pipe, whose reader would wait for a writer without an end.
    """
    descriptor = os.open(path, OPEN_FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(bytes_max + 1)
    finally:
        os.close(descriptor)
