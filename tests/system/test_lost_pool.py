"""A pool whose file is lost under a process: a message and an exit status, not a restart loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import petps
from petps import _native
from petps.cli.app import LOST_POOL

pytestmark = pytest.mark.system


def test_a_process_that_uses_the_library_dies_of_sigbus(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    with petps.create(path) as new_pool:
        new_pool.create_table("items", dim=4, capacity=1000)
    program = (
        "import os, sys, petps\n"
        "with petps.open(sys.argv[1]) as pool:\n"
        "    os.truncate(sys.argv[1], 0)\n"
        "    pool.pull('items', [1])\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, check=False
    )
    assert process.returncode == -7, process.stderr  # SIGBUS, as without petps


def test_the_exit_status_is_the_same_in_both_languages() -> None:
    assert LOST_POOL == _native.LOST_POOL_EXIT_STATUS
