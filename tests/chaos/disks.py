"""Small file systems for pools, which can be filled without filling the machine's disk."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Final

from tests.chaos.tools import NotAvailable

BLOCK: Final = bytes(1 << 20)


class Disk:
    """A file system of its own at ``folder``: ext4 in a file beside it, by a loop device."""

    def __init__(self, folder: Path, mebibytes: int) -> None:
        self.folder = folder
        self._image = folder.with_suffix(".img")
        self._filler = folder / "filler"
        folder.mkdir()
        with self._image.open("wb") as image:
            image.truncate(mebibytes << 20)
        _run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(self._image))
        _run("mount", "-o", "loop", str(self._image), str(folder))

    def fill(self) -> None:
        """Write until nothing more fits."""
        with self._filler.open("ab", buffering=0) as filler:
            for block in (BLOCK, BLOCK[:4096], BLOCK[:1]):
                try:
                    while True:
                        filler.write(block)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Remove what fill() has written."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount and remove it."""
        if os.path.ismount(self.folder):
            _run("umount", "-l", str(self.folder))
        self._image.unlink(missing_ok=True)


def _run(*command: str) -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise NotAvailable(f"{' '.join(command)}: {process.stderr.strip()}")
