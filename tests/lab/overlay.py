"""Opens a pool of an overlay's lower layer for reading and for writing. Runs in the guest.

    python -m tests.lab.overlay

The first open for writing copies the pool to the upper layer. A process that had the lower file
open would see none of the writes that follow, so no such process may exist: a read-only open locks
writers out, and a process that reads beside a writer opens after the writer did.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

import petps
from petps import _native
from tests.lab import disks
from tests.lab.disks import DISK, LAB_POOL, call
from tests.lab.full_disk import digest

LIVE = Path("/run/live")
ROWS = 300
ROUNDS = 12


def round_of(live: petps.LivePool) -> int:
    """Return the round that wrote the oldest row."""
    rows = live.pull("table0", np.arange(ROWS, dtype=np.uint64))
    return int(np.ascontiguousarray(rows).view(np.uint64)[:, 0].min())


def main() -> int:
    disks.load_modules("overlay")
    disks.make_file_system("overlay", DISK)
    merged = disks.mount("overlay", DISK, LIVE)
    call("umount", str(merged))
    lower = LIVE / "lower" / "pool"
    print(disks.ask("make", str(lower), "power", "2", str(ROWS)))
    before = digest(lower)
    disks.mount_overlay(LIVE)
    pool = merged / "pool"

    reader = _native.Tables.open(str(pool), read_only=True)
    refused = disks.ask("write", str(pool), str(ROWS), "2", "2")
    assert "is open in another process" in refused, refused
    reader.close()

    with subprocess.Popen(
        [LAB_POOL, "write-until-refused", str(pool), str(ROWS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        print("1 1", file=writer.stdin, flush=True)
        assert writer.stdout.readline() == "right\n"
        newest = 0
        with petps.open_live(pool) as live:
            while newest < ROUNDS:
                if found := re.match(r"acknowledged 0 (\d+)", writer.stdout.readline()):
                    newest = int(found[1])
                    assert round_of(live) >= newest
        writer.kill()
    assert digest(lower) == before, "the lower layer's pool changed"
    print(f"followed to round {newest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
