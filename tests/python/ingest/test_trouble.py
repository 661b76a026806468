"""Messages doubled, reordered, dropped, cut, altered, foreign: counted, never applied wrongly.

The invariant throughout: the rows of a partition are exactly those after its recorded {run, seq},
whatever came. Not covered here: a publisher that seals wrong rows under right headers.
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
from tests.python.ingest.model import Letters, MemoryTables


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Stream:
    """Return a stream of one run with 12 versions."""
    log = DirectoryLog(tmp_path_factory.mktemp("clean"), partitions=P)
    publisher = Publisher(log, "m", tables=SCHEMAS, run=5, publisher_id="a")
    publisher.begin_continue(None)
    publish_versions(publisher, np.random.default_rng(3), 12)
    found = stream_of(log, publisher.position())
    log.close()
    return found


def follow(
    tmp_path: Path,
    messages: dict[int, list[Message]],
    store: MemoryTables | None = None,
    bases: Path | None = None,
) -> Driver:
    log = DirectoryLog(tmp_path / "log", partitions=P)
    for partition, found in messages.items():
        for message in found:
            log.publish(partition, message)
    log.close()
    driver = Driver(
        log,
        store or MemoryTables(SCHEMAS, P),
        Letters(),
        None if bases is None else BaseFolder(bases),
        poll_bytes=3000,
    )
    driver.run().close()
    return driver


def check_rows(driver: Driver, stream: Stream) -> None:
    rows = rows_by_partition(driver.store)
    for partition in range(P):
        progress = driver.store.progress(partition)
        run, seq = (progress.run, progress.seq) if progress else (0, 0)
        assert rows[partition] == stream.rows_at(partition, run, seq)


def test_clean(tmp_path: Path, stream: Stream) -> None:
    driver = follow(tmp_path, stream.messages)
    assert rows_by_partition(driver.store) == stream.final()
    for partition, state in driver.states.items():
        assert state.following
        assert state.recorded.version == 12
        assert state.recorded.offset == len(stream.messages[partition])


class LateApplier:
    """Applier that runs a window's action when it gets the next: reading is one window ahead."""

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
    """A store that checks each recorded progress: its rows must be present."""

    stream: Stream

    def record_progress(self, progress: Sequence[Progress]) -> None:
        super().record_progress(progress)
        rows = rows_by_partition(self)
        for each in progress:
            expected = self.stream.rows_at(each.partition, each.run, each.seq)
            assert rows[each.partition] == expected


def test_progress_is_never_ahead_of_the_rows(tmp_path: Path, stream: Stream) -> None:
    log = DirectoryLog(tmp_path / "log", partitions=P)
    for partition, messages in stream.messages.items():
        for message in messages:
            log.publish(partition, message)
    log.close()
    store = WatchedTables(SCHEMAS, P)
    store.stream = stream
    driver = Driver(log, store, Letters(), poll_bytes=2000, applier=LateApplier())
    driver.run().close()
    assert rows_by_partition(store) == stream.final()
    assert len(store.history) > 3 * P


def with_partition_0(stream: Stream, messages: list[Message]) -> dict[int, list[Message]]:
    return {**stream.messages, 0: messages}


def test_duplicates_are_counted_and_skipped(tmp_path: Path, stream: Stream) -> None:
    found = stream.messages[0]
    driver = follow(tmp_path, with_partition_0(stream, [*found[:9], *found[2:7], *found[8:]]))
    assert rows_by_partition(driver.store) == stream.final()
    assert driver.states[0].duplicates == 6
    assert driver.states[0].gaps == 0


def test_a_dropped_message_stops_its_partition_alone(tmp_path: Path, stream: Stream) -> None:
    found = stream.messages[0]
    driver = follow(tmp_path, with_partition_0(stream, [*found[:9], *found[10:]]))
    check_rows(driver, stream)
    state = driver.states[0]
    assert (state.mode, state.gaps) == (Mode.STALE, 1)
    assert state.reason == "run 5: seq 10 to 10 are missing"
    assert (state.recorded.seq, state.recorded.offset) == (9, 9)
    assert state.status(len(found) - 1, state.health("m@1", None)).lag_records == len(found) - 1 - 9
    assert driver.states[1].following
    assert driver.states[1].recorded.version == 12


def test_reordered_messages_are_put_in_order(tmp_path: Path, stream: Stream) -> None:
    found = list(stream.messages[0])
    found[4], found[6] = found[6], found[4]
    driver = follow(tmp_path, with_partition_0(stream, found))
    assert rows_by_partition(driver.store) == stream.final()
    assert driver.states[0].gaps >= 1
    assert driver.states[0].following


def test_a_message_that_comes_much_later_is_waited_for(tmp_path: Path, stream: Stream) -> None:
    found = stream.messages[0]
    driver = follow(tmp_path, with_partition_0(stream, [*found[:5], *found[6:], found[5]]))
    assert rows_by_partition(driver.store) == stream.final()
    assert driver.states[0].recorded.version == 12


def test_a_corrupt_chunk_is_a_dead_letter_and_a_gap(tmp_path: Path, stream: Stream) -> None:
    found = list(stream.messages[0])
    broken = Message(found[7].headers, bytes(found[7].body)[:-9])
    driver = follow(tmp_path, with_partition_0(stream, [*found[:7], broken, *found[8:]]))
    check_rows(driver, stream)
    state = driver.states[0]
    assert (state.mode, state.gaps, state.dead_letters) == (Mode.STALE, 1, 1)
    assert "message at offset 7 refused: checksum" in state.reason
    ((partition, offset, reason),) = driver.letters.letters
    assert (partition, offset) == (0, 7)
    assert "truncated or altered" in reason
    # A restart reads it again, and is stale again.
    again = Driver(driver.log, driver.store, driver.letters).run()
    assert again.states[0].mode is Mode.STALE
    again.close()


def test_garbage_between_messages_stops_until_the_next_seq_proves_it_foreign(
    tmp_path: Path, stream: Stream
) -> None:
    found = list(stream.messages[0])
    garbage = Message([("content-type", b"text/plain")], b"hello")
    driver = follow(tmp_path, with_partition_0(stream, [*found[:7], garbage, *found[7:]]))
    assert rows_by_partition(driver.store) == stream.final()
    state = driver.states[0]
    assert (state.gaps, state.dead_letters, state.mode) == (1, 1, Mode.FOLLOWING)
    at_end = follow(tmp_path / "end", with_partition_0(stream, [*found, garbage]))
    assert at_end.states[0].mode is Mode.STALE
    check_rows(at_end, stream)


def test_an_older_run_is_rejected(tmp_path: Path, stream: Stream) -> None:
    log = DirectoryLog(tmp_path / "old", partitions=P)
    zombie = Publisher(log, "m", tables=SCHEMAS, run=4)
    zombie.begin_continue(None)
    publish_versions(zombie, np.random.default_rng(9), 4)
    old = stream_of(log, zombie.position()).messages
    found = stream.messages
    messages = {p: [*found[p][:6], *old[p], *found[p][6:], *old[p]] for p in range(P)}
    driver = follow(tmp_path, messages)
    assert rows_by_partition(driver.store) == stream.final()
    for partition, state in driver.states.items():
        assert state.zombies == 2 * len(old[partition])
        assert state.following


def of_another_publisher(folder: Path) -> list[Message]:
    """Return partition 0 of run 5, as publisher b writes it."""
    log = DirectoryLog(folder, partitions=P)
    other = Publisher(log, "m", tables=SCHEMAS, run=5, publisher_id="b")
    other.begin_continue(None)
    publish_versions(other, np.random.default_rng(9), 12)
    theirs = stream_of(log, other.position()).messages[0]
    log.close()
    return theirs


def test_two_publishers_of_one_run_are_a_conflict(tmp_path: Path, stream: Stream) -> None:
    theirs = of_another_publisher(tmp_path / "other")
    found = stream.messages[0]
    messages = with_partition_0(stream, [*found[:6], theirs[6], *found[6:]])
    driver = follow(tmp_path, messages)
    check_rows(driver, stream)
    state = driver.states[0]
    assert (state.mode, state.conflicts, state.recorded.seq) == (Mode.CONFLICT, 1, 6)
    assert "run 5 is not b's alone" in state.reason


def check_a_new_run_mends(driver: Driver, bases: Path) -> None:
    """Check that only a new run with a base ends the stop.

    A run that continues from the applied state does not: that state is in doubt.
    """
    log = driver.log
    progress = {p: driver.store.progress(p) or Progress(p) for p in range(P)}
    seqs = tuple(each.seq for each in progress.values())
    goes_on = Publisher(log, "m", tables=SCHEMAS, run=20)
    goes_on.begin_continue(Position(progress[0].run, seqs, 12))
    stood = driver.run().states[0]
    assert not stood.following
    assert driver.store.progress(0) == progress[0]
    rows: dict[int, Rows] = {p: {("user", p + 1000): b"n" * 16} for p in range(P)}
    write_base(bases / "new", rows, {}, version=50)
    Publisher(log, "m", tables=SCHEMAS, run=21).begin_base("new", version=50)
    driver.run()
    assert {p: state.recorded.run for p, state in driver.states.items()} == dict.fromkeys(
        range(P), 21
    )
    assert all(state.following for state in driver.states.values())
    found = {key for table in driver.store.rows().values() for key in table}
    assert found == {p + 1000 for p in range(P)}


def test_a_conflict_outlasts_restarts(tmp_path: Path, stream: Stream) -> None:
    theirs = of_another_publisher(tmp_path / "other")
    found = stream.messages[0]
    messages = with_partition_0(stream, [*found[:6], theirs[6], *found[6:]])
    driver = follow(tmp_path, messages)
    for _ in range(2):
        bases = BaseFolder(tmp_path / "bases")
        driver = Driver(driver.log, driver.store, Letters(), bases).run()
        state = driver.states[0]
        assert (state.mode, state.recorded.seq) == (Mode.CONFLICT, 6)
        assert "two publishers wrote run 5" in state.health("m@1", None).reason
        check_rows(driver, stream)
        driver.close()
    # A base of that run does not show whose rows it holds.
    position = stream.position
    positions = {p: (position.run, position.seqs[p]) for p in range(P)}
    write_base(tmp_path / "bases" / "12", stream.final(), positions, version=12)
    driver = Driver(driver.log, driver.store, Letters(), BaseFolder(tmp_path / "bases")).run()
    assert driver.states[0].mode is Mode.CONFLICT
    check_a_new_run_mends(driver, tmp_path / "bases")
    driver.close()


def test_a_conflict_is_seen_in_the_first_message_after_a_restart(
    tmp_path: Path, stream: Stream
) -> None:
    theirs = of_another_publisher(tmp_path / "other")
    driver = follow(tmp_path, with_partition_0(stream, stream.messages[0][:6]))
    driver.log.publish(0, theirs[6])
    driver = Driver(driver.log, driver.store, Letters()).run()
    state = driver.states[0]
    assert (state.mode, state.conflicts, state.recorded.seq) == (Mode.CONFLICT, 1, 6)
    check_rows(driver, stream)
    driver.close()


def lose_power(driver: Driver) -> None:
    """Do what `petps verify --accept` does: rows have any age, and progress claims nothing."""
    for table in driver.store.by_name.values():
        for key in list(table.rows)[::3]:
            table.rows[key] = bytes(len(table.rows[key]))
        table.rows[987_654_321] = bytes(table.schema.row_bytes)
    for p, progress in list(driver.store.recorded.items()):
        driver.store.recorded[p] = Progress(p, run=progress.run, standing=Standing.LOST_POWER)


@pytest.mark.parametrize("run", [5, 4])
def test_after_a_power_loss_a_base_is_waited_for(tmp_path: Path, stream: Stream, run: int) -> None:
    driver = follow(tmp_path, stream.messages)
    lose_power(driver)
    before = rows_by_partition(driver.store)
    (tmp_path / "bases").mkdir()
    for _ in range(2):  # a restart does not forget it
        bases = BaseFolder(tmp_path / "bases")
        driver = Driver(driver.log, driver.store, Letters(), bases).run()
        for state in driver.states.values():
            status = state.status(0, state.health("m@1", None))
            assert (status.state, status.version) == ("stale", 0)
            assert "lost power" in status.reason
        assert rows_by_partition(driver.store) == before
        driver.close()
    # A base older than what was applied before; with run 4, from before the current run began.
    seq = 6 if run == 5 else 1
    positions = dict.fromkeys(range(P), (run, seq))
    rows = {p: stream.rows_at(p, 5, 6) for p in range(P)}
    write_base(tmp_path / "bases" / "old", rows, positions, version=3)
    driver = Driver(driver.log, driver.store, Letters(), BaseFolder(tmp_path / "bases")).run()
    if run == 5:
        assert all(state.following for state in driver.states.values())
        assert rows_by_partition(driver.store) == stream.final()
    else:  # the log does not continue there: it waits for the next base, with consistent rows
        assert rows_by_partition(driver.store) == rows
    driver.close()


@pytest.mark.parametrize("what", ["table", "dim"])
def test_chunks_for_other_tables_are_dead_letters(
    tmp_path: Path, stream: Stream, what: str
) -> None:
    schemas = [SCHEMAS[0]] if what == "table" else [SCHEMAS[0], TableSchema("item", "f32", 3)]
    driver = follow(tmp_path, stream.messages, MemoryTables(schemas, P))
    for state in driver.states.values():
        assert state.mode is Mode.STALE
        assert state.dead_letters >= 1
    expected = "has no table 'item'" if what == "table" else "has dim 3, the message 2"
    assert expected in driver.letters.letters[0][2]
    user = [schema for schema in schemas if schema.name == "user"]
    assert user
    rows = rows_by_partition(driver.store)
    for partition in range(P):
        progress = driver.store.progress(partition)
        seq = progress.seq if progress else 0
        expected_rows = stream.rows_at(partition, 5 if seq else 0, seq)
        assert rows[partition] == expected_rows


def test_a_table_made_later_is_found(tmp_path: Path, stream: Stream) -> None:
    store = MemoryTables([SCHEMAS[0]], P)
    first = follow(tmp_path, stream.messages, store)
    assert first.states[0].mode is Mode.STALE
    store.by_name.update(MemoryTables([SCHEMAS[1]], P).by_name)
    again = Driver(first.log, store, Letters()).run()
    assert rows_by_partition(store) == stream.final()
    again.close()


def test_a_commit_that_counts_other_rows_is_a_gap(tmp_path: Path, stream: Stream) -> None:
    """Send seqs without a gap from a publisher that lost rows before it numbered them."""
    log = DirectoryLog(tmp_path / "lossy", partitions=P)
    publisher = Publisher(log, "m", tables=SCHEMAS, run=9)
    publisher.begin_continue(None)
    publisher.commit()
    publisher._counts = {"user": [7] * P}  # as if 7 rows had not been written
    publisher.commit()
    driver = Driver(log, MemoryTables(SCHEMAS, P), Letters()).run()
    for state in driver.states.values():
        assert state.mode is Mode.STALE
        assert state.recorded.version == 1
        assert "version 2 says that {'user': 7} rows" in state.reason
    driver.close()


def test_rows_that_never_came_are_remembered(tmp_path: Path, stream: Stream) -> None:
    """Check that neither a restart nor the same commit sent again supplies the missing rows."""
    log = DirectoryLog(tmp_path / "log", partitions=P)
    publisher = Publisher(log, "m", tables=SCHEMAS, run=5)
    publisher.begin_continue(None)
    publisher.commit()
    lost = publisher.position()
    publisher._counts = {"user": [7] * P}
    publisher.commit()
    publish_versions(publisher, np.random.default_rng(4), 2)
    store = MemoryTables(SCHEMAS, P)
    driver = Driver(log, store, Letters()).run()
    commits = stream_of(log, publisher.position()).messages
    for partition, messages in commits.items():
        log.publish(partition, messages[lost.seqs[partition]])
    driver.run().close()
    for _ in range(2):
        driver = Driver(log, store, Letters()).run()
        for p, state in driver.states.items():
            assert (state.mode, state.recorded.version) == (Mode.STALE, 1)
            assert state.recorded.seq == lost.seqs[p]
            assert "rows that the commit of version 2 counts never came" in state.reason
        assert all(not rows for rows in store.rows().values())
        driver.close()
    # A base of the trainer's rows at that commit ends the stop; later records are then applied.
    bases = tmp_path / "bases"
    rows: dict[int, Rows] = {p: {("user", p + 1000): b"l" * 16} for p in range(P)}
    positions = {p: (lost.run, lost.seqs[p]) for p in range(P)}
    write_base(bases / "mend", rows, positions, version=2)
    driver = Driver(log, store, Letters(), BaseFolder(bases)).run()
    for state in driver.states.values():
        assert state.following
        assert state.recorded.version == 4
    assert {p + 1000 for p in range(P)} <= set(store.by_name["user"].rows)
    driver.close()


def test_rows_that_never_came_and_a_new_run(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path / "log", partitions=P)
    publisher = Publisher(log, "m", tables=SCHEMAS, run=5)
    publisher.begin_continue(None)
    publisher._counts = {"user": [7] * P}
    publisher.commit()
    bases = BaseFolder(tmp_path / "bases")
    driver = Driver(log, MemoryTables(SCHEMAS, P), Letters(), bases).run()
    check_a_new_run_mends(driver, tmp_path / "bases")
    driver.close()


def mutate(rng: np.random.Generator, messages: list[Message]) -> list[Message]:
    """Return the messages with a few random faults of every kind."""
    found = list(messages)
    for _ in range(int(rng.integers(1, 6))):
        at, other = (int(rng.integers(0, len(found))) for _ in range(2))
        match int(rng.integers(0, 7)):
            case 0:
                found.insert(other, found[at])
            case 1:
                found[at], found[other] = found[other], found[at]
            case 2 if len(found) > 2:
                del found[at]
            case 3:
                body = bytes(found[at].body)
                found[at] = Message(found[at].headers, body[: int(rng.integers(0, len(body)))])
            case 4:
                flipped = bytearray(found[at].body)
                flipped[int(rng.integers(0, len(flipped)))] ^= 1 << int(rng.integers(0, 8))
                found[at] = Message(found[at].headers, bytes(flipped))
            case 5:
                headers = list(found[at].headers)
                name, value = headers[int(rng.integers(0, len(headers)))]
                headers[int(rng.integers(0, len(headers)))] = (name, value + b"1")
                found[at] = Message(headers, found[at].body)
            case _:
                found.insert(at, Message([], bytes(rng.integers(0, 256, 50, dtype=np.uint8))))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_any_trouble_then_a_base_makes_it_whole(tmp_path: Path, stream: Stream, seed: int) -> None:
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    messages = {p: mutate(rng, found) for p, found in stream.messages.items()}
    driver = follow(tmp_path, messages)
    check_rows(driver, stream)
    for state in driver.states.values():
        if state.following:
            assert state.recorded.seq <= len(stream.messages[state.partition])
        else:
            assert state.gaps > 0
            assert state.reason
    # After a restart it is where it was.
    store = driver.store
    before = {p: store.progress(p) for p in range(P)}
    again = Driver(driver.log, store, Letters()).run()
    again.close()
    check_rows(again, stream)
    for partition in range(P):
        progress, earlier = store.progress(partition), before[partition]
        assert progress is None or earlier is None or progress.seq >= earlier.seq
    # The newest base makes it equal to the trainer's rows, wherever it stopped.
    position = stream.position
    positions = {p: (position.run, position.seqs[p]) for p in range(P)}
    write_base(tmp_path / "bases" / "12", stream.final(), positions, version=12)
    whole = Driver(driver.log, store, Letters(), BaseFolder(tmp_path / "bases")).run()
    whole.close()
    rows = rows_by_partition(store)
    for partition, state in whole.states.items():
        if not state.following:
            continue
        progress = store.progress(partition)
        assert progress is not None
        assert rows[partition] == stream.rows_at(partition, progress.run, progress.seq)
    stale = [state for state in whole.states.values() if not state.following]
    # Only garbage after everything else can keep a partition stale: the base has nothing newer.
    assert all(state.recorded.seq == position.seqs[state.partition] for state in stale)
