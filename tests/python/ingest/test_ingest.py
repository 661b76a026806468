"""Ingest's threads: temporary errors, pause, rate, restart, status, dead letters."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from petps.delta import Delivery, Message, Subscription
from petps.delta.directory import DirectoryLog
from petps.errors import FailedPrecondition, InvalidArgument, IoError, Unavailable
from petps.publish import Publisher
from petps.server.ingest import DirectoryDeadLetters, Ingest, LogDeadLetters
from tests.python.ingest.conftest import Bench
from tests.python.ingest.driver import SCHEMAS, P
from tests.python.ingest.model import ALWAYS, Letters, MemoryTables
from tests.python.ingest.test_follow import pause
from tests.python.waiting import wait_until


def test_a_temporary_error_of_the_pool_is_shown_and_cleared(bench: Bench) -> None:
    bench.instance.by_name["user"].fail_next = ALWAYS
    version = bench.publish()
    wait_until(lambda: "no space left on device" in bench.ingest.status().error)
    bench.instance.by_name["user"].fail_next = 0
    assert bench.ingest.wait_for(version, 60)
    wait_until(lambda: bench.ingest.status().error == "")
    assert bench.ingest.status().errors >= 1
    assert len(bench.instance.by_name["user"].rows) == 50


def test_an_error_that_repeats_is_logged_once(
    idle_bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[float] = []
    subscribe = idle_bench.log.subscribe

    def refuse(positions: object) -> Subscription:
        attempts.append(time.monotonic())
        raise Unavailable("the brokers do not answer")

    monkeypatch.setattr(idle_bench.log, "subscribe", refuse)
    idle_bench.ingest.start()
    wait_until(lambda: len(attempts) > 3)
    assert attempts[3] - attempts[0] >= 0.1 + 0.2 + 0.4  # the waits between them grow
    assert caplog.text.count("the brokers do not answer") == 1
    assert "the brokers do not answer" in idle_bench.ingest.status().error
    monkeypatch.setattr(idle_bench.log, "subscribe", subscribe)
    assert idle_bench.ingest.wait_for(idle_bench.publish(), 60)
    wait_until(lambda: idle_bench.ingest.status().error == "")


def test_wait_for_end_waits_until_the_log_is_applied(idle_bench: Bench) -> None:
    version = idle_bench.publish()
    assert not idle_bench.ingest.wait_for_end(0)  # ingest is not started
    idle_bench.ingest.start()
    assert idle_bench.ingest.wait_for_end(30)
    assert idle_bench.ingest.version() == version


def test_wait_for_end_waits_again_after_a_restart(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.ingest.wait_for_end(30)
    assert bench.ingest.stop(60)
    version = bench.publish()
    start_offsets = bench.log.start_offsets

    def read_slowly(partitions: Sequence[int]) -> dict[int, int]:
        time.sleep(0.3)  # wait_for_end() begins before ingest reads anything
        return start_offsets(partitions)

    monkeypatch.setattr(bench.log, "start_offsets", read_slowly)
    bench.ingest.start()
    assert bench.ingest.wait_for_end(30)
    assert bench.ingest.version() == version


def test_one_thread_requests_the_end_after_a_restart(
    idle_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = idle_bench
    entered, released = threading.Event(), threading.Event()
    end_offsets = bench.log.end_offsets

    def block(partitions: Sequence[int]) -> dict[int, int]:
        entered.set()
        assert released.wait(30)
        return end_offsets(partitions)

    monkeypatch.setattr(bench.log, "end_offsets", block)
    before = set(threading.enumerate())  # threads of earlier tests may still wait for their logs
    bench.ingest.start()
    assert entered.wait(30)  # the first thread waits for the log while ingest restarts
    started = set(threading.enumerate()) - before
    first = [thread for thread in started if thread.name == "petps-ingest-end"]
    assert len(first) == 1
    assert bench.ingest.stop(60)
    bench.ingest.start()
    released.set()
    wait_until(lambda: not any(thread.is_alive() for thread in first))


def test_an_error_ends_the_wait_for_the_end(idle_bench: Bench) -> None:
    idle_bench.instance.by_name["user"].fail_next = ALWAYS
    idle_bench.publish()
    idle_bench.ingest.start()
    assert not idle_bench.ingest.wait_for_end(3600)  # the pool's error ends the wait
    assert idle_bench.ingest.status().error


def test_stop_does_not_wait_for_the_end_of_an_error(bench: Bench) -> None:
    bench.instance.by_name["user"].fail_next = ALWAYS
    bench.publish()
    wait_until(lambda: bench.ingest.status().errors > 0)
    assert bench.ingest.stop(60)
    assert all(progress.seq <= 1 for progress in bench.instance.recorded.values())
    bench.instance.by_name["user"].fail_next = 0
    bench.ingest.start()
    assert bench.ingest.wait_for(1, 60)


def test_a_paused_ingest_applies_nothing_until_it_is_resumed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.ingest.wait_for(bench.publish(), 60)
    pause(bench.ingest, monkeypatch)
    assert bench.ingest.status().paused
    version = bench.publish()
    assert not bench.ingest.wait_for(version, 0.3)
    status = bench.ingest.status()
    assert all(p.lag_records == 2 for p in status.partitions)
    assert all(p.lag_seconds is not None and p.lag_seconds > 0 for p in status.partitions)
    bench.ingest.resume()
    assert bench.ingest.wait_for(version, 60)


def test_the_rate_limit_delays_applies(tmp_path: Path) -> None:
    bench = Bench(tmp_path, rows_per_second=1000, poll_bytes=2000)
    for _ in range(10):
        version = bench.publish(50)
    start = time.monotonic()
    bench.ingest.start()
    assert bench.ingest.wait_for(version, 60)
    assert time.monotonic() - start > 0.3
    bench.ingest.set_rate(1)
    bench.publish(50)
    time.sleep(0.3)
    assert bench.ingest.stop(40)  # does not wait for the 50 s that the rate requires


def test_the_rate_is_reached_whatever_the_applies_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest = Bench(tmp_path, rows_per_second=1000).ingest
    clock = [1000.0]

    def wait(seconds: float) -> bool:
        clock[0] += seconds
        return False

    monkeypatch.setattr("petps.server.ingest.ingest.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(ingest._stop, "wait", wait)

    def seconds_of(windows: int, work: float) -> float:
        start = clock[0]
        for _ in range(windows):
            clock[0] += work
            ingest._pace(100)
        return clock[0] - start

    assert seconds_of(20, 0.05) == pytest.approx(2.0, abs=0.2)
    assert seconds_of(20, 0.2) == pytest.approx(4.0, abs=0.2)  # slower than the rate: no wait
    assert seconds_of(20, 0.0) == pytest.approx(2.0, abs=0.2)  # lost time is not made up for


def test_ingest_shows_an_error_of_the_log_and_continues(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.ingest.wait_for(bench.publish(), 60)
    is_broken = [True]
    subscribe = bench.log.subscribe

    def subscribe_or_fail(positions: dict[int, int]) -> Subscription:
        if is_broken[0]:
            raise IoError("the log's disk is away")
        return subscribe(positions)

    monkeypatch.setattr(bench.log, "subscribe", subscribe_or_fail)
    assert bench.ingest.stop(60)
    bench.ingest.start()
    wait_until(lambda: "the log's disk is away" in bench.ingest.status().error)
    rows = bench.ingest.status().rows
    is_broken[0] = False
    assert bench.ingest.wait_for(bench.publish(), 60)
    assert bench.ingest.status().rows == rows + 50  # the counters continue


def test_a_restart_at_any_time_loses_nothing(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path / "log", partitions=P)
    instance = MemoryTables(SCHEMAS, P)
    publisher = Publisher(log, "m", tables=SCHEMAS)
    publisher.begin_continue(None)
    rng = np.random.default_rng(1)
    for version in range(1, 9):
        ingest = Ingest(log, instance, dead_letters=Letters(), poll_bytes=1000)
        ingest.start()
        for value in range(5):
            keys = rng.integers(0, 100, 30, dtype=np.uint64)
            publisher.publish("item", keys, np.full((30, 2), version * 10 + value, np.float32))
        publisher.commit()
        time.sleep(float(rng.uniform(0, 0.02)))
        assert ingest.stop(60)
    ingest = Ingest(log, instance, dead_letters=Letters())
    ingest.start()
    assert ingest.wait_for(8, 60)
    assert ingest.stop(60)
    expected = MemoryTables(SCHEMAS, P)
    ingest = Ingest(log, expected, dead_letters=Letters())
    ingest.start()
    assert ingest.wait_for(8, 60)
    assert ingest.stop(60)
    assert instance.rows() == expected.rows()
    assert instance.recorded == expected.recorded
    for earlier, later in zip(instance.history, instance.history[1:], strict=False):
        if earlier.partition == later.partition:
            places = [
                (progress.run, progress.seq, progress.offset) for progress in (earlier, later)
            ]
            assert places == sorted(places)


def test_only_the_given_partitions_are_followed(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path / "log", partitions=P)
    instance = MemoryTables(SCHEMAS, P)
    publisher = Publisher(log, "m", tables=SCHEMAS)
    publisher.begin_continue(None)
    publisher.publish("user", np.arange(90), np.zeros((90, 4), np.float32))
    publisher.commit()
    ingest = Ingest(log, instance, dead_letters=Letters(), partitions=[2, 0])
    ingest.start()
    assert ingest.wait_for(1, 60)
    assert ingest.stop(60)
    assert set(instance.recorded) == {0, 2}
    assert [p.partition for p in ingest.status().partitions] == [0, 2]
    assert 0 < len(instance.by_name["user"].rows) < 90


def test_status_can_be_written_as_json(bench: Bench) -> None:
    assert bench.ingest.wait_for(bench.publish(), 60)
    status = bench.ingest.status()
    values = json.loads(json.dumps(status.as_json()))
    assert values["running"]
    assert values["version"] == 1
    assert values["partitions"][0]["state"] == "following"
    assert values["freshness"]["p50_ms"] > 0
    assert values["log"].startswith("directory log ")


def test_bad_options_are_refused(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path / "log", partitions=P)
    with pytest.raises(InvalidArgument, match="has 3 partitions, model m 4"):
        Ingest(log, MemoryTables(SCHEMAS, 4), dead_letters=Letters())
    for options in ({"rows_per_second": 0.0}, {"rows_max": 0}, {"poll_bytes": 0}):
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            Ingest(log, MemoryTables(SCHEMAS, P), dead_letters=Letters(), **options)
    ingest = Ingest(log, MemoryTables(SCHEMAS, P), dead_letters=Letters())
    ingest.start()
    with pytest.raises(FailedPrecondition, match="has been started already"):
        ingest.start()
    assert ingest.stop(60)


def test_dead_letters_are_stored_up_to_a_limit(tmp_path: Path) -> None:
    letters = DirectoryDeadLetters(tmp_path / "dead", max_letters=3)
    for offset in (7, 8, 7, 9, 10, 11, 8):
        letters.add(2, offset, "checksum: altered", Message([("a", b"\xff")], b"body"))
    names = sorted(path.name for path in (tmp_path / "dead").iterdir())
    assert names == [
        f"p0002-{offset:020d}.{kind}" for offset in (7, 8, 9) for kind in ("body", "json")
    ]
    letter = json.loads((tmp_path / "dead" / names[1]).read_text())
    assert letter["reason"] == "checksum: altered"
    assert letter["headers"] == [{"name": "a", "base64": "/w==", "text": "b'\\xff'"}]
    assert (tmp_path / "dead" / names[0]).read_bytes() == b"body"
    (tmp_path / "file").touch()
    # The folder cannot be created: add() only reports it.
    DirectoryDeadLetters(tmp_path / "file" / "dead").add(0, 1, "full", None)
    DirectoryDeadLetters(tmp_path / "lost").add(0, 1, "log-damaged", None)
    assert [path.suffix for path in (tmp_path / "lost").iterdir()] == [".json"]


def test_a_long_reason_of_a_dead_letter_is_cut_between_characters(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path / "dead", partitions=1)
    letters = LogDeadLetters(lambda: log, "log")
    letters.add(2, 7, "a" + 700 * "é", None)
    subscription = log.subscribe({0: 0})
    (event,) = subscription.poll(max_bytes=1 << 20, timeout=0)
    assert isinstance(event, Delivery)
    assert dict(event.message.headers)["dead-letter.reason"] == ("a" + 499 * "é").encode()
    subscription.close()
    letters.close()


def test_a_log_that_refuses_a_dead_letter_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Close it before it is dropped, or the garbage collector ends its client in any thread."""
    logs = [DirectoryLog(tmp_path / name, partitions=1) for name in ("first", "second")]
    closed: list[int] = []
    monkeypatch.setattr(logs[0], "close", lambda: closed.append(0))

    def refuse(*_: object) -> None:
        raise IoError("no space left on device")

    monkeypatch.setattr(logs[0], "publish", refuse)
    open_logs = iter(logs)
    letters = LogDeadLetters(lambda: next(open_logs), "log")
    letters.add(0, 1, "altered", None)
    assert closed == [0]
    letters.add(0, 2, "altered", None)
    assert logs[1].end_offsets([0])[0] > 0
    letters.close()
