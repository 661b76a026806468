"""Tests of pools on real file systems: power cuts, failing writes, full disks.

They run power_cut.py, failing_sync.py and full_disk.py in the guest.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.lab.guest import Guest
from tests.seed import SEED

pytestmark = pytest.mark.timeout(1200)
SECONDS_MAX = 900
# The number of flushes after which to cut the power; the seed chooses them. "100000" means all.
FLUSHES = os.environ.get("PETPS_LAB_FLUSHES", "60")
CUTS_MIN = 40


def run(share: Path, command: str) -> str:
    result = Guest(share).run(f".venv/bin/python -m tests.lab.{command}", SECONDS_MAX)
    print(result.output[-6000:])
    wrong = [line for line in result.output.splitlines() if line.startswith(("WRONG", "Traceback"))]
    assert wrong == []
    assert result.status == 0, result.output[-3000:]
    return result.output


@pytest.mark.parametrize(
    ("file_system", "durability"),
    [
        *(("ext4", durability) for durability in ("power", "process", "changing")),
        *((name, "power") for name in ("xfs", "btrfs", "ext2", "overlay")),
        *((name, "process") for name in ("xfs", "btrfs", "ext2")),
    ],
)
def test_power_cuts(share: Path, file_system: str, durability: str) -> None:
    output = run(share, f"power_cut {file_system} {durability} {SEED} {FLUSHES}")
    match = re.search(r"^cuts (\d+) wrong 0 ", output, re.MULTILINE)
    assert match is not None
    assert int(match[1]) >= CUTS_MIN


@pytest.mark.parametrize("file_system", ["ext4", "xfs", "btrfs", "ext2"])
def test_failing_syncs(share: Path, file_system: str) -> None:
    output = run(share, f"failing_sync {file_system} {SEED}")
    assert re.search(r"^lives \d+ wrong 0$", output, re.MULTILINE) is not None


@pytest.mark.parametrize("file_system", ["ext4", "xfs", "btrfs", "ext2", "tmpfs", "overlay"])
def test_full_disks(share: Path, file_system: str) -> None:
    output = run(share, f"full_disk {file_system}")
    assert re.search(r"^problems 0$", output, re.MULTILINE) is not None
