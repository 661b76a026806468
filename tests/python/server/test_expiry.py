"""Rows that expire in a running server, the commands for it, and what it shows."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import petps_client
import pytest

import petps
from petps import config
from petps._native import EXPIRY_CELLS
from petps.errors import InvalidArgument
from petps.server import Serving
from petps.server.expiry import Expiry
from tests.python.server.conftest import settings
from tests.python.waiting import wait_until

KEYS = np.arange(100, dtype=np.uint64)
START_NS = 1_700_000_000 * 10**9
AFTER = 4800  # seconds; a cell is 100 seconds


class Clock:
    """The server's clock, as the test sets it."""

    def __init__(self) -> None:
        self.second = 0

    def __call__(self) -> int:
        return START_NS + self.second * 10**9


def rows_of(pool: petps.Pool) -> int:
    return pool.table("items").status().rows


def test_pushed_rows_expire_by_the_servers_clock() -> None:
    clock, lines = Clock(), list[str]()
    with petps.create() as pool:
        pool.create_table("items", dim=4, capacity=1000, expire_after=AFTER)
        pool.push("items", KEYS, np.ones((100, 4), np.float32))
        expiry = Expiry(pool.native, lines.append, clock_ns=clock)
        try:
            table = pool.table("items")
            for second in range(0, AFTER + 1, AFTER // 4):  # as far as one tick advances event time
                clock.second = second
                wait_until(lambda: table.status().event_time_ns == clock())
                if second == AFTER // 2:
                    pool.push("items", KEYS[:10], np.ones((10, 4), np.float32))
            assert rows_of(pool) == 100
            for cells in (1, 2, 3):
                clock.second = AFTER + cells * AFTER // EXPIRY_CELLS
                wait_until(lambda: table.status().event_time_ns == clock())
            wait_until(lambda: rows_of(pool) == 10)
            wait_until(lambda: 0 <= table.status().expiry_delay <= 3 * AFTER / EXPIRY_CELLS)
            assert table.status().expired == 90
        finally:
            expiry.close()
    assert lines == []


def test_a_walk_that_fails_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    with petps.create() as pool:
        pool.create_table("items", dim=4, capacity=1000, expire_after=1)

        class Failing:
            tried = 0

            def __getattr__(self, name: str) -> object:
                return getattr(pool.native, name)

            def tick(self, table: int, now_ns: int) -> None:
                self.tried += 1
                raise petps.errors.Unavailable("the disk sleeps")

        failing = Failing()
        expiry = Expiry(failing, lines.append)  # type: ignore[arg-type]
        wait_until(lambda: failing.tried > 3)
        assert list(expiry.faults.values()) == lines
        expiry.close()
    assert lines == ["rows of table 'items' cannot expire: the disk sleeps"]


def test_a_served_table_expires_and_shows_it(pool: Path) -> None:
    with petps.open(pool) as opened:
        opened.set_expiry("items", 2)
        number = opened.table("items").id
    with (
        Serving(settings(pool), log=lambda _: None) as serving,
        petps_client.connect(f"petps://127.0.0.1:{serving.port}") as client,
    ):
        begun = time.monotonic()
        client.push("items", KEYS, np.ones((100, 4), np.float32))

        def count_found() -> int:
            return int(client.pull("items", KEYS, return_mask=True)[1].sum())

        assert count_found() == 100
        wait_until(lambda: count_found() == 0)
        assert time.monotonic() - begun > 1.5
        entry = next(t for t in serving.status()["tables"] if t["name"] == "items")
        assert entry["expire_after"] == 2
        assert entry["expired"] >= 100
        metrics = serving._metrics_text("")[0].decode()
        labels = '{model_instance="default@0",table="items"}'
        assert f"petps_table_expire_after_seconds{labels} 2.0" in metrics
        assert f"petps_table_expired_rows_total{labels}" in metrics
        assert (
            'petps_table_expire_after_seconds{model_instance="default@0",table="fed"}'
            not in metrics
        )
        assert f"petps_table_expiry_failed{labels} 0.0" in metrics
        serving._expiry._faults["test", number] = "the disk sleeps"
        assert f"petps_table_expiry_failed{labels} 1.0" in serving._metrics_text("")[0].decode()
        assert serving.status()["expiry_faults"] == {str(number): "the disk sleeps"}


def test_a_frozen_instance_keeps_its_rows(pool: Path) -> None:
    with petps.open(pool) as opened:
        opened.set_expiry("items", 1)
        opened.create_instance("default@1")
        opened.switch_alias("default", "default@1")
        old, new = opened.table("items", "default@0"), opened.table("items", "default@1")
        opened.push("items", KEYS, np.ones((100, 4), np.float32), model="default@1")
        expiry = Expiry(opened.native, lambda _: None)
        wait_until(lambda: new.status().expired == 100)
        expiry.close()
        assert old.status().rows == 100
        assert old.status().event_time_ns == 0
    with Serving(settings(pool), log=lambda _: None) as serving:
        metrics = serving._metrics_text("")[0].decode()
    for instance, is_shown in (("default@0", False), ("default@1", True)):
        labels = f'{{model_instance="{instance}",table="items"}}'
        assert (f"petps_table_expiry_delay_seconds{labels}" in metrics) == is_shown


@pytest.mark.parametrize("text", ["7", "d", "1w", "-1d", "0d", "1.5h", "1d 2h"])
def test_an_age_that_is_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match="such as 90s, 15m, 6h or 30d"):
        config.merge(
            None,
            {
                "pool": {"path": "p"},
                "tables": {"items": {"dim": 4, "capacity": 10, "expire_after": text}},
            },
            "test",
        )
