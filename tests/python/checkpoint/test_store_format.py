"""Formats of a store: a store of format 1 can be read, and continued in format 2.

In format 2 a chunk whose keys ascend by one has no keys and no filter.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from petps.checkpoint import Rows, Store
from petps.checkpoint.chunk import Column, Keys, Mask, Table
from petps.checkpoint.policy import TwoD
from petps.checkpoint.state_files import FORMAT
from petps.checkpoint.store import BASE, DELTA
from petps.errors import InvalidArgument

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "store-1"
LAST = 2**64 - 1


def make_rows(
    table: Table, keys: list[int] | Keys, add: float, deleted: Mask | None = None
) -> Rows:
    """Return the rows that the golden store was written from."""
    found = np.array(keys, np.uint64)
    values = (found[:, None] * 10 + np.arange(4) + add).astype(np.float32)
    columns = {"row": values, "sum": values[:, :1] + np.float32(0.5)}
    return Rows.of(table, found, columns, deleted)


def test_a_store_of_format_1_is_read_and_continued(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "store")
    assert b'"petps-store-1"' in max((GOLDEN / "states").iterdir()).read_bytes()
    store = Store.open(tmp_path / "store")
    table = store.state.tables["items"]
    base = make_rows(table, list(range(100, 140)), 0)
    assert store.restore(1)["items"].equals(base)
    changed = make_rows(table, [3, 101, LAST], 1000)
    keys = np.concatenate([changed.keys, np.delete(base.keys, [1, 20])])
    expected = {
        name: np.concatenate([changed.columns[name], np.delete(base.columns[name], [1, 20], 0)])
        for name in base.columns
    }
    order = np.argsort(keys)
    assert store.restore(2)["items"].equals(Rows(keys, expected, None).at(order))
    assert store.part(1, "dense") == b"one"
    assert all(chunk.has_keys for chunk in store.state.lineage.chunks)  # even if they ascend by one
    store.write(3, {"items": make_rows(table, list(range(100, 110)), 7)}, kind=DELTA)
    TwoD(resets=False).arrange(store)
    again = Store.open(tmp_path / "store")
    assert (
        f'"petps-store-{FORMAT}"'.encode()
        in max((tmp_path / "store" / "states").iterdir()).read_bytes()
    )
    assert again.verify() == []
    assert again.restore(1)["items"].equals(base)
    assert (
        again.restore(3)["items"]
        .between(100, 110)
        .equals(make_rows(table, list(range(100, 110)), 7))
    )


@pytest.mark.parametrize("first", [0, 7, LAST - 499])
def test_keys_that_ascend_by_one_are_left_out(tmp_path: Path, first: int) -> None:
    store = Store.create(tmp_path / "store", "m", [Table.of("items", 4)])
    table = store.state.tables["items"]
    keys = np.arange(500, dtype=np.uint64) + np.uint64(first)
    values = np.random.default_rng(1).random((500, 4), np.float32)
    deleted = np.arange(500) % 7 == 0
    store.write(1, {"items": Rows.of(table, keys, {"row": values})}, kind=BASE)
    apart = np.arange(500) != 250
    store.write(2, {"items": Rows.of(table, keys, {"row": values}, deleted)}, kind=DELTA)
    store.write(3, {"items": Rows.of(table, keys[apart], {"row": values[apart]})}, kind=DELTA)
    whole, deletions, keyed = Store.open(tmp_path / "store").state.lineage.chunks
    assert (whole.has_keys, deletions.has_keys, keyed.has_keys) == (False, False, True)
    assert whole.bloom_length == 0 < keyed.bloom_length
    assert keyed.length - whole.length >= 8 * 499 - 16 - 64  # one row less, and padding
    for chunk in (whole, deletions):
        np.testing.assert_array_equal(store.reader.read_keys(chunk), keys)
    np.testing.assert_array_equal(store.restore(2)["items"].keys, keys[~deleted])
    np.testing.assert_array_equal(
        store.restore(2)["items"].columns["row"].view(np.float32), values[~deleted]
    )
    assert store.verify() == []


def test_chunks_without_keys_are_split(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", "m", [Table.of("items", 1)])
    table, policy = store.state.tables["items"], TwoD(resets=False)
    model = np.zeros((60, 1), np.float32)
    replay = []
    spans = [(0, 60), (0, 30), (40, 50), (10, 20), (20, 45), (30, 31), (0, 60)]
    for version, (start, stop) in enumerate(spans, 1):
        keys = np.arange(start, stop, dtype=np.uint64)
        model[start:stop] = version
        replay.append(model.copy())
        rows = Rows.of(table, keys, {"row": model[start:stop]})
        store.write(version, {"items": rows}, kind=BASE if version == 1 else DELTA)
        policy.arrange(store)
    assert policy.filters.split > 3
    # (40, 50) does not overlap the 30 rows of the version before, so that chunk is not read.
    assert policy.filters.by_bloom < policy.filters.chunks
    assert store.verify() == []
    for version, expected in enumerate(replay, 1):
        found = store.restore(version)["items"].columns["row"].view(np.float32)
        np.testing.assert_array_equal(found, expected)


def test_a_column_named_key_is_refused() -> None:
    """The values of such a column would be read as keys."""
    with pytest.raises(InvalidArgument, match="'key'"):
        Table("items", (Column("row", "f32", 2), Column("key", "f32", 2)))
