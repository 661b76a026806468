"""How a base is quantised is chosen behind the training, and stored alike by all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.checkpoint import Quantising, Store
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


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_choice_that_fails_stops_the_training_with_its_cause(
    tmp_path: Path, bad_rank: int
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

    with pytest.raises(Unavailable, match=f"rank {bad_rank}: InvalidArgument: .*finite"):
        in_threads(WORLD, train)
    assert Store.open(tmp_path / "store").state.versions() == []
