"""Merging in three steps: the plan, its execution in another process, and refusals.

Does not cover: that versions stay the same (test_store.py), crashes (test_store_crash.py), Ray
(tests/train/train_merge_on_ray.py).
"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from petps.checkpoint import POLICIES, Store
from petps.checkpoint.files import FsspecFiles, LocalFiles, open_files
from petps.checkpoint.merge import (
    Executed,
    InPlace,
    MergePlan,
    apply,
    count_merges,
    execute,
    plan_merges,
    run_plan,
)
from petps.checkpoint.policy import Merged, TwoD
from petps.checkpoint.store import BASE
from petps.errors import DataLoss, FailedPrecondition, IoError, Unimplemented
from tests.python.checkpoint.replay import Replay, assert_same, check_versions
from tests.python.checkpoint.test_store import TABLES, VERSIONS, steps, written


@pytest.fixture
def replay() -> Replay:
    return Replay(TABLES, steps(41), deletes=0.1)


@pytest.fixture
def store(tmp_path: Path, replay: Replay) -> Store:
    return written(tmp_path / "store", POLICIES["consecutive"](), replay)


ALL = list(range(1, VERSIONS + 1))


def test_a_plan_is_executed_by_another_process(
    store: Store, replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is plain data; a relative folder stays the same one in any working directory."""
    monkeypatch.chdir(tmp_path)
    relative = Store.open("store")
    plans = plan_merges(relative, 4)
    assert [plan.deltas for plan in plans] == [4] * 7
    assert len({chunk for plan in plans for chunk in plan.chunks}) == sum(
        len(plan.chunks) for plan in plans
    )
    text = (
        "import pickle, sys; from petps.checkpoint.merge import run_plan;"
        "plans = pickle.load(sys.stdin.buffer);"
        "sys.stdout.buffer.write(pickle.dumps([run_plan(plan) for plan in plans]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], input=pickle.dumps(plans), capture_output=True, cwd="/",
        check=True,
    )  # fmt: skip
    before = relative.state
    outcomes: list[Executed] = pickle.loads(done.stdout)
    assert relative.refresh() is before, "executing changes no state"
    order = random.Random(3)
    order.shuffle(outcomes)
    for outcome in outcomes:
        apply(relative, outcome)
    assert sorted({c.layer for c in relative.state.lineage.open_delta_chunks()}) == [1, 2]
    check_versions(Store.open("store"), replay, ALL)


def test_files_are_pickled_as_their_address(tmp_path: Path) -> None:
    again = pickle.loads(pickle.dumps(FsspecFiles(f"local://{tmp_path}", auto_mkdir=True)))
    assert again.name == f"local://{tmp_path}"
    again.write("data/x", [b"1"])
    assert pickle.loads(pickle.dumps(open_files(tmp_path))).read("data/x") == b"1"


@pytest.mark.parametrize("stride", [2, 3, 5])
def test_count_merges_tells_how_many_are_due(store: Store, replay: Replay, stride: int) -> None:
    due = count_merges(store.state.lineage, stride)
    merges: list[int] = []
    Merged(stride=stride).arrange_all(store, lambda: merges.append(1))
    assert len(merges) == due > 0
    assert count_merges(store.state.lineage, stride) == 0
    check_versions(store, replay, ALL)


class Failing:
    """An executor that fails the plans which begin at some versions."""

    def __init__(self, *firsts: int) -> None:
        self.firsts = firsts

    def run(self, plans: Sequence[MergePlan]) -> Iterator[Executed]:
        """See Executor."""
        for plan in plans:
            if plan.chunks[0].first in self.firsts:
                yield Executed(plan, (), IoError(f"no luck with {plan.chunks[0].first}"), 0.0)
            else:
                yield run_plan(plan)


@pytest.mark.parametrize("first", [2, 8, 14, 26])
def test_a_failed_merge_does_not_block_others(store: Store, replay: Replay, first: int) -> None:
    """Do the other merges, then raise the error; no merge jumps over the chunks that stayed."""
    with pytest.raises(IoError, match=f"no luck with {first}"):
        Merged(stride=3, executor=Failing(first)).arrange_all(store)
    layers = {c.first: c.layer for c in store.state.lineage.open_delta_chunks()}
    assert layers[first] == layers[first + 1] == layers[first + 2] == 1
    assert max(layers.values()) > 1
    check_versions(store, replay, ALL)
    Merged(stride=2).arrange_all(store)
    check_versions(store, replay, ALL)


def test_only_neighbours_are_merged() -> None:
    """A merge must not jump over another layer: of two rows of a key the later one counts."""
    from petps.checkpoint.merge import _runs

    assert list(_runs([3, 2, 2, 1, 1, 1], 2)) == [slice(1, 3), slice(3, 5)]
    assert list(_runs([1, 2, 1, 2, 1], 2)) == []
    assert list(_runs([1, 1, 2, 1], 3)) == []
    assert list(_runs([], 2)) == []


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("stride", [2, 3])
def test_merging_what_2d_has_split_changes_no_version(
    tmp_path: Path, stride: int, seed: int
) -> None:
    """Splits leave ended chunks above older ones; their rows still count in their versions."""
    replay = Replay(TABLES, steps(seed), deletes=0.1)
    store = written(tmp_path / "store", TwoD(ratio=0.3, resets=False), replay)
    assert any(not chunk.is_open for chunk in store.state.lineage.chunks)
    Merged(stride=stride, every=1 << 20).arrange_all(store)
    check_versions(store, replay, list(range(1, VERSIONS + 1)))
    store.rollback(VERSIONS // 2)
    check_versions(store, replay, list(range(1, VERSIONS // 2 + 1)))


def test_a_merge_of_chunks_that_are_gone_is_refused(store: Store, replay: Replay) -> None:
    plans = plan_merges(store, 2)
    first, second, last = run_plan(plans[0]), run_plan(plans[1]), run_plan(plans[-1])
    other = Store.open(store.name)
    newest = last.plan.first - 1
    other.rollback(newest)  # drops the second delta of the last plan
    with pytest.raises(FailedPrecondition, match="was purged, split or rolled back meanwhile"):
        apply(store, last)
    assert store.refresh().number == other.state.number
    apply(store, first)  # above the state that the other writer committed
    other.refresh()
    base = {name: replay.at(name, newest) for name in TABLES}
    other.write(newest + 1, base, kind=BASE)
    before = other.state.number
    with pytest.raises(FailedPrecondition, match=r"the merge of 2 deltas, 4 to 5 is given up"):
        apply(store, second)
    assert store.state.number == before
    files = LocalFiles(store.name)
    named = {chunk.file for lineage in store.state.lineages for chunk in lineage.chunks}
    orphans = {outcome.merged[0].file for outcome in (second, last)}
    assert not orphans & named
    assert orphans <= {f"data/{name}" for name in files.list("data")}
    for path in (Path(store.name) / "data").iterdir():
        os.utime(path, (1, 1))
    store.purge(100)
    assert not orphans & {f"data/{name}" for name in files.list("data")}
    for version in range(1, newest + 2):
        for name, found in store.restore(version).items():
            assert_same(found, replay.at(name, min(version, newest)))


def test_a_bundle_that_is_gone_is_not_committed(store: Store, replay: Replay) -> None:
    (done, *_) = InPlace().run(plan_merges(store, 2)[:1])
    store.files.remove(done.merged[0].file)
    with pytest.raises(DataLoss, match="is gone or cut: merge again"):
        apply(store, done)
    check_versions(store, replay, ALL)


def test_a_damaged_chunk_is_refused(store: Store) -> None:
    (plan, *_) = plan_merges(store, 2)
    chunk = plan.chunks[1]
    altered = replace(plan, chunks=(plan.chunks[0], replace(chunk, checksum="0" * 16)))
    with pytest.raises(DataLoss, match=f"{chunk.file} at {chunk.offset} does not fit its checksum"):
        execute(altered)
    assert len(store.files.list("data")) == VERSIONS, "no partial bundle is left"


def test_without_ray_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from petps.checkpoint.on_ray import OnRay

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Unimplemented, match=r"pip install petps\[ray\]"):
        OnRay()
