"""Tests of pools on a full disk. They run in the guest.

    python -m tests.lab.full_disk FILE_SYSTEM

The cases create, grow, write, close and open a pool, or a sparse or reflinked copy of one. A case
reports its problems: a row that is missing or torn, a pool that a failed open changed, a crash, an
error that does not name the full disk.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab import disks
from tests.lab.disks import DISK, call

LIVE = Path("/run/live")
TMPFS_BYTES = 64 << 20
ROWS = 3000
LEFT_BYTES = 1 << 20
NAMES_THE_CAUSE = re.compile(r"disk full|No space left on device|copied on write|shares? .*blocks")


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_holes(path: Path) -> bool:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    first = os.lseek(file, 0, os.SEEK_HOLE)
    os.close(file)
    return first < path.stat().st_size


@contextmanager
def fill_disk(folder: Path, left_bytes: int = 0) -> Iterator[None]:
    """Keep the disk full while the block runs, except for about `left_bytes`."""
    if left_bytes > 0:
        with (folder / "left").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, left_bytes)
    filler = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT)
    for piece_bytes in (1 << 20, 1 << 16, 1 << 12):
        piece = os.urandom(piece_bytes)
        while True:
            try:
                os.write(filler, piece)
                os.fsync(filler)
            except OSError:
                break
    os.close(filler)
    (folder / "left").unlink(missing_ok=True)
    os.sync()
    yield
    (folder / "filler").unlink()
    os.sync()


class Cases:
    """The cases of one file system. Each case begins with an empty folder."""

    def __init__(self, file_system: str, folder: Path) -> None:
        self.file_system = file_system
        self.folder = folder
        self.pool = folder / "pool"
        self.copy = folder / "copy"
        self.is_opened = False  # whether the last write() opened its pool
        self.problems: list[str] = []

    def run(self, case: Callable[[], None]) -> None:
        for path in self.folder.iterdir():
            path.unlink()
        before = len(self.problems)
        case()
        verdict = "right" if len(self.problems) == before else "WRONG"
        print(f"{self.file_system} {case.__name__}: {verdict}", flush=True)

    def expect(self, is_right: bool, problem: str) -> None:
        if not is_right:
            self.problems.append(problem)
            print(f"  {problem}", flush=True)

    def ask(self, *arguments: str) -> str:
        """Return lab_pool's answer. Expect no crash, and errors that name the full disk."""
        answer = disks.ask(*arguments)
        print("  " + answer.replace("\n", "\n  "))
        # On Linux 6.1, btrfs reserves space at a store to a mapped page, even without copy on
        # write. If that fails, the process reports a lost pool and exits. The rows that it
        # acknowledged must still be right.
        lost = "lost the pool" in answer
        self.expect(not lost or self.file_system == "btrfs", f"{arguments[0]}: {answer}")
        self.expect("killed by" not in answer, f"{arguments[0]}: {answer}")
        self.expect("wrong" not in answer, f"{arguments[0]}: {answer}")
        for line in answer.splitlines():
            if line.startswith("refused"):
                self.expect(
                    NAMES_THE_CAUSE.search(line) is not None, f"{arguments[0]}: not clear: {line}"
                )
        return answer

    def make(self, durability: str = "power") -> None:
        answer = disks.ask("make", str(self.pool), durability, "1", str(ROWS))
        self.expect("made\nclosed" in answer, f"make: {answer}")

    def write(self, path: Path, rounds: range, newest: int = 1) -> int:
        """Rewrite all rows. Return the newest round acknowledged so far."""
        answer = self.ask("write", str(path), str(ROWS), str(rounds[0]), str(rounds[-1]))
        self.is_opened = "refused to open" not in answer
        acknowledged: list[str] = re.findall(r"^acknowledged 0 (\d+)$", answer, re.MULTILINE)
        return int(acknowledged[-1]) if acknowledged else newest

    def check_round(self, path: Path, oldest: int) -> None:
        self.ask("check", str(path), str(ROWS), str(oldest))

    # ---- the cases ----

    def create(self) -> None:
        with fill_disk(self.folder):
            answer = self.ask("make", str(self.pool), "power", "1", str(ROWS))
            self.expect("refused to create" in answer, f"create: {answer}")
            self.expect(not self.pool.exists(), "a file is left of a pool that was not created")

    def grow(self) -> None:
        for durability in ("power", "process"):
            self.make(durability)
            with fill_disk(self.folder, LEFT_BYTES):
                answer = self.ask("grow", str(self.pool), str(ROWS))
                if "lost the pool" not in answer:
                    self.expect("refused to grow" in answer, f"grow: {answer}")
                    self.expect("closed\nright" in answer, f"grow: {answer}")
            self.check_round(self.pool, 1)
            self.pool.unlink()

    def write_and_close(self) -> None:
        for durability in ("power", "process"):
            self.make(durability)
            with fill_disk(self.folder):
                newest = self.write(self.pool, range(2, 5))
            self.check_round(self.pool, newest)
            self.pool.unlink()

    def open_sparse_copy(self) -> None:
        self.make()
        call("cp", "--reflink=never", "--sparse=always", str(self.pool), str(self.copy))
        self.expect(has_holes(self.copy), "the copy has no holes: the case shows nothing")
        newest = self.write(self.copy, range(2, 3))
        self.expect(newest == 2, "a sparse copy was not opened although the disk has room")
        self.check_round(self.copy, newest)

    def open_sparse_copy_on_a_full_disk(self) -> None:
        self.make()
        call("cp", "--reflink=never", "--sparse=always", str(self.pool), str(self.copy))
        self.expect(has_holes(self.copy), "the copy has no holes: the case shows nothing")
        with fill_disk(self.folder):
            newest = self.write_copy()
        self.check_round(self.copy, newest)
        newest = self.write(self.copy, range(5, 6), newest)
        self.expect(newest == 5, "a sparse copy was not opened although the disk has room")
        self.check_round(self.copy, newest)

    def open_reflinked_copy_on_a_full_disk(self) -> None:
        for durability in ("power", "process"):
            self.make(durability)
            call("cp", "--reflink=always", str(self.pool), str(self.copy))
            with fill_disk(self.folder):
                newest = self.write_copy()
            self.check_round(self.copy, newest)
            newest = self.write(self.copy, range(5, 6), newest)
            self.check_round(self.copy, newest)
            self.copy.unlink()
            self.pool.unlink()

    def write_copy(self) -> int:
        """Write to the copy. Expect that a failed open changes no byte of copy or original."""
        original, copy = digest(self.pool), digest(self.copy)
        newest = self.write(self.copy, range(2, 5))
        if not self.is_opened:
            self.expect(self.copy.stat().st_size > 0, "the copy is empty after a failed open")
            self.expect(digest(self.copy) == copy, "a failed open changed the copy")
        self.expect(digest(self.pool) == original, "the original changed with its copy")
        return newest


def main() -> int:
    (file_system,) = sys.argv[1:]
    disks.load_modules(file_system)
    if file_system == "tmpfs":
        LIVE.mkdir()
        call("mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(LIVE))
        folder = LIVE
    else:
        disks.make_file_system(file_system, DISK)
        folder = disks.mount(file_system, DISK, LIVE)
    cases = Cases(file_system, folder / "pools")
    cases.folder.mkdir()
    if file_system == "btrfs":  # no copy on write for new files, as a pool requires
        call("chattr", "+C", str(cases.folder))
    tests = [
        *(cases.create, cases.grow, cases.write_and_close),
        *(cases.open_sparse_copy, cases.open_sparse_copy_on_a_full_disk),
    ]
    if file_system in ("xfs", "btrfs"):
        tests.append(cases.open_reflinked_copy_on_a_full_disk)
    for test in tests:
        cases.run(test)
    for problem in cases.problems:
        print(f"WRONG {problem}")
    print(f"problems {len(cases.problems)}")
    return 1 if cases.problems else 0


if __name__ == "__main__":
    sys.exit(main())
