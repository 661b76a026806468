"""The directory log: crashes, damage, locks, segments, retention."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from petps.delta import Damage, Delivery, DeltaError, Event, LogLocked, Lost, Message
from petps.delta.directory import DirectoryLog
from petps.delta.directory.frame import FRAME_HEADER_BYTES, SEGMENT_HEADER_BYTES
from petps.delta.files import publish_file
from petps.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    IoError,
    NotFound,
    ResourceExhausted,
    Unimplemented,
)
from tests.python.delta import writer_process
from tests.python.delta.events import message, numbers, publish


def fill(path: Path, count: int, *, size: int = 100, segment_bytes: int = 64 << 20) -> DirectoryLog:
    log = DirectoryLog(path, partitions=1, segment_bytes=segment_bytes)
    publish(log, *range(count), size=size)
    return log


def read_all(log: DirectoryLog, start: int = 0) -> list[Event]:
    subscription = log.subscribe({0: start})
    events: list[Event] = []
    while polled := subscription.poll(max_bytes=1 << 20, timeout=0):
        events += polled
    subscription.close()
    return events


def segments(path: Path) -> list[Path]:
    return sorted((path / "p0000").glob("*.log"))


def test_offsets_count_messages(tmp_path: Path) -> None:
    with fill(tmp_path, 50, segment_bytes=4096) as log:
        events = read_all(log)
        assert [event.offset for event in events] == list(range(50))
        assert len(segments(tmp_path)) > 1
        assert all(path.stat().st_size < 4096 + 400 for path in segments(tmp_path))


@pytest.mark.parametrize("cut", range(1, 300, 7))
def test_readers_wait_for_a_torn_tail_and_writers_cut_it(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, 10, size=200).close()
    (segment,) = segments(tmp_path)
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-cut])
    kept = 9 if cut <= 256 else 8
    reader = DirectoryLog(tmp_path)
    subscription = reader.subscribe({0: 0})
    assert numbers(subscription.poll(max_bytes=1 << 20, timeout=0)) == list(range(kept))
    assert subscription.poll(max_bytes=1 << 20, timeout=0) == []
    assert reader.end_offsets([0]) == {0: kept}
    with DirectoryLog(tmp_path) as writer, caplog.at_level(logging.WARNING):
        publish(writer, 100)
        assert ("incomplete frame" in caplog.text) == (len(whole) - cut != 32 + kept * 256)
        assert numbers(subscription.poll(max_bytes=1 << 20, timeout=1)) == [100]
        assert reader.end_offsets([0]) == {0: kept + 1}
    subscription.close()


@pytest.mark.parametrize("tail", [b"\0" * 500, b"PTLF" * 50, bytes(range(256)), b"\xff"])
def test_garbage_at_the_end_is_cut(tmp_path: Path, tail: bytes) -> None:
    fill(tmp_path, 3).close()
    with segments(tmp_path)[0].open("ab") as file:
        file.write(tail)
    assert numbers(read_all(DirectoryLog(tmp_path))) == [0, 1, 2]
    with DirectoryLog(tmp_path) as log:
        log.publish(0, message(3))
        assert numbers(read_all(log)) == [0, 1, 2, 3]
        assert log.last_messages([0])


@pytest.mark.parametrize("size", range(SEGMENT_HEADER_BYTES))
def test_a_crash_during_the_creation_of_a_segment(tmp_path: Path, size: int) -> None:
    fill(tmp_path, 20, segment_bytes=4096).close()
    new = tmp_path / "p0000" / f"{20:020d}.log"
    new.write_bytes(segments(tmp_path)[0].read_bytes()[:size])
    reader = DirectoryLog(tmp_path)
    subscription = reader.subscribe({0: 0})
    assert len(subscription.poll(max_bytes=1 << 20, timeout=0)) <= 20
    with DirectoryLog(tmp_path, segment_bytes=4096) as log:
        publish(log, 20)
        assert numbers(read_all(log)) == list(range(21))
        assert reader.end_offsets([0]) == {0: 21}
    subscription.close()


def test_every_flipped_bit_damages_only_its_message(tmp_path: Path) -> None:
    fill(tmp_path / "log", 5, size=24).close()
    (segment,) = segments(tmp_path / "log")
    whole = segment.read_bytes()
    frame = (len(whole) - SEGMENT_HEADER_BYTES) // 5
    for at in range(SEGMENT_HEADER_BYTES, len(whole) - frame, 3):
        damaged = (at - SEGMENT_HEADER_BYTES) // frame
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        segment.write_bytes(flipped)
        events = read_all(DirectoryLog(tmp_path / "log"))
        delivered = numbers(events)
        if delivered == [0, 1, 2, 3, 4]:  # the altered byte is padding
            continue
        expected: list[int | str] = list(range(5))
        expected[damaged] = "Damage"
        assert delivered == expected, at
        damage = events[damaged]
        assert isinstance(damage, Damage)
        assert (damage.offset, damage.next_offset) == (damaged, damaged + 1)
        assert numbers(read_all(DirectoryLog(tmp_path / "log"), start=3))[-1] == 4
        assert DirectoryLog(tmp_path / "log").end_offsets([0]) == {0: 5}
    with DirectoryLog(tmp_path / "log") as log:  # the writer never cuts damage in the middle
        log.publish(0, message(5))
        assert numbers(read_all(log))[-2:] == [4, 5]


def test_a_seek_into_damage_reports_damage(tmp_path: Path) -> None:
    log = fill(tmp_path, 10, size=200)
    (segment,) = segments(tmp_path)
    data = bytearray(segment.read_bytes())
    at = SEGMENT_HEADER_BYTES + 3 * 256
    data[at : at + 2 * 256] = bytes(512)
    segment.write_bytes(data)
    assert numbers(read_all(log, start=4)) == ["Damage", 5, 6, 7, 8, 9]
    assert numbers(read_all(log)) == [0, 1, 2, "Damage", 5, 6, 7, 8, 9]
    log.close()


def test_a_segment_that_is_cut_short_reports_damage(tmp_path: Path) -> None:
    log = fill(tmp_path, 40, segment_bytes=4096)
    first, second = segments(tmp_path)[:2]
    following = int(second.name[:20])
    os.truncate(first, first.stat().st_size - 10)
    assert numbers(read_all(log)) == [*range(following - 1), "Damage", *range(following, 40)]
    assert numbers(read_all(log, start=following - 1)) == ["Damage", *range(following, 40)]
    log.close()


def test_a_missing_segment_reports_damage(tmp_path: Path) -> None:
    log = fill(tmp_path, 60, segment_bytes=4096)
    paths = segments(tmp_path)
    starts = [int(path.name[:20]) for path in paths]
    paths[1].unlink()
    assert numbers(read_all(log)) == [*range(starts[1]), "Damage", *range(starts[2], 60)]
    log.close()


@pytest.mark.parametrize("seed", range(6))
def test_mutated_segments_deliver_only_whole_messages(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    fill(tmp_path, 12, size=64).close()
    (segment,) = segments(tmp_path)
    whole = segment.read_bytes()
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(int(rng.integers(1, 5))):
            at = int(rng.integers(SEGMENT_HEADER_BYTES, len(data)))
            match int(rng.integers(0, 4)):
                case 0:
                    data[at] ^= 1 << int(rng.integers(0, 8))
                case 1:
                    del data[at : at + 8 * int(rng.integers(1, 20))]
                case 2:
                    data[at:at] = bytes(rng.integers(0, 256, 8, dtype=np.uint8))
                case _:
                    data[at : at + 4] = b"\xff\xff\xff\x7f"
            if len(data) <= SEGMENT_HEADER_BYTES + 1:
                break
        segment.write_bytes(data)
        last = -1
        for event in read_all(DirectoryLog(tmp_path)):
            assert event.offset == last + 1 or isinstance(event, Damage)
            if isinstance(event, Delivery):
                number = int(event.message.headers[0][1])
                assert number == event.offset
                assert bytes(event.message.body) == bytes(message(number, 64).body)
                last = event.offset
            else:
                assert isinstance(event, Damage)
                last = event.next_offset - 1


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_writer_loses_no_durable_message(tmp_path: Path, seed: int) -> None:
    """Kill the writer repeatedly while a reader follows: it reads one unbroken sequence."""
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    path = tmp_path / "log"
    partitions = range(writer_process.P)
    reader = DirectoryLog(path, partitions=writer_process.P)
    subscription = reader.subscribe(dict.fromkeys(partitions, 0))
    seen: dict[int, list[int]] = {partition: [] for partition in partitions}
    ends = dict.fromkeys(partitions, 0)
    for _ in range(4):
        starts = [str(ends[partition]) for partition in partitions]
        with subprocess.Popen(
            [sys.executable, "-m", "tests.python.delta.writer_process", str(path), *starts, "10"],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            deadline = time.monotonic() + float(rng.uniform(0.02, 0.2))
            # A slow disk may take longer than that for its first messages.
            wanted = {partition: len(numbers) + 6 for partition, numbers in seen.items()}
            while time.monotonic() < deadline or any(
                len(numbers) < wanted[partition] for partition, numbers in seen.items()
            ):
                collect(subscription.poll(max_bytes=1 << 20, timeout=0.01), seen)
            os.kill(process.pid, signal.SIGKILL)
            lines = [line.split() for line in process.stdout if line.endswith("\n")]
        durable = [int(text) for text in lines[-1]] if lines else [0] * len(partitions)
        ends = reader.end_offsets(partitions)
        assert all(ends[partition] >= durable[partition] for partition in partitions)
    deadline = time.monotonic() + 60
    while sum(map(len, seen.values())) < sum(ends.values()):
        assert time.monotonic() < deadline
        collect(subscription.poll(max_bytes=1 << 20, timeout=0.01), seen)
    for partition, sequence in seen.items():
        end = writer_process.P * len(sequence)
        assert sequence == list(range(partition, end, writer_process.P))
        assert len(sequence) > 20
    subscription.close()
    with DirectoryLog(path) as log:  # the exit of the process has released the lock
        log.publish(0, message(0))


def collect(events: list[Event], seen: dict[int, list[int]]) -> None:
    for event in events:
        assert isinstance(event, Delivery), event
        number = int(event.message.headers[0][1])
        assert bytes(event.message.body) == writer_process.body_of(number)
        seen[event.partition].append(number)


def test_a_partition_has_one_writer(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path, partitions=2) as first, DirectoryLog(tmp_path) as second:
        first.publish(0, message(0))
        second.publish(1, message(1))
        with pytest.raises(LogLocked, match=rf"process {os.getpid()} writes .*: stop"):
            second.publish(0, message(2))
        first.close()
        second.publish(0, message(3))
        assert numbers(read_all(second)) == [0, 3]


def test_retention_removes_the_oldest_segments(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path, partitions=1, segment_bytes=4096, retention_bytes=16 << 10) as log:
        slow = log.subscribe({0: 0})
        publish(log, *range(400), size=200)
        assert sum(path.stat().st_size for path in segments(tmp_path)) < (16 << 10) + 8192
        start = log.start_offsets([0])[0]
        assert start > 300
        (event,) = slow.poll(max_bytes=1 << 20, timeout=0)
        assert event == Lost(0, 0, start, 400)
        assert f"offsets 0 to {start - 1} are gone" in event.reason
        assert slow.poll(max_bytes=1 << 20, timeout=0) == []
        slow.seek(0, event.start)
        assert numbers(slow.poll(max_bytes=1 << 20, timeout=0))[0] == start
        slow.close()


def test_a_trim_is_reported_to_a_reader_before_it(tmp_path: Path) -> None:
    with fill(tmp_path, 100, size=200, segment_bytes=4096) as log:
        subscription = log.subscribe({0: 0})
        first = numbers(subscription.poll(max_bytes=1, timeout=0))
        assert first == [0]
        log.trim(0, 50)
        start = log.start_offsets([0])[0]
        assert 30 < start <= 50
        events: list[Event] = []
        while polled := subscription.poll(max_bytes=1 << 20, timeout=0):
            events += polled
        # The open segment can still be read. Then the reader reports the missing offsets.
        assert numbers(events)[-1] == "Lost"
        assert numbers(events)[:-1] == list(range(1, len(events)))
        subscription.close()


def test_a_full_disk_is_an_error_and_leaves_no_partial_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fill(tmp_path, 3)
    real = os.writev

    def full(descriptor: int, pieces: list[bytes]) -> int:
        os.write(descriptor, b"".join(pieces)[:50])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(ResourceExhausted, match="no space left for the delta log"):
        log.publish(0, message(3))
    monkeypatch.setattr(os, "writev", real)
    publish(log, 3)
    assert numbers(read_all(log)) == [0, 1, 2, 3]
    log.close()


def test_a_short_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fill(tmp_path, 1)

    def short(descriptor: int, pieces: list[bytes]) -> int:
        return os.write(descriptor, b"".join(pieces)[:33])

    monkeypatch.setattr(os, "writev", short)
    log.publish(0, message(1))
    assert numbers(read_all(log)) == [0, 1]
    log.close()


def test_after_a_failed_fsync_the_log_accepts_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fill(tmp_path, 1)
    log.publish(0, message(1))

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(IoError, match="Input/output error"):
            log.flush()
    with pytest.raises(FailedPrecondition, match=r"fdatasync failed .* begin a new run"):
        log.flush()
    with pytest.raises(FailedPrecondition, match="begin a new run"):
        log.publish(0, message(2))


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"is no directory log: it has no log\.json"):
        DirectoryLog(tmp_path / "nothing")
    with pytest.raises(InvalidArgument, match=r"0 partitions are outside 1\.\.1024"):
        DirectoryLog(tmp_path / "none", partitions=0)
    with pytest.raises(InvalidArgument, match="segment_bytes must be at least 4096, got 10"):
        DirectoryLog(tmp_path / "small", partitions=1, segment_bytes=10)
    DirectoryLog(tmp_path / "log", partitions=4).close()
    with pytest.raises(InvalidArgument, match="has 4 partitions, not 8: the number can never"):
        DirectoryLog(tmp_path / "log", partitions=8)
    (tmp_path / "log" / "log.json").write_text('{"format": "petps-directory-log-2"}')
    with pytest.raises(Unimplemented, match="has format 2, this release reads 1: upgrade"):
        DirectoryLog(tmp_path / "log")
    texts = ["", "{}", "[]", '{"format": 3}', '{"format": "petps-directory-log-1"}', "[" * 100_000]
    for text in (*(text.encode() for text in texts), b"\xff"):
        (tmp_path / "log" / "log.json").write_bytes(text)
        with pytest.raises(DataLoss, match="is not the description of a petps directory log"):
            DirectoryLog(tmp_path / "log")


@pytest.mark.parametrize(
    ("at", "byte", "error", "reason"),
    [
        (0, b"X", DataLoss, "is no segment of a petps directory log"),
        (8, b"\x02", Unimplemented, "has log format 2, this release reads 1"),
        (12, b"\x01", DataLoss, "the segment's header is damaged"),
        (30, b"\x01", DataLoss, "the segment's header is damaged"),
    ],
)
def test_bad_segments_are_refused(
    tmp_path: Path, at: int, byte: bytes, error: type[Exception], reason: str
) -> None:
    fill(tmp_path, 3).close()
    (segment,) = segments(tmp_path)
    data = segment.read_bytes()
    segment.write_bytes(data[:at] + byte + data[at + 1 :])
    with pytest.raises(error, match=reason):
        read_all(DirectoryLog(tmp_path))
    with pytest.raises(error, match=reason), DirectoryLog(tmp_path) as log:
        log.publish(0, message(3))


def test_a_renamed_segment_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, 3).close()
    (segment,) = segments(tmp_path)
    segment.rename(segment.with_name(f"{7:020d}.log"))
    with pytest.raises(DataLoss, match="was written as offset 0 of partition 0"):
        read_all(DirectoryLog(tmp_path), start=7)


def test_a_message_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path, partitions=1) as log:
        with pytest.raises(DeltaError, match="too-large"):
            log.publish(0, Message([], bytes(3 << 20)))
        log.publish(0, message(0))
        assert numbers(read_all(log)) == [0]


def test_bodies_of_frames_are_aligned(tmp_path: Path) -> None:
    """Check that bodies start at multiples of 8, so that decoded keys need no copy."""
    assert SEGMENT_HEADER_BYTES % 8 == FRAME_HEADER_BYTES % 8 == 0
    with DirectoryLog(tmp_path, partitions=1) as log:
        for size in range(40):
            log.publish(0, Message([("n", b"x" * size)], bytes(size)))
        for event in read_all(log):
            assert isinstance(event, Delivery)
            body = np.frombuffer(event.message.body, dtype=np.uint8)
            assert body.size == 0 or body.ctypes.data % 8 == 0


def test_publish_file_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    publish_file(path, b"old")

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        publish_file(path, fail)
    assert path.read_bytes() == b"old"
    with pytest.raises(FileExistsError):
        publish_file(path, b"new", exclusive=True)
    assert path.read_bytes() == b"old"
    publish_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]
