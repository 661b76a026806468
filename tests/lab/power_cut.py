"""A test of power cuts under a pool on a real file system. It runs in the guest.

    python -m tests.lab.power_cut FILE_SYSTEM power|process|changing SEED FLUSHES

A pool performs the steps of tests/lab/pool/steps.cc on a disk that records its writes
(dm-log-writes). The log has a mark for each acknowledged step. Then the test rebuilds the disk as a
power cut leaves it, at moments that the seed chooses:

- after each of FLUSHES flushes,
- after a write between two flushes,
- with a random subset of the writes between two flushes, because a disk writes in any order.

Each time it mounts the file system, which replays its journal, and lab_pool checks the pool.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from tests.lab import disks
from tests.lab.disks import DISK, LAB_POOL, call
from tests.lab.write_log import Entry, WriteLog

LOG, REPLAYED, CHANGES = (f"/dev/ram{number}" for number in range(1, 4))
LIVE = Path("/run/live")
CUT = Path("/run/cut")
# The numbers of cuts between flushes: after a write, and with a subset of the writes.
BETWEEN_MAX = 15
SUBSETS_MAX = 25
WRITE_BACK_SHARE = 0.4  # share of the steps after which some pages are written back


@dataclass(frozen=True)
class Cut:
    """A power cut after log entry `after`; the later entries `also` have reached the disk too."""

    after: int
    also: tuple[int, ...]
    acknowledged: int
    kind: str


def perform(file_system: str, durability: str, seed: int) -> None:
    """Perform all steps on a disk that records its writes. Leave the log on the device LOG."""
    chance = random.Random(seed)
    sectors = disks.sectors_of(file_system)
    disks.make_file_system(file_system, DISK)
    call(
        "dd", f"if={DISK}", f"of={REPLAYED}", "bs=1M", "conv=sparse,fsync", f"count={sectors >> 11}"
    )
    with disks.map_device("live", f"0 {sectors} log-writes {DISK} {LOG}") as device:
        pool = disks.mount(file_system, device, LIVE) / "pool"
        command = [LAB_POOL, "steps", str(pool), durability, str(seed)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            steps = int(process.stdout.readline().split()[1])
            for number in range(1, steps + 1):
                print("step", file=process.stdin, flush=True)
                answer = process.stdout.readline().strip()
                if not answer.startswith("done"):
                    raise RuntimeError(f"step {number}: {answer}")
                mark(answer)
                # The pages that the kernel writes first after an open are the test of `process`.
                if answer == "done open" or chance.random() < WRITE_BACK_SHARE:
                    line = f"write-back {chance.randrange(1 << 32)}"
                    print(line, file=process.stdin, flush=True)
                    if (answer := process.stdout.readline().strip()) != "done":
                        raise RuntimeError(f"after step {number}: {answer}")
                    flush(device)
        mark("the end")
        disks.unmount(file_system, LIVE)
    print(f"{steps} steps performed and recorded", flush=True)


def mark(text: str) -> None:
    call("dmsetup", "message", "live", "0", "mark", text.replace(" ", "-"))


def flush(device: str) -> None:
    """Flush the disk's cache, so that the log receives all writes so far."""
    file = os.open(device, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def cuts_of(entries: list[Entry], flushes_max: int, chance: random.Random) -> list[Cut]:
    """Return the cuts to check, in the order of the log."""
    acknowledged = [0]  # steps acknowledged before each entry
    for entry in entries:
        acknowledged.append(acknowledged[-1] + entry.text.startswith("done"))
    last = next(i for i, entry in enumerate(entries) if entry.text == "the-end")
    durable = [i for i in range(last) if entries[i].is_durable]
    flushes = sorted(chance.sample(durable, min(flushes_max, len(durable))))
    cuts = [Cut(i, (), acknowledged[i + 1], "flush") for i in flushes]
    between = [i for i in range(last) if entries[i].is_write and not entries[i].is_durable]
    for i in chance.sample(between, min(BETWEEN_MAX, len(between))):
        cuts.append(Cut(i, (), acknowledged[i + 1], "between"))
    spans = [(a, b) for a, b in pairwise(durable) if b > a + 2]
    for start, end in chance.choices(spans, k=SUBSETS_MAX):
        also = tuple(i for i in range(start + 1, end) if chance.random() < 0.5)
        cuts.append(Cut(start, also, acknowledged[end], "subset"))
    print(f"{len(durable)} flushes in the log, {len(flushes)} of them checked; {len(cuts)} cuts")
    return sorted(cuts, key=lambda cut: cut.after)


def check(file_system: str, arguments: list[str], log: WriteLog, cut: Cut) -> str:
    """Return what lab_pool answers for the disk as the cut leaves it."""
    sectors = disks.sectors_of(file_system)
    with disks.map_device("cut", f"0 {sectors} snapshot {REPLAYED} {CHANGES} N 8") as device:
        if cut.also:
            file = os.open(device, os.O_RDWR)
            for i in cut.also:
                log.replay(log.entries[i], file)
            os.fsync(file)
            os.close(file)
        pool = disks.mount(file_system, device, CUT) / "pool"
        answer = disks.ask("check-steps", str(pool), *arguments, str(cut.acknowledged))
        disks.unmount(file_system, CUT)
    return answer


def main() -> int:
    file_system, durability, *numbers = sys.argv[1:]
    seed, flushes_max = map(int, numbers)
    disks.load_modules(file_system)
    perform(file_system, durability, seed)
    disks.pretend_another_boot()
    log = WriteLog(LOG)
    answer_counts: Counter[str] = Counter()
    wrong = 0
    replayed = 0
    started = time.monotonic()
    cuts = cuts_of(log.entries, flushes_max, random.Random(seed + 1))
    for cut in cuts:
        device = os.open(REPLAYED, os.O_RDWR)
        while replayed <= cut.after:
            log.replay(log.entries[replayed], device)
            replayed += 1
        os.fsync(device)
        os.close(device)
        answer = check(file_system, [durability, str(seed)], log, cut)
        answer_counts[answer[:100]] += 1
        if not answer.startswith(("right", "noticed")):
            wrong += 1
            where = f"entry {cut.after}, {cut.kind}, {cut.acknowledged} acknowledged"
            print(f"WRONG at {where}: {answer}", flush=True)
    for text, count in answer_counts.most_common():
        print(f"{count:5} {text}")
    seconds: Final = time.monotonic() - started
    print(f"cuts {len(cuts)} wrong {wrong} seconds {seconds:.0f}")
    return 1 if wrong > 0 else 0


if __name__ == "__main__":
    sys.exit(main())
