"""A test that makes a disk refuse writes under a live pool. It runs in the guest.

    python -m tests.lab.failing_sync FILE_SYSTEM SEED

Two threads write one table each. At random moments the disk refuses all writes (dm-flakey), briefly
or for good, so a sync of one thread loses pages of the other. In each life the disk fails up to
twice. Between failures it may recover, and then the same process opens the pool again. A power cut
ends each life; afterwards every acknowledged round must be on the disk.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

from tests.lab import disks
from tests.lab.disks import DISK, LAB_POOL, call

LIVE = Path("/run/live")
ROWS = 300
LIVES = 4
FAILURES = 2  # per life


class FailingDisk:
    """A disk that the test makes refuse writes, or all access."""

    def __init__(self, sectors: int) -> None:
        self._sectors = sectors

    def repair(self) -> None:
        self._load(f"0 {self._sectors} linear {DISK} 0")

    def refuse_writes(self) -> None:
        always = 1 << 20  # seconds
        self._load(f"0 {self._sectors} flakey {DISK} 0 0 {always} 1 error_writes")

    def refuse_everything(self) -> None:
        self._load(f"0 {self._sectors} error")

    def _load(self, table: str) -> None:
        call("dmsetup", "suspend", "--noflush", "--nolockfs", "disk")
        call("dmsetup", "load", "disk", "--table", table)
        call("dmsetup", "resume", "disk")


class Writer:
    """A process `lab_pool write-until-refused`, and the last rounds that it acknowledged."""

    def __init__(self, pool: Path, rounds: list[int]) -> None:
        self.rounds = rounds
        self.problems: list[str] = []
        self._process = subprocess.Popen(
            [LAB_POOL, "write-until-refused", str(pool), str(ROWS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def open(self) -> bool:
        """Make lab_pool open the pool. Return False if it refuses and prints a reason."""
        assert self._process.stdin is not None
        print(*self.rounds, file=self._process.stdin, flush=True)
        line = self._line()
        print(f"  opened: {line}")
        return not line.startswith("refused to open")

    def wait_for_acknowledged(self, count: int) -> None:
        for _ in range(count):
            self._line()

    def wait_for_stop(self) -> None:
        while self._line() != "stopped":
            pass

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if line == "":
            raise RuntimeError(f"lab_pool ended with status {self._process.wait()}")
        if match := re.fullmatch(r"acknowledged (\d) (\d+)", line):
            self.rounds[int(match[1])] = int(match[2])
        elif line.startswith("wrong"):
            self.problems.append(line)
        elif line.startswith("refused"):
            print(f"  {line}")
        return line


def run_life(
    file_system: str, disk: FailingDisk, chance: random.Random, rounds: list[int]
) -> list[str]:
    """Mount, write while the disk fails, cut the power, check. Return the problems found."""
    disk.repair()
    pool = disks.mount(file_system, "/dev/mapper/disk", LIVE) / "pool"
    if not pool.exists():
        print(disks.ask("make", str(pool), "power", "2", str(ROWS)))
    writer = Writer(pool, rounds)
    for _ in range(FAILURES):
        if not writer.open():  # the file system refuses all access too
            break
        writer.wait_for_acknowledged(chance.randrange(6, 20))
        disk.refuse_writes()
        if chance.random() < 0.5:
            disk.repair()
            print("  failed for a moment")
            writer.wait_for_acknowledged(chance.randrange(3))
            disk.refuse_writes()
        writer.wait_for_stop()
        if chance.random() < 0.7:
            disk.repair()
    disk.refuse_everything()
    writer.kill()
    call("umount", str(LIVE))
    disk.repair()
    pool = disks.mount(file_system, "/dev/mapper/disk", LIVE) / "pool"
    answer = disks.ask("check", str(pool), str(ROWS), *map(str, writer.rounds))
    print(f"  after the power cut, acknowledged {writer.rounds}: {answer}", flush=True)
    disks.unmount(file_system, LIVE)
    return writer.problems + ([] if answer == "right" else [answer])


def main() -> int:
    file_system, seed = sys.argv[1:]
    chance = random.Random(int(seed))
    disks.load_modules(file_system)
    disks.make_file_system(file_system, DISK)
    sectors = disks.sectors_of(file_system)
    problems: list[str] = []
    rounds = [1, 1]
    with disks.map_device("disk", f"0 {sectors} linear {DISK} 0"):
        for number in range(LIVES):
            print(f"life {number}", flush=True)
            problems += run_life(file_system, FailingDisk(sectors), chance, rounds)
    for problem in problems:
        print(f"WRONG {problem}")
    print(f"lives {LIVES} wrong {len(problems)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
