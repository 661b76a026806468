"""Removals and both admissions in the training loop: whatever overlaps, all ends as if nothing did.

Run by `make test-train`. Ranks are threads (rank_threads.py). What the rules remove is compared
with a slow model in tests/python/train/test_removal.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from petps.checkpoint import BaseFolder, Column, Store, Table
from petps.checkpoint.policy import TwoD
from petps.checkpoint.served import ServedVersions
from petps.delta import open_log
from petps.errors import InvalidArgument
from petps.train.batch import Batch
from petps.train.link import Links
from petps.train.optimizer import Adam
from petps.train.options import Mode, PipelineOptions
from petps.train.pipeline import Pipeline
from petps.train.ranks import RankedOutput
from petps.train.removal import Removal
from petps.train.runs import publisher_of
from petps.train.schedule import Every
from petps.train.sharded import ShardedTables, TableSpec
from petps.train.stores import store_tables
from tests.seed import SEED
from tests.train.rank_threads import (
    FEATURES,
    SPECS,
    InStep,
    Loader,
    Ranker,
    in_threads,
    same,
    train,
)
from tests.train.train_ranks import (
    SERVED_SCHEMAS,
    check_served,
    check_store,
    merge_ranks,
    read_state,
)

MODES: tuple[Mode, ...] = ("dual", "frozen", "nested")
PARTITIONS = 8
FILTER_BYTES = 1 << 15
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def specs_of(every: int | None, threshold: int, filter_bytes: int | None) -> list[TableSpec]:
    """Return SPECS with a rule for each table; item counts uses, so dim 8 has two blocks."""
    removals = {
        "item": Removal(keep_rows=25, score="uses", every=every),
        "user": Removal(steps_to_live=4, keep_rows=40, every=every),
        "shop": Removal(steps_to_live=6, l2_below=0.12, every=every),
    }
    return [
        replace(spec, threshold=threshold, filter_bytes=filter_bytes, removal=removals[spec.name])
        for spec in SPECS
    ]


@pytest.mark.parametrize(
    ("world", "micro_batches", "every", "threshold", "filter_bytes"),
    [(1, 2, 1, 1, None), (2, 2, 3, 2, None), (3, 1, 2, 2, FILTER_BYTES)],
)
def test_every_mode_ends_bit_by_bit_where_synchronous_does(
    world: int, micro_batches: int, every: int, threshold: int, filter_bytes: int | None
) -> None:
    specs = specs_of(every, threshold, filter_bytes)

    def loader(rank: int) -> Iterator[Batch]:
        return iter(Loader(SEED % 1000, rank, 16, samples=6, ids=60))

    run: dict[str, Any] = {"micro_batches": micro_batches, "specs": specs, "loader": loader}
    reference = train("synchronous", world, **run)
    kept = [replace(spec, removal=None) for spec in specs]
    whole = train("synchronous", world, **run | {"specs": kept})
    assert any(len(reference[s.name][0]) < len(whole[s.name][0]) for s in specs), "none was removed"
    for mode in MODES:
        assert same(reference, train(mode, world, **run), specs), mode


@pytest.mark.parametrize("threshold", [1, 2])
def test_uses_and_last_uses_are_those_of_the_batches(threshold: int) -> None:
    rules = Removal(keep_rows=10_000, score="uses", every=5)
    specs = [replace(spec, threshold=threshold, removal=rules) for spec in SPECS]
    trained = train("nested", 2, specs=specs, steps=12)
    features = {"item": ("item", "history"), "user": ("user",), "shop": ("shop",)}
    loaders = [Loader(1, rank, 12) for rank in range(2)]
    uses: dict[str, dict[int, int]] = {name: {} for name in features}
    last: dict[str, dict[int, int]] = {name: {} for name in features}
    waiting: dict[str, dict[int, int]] = {name: {} for name in features}
    for step, batches in enumerate(zip(*loaders, strict=True), start=1):
        for name, own in features.items():
            given = [batch.keys[feature].keys for batch in batches for feature in own]
            found, counts = np.unique(np.concatenate(given), return_counts=True)
            for key, times in zip(found.tolist(), counts.tolist(), strict=True):
                waiting[name][key] = waiting[name].get(key, 0) + times
                if waiting[name][key] >= threshold:
                    uses[name][key] = uses[name].get(key, 0) + times
                    last[name][key] = step
    for name, expected in uses.items():
        keys, slots = trained[name]
        assert keys.tolist() == sorted(expected)
        assert slots[:, -5].tolist() == [expected[key] for key in keys]
        steps = slots[:, -4:].astype(np.uint8).view(np.uint32)[:, 0]
        assert steps.tolist() == [last[name][key] for key in keys]


def test_which_rows_stay_does_not_depend_on_the_number_of_ranks() -> None:
    """Rank 0 has all samples, so that 1, 2 and 4 ranks train the same batches."""
    specs = [
        # Sums of gradients have another order with other ranks, so norms have other last bits.
        replace(spec, removal=replace(spec.removal, l2_below=None, keep_rows=30))
        for spec in specs_of(3, 2, FILTER_BYTES)
        if spec.removal is not None
    ]

    def loader(rank: int) -> Iterator[Batch]:
        for batch in Loader(SEED % 1000, 0, 12, samples=8, ids=80):
            yield batch if rank == 0 else batch.select(np.empty(0, np.intp))

    results = [train("nested", world, specs=specs, loader=loader) for world in (1, 2, 4)]
    for spec in specs:
        keys = [result[spec.name][0] for result in results]
        assert len(keys[0]) > 5
        assert np.array_equal(keys[0], keys[1]), spec.name
        assert np.array_equal(keys[0], keys[2]), spec.name


@pytest.mark.parametrize("every", [1, 2])
def test_training_can_stop_where_the_next_step_would_remove(every: int) -> None:
    """Later batches are looked up only after removals that never come, and no rank hangs."""
    specs = specs_of(every, 2, None)
    whole = train("nested", 2, steps=7, specs=specs)

    def work(rank: int, links: Links) -> dict[str, Any]:
        model = Ranker()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        options = PipelineOptions(2, deterministic=True)
        with (
            ShardedTables(None, specs, Adam(0.05), rank=rank, world=2, seed=1) as tables,
            Pipeline(
                model, tables, iter(Loader(1, rank, 50)), options=options, optimizer=optimizer,
                features=FEATURES, links=links,
            ) as pipeline,
        ):  # fmt: skip
            for step in pipeline:
                if step.number == 7:
                    break
            pipeline.close()
            return {table.name: table.keys() for table in tables}

    results = in_threads(2, work)
    for spec in specs:
        keys = np.sort(np.concatenate([result[spec.name] for result in results]))
        assert np.array_equal(keys, whole[spec.name][0])


class Trainer:
    """A training of several ranks with a store and a log, whose versions decide when rows go."""

    def __init__(self, folder: Path, filter_bytes: int | None) -> None:
        folder.mkdir()
        self.folder, self.log_place = folder, str(folder / "log")
        self.specs = specs_of(None, 2, filter_bytes)
        open_log(self.log_place, partitions=PARTITIONS).close()
        with self.open_tables(0, 1) as tables:
            self.store = Store.create(folder / "store", "m", store_tables(tables), None)

    def open_tables(self, rank: int, world: int, path: Path | None = None) -> ShardedTables:
        return ShardedTables(
            path, self.specs, Adam(0.05), rank=rank, world=world, partitions=PARTITIONS, seed=SEED
        )

    def train(self, rank: int, links: Links, steps: int) -> tuple[dict[str, Any], int, int]:
        """Train up to ``steps`` from the newest version; return rows, log version and removals."""
        model = Ranker()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        pool = self.folder / f"{rank}.pool"
        with (
            closing(open_log(self.log_place, partitions=PARTITIONS)) as log,
            self.open_tables(rank, links.rows.world, pool) as tables,
        ):
            publisher = publisher_of(log, "m", tables, links.dense)
            with RankedOutput(
                tables, links, store=Store.open(self.folder / "store"), policy=TwoD(resets=False),
                checkpoint=Every(steps=5), publisher=publisher, publish=Every(steps=3),
                model=model, optimizer=optimizer, chunk_bytes=1 << 16,
            ) as output:  # fmt: skip
                restored = output.restore()
                output.begin_run(restored)
                options = PipelineOptions(2, first_step=restored.step + 1, deterministic=True)
                loader = Loader(SEED % 1000, rank, steps, first=restored.step + 1, ids=80)
                with Pipeline(
                    model, tables, iter(loader), optimizer=optimizer, links=links,
                    features=FEATURES, hooks=[InStep(output)], options=options,
                ) as pipeline:  # fmt: skip
                    pipeline.run()
            removed = sum(sum(table.removed.values()) for table in tables.status())
            return read_state(tables, model), publisher.version, removed

    def look(self, rank: int, links: Links) -> dict[str, Any]:
        """Return the state of the newest version, in a pool in memory."""
        model = Ranker()
        with (
            self.open_tables(rank, links.rows.world) as tables,
            RankedOutput(
                tables, links, store=Store.open(self.folder / "store"), policy=TwoD(resets=False),
                checkpoint=Every(steps=5), model=model,
            ) as output,
        ):  # fmt: skip
            output.restore()
            return read_state(tables, model)


def check_same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    """Compare rows, optimizer state, uses and last uses, whichever rank holds them."""
    for spec in SPECS:
        one, two = merge_ranks(left, spec.name), merge_ranks(right, spec.name)
        assert one.keys() == two.keys(), spec.name
        assert all(np.array_equal(one[key], two[key]) for key in one), spec.name


@pytest.mark.parametrize("filter_bytes", [None, FILTER_BYTES])
def test_versions_and_log_have_what_is_left(tmp_path: Path, filter_bytes: int | None) -> None:
    """Train 18 steps, lose the last three, continue: as an uninterrupted training.

    Store, log and other numbers of ranks have the same rows.
    """
    whole, broken = (Trainer(tmp_path / name, filter_bytes) for name in ("whole", "broken"))
    reference = in_threads(2, lambda rank, links: whole.train(rank, links, 25))
    assert all(removed > 20 for _, _, removed in reference)
    in_threads(2, lambda rank, links: broken.train(rank, links, 18))
    results = in_threads(2, lambda rank, links: broken.train(rank, links, 25))
    trained = [state for state, _, _ in results]
    check_same([state for state, _, _ in reference], trained)
    store = broken.store
    assert [entry.version for entry in store.refresh().versions()] == [5, 10, 15, 20, 25]
    assert store.state.version(25).kind == "delta"
    check_store(store, 25, trained)
    check_store(Store.open(whole.folder / "store"), 25, trained)
    check_served(tmp_path / "whole.pool", whole.log_place, reference[0][1], trained)
    # A server is ahead of version 15, so it catches up to a later version of the store.
    bases = ServedVersions(
        str(broken.folder / "store"), BaseFolder(tmp_path / "bases"), lambda: SERVED_SCHEMAS
    )
    check_served(tmp_path / "broken.pool", broken.log_place, results[0][1], trained, bases)
    for world in (1, 3):
        check_same(trained, in_threads(world, broken.look))


def test_a_store_without_the_columns_of_a_removal_is_refused(tmp_path: Path) -> None:
    tables = [Table(spec.name, (Column("row", "f32", spec.dim),)) for spec in SPECS]
    store = Store.create(tmp_path / "store", "m", tables, None)
    kept = [replace(spec, removal=Removal(steps_to_live=3)) for spec in SPECS]
    with (
        ShardedTables(None, kept, Adam(0.05)) as opened,
        pytest.raises(InvalidArgument, match="without column 'last_use' of table item, which"),
    ):
        RankedOutput(
            opened, Links.alone(), store=store, policy=TwoD(resets=False),
            checkpoint=Every(steps=5),
        )  # fmt: skip
    with (
        ShardedTables(None, kept, Adam(0.05)) as opened,
        pytest.raises(InvalidArgument, match="it is not known after which steps"),
    ):
        Pipeline(Ranker(), opened, iter(()), features=FEATURES)
