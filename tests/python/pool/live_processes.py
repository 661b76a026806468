"""A writer and readers as separate processes: ``python -m tests.python.pool.live_processes``.

Rows identify their key and the write that wrote them, so a reader detects a torn or foreign row.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import petps
from petps import _native
from petps.errors import PetpsError

DIM: Final = 128
KEYS: Final = 2_000
TABLE: Final = "items"

Keys = npt.NDArray[np.uint64]


def rows_of(keys: Keys, write: int) -> npt.NDArray[np.float32]:
    """Return float32[n, DIM]: key * 1000 + write % 1000, in every place."""
    values = (keys * 1000 + write % 1000).astype(np.float32)
    return np.repeat(values[:, None], DIM, axis=1)


def faults_of(keys: Keys, rows: Any, is_found: Any) -> list[str]:
    """Return the faults of a pull of keys that all exist."""
    faults = [f"key {key} is missing" for key in keys[~is_found]]
    is_torn = (rows != rows[:, :1]).any(axis=1)
    is_foreign = (rows[:, 0] // 1000).astype(np.uint64) != keys
    faults += [f"the row of key {key} is torn" for key in keys[is_found & is_torn]]
    faults += [f"key {key} has another key's row" for key in keys[is_found & is_foreign & ~is_torn]]
    return faults


def report(**facts: Any) -> None:
    """Print facts as one line of JSON, and flush it."""
    print(json.dumps(facts), flush=True)


def write(path: str, writes: str) -> None:
    """Replace all rows ``writes`` times, as fast as possible, after a line on standard input.

    With 0 writes, replace them without end, and without waiting for a line.
    """
    with petps.open(path) as pool:
        keys = np.arange(KEYS, dtype=np.uint64)
        first = int(time.time_ns() // 1_000_000)
        report(ready=True)
        table = pool.table(TABLE)
        if int(writes) > 0:
            sys.stdin.readline()
        for number in itertools.count(1):
            stored = rows_of(keys, first + number).view(np.uint8)
            table.apply(keys, np.ascontiguousarray(stored))
            if number % 50 == 0 or number == int(writes):
                status = table.status()
                report(writes=number, slots=status.slots, retired=status.retired_slots)
            if number == int(writes):
                time.sleep(3600)  # until the test kills it


def read(path: str, seconds: str, pins: str) -> None:
    """Pull random keys and check every row, until the first fault, or for ``seconds``."""
    with petps.open_live(path) as pool:
        if pins == "disabled":
            pool._native.disable_pins_for_test()
        random = np.random.default_rng(os.getpid())
        deadline = time.monotonic() + float(seconds)
        report(ready=True, seed=os.getpid())
        pulls = 0
        while time.monotonic() < deadline:
            keys = random.integers(0, KEYS, 4096).astype(np.uint64)
            rows, mask = pool.pull(TABLE, keys, return_mask=True)
            pulls += 1
            if faults := faults_of(keys, rows, mask):
                report(pulls=pulls, faults=faults[:5])
                return
            if pulls % 200 == 0:
                report(pulls=pulls)
        report(pulls=pulls, faults=[])


def hold(path: str) -> None:
    """Take a pin, report it, and hold it until killed."""
    reader = _native.LiveReader.open(path)
    reader.hold_pin_for_test()
    report(ready=True)
    sys.stdin.read()


def leave_child(path: str) -> None:
    """Take a pin, fork a child that lives on, report its id, and hold the pin until killed."""
    reader = _native.LiveReader.open(path)
    reader.hold_pin_for_test()
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    report(ready=True, child=child)
    sys.stdin.read()


def open_repeatedly(path: str) -> None:
    """Open and close the pool repeatedly, with or without success, until killed."""
    report(ready=True)
    for number in itertools.count(1):
        with contextlib.suppress(PetpsError):
            petps.open_live(path).close()
        if number % 100 == 0:
            report(opens=number)


if __name__ == "__main__":
    roles: list[Callable[..., None]] = [write, read, hold, leave_child, open_repeatedly]
    {role.__name__: role for role in roles}[sys.argv[1]](*sys.argv[2:])
