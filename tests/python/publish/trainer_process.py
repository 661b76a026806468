"""A trainer that may be killed at any moment, and goes on from what it saved.

Its state is the version that last wrote each key, 0 where the key is not there; it is saved whole
after each commit. A start restores it, writes it as a base, begins a run with that base, and goes
on, by a version at least, until the file ``enough`` names one that is reached. Arguments: folder,
log, seed.
"""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from petps.checkpoint import BaseWriter
from petps.delta import DeltaLog, TableSchema, open_log
from petps.delta.files import publish_file
from petps.errors import Unavailable
from petps.publish import Publisher

DIM = 16
SCHEMA = TableSchema("items", "f32", DIM)
PARTITIONS = 8
KEYS = 20_000
CHANGED = 5_000  # rows a version, a fifth of them deletions
WAIT_SECONDS = 120.0

Versions = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]


def rows_of(keys: Keys, versions: Versions) -> npt.NDArray[np.float32]:
    """Rows that say whose they are, float32[n, DIM]: the version, then mixes of key and version."""
    columns = np.arange(DIM, dtype=np.int64)
    mixed = (
        keys.astype(np.int64)[:, None] * 7919 + versions[:, None] * 104_729 + columns * 31
    ) % 1_000_003
    mixed[:, 0] = versions
    return mixed.astype(np.float32)


def load(folder: Path) -> Versions:
    """The saved state."""
    path = folder / "state.npy"
    return np.load(path) if path.exists() else np.zeros(KEYS, np.int64)


def _save(folder: Path, state: Versions) -> None:
    buffer = io.BytesIO()
    np.save(buffer, state)
    publish_file(folder / "state.npy", buffer.getvalue())


def _write_base(folder: Path, run: int, state: Versions) -> Path:
    writer = BaseWriter(
        folder / "bases" / str(run),
        model="default",
        instance="default@1",
        partitions=PARTITIONS,
        positions={},
        version=0,
    )
    writer.add_table(
        SCHEMA,
        np.flatnonzero(state).astype(np.uint64),
        lambda keys: (rows_of(keys, state[keys.astype(np.int64)]).view(np.uint8), None),
    )
    return writer.commit()


def _begin(log: DeltaLog) -> Publisher:
    """As a supervised trainer does: once the brokers are back, whose start may take its time."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return Publisher(log, "default", tables=[SCHEMA])
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def main(folder: Path, place: str, seed: int) -> None:
    """Publishes until it is enough. Prints the version of each commit."""
    state = load(folder)
    log = open_log(place, partitions=PARTITIONS)
    publisher = _begin(log)
    publisher.begin_base(str(_write_base(folder, publisher.run, state)))
    rng = np.random.default_rng([seed, publisher.version])
    enough = folder / "enough"
    while True:
        version = publisher.version + 1
        keys = rng.choice(KEYS, CHANGED, replace=False).astype(np.uint64)
        deleted = rng.random(CHANGED) < 0.2
        publisher.publish("items", keys, rows_of(keys, np.full(CHANGED, version)), deleted)
        assert publisher.commit(dense=f"dense/{version}") == version
        state[keys.astype(np.int64)] = np.where(deleted, 0, version)
        _save(folder, state)
        print(version, flush=True)
        if enough.exists() and version >= int(enough.read_text()):
            break
    log.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
