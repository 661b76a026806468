"""Retention rules, and a store that another process than the trainer keeps in order.

Does not cover: merging itself (test_merge.py), the command (tests/python/cli).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.checkpoint import POLICIES, Checkpointer, Store, Table, tend
from petps.checkpoint.chunk import Keys
from petps.checkpoint.policy import Merged, Policy, TwoD
from petps.checkpoint.retention import Retention, parse_seconds
from petps.checkpoint.state import Version
from petps.checkpoint.tend import Tending, find_whole
from petps.checkpoint.verify import check_chunk
from petps.errors import DataLoss, FailedPrecondition, InvalidArgument, IoError
from tests.python.checkpoint.replay import Replay, check_versions

MINUTE, HOUR, DAY = 60, 3600, 86_400
TABLES = {"items": Table.of("items", 8)}
ALL_BYTES = 1 << 40


def entry(number: int, created_s: float) -> Version:
    return Version(number, "delta", int(created_s * 1e9), 0.0, 0, 0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("1h", HOUR), ("1.5d", 36 * HOUR), ("2w", 14 * DAY)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("", "no rule in a retention"),
        ("yearly=1h", "no rule 'yearly'"),
        ("all", "'' is not a duration"),
        ("all=1", "'1' is not a duration"),
        ("all=-1h", "'-1h' is not a duration"),
        ("all=1h,all=2h", "has a rule twice"),
    ],
)
def test_bad_rules_are_named(rules: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Retention.parse(rules)


def test_rules_as_text_and_as_a_mapping_are_the_same() -> None:
    rules = Retention.parse("all=1h, hourly=1d,daily=30d")
    assert rules == Retention.parse({"all": "1h", "hourly": "1d", "daily": "30d"})
    assert rules == Retention(all=HOUR, hourly=DAY, daily=30 * DAY)


def test_versions_thin_out_with_age_although_each_purge_forgets_more() -> None:
    """A version every ten minutes for 40 days, purged after each."""
    rules = Retention.parse("all=1h,hourly=1d,daily=30d")
    held: list[Version] = []
    start = 20_000 * DAY
    for number in range(40 * 24 * 6):
        now = start + number * 10 * MINUTE
        held.append(entry(number + 1, now))
        kept = rules.choose(held, int((now + 1) * 1e9))
        held = [version for version in held if version.version in kept]
    ages = [now - version.created_ns / 1e9 for version in held]
    assert sum(age < HOUR for age in ages) == 6
    # The newest of each hour of the last day, and of each day of the last 30 days.
    hours = {int((now - age) // HOUR) for age in ages if age < DAY}
    assert len(hours) == 24
    days = {int((now - age) // DAY) for age in ages}
    assert len(days) == 30
    assert len(held) == 6 + 23 + 29
    for version in held[:-6]:  # each is the last of its hour
        assert version.created_ns // 10**9 % HOUR == 50 * MINUTE


def test_the_newest_version_stays_whatever_its_age() -> None:
    assert Retention(all=1.0).choose([entry(1, 0), entry(2, 1)], 10**18) == {2}


def replay_of(versions: int) -> Replay:
    random = np.random.default_rng(5)

    def keys(count: int) -> dict[str, Keys]:
        return {"items": np.unique(random.integers(0, 3000, count)).astype("<u8")}

    return Replay(TABLES, [keys(3000), *(keys(300) for _ in range(versions - 1))], deletes=0.1)


def write(store: Store, replay: Replay, versions: range) -> None:
    """Write versions as a trainer does that leaves splitting and merging to another process."""
    writer = Checkpointer(store, POLICIES["consecutive"](), replay)
    for version in versions:
        replay.now = version
        writer.write(version, {"dense": b"%d" % version})


def tending(folder: Path, policy: Policy, retention: Retention | None = None) -> Tending:
    return Tending(Store.open(folder), policy, retention, verify_bytes=ALL_BYTES)


@pytest.mark.parametrize("policy", [TwoD(ratio=0.0), Merged(stride=2)])
def test_rounds_beside_a_trainer_change_no_version(tmp_path: Path, policy: Policy) -> None:
    replay = replay_of(12)
    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    tends = tending(tmp_path / "store", policy)
    for first in range(1, 13, 3):
        write(trainer, replay, range(first, first + 3))
        before = trainer.state.number
        done = tends.round()
        assert done.arranged
        assert done.damaged == {}
        assert done.whole == first + 2
        assert trainer.refresh().number > before  # something was arranged
        assert set(done.spans) == {"arrange", "verify"} | ({"base"} if done.base else set())
    check_versions(Store.open(tmp_path / "store"), replay, list(range(1, 13)))
    assert trainer.verify() == []
    idle = tends.round()
    assert (idle.checked, idle.arranged, idle.spans) == (0, False, {})  # nothing is read twice


class Disturbed(TwoD):
    """A policy during whose first rounds the trainer commits a version."""

    def __init__(self, trainer: Store, replay: Replay, versions: list[int]) -> None:
        super().__init__(ratio=0.0)
        self.trainer, self.replay, self.versions = trainer, replay, versions

    def arrange_all(self, store: Store, done: Callable[[], None] = lambda: None) -> None:
        if self.versions:
            version = self.versions.pop(0)
            write(self.trainer, self.replay, range(version, version + 1))
        super().arrange_all(store, done)


def test_a_commit_of_the_trainer_meanwhile_is_no_error(tmp_path: Path) -> None:
    replay = replay_of(8)
    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    write(trainer, replay, range(1, 5))
    policy = Disturbed(trainer, replay, [5, 6, 7])
    done = tending(tmp_path / "store", policy).round()
    assert done.arranged
    assert policy.versions == []
    check_versions(Store.open(tmp_path / "store"), replay, list(range(1, 8)))


def test_an_error_without_another_writer_is_reported_and_the_round_goes_on(
    tmp_path: Path,
) -> None:
    class Broken(TwoD):
        def arrange_all(self, store: Store, done: Callable[[], None] = lambda: None) -> None:
            raise FailedPrecondition("it is broken")

    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    write(trainer, replay_of(3), range(1, 4))
    done = tending(tmp_path / "store", Broken(), Retention(all=0.001)).round()
    assert not done.arranged
    assert isinstance(done.error, FailedPrecondition)
    assert done.dropped == [1, 2]
    began, seconds = done.spans["purge"]
    assert 0 <= seconds <= time.time() - began < HOUR


def test_an_empty_store_is_left_alone(tmp_path: Path) -> None:
    Store.create(tmp_path / "store", "m", list(TABLES.values()))
    done = tending(tmp_path / "store", TwoD(), Retention(all=HOUR)).round()
    assert (done.arranged, done.whole, done.dropped) == (False, None, [])


def test_damage_is_found_and_the_newest_whole_version_survives(tmp_path: Path) -> None:
    replay = replay_of(6)
    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    write(trainer, replay, range(1, 7))
    (chunk,) = (c for c in trainer.state.lineage.chunks if c.first == 5)
    path = tmp_path / "store" / chunk.file
    body = bytearray(path.read_bytes())
    body[chunk.offset + chunk.length // 2] ^= 1
    path.write_bytes(body)

    done = tending(tmp_path / "store", POLICIES["consecutive"](), Retention(all=0.001)).round()
    assert sorted(done.damaged) == [5, 6]
    assert chunk.file in done.damaged[5]
    assert done.whole == 4
    assert done.dropped == [1, 2, 3, 5]  # the newest stays, and the newest whole one
    store = Store.open(tmp_path / "store")
    assert find_whole(store) == 4
    assert store.rollback(4) == [6]
    check_versions(store, replay, [4])
    assert store.verify() == []


def test_a_damaged_part_counts_too(tmp_path: Path) -> None:
    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    write(trainer, replay_of(2), range(1, 3))
    part = trainer.state.version(2).parts["dense"]
    (tmp_path / "store" / part.file).write_bytes(b"x")
    done = tending(tmp_path / "store", POLICIES["consecutive"]()).round()
    assert list(done.damaged) == [2]
    assert done.whole == 1


def test_a_store_without_a_whole_version_says_so(tmp_path: Path) -> None:
    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    write(trainer, replay_of(1), range(1, 2))
    (chunk,) = trainer.state.lineage.chunks
    (tmp_path / "store" / chunk.file).write_bytes(b"x")
    with pytest.raises(FailedPrecondition, match="no whole version to roll back to"):
        find_whole(trainer)


def test_a_version_that_is_written_again_after_a_rollback_is_read_again(tmp_path: Path) -> None:
    replay = replay_of(3)
    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    write(trainer, replay, range(1, 3))
    part = trainer.state.version(2).parts["dense"]
    (tmp_path / "store" / part.file).write_bytes(b"x")
    tends = tending(tmp_path / "store", Policy())
    assert list(tends.round().damaged) == [2]
    trainer.rollback(1)
    write(trainer, replay, range(2, 3))
    done = tends.round()
    assert (done.damaged, done.whole, done.unread) == ({}, 2, 0)


def test_chunks_that_another_writer_replaces_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first chunk is read, the trainer merges, and removes the files of the others."""
    replay = replay_of(6)
    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    write(trainer, replay, range(1, 7))
    merging = [Merged(stride=2)]

    def check(*given: Any) -> list[str]:
        if merging:
            merging.pop().arrange_all(trainer)
            trainer.purge(1)
            trainer.keep(6)  # the next state after it removes the files
            trainer.keep(6, False)
        return check_chunk(*given)

    monkeypatch.setattr(tend, "check_chunk", check)
    tends = tending(tmp_path / "store", Policy())
    assert tends.round().damaged == {}
    done = tends.round()  # reads what replaced them
    assert (done.damaged, done.whole) == ({}, 6)
    assert find_whole(Store.open(tmp_path / "store")) == 6


def test_nothing_is_deleted_before_a_whole_version_is_known(tmp_path: Path) -> None:
    """The newest version is damaged, and a round reads too little to see that at once."""
    replay = replay_of(4)
    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    write(trainer, replay, range(1, 4))
    writer = Checkpointer(trainer, POLICIES["full"](), replay)  # version 4 is a base of its own
    replay.now = 4
    writer.write(4, {"dense": b"4"})
    (chunk,) = trainer.state.lineage.chunks
    (tmp_path / "store" / chunk.file).write_bytes(b"x")
    tends = Tending(Store.open(tmp_path / "store"), Policy(), Retention(all=0.001), verify_bytes=1)
    rounds = [tends.round() for _ in range(12)]
    assert rounds[0].dropped == []
    assert [version for done in rounds for version in done.dropped] == [1, 2]
    assert rounds[-1].whole == 3
    assert [entry.version for entry in trainer.refresh().versions()] == [3, 4]
    assert find_whole(trainer) == 3


def test_what_the_disk_refuses_is_left_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    write(trainer, replay_of(3), range(1, 4))

    def refuse(*given: Any) -> list[str]:
        if given[2].first == 3:
            raise IoError("a bad sector")
        return check_chunk(*given)

    monkeypatch.setattr(tend, "check_chunk", refuse)
    tends = tending(tmp_path / "store", Policy(), Retention(all=0.001))
    for _ in range(2):
        done = tends.round()
        assert isinstance(done.error, IoError)
        assert (done.damaged, done.whole, done.unread) == ({}, 2, 1)
    assert [entry.version for entry in trainer.refresh().versions()] == [2, 3]
    assert find_whole(trainer) == 2


def test_splits_follow_each_delta_between_two_rounds(tmp_path: Path) -> None:
    """Versions 2 to 6 are committed between two rounds: each splits the chunks before it."""
    replay = replay_of(6)
    whole, late = (
        Store.create(tmp_path / name, "m", list(TABLES.values())) for name in ("whole", "late")
    )
    for version in range(1, 7):
        write(whole, replay, range(version, version + 1))
        TwoD(ratio=0.0, resets=False).arrange(whole)
    write(late, replay, range(1, 7))
    tending(tmp_path / "late", TwoD(ratio=0.0, resets=False)).round()

    def spans(store: Store) -> list[tuple[int, int, int]]:
        chunks = store.refresh().lineage.chunks
        return sorted((chunk.first, chunk.end, chunk.rows) for chunk in chunks)

    assert spans(late) == spans(whole)
    check_versions(late, replay, list(range(1, 7)))


def test_a_round_reads_no_more_than_it_may(tmp_path: Path) -> None:
    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    write(trainer, replay_of(5), range(1, 6))
    tends = Tending(Store.open(tmp_path / "store"), Policy(), None, verify_bytes=1)
    rounds = [tends.round() for _ in range(11)]
    assert sum(done.checked for done in rounds) == 5
    assert max(done.checked for done in rounds) == 1
    assert [done.unread for done in rounds] == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0]


def test_bases_are_written_where_the_policy_asks(tmp_path: Path) -> None:
    replay = replay_of(8)
    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    tends = tending(tmp_path / "store", Merged(stride=2, every=3))
    bases = []
    for version in range(1, 9):
        write(trainer, replay, range(version, version + 1))
        bases.append(tends.round().base)
        trainer.refresh()
    assert bases == [None, None, None, 4, None, None, 7, None]
    assert [line.base_version for line in trainer.state.lineages] == [1, 4, 7]
    check_versions(Store.open(tmp_path / "store"), replay, list(range(1, 9)))


def test_bases_may_be_left_to_the_trainer(tmp_path: Path) -> None:
    replay = replay_of(6)
    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    write(trainer, replay, range(1, 7))
    policy = Merged(stride=2, every=3)
    tends = Tending(
        Store.open(tmp_path / "store"), policy, None, verify_bytes=ALL_BYTES, resets=False
    )
    assert tends.round().base is None
    assert policy.is_reset_due(trainer)


def test_a_damaged_chunk_below_a_base_that_is_due_is_reported(tmp_path: Path) -> None:
    trainer = Store.create(tmp_path / "store", "m", list(TABLES.values()))
    write(trainer, replay_of(4), range(1, 5))
    (chunk,) = (c for c in trainer.state.lineage.chunks if c.first == 1)
    (tmp_path / "store" / chunk.file).write_bytes(b"x")
    done = tending(tmp_path / "store", Merged(stride=9, every=3)).round()
    assert done.base is None
    assert isinstance(done.error, DataLoss)
    assert sorted(done.damaged) == [1, 2, 3, 4]
