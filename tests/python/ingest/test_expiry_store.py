"""Rows that expire, on servers that catch up to the versions of a trainer's store.

One replica follows the log from its start. Another begins when the log has lost its start, with a
version of the store. Both must have the same rows at any time.
Does not cover the thinning of the list of commits (tests/python/checkpoint/test_commits.py), and
several ranks (tests/train/train_stamps.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.checkpoint import (
    POLICIES,
    BaseFolder,
    BaseInfo,
    Column,
    Quantising,
    Store,
    Table,
    split_by_partition,
    write_base,
)
from petps.checkpoint.published import Published
from petps.checkpoint.served import ServedVersions
from petps.delta.directory import DirectoryLog
from petps.publish import Publisher
from petps.train import ArrayTable, Every, Links, LoneTables, RankedOutput, TrainerOutput
from petps.train.optimizer import Sgd
from petps.train.output import has_exact_rows
from petps.train.runs import publisher_of
from petps.train.sharded import ShardedTables, TableSpec
from petps.train.stamps import STAMP_COLUMN
from petps.train.stores import open_store
from petps.train.tracker import Tracker
from tests.python.ingest.driver import SCHEMAS, P
from tests.python.ingest.test_expiry import SECOND_NS, START_NS, Replica

KEYS = 600
STEPS_PER_VERSION = 10


class Training:
    """A training whose wall clock moves by a few seconds in each step. Each step is published.

    kind: "arrays" (TrainerOutput), "behind" (RankedOutput of arrays) or "slots" (of a pool).
    """

    def __init__(
        self, folder: Path, kind: str, quantising: Quantising | None, *, stamps: bool = True
    ) -> None:
        self.folder, self.kind = folder, kind
        self.log = DirectoryLog(folder / "log", partitions=P, segment_bytes=4096)
        self.number = 0
        self.second = 0.0
        self.random = np.random.default_rng(7)
        self.policy = "2d"
        self._stamps, self._quantising = stamps, quantising
        if kind == "arrays":
            last = (STAMP_COLUMN,) if stamps else ()
            described = [
                Table(schema.name, (Column("row", "f32", schema.dim), *last)) for schema in SCHEMAS
            ]
            Store.create(folder / "store", "m", described, quantising)

    @contextmanager
    def running(self) -> Iterator[Training]:
        """Train in the block, from the store's newest version."""
        if self.kind == "arrays":
            self._begin_lone()
            yield self
            return
        links, tracker = Links.alone(), Tracker()
        tables: Any
        if self.kind == "slots":
            specs = [TableSpec(schema.name, schema.dim, 5000) for schema in SCHEMAS]
            tables = ShardedTables(None, specs, Sgd(0.1), partitions=P, tracker=tracker)
        else:
            tables = LoneTables(tracker, self._make_arrays(tracker), partitions=P)
        store = open_store(
            self.folder / "store", "m", tables, links,
            quantising=self._quantising, stamps=self._stamps,
        )  # fmt: skip
        publisher = publisher_of(self.log, "m", tables, links.dense, schemas=SCHEMAS)
        with RankedOutput(
            tables, links, store=store, policy=POLICIES[self.policy](), publisher=publisher,
            checkpoint=Every(steps=STEPS_PER_VERSION), publish=Every(steps=1),
            staging=self.folder / "staging", chunk_bytes=1 << 16, bases=self.folder / "bases",
        ) as output:  # fmt: skip
            restored = output.restore()
            output.begin_run(restored)
            self.number = restored.step
            self.tables = {table.name: table for table in tables}
            self.output: Any = output
            yield self
        if self.kind == "slots":
            tables.close()

    def _make_arrays(self, tracker: Tracker) -> list[ArrayTable]:
        return [
            ArrayTable(
                tracker, schema.name, np.zeros((KEYS, schema.dim), np.float32),
                present=np.zeros(KEYS, np.bool_),
            )
            for schema in SCHEMAS
        ]  # fmt: skip

    def _begin_lone(self) -> None:
        tracker, store = Tracker(), Store.open(self.folder / "store")
        self.tables = {table.name: table for table in self._make_arrays(tracker)}
        publisher = Publisher(self.log, "m", tables=SCHEMAS)
        self.output = TrainerOutput(
            tracker, self.tables.values(), store=store, policy=POLICIES[self.policy](),
            publisher=publisher,
        )  # fmt: skip
        position = None
        self.number = store.state.versions()[-1].version if store.state.versions() else 0
        if self.number:
            position = self.output.restore(self.number)
        publisher.begin_continue(position)

    def step(self) -> None:
        self.number += 1
        # Four steps are less than a quarter of EXPIRE_AFTER, so that undone ones change nothing.
        self.second += float(self.random.uniform(1.0, 2.8))
        for schema in SCHEMAS:
            keys = np.unique(self.random.integers(0, KEYS, 20)).astype(np.uint64)
            rows = self.random.standard_normal((len(keys), schema.dim)).astype(np.float32)
            table = self.tables[schema.name]
            if isinstance(table, ArrayTable):
                table.update(keys, rows)
                table.delete(keys[:2])
            else:
                table.write_back(self.number, keys, rows)
        if self.kind != "arrays":
            self.output.after(self.number)
            self.output.wait()
        elif self.number % STEPS_PER_VERSION == 0:
            self.output.checkpoint(self.number, publish=True)
            self.output.arrange()
        else:
            self.output.publish()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def lose_the_log(self) -> None:
        for partition, end in self.log.end_offsets(range(P)).items():
            self.log.trim(partition, end)

    def replica(self) -> Replica:
        bases: Any = ServedVersions(
            str(self.folder / "store"),
            BaseFolder(self.folder / "bases"),
            lambda: {schema.name: schema for schema in SCHEMAS},
        )
        return Replica(self.log, bases)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(kind: str, quantised: bool = False, **options: Any) -> Training:
        training = Training(tmp_path, kind, Quantising(10) if quantised else None, **options)
        monkeypatch.setattr(
            "petps.publish.publisher.time.time_ns",
            lambda: START_NS + round(training.second * SECOND_NS),
        )
        return training

    return make


def stamps_of(replica: Replica, table: str) -> np.ndarray:
    stamps = np.zeros(KEYS, np.uint32)
    native = replica.tables.find("m@1", table)
    out = np.empty((KEYS, native.dim), np.float32)
    native.pull(np.arange(KEYS, dtype=np.uint64), out, None, stamps)
    return stamps


def clocks_of(replica: Replica) -> list[Any]:
    return [replica.tables.clocks(table.id) for table in replica.tables.tables()]


def follow(*replicas: Replica) -> None:
    for replica in replicas:
        replica.driver.run()
        replica.walk()


def catch_up(training: Any, eager: Replica) -> Replica:
    """Return a replica that takes a version of the store, because the log has lost its rows."""
    training.lose_the_log()
    training.steps(3)
    late: Replica = training.replica()
    follow(eager, late)
    assert all(state.catch_ups == 1 for state in late.driver.states.values())
    return late


def assert_same(eager: Replica, late: Replica, *, clocks: bool = True) -> None:
    for schema in SCHEMAS:
        np.testing.assert_array_equal(stamps_of(eager, schema.name), stamps_of(late, schema.name))
        assert eager.keys(schema.name) == late.keys(schema.name)
        assert 0 < len(late.keys(schema.name)) < KEYS
    if clocks:
        assert clocks_of(eager) == clocks_of(late)


@pytest.mark.parametrize("policy", ["full", "2d", "merged", "oneshot"])
@pytest.mark.parametrize("kind", ["arrays", "behind", "slots"])
def test_a_replica_that_begins_with_a_version_keeps_the_same_rows(
    make: Any, kind: str, policy: str
) -> None:
    training = make(kind)
    training.policy = policy
    with training.running():
        eager = training.replica()
        training.steps(50)
        follow(eager)
        late = catch_up(training, eager)
        assert late.driver.states[0].recorded.version == 53
        assert_same(eager, late)
        for _ in range(30):  # until every row of the version has expired, or was written again
            training.step()
            follow(eager, late)
            assert_same(eager, late)


@pytest.mark.parametrize("lost", [0, 3])
@pytest.mark.parametrize("quantised", [False, True], ids=["exact", "quantised"])
@pytest.mark.parametrize("kind", ["arrays", "behind", "slots"])
def test_a_training_that_was_restored_goes_on_with_the_versions_of_its_rows(
    make: Any, kind: str, quantised: bool, lost: int
) -> None:
    """Also if it undoes steps whose commits servers have counted."""
    training = make(kind, quantised)
    with training.running():
        eager = training.replica()
        training.steps(20 + lost)
        follow(eager)
        newest = Store.open(training.folder / "store").state.newest_version
        assert newest == 20
        assert has_exact_rows(Store.open(training.folder / "store"), 20) is not quantised
        if kind != "arrays":
            training.output._last = None  # as if killed: close() writes no version
    with training.running():
        assert training.number == 20
        training.step()
        follow(eager)
        if quantised and kind != "arrays":
            # The base that began this run did not make old rows young.
            stamps = stamps_of(eager, "user")
            assert ((stamps > 0) & (stamps < 20)).any()
        training.steps(19)
        follow(eager)
        late = catch_up(training, eager)
        for _ in range(10):
            assert_same(eager, late, clocks=lost == 0)
            training.step()
            follow(eager, late)


def test_rows_that_no_server_has_do_not_get_younger_in_the_store(make: Any) -> None:
    """A version with owed keys says so; its partitions are not served, whatever the stamps are."""
    training = make("arrays")
    with training.running():
        training.steps(9)
        training.tables["user"].update(np.arange(5), np.ones((5, 4), np.float32))
        training.output.checkpoint(10, publish=False)
        published = Published.of(Store.open(training.folder / "store"), 10)
    assert published is not None
    assert published.owed["user"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["arrays", "behind", "slots"])
def test_a_store_without_the_column_is_served_as_before(make: Any, kind: str) -> None:
    """Its rows are as young as the version, so the late replica keeps more of them, for a while."""
    training = make(kind, stamps=False)
    with training.running():
        eager = training.replica()
        training.steps(40)
        follow(eager)
        late = catch_up(training, eager)
        assert set(eager.keys("user")) < set(late.keys("user"))
        store = Store.open(training.folder / "store")
        assert "petps.commits" not in store.state.version(40).parts
    with training.running():
        training.steps(60)
        follow(eager, late)
        # Their cells begin at different times, so the rows of a step or two may differ.
        for name in ("user", "item"):
            assert len(set(eager.keys(name)) ^ set(late.keys(name))) <= 40
            assert 100 < len(late.keys(name)) < KEYS


def test_a_base_without_stamps_makes_all_rows_as_young_as_itself(make: Any) -> None:
    """Servers give its rows its version, and so do the trainer's versions that follow."""
    training = make("arrays")
    with training.running():
        eager = training.replica()
        training.steps(10)
        follow(eager)
    folder = training.folder / "bases" / "b"
    write_unstamped(training, folder)
    with training.running() as again:
        again.output.publisher = Publisher(again.log, "m", tables=SCHEMAS)
        again.output.publisher.begin_base(str(folder))
        base = again.output.publisher.version
        again.steps(10)
        follow(eager)
        late = catch_up(again, eager)
        assert_same(eager, late)
        assert base in stamps_of(eager, "user")


def write_unstamped(training: Training, folder: Path) -> None:
    rows = {
        schema: split_by_partition(
            schema,
            training.tables[schema.name].keys(),
            lambda keys, name=schema.name: (  # type: ignore[misc]
                training.tables[name].gather(keys).columns["row"].view(np.uint8),
                None,
            ),
            P,
        )
        for schema in SCHEMAS
    }
    write_base(folder, "m", BaseInfo(instance="m", version=11, partitions=P), rows)
