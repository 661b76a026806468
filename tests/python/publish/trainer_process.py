"""A trainer that may be killed at any moment, and goes on from what it saved.

State: a row for each key, saved whole after each commit. A start restores it, writes it as a base,
begins a run with that base, and publishes versions. Arguments: folder, last version (0: for ever).
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np

from petps.checkpoint import BaseWriter
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.delta.files import publish_file
from petps.publish import Publisher

SCHEMA = TableSchema("user", "f32", 8)
P = 2


def load(folder: Path) -> dict[int, bytes]:
    """The saved state: key -> row."""
    path = folder / "state.npz"
    if not path.exists():
        return {}
    with np.load(path) as saved:
        keys, rows = saved["keys"], saved["rows"]
    return {key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)}


def save(folder: Path, state: dict[int, bytes]) -> None:
    """Saves the state whole."""
    keys, rows = arrays(state)
    buffer = io.BytesIO()
    np.savez(buffer, keys=keys, rows=rows)
    publish_file(folder / "state.npz", buffer.getvalue())


def arrays(
    state: dict[int, bytes],
) -> tuple[
    np.ndarray[tuple[int], np.dtype[np.uint64]], np.ndarray[tuple[int, int], np.dtype[np.uint8]]
]:
    """uint64[n] and uint8[n, row_bytes]."""
    keys = np.array(list(state), dtype=np.uint64)
    rows = np.frombuffer(b"".join(state.values()), np.uint8).reshape(-1, SCHEMA.row_bytes)
    return keys, rows


def write_base(folder: Path, run: int, state: dict[int, bytes]) -> Path:
    """The restored state as a base."""
    writer = BaseWriter(
        folder / "bases" / str(run),
        model="m",
        instance="m@1",
        partitions=P,
        positions={},
        version=0,
    )
    keys, rows = arrays(state)
    where = {key: at for at, key in enumerate(keys.tolist())}
    writer.add_table(
        SCHEMA, keys, lambda chosen: (rows[[where[key] for key in chosen.tolist()]], None)
    )
    return writer.commit()


def main() -> None:
    folder, last = Path(sys.argv[1]), int(sys.argv[2])
    state = load(folder)
    log = DirectoryLog(folder / "log", partitions=P, segment_bytes=1 << 20)
    publisher = Publisher(log, "m", tables=[SCHEMA])
    base = write_base(folder, publisher.run, state)
    publisher.begin_base(str(base))
    print(f"begun {publisher.version}", flush=True)
    rng = np.random.default_rng(publisher.run)
    while not last or publisher.version < last:
        for _ in range(3):
            keys = rng.integers(0, 500, 200, dtype=np.uint64)
            rows = rng.standard_normal((200, SCHEMA.dim), dtype=np.float32)
            deleted = rng.random(200) < 0.2
            publisher.publish("user", keys, rows, deleted)
            for key, row, gone in zip(keys.tolist(), rows, deleted, strict=True):
                if gone:
                    state.pop(key, None)
                else:
                    state[key] = row.tobytes()
        publisher.commit()
        save(folder, state)
    print(f"done {publisher.version}", flush=True)


if __name__ == "__main__":
    main()
