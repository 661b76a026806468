"""Number and size of the living deltas of a store merged in layers, against DECK's formula.

The deltas satisfy the formula's assumption exactly: two neighbours of any layer have a share d of
their rows in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from petps.checkpoint import Checkpointer, Store, Table
from petps.checkpoint.policy import Merged, compute_living_volume

Keys = npt.NDArray[np.uint64]
LEAVES, DIM = 64, 2


def split(keys: Keys, size: float, layers: int, duplication: float) -> list[Keys]:
    """Return deltas whose union is ``keys``, in order: two overlapping halves, recursively."""
    if layers == 0:
        return [keys]
    half = size / (2 - duplication)
    count = round(half)
    both = keys[:count], keys[len(keys) - count :]
    return [leaf for share in both for leaf in split(share, half, layers - 1, duplication)]


class Trainer:
    def __init__(self, leaves: list[Keys], rows: int) -> None:
        self.leaves, self.now = leaves, 1
        self.values = np.zeros((rows, DIM), np.float32)

    def step(self) -> None:
        self.now += 1
        self.values[self.leaves[self.now - 2].astype(np.intp)] = self.now

    def keys(self, table: str, since: int | None) -> Keys:
        del table
        if since is None:
            return np.arange(len(self.values), dtype=np.uint64)
        assert since == self.now - 1
        return np.sort(self.leaves[self.now - 2])

    def rows(
        self, table: str, keys: Keys
    ) -> tuple[Mapping[str, npt.NDArray[np.float32]], npt.NDArray[np.bool_] | None]:
        del table
        return {"row": self.values[keys.astype(np.intp)]}, None


@pytest.mark.parametrize("duplication", [0.25, 0.5, 1.0])
def test_count_and_volume_follow_the_formula(tmp_path: Path, duplication: float) -> None:
    one = 400
    total = one * (2 - duplication) ** 6
    shuffled = np.random.default_rng(3).permutation(round(total)).astype(np.uint64)
    leaves = split(shuffled, total, 6, duplication)
    assert len(leaves) == LEAVES
    trainer = Trainer(leaves, round(total))
    store = Store.create(tmp_path / "store", "m", [Table.of("t", DIM)])
    policy = Merged(stride=2, every=1000)
    writer = Checkpointer(store, policy, trainer)
    writer.write(1)
    for count in range(1, LEAVES + 1):
        trainer.step()
        writer.write(count + 1)
        writer.arrange()
        living = store.state.lineage.open_delta_chunks()
        assert len(living) == count.bit_count(), f"after {count} deltas"
        assert sorted(2 ** (chunk.layer - 1) for chunk in living) == sorted(
            1 << bit for bit in range(7) if count >> bit & 1
        )
        volume = sum(chunk.rows for chunk in living) / one
        assert volume == pytest.approx(compute_living_volume(count, 2, duplication), rel=0.02)
    rows = store.restore()["t"]
    assert np.array_equal(rows.columns["row"].view(np.float32), trainer.values)
