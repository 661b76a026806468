"""What one side does in a test of upgrades: `python program.py ACTION ...` in its Python.

It uses only what both sides have, and imports nothing of the tests.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

DIM = 8
KEYS = 3000
ALL = np.arange(KEYS, dtype=np.uint64)
DEADLINE_MS = 60_000


def rows_of(keys: npt.NDArray[np.uint64], version: int) -> npt.NDArray[np.float32]:
    """Return float32[n, DIM] that identify their key and version."""
    columns = np.arange(DIM, dtype=np.float32)
    return (keys.astype(np.float32)[:, None] + columns * np.float32(version)).astype(np.float32)


def versions_of(
    keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.float32]
) -> npt.NDArray[np.int64]:
    """Return the version of each row, int64[n]; -1 for a row of no version of its key."""
    version = np.rint(rows[:, 1] - rows[:, 0]).astype(np.int64)
    expected = (
        keys.astype(np.float32)[:, None] + np.arange(DIM, dtype=np.float32) * version[:, None]
    )
    return np.where((rows == expected).all(axis=1), version, -1)


def call_all(url: str) -> dict[str, object]:
    """Make each kind of call, and return the results."""
    import petps_client

    with petps_client.connect(url, deadline_ms=DEADLINE_MS) as client:
        report = client.push("items", ALL, rows_of(ALL, 1))
        rows, found = client.pull("items", [*range(KEYS), KEYS], return_mask=True)
        erased = client.erase("items", [0, 1, KEYS + 5])
        many = client.pull_many({"items": [0, 2], "halves": [5]}, return_mask=True)
        items = client.describe("items")
        answer = client.pull_answer("items", [2, 3])
        error = ""
        try:
            client.pull("nothing", [1])
        except petps_client.NotFound as not_found:
            error = type(not_found).__name__
        client.send_hot_sets()
        return {
            "inserted_or_updated": report.inserted + report.updated,
            "found": int(found.sum()),
            "versions": sorted({int(v) for v in versions_of(ALL, rows[:KEYS])}),
            "erased": [erased.deleted, erased.absent],
            "many": {name: mask.tolist() for name, (_, mask) in many.items()},
            "table": [items.name, items.dim, items.dtype, items.takes_pushes],
            "tables": sorted(table.name for table in client.tables()),
            "answer": [answer.found, answer.instance],
            "error": error,
            "status": client.status()["software"] != "",
        }


def load(url: str, table: str) -> dict[str, object]:
    """Pull until SIGTERM. Return the number of pulls, the versions seen, and what was wrong."""
    import petps_client

    is_done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_done.set())
    random = np.random.default_rng(1)
    pulls, wrong, newest = 0, [], 0
    with petps_client.connect(url, deadline_ms=DEADLINE_MS) as client:
        print("ready", flush=True)
        while not is_done.is_set():
            keys = random.integers(0, KEYS, 500).astype(np.uint64)
            try:
                rows, found = client.pull(table, keys, return_mask=True)
            except petps_client.PetpsError as error:
                wrong.append(f"{type(error).__name__}: {error}")
                continue
            pulls += 1
            versions = versions_of(keys, rows)
            newest = max(newest, int(versions.max()))
            if not found.all():
                wrong.append(f"{int((~found).sum())} keys are missing")
            elif versions.min() < 1:
                wrong.append("a row is of no version")
            time.sleep(0.002)
    return {"pulls": pulls, "newest": newest, "wrong": wrong[:20]}


def publish(folder: str, versions: str) -> dict[str, object]:
    """Begin a run in a directory log, and publish some versions of all rows."""
    from petps.delta import TableSchema
    from petps.delta.directory import DirectoryLog
    from petps.publish import Publisher

    log = DirectoryLog(Path(folder), partitions=8)
    publisher = Publisher(log, "default", tables=[TableSchema("fed", "f32", DIM)])
    publisher.begin_continue(None)
    version = 0
    for _ in range(int(versions)):
        version = publisher.version + 1
        publisher.publish("fed", ALL, rows_of(ALL, version))
        publisher.commit()
    return {"version": version}


ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "call_all": call_all,
    "load": load,
    "publish": publish,
}

if __name__ == "__main__":
    print(json.dumps(ACTIONS[sys.argv[1]](*sys.argv[2:])))
