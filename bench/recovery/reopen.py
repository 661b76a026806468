"""The time from the call that opens a killed pool to the first correct reply over TCP.

bench.report runs this module as a child process, because a pool is killed with its process.
``python -m bench.recovery.reopen make POOL ROWS DIM DTYPE`` loads the pool and kills itself with
SIGKILL. ``python -m bench.recovery.reopen open POOL ROWS DIM DTYPE`` opens the pool, serves it,
pulls 500 keys, checks them and prints one line of JSON. Then it kills itself too, so that the next
open finds the pool unclean again. DTYPE is f32 or f16.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import numpy as np
import numpy.typing as npt

from bench import DEADLINE_MS

BATCH = 100_000
PULL = 500


def rows_of(keys: npt.NDArray[np.uint64], dim: int) -> npt.NDArray[np.float32]:
    """Return float32[n, dim] rows that identify their keys; f16 holds the values exactly."""
    return (keys[:, None] % 1_999 + np.arange(dim, dtype=np.uint64)).astype(np.float32)


def stored(rows: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    """Return the bytes of `rows` as the pool stores them in `dtype`."""
    return rows.astype({"f32": np.float32, "f16": np.float16}[dtype]).view(np.uint8)


def _die() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def make(pool: str, rows: int, dim: int, dtype: str) -> None:
    """Load rows without syncs, make all of them durable, change some, and die."""
    from petps import _native

    tables = _native.Tables.create(pool, durability="process")
    instance = tables.create_instance("default", "default@0", 1)
    table = tables.create_table("t", instance=instance.id, dim=dim, dtype=dtype, capacity=rows)
    for begin in range(0, rows, BATCH):
        keys = np.arange(begin, min(rows, begin + BATCH), dtype=np.uint64)
        table.apply(keys, stored(rows_of(keys, dim), dtype))
    tables.set_durability("power")
    keys = np.arange(min(rows, BATCH), dtype=np.uint64)
    table.apply(keys, stored(rows_of(keys, dim), dtype))
    _die()


def open_and_pull(pool: str, rows: int, dim: int, dtype: str) -> None:
    """Open the pool, pull from it, print {open_ms, first_reply_ms, called}, and die.

    `called` is the Unix time in seconds at which the call that opens the pool began.
    """
    import petps_client

    from petps import _native

    del dtype  # the client widens rows
    keys = np.random.default_rng(rows).integers(0, rows, PULL).astype(np.uint64)
    expected = rows_of(keys, dim)
    start = time.perf_counter()
    tables = _native.Tables.open(pool)
    opened = time.perf_counter()
    server = _native.Server.start(tables, port=0)
    with petps_client.connect(
        f"petps://127.0.0.1:{server.port}/default", deadline_ms=DEADLINE_MS
    ) as client:
        pulled = client.pull("t", keys)
    replied = time.perf_counter()
    np.testing.assert_array_equal(pulled, expected)
    assert not tables.info().was_clean
    figures = {"open_ms": (opened - start) * 1e3, "first_reply_ms": (replied - start) * 1e3}
    print(json.dumps(figures | {"called": time.time() - (time.perf_counter() - start)}))
    _die()


if __name__ == "__main__":
    _, action, path, count, width, kind = sys.argv
    {"make": make, "open": open_and_pull}[action](path, int(count), int(width), kind)
