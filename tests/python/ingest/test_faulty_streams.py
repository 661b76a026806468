"""Duplicated, reordered, lost, cut, altered and foreign messages: counted, never applied wrongly.

In every test, the rows of a partition are exactly those after its recorded {run, seq}. Not covered
here: a publisher that sends wrong rows with correct headers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from petps.checkpoint import BaseFolder
from petps.delta import Message, TableSchema
from petps.delta.directory import DirectoryLog
from petps.publish import Position, Publisher
from petps.server.ingest import Mode, Progress, Standing
from petps.server.ingest.protocols import Commit
from tests.python.ingest.driver import (
    SCHEMAS,
    Driver,
    P,
    Rows,
    StepApplier,
    Stream,
    publish_versions,
    rows_by_partition,
    stream_of,
    write_base,
)
from tests.python.ingest.model import Letters, MemoryTables


def follow(
    tmp_path: Path,
    messages: dict[int, list[Message]],
    instance: MemoryTables | None = None,
) -> Driver:
    """Write the messages to a log, and apply them to ``instance``."""
    driver = Driver(
        write_log(tmp_path / "log", messages),
        instance or MemoryTables(SCHEMAS, P),
        Letters(),
        poll_bytes=3000,
    )
    driver.run().close()
    return driver


def write_log(folder: Path, messages: dict[int, list[Message]]) -> DirectoryLog:
    log = DirectoryLog(folder, partitions=P)
    for partition, partition_messages in messages.items():
        for message in partition_messages:
            log.publish(partition, message)
    log.close()
    return log


def check_rows(driver: Driver, stream: Stream) -> None:
    rows = rows_by_partition(driver.instance)
    for partition in range(P):
        progress = driver.instance.progress(partition)
        run, seq = (progress.run, progress.seq) if progress else (0, 0)
        assert rows[partition] == stream.rows_at(partition, run, seq)


def test_a_clean_stream_is_applied(tmp_path: Path, stream: Stream) -> None:
    driver = follow(tmp_path, stream.messages)
    assert rows_by_partition(driver.instance) == stream.final()
    for partition, state in driver.states.items():
        assert state.is_following
        assert state.recorded.version == 12
        assert state.recorded.offset == len(stream.messages[partition])


class LateApplier:
    """Applier that runs each action when the next one is submitted: reading is one window ahead."""

    def __init__(self) -> None:
        self.action: Callable[[], None] | None = None

    def submit(self, action: Callable[[], None]) -> None:
        self.wait()
        self.action = action

    def wait(self) -> None:
        action, self.action = self.action, None
        if action is not None:
            action()


class WatchedTables(MemoryTables):
    """Tables that check each recorded progress: its rows must be present."""

    stream: Stream

    def record_progress(self, progress: Sequence[Progress], commits: Sequence[Commit] = ()) -> None:
        super().record_progress(progress, commits)
        rows = rows_by_partition(self)
        for entry in progress:
            expected = self.stream.rows_at(entry.partition, entry.run, entry.seq)
            assert rows[entry.partition] == expected


def test_progress_is_never_ahead_of_the_rows(tmp_path: Path, stream: Stream) -> None:
    log = write_log(tmp_path / "log", stream.messages)
    instance = WatchedTables(SCHEMAS, P)
    instance.stream = stream
    driver = Driver(log, instance, Letters(), poll_bytes=2000, applier=LateApplier())
    driver.run().close()
    assert rows_by_partition(instance) == stream.final()
    assert len(instance.history) > 3 * P


def with_partition_0(stream: Stream, messages: list[Message]) -> dict[int, list[Message]]:
    return {**stream.messages, 0: messages}


def test_duplicates_are_counted_and_skipped(tmp_path: Path, stream: Stream) -> None:
    clean = stream.messages[0]
    driver = follow(tmp_path, with_partition_0(stream, [*clean[:9], *clean[2:7], *clean[8:]]))
    assert rows_by_partition(driver.instance) == stream.final()
    assert driver.states[0].duplicates == 6
    assert driver.states[0].gaps == 0


def test_a_lost_message_stops_only_its_partition(tmp_path: Path, stream: Stream) -> None:
    clean = stream.messages[0]
    driver = follow(tmp_path, with_partition_0(stream, [*clean[:9], *clean[10:]]))
    check_rows(driver, stream)
    state = driver.states[0]
    assert (state.mode, state.gaps) == (Mode.INCOMPLETE, 1)
    assert state.reason == "run 5: seqs 10 to 10 are missing"
    assert (state.recorded.seq, state.recorded.offset) == (9, 9)
    assert state.status(len(clean) - 1, state.health("m@1", None)).lag_records == len(clean) - 1 - 9
    assert driver.states[1].is_following
    assert driver.states[1].recorded.version == 12


def test_reordered_messages_are_applied_in_order(tmp_path: Path, stream: Stream) -> None:
    messages = list(stream.messages[0])
    messages[4], messages[6] = messages[6], messages[4]
    driver = follow(tmp_path, with_partition_0(stream, messages))
    assert rows_by_partition(driver.instance) == stream.final()
    assert driver.states[0].gaps >= 1
    assert driver.states[0].is_following


def test_a_stopped_partition_continues_when_a_late_message_arrives(
    tmp_path: Path, stream: Stream
) -> None:
    clean = stream.messages[0]
    driver = follow(tmp_path, with_partition_0(stream, [*clean[:5], *clean[6:], clean[5]]))
    assert rows_by_partition(driver.instance) == stream.final()
    assert driver.states[0].recorded.version == 12


def test_a_corrupt_message_is_a_dead_letter_and_a_gap(tmp_path: Path, stream: Stream) -> None:
    messages = list(stream.messages[0])
    broken = Message(messages[7].headers, bytes(messages[7].body)[:-9])
    driver = follow(tmp_path, with_partition_0(stream, [*messages[:7], broken, *messages[8:]]))
    check_rows(driver, stream)
    state = driver.states[0]
    assert (state.mode, state.gaps, state.dead_letters) == (Mode.INCOMPLETE, 1, 1)
    assert "message at offset 7 refused: checksum" in state.reason
    ((partition, offset, reason),) = driver.letters.letters
    assert (partition, offset) == (0, 7)
    assert "truncated or altered" in reason
    # A restart reads it again, and stops again.
    restarted = Driver(driver.log, driver.instance, driver.letters).run()
    assert restarted.states[0].mode is Mode.INCOMPLETE
    restarted.close()


def test_garbage_between_messages_stops_until_the_next_seq_arrives(
    tmp_path: Path, stream: Stream
) -> None:
    messages = list(stream.messages[0])
    garbage = Message([("content-type", b"text/plain")], b"hello")
    driver = follow(tmp_path, with_partition_0(stream, [*messages[:7], garbage, *messages[7:]]))
    assert rows_by_partition(driver.instance) == stream.final()
    state = driver.states[0]
    assert (state.gaps, state.dead_letters, state.mode) == (1, 1, Mode.FOLLOWING)
    at_end = follow(tmp_path / "end", with_partition_0(stream, [*messages, garbage]))
    assert at_end.states[0].mode is Mode.INCOMPLETE
    check_rows(at_end, stream)


def test_an_older_run_is_rejected(tmp_path: Path, stream: Stream) -> None:
    log = DirectoryLog(tmp_path / "old", partitions=P)
    zombie = Publisher(log, "m", tables=SCHEMAS, run=4)
    zombie.begin_continue(None)
    publish_versions(zombie, np.random.default_rng(9), 4)
    old = stream_of(log, zombie.position()).messages
    clean = stream.messages
    messages = {p: [*clean[p][:6], *old[p], *clean[p][6:], *old[p]] for p in range(P)}
    driver = follow(tmp_path, messages)
    assert rows_by_partition(driver.instance) == stream.final()
    for partition, state in driver.states.items():
        assert state.zombies == 2 * len(old[partition])
        assert state.is_following


def messages_of_publisher_b(folder: Path) -> list[Message]:
    """Return the messages of partition 0 that publisher b writes in run 5."""
    log = DirectoryLog(folder, partitions=P)
    other = Publisher(log, "m", tables=SCHEMAS, run=5, publisher_id="b")
    other.begin_continue(None)
    publish_versions(other, np.random.default_rng(9), 12)
    messages = stream_of(log, other.position()).messages[0]
    log.close()
    return messages


def test_two_publishers_of_one_run_are_a_conflict(tmp_path: Path, stream: Stream) -> None:
    other = messages_of_publisher_b(tmp_path / "other")
    clean = stream.messages[0]
    messages = with_partition_0(stream, [*clean[:6], other[6], *clean[6:]])
    driver = follow(tmp_path, messages)
    check_rows(driver, stream)
    state = driver.states[0]
    assert (state.mode, state.conflicts, state.recorded.seq) == (Mode.CONFLICT, 1, 6)
    assert "run 5 has two publishers, b and another" in state.reason


def check_that_a_new_run_ends_the_stop(driver: Driver, bases: Path) -> None:
    """Check that a new run with a base ends the stop of partition 0.

    A run that continues from the applied state does not end it, because that state may be wrong.
    """
    log = driver.log
    progress = {p: driver.instance.progress(p) or Progress(p) for p in range(P)}
    seqs = tuple(progress[p].seq for p in range(P))
    continuing = Publisher(log, "m", tables=SCHEMAS, run=20)
    continuing.begin_continue(Position(progress[0].run, seqs, 12))
    assert not driver.run().states[0].is_following
    assert driver.instance.progress(0) == progress[0]
    rows: dict[int, Rows] = {p: {("user", p + 1000): b"n" * 16} for p in range(P)}
    write_base(bases / "new", rows, {}, version=50)
    Publisher(log, "m", tables=SCHEMAS, run=21).begin_base("new", version=50)
    driver.run()
    for state in driver.states.values():
        assert state.is_following
        assert state.recorded.run == 21
    keys = {key for table in driver.instance.rows().values() for key in table}
    assert keys == {p + 1000 for p in range(P)}


def test_a_conflict_survives_restarts(tmp_path: Path, stream: Stream) -> None:
    other = messages_of_publisher_b(tmp_path / "other")
    clean = stream.messages[0]
    messages = with_partition_0(stream, [*clean[:6], other[6], *clean[6:]])
    driver = follow(tmp_path, messages)
    for _ in range(2):
        bases = BaseFolder(tmp_path / "bases")
        driver = Driver(driver.log, driver.instance, Letters(), bases).run()
        state = driver.states[0]
        assert (state.mode, state.recorded.seq) == (Mode.CONFLICT, 6)
        assert "two publishers wrote run 5" in state.health("m@1", None).reason
        check_rows(driver, stream)
        driver.close()
    # A base of that run may hold rows of either publisher.
    position = stream.position
    positions = {p: (position.run, position.seqs[p]) for p in range(P)}
    write_base(tmp_path / "bases" / "12", stream.final(), positions, version=12)
    driver = Driver(driver.log, driver.instance, Letters(), BaseFolder(tmp_path / "bases")).run()
    assert driver.states[0].mode is Mode.CONFLICT
    check_that_a_new_run_ends_the_stop(driver, tmp_path / "bases")
    driver.close()


def test_a_conflict_is_detected_in_the_first_message_after_a_restart(
    tmp_path: Path, stream: Stream
) -> None:
    other = messages_of_publisher_b(tmp_path / "other")
    driver = follow(tmp_path, with_partition_0(stream, stream.messages[0][:6]))
    driver.log.publish(0, other[6])
    driver = Driver(driver.log, driver.instance, Letters()).run()
    state = driver.states[0]
    assert (state.mode, state.conflicts, state.recorded.seq) == (Mode.CONFLICT, 1, 6)
    check_rows(driver, stream)
    driver.close()


def lose_power(driver: Driver) -> None:
    """Do what a power loss and `petps verify --accept` do: rows of any age, and no progress."""
    for table in driver.instance.by_name.values():
        for key in list(table.rows)[::3]:
            table.rows[key] = bytes(len(table.rows[key]))
        table.rows[987_654_321] = bytes(table.schema.row_bytes)
    for p, progress in list(driver.instance.recorded.items()):
        driver.instance.recorded[p] = Progress(p, run=progress.run, standing=Standing.LOST_POWER)


@pytest.mark.parametrize("run", [5, 4])
def test_after_a_power_loss_only_a_base_ends_the_stop(
    tmp_path: Path, stream: Stream, run: int
) -> None:
    driver = follow(tmp_path, stream.messages)
    lose_power(driver)
    before = rows_by_partition(driver.instance)
    (tmp_path / "bases").mkdir()
    for _ in range(2):  # the stop survives a restart
        bases = BaseFolder(tmp_path / "bases")
        driver = Driver(driver.log, driver.instance, Letters(), bases).run()
        for state in driver.states.values():
            status = state.status(0, state.health("m@1", None))
            assert (status.state, status.version) == ("stale", 0)
            assert "lost power" in status.reason
        assert rows_by_partition(driver.instance) == before
        driver.close()
    # A base older than what was applied before; with run 4, from before the current run began.
    seq = 6 if run == 5 else 1
    positions = dict.fromkeys(range(P), (run, seq))
    rows = {p: stream.rows_at(p, 5, 6) for p in range(P)}
    write_base(tmp_path / "bases" / "old", rows, positions, version=3)
    driver = Driver(driver.log, driver.instance, Letters(), BaseFolder(tmp_path / "bases")).run()
    if run == 5:
        assert all(state.is_following for state in driver.states.values())
        assert rows_by_partition(driver.instance) == stream.final()
    else:  # the log does not continue after that base: wait for the next one, with consistent rows
        assert rows_by_partition(driver.instance) == rows
    driver.close()


@pytest.mark.parametrize(
    ("others", "reason"),
    [([], "has no table 'item'"), ([TableSchema("item", "f32", 3)], "has dim 3, the message 2")],
    ids=["table", "dim"],
)
def test_rows_for_other_tables_are_dead_letters(
    tmp_path: Path, stream: Stream, others: list[TableSchema], reason: str
) -> None:
    schemas = [SCHEMAS[0], *others]
    driver = follow(tmp_path, stream.messages, MemoryTables(schemas, P))
    for state in driver.states.values():
        assert state.mode is Mode.INCOMPLETE
        assert state.dead_letters >= 1
    assert reason in driver.letters.letters[0][2]
    check_rows(driver, stream)


def test_a_table_that_is_created_later_is_filled(tmp_path: Path, stream: Stream) -> None:
    instance = MemoryTables([SCHEMAS[0]], P)
    first = follow(tmp_path, stream.messages, instance)
    assert first.states[0].mode is Mode.INCOMPLETE
    instance.by_name.update(MemoryTables([SCHEMAS[1]], P).by_name)
    again = Driver(first.log, instance, Letters()).run()
    assert rows_by_partition(instance) == stream.final()
    again.close()


def test_a_commit_that_counts_other_rows_is_a_gap(tmp_path: Path) -> None:
    """Send gapless seqs from a publisher that lost rows before it numbered them."""
    log = DirectoryLog(tmp_path / "lossy", partitions=P)
    publisher = Publisher(log, "m", tables=SCHEMAS, run=9)
    publisher.begin_continue(None)
    publisher.commit()
    publisher._counts = {"user": [7] * P}  # as if 7 rows had not been written
    publisher.commit()
    driver = Driver(log, MemoryTables(SCHEMAS, P), Letters()).run()
    for state in driver.states.values():
        assert state.mode is Mode.INCOMPLETE
        assert state.recorded.version == 1
        assert "commit of version 2 counts the rows {'user': 7}" in state.reason
    driver.close()


def test_the_stop_for_missing_rows_survives_restarts(tmp_path: Path) -> None:
    """Restart, and send the same commit again: neither ends the stop, but a base does."""
    log = DirectoryLog(tmp_path / "log", partitions=P)
    publisher = Publisher(log, "m", tables=SCHEMAS, run=5)
    publisher.begin_continue(None)
    publisher.commit()
    lost = publisher.position()
    publisher._counts = {"user": [7] * P}
    publisher.commit()
    publish_versions(publisher, np.random.default_rng(4), 2)
    instance = MemoryTables(SCHEMAS, P)
    driver = Driver(log, instance, Letters()).run()
    commits = stream_of(log, publisher.position()).messages
    for partition, messages in commits.items():
        log.publish(partition, messages[lost.seqs[partition]])
    driver.run().close()
    for _ in range(2):
        driver = Driver(log, instance, Letters()).run()
        for p, state in driver.states.items():
            assert (state.mode, state.recorded.version) == (Mode.INCOMPLETE, 1)
            assert state.recorded.seq == lost.seqs[p]
            assert "rows that the commit of version 2 counts are missing" in state.reason
        assert all(not rows for rows in instance.rows().values())
        driver.close()
    # A base of the trainer's rows at that commit ends the stop; later records are then applied.
    bases = tmp_path / "bases"
    rows: dict[int, Rows] = {p: {("user", p + 1000): b"l" * 16} for p in range(P)}
    positions = {p: (lost.run, lost.seqs[p]) for p in range(P)}
    write_base(bases / "repair", rows, positions, version=2)
    driver = Driver(log, instance, Letters(), BaseFolder(bases)).run()
    for state in driver.states.values():
        assert state.is_following
        assert state.recorded.version == 4
    assert {p + 1000 for p in range(P)} <= set(instance.by_name["user"].rows)
    driver.close()


def test_a_new_run_ends_the_stop_for_missing_rows(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path / "log", partitions=P)
    publisher = Publisher(log, "m", tables=SCHEMAS, run=5)
    publisher.begin_continue(None)
    publisher._counts = {"user": [7] * P}
    publisher.commit()
    bases = BaseFolder(tmp_path / "bases")
    driver = Driver(log, MemoryTables(SCHEMAS, P), Letters(), bases).run()
    check_that_a_new_run_ends_the_stop(driver, tmp_path / "bases")
    driver.close()


def mutate(rng: np.random.Generator, messages: list[Message]) -> list[Message]:
    """Return the messages with a few random faults of every kind."""
    faulty = list(messages)
    for _ in range(int(rng.integers(1, 6))):
        at, other = (int(rng.integers(0, len(faulty))) for _ in range(2))
        match int(rng.integers(0, 7)):
            case 0:
                faulty.insert(other, faulty[at])
            case 1:
                faulty[at], faulty[other] = faulty[other], faulty[at]
            case 2 if len(faulty) > 2:
                del faulty[at]
            case 3:
                body = bytes(faulty[at].body)
                faulty[at] = Message(faulty[at].headers, body[: int(rng.integers(0, len(body)))])
            case 4:
                flipped = bytearray(faulty[at].body)
                flipped[int(rng.integers(0, len(flipped)))] ^= 1 << int(rng.integers(0, 8))
                faulty[at] = Message(faulty[at].headers, bytes(flipped))
            case 5:
                headers = list(faulty[at].headers)
                name, value = headers[int(rng.integers(0, len(headers)))]
                headers[int(rng.integers(0, len(headers)))] = (name, value + b"1")
                faulty[at] = Message(headers, faulty[at].body)
            case _:
                faulty.insert(at, Message([], bytes(rng.integers(0, 256, 50, dtype=np.uint8))))
    return faulty


@pytest.mark.parametrize("seed", range(40))
def test_random_faults_and_then_a_base_give_the_trainers_rows(
    tmp_path: Path, stream: Stream, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    messages = {p: mutate(rng, clean) for p, clean in stream.messages.items()}
    driver = follow(tmp_path, messages)
    check_rows(driver, stream)
    for state in driver.states.values():
        if state.is_following:
            assert state.recorded.seq <= len(stream.messages[state.partition])
        else:
            assert state.gaps > 0
            assert state.reason
    # A restart changes nothing.
    instance = driver.instance
    before = {p: instance.progress(p) for p in range(P)}
    restarted = Driver(driver.log, instance, Letters()).run()
    restarted.close()
    check_rows(restarted, stream)
    for partition in range(P):
        progress, earlier = instance.progress(partition), before[partition]
        assert progress is None or earlier is None or progress.seq >= earlier.seq
    # The newest base gives the trainer's rows, wherever a partition stopped.
    position = stream.position
    positions = {p: (position.run, position.seqs[p]) for p in range(P)}
    write_base(tmp_path / "bases" / "12", stream.final(), positions, version=12)
    repaired = Driver(driver.log, instance, Letters(), BaseFolder(tmp_path / "bases")).run()
    repaired.close()
    check_rows(repaired, stream)
    # Only garbage after all messages can keep a partition stopped: the base has no newer rows.
    for state in repaired.states.values():
        assert state.is_following or state.recorded.seq == position.seqs[state.partition]


@pytest.mark.parametrize("seed", range(40))
def test_faults_while_tables_are_full_lose_no_row(
    tmp_path: Path, stream: Stream, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    messages = {p: mutate(rng, clean) for p, clean in stream.messages.items()}
    instance = MemoryTables(SCHEMAS, P)
    for table in instance.by_name.values():
        table.capacity = int(rng.integers(20, 60))
    applier = StepApplier(0, lambda: int(rng.integers(0, 200)))
    log = write_log(tmp_path / "log", messages)
    driver = Driver(log, instance, Letters(), poll_bytes=3000, applier=applier)
    with applier.stepping():
        driver.run()
    rows = rows_by_partition(instance)
    for p, state in driver.states.items():
        if state.mode is not Mode.FULL:  # else a part of the next record may be stored
            assert rows[p] == stream.rows_at(p, state.recorded.run, state.recorded.seq)
    for table in instance.by_name.values():
        table.capacity = 1 << 30
    for state in driver.states.values():
        state.retry_at = 0.0
    driver.run().close()
    assert all(state.mode is not Mode.FULL for state in driver.states.values())
    check_rows(driver, stream)
