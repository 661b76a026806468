"""The tracker against plain sets, under random calls of trainers and tenants.

Does not cover: threads, a disk that refuses (test_tracker.py).
"""

from __future__ import annotations

import tempfile
from typing import Literal

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from petps.train.tracker import Reading, Tracker

# dense: so small that 5 ids become bits; state: ids with the number of their step.
TABLES: dict[str, int | None] = {"dense": 300, "sparse": None, "state": None}
TENANTS = ("checkpoint", "publish", "audit")
IDS = {
    "dense": st.lists(st.integers(0, 299), max_size=40),
    "sparse": st.lists(st.integers(0, 20) | st.integers(0, 2**64 - 1), max_size=20),
    "state": st.lists(st.integers(0, 30), max_size=20),
}
Missed = dict[str, dict[int, int]]  # by table and id: the state that must be returned


class TrackerModel(RuleBasedStateMachine):
    """A model of each tenant: the ids not acknowledged, in the order of the segments it read."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.missed: dict[str, list[Missed]] = {}  # the last element is still growing
        self.readings: dict[str, tuple[Reading, int]] = {}  # with the number of parts covered

    @initialize(keep=st.sampled_from(["first", "last"]), budget=st.sampled_from([None, 64, 2000]))
    def begin(self, keep: Literal["first", "last"], budget: int | None) -> None:
        self.keep = keep
        self.budget = budget
        self.folder = tempfile.TemporaryDirectory(prefix="petps-tracker-")
        spill = None if budget is None else self.folder.name
        self.tracker = Tracker(TABLES, keep=keep, memory_bytes=budget, spill=spill)

    @rule(data=st.data(), table=st.sampled_from(sorted(TABLES)), signed=st.booleans())
    def track(self, data: st.DataObject, table: str, signed: bool) -> None:
        self.step += 1
        ids = data.draw(IDS[table])
        signed = signed and max(ids, default=0) < 2**63
        array = np.array(ids, np.int64 if signed else np.uint64)
        states = np.full((len(ids), 2), self.step) if table == "state" else None
        self.tracker.track(table, array, states)
        for parts in self.missed.values():
            for number in ids:
                value = self.step if table == "state" else 0
                if self.keep == "last":
                    parts[-1].setdefault(table, {})[number] = value
                else:
                    parts[-1].setdefault(table, {}).setdefault(number, value)

    @rule()
    def compact(self) -> None:
        self.tracker.compact()

    @rule(tenant=st.sampled_from(TENANTS))
    def come_or_go(self, tenant: str) -> None:
        if tenant in self.missed:
            self.tracker.remove_tenant(tenant)
            del self.missed[tenant]
            self.readings.pop(tenant, None)
        else:
            self.tracker.add_tenant(tenant)
            self.missed[tenant] = [{}]

    @precondition(lambda self: self.missed)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from(sorted(self.missed)))
        reading = self.tracker.read(tenant)
        self.readings[tenant] = (reading, len(self.missed[tenant]))
        self.missed[tenant].append({})
        self.compare(tenant)

    def compare(self, tenant: str) -> None:
        reading, parts = self.readings[tenant]
        for table in TABLES:
            expected: dict[int, int] = {}
            for part in self.missed[tenant][:parts]:
                given = part.get(table, {})
                expected = {**expected, **given} if self.keep == "last" else {**given, **expected}
            touched = reading.touched(table)
            assert touched.ids.tolist() == sorted(expected)
            if table == "state" and expected:
                assert touched.state is not None
                values = [[expected[key]] * 2 for key in sorted(expected)]
                assert touched.state.tolist() == values

    @precondition(lambda self: self.readings)
    @rule(data=st.data())
    def look_again(self, data: st.DataObject) -> None:
        self.compare(data.draw(st.sampled_from(sorted(self.readings))))

    @precondition(lambda self: self.readings)
    @rule(data=st.data(), acknowledged=st.booleans())
    def end(self, data: st.DataObject, acknowledged: bool) -> None:
        tenant = data.draw(st.sampled_from(sorted(self.readings)))
        reading, parts = self.readings.pop(tenant)
        if acknowledged:
            reading.acknowledge()
            del self.missed[tenant][:parts]
        else:
            reading.abandon()

    @invariant()
    def is_bounded(self) -> None:
        if not hasattr(self, "tracker"):
            return
        if not self.missed:
            assert (self.tracker.resident_bytes, self.tracker.spilled_bytes) == (0, 0)
        if self.budget is None:
            assert self.tracker.segments <= len(self.missed) + len(self.readings)
        else:
            # 9/8, and one track() of at most 40 ids and 20 states of 16 bytes.
            assert self.tracker.resident_bytes <= self.budget * 9 // 8 + 40 * 8 + 20 * 24

    def teardown(self) -> None:
        if hasattr(self, "tracker"):
            self.tracker.close()
            self.folder.cleanup()


TestTrackerModel = TrackerModel.TestCase
TestTrackerModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
