"""The demo's record of what happens to its store, and its check of the versions that were kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from examples.demo.training.snapshots import (
    Snapshots,
    Trained,
    has_snapshot,
    read_snapshot,
    remove_snapshots,
)
from examples.demo.training.task import DIM, WORLD, Settings, Task
from examples.demo.training.upkeep import History, check_kept
from petps.checkpoint import Checkpointer, Column, Quantising, Store, Table
from petps.checkpoint.policy import Merged
from petps.train import Timeline
from petps.train.pipeline import Boundary
from tests.seed import SEED

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
TABLE = Table("t", (Column("row", "f32", 16), Column("sum", "f32", 1)))


class Rows:
    """A Source whose rows the test changes; it reports the keys changed since the last version."""

    def __init__(self, keys: Keys, random: np.random.Generator) -> None:
        self.all = keys
        self.columns: dict[str, Floats] = {
            "row": random.standard_normal((len(keys), 16), np.float32),
            "sum": random.random((len(keys), 1), np.float32),
        }
        self.changed = keys

    def keys(self, table: str, since: int | None) -> Keys:
        return self.all if since is None else self.changed

    def rows(self, table: str, keys: Keys) -> tuple[dict[str, Floats], None]:
        places = np.searchsorted(self.all, keys)
        return {name: values[places] for name, values in self.columns.items()}, None

    def copy_trained(self) -> dict[str, Trained]:
        columns = {name: values.copy() for name, values in self.columns.items()}
        return {"t": Trained(self.all.copy(), columns)}


def write_versions(folder: Path, count: int) -> tuple[Store, dict[int, dict[str, Trained]]]:
    """Write quantised versions 1 to ``count``; return the store and the rows of each version."""
    random = np.random.default_rng(SEED)
    store = Store.create(folder / "store", "m", [TABLE], Quantising(20))
    rows = Rows(np.arange(0, 400, 2, dtype=np.uint64), random)
    checkpointer = Checkpointer(store, Merged(stride=2), rows)
    trained: dict[int, dict[str, Trained]] = {}
    for version in range(1, count + 1):
        if version > 1:
            rows.changed = np.sort(random.choice(rows.all, 50, replace=False))
            places = np.searchsorted(rows.all, rows.changed)
            rows.columns["row"][places] += random.random((50, 16), np.float32)
        checkpointer.write(version)
        trained[version] = rows.copy_trained()
    return store, trained


def test_versions_that_hold_the_rounded_rows_pass(tmp_path: Path) -> None:
    """Also if a row is the store's own, as after a restore; and after merges."""
    store, trained = write_versions(tmp_path, 4)
    Merged(stride=2).arrange_all(store)
    row = trained[4]["t"].columns["row"]
    column = store.tables_of(4)["t"].columns[0]
    row[:100] = column.values(column.stored(row[:100]))
    kept = check_kept(store, {2: None, **trained, 3: None}.get)
    assert kept.problems == []
    assert (kept.versions, kept.compared, kept.rows) == (4, 3, 600)


@pytest.mark.parametrize("what", ["row", "sum", "key", "file"])
def test_a_wrong_row_of_a_kept_version_is_a_problem(tmp_path: Path, what: str) -> None:
    store, trained = write_versions(tmp_path, 3)
    table = trained[3]["t"]
    if what == "row":  # more than rounding hides
        table.columns["row"][7, 3] += 1
    elif what == "sum":  # f32 is not rounded: one bit counts
        table.columns["sum"].view(np.uint32)[7] ^= 1
    elif what == "key":
        table.keys[-1] += 1
    else:
        (chunk,) = (chunk for chunk in store.state.lineage.chunks if chunk.first == 3)
        path = tmp_path / "store" / chunk.file
        body = bytearray(path.read_bytes())
        body[chunk.offset + chunk.length // 2] ^= 1
        path.write_bytes(body)
    kept = check_kept(Store.open(tmp_path / "store"), trained.get)
    assert kept.problems
    if what == "file":
        assert any("version 3 does not restore" in problem for problem in kept.problems)
        assert any("lost: version 3, 1 of 3" in problem for problem in kept.problems)  # verify()
    else:
        count = 2 if what == "key" else 1  # a lost and an additional key
        assert kept.problems == [f"version 3: {count} rows of table t are not the trainer's"]


def test_the_history_has_versions_merges_and_purges(tmp_path: Path) -> None:
    history = History(tmp_path / "store")
    assert not history.observe()  # nobody has created the store
    store, _ = write_versions(tmp_path, 3)
    assert history.observe(at_once=True)
    assert (history.listed, history.purged, len(history.merges)) == ({1, 2, 3}, set(), 0)
    Merged(stride=2).arrange_all(store)
    store.drop_all_but({3})
    assert history.observe(at_once=True)
    assert (history.listed, history.purged) == ({3}, {1, 2})
    assert [(merge.last, merge.layer) for merge in history.merges.values()] == [(3, 2)]
    ended = {entry.version for entry in history.versions.values() if entry.end is not None}
    assert (ended, history.resets) == ({1, 2}, 0)
    assert {entry.row_dtype for entry in history.versions.values()} == {"adaptive4"}


def test_snapshots_join_the_rows_of_all_ranks(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path), "log", "clicks", 10_000)
    task = Task(settings)
    last = Boundary(task.steps, b"")
    expected: dict[int, Any] = {}
    for rank in range(WORLD):
        assert not has_snapshot(settings, 0, task.steps)
        with task.tables(rank) as tables:
            table = next(iter(tables))
            keys = np.arange(1, 100, dtype=np.uint64)
            keys = keys[tables.owns(keys)]
            slots = np.random.default_rng((SEED, rank)).random((len(keys), DIM + 1), np.float32)
            table.write_back(1, keys, slots)
            expected |= dict(zip(keys.tolist(), slots, strict=True))
            hook = Snapshots(settings, task, tables, 0, Timeline())
            assert hook.wants(task.steps)
            assert not hook.wants(task.steps - 1)
            hook.act(last)
    assert has_snapshot(settings, 0, task.steps)
    trained = read_snapshot(settings, 0, task.steps)[task.fields[0]]
    assert trained.keys.tolist() == list(range(1, 100))
    rows = np.stack([expected[key] for key in range(1, 100)])
    assert np.array_equal(trained.columns["row"], rows[:, :DIM])
    remove_snapshots(settings, lambda life, step: (life, step) == (0, task.steps))
    assert has_snapshot(settings, 0, task.steps)
    remove_snapshots(settings, lambda life, step: False)
    assert not list(tmp_path.glob("snapshot-*"))
