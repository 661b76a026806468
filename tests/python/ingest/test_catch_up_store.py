"""Catch-up from a checkpoint store: a server without its log takes the rows of a version.

A TrainerOutput writes log and store. The trainer itself is the model of the server's rows.
Does not cover: a real server (tests/system/test_store_catch_up.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.checkpoint import POLICIES, Base, BaseFolder, Column, Store, Table
from petps.checkpoint.published import Published
from petps.checkpoint.quantise import Quantising
from petps.checkpoint.served import ServedVersions
from petps.checkpoint.store import DELTA
from petps.delta import DeltaLog, Position, TableSchema
from petps.delta.directory import DirectoryLog
from petps.delta.schema import partition_of
from petps.errors import DataLoss, NotFound
from petps.publish import Publisher
from petps.server.ingest import BaseSource, Ingest, Mode, Progress, Standing
from petps.server.ingest.ingest import ROWS_MAX
from petps.train import ArrayTable, TrainerOutput
from petps.train.tracker import Tracker
from tests.python.ingest.driver import SCHEMAS, Driver, P
from tests.python.ingest.model import Letters, MemoryTables
from tests.python.ingest.test_catch_up import Killed, MortalTables

ROWS = 60
SECONDS = 60
SEGMENT_BYTES = 4096
DENSE = "d" * SEGMENT_BYTES  # so large that each version has its own segments


class Trainer:
    """A trainer of `user` and `item`. Each step changes, creates and deletes rows of both."""

    def __init__(
        self, folder: Path, *, policy: str = "2d", quantising: Quantising | None = None
    ) -> None:
        self.folder = folder
        self.log = DirectoryLog(folder / "log", partitions=P, segment_bytes=SEGMENT_BYTES)
        self.random = np.random.default_rng(5)
        tracker = Tracker()
        self.tables = {
            schema.name: ArrayTable(
                tracker,
                schema.name,
                np.zeros((ROWS, schema.dim), np.float32),
                columns={"sum": np.zeros(ROWS, np.float32)} if schema.name == "item" else {},
                present=np.zeros(ROWS, np.bool_),
            )
            for schema in SCHEMAS
        }
        self.store = Store.create(
            folder / "store",
            "m",
            [
                Table("user", (Column("row", "f32", 4),)),
                Table("item", (Column("row", "f32", 2), Column("sum", "f32", 1))),
            ],
            quantising,
        )
        self.feed = TrainerOutput(
            tracker,
            self.tables.values(),
            store=self.store,
            policy=POLICIES[policy](),
            publisher=self.publisher(),
        )
        self.version = 0

    def publisher(self, run: int = 1) -> Publisher:
        publisher = Publisher(self.log, "m", tables=SCHEMAS, run=run)
        publisher.begin_continue(None)
        return publisher

    def train(self) -> None:
        for name, table in self.tables.items():
            ids = self.random.choice(ROWS, 20, replace=False)
            rows = self.random.standard_normal((20, 4 if name == "user" else 2))
            table.update(ids, rows.astype(np.float32))
            table.delete(ids[:4])

    def publish(self) -> None:
        self.train()
        self.feed.publish(dense=DENSE)

    def checkpoint(self, *, publish: bool = True) -> int:
        self.train()
        self.version += 1
        self.feed.checkpoint(self.version, publish=publish, dense=DENSE)
        self.feed.arrange()
        return self.version

    @property
    def newest(self) -> int:
        """Return the newest version of the log."""
        assert self.feed.publisher is not None
        return self.feed.publisher.version

    def lose_the_log(self) -> None:
        """Trim the log as retention does: only the last published messages remain."""
        for partition, end in self.log.end_offsets(range(P)).items():
            self.log.trim(partition, end)

    def rows(self, partitions: range | list[int] = range(P)) -> dict[str, dict[int, bytes]]:
        """Return the rows that a server of these partitions should hold."""
        found = {}
        for name, table in self.tables.items():
            keys = table.keys()
            keys = keys[np.isin(partition_of(keys, P), list(partitions))]
            rows = table.gather(keys).columns["row"]
            found[name] = {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}
        return found

    def seen_by(self, server: MemoryTables) -> BaseSource:
        return ServedVersions(
            str(self.folder / "store"),
            BaseFolder(self.folder / "bases"),
            lambda: {name: table.schema for name, table in server.tables().items()},
        )


def driver_of(trainer: Trainer, server: MemoryTables, rows_max: int = ROWS_MAX) -> Driver:
    return Driver(trainer.log, server, Letters(), trainer.seen_by(server), rows_max)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("fresh", [True, False], ids=["new-server", "behind"])
def test_a_server_whose_log_is_gone_catches_up(tmp_path: Path, policy: str, fresh: bool) -> None:
    trainer = Trainer(tmp_path, policy=policy)
    server = MemoryTables(SCHEMAS, P)
    trainer.publish()
    trainer.checkpoint()
    if not fresh:
        driver_of(trainer, server).run().close()
        assert server.rows() == trainer.rows()
    for _ in range(4):
        trainer.publish()
        trainer.checkpoint()
    checkpointed = trainer.newest
    trainer.publish()
    trainer.publish()
    trainer.lose_the_log()
    trainer.publish()
    driver = driver_of(trainer, server).run()
    for state in driver.states.values():
        assert state.mode is Mode.INCOMPLETE, "the newest version is behind what the log still has"
        assert state.catch_ups == 1
        assert state.recorded.version == checkpointed
    trainer.checkpoint()
    trainer.publish()
    driver.run()
    assert all(state.is_following for state in driver.states.values())
    assert server.rows() == trainer.rows()
    assert all(
        state.recorded.version == driver.states[0].version for state in driver.states.values()
    )
    driver.close()


@pytest.mark.parametrize("at_once", [1, 2, P])
def test_a_catch_up_killed_at_every_change_completes_after_a_restart(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill at every apply and record of the catch-up; then resume it, and perhaps kill it again."""
    trainer = Trainer(tmp_path)
    before = MemoryTables(SCHEMAS, P)
    trainer.publish()
    driver_of(trainer, before).run().close()
    for _ in range(3):
        trainer.checkpoint()
    trainer.lose_the_log()
    trainer.publish()
    monkeypatch.setattr(
        "petps.server.ingest.catch_ups.count_partitions_at_once", lambda base: at_once
    )

    def begun() -> MortalTables:
        server = MortalTables(SCHEMAS, P)
        for name, table in before.by_name.items():
            server.by_name[name].rows.update(table.rows)
        server.recorded.update(before.recorded)
        return server

    server = begun()
    driver_of(trainer, server, rows_max=7).run().close()
    assert server.rows() == trainer.rows()
    changes = (1 << 60) - server.left
    assert changes > 20
    catching = sum(progress.standing is Standing.CATCHING_UP for progress in server.history)
    assert catching == P
    for last in range(changes):
        server = begun()
        server.left = last
        for _ in range(2):  # the second driver may die in what the first one left
            driver = driver_of(trainer, server, rows_max=7)
            try:
                driver.run()
            except Killed:
                server.left = last
            driver.close()
        server.left = 1 << 60
        again = driver_of(trainer, server, rows_max=7).run()
        again.close()
        assert server.rows() == trainer.rows(), last
        assert all(state.is_following for state in again.states.values())


def test_a_store_is_read_once_for_many_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tmp_path)
    for _ in range(3):
        trainer.checkpoint()
    trainer.lose_the_log()
    reads: list[str] = []
    chunks = (
        Base.stamped_chunks
    )  # whether the policy wrote a base or deltas depends on the times measured

    def count_reads(base: Base, table: str, partitions: Collection[int] | None = None) -> Any:
        reads.append(table)
        return chunks(base, table, partitions)

    monkeypatch.setattr(Base, "stamped_chunks", count_reads)
    server = MemoryTables(SCHEMAS, P)
    driver_of(trainer, server).run().close()
    assert server.rows() == trainer.rows()
    assert sorted(reads) == ["item", "user"]


def ingest_of(trainer: Trainer, server: MemoryTables, **options: object) -> Ingest:
    log: DeltaLog = trainer.log
    return Ingest(
        log,
        server,
        dead_letters=Letters(),
        bases=trainer.seen_by(server),
        search_seconds=0.01,
        **options,  # type: ignore[arg-type]
    )


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_catch_up_changes_only_its_own_partitions(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.publish()
    server = MemoryTables(SCHEMAS, P)
    driver_of(trainer, server).run().close()
    others = {
        name: {key: row for key, row in rows.items() if key not in trainer.rows([1])[name]}
        for name, rows in server.rows().items()
    }
    stays = {
        name: {
            key: row
            for key, row in rows.items()
            if partition_of(np.array([key], np.uint64), P)[0] != 1
        }
        for name, rows in others.items()
    }
    trainer.checkpoint()
    trainer.checkpoint()
    trainer.lose_the_log()
    ingest = ingest_of(trainer, server, partitions=[1])
    ingest.start()
    assert ingest.wait_for(trainer.newest, SECONDS)
    assert [partition.catch_ups for partition in ingest.status().partitions] == [1]
    assert ingest.stop(SECONDS)
    expected: Mapping[str, dict[int, bytes]] = trainer.rows([1])
    assert server.rows() == {name: {**stays[name], **expected[name]} for name in expected}


def test_rows_that_are_newer_than_the_log_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Refuse rows ahead of the log: a trainer that resumes from an older version can't undo them.

    The log never supplies such rows, so the server would keep them.
    """
    trainer = Trainer(tmp_path)
    trainer.publish()
    trainer.publish()
    whole = trainer.rows()
    trainer.version += 1
    trainer.feed.checkpoint(trainer.version)  # nothing is owed, as if it had been published
    trainer.checkpoint(publish=False)
    trainer.lose_the_log()
    server = MemoryTables(SCHEMAS, P)
    driver = driver_of(trainer, server).run()
    assert server.rows() == whole
    assert "version 2 of" in caplog.text
    assert "has rows that its log does not have yet, in 3 partitions" in caplog.text
    trainer.publish()
    trainer.version += 1
    trainer.feed.checkpoint(trainer.version)
    driver.run()
    assert server.rows() == trainer.rows()
    driver.close()


def test_rows_are_converted_to_the_served_dtype(tmp_path: Path) -> None:
    """Serve a float32 trainer's rows from a float16 table, encoded as its publisher does."""
    halves = [TableSchema("user", "f16", 4), TableSchema("item", "int8", 2)]
    trainer = Trainer(tmp_path)
    trainer.checkpoint()
    trainer.lose_the_log()
    server = MemoryTables(halves, P)
    driver_of(trainer, server).run().close()
    for schema in halves:
        table = trainer.tables[schema.name]
        keys = table.keys()
        stored = Column("row", schema.dtype, schema.dim).stored(table.gather(keys).columns["row"])
        expected = {int(key): row.tobytes() for key, row in zip(keys, stored, strict=True)}
        assert server.rows()[schema.name] == expected


def test_quantised_rows_are_served_as_floats(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, quantising=Quantising(10))
    trainer.checkpoint()
    trainer.checkpoint()
    trainer.lose_the_log()
    server = MemoryTables(SCHEMAS, P)
    driver_of(trainer, server).run().close()
    assert trainer.store.tables_of()["user"].columns[0].dtype == "adaptive4"
    for name, found in trainer.store.restore().items():
        column = trainer.store.tables_of()[name].columns[0]
        values = column.values(found.columns["row"])
        expected = {int(key): row.tobytes() for key, row in zip(found.keys, values, strict=True)}
        assert server.rows()[name] == expected
    assert server.rows()["user"] != trainer.rows()["user"]


def test_another_dim_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.checkpoint()
    trainer.lose_the_log()
    server = MemoryTables([TableSchema("user", "f32", 3), SCHEMAS[1]], P)
    driver = driver_of(trainer, server).run()
    assert "table user is f32 of dim 4, in the pool f32 of dim 3" in driver.states[0].reason
    assert all(progress.standing is Standing.FOLLOWING for progress in server.history)
    assert server.rows() == {"user": {}, "item": {}}
    driver.close()


def test_an_older_version_is_used_if_one_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(tmp_path, policy="full")
    for _ in range(3):
        trainer.checkpoint()
    trainer.lose_the_log()
    newest = trainer.store.state.lineages[-1].chunks[0]
    path = tmp_path / "store" / newest.file
    body = bytearray(path.read_bytes())
    body[newest.offset + newest.length // 2] ^= 1
    path.write_bytes(body)
    server = MemoryTables(SCHEMAS, P)
    driver = driver_of(trainer, server).run().run()  # searches for versions again
    with pytest.raises(DataLoss, match="version 2 does not need it"):
        trainer.store.restore()
    assert {progress.target for progress in server.history if progress.target} == {2, 3}
    assert "does not fit its checksum" in caplog.text
    assert server.rows() == trainer.rows(), "the log has what came since version 2"
    driver.close()


def test_a_store_that_does_not_exist_or_cannot_be_read(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.publish()
    trainer.publish()
    trainer.lose_the_log()
    (tmp_path / "store").rename(tmp_path / "away")
    server = MemoryTables(SCHEMAS, P)
    ingest = ingest_of(trainer, server)
    ingest.start()

    def reasons() -> str:
        return " ".join(partition.reason for partition in ingest.status().partitions)

    until(lambda: "begins here with seq" in reasons())
    (tmp_path / "store").write_text("no folder")
    until(lambda: "the bases cannot be listed:" in reasons())
    (tmp_path / "store").unlink()
    (tmp_path / "away").rename(tmp_path / "store")
    until(lambda: "cannot be listed" not in reasons())
    trainer.checkpoint()
    assert ingest.wait_for(trainer.newest, SECONDS)
    status = ingest.status()
    assert ingest.stop(SECONDS)
    assert {partition.reason for partition in status.partitions} == {""}
    assert server.rows() == trainer.rows()


def test_a_version_of_another_instance_ends_no_gap(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    publisher = Publisher(trainer.log, "m", tables=SCHEMAS, run=7)
    publisher.begin_base("nowhere", instance="m@7")
    trainer.feed.publisher = publisher
    trainer.checkpoint()
    server = MemoryTables(SCHEMAS, P, name="m@1")
    server.record_progress(
        [Progress(0, run=1, seq=1, offset=2, standing=Standing.CATCHING_UP, target=9)]
    )
    driver = driver_of(trainer, server)
    driver.follower.search_bases()
    assert driver.follower.catching_up == []
    theirs = MemoryTables(SCHEMAS, P, name="m@7")
    theirs.recorded.update(server.recorded)
    driver.close()
    driver = driver_of(trainer, theirs)
    driver.follower.search_bases()
    assert driver.follower.catching_up == [0]
    driver.close()


def test_positions_of_several_trainer_processes_are_joined(tmp_path: Path) -> None:
    """Join the positions of several workers; do not catch up to rows whose worker's log failed."""
    trainer = Trainer(tmp_path)
    server = MemoryTables(SCHEMAS, P)
    trainer.checkpoint()
    one = Published(Position(1, (5, 0, 4), 3), {})
    owed = next(key for key in range(100) if partition_of(np.array([key], np.uint64), P)[0] == 1)
    other = Published(Position(1, (0, 7, 0), 3), {"user": np.array([owed], np.uint64)})
    none = {"user": [], "item": []}  # type: ignore[var-annotated]
    store = trainer.store
    store.write(2, none, kind=DELTA, parts={**one.parts(0), **other.parts(1)})
    store.write(3, none, kind=DELTA, parts=one.parts(0))
    whole = Published(other.position, {})
    store.write(4, none, kind=DELTA, parts={**one.parts(0), **whole.parts(1)})
    differs = Published(Position(2, (0, 7, 0), 3), {})
    store.write(5, none, kind=DELTA, parts={**one.parts(0), **differs.parts(1)})
    found = {base.name: base for base in trainer.seen_by(server).of_model("m")}
    positions = {
        version: [found[f"version {version} of store {store.name}"].position(p) for p in range(P)]
        for version in (2, 3, 4)
    }
    assert positions == {
        2: [(1, 5), (0, 0), (1, 4)],
        3: [(1, 5), (0, 0), (1, 4)],
        4: [(1, 5), (1, 7), (1, 4)],
    }
    assert f"version 5 of store {store.name}" not in found
    assert len(found) == 4


def test_a_version_that_was_rolled_back_is_not_read_as_another_with_its_number(
    tmp_path: Path,
) -> None:
    """Roll a version back and write another with its number while a catch-up waits or runs."""
    trainer = Trainer(tmp_path)
    server = MemoryTables(SCHEMAS, P)
    trainer.checkpoint()
    source = trainer.seen_by(server)
    none = {"user": [], "item": []}  # type: ignore[var-annotated]
    store = trainer.store
    store.write(2, none, kind=DELTA, parts=Published(Position(1, (5, 5, 5), 3), {}).parts())
    waiting = source.of_model("m")[0]
    reading = source.of_model("m")[0].stamped_chunks("user")
    next(reading)
    store.rollback(1)
    store.write(2, none, kind=DELTA, parts=Published(Position(2, (1, 1, 1), 3), {}).parts())
    anew = source.of_model("m")[0]
    assert anew.name == waiting.name
    with pytest.raises(NotFound, match="rolled back"):
        list(waiting.stamped_chunks("user"))
    with pytest.raises(NotFound, match="rolled back"):
        list(reading)
    assert sum(len(keys) for keys, _, _ in anew.stamped_chunks("user")) > 0
    store.rollback(1)
    store.write(2, none, kind=DELTA)  # a trainer's version that is not published
    assert [entry.version for entry in store.state.versions()] == [1, 2]
    assert len(source.of_model("m")) == 1
    with pytest.raises(NotFound, match="rolled back"):
        list(anew.stamped_chunks("user"))


def test_servers_follow_a_trainer_that_goes_back(tmp_path: Path) -> None:
    """Restore a trainer that is behind its servers: a gap, until the new run's next version."""
    trainer = Trainer(tmp_path)
    trainer.checkpoint()
    server = MemoryTables(SCHEMAS, P)
    driver = driver_of(trainer, server)
    trainer.checkpoint()
    trainer.lose_the_log()
    driver.run()
    assert server.rows() == trainer.rows()
    trainer.store.rollback(1)
    position = trainer.feed.restore(1)
    assert position is not None
    publisher = Publisher(trainer.log, "m", tables=SCHEMAS, run=2)
    publisher.begin_continue(position)
    trainer.feed.publisher = publisher
    trainer.version = 1
    trainer.publish()
    driver.run()
    assert all(state.mode is Mode.INCOMPLETE for state in driver.states.values())
    trainer.checkpoint()
    driver.run()
    assert server.rows() == trainer.rows()
    assert all(state.run == 2 and state.is_following for state in driver.states.values())
    driver.close()
