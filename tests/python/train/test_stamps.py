"""Stamps of trained rows: tables that cannot have them, steps that go back, pools that are ahead.

Does not cover that replicas agree (tests/python/ingest/test_expiry_store.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.checkpoint import POLICIES, Column, Quantising, Store, Table
from petps.checkpoint.chunk import STAMP
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.errors import InvalidArgument
from petps.publish import Publisher
from petps.train import Every, Links, LoneTables, RankedOutput, TrainerOutput, publisher_of
from petps.train.optimizer import Sgd
from petps.train.output import has_exact_rows
from petps.train.sharded import ShardedTables, TableSpec
from petps.train.stamps import STAMP_COLUMN
from petps.train.stores import store_tables
from petps.train.table import Gathered
from petps.train.tracker import Tracker

DIM, PARTITIONS = 3, 4
SCHEMA = TableSchema("item", "f32", DIM)


class Sparse:
    """A table of any keys, which does not know when its rows were written."""

    name = "item"

    def __init__(self, tracker: Tracker) -> None:
        tracker.add_table(self.name)

    def keys(self) -> Any:
        return np.empty(0, np.uint64)

    def keys_of(self, ids: Any) -> Any:
        return ids

    def ids_of(self, keys: Any) -> Any:
        return keys

    def gather(self, keys: Any) -> Gathered:
        return Gathered({"row": np.zeros((len(keys), DIM), np.float32)})

    def load_pieces(self, pieces: Iterable[Any]) -> None:
        list(pieces)


def test_a_table_without_row_numbers_has_no_stamps(tmp_path: Path) -> None:
    tracker = Tracker()
    table = Sparse(tracker)
    described = store_tables(LoneTables(tracker, [table]), stamps=True)
    assert [column.name for column in described[0].columns] == ["row"]
    with_stamps = Table("item", (Column("row", "f32", DIM), STAMP_COLUMN))
    store = Store.create(tmp_path / "store", "m", [with_stamps])
    with pytest.raises(InvalidArgument, match="without column 'stamp'"):
        TrainerOutput(tracker, [table], store=store, policy=POLICIES["full"]())


def test_an_optimizer_has_no_column_of_this_name() -> None:
    class Stamping(Sgd):
        def columns(self, dim: int) -> dict[str, int]:
            return {STAMP: 1}

    with pytest.raises(InvalidArgument, match="'stamp', which petps has for itself"):
        ShardedTables(None, [TableSpec("item", DIM, 10)], Stamping(0.1))


class Training:
    """Slots that a TrainerOutput publishes and stores."""

    def __init__(
        self, folder: Path, pool: Path | None = None, quantising: Quantising | None = None
    ) -> None:
        self.log = DirectoryLog(folder / "log", partitions=PARTITIONS)
        spec = TableSpec("item", DIM, 1000)
        tracker = Tracker()
        self.tables = ShardedTables(pool, [spec], Sgd(0.1), partitions=PARTITIONS, tracker=tracker)
        self.table = self.tables["item"]
        place = folder / "store"
        self.store = (
            Store.open(place)
            if place.exists()
            else Store.create(place, "m", store_tables(self.tables, stamps=True), quantising)
        )
        publisher = Publisher(self.log, "m", tables=[SCHEMA])
        self.output = TrainerOutput(
            tracker, list(self.tables), store=self.store, policy=POLICIES["full"](),
            publisher=publisher,
        )  # fmt: skip
        versions = self.store.state.versions()
        position = self.output.restore(versions[-1].version) if versions else None
        publisher.begin_continue(position)

    def close(self) -> None:
        self.log.close()
        self.tables.close()

    def write(self, step: int, keys: list[int], value: float = 1.0) -> None:
        rows = np.full((len(keys), DIM), value, np.float32)
        self.table.write_back(step, np.array(keys, np.uint64), rows)

    def stamps(self, version: int) -> dict[int, int]:
        rows = self.store.restore(version)["item"]
        stamps = np.ascontiguousarray(rows.columns[STAMP]).view(np.uint32)[:, 0]
        return dict(zip(rows.keys.tolist(), stamps.tolist(), strict=True))


def test_a_row_has_the_version_that_followed_its_last_step(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.write(1, [1, 2, 3])
    training.write(2, [3])
    assert training.output.publish() == 1
    training.write(3, [2])
    training.write(4, [4])
    assert training.output.publish() == 2
    training.output.checkpoint(1)
    assert training.stamps(1) == {1: 1, 2: 2, 3: 1, 4: 2}
    training.write(5, [1])
    training.output.checkpoint(2, publish=True)
    assert training.stamps(2) == {1: 3, 2: 2, 3: 1, 4: 2}
    training.close()
    again = Training(tmp_path)
    again.write(6, [4])
    assert again.output.publish() == 4
    again.output.checkpoint(3)
    assert again.stamps(3) == {1: 3, 2: 2, 3: 1, 4: 4}


def test_owed_rows_get_the_version_that_publishes_them(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.write(1, [1, 2])
    training.output.publish()
    training.write(2, [2])
    training.output.checkpoint(1)
    training.close()
    again = Training(tmp_path)
    again.output.checkpoint(2, publish=True)
    assert again.stamps(2) == {1: 1, 2: 2}


def test_rows_that_are_all_published_again_get_that_version(tmp_path: Path) -> None:
    """A training that continues from rounded rows owes the log all of them."""
    training = Training(tmp_path, quantising=Quantising(1))
    training.write(1, [1, 2])
    training.output.publish()
    training.write(2, [3])
    training.output.checkpoint(1, publish=True)
    assert training.stamps(1) == {1: 1, 2: 1, 3: 2}
    training.close()
    again = Training(tmp_path)
    assert not has_exact_rows(again.store, 1)
    again.output.checkpoint(2, publish=True)
    assert again.stamps(2) == {1: 3, 2: 3, 3: 3}
    again.write(3, [1])
    again.output.checkpoint(3, publish=True)
    assert again.stamps(3) == {1: 4, 2: 3, 3: 3}
    again.close()


def test_ranks_that_publish_all_rows_again_give_them_that_version(tmp_path: Path) -> None:
    """The store has f16, so rows are rounded, and there is no folder for bases."""
    described = [Table("item", (Column("row", "f16", DIM), STAMP_COLUMN))]
    store = Store.create(tmp_path / "store", "m", described)
    for step, keys in ((1, [1, 2]), (2, [3])):
        with (
            closing(DirectoryLog(tmp_path / "log", partitions=PARTITIONS)) as log,
            ShardedTables(
                None, [TableSpec("item", DIM, 1000)], Sgd(0.1), partitions=PARTITIONS
            ) as tables,
        ):
            links = Links.alone()
            publisher = publisher_of(log, "m", tables, links.dense, schemas=[SCHEMA])
            with RankedOutput(
                tables, links, store=store, policy=POLICIES["full"](), publisher=publisher,
                checkpoint=Every(steps=1), publish=Every(steps=1), staging=tmp_path / "staging",
                chunk_bytes=1 << 16,
            ) as output:  # fmt: skip
                output.begin_run(output.restore())
                rows = np.full((len(keys), DIM), 0.3, np.float32)
                tables["item"].write_back(step, np.array(keys, np.uint64), rows)
                output.after(step)
        store.refresh()
        stored = store.restore(step)["item"]
        stamps = np.ascontiguousarray(stored.columns[STAMP]).view(np.uint32)[:, 0]
        assert stamps.tolist() == [step] * (2 if step == 1 else 3)


def test_rows_look_younger_if_batches_have_lower_numbers_again(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.write(100, [1, 2])
    training.output.publish()
    training.write(50, [2, 3])
    training.output.publish()
    training.write(51, [4])
    training.output.checkpoint(1, publish=True)
    stamps = training.stamps(1)
    assert stamps[4] == 3
    assert stamps[2] >= 2, "never older than it is"
    assert stamps[3] >= 2


def test_a_pool_that_is_ahead_gets_the_steps_of_the_version(tmp_path: Path) -> None:
    """Also those of rows that are equal; rows of equal versions are not written."""
    pool = tmp_path / "pool"
    training = Training(tmp_path, pool)
    training.write(1, [1, 2, 3])
    training.write(2, [3])
    training.output.checkpoint(1, publish=True)
    training.write(7, [2])  # with the same values
    training.close()
    again = Training(tmp_path, pool)
    steps = again.table.gather(np.array([1, 2, 3], np.uint64)).last_steps
    assert steps is not None
    assert steps.tolist() == [1, 2, 2], "row 1 is not written: its version is the same"
    again.output.checkpoint(2)
    assert again.stamps(2) == {1: 1, 2: 1, 3: 1}
    again.close()
