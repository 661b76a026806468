"""Actions in ingest's thread between two applies (Ingest.between_applies)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from petps.errors import NotFound
from tests.python.ingest.conftest import Bench
from tests.python.waiting import wait_until


def test_nothing_is_applied_meanwhile(bench: Bench) -> None:
    stop = threading.Event()
    published = [0]

    def publish() -> None:
        while not stop.is_set():
            published[0] += 1
            bench.publish(value=published[0])

    def state() -> tuple[object, object]:
        table: Any = bench.instance.tables()["user"]
        progress = [bench.instance.progress(p) for p in range(bench.instance.partitions)]
        return dict(table.rows), progress

    changed: list[int] = []

    def compare() -> None:
        begun, before = published[0], state()
        wait_until(lambda: published[0] > begun + 2)
        if state() != before:
            changed.append(begun)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        wait_until(lambda: bench.ingest.version() > 3)
        for _ in range(20):
            assert bench.ingest.between_applies(compare, 30)
    finally:
        stop.set()
        thread.join()
    assert changed == []


def test_an_error_of_the_action_is_raised_and_ingest_goes_on(bench: Bench) -> None:
    def fail() -> None:
        raise NotFound("no such table")

    with pytest.raises(NotFound, match="no such table"):
        bench.ingest.between_applies(fail, 30)
    assert bench.ingest.wait_for(bench.publish(), 60)


def test_it_runs_while_ingest_is_paused(bench: Bench) -> None:
    bench.ingest.pause()
    wait_until(lambda: bench.ingest.status().paused)
    assert bench.ingest.between_applies(lambda: None, 30)


def test_an_action_that_came_too_late_does_not_run(idle_bench: Bench) -> None:
    ran: list[int] = []
    assert not idle_bench.ingest.between_applies(lambda: ran.append(1), 0.01)
    idle_bench.ingest.start()
    assert idle_bench.ingest.between_applies(lambda: ran.append(2), 30)
    assert ran == [2]
