"""A training in one process, without a Pipeline: its versions are written behind it.

The trainer of test_output.py, whose state after any step is known by training again. The
environment of these tests has no PyTorch, which such a training does not need.
Does not cover: a model's dense weights, errors of store and log (tests/train/train_ranks.py and
train_outages.py, with ranks).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.checkpoint import POLICIES, Base, Quantising, Store
from petps.checkpoint.files import LocalFiles
from petps.delta.directory import DirectoryLog
from petps.errors import FailedPrecondition, InvalidArgument
from petps.publish import Publisher
from petps.train import ArrayTable, Every, Links, LoneTables, RankedOutput, open_store, publisher_of
from petps.train.ranks import Written
from petps.train.tracker import Tracker
from tests.python.train.test_output import (
    SCHEMAS,
    P,
    Served,
    Trainer,
    assert_holds,
    replayed,
    touched_only,
)

STEPS = 60
GENEROUS = 120.0


class Training:
    """A trainer with its output, in a folder. ``with`` restores the newest version."""

    def __init__(self, folder: Path, policy: str = "2d", **options: Any) -> None:
        self.trainer = Trainer(Tracker())
        self._log = DirectoryLog(folder / "log", partitions=P)
        tracker = self.trainer.users._tracker
        tables = LoneTables(tracker, self.trainer.tables, partitions=P)
        links = Links.alone()
        store = options.pop("store", None) or open_store(
            folder / "store", "m", tables, links, quantising=options.pop("quantising", None)
        )
        self.publisher: Publisher = publisher_of(
            self._log, "m", tables, links.dense, schemas=SCHEMAS.values()
        )
        self.written: list[Written] = []
        self.output = RankedOutput(
            tables, links, store=store, policy=POLICIES[policy](), publisher=self.publisher,
            staging=folder / "staging", chunk_bytes=1 << 16, on_version=self.written.append,
            **{"checkpoint": Every(steps=7), "publish": Every(steps=3), **options},
        )  # fmt: skip

    def __enter__(self) -> Training:
        restored = self.output.restore()
        self.output.begin_run(restored)
        self.trainer.step = restored.step
        self.reader = restored.reader
        self.output.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with closing(self._log):
            self.output.__exit__(*error)

    def train(self, steps: int, *, wait: bool = False) -> None:
        for _ in range(steps):
            self.trainer.train()
            self.output.after(self.trainer.step, b"%d" % self.trainer.step)
            if wait:
                self.output.wait()

    def steps_of(self, kind: str) -> dict[int, int]:
        return {entry.version: entry.step for entry in self.written if entry.kind == kind}


def check_log(folder: Path, steps_by_version: dict[int, int]) -> None:
    with closing(DirectoryLog(folder / "log", partitions=P)) as log:
        served = Served(log).versions
    assert served.keys() == steps_by_version.keys()
    first = Trainer()
    for version, step in steps_by_version.items():
        expected = touched_only(replayed(step).rows(), first)
        assert served[version]["items"] == expected["items"], f"version {version}, step {step}"
        users = {key: served[version]["users"].get(key) for key in expected["users"]}
        assert users == expected["users"], f"version {version}, step {step}"


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("wait", [False, True], ids=["behind", "waiting"])
def test_every_version_equals_the_replay(tmp_path: Path, policy: str, wait: bool) -> None:
    """Whether each version ends before the next step, or several steps later."""
    with Training(tmp_path, policy) as training:
        training.train(STEPS, wait=wait)
    store = Store.open(tmp_path / "store")
    steps = [entry.version for entry in store.state.versions()]
    assert steps == sorted(training.steps_of("checkpoint").values())
    if wait:
        assert steps == list(range(7, STEPS, 7))
    for step in steps:
        assert_holds(store, step, replayed(step))
    check_log(tmp_path, training.steps_of("publish"))


def test_a_training_continues_where_its_newest_version_is(tmp_path: Path) -> None:
    with Training(tmp_path) as training:
        training.train(20, wait=True)
    with Training(tmp_path) as again:
        assert again.trainer.step == 14
        assert again.reader == b"14"
        again.train(STEPS - 14, wait=True)
    assert again.trainer.rows() == replayed(STEPS).rows()
    store = Store.open(tmp_path / "store")
    assert_holds(store, 56, replayed(56))
    with closing(DirectoryLog(tmp_path / "log", partitions=P)) as log:
        last = Served(log).versions[max(again.steps_of("publish"))]
    assert last["items"] == replayed(STEPS).rows()["items"]


class HeldFiles(LocalFiles):
    """Files whose chunks wait until go_on is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.held, self.go_on = threading.Event(), threading.Event()

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""
        if path.startswith("data/"):
            self.held.set()
            assert self.go_on.wait(GENEROUS)
        super().write(path, pieces)


def test_a_training_goes_on_while_a_version_is_uploaded(tmp_path: Path) -> None:
    """The version that is due during it follows, and the last one is written at the end."""
    tables = LoneTables(Tracker(), Trainer(Tracker()).tables)
    open_store(tmp_path / "store", "m", tables, Links.alone(), quantising=None)
    files = HeldFiles(tmp_path / "store")
    with Training(tmp_path, store=Store.open(files)) as training:
        training.train(6, wait=True)
        training.train(1)
        assert files.held.wait(GENEROUS)
        training.train(15)  # steps 14 and 21 are due during it
        assert training.trainer.step == 22
        assert training.steps_of("checkpoint") == {}
        files.go_on.set()
    store = Store.open(tmp_path / "store")
    assert [entry.version for entry in store.state.versions()] == [7, 22]
    assert_holds(store, 22, replayed(22))


def read_bases(folder: Path) -> dict[str, dict[str, dict[int, bytes]]]:
    """Return the rows by base, table and key."""
    return {
        path.name: {
            name: {
                int(key): row.tobytes()
                for keys, rows in Base.open(path).chunks(name, range(P))
                for key, row in zip(keys, rows, strict=True)
            }
            for name in SCHEMAS
        }
        for path in (folder / "bases").iterdir()
    }


def test_a_run_from_rounded_rows_begins_with_a_base_of_them(tmp_path: Path) -> None:
    """The bases of the last two runs stay."""
    options: dict[str, Any] = {"quantising": Quantising(20), "bases": tmp_path / "bases"}
    with Training(tmp_path, **options) as training:
        training.train(8, wait=True)
    assert not (tmp_path / "bases").exists()  # the log was empty
    names = []
    for _ in range(3):
        with Training(tmp_path, **options) as training:
            assert training.trainer.rows() != replayed(training.trainer.step).rows()
            names.append(f"m-run-{training.publisher.run}-rank-0")
            assert read_bases(tmp_path)[names[-1]] == training.trainer.rows()
            training.train(8, wait=True)
    assert sorted(path.name for path in (tmp_path / "bases").iterdir()) == sorted(names[-2:])


def test_a_run_after_one_without_a_version_begins_with_a_base(tmp_path: Path) -> None:
    """Servers have rows of the first run, which the second one begins without."""
    options: dict[str, Any] = {"checkpoint": Every(steps=1000), "bases": tmp_path / "bases"}
    for _ in range(2):
        with Training(tmp_path, **options) as training:
            training.train(4, wait=True)
    assert list(read_bases(tmp_path).values()) == [replayed(0).rows()]


def test_a_quantised_store_needs_a_folder_for_bases(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"a quantised store rounds rows.* give bases"):
        Training(tmp_path, quantising=Quantising(20))


def test_bad_input_is_named(tmp_path: Path) -> None:
    tracker = Tracker()
    table = ArrayTable(tracker, "items", np.zeros((3, 2), np.float32))
    with pytest.raises(InvalidArgument, match="two tables have the name 'items'"):
        LoneTables(tracker, [table, table])
    with pytest.raises(InvalidArgument, match="at least one table"):
        LoneTables(tracker, [])
    links = Links.alone()
    with RankedOutput(LoneTables(tracker, [table]), links, staging=tmp_path) as output:
        output._link = type("Two", (), {"rank": 1, "world": 2})()
        with pytest.raises(FailedPrecondition, match=r"after\(\) is for one rank, got 2"):
            output.after(1)
        output._link = links.dense
