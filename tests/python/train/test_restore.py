"""A version restored into a trainer's own arrays: memory, parallel reads, damage.

Does not cover that the trainer continues as if it had not been interrupted (test_output.py does).
"""

from __future__ import annotations

import itertools
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from petps.checkpoint import POLICIES, Checkpointer, Column, Store, Table
from petps.checkpoint import reader as reader_module
from petps.checkpoint.files import LocalFiles
from petps.errors import DataLoss
from petps.train import ArrayTable, TrackedSource, TrainerOutput
from petps.train.tracker import Tracker

ROWS, DIM = 100_000, 32
CHUNK_BYTES = 1 << 20
TABLES = [Table("items", (Column("row", "f32", DIM), Column("sum", "f32", 1)))]
MODEL_BYTES = 4 * ROWS * (DIM + 1)


class Trainer:
    """A trainer with arrays of its own and optimizer state."""

    def __init__(self, store: Store, seed: int | None) -> None:
        random = np.random.default_rng(seed)
        shape = (ROWS, DIM)
        self.rows = (
            np.zeros(shape, np.float32) if seed is None else random.random(shape, np.float32)
        )
        self.sums = self.rows[:, 0].copy()
        self.tracker = Tracker()
        self.table = ArrayTable(self.tracker, "items", self.rows, columns={"sum": self.sums})
        self.store = store

    def write(self) -> None:
        """Write a base in chunks of 1 MiB, and two deltas."""
        source = TrackedSource(self.tracker, [self.table])
        writer = Checkpointer(
            self.store, POLICIES["consecutive"](), source, chunk_bytes=CHUNK_BYTES
        )
        for version in range(1, 4):
            self.table.update(
                np.arange(version, 5000, 7),
                self.rows[version:5000:7] + 1,
                sum=self.sums[version:5000:7],
            )
            source.begin()
            source.acknowledge(writer.write(version))

    def output(self) -> TrainerOutput:
        return TrainerOutput(
            self.tracker, [self.table], store=self.store, policy=POLICIES["consecutive"]()
        )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restore") / "store"
    Trainer(Store.create(folder, "m", TABLES), 3).write()
    return folder


def expected() -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(3).random((ROWS, DIM), np.float32)
    sums = rows[:, 0].copy()
    for version in range(1, 4):
        rows[version:5000:7] += 1
    return rows, sums


def test_a_restore_fills_the_trainers_arrays_in_bounded_memory(written: Path) -> None:
    trainer = Trainer(Store.open(written), None)
    output = trainer.output()
    above = sum(chunk.length for chunk in trainer.store.state.lineage.open_delta_chunks())
    tracemalloc.start()
    output.restore(3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    rows, sums = expected()
    np.testing.assert_array_equal(trainer.rows, rows)
    np.testing.assert_array_equal(trainer.sums, sums)
    # The chunks read ahead; four times one chunk (its bytes, its laid-out rows, these as numbers,
    # and a copy in flight); and the deltas above the base.
    assert peak < (reader_module.READ_THREADS + 4) * CHUNK_BYTES + 3 * above
    assert peak < MODEL_BYTES
    assert Store.open(written).state.restores >= 1


class Together(LocalFiles):
    """Files whose first reads by other threads wait for each other: two must run in parallel."""

    READS = 4

    def __init__(self, root: str | Path) -> None:
        super().__init__(root)
        self.barrier = threading.Barrier(2, timeout=60)
        self.main = threading.current_thread()
        self.numbers = itertools.count()
        self.met = 0

    def read_into(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """See Files."""
        if threading.current_thread() is not self.main and next(self.numbers) < self.READS:
            self.barrier.wait()
            self.met += 1
        super().read_into(path, pieces)


@pytest.mark.parametrize("whole", [False, True], ids=["pieces", "restore"])
def test_chunks_are_read_in_parallel(
    written: Path, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one file are read in parallel too: a base is one file."""
    monkeypatch.setattr(reader_module, "PARALLEL_BYTES", CHUNK_BYTES)
    files = Together(written)
    store = Store.open(files)
    assert len({chunk.file for chunk in store.state.lineage.chunks if chunk.layer == 0}) == 1
    rows, _ = expected()
    if whole:
        actual = store.restore()["items"].columns["row"].view(np.float32)
    else:
        pieces = [piece.columns["row"].view(np.float32) for piece in store.pieces("items")]
        actual = np.concatenate(pieces)
    np.testing.assert_array_equal(actual, rows)
    assert files.met == files.READS


def test_a_damaged_chunk_is_not_loaded_and_not_counted(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", "m", TABLES)
    Trainer(store, 3).write()
    last = max(store.state.lineage.chunks, key=lambda chunk: (chunk.layer == 0, chunk.offset))
    path = tmp_path / "store" / last.file
    body = bytearray(path.read_bytes())
    body[last.offset + last.length // 2] ^= 0x10
    path.write_bytes(body)
    trainer = Trainer(Store.open(tmp_path / "store"), None)
    output = trainer.output()
    with pytest.raises(DataLoss, match=f"version 3: .*at {last.offset} does not fit its checksum"):
        output.restore(3)
    assert Store.open(tmp_path / "store").state.restores == 0
    assert not trainer.rows[last.min_key : last.max_key + 1].any()
    body[last.offset + last.length // 2] ^= 0x10
    path.write_bytes(body)
    output.restore(3)
    rows, _ = expected()
    np.testing.assert_array_equal(trainer.rows, rows)
    assert Store.open(tmp_path / "store").state.restores == 1
