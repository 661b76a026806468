"""Atomic writing of a file: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["publish_file", "sync_folder"]


def sync_folder(folder: Path) -> None:
    """Make the file names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_file(
    path: Path,
    content: bytes | Callable[[BinaryIO], None],
    *,
    exclusive: bool = False,
    mode: int | None = None,
) -> None:
    """Write a file atomically: readers, also after a crash, find the old or the whole new file.

    The file is durable when the function returns. A failure leaves nothing behind.

    Args:
        path: The file to create or replace.
        content: The bytes, or a function that writes them.
        exclusive: Keep an existing file and raise FileExistsError.
        mode: Permissions of the file; None: those of any new file of this process.
    """
    temporary = path.parent / f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with open(temporary, "xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            os.link(temporary, path)
            temporary.unlink()
        else:
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
