"""How a base is quantised is chosen behind the training, and stored alike by all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.checkpoint import Quantising, StagedCheckpointer, Store
from petps.checkpoint.flight import start_thread
from petps.checkpoint.quantise import choose_tables
from petps.errors import Unavailable
from petps.train.link import Links
from petps.train.ranks import RankedOutput
from petps.train.sharded import ShardedTables
from tests.train.rank_threads import in_threads
from tests.train.train_ranks import TABLES, WORLD, Reached, create, work

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_training_waits_for_no_choice_of_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 chooses how a base is quantised only after step 8, and all ranks store it so."""
    create(tmp_path, Quantising(1))
    reached = Reached(8)

    def late(*arguments: Any) -> Any:
        assert reached.gate.wait(60)
        return choose_tables(*arguments)

    monkeypatch.setattr("petps.checkpoint.checkpointer.choose_tables", late)

    def train(rank: int, links: Links) -> dict[str, Any]:
        return work(tmp_path, rank, links, steps=10, in_step=False, more_hooks=[reached])

    in_threads(WORLD, train)
    store = Store.open(tmp_path / "store")
    versions = [version.version for version in store.state.versions()]
    assert versions[0] == 5
    assert versions[-1] == 10
    assert store.verify() == []
    for spec in TABLES:
        row = store.tables_of(5)[spec.name].columns[0]
        assert row.dtype == "adaptive2"
        assert row.quantisation is not None
    # The rows of the base are those of step 5.
    whole = tmp_path / "whole"
    monkeypatch.undo()
    create(whole, Quantising(1))
    in_threads(WORLD, lambda rank, links: work(whole, rank, links, steps=5))
    expected, stored = Store.open(whole / "store").restore(5), store.restore(5)
    for spec in TABLES:
        assert np.array_equal(expected[spec.name].keys, stored[spec.name].keys)
        for name, column in expected[spec.name].columns.items():
            assert np.array_equal(column, stored[spec.name].columns[name])


def test_a_choice_waits_for_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy may wait for a full folder, and so for the choice. Here it waits until that began."""
    create(tmp_path, Quantising(1))
    began = threading.Event()

    def choose(*arguments: Any) -> Any:
        began.set()
        return choose_tables(*arguments)

    class Waiting(StagedCheckpointer):
        def share(self, *arguments: Any, **options: Any) -> None:
            assert began.wait(60)
            super().share(*arguments, **options)

    monkeypatch.setattr("petps.checkpoint.checkpointer.choose_tables", choose)
    monkeypatch.setattr("petps.train.ranks.StagedCheckpointer", Waiting)
    in_threads(WORLD, lambda rank, links: work(tmp_path, rank, links, steps=5))
    store = Store.open(tmp_path / "store")
    assert [version.version for version in store.state.versions()] == [5]


@pytest.mark.parametrize("kind", ["petps-stage", "petps-train-checkpoint"])
def test_a_thread_that_cannot_start_fails_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """All ranks end with the cause, and none hangs."""
    create(tmp_path, Quantising(1))

    def start(run: Callable[[], None], name: str) -> None:
        if name == kind:
            raise RuntimeError("can't start new thread")
        start_thread(run, name)

    monkeypatch.setattr("petps.checkpoint.flight.start_thread", start)
    monkeypatch.setattr("petps.train.behind.start_thread", start)
    with pytest.raises((Unavailable, RuntimeError), match="can't start new thread"):
        in_threads(WORLD, lambda rank, links: work(tmp_path, rank, links, steps=10))
    assert Store.open(tmp_path / "store").state.versions() == []


@pytest.mark.parametrize(
    ("bad_rank", "cause"), [(0, r"of key \d+ has a value that is not finite"), (1, "finite")]
)
def test_a_choice_that_fails_stops_the_training_with_its_cause(
    tmp_path: Path, bad_rank: int, cause: str
) -> None:
    """Name rank 0, which chooses, or the rank whose rows are refused when they are quantised."""
    create(tmp_path, Quantising(1))

    def spoil(output: RankedOutput, tables: ShardedTables) -> None:
        if tables.rank == bad_rank:
            source = output._source
            assert source is not None
            rows = source.rows

            def spoilt(table: str, keys: Any) -> Any:
                columns, deleted = rows(table, keys)
                columns = {name: values.copy() for name, values in columns.items()}
                columns["row"][:] = np.nan
                return columns, deleted

            source.rows = spoilt  # type: ignore[method-assign]

    def train(rank: int, links: Links) -> dict[str, Any]:
        return work(tmp_path, rank, links, steps=10, changed=spoil)

    with pytest.raises(Unavailable, match=f"rank {bad_rank}: InvalidArgument: .*{cause}"):
        in_threads(WORLD, train)
    assert Store.open(tmp_path / "store").state.versions() == []
