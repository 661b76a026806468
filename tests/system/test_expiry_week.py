"""A week of a table whose keys arrive, expire and return, in event time.

The table grows automatically and its rows expire after a day, by the threads of a server. Each hour
of the log brings new keys, keys that come back after they have expired, and new values of keys that
are there. Every row is compared with the model, and what the table takes with `petps plan`. The
seed is printed; PETPS_SEED repeats it. PETPS_TEST_SCALE=20 has as many more rows.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import petps
from petps import _native, config
from petps._native import EXPIRY_CELLS
from petps.cli.commands.plan import make_plan
from petps.pool.footprint import SERVER_BYTES
from petps.server.expiry import Expiry
from petps.server.growth import FULL_SHARE, Growth
from tests.python.waiting import wait_until
from tests.seed import SEED

pytestmark = pytest.mark.system

DIM, P = 16, 4
HOURS, DAY_HOURS = 7 * 24, 24
HOUR_NS = 3600 * 10**9
START_NS = 1_700_000_000 * 10**9
SCALE = float(os.environ.get("PETPS_TEST_SCALE", "1"))
NEW_KEYS = round(300 * SCALE)  # each hour
RETURNING, CHANGED = NEW_KEYS // 10, NEW_KEYS // 2
CAPACITY = 2 * NEW_KEYS  # at first
CAPACITY_MAX = 100 * NEW_KEYS
LATEST = (
    DAY_HOURS * (1 + 3 / EXPIRY_CELLS) + 1
)  # the age in hours at which a row is gone after a walk


class Week:
    """A pool, its upkeep as in a server, and the model: the hour at which each key was written."""

    def __init__(self, path: Path) -> None:
        self.rng = np.random.default_rng(SEED)
        self.pool = petps.create(path, durability="process")
        self.pool.create_model("m", P)
        self.pool.create_table(
            "items", dim=DIM, capacity=CAPACITY, feed="delta", model="m",
            expire_after=DAY_HOURS * 3600,
        )  # fmt: skip
        self.table = self.pool.table("items")
        self.instance = self.pool.native.resolve("m").id
        section = {"dim": DIM, "capacity": CAPACITY, "grow": "auto", "capacity_max": CAPACITY_MAX}
        settings = config.merge(
            None,
            {"pool": {"path": path}, "model": {"name": "m"}, "tables": {"items": section}},
            "test",
        )
        self.lines: list[str] = []
        self.upkeep: list[Growth | Expiry] = [
            Growth(settings, self.pool.native, self.lines.append),
            Expiry(self.pool.native, self.lines.append),
        ]
        self.written: dict[int, int] = {}
        self.next_key = 0
        self.most_full = 0.0

    def hour(self, hour: int) -> None:
        """Apply the rows of an hour of the log, commit it, and let the upkeep follow."""
        arriving = np.arange(self.next_key, self.next_key + NEW_KEYS)
        self.next_key += NEW_KEYS
        young = [key for key, at in self.written.items() if at > hour - DAY_HOURS]
        old = [key for key, at in self.written.items() if at < hour - LATEST]
        parts = [arriving]
        if young:
            parts.append(self.rng.choice(young, CHANGED))
        if old:
            parts.append(self.rng.choice(old, RETURNING))
        keys = np.unique(np.concatenate(parts)).astype(np.uint64)
        rows = np.full((len(keys), DIM), hour, np.float32).view(np.uint8).reshape(len(keys), -1)
        for piece in np.array_split(np.arange(len(keys)), 16):
            wait_until(lambda: self.fullness() < FULL_SHARE or not self.grows())
            report = self.table.apply(keys[piece], np.ascontiguousarray(rows[piece]), stamp=hour)
            assert report.refused == 0
            self.most_full = max(self.most_full, self.fullness())
        self.written.update(dict.fromkeys(keys.tolist(), hour))
        now = START_NS + hour * HOUR_NS
        self.pool.native.record_all_progress(
            [
                _native.Progress(
                    instance=self.instance, partition=p, run=1, seq=hour, offset=hour, version=hour
                )
                for p in range(P)
            ],
            [(self.instance, p, hour, now) for p in range(P)],
        )
        wait_until(self.is_walked)

    def fullness(self) -> float:
        status = self.table.status()
        return status.rows / status.capacity

    def grows(self) -> bool:
        return self.table.status().capacity < CAPACITY_MAX

    def is_walked(self) -> bool:
        return 0 <= self.table.status().expiry_delay < 3.5 * DAY_HOURS * 3600 / EXPIRY_CELLS

    def check(self, hour: int) -> None:
        """Compare every key of the week with the model."""
        keys = np.arange(self.next_key, dtype=np.uint64)
        rows, mask = self.pool.pull("items", keys, return_mask=True, model="m")
        at = np.array([self.written[key] for key in keys.tolist()])
        assert mask[at > hour - DAY_HOURS].all(), "a row is gone too early"
        assert not mask[at < hour - LATEST].any(), "a row stays too long"
        assert (rows[mask] == at[mask, None]).all(), "a row has an old value"

    def close(self) -> None:
        for part in self.upkeep:
            part.close()
        self.pool.close()


def test_a_week_stays_within_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("growth", "expiry"):  # 168 hours must not wait half a second each
        monkeypatch.setattr(f"petps.server.{module}.LOOK_SECONDS", 0.01)
    week = Week(tmp_path / "week.pool")
    try:
        slots_on_day: list[int] = []
        for hour in range(1, HOURS + 1):
            week.hour(hour)
            if hour % DAY_HOURS == 0:
                week.check(hour)
                slots_on_day.append(week.table.status().slots)
        status = week.table.status()
        most = make_plan(status.capacity, DIM, "f32", None)
        assert week.most_full <= 0.9
        assert status.capacity < CAPACITY_MAX
        assert status.expired > 4 * DAY_HOURS * NEW_KEYS
        assert len(set(slots_on_day[3:])) == 1, "expired rows' slots are not used again"
        info = week.pool.native.info()
        unit, metadata = info.unit_bytes, 2 << 20
        # An extent of clocks, and the last extent of slots, may be one unit more than planned.
        assert info.size_bytes <= most.while_growing + metadata + 4 * unit
        # The status counts the free maps in the pool too.
        in_pool = status.slots // 8 + unit // 512
        assert status.allocator_bytes <= most.memory - SERVER_BYTES + in_pool
        assert week.pool.verify().clean
        rows_before = week.table.status().rows
    finally:
        week.close()
    with petps.open(tmp_path / "week.pool") as again:
        assert again.table("items", "m").status().rows == rows_before
        assert again.verify().clean
    assert not [line for line in week.lines if "cannot" in line]
