"""Files beside a pool, which only the pool's owner and root write: POOL.audit, POOL.damage."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Final

from petps.delta.files import sync_folder

__all__ = ["FILE_MODE", "append", "file_beside"]

FILE_MODE: Final = 0o600
# No link is followed, and a pipe is not waited for.
OPEN_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK


def file_beside(pool: str | os.PathLike[str], ending: str) -> Path | None:
    """Return the path of a pool's file with this ending; None if the pool is no file."""
    path = Path(os.path.realpath(pool))
    return path.with_name(f"{path.name}.{ending}") if path.is_file() else None


def append(path: Path, content: bytes, owner: os.stat_result | None) -> None:
    """Append ``content``, whole or not at all. Durable on return.

    Args:
        path: The file; it is created if there is none.
        content: Whole lines.
        owner: Of the pool, as stat() returns it; None: any user may write the file.

    Raises:
        OSError: It cannot be written, or it is no file of the owner's.
    """
    is_new = not path.exists()
    file = os.open(path, OPEN_FLAGS, FILE_MODE)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed: one writer at a time
        _check_file(file, path, owner)
        length = os.fstat(file).st_size
        if os.write(file, content) != len(content):
            os.ftruncate(file, length)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)
    finally:
        os.close(file)
    if is_new:
        sync_folder(path.parent)


def _check_file(file: int, path: Path, owner: os.stat_result | None) -> None:
    """Raise OSError unless this is a file of its own, of the owner. Give root's file to the owner.

    The pool's server writes the file too.
    """
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        raise OSError("it is no file of its own: move it away")
    if owner is None or found.st_uid == owner.st_uid:
        return
    if os.geteuid() != 0:
        if found.st_size == 0:  # just made: leave no file that the owner cannot write
            path.unlink()
        raise OSError("only the pool's owner and root may change the pool's tables")
    os.fchown(file, owner.st_uid, owner.st_gid)
