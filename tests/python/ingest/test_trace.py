"""Spans of versions: one for each partition, once its rows are served, and not before."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from petps.delta.directory import DirectoryLog
from petps.delta.schema import partition_of
from petps.publish import Publisher
from petps.server.ingest.trace import VersionSpan, VersionTrace
from petps.traceparent import Caller
from tests.otel.sdk import program
from tests.python.ingest.driver import SCHEMAS, Driver, P
from tests.python.ingest.model import Letters, MemoryTables

KEYS = np.arange(30, dtype=np.uint64)
PARENT = Caller(bytes(15) + b"\1", bytes(7) + b"\2")


class Traced:
    """A log whose publisher is traced, and an ingest that keeps the spans."""

    def __init__(self, folder: Path) -> None:
        self.log = DirectoryLog(folder / "log", partitions=P)
        self.publisher = Publisher(self.log, "m", tables=SCHEMAS)
        self.publisher.begin_continue(None)
        self.instance = MemoryTables(SCHEMAS, P)
        self.spans: list[VersionSpan] = []

    def publish(self, keys: np.ndarray = KEYS) -> int:
        self.publisher.publish("user", keys, np.ones((len(keys), 4), np.float32))
        with program() as traced, traced.span():
            return self.publisher.commit()

    def follow(self) -> Driver:
        driver = Driver(self.log, self.instance, Letters(), trace=self._keep)
        return driver.run()

    def _keep(self, span: VersionSpan) -> None:
        # The progress is recorded before the span exists: the version is served.
        recorded = self.instance.recorded[span.partition]
        assert recorded.version >= span.version
        self.spans.append(span)

    def versions(self) -> dict[int, list[tuple[int, int | None]]]:
        """Return (version, rows) of the spans by partition."""
        return {p: [(s.version, s.rows) for s in self.spans if s.partition == p] for p in range(P)}


@pytest.fixture
def traced(tmp_path: Path) -> Traced:
    return Traced(tmp_path)


def counts(keys: np.ndarray) -> list[int]:
    numbers: list[int] = np.bincount(partition_of(keys, P), minlength=P).tolist()
    return numbers


def test_each_partition_of_a_version_has_a_span(traced: Traced) -> None:
    before = time.time_ns()
    traced.publish()
    traced.publish(KEYS[:1])
    traced.publisher.commit()  # outside of a span
    traced.follow().close()
    all_rows, one_row = counts(KEYS), counts(KEYS[:1])
    assert traced.versions() == {p: [(1, all_rows[p]), (2, one_row[p])] for p in range(P)}
    for span in traced.spans:
        assert span.instance == "m@1"
        assert before <= span.published_ns <= span.end_ns <= time.time_ns()
        assert before - 10**9 <= span.start_ns <= span.end_ns
    parents = {(span.version, span.parent) for span in traced.spans}
    assert len(parents) == 2  # one for each version


def test_a_version_without_room_has_its_span_once_it_is_stored(traced: Traced) -> None:
    table = traced.instance.by_name["user"]
    table.capacity = 5
    traced.publish()
    driver = traced.follow()
    full = {p for p, state in driver.states.items() if state.full is not None}
    assert full
    for p in full:
        assert traced.versions()[p] == []
    assert len(traced.spans) == P - len(full)
    driver.close()
    table.capacity = 100
    traced.follow().close()
    for p in range(P):
        assert len(traced.versions()[p]) == 1


def test_a_version_whose_beginning_was_read_before_a_restart_has_no_rows(traced: Traced) -> None:
    traced.publisher.publish("user", KEYS, np.ones((30, 4), np.float32))
    traced.publisher.flush()
    traced.follow().close()
    traced.publish(KEYS[:1])
    traced.follow().close()
    assert {rows for p in range(P) for _, rows in traced.versions()[p]} == {None}


def test_nobody_who_traces_nothing_reads_the_header(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr("petps.server.ingest.follow.publisher_of", fail)
    traced.publish()
    Driver(traced.log, traced.instance, Letters()).run().close()
    assert {progress.version for progress in traced.instance.recorded.values()} == {1}


def test_a_header_that_is_garbage_is_ignored(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter(("\xff" * 55, "00-", "x" * 10_000))  # one for each partition
    monkeypatch.setattr("petps.publish.trace.format_traceparent", lambda *_: next(values))
    traced.publish()
    traced.follow().close()
    assert traced.spans == []
    assert {progress.version for progress in traced.instance.recorded.values()} == {1}


def test_a_jump_of_the_clock_changes_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    begun_ns = time.monotonic_ns() - 5_000_000
    trace = VersionTrace(PARENT, 0, 1, None, 0, begun_ns)
    monkeypatch.setattr(time, "time_ns", lambda: 1_000)
    span = trace.end("m@1")
    assert span.end_ns == 1_000
    assert 5_000_000 <= span.end_ns - span.start_ns < 60_000_000_000
