"""Kill tests on persistent memory: of the server in a guest, and of the whole guest.

Killing QEMU keeps the content of the processor's caches, because the image is in the host's memory.
So these tests show that mapping, recovery and acknowledgement work together. They cannot show that
every store was flushed; tests/crash does that.
"""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from tests.lab.guest import DEVDAX, FSDAX, Guest, Medium

pytestmark = pytest.mark.timeout(1200)
PYTHON = ".venv/bin/python"
POOLS: dict[Medium, Path] = {"fsdax": FSDAX / "pool", "devdax": DEVDAX}
LIVES = 3
PUSHES = 30  # per life, at least
SECONDS_MAX = 400


@pytest.mark.parametrize("medium", ["fsdax", "devdax"])
def test_kills_of_the_server(share: Path, medium: Medium) -> None:
    guest = Guest(share, medium=medium, medium_bytes=512 << 20)
    command = f"{PYTHON} -m pytest -q -p no:cacheprovider -rA tests/system/test_kill.py"
    environment = {"PETPS_TEST_SCALE": "0.1", "PETPS_TEST_POOL": str(POOLS[medium])}
    result = guest.run(command, SECONDS_MAX, environment)
    print(result.output[-3000:])
    assert result.status == 0, result.output[-6000:]
    assert "1 passed" in result.output


@pytest.mark.parametrize("medium", ["fsdax", "devdax"])
def test_kills_of_the_guest(share: Path, medium: Medium) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    guest = Guest(share, medium=medium, medium_bytes=512 << 20)
    acknowledged = 0
    for _ in range(LIVES):
        command = f"{PYTHON} -m tests.lab.load {POOLS[medium]} {acknowledged}"
        with guest.boot(command, SECONDS_MAX) as running:
            until = acknowledged + PUSHES + chance.randrange(PUSHES)
            while (newest := last_acknowledged(running.output)) < until:
                assert not running.is_off, running.output[-3000:]
                assert newest > 0 or "Traceback" not in running.output, running.output[-3000:]
                time.sleep(0.05)
            running.kill()
            # Everything acknowledged before the kill counts, also lines that nobody has read yet.
            acknowledged = last_acknowledged(running.output)
    result = guest.run(f"{PYTHON} -m tests.lab.load {POOLS[medium]} {acknowledged} --only-check")
    print(f"{acknowledged} pushes acknowledged; {result.output[-300:]}")
    assert result.status == 0, result.output[-3000:]


def last_acknowledged(output: str) -> int:
    """Return the last acknowledged version, 0 if there is none yet. Only whole lines count."""
    versions = re.findall(r"^acknowledged (\d+)\r?\n", output, re.MULTILINE)
    return int(versions[-1]) if versions else 0
