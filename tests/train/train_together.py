"""An error on one rank reaches all of them, names the rank, and the call can be repeated.

Run by `make test-train`. Ranks are threads (rank_threads.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from petps.checkpoint import POLICIES, Store
from petps.delta import open_log
from petps.errors import InvalidArgument, IoError, PetpsError, Unavailable
from petps.train import behind
from petps.train.link import Links
from petps.train.optimizer import Adam
from petps.train.options import PipelineOptions
from petps.train.pipeline import Boundary, Pipeline
from petps.train.ranks import RankedOutput
from petps.train.runs import publisher_of
from petps.train.schedule import Every
from petps.train.sharded import ShardedTables
from tests.train.rank_threads import FEATURES, SPECS, Loader, Ranker, in_threads, train
from tests.train.train_ranks import (
    PARTITIONS,
    SEED,
    TABLES,
    WORLD,
    check_same,
    create,
    merge_ranks,
    open_tables,
    read_state,
    work,
)


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_publisher_that_one_rank_cannot_make_fails_on_all(tmp_path: Path, wrong: int) -> None:
    for partitions in (PARTITIONS, 2 * PARTITIONS):
        open_log(str(tmp_path / f"log-{partitions}"), partitions=partitions).close()

    def make(rank: int, links: Links) -> PetpsError:
        partitions = 2 * PARTITIONS if rank == wrong else PARTITIONS
        with (
            closing(open_log(str(tmp_path / f"log-{partitions}"), partitions=partitions)) as log,
            open_tables(rank, WORLD) as tables,
            pytest.raises(PetpsError) as raised,
        ):
            publisher_of(log, "m", tables, links.dense)
        return raised.value

    errors = in_threads(WORLD, make)
    assert isinstance(errors[wrong], InvalidArgument)
    assert isinstance(errors[1 - wrong], Unavailable)
    assert f"rank {wrong}: InvalidArgument: " in str(errors[1 - wrong])
    assert "the number can never change" in str(errors[1 - wrong])


def test_a_restore_that_fails_on_one_rank_is_repeated_by_all(tmp_path: Path) -> None:
    create(tmp_path)
    seen = in_threads(WORLD, lambda r, n: work(tmp_path, r, n, steps=15, pools=True))

    def restore(rank: int, links: Links) -> dict[str, Any]:
        model = Ranker()
        with open_tables(rank, WORLD) as tables, RankedOutput(
            tables, links, store=Store.open(tmp_path / "store"), policy=POLICIES["2d"](),
            model=model,
        ) as output:  # fmt: skip
            user = tables["user"]
            if rank == 1:
                user.load_pieces = _failing("it cannot be read")  # type: ignore[method-assign]
            with pytest.raises(PetpsError) as raised:
                output.restore()
            message = "it cannot be read" if rank == 1 else "rank 1: IoError: it cannot be read"
            assert message in str(raised.value)
            if rank == 1:
                del user.load_pieces
            assert output.restore().step == 15
            return read_state(tables, model)

    check_same(seen, in_threads(WORLD, restore))


def _failing(message: str, kind: type[Exception] = IoError) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise kind(message)

    return fail


def acting(
    folder: Path,
    steps: list[int],
    changed: Callable[[int, int, RankedOutput], None],
    checkpoint: Every | None = None,
) -> list[tuple[int, list[str], list[str]]]:
    """Train and act at each of ``steps`` without a pipeline. The log is due at every second one.

    changed(rank, step, output) runs before each. Return, for each rank, the log's version, the
    errors, and the dense parts requested.
    """
    create(folder)
    place = str(folder / "log")
    open_log(place, partitions=PARTITIONS).close()

    def act(rank: int, links: Links) -> tuple[int, list[str], list[str]]:
        errors: list[str] = []
        dense_steps: list[str] = []

        def dense(step: int, state: Mapping[str, Any]) -> str:
            assert set(state) == {"weight", "bias"}
            dense_steps.append(str(step))
            return f"dense-{step}"

        with closing(open_log(place, partitions=PARTITIONS)) as log, open_tables(rank, 2) as tables:
            publisher = publisher_of(log, "m", tables, links.dense)
            publisher.begin_continue(None)
            with RankedOutput(
                tables, links, store=Store.open(folder / "store"),
                policy=POLICIES["2d"](), checkpoint=checkpoint, publisher=publisher,
                publish=Every(steps=2), model=torch.nn.Linear(1, 1), dense=dense,
            ) as output:  # fmt: skip
                for step in steps:
                    for table in tables:
                        keys = np.arange(step * 100, step * 100 + 50, dtype=np.uint64)
                        keys = keys[tables.owns(keys)]
                        rows = np.ones((len(keys), table.width), np.float32)
                        table.write_back(step, keys, rows)
                    changed(rank, step, output)
                    try:
                        output.act(Boundary(step, b""))
                        output.wait()
                    except Exception as error:
                        errors.append(f"{type(error).__name__}: {error}")
            return publisher.version, errors, dense_steps

    return in_threads(2, act)


def break_share(message: str, kind: type[Exception]) -> Callable[[int, int, RankedOutput], None]:
    """Let the share of rank 1 fail at step 2."""

    def broken(rank: int, step: int, output: RankedOutput) -> None:
        staged = output._staged
        assert staged is not None
        if rank == 1 and step == 2:
            staged.share = _failing(message, kind)  # type: ignore[method-assign]
        elif rank == 1 and step == 3:
            del staged.share

    return broken


def test_a_checkpoint_that_fails_leaves_the_log_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are due at step 2, where rank 1's disk is full; the next version has its rows."""
    monkeypatch.setattr(behind, "PAUSE_SECONDS_MAX", 0.0)
    results = acting(tmp_path, [1, 2, 3, 4], break_share("it is full", IoError), Every(steps=1))
    assert [errors for _, errors, _ in results] == [[], []]
    assert [version for version, *_ in results] == [4, 4]
    store = Store.open(tmp_path / "store")
    assert [version.version for version in store.state.versions()] == [1, 3, 4]
    assert len(store.restore(4)["item"].keys) == 4 * 50


def test_an_unexpected_error_on_one_rank_stops_all_and_is_named(tmp_path: Path) -> None:
    """An error that no repetition fixes is raised by the next step, on all ranks."""
    results = acting(
        tmp_path, [1, 2, 3], break_share("list index", IndexError), Every(steps=1)
    )  # fmt: skip
    expected = "Unavailable: step 2: no checkpoint was written: rank 1: IndexError: list index"
    assert [errors for _, errors, _ in results] == [[expected], [expected]]
    assert [version for version, *_ in results] == [2, 2]
    versions = Store.open(tmp_path / "store").state.versions()
    assert [version.version for version in versions] == [1]


def test_dense_weights_are_written_only_for_versions_of_the_log(tmp_path: Path) -> None:
    results = acting(tmp_path, [1, 2, 3, 4], lambda *_: None)
    assert [dense_steps for *_, dense_steps in results] == [["2", "4"], []]


def test_a_log_that_fails_on_one_rank_stops_all_and_loses_no_row(tmp_path: Path) -> None:
    def broken(rank: int, step: int, output: RankedOutput) -> None:
        if rank == 1 and step == 2:
            assert output.publisher is not None
            log: Any = output.publisher.log
            log.flush = _failing("gone", Unavailable)

    results = acting(tmp_path, [1, 2, 3], broken)
    expected = "Unavailable: step 2: the log's version failed: rank 1: Unavailable: gone"
    assert [errors for _, errors, _ in results] == [[expected], [expected]]
    assert [version for version, *_ in results] == [0, 0]


def test_ranks_may_list_their_tables_in_any_order() -> None:
    reference = train("synchronous", WORLD, steps=5, seed=SEED)

    def train_in_other_order(rank: int, links: Links) -> dict[str, Any]:
        model = Ranker()
        specs = SPECS if rank == 0 else SPECS[::-1]
        with ShardedTables(
            None, specs, Adam(0.05), rank=rank, world=WORLD, seed=SEED
        ) as tables, Pipeline(
            model, tables, iter(Loader(SEED, rank, 5)), links=links, features=FEATURES,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
            options=PipelineOptions(micro_batches=2, deterministic=True),
        ) as pipeline:  # fmt: skip
            pipeline.run()
            return read_state(tables, model)

    results = in_threads(WORLD, train_in_other_order)
    for spec in TABLES:
        rows = merge_ranks(results, spec.name)
        keys, slots = reference[spec.name]
        assert sorted(rows) == keys.tolist()
        assert np.array_equal(np.stack([rows[key] for key in sorted(rows)]), slots)
