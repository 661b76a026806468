"""Catch-up: a partition becomes equal to a base, even if it is interrupted half way."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from petps.checkpoint import BaseFolder
from petps.delta import BaseBody, Kind, Record, RecordHeader, TableSchema, encode_record
from petps.delta.directory import DirectoryLog
from petps.delta.schema import partition_of
from petps.errors import PetpsError
from petps.publish import Publisher
from petps.server.ingest import Mode, Progress, Standing
from petps.server.ingest.protocols import Commit, Stamps
from tests.python.checkpoint.test_base import Reads
from tests.python.ingest.driver import (
    SCHEMAS,
    Driver,
    P,
    Rows,
    Stream,
    publish_versions,
    rows_by_partition,
    stream_of,
    write_base,
)
from tests.python.ingest.model import Keys, Letters, Mask, MemoryTables, Report
from tests.python.ingest.model import Rows as StoredRows
from tests.python.ingest.world import damage_chunk, write_rows
from tests.python.waiting import wait_until

Apply = Callable[[Keys, StoredRows | None, Mask | None, int | Stamps], Report]


class Killed(Exception):
    """Signal for the end of the process."""


class MortalTables(MemoryTables):
    """Tables that fail at the n-th change. Earlier changes stay, as in a pool."""

    def __init__(self, schemas: list[TableSchema], partitions: int) -> None:
        super().__init__(schemas, partitions)
        self.left = 1 << 60
        for table in self.by_name.values():
            table.apply = self._mortal(table.apply)  # type: ignore[assignment, method-assign]

    def _mortal(self, apply: Apply) -> Apply:
        def mortal(
            keys: Keys, rows: StoredRows | None, deleted: Mask | None, stamp: int | Stamps
        ) -> Report:
            self.spend()
            return apply(keys, rows, deleted, stamp)

        return mortal

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def record_progress(self, progress: Sequence[Progress], commits: Sequence[Commit] = ()) -> None:
        self.spend()
        super().record_progress(progress, commits)


def open_log(path: Path) -> DirectoryLog:
    return DirectoryLog(path, partitions=P, segment_bytes=4096)


def two_runs(path: Path, folder: Path, *, base_seed: int = 5) -> tuple[DirectoryLog, Stream]:
    """Write run 1 from nothing, then run 2, which begins with a base of other rows."""
    log = open_log(path)
    first = Publisher(log, "m", tables=SCHEMAS, run=1)
    first.begin_continue(None)
    publish_versions(first, np.random.default_rng(1), 4)
    rng = np.random.default_rng(base_seed)
    trained: dict[int, Rows] = {p: {} for p in range(P)}
    for (p, _, seq), rows in stream_of(log, first.position()).states.items():
        if seq == first.position().seqs[p]:
            kept = [key for key in rows if rng.random() < 0.5]
            trained[p] = {key: rows[key][::-1] for key in kept}
    write_base(folder / "bases" / "b2", trained, dict.fromkeys(range(P), (2, 0)), version=9)
    second = Publisher(log, "m", tables=SCHEMAS, run=2)
    second.begin_base("b2", version=9)
    publish_versions(second, np.random.default_rng(2), 4)
    stream = stream_of(log, second.position())
    # The model of the log alone does not know the base: run 2 starts from its rows.
    for p in range(P):
        rows = dict(trained[p])
        before: Rows = dict(stream.states[(p, 2, 1)])
        stream.states[(p, 2, 1)] = dict(rows)
        for seq in range(2, second.position().seqs[p] + 1):
            after = stream.states[(p, 2, seq)]
            for key in before.keys() - after.keys():
                rows.pop(key, None)
            for key, row in after.items():
                if before.get(key) != row:
                    rows[key] = row
            before = after
            stream.states[(p, 2, seq)] = dict(rows)
    return log, stream


def test_a_new_run_with_a_base_replaces_everything(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    first = Publisher(log, "m", tables=SCHEMAS, run=1)
    first.begin_continue(None)
    publish_versions(first, np.random.default_rng(1), 4)
    stream = stream_of(log, first.position())
    trained = {
        p: {key: row[::-1] for key, row in rows.items() if key[1] % 2}
        for p, rows in stream.final().items()
    }
    write_base(tmp_path / "bases" / "b2", trained, {}, version=9)
    second = Publisher(log, "m", tables=SCHEMAS, run=2)
    second.begin_base("b2", version=9)
    instance = MemoryTables(SCHEMAS, P)
    driver = Driver(log, instance, Letters(), BaseFolder(tmp_path / "bases")).run()
    assert rows_by_partition(instance) == trained
    for p in range(P):
        progress = instance.progress(p)
        assert progress is not None
        assert (progress.run, progress.seq, progress.version) == (2, 1, 9)
        assert progress.standing is Standing.FOLLOWING
        catching = [
            h for h in instance.history if h.partition == p and h.standing is Standing.CATCHING_UP
        ]
        assert [(h.run, h.seq, h.target) for h in catching] == [(1, first.position().seqs[p], 9)]
        assert driver.states[p].catch_ups == 1
    second.publish("user", [4], np.ones((1, 4), np.float32))
    second.commit()
    driver.run()
    assert all(state.recorded.version == 10 for state in driver.states.values())
    driver.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_catch_up_killed_at_every_change_completes_after_a_restart(
    tmp_path: Path, seed: int
) -> None:
    """Kill at every apply and every progress record of the whole stream, catch-up included."""
    log, stream = two_runs(tmp_path / "log", tmp_path, base_seed=seed)
    bases = BaseFolder(tmp_path / "bases")
    instance = MortalTables(SCHEMAS, P)
    Driver(log, instance, Letters(), bases, poll_bytes=2000).run().close()
    expected = stream.final()
    assert rows_by_partition(instance) == expected
    changes = (1 << 60) - instance.left
    assert changes > 30
    for last in range(seed, changes, 3):
        instance = MortalTables(SCHEMAS, P)
        instance.left = last
        driver = Driver(log, instance, Letters(), bases, poll_bytes=2000)
        with pytest.raises(Killed):
            driver.run()
        driver.close()
        instance.left = 1 << 60
        again = Driver(log, instance, Letters(), bases, poll_bytes=2000).run()
        again.close()
        assert rows_by_partition(instance) == expected, last
        assert all(state.is_following for state in again.states.values())


def test_an_interrupted_catch_up_never_follows_the_old_stream(tmp_path: Path) -> None:
    """Kill a catch-up, restart without its base: stale, and nothing of run 1 is applied."""
    log, _ = two_runs(tmp_path / "log", tmp_path)
    instance = MemoryTables(SCHEMAS, P)
    instance.record_progress(
        [Progress(0, run=1, seq=2, offset=2, version=0, standing=Standing.CATCHING_UP, target=9)]
    )
    shutil.rmtree(tmp_path / "bases")
    driver = Driver(log, instance, Letters(), BaseFolder(tmp_path / "bases")).run()
    state = driver.states[0]
    assert state.mode is Mode.INCOMPLETE
    assert state.recorded.standing is Standing.CATCHING_UP
    assert rows_by_partition(instance)[0] == {}
    driver.close()


def test_an_interrupted_catch_up_stays_so_while_the_log_feeds_another_instance(
    tmp_path: Path,
) -> None:
    """Pass over a run that feeds no instance here, but only where rows are consistent."""
    log = open_log(tmp_path / "log")
    first = Publisher(log, "m", tables=SCHEMAS, run=1)
    first.begin_continue(None)
    publish_versions(first, np.random.default_rng(1), 2)
    stream = stream_of(log, first.position())
    instance = MemoryTables(SCHEMAS, P)
    Driver(log, instance, Letters()).run().close()
    second = Publisher(log, "m", tables=SCHEMAS, run=2)
    second.begin_base("other", version=9, instance="m@2")
    publish_versions(second, np.random.default_rng(2), 2)
    recorded = instance.progress(0)
    assert recorded is not None
    mixed = replace(recorded, standing=Standing.CATCHING_UP, target=7)
    instance.record_progress([mixed])
    bases = tmp_path / "bases"
    for _ in range(2):
        driver = Driver(log, instance, Letters(), BaseFolder(bases)).run()
        state = driver.states[0]
        assert (state.mode, state.reason) == (
            Mode.INCOMPLETE,
            "the catch-up to version 7 was interrupted",
        )
        assert instance.progress(0) == mixed
        assert driver.states[1].passed_run == 2
        driver.close()
    positions = {p: (1, first.position().seqs[p]) for p in range(P)}
    write_base(bases / "b", stream.final(), positions, version=7)
    instance.by_name["user"].rows.clear()
    driver = Driver(log, instance, Letters(), BaseFolder(bases)).run()
    assert driver.states[0].passed_run == 2
    assert rows_by_partition(instance)[0] == stream.final()[0]
    driver.close()


@pytest.mark.parametrize("instance", ["m@2", None])
def test_a_base_of_another_instance_within_a_run_ends_no_gap(
    tmp_path: Path, instance: str | None
) -> None:
    """Lose the beginning of a run, so that only the base says whose instance's rows it holds."""
    log = open_log(tmp_path / "log")
    first = Publisher(log, "m", tables=SCHEMAS, run=1)
    first.begin_continue(None)
    publish_versions(first, np.random.default_rng(1), 2)
    stream = stream_of(log, first.position())
    other: dict[int, Rows] = {p: {("user", p + 1000): b"o" * 16} for p in range(P)}
    write_base(tmp_path / "bases" / "theirs", other, {}, version=9, instance="m@2")
    for p in range(P):
        header = RecordHeader("m", Kind.BASE, 2, "other", 0, 7, 9, 1, partition=p, partitions=P)
        body = BaseBody(location="theirs", instance=instance)
        log.publish(p, encode_record(Record(header, body)))
        log.publish(p, encode_record(Record(replace(header, seq=9), body)))
    driver = Driver(log, MemoryTables(SCHEMAS, P), Letters(), BaseFolder(tmp_path / "bases"))
    driver.run().close()
    assert {state.mode for state in driver.states.values()} == {Mode.INCOMPLETE}
    assert rows_by_partition(driver.instance) == stream.final()


def test_a_base_that_is_too_old_is_named(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    publisher = Publisher(log, "m", tables=SCHEMAS, run=1)
    publisher.begin_continue(None)
    publish_versions(publisher, np.random.default_rng(1), 3)
    early = publisher.position()
    driver = Driver(log, MemoryTables(SCHEMAS, P), Letters(), BaseFolder(tmp_path / "bases")).run()
    publisher._seqs[0] += 1  # skip a seq in partition 0
    publish_versions(publisher, np.random.default_rng(2), 1)
    driver.read()
    state = driver.states[0]
    assert state.mode is Mode.INCOMPLETE
    driver.follower.search_bases()
    assert state.search_error == ""  # there is no base yet
    write_base(tmp_path / "bases" / "old", {0: {}}, {0: (1, early.seqs[0])}, early.version)
    driver.follower.search_bases()
    assert not driver.follower.catching_up
    assert f"no base is newer than the stop (the newest is base {tmp_path}" in state.search_error
    assert f"version {early.version})" in state.search_error
    write_base(tmp_path / "bases" / "new", {0: {}}, {0: (1, publisher.position().seqs[0])}, 99)
    driver.follower.search_bases()
    assert state.search_error == ""
    assert driver.follower.catching_up
    driver.close()


def test_other_partitions_follow_during_a_catch_up(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    publisher = Publisher(log, "m", tables=SCHEMAS, run=1)
    publisher.begin_continue(None)
    publish_versions(publisher, np.random.default_rng(1), 3)
    instance = MemoryTables(SCHEMAS, P)
    bases = BaseFolder(tmp_path / "bases")
    driver = Driver(log, instance, Letters(), bases, rows_max=1).run()
    publisher._seqs[0] += 1  # skip a seq in partition 0
    publish_versions(publisher, np.random.default_rng(2), 1)
    driver.read()
    assert driver.states[0].mode is Mode.INCOMPLETE
    position = publisher.position()
    rows: dict[int, Rows] = {p: {("user", 1000 + i): b"b" * 16 for i in range(90)} for p in [0]}
    write_base(tmp_path / "bases" / "b", rows, {0: (1, position.seqs[0])}, position.version)
    driver.follower.search_bases()
    steps = 0
    while driver.follower.catching_up:
        publish_versions(publisher, np.random.default_rng(3), 1)
        while events := driver.subscription.poll(max_bytes=1 << 20, timeout=0):
            for event in events:
                driver.follower.take(event)
        driver.follower.flush()
        assert driver.states[1].recorded.version == publisher.version
        assert driver.states[2].recorded.version == publisher.version
        driver.advance_catch_up()
        steps += 1
    assert steps > 20  # one row per step
    driver.read()
    assert all(state.is_following for state in driver.states.values())
    assert all(s.recorded.version == publisher.version for s in driver.states.values())
    assert driver.states[0].catch_ups == 1
    driver.close()


def test_a_missing_base_stops_its_partitions_until_it_exists(tmp_path: Path) -> None:
    log, stream = two_runs(tmp_path / "log", tmp_path)
    (tmp_path / "bases").rename(tmp_path / "away")
    instance = MemoryTables(SCHEMAS, P)
    driver = Driver(log, instance, Letters(), BaseFolder(tmp_path / "bases")).run()
    for state in driver.states.values():
        assert state.mode is Mode.INCOMPLETE
        assert "base b2" in state.reason
        assert "holds no base: there is neither states/*.json nor manifest.json" in state.reason
        assert state.recorded.run == 1
    (tmp_path / "away").rename(tmp_path / "bases")
    driver.run()
    assert rows_by_partition(instance) == stream.final()
    assert all(state.is_following for state in driver.states.values())
    driver.close()


def test_without_a_folder_of_bases_the_reason_says_so(tmp_path: Path) -> None:
    log, _ = two_runs(tmp_path / "log", tmp_path)
    driver = Driver(log, MemoryTables(SCHEMAS, P), Letters()).run()
    assert "no checkpoint folder is configured" in driver.states[0].reason
    driver.close()


@pytest.mark.parametrize("lost", ["seqs", "retention", "mismatch"])
def test_a_base_of_the_same_run_ends_a_gap(tmp_path: Path, lost: str) -> None:
    log = open_log(tmp_path / "log")
    publisher = Publisher(log, "m", tables=SCHEMAS, run=1)
    publisher.begin_continue(None)
    publish_versions(publisher, np.random.default_rng(1), 3)
    instance = MemoryTables(SCHEMAS, P)
    bases = BaseFolder(tmp_path / "bases")
    Driver(log, instance, Letters(), bases).run().close()
    if lost == "seqs":  # the publisher skipped some seqs
        publisher._seqs = [seq + 4 for seq in publisher._seqs]
    elif lost == "mismatch":  # the trainer was restored to an earlier state
        position = publisher.position()
        publisher = Publisher(log, "m", tables=SCHEMAS, run=2)
        publisher.begin_continue(
            type(position)(1, tuple(seq - 1 for seq in position.seqs), position.version)
        )
    publish_versions(publisher, np.random.default_rng(2), 6)
    if lost == "retention":
        for p, end in log.end_offsets(range(P)).items():
            log.trim(p, end)
    driver = Driver(log, instance, Letters(), bases).run()
    for state in driver.states.values():
        assert (state.mode, state.gaps) == (Mode.INCOMPLETE, 1)
        expected = {
            "seqs": "are missing",
            "retention": "retention removed them before they were applied",
            "mismatch": "was applied last",
        }
        assert expected[lost] in state.reason
    position = publisher.position()
    trained = {p: {("user", 1000 + p): b"x" * 16} for p in range(P)}
    placed = {p: trained[p] for p in range(P)}
    write_base(
        tmp_path / "bases" / "a",
        placed,
        {p: (position.run, position.seqs[p]) for p in range(P)},
        version=position.version,
    )
    merged = {key: row for rows in placed.values() for key, row in rows.items()}
    driver.run()
    for state in driver.states.values():
        assert state.is_following
        assert state.recorded.version == position.version
    found = {k: r for rows in rows_by_partition(instance).values() for k, r in rows.items()}
    assert found == merged
    publisher.publish("user", [1], np.full((1, 4), 7, np.float32))
    publisher.commit()
    driver.run()
    assert all(state.recorded.version == position.version + 1 for state in driver.states.values())
    driver.close()


def test_a_run_that_continues_after_lost_messages_waits_for_a_base(tmp_path: Path) -> None:
    """Retention removes messages that one of two servers lacks; then the trainer restarts."""
    log = open_log(tmp_path / "log")
    first = Publisher(log, "m", tables=SCHEMAS, run=1)
    first.begin_continue(None)
    publish_versions(first, np.random.default_rng(1), 3)
    bases = BaseFolder(tmp_path / "bases")
    ahead, behind = MemoryTables(SCHEMAS, P), MemoryTables(SCHEMAS, P)
    Driver(log, behind, Letters(), bases).run().close()
    before = rows_by_partition(behind)
    publish_versions(first, np.random.default_rng(2), 6)
    Driver(log, ahead, Letters(), bases).run().close()
    restored, trained = first.position(), rows_by_partition(ahead)
    for p, end in log.end_offsets(range(P)).items():
        log.trim(p, end)
        assert log.start_offsets([p])[p] > behind.recorded[p].offset
    second = Publisher(log, "m", tables=SCHEMAS, run=2)
    second.begin_continue(restored)
    publish_versions(second, np.random.default_rng(3), 2)
    driver = Driver(log, ahead, Letters(), bases).run()
    assert all((state.is_following, state.gaps) == (True, 0) for state in driver.states.values())
    driver.close()
    driver = Driver(log, behind, Letters(), bases).run()
    assert {(state.mode, state.gaps) for state in driver.states.values()} == {(Mode.INCOMPLETE, 1)}
    assert rows_by_partition(behind) == before
    # The base that ends the stop is the state from which run 2 continues.
    positions = {p: (restored.run, restored.seqs[p]) for p in range(P)}
    write_base(tmp_path / "bases" / "b", trained, positions, restored.version)
    driver.run()
    assert all(state.is_following for state in driver.states.values())
    assert rows_by_partition(behind) == rows_by_partition(ahead)
    driver.close()


def test_a_base_behind_the_served_rows_is_not_used(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    publisher = Publisher(log, "m", tables=SCHEMAS, run=1)
    publisher.begin_continue(None)
    publish_versions(publisher, np.random.default_rng(1), 3)
    behind = publisher.position()
    publish_versions(publisher, np.random.default_rng(1), 3)
    instance = MemoryTables(SCHEMAS, P)
    stream = stream_of(log, publisher.position())
    publisher._seqs = [seq + 1 for seq in publisher._seqs]
    publisher.commit()
    write_base(
        tmp_path / "bases" / "old",
        {p: {} for p in range(P)},
        {p: (1, behind.seqs[p]) for p in range(P)},
        99,
    )
    driver = Driver(log, instance, Letters(), BaseFolder(tmp_path / "bases")).run()
    assert all(state.mode is Mode.INCOMPLETE for state in driver.states.values())
    assert rows_by_partition(instance) == stream.final()
    driver.close()


@pytest.mark.parametrize("mid_version", [False, True])
def test_a_base_marker_after_a_gap_ends_it(tmp_path: Path, mid_version: bool) -> None:
    log = open_log(tmp_path / "log")
    publisher = Publisher(log, "m", tables=SCHEMAS, run=1)
    publisher.begin_continue(None)
    publish_versions(publisher, np.random.default_rng(1), 2)
    publisher._seqs = [seq + 1 for seq in publisher._seqs]
    publish_versions(publisher, np.random.default_rng(2), 2)
    row = np.full((100, 4), 7, np.float32)
    trained: dict[int, Rows] = {p: {} for p in range(P)}
    if mid_version:  # rows of version 5 are on both sides of the marker
        publisher.publish("user", np.arange(100, 200), row)
        trained[0] = {("user", key): row[0].tobytes() for key in range(100, 200)}
    write_base(tmp_path / "elsewhere" / "b", trained, {}, version=4)
    publisher.base(str(tmp_path / "elsewhere" / "b"))
    publish_versions(publisher, np.random.default_rng(3), 2)
    instance = MemoryTables(SCHEMAS, P)
    driver = Driver(log, instance, Letters(), BaseFolder(tmp_path / "bases")).run()
    assert all(state.is_following for state in driver.states.values())
    assert all(state.recorded.version == 6 for state in driver.states.values())
    fresh = MemoryTables(SCHEMAS, P)
    clean = open_log(tmp_path / "clean")
    again = Publisher(clean, "m", tables=SCHEMAS, run=1)
    again.begin_continue(None)
    if mid_version:
        again.publish("user", np.arange(100, 200), row)
    publish_versions(again, np.random.default_rng(3), 2)
    Driver(clean, fresh, Letters()).run().close()
    assert rows_by_partition(instance) == rows_by_partition(fresh)
    driver.close()


@pytest.mark.parametrize(
    ("schemas", "partitions", "model", "message"),
    [
        (SCHEMAS[:1], P, "m", "has a table item: create it in the pool first"),
        ([*SCHEMAS, TableSchema("more", "f32", 1)], P, "m", "lacks table more: catching up"),
        ([SCHEMAS[0], TableSchema("item", "f16", 2)], P, "m", "table item is f32 of dim 2, in"),
        (SCHEMAS, P, "other", "is of model m, not of other"),
    ],
)
def test_a_base_that_does_not_fit_is_refused_before_anything_changes(
    tmp_path: Path, schemas: list[TableSchema], partitions: int, model: str, message: str
) -> None:
    from petps.server.ingest.catch_up import catch_up

    write_base(tmp_path / "b", {p: {("user", p): b"y" * 16} for p in range(P)}, {}, version=3)
    instance = MemoryTables(schemas, partitions, model)
    base = BaseFolder(tmp_path).open("b")
    steps = catch_up(
        instance,
        base,
        [(Progress(0), Progress(0, 2, 1, 5, 3))],
        rows_max=10,
        pace=lambda rows: None,
    )
    with pytest.raises(PetpsError, match=message):
        next(steps)
    assert instance.history == []
    assert all(table.rows == {} for table in instance.by_name.values())


def test_catching_up_one_of_8_partitions_reads_only_its_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from petps.server.ingest.catch_up import catch_up

    rows = {
        "user": dict.fromkeys(range(100), b"u" * 16),
        "item": dict.fromkeys(range(50), b"itemitem"),
    }
    write_rows(tmp_path / "b", SCHEMAS, rows, partitions=8, positions={}, version=3, instance="m")
    reads = Reads(monkeypatch)
    tables = MemoryTables(SCHEMAS, 8)
    base = BaseFolder(tmp_path).open("b")
    targets = [(Progress(5), Progress(5, 2, 1, 5, 3))]
    for _ in catch_up(tables, base, targets, rows_max=10, pace=lambda rows: None):
        pass
    own = {
        name: {k for k in keys if partition_of(np.array([k], np.uint64), 8)[0] == 5}
        for name, keys in rows.items()
    }
    assert {name: set(table.rows) for name, table in tables.by_name.items()} == own
    assert [(chunk.table, chunk.rows) for chunk in reads.chunks] == [
        (name, len(own[name])) for name in ("user", "item")
    ]


def test_a_full_table_takes_the_base_once_the_old_rows_are_gone(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    instance = MemoryTables(SCHEMAS, P)
    old = dict.fromkeys(range(100), b"o" * 16)
    instance.by_name["user"].rows.update(old)
    instance.by_name["user"].capacity = 100
    new: dict[int, Rows] = {0: {("user", 1000 + key): b"n" * 16 for key in range(100)}}
    write_base(tmp_path / "bases" / "b", new, {}, version=3)
    Publisher(log, "m", tables=SCHEMAS, run=2).begin_base("b", version=3)
    driver = Driver(log, instance, Letters(), BaseFolder(tmp_path / "bases"))
    # Each partition makes room when its old rows are deleted; partitions without room try again.
    wait_until(lambda: all(state.is_following for state in driver.run().states.values()))
    assert instance.by_name["user"].rows == {key: row for (_, key), row in new[0].items()}
    driver.close()


def test_a_base_without_room_stops_its_partitions_until_there_is_some(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    instance = MemoryTables(SCHEMAS, P)
    instance.by_name["user"].capacity = 60
    new: dict[int, Rows] = {0: {("user", 1000 + key): b"n" * 16 for key in range(100)}}
    write_base(tmp_path / "bases" / "b", new, {}, version=3)
    Publisher(log, "m", tables=SCHEMAS, run=2).begin_base("b", version=3)
    driver = Driver(log, instance, Letters(), BaseFolder(tmp_path / "bases")).run()
    full = [state for state in driver.states.values() if state.mode is Mode.FULL]
    assert full
    for state in full:
        assert (state.recorded.standing, state.recorded.version) == (Standing.CATCHING_UP, 0)
        assert "catch-up to" in state.health("m@1", None).reason
        assert "table 'user' is full (capacity 60)" in state.health("m@1", None).reason
    instance.by_name["user"].capacity = 100
    wait_until(lambda: all(state.is_following for state in driver.run().states.values()))
    assert instance.by_name["user"].rows == {key: row for (_, key), row in new[0].items()}
    assert {state.recorded.version for state in driver.states.values()} == {3}
    driver.close()


def test_a_damaged_base_stops_its_partition_and_the_reason_names_the_file(tmp_path: Path) -> None:
    log, stream = two_runs(tmp_path / "log", tmp_path)
    path, whole, offset = damage_chunk(tmp_path / "bases" / "b2", "user", 1, P)
    instance = MemoryTables(SCHEMAS, P)
    driver = Driver(log, instance, Letters(), BaseFolder(tmp_path / "bases")).run()
    assert driver.states[0].is_following
    assert driver.states[1].mode is Mode.INCOMPLETE
    assert f"{path} at {offset} does not fit its checksum" in driver.states[1].reason
    assert driver.states[1].recorded.standing is Standing.CATCHING_UP
    path.write_bytes(whole)
    driver.run()
    assert rows_by_partition(instance) == stream.final()
    driver.close()
