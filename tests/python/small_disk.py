"""A small disk: a tmpfs that this test mounts, for tests of full disks."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mount_small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of this size at ``folder``. Skip the test where that is not permitted."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small disk")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a small disk here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
