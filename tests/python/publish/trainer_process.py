"""A trainer that may be killed at any moment, and continues from the state that it saved.

Its state is, for each key, the version that wrote the key last, or 0 if the key does not exist. The
trainer saves the whole state after each commit. At the start it loads the state, writes it as a
base and begins a run with that base. It publishes at least one version, and stops when it reaches
the version that the file ``enough`` names. Arguments: folder, log, seed.
"""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from petps.checkpoint import BaseInfo, split_by_partition, write_base
from petps.delta import DeltaLog, TableSchema, open_log
from petps.delta.files import publish_file
from petps.errors import Unavailable
from petps.publish import Publisher

DIM = 16
SCHEMA = TableSchema("items", "f32", DIM)
PARTITIONS = 8
KEYS = 20_000
CHANGED = 5_000  # rows of a version; a fifth of them are deletions
WAIT_SECONDS = 120.0

Versions = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]


def rows_of(keys: Keys, versions: Versions) -> npt.NDArray[np.float32]:
    """Return rows that identify their writer, float32[n, DIM]: the version, then mixed values."""
    columns = np.arange(DIM, dtype=np.int64)
    mixed = (
        keys.astype(np.int64)[:, None] * 7919 + versions[:, None] * 104_729 + columns * 31
    ) % 1_000_003
    mixed[:, 0] = versions
    return mixed.astype(np.float32)


def load(folder: Path) -> Versions:
    """Return the saved state."""
    path = folder / "state.npy"
    return np.load(path) if path.exists() else np.zeros(KEYS, np.int64)


def _save(folder: Path, state: Versions) -> None:
    buffer = io.BytesIO()
    np.save(buffer, state)
    publish_file(folder / "state.npy", buffer.getvalue())


def _write_base(folder: Path, run: int, state: Versions) -> Path:
    rows = split_by_partition(
        SCHEMA,
        np.flatnonzero(state).astype(np.uint64),
        lambda keys: (rows_of(keys, state[keys.astype(np.int64)]).view(np.uint8), None),
        PARTITIONS,
    )
    base = folder / "bases" / str(run)
    info = BaseInfo(instance="default@1", version=0, partitions=PARTITIONS)
    write_base(base, "default", info, {SCHEMA: rows})
    return base


def _begin(log: DeltaLog) -> Publisher:
    """Create the publisher, and retry while the brokers start again, as a supervisor would."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return Publisher(log, "default", tables=[SCHEMA])
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def main(folder: Path, place: str, seed: int) -> None:
    """Publish until the version in ``enough`` is reached. Print the version of each commit."""
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
