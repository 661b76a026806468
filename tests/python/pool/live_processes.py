"""A writer and readers as separate processes: ``python -m tests.python.pool.live_processes``.

Rows identify their key and the write that made them, so that a torn or foreign row is seen.
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


def faults_of(keys: Keys, rows: Any, found: Any) -> list[str]:
    """Return the faults of a pull of keys that all exist."""
    faults = [f"key {key} is missing" for key in keys[~found]]
    torn = (rows != rows[:, :1]).any(axis=1)
    foreign = (rows[:, 0] // 1000).astype(np.uint64) != keys
    faults += [f"the row of key {key} is torn" for key in keys[found & torn]]
    faults += [f"key {key} shows another's row" for key in keys[found & foreign & ~torn]]
    return faults


def say(**facts: Any) -> None:
    """Print one line of JSON, and flush it."""
    print(json.dumps(facts), flush=True)


def write(path: str, writes: str) -> None:
    """Replace all rows repeatedly, as fast as possible.

    ``writes`` is the number of writes, which begin after a line on standard input; 0 writes at
    once and without end.
    """
    with petps.open(path) as pool:
        keys = np.arange(KEYS, dtype=np.uint64)
        first = int(time.time_ns() // 1_000_000)
        say(ready=True)
        table = pool.table(TABLE)
        if int(writes) > 0:
            sys.stdin.readline()
        for number in itertools.count(1):
            stored = rows_of(keys, first + number).view(np.uint8)
            table.apply(keys, np.ascontiguousarray(stored))
            if number % 50 == 0 or number == int(writes):
                status = table.status()
                say(writes=number, slots=status.slots, retired=status.retired_slots)
            if number == int(writes):
                time.sleep(3600)  # until the test kills it


def read(path: str, seconds: str, pins: str) -> None:
    """Pull random keys and check every row, until the first fault, or for ``seconds``."""
    with petps.open_live(path) as pool:
        if pins == "disabled":
            pool._native.disable_pins_for_test()
        random = np.random.default_rng(os.getpid())
        until = time.monotonic() + float(seconds)
        say(ready=True, seed=os.getpid())
        pulls = 0
        while time.monotonic() < until:
            keys = random.integers(0, KEYS, 4096).astype(np.uint64)
            rows, found = pool.pull(TABLE, keys, return_mask=True)
            pulls += 1
            if faults := faults_of(keys, rows, found):
                say(pulls=pulls, faults=faults[:5])
                return
            if pulls % 200 == 0:
                say(pulls=pulls)
        say(pulls=pulls, faults=[])


def hold(path: str) -> None:
    """Take a pin, report it, and hold it until killed."""
    reader = _native.LiveReader.open(path)
    reader.hold_pin_for_test()
    say(ready=True)
    sys.stdin.read()


def leave_child(path: str) -> None:
    """Take a pin, fork a child that lives on, report its id, and hold the pin until killed."""
    reader = _native.LiveReader.open(path)
    reader.hold_pin_for_test()
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    say(ready=True, child=child)
    sys.stdin.read()


def knock(path: str) -> None:
    """Open the pool repeatedly, with or without success, until killed."""
    say(ready=True)
    for number in itertools.count(1):
        with contextlib.suppress(PetpsError):
            petps.open_live(path).close()
        if number % 100 == 0:
            say(knocks=number)


if __name__ == "__main__":
    parts: dict[str, Callable[..., None]] = {
        "write": write,
        "read": read,
        "hold": hold,
        "leave_child": leave_child,
        "knock": knock,
    }
    parts[sys.argv[1]](*sys.argv[2:])
