"""The publisher: what each call writes to the log, and which calls it refuses."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from petps.delta import (
    BaseBody,
    CommitBody,
    ContinueBody,
    Delivery,
    DeltaLog,
    Kind,
    Message,
    Record,
    RowsBody,
    TableSchema,
    decode_record,
)
from petps.delta.directory import DirectoryLog
from petps.delta.schema import partition_of
from petps.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from petps.publish import Position, Publisher

USER = TableSchema("user", "f32", 4)
ITEM = TableSchema("item", "f32", 2)
P = 4


@pytest.fixture
def log(tmp_path: Path) -> DirectoryLog:
    return DirectoryLog(tmp_path / "log", partitions=P)


def records(log: DeltaLog) -> dict[int, list[Record]]:
    """Return the records of the log by partition."""
    streams: dict[int, list[Record]] = {partition: [] for partition in range(P)}
    subscription = log.subscribe(dict.fromkeys(range(P), 0))
    while events := subscription.poll(max_bytes=1 << 22, timeout=0):
        for event in events:
            assert isinstance(event, Delivery)
            assert event.message.size <= 1_000_000
            record = decode_record(
                event.message,
                model="m",
                partition=event.partition,
                partitions=P,
                schema_of={"user": USER, "item": ITEM}.get,
            )
            streams[event.partition].append(record)
    subscription.close()
    return streams


def begin(log: DeltaLog, **options: Any) -> Publisher:
    publisher = Publisher(log, "m", P, tables=[USER, ITEM], **options)
    publisher.begin_continue(None)
    return publisher


def test_a_run_writes_marker_rows_and_commit(log: DirectoryLog) -> None:
    publisher = begin(log, run=5, publisher_id="me")
    keys = np.arange(100, dtype=np.uint64)
    rows = np.arange(400, dtype=np.float32).reshape(100, 4)
    before = time.time_ns()
    assert publisher.publish("user", keys, rows, step=77) == P
    assert publisher.publish("item", [1], np.ones((1, 2), np.float32)) == 1
    assert publisher.commit(dense="d") == 1
    streams = records(log)
    item_partition = int(partition_of(np.array([1], np.uint64), P)[0])
    for partition, stream in streams.items():
        assert [record.header.seq for record in stream] == list(range(1, len(stream) + 1))
        assert {record.header.run for record in stream} == {5}
        assert {record.header.publisher for record in stream} == {"me"}
        first, rows_record, *_, commit = stream
        assert isinstance(first.body, ContinueBody)
        assert (first.body.previous_run, first.body.last_seq) == (0, 0)
        assert isinstance(rows_record.body, RowsBody)
        mine = keys[partition_of(keys, P) == partition]
        np.testing.assert_array_equal(rows_record.body.keys, mine)
        np.testing.assert_array_equal(rows_record.body.rows.view(np.float32), rows[mine])
        assert rows_record.body.deleted is None
        assert rows_record.header.step == 77
        assert rows_record.header.version == 1
        assert before <= rows_record.header.time_ns <= time.time_ns()
        assert isinstance(commit.body, CommitBody)
        assert commit.header.version == 1
        assert commit.body.dense == "d"
        here = {name: count.here for name, count in commit.body.tables.items()}
        assert here == {"user": len(mine), "item": int(partition == item_partition)}
        assert commit.body.tables["user"].everywhere == 100
    assert publisher.position() == Position(5, tuple(len(streams[p]) for p in range(P)), 1)


def test_a_commit_is_written_to_untouched_partitions_too(log: DirectoryLog) -> None:
    publisher = begin(log)
    publisher.commit(version=10)
    publisher.commit()
    for stream in records(log).values():
        kinds = [record.header.kind for record in stream]
        assert kinds == [Kind.CONTINUE, Kind.COMMIT, Kind.COMMIT]
        assert [record.header.version for record in stream] == [1, 10, 11]


@pytest.mark.parametrize("time_ns", [None, 77])
def test_a_commit_shows_one_time_in_all_partitions(log: DirectoryLog, time_ns: int | None) -> None:
    publisher = begin(log)
    assert publisher.committed_ns == 0
    before = time.time_ns()
    publisher.commit(time_ns=time_ns)
    shown = {stream[-1].header.time_ns for stream in records(log).values()}
    assert shown == {publisher.committed_ns}
    assert publisher.committed_ns == 77 if time_ns else publisher.committed_ns >= before


@pytest.mark.parametrize("stamped", [False, True])
def test_a_base_without_stamps_gives_all_rows_its_version(log: DirectoryLog, stamped: bool) -> None:
    publisher = Publisher(log, "m", P, tables=[USER, ITEM])
    assert publisher.rewritten_at == 0
    publisher.begin_base("somewhere", version=9, stamped=stamped)
    assert publisher.rewritten_at == (0 if stamped else 9)
    publisher.commit()
    publisher.base("elsewhere")
    assert publisher.rewritten_at == (0 if stamped else 9), "servers that follow take no base"


class SyncedLog(DirectoryLog):
    """A log that records the order of appends and syncs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: list[str] = []

    def publish(self, partition: int, message: Message) -> None:
        self.calls.append(dict(message.headers)["kind"].decode())
        super().publish(partition, message)

    def flush(self) -> None:
        self.calls.append("flush")
        super().flush()


def test_rows_are_durable_before_their_commit(tmp_path: Path) -> None:
    log = SyncedLog(tmp_path, partitions=P)
    publisher = begin(log)
    publisher.publish("user", np.arange(50), np.zeros((50, 4), np.float32))
    publisher.commit()
    assert log.calls == [
        *["continue"] * P, "flush", *["rows"] * P, "flush", *["commit"] * P, "flush",
    ]  # fmt: skip


def test_the_last_row_of_a_repeated_key_wins_within_one_publish(log: DirectoryLog) -> None:
    publisher = begin(log)
    keys = np.array([5, 9, 5, 7, 9, 5])
    rows = np.arange(24, dtype=np.float32).reshape(6, 4)
    deleted = np.array([False, False, True, False, True, False])
    publisher.publish("user", keys, rows, deleted)
    written: dict[int, npt.NDArray[np.float32] | None] = {}
    for stream in records(log).values():
        for record in stream:
            if isinstance(record.body, RowsBody):
                body = record.body
                for at, key in enumerate(body.keys.tolist()):
                    assert key not in written
                    is_deleted = body.deleted is not None and body.deleted[at]
                    written[key] = None if is_deleted else body.rows[at].view(np.float32)
    assert set(written) == {5, 7, 9}
    assert written[9] is None
    np.testing.assert_array_equal(written[5], rows[5])
    np.testing.assert_array_equal(written[7], rows[3])


def test_deletions_need_no_rows(log: DirectoryLog) -> None:
    publisher = begin(log)
    publisher.publish("user", np.arange(10), None, np.ones(10, np.bool_))
    bodies = [r.body for stream in records(log).values() for r in stream[1:]]
    assert sum(len(b.keys) for b in bodies if isinstance(b, RowsBody)) == 10
    for body in bodies:
        assert isinstance(body, RowsBody)
        assert body.deleted is not None
        assert body.deleted.all()
    with pytest.raises(InvalidArgument, match="rows are missing; only deletions need no rows"):
        publisher.publish("user", [1], None)


def test_stored_rows_are_written_unchanged(log: DirectoryLog) -> None:
    publisher = begin(log)
    stored = np.random.default_rng(1).integers(0, 256, (20, 16), dtype=np.uint8)
    publisher.publish("user", np.arange(20), stored)
    for stream in records(log).values():
        body = stream[1].body
        assert isinstance(body, RowsBody)
        np.testing.assert_array_equal(body.rows, stored[body.keys])


def test_a_large_publish_is_split_and_needs_bounded_memory(tmp_path: Path) -> None:
    schema = TableSchema("wide", "f32", 1024)
    log = DirectoryLog(tmp_path, partitions=2)
    publisher = Publisher(log, "m", tables=[schema])
    publisher.begin_continue(None)
    rows = np.zeros((20_000, 1024), np.float32)  # 82 MB
    tracemalloc.start()
    messages = publisher.publish("wide", np.arange(20_000), rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert messages >= 82
    assert peak < 8 << 20
    assert messages == sum(publisher.position().seqs) - 2


def test_runs_grow_and_versions_continue(log: DirectoryLog) -> None:
    first = begin(log)
    first.commit(version=7)
    position = first.position()
    second = Publisher(log, "m", tables=[USER, ITEM])
    assert second.run > first.run
    second.begin_continue(position)
    assert second.commit() == 8
    with pytest.raises(
        InvalidArgument, match=rf"run {second.run} is not above run {second.run} in"
    ):
        Publisher(log, "m", tables=[USER], run=second.run)
    with pytest.raises(InvalidArgument, match="version 8 is not above version 8"):
        second.commit(version=8)
    third = Publisher(log, "m", tables=[USER, ITEM])
    third.begin_base("bases/9", version=9, step=3)
    assert third.version == 9
    third.base("bases/9b")
    for stream in records(log).values():
        bases = [record for record in stream if isinstance(record.body, BaseBody)]
        assert [(r.header.seq, r.header.version) for r in bases] == [(1, 9), (2, 9)]
        markers = [r.body for r in stream if isinstance(r.body, ContinueBody)]
        assert (markers[1].previous_run, markers[1].last_seq) == (first.run, 2)


def test_the_run_grows_even_if_the_clock_went_back(log: DirectoryLog) -> None:
    far = time.time_ns()  # as milliseconds, this is far in the future
    begin(log, run=far)
    assert Publisher(log, "m", tables=[USER]).run == far + 1


def test_a_position_survives_json() -> None:
    position = Position(1 << 60, (3, 0, 9), 4)
    assert Position.from_json(position.as_json()) == position


@pytest.mark.parametrize(
    ("keys", "rows", "deleted", "message"),
    [
        ([1], np.zeros((1, 5), np.float32), None, r"shape \(1, 5\), expected \(1, 4\)"),
        ([1, 2], np.zeros((1, 4), np.float32), None, r"shape \(1, 4\), expected \(2, 4\)"),
        ([1], np.zeros(4, np.float32), None, r"shape \(4,\), expected \(1, 4\)"),
        ([1], np.zeros((1, 4)), None, "rows are float64; give float32 values or uint8 stored"),
        ([1], np.zeros((1, 4), np.uint8), None, r"shape \(1, 4\), expected \(1, 16\)"),
        ([-1], np.zeros((1, 4), np.float32), None, r"keys\[0\] is -1, but keys are unsigned"),
        (np.array([1.5]), np.zeros((1, 4), np.float32), None, "keys are float64, expected int"),
        (np.array([[1]]), np.zeros((1, 4), np.float32), None, r"keys have shape \(1, 1\)"),
        ([1], np.zeros((1, 4), np.float32), [1], r"deleted is int64\[1\], expected bool\[1\]"),
        ([1], np.zeros((1, 4), np.float32), [True, False], r"expected bool\[1\]"),
        ([3, 8], np.array([[0] * 4, [0, np.nan, 0, 0]], np.float32), None, r"row of key 8 .* NaN"),
        ([8], np.array([[0, np.inf, 0, 0]], np.float32), None, "allow_not_finite=True"),
    ],
)
def test_bad_input_is_refused_and_the_run_continues(
    log: DirectoryLog, keys: Any, rows: Any, deleted: Any, message: str
) -> None:
    publisher = begin(log)
    before = publisher.position()
    with pytest.raises(InvalidArgument, match=message):
        publisher.publish("user", keys, rows, deleted)
    with pytest.raises(InvalidArgument, match="has no table 'x'; it has: item, user"):
        publisher.publish("x", keys, rows, deleted)
    assert publisher.position() == before
    publisher.commit()


def test_not_finite_rows_are_accepted_if_allowed_or_deleted(log: DirectoryLog) -> None:
    bad = np.full((1, 4), np.nan, np.float32)
    begin(log, allow_not_finite=True).publish("user", [1], bad)
    log.close()
    begin(log).publish("user", [1], bad, [True])


def test_empty_publishes_write_nothing(log: DirectoryLog) -> None:
    publisher = begin(log)
    assert publisher.publish("user", [], np.zeros((0, 4), np.float32)) == 0
    assert publisher.position().seqs == (1,) * P


def test_a_run_must_begin_exactly_once(log: DirectoryLog) -> None:
    publisher = Publisher(log, "m", tables=[USER])
    for call in (
        lambda: publisher.publish("user", [1], np.zeros((1, 4), np.float32)),
        lambda: publisher.commit(),
        lambda: publisher.base("b"),
    ):
        with pytest.raises(FailedPrecondition, match="begin the run first"):
            call()
    publisher.begin_base("b")
    with pytest.raises(FailedPrecondition, match="has begun"):
        publisher.begin_base("b")
    with pytest.raises(FailedPrecondition, match="has begun"):
        publisher.begin_continue(None)


def test_bad_options_are_refused(log: DirectoryLog) -> None:
    with pytest.raises(InvalidArgument, match="has 4 partitions, not 8: the number can never"):
        Publisher(log, "m", 8, tables=[USER])
    with pytest.raises(InvalidArgument, match="model 'a/b'"):
        Publisher(log, "a/b", tables=[USER])
    with pytest.raises(InvalidArgument, match=r"chunk_bytes 5 is outside 16384\.\.1000000"):
        Publisher(log, "m", tables=[USER], chunk_bytes=5)
    with pytest.raises(InvalidArgument, match="publisher_id is longer than 63 bytes"):
        Publisher(log, "m", tables=[USER], publisher_id="x" * 64)
    with pytest.raises(InvalidArgument, match="the position has 1 partitions"):
        Publisher(log, "m", tables=[USER]).begin_continue(Position(1, (1,), 1))
    with pytest.raises(InvalidArgument, match="run 5 cannot continue run 5"):
        Publisher(log, "m", tables=[USER], run=5).begin_continue(Position(5, (1,) * P, 1))
    with pytest.raises(InvalidArgument, match="a base needs a location"):
        Publisher(log, "m", tables=[USER]).begin_base("")


def test_an_error_of_the_log_ends_the_run(
    log: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = begin(log)

    def raise_full(partition: int, message: Message) -> None:
        raise ResourceExhausted("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(log, "publish", raise_full)
        with pytest.raises(ResourceExhausted, match="disk full"):
            publisher.publish("user", [1], np.zeros((1, 4), np.float32))
    with pytest.raises(
        FailedPrecondition, match=r"ended with an error .*disk full.* new Publisher"
    ):
        publisher.publish("user", [1], np.zeros((1, 4), np.float32))
    with pytest.raises(FailedPrecondition, match="begin a new run"):
        publisher.commit()


def test_two_ranks_publish_one_run(log: DirectoryLog, tmp_path: Path) -> None:
    """Each rank writes and commits its own partitions; a commit counts the rows of all ranks."""
    logs = (log, DirectoryLog(tmp_path / "log", partitions=P))
    publishers = [
        Publisher(rank_log, "m", tables=[USER, ITEM], run=7, own=own)
        for rank_log, own in zip(logs, ([0, 1], [3, 2]), strict=True)
    ]
    keys = np.arange(200, dtype=np.uint64)
    of = partition_of(keys, P)
    mine = [keys[of < 2], keys[of >= 2]]
    for publisher, own in zip(publishers, mine, strict=True):
        publisher.begin_continue(None)
        publisher.publish("user", own, np.ones((len(own), 4), np.float32))
        publisher.flush()
    publishers[0].publish("item", mine[0][:5], np.ones((5, 2), np.float32))
    assert [publisher.counted() for publisher in publishers] == [
        {"user": len(mine[0]), "item": 5},
        {"user": len(mine[1])},
    ]
    everywhere = {"user": 200, "item": 5}
    for publisher in publishers:
        assert publisher.commit(1, everywhere=everywhere) == 1
        assert publisher.counted() == {}
    items = np.bincount(partition_of(mine[0][:5], P), minlength=P)
    for partition, stream in records(log).items():
        headers = [record.header for record in stream]
        assert [header.seq for header in headers] == list(range(1, len(stream) + 1))
        assert {header.run for header in headers} == {7}
        assert len({header.publisher for header in headers}) == 1
        body = stream[-1].body
        assert isinstance(body, CommitBody)
        assert {name: count.everywhere for name, count in body.tables.items()} == everywhere
        assert body.tables["user"].here == (of == partition).sum()
        assert body.tables["item"].here == items[partition]
        assert [header.kind for header in headers].count(Kind.COMMIT) == 1
    with pytest.raises(InvalidArgument, match="which is not one of this publisher's"):
        publishers[0].publish("user", mine[1], np.ones((len(mine[1]), 4), np.float32))
    for wrong in ([], [4], [-1, 0]):
        with pytest.raises(InvalidArgument, match="own must be partitions from 0 to 3"):
            Publisher(log, "m", tables=[USER], own=wrong)
