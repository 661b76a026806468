"""The list of commits that a trainer's version carries: how far a replica built from it differs.

The reference is a native clock that has counted every commit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petps import _native
from petps.checkpoint import commits as commits_module
from petps.checkpoint.commits import COMMITS_PART, ENTRIES_MAX, Commits, newer_stamps
from petps.errors import DataLoss

START_NS = 1_700_000_000 * 10**9
SECOND_NS = 10**9
# In seconds. Commits of an example are from a hundredth of a second to some days apart.
AGES = (1, 7, 48, 600, 3600, 86400, 30 * 86400)
CELLS = 48
Clock = tuple[int, int, int, list[int], int, int]


class Clocks:
    """Native clocks of one partition, one for each of AGES."""

    def __init__(self) -> None:
        self.tables = _native.Tables.create("", background=False)
        self.instance = self.tables.create_instance("m", "m@1", 1).id
        self.ids = [
            self.tables.create_table(
                f"t{age}", instance=self.instance, dim=1, dtype="f32", capacity=1, feed="delta",
                expire_after=age,
            ).id
            for age in AGES
        ]  # fmt: skip

    def count(self, commits: list[tuple[int, int]]) -> None:
        progress = _native.Progress(
            instance=self.instance, partition=0, run=1, seq=1, offset=0, version=0,
            state="following", target=0, publisher=0,
        )  # fmt: skip
        self.tables.record_all_progress(
            [progress], [(self.instance, 0, version, time_ns) for version, time_ns in commits]
        )

    def read(self) -> list[Clock]:
        return [self.tables.clocks(number)[0] for number in self.ids]

    def close(self) -> None:
        self.tables.close()


def make_times(seed: int, count: int) -> Iterator[int]:
    """Yield the times of commits: phases of one pace, pauses, jumps, clocks that go back."""
    random = np.random.default_rng(seed)
    now, pace, odd = float(START_NS), 1.0, random.random() * 0.05
    for _ in range(count):
        if random.random() < 0.02:
            pace = 10.0 ** random.uniform(-2, 4)
        step = pace * random.exponential()
        if random.random() < odd:
            step = float(random.choice([-1, 1, 1])) * 10.0 ** random.uniform(-1, 6)
        now = max(1.0, now + step * SECOND_NS)
        yield int(now)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 900), st.integers(0, 200))
def test_a_replica_that_reads_the_list_differs_by_less_than_two_cells(
    seed: int, before: int, later: int
) -> None:
    """The list is thinned often; then both replicas read the same commits."""
    check_replicas(list(make_times(seed, before + later)), before)


def test_clocks_that_flap_make_no_row_old() -> None:
    """They show much time, but event time stands still, so the commits before are not old."""
    near = [START_NS + number * SECOND_NS for number in range(900)]
    far = [near[-1] + 1000 * (number % 2) * SECOND_NS for number in range(120)]
    later = [near[-1] + 100 * number * SECOND_NS for number in range(120)]
    check_replicas([*near, *far, *later], len(near) + len(far))


def check_replicas(times: list[int], before: int) -> None:
    """Compare a clock that counts the thinned list of ``before`` commits with one of all."""
    pairs = [(3 * number + 5, time_ns) for number, time_ns in enumerate(times)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commits_module, "COMMITS_PER_THINNING", 16)
        commits = Commits()
        for version, time_ns in pairs[:before]:
            commits = commits.add(version, time_ns, 0)
    assert commits.last_version == pairs[before - 1][0]
    whole, thinned = Clocks(), Clocks()
    listed = zip(commits.versions.tolist(), commits.times_ns.tolist(), strict=True)
    thinned.count(list(listed))
    counted_at: list[list[int]] = [[] for _ in AGES]  # exact event times of the commits so far
    for number, pair in enumerate(pairs):
        whole.count([pair])
        if number >= before:
            thinned.count([pair])
        for ages, clock in zip(counted_at, whole.read(), strict=True):
            ages.append(clock[1])
        if number >= before - 1:
            check_agree(whole.read(), thinned.read(), counted_at, pairs)
    whole.close()
    thinned.close()


def check_agree(
    whole: list[Clock],
    thinned: list[Clock],
    counted_at: list[list[int]],
    pairs: list[tuple[int, int]],
) -> None:
    """Check when rows of each version go, in cells: both clocks obey the rule of EXPIRY.md."""
    versions = np.array([version for version, _ in pairs[: len(counted_at[0])]], np.uint64)
    for age, exact, near, counted in zip(AGES, whole, thinned, counted_at, strict=True):
        cells_old = (exact[1] - np.array(counted)) / exact[0]
        for name, clock, late in (("whole", exact, 1), ("thinned", near, 2)):
            has_gone = versions < np.uint64(clock[3][-1])
            assert (cells_old[has_gone] >= CELLS).all(), f"{age} s, {name}: too early"
            assert (cells_old[~has_gone] < CELLS + late).all(), f"{age} s, {name}: too late"


def test_the_list_stays_short() -> None:
    commits = Commits()
    now = START_NS
    for version in range(1, 20_000):
        now += SECOND_NS * (1 + version % 7)
        commits = commits.add(version, now, version)
    assert len(commits) < 1000
    assert int(commits.versions[0]) == 1, "the first commit stays"
    assert commits.versions[-30:].tolist() == list(range(20_000 - 30, 20_000))
    assert (commits.times_ns[1:] > commits.times_ns[:-1]).all()


def test_a_clock_that_flaps_cannot_make_the_list_long() -> None:
    commits = Commits()
    for version in range(1, ENTRIES_MAX + 500):
        commits = commits.add(version, START_NS + (version % 2) * 10**15, version)
    assert len(commits) < ENTRIES_MAX + 64
    assert commits.last_version == ENTRIES_MAX + 499


def test_versions_that_begin_again_end_the_list_before_them() -> None:
    commits = Commits().add(5, 10, 1).add(8, 20, 2).add(9, 30, 3).add(8, 40, 3)
    assert commits.versions.tolist() == [5, 8]
    assert commits.times_ns.tolist() == [10, 40]


def test_steps_and_versions() -> None:
    base = (7 << 32) - 2  # stamps wrap between these versions
    commits = Commits().add(base, 10, 100).add(base + 4, 20, 110).add(base + 6, 30, 110)
    steps = np.array([1, 100, 101, 110, 111, 500], np.uint64)
    versions = commits.version_after(steps, base + 7)
    assert versions.tolist() == [base, base, base + 4, base + 4, base + 7, base + 7]
    stamps = np.array([base - 9, base, base + 3, base + 4, base + 7], np.uint64).astype(np.uint32)
    found = commits.step_of(stamps)
    assert found.tolist() == [100, 100, 110, 110, 111]
    assert commits.version_after(found, base + 7).tolist()[1:] == [
        base, base + 4, base + 4, base + 7,
    ]  # fmt: skip
    assert Commits().step_of(np.array([0, 1], np.uint32)).tolist() == [1, 1]
    restarted = commits.without_steps()
    assert restarted.version_after(np.array([1, 90], np.uint64), 99).tolist() == [99, 99]


def test_a_floor_makes_older_stamps_newer() -> None:
    floor = 5 << 32
    stamps = np.array([floor - 3, floor, floor + 2, floor + 9], np.uint64).astype(np.uint32)
    assert newer_stamps(stamps, 0, floor + 4).tolist() == stamps.tolist()
    assert newer_stamps(stamps, floor, floor + 4).tolist() == [0, 0, 2, 9]  # 9: not committed yet
    assert Commits().with_floor(7).with_floor(3).floor == 7


@pytest.mark.parametrize("count", [0, 1, 70])
def test_the_part_keeps_the_list(count: int) -> None:
    commits = Commits().with_floor((1 << 64) - 1)
    for version in range(1, count + 1):
        commits = commits.add(version << 40, START_NS + version, version // 2)
    body = commits.parts()[COMMITS_PART]
    again = Commits.parse(body, "here")
    assert again.parts()[COMMITS_PART] == body
    assert again.floor == (1 << 64) - 1
    assert again.versions.tolist() == commits.versions.tolist()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]\n",
        b"{}\n",
        b'{"commits": 1, "floor": 0}\n' + bytes(23),
        b'{"commits": true, "floor": 0}\n' + bytes(24),
        b'{"commits": -1, "floor": 0}\n',
        b'{"commits": 0, "floor": -1}\n',
        b'{"commits": 2, "floor": 0}\n' + bytes(48),  # the same version twice
        b"[" * 100_000,
    ],
)
def test_a_damaged_part_is_data_loss(body: bytes) -> None:
    with pytest.raises(DataLoss, match="here"):
        Commits.parse(body, "here")
