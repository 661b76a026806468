"""Versions that several ranks write: equal bit by bit to those of an uninterrupted training.

Run by `make test-train`. Ranks are threads (rank_threads.py); train_processes.py has processes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from petps import _native
from petps.checkpoint import POLICIES, Store
from petps.delta import open_log
from petps.errors import FailedPrecondition, InvalidArgument, IoError, Unavailable
from petps.server.ingest import Ingest
from petps.server.ingest.native_tables import NativeInstanceTables
from petps.train import ranks
from petps.train.link import Links
from petps.train.optimizer import Adam
from petps.train.options import Mode, PipelineOptions
from petps.train.pipeline import Pipeline
from petps.train.ranks import Every, RankedOutput, publisher_of, store_tables
from petps.train.sharded import ShardedTables
from tests.train.rank_threads import FEATURES, Loader, Ranker, in_threads, read_slots, specs_with

SEED, WORLD, PARTITIONS = 5, 2, 8
TABLES = specs_with(threshold=2)
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def open_tables(rank: int, world: int, path: Path | None = None) -> ShardedTables:
    return ShardedTables(
        path, TABLES, Adam(0.05), rank=rank, world=world, partitions=PARTITIONS, seed=SEED
    )


def read_state(tables: ShardedTables, model: Ranker) -> dict[str, Any]:
    result: dict[str, Any] = {
        "dense": [parameter.detach().clone() for parameter in model.parameters()]
    }
    for table in tables:
        keys, slots = read_slots(table)
        result[table.name] = dict(zip(keys.tolist(), slots, strict=True))
    return result


def merge_ranks(results: list[dict[str, Any]], table: str) -> dict[int, Any]:
    """Return the slots of all ranks by key."""
    return {key: slot for result in results for key, slot in result[table].items()}


def check_same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    """Compare all rows, whichever rank holds them."""
    for spec in TABLES:
        one, two = merge_ranks(left, spec.name), merge_ranks(right, spec.name)
        assert one.keys() == two.keys(), spec.name
        assert all(np.array_equal(one[key], two[key]) for key in one), spec.name
    for a, b in zip(left[0]["dense"], right[0]["dense"], strict=True):
        assert torch.equal(a, b)


def resume(
    rank: int,
    links: Links,
    model: Ranker,
    optimizer: Any,
    tables: ShardedTables,
    output: RankedOutput,
    last: int,
    steps: int,
    mode: Mode = "nested",
    device: str = "cpu",
) -> Pipeline:
    """Return a pipeline that trains the steps after ``last``, up to ``steps``."""
    return Pipeline(
        model, tables, iter(Loader(SEED, rank, steps, first=last + 1)), optimizer=optimizer,
        links=links, features=FEATURES, hooks=[output],
        options=PipelineOptions(2, mode, first_step=last + 1, deterministic=True, device=device),
    )  # fmt: skip


def work(
    folder: Path,
    rank: int,
    links: Links,
    *,
    steps: int,
    mode: Mode = "nested",
    restore: bool = False,
    policy: str = "2d",
    pools: bool = False,
    checkpoint: Every | None = None,
    changed: Callable[[RankedOutput, ShardedTables], None] | None = None,
    patience: int = 0,
) -> dict[str, Any]:
    """Train a rank up to ``steps``, from the store's newest version if ``restore``."""
    model = Ranker()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with open_tables(rank, links.rows.world, folder / f"{rank}.pool" if pools else None) as tables:
        store = Store.open(folder / "store")
        output = RankedOutput(
            tables, links.dense, store=store, policy=POLICIES[policy](),
            checkpoint=checkpoint or Every(steps=5), model=model, optimizer=optimizer,
            patience=patience,
        )  # fmt: skip
        first = 0
        if restore:
            restored = output.restore()
            first = restored.step
            assert restored.reader == b"%d" % first
        if changed is not None:
            changed(output, tables)
        with (
            output,
            resume(rank, links, model, optimizer, tables, output, first, steps, mode) as loop,
        ):
            loop.run()
        return read_state(tables, model)


def create(folder: Path) -> Store:
    with open_tables(0, 1) as tables:
        return Store.create(folder / "store", "m", store_tables(tables))


def test_a_restored_training_continues_bit_by_bit(tmp_path: Path) -> None:
    """Restore into empty tables, and into pools that already have later steps."""
    whole = tmp_path / "whole"
    create(whole)
    reference = in_threads(
        WORLD, lambda rank, links: work(whole, rank, links, steps=23, checkpoint=Every(steps=50))
    )
    for pools in (False, True):
        folder = tmp_path / f"pools-{pools}"
        create(folder)
        in_threads(WORLD, lambda r, n: work(folder, r, n, steps=18, pools=pools))  # noqa: B023
        assert [v.version for v in Store.open(folder / "store").state.versions()] == [5, 10, 15]
        results = in_threads(
            WORLD, lambda r, n: work(folder, r, n, steps=23, pools=pools, restore=True)  # noqa: B023
        )  # fmt: skip
        check_same(reference, results)
        assert [v.version for v in Store.open(folder / "store").state.versions()][-1] == 20
        assert Store.open(folder / "store").verify() == []


@pytest.mark.parametrize("policy", ["full", "oneshot", "consecutive", "2d", "merged"])
def test_more_or_fewer_ranks_can_continue(tmp_path: Path, policy: str) -> None:
    """Rows, optimizer state and admission counts go to the ranks that then own the keys."""
    create(tmp_path)

    def look(rank: int, links: Links, world: int) -> dict[str, Any]:
        model = Ranker()
        with open_tables(rank, world) as tables, RankedOutput(
            tables, links.dense, store=Store.open(tmp_path / "store"), policy=POLICIES[policy](),
            checkpoint=Every(steps=5), model=model,
        ) as output:  # fmt: skip
            output.restore()
            return read_state(tables, model)

    def train(rank: int, links: Links) -> dict[str, Any]:
        return work(tmp_path, rank, links, steps=15, policy=policy)

    seen = in_threads(3, train)
    for world in (1, 2, 4):
        results = in_threads(world, lambda rank, links: look(rank, links, world))  # noqa: B023
        check_same(seen, results)
    saved = Store.open(tmp_path / "store")
    counts = [p for p in saved.state.versions()[-1].parts if p.startswith("petps.admission.item.")]
    assert len(counts) == 3


class NoDeadLetters:
    def add(self, partition: int, offset: int, reason: str, message: Any) -> None:
        raise AssertionError(f"{partition}, {offset}: {reason}")


def test_a_server_has_the_trained_rows(tmp_path: Path) -> None:
    """Two ranks publish one run, each its own partitions, and a new run after a restart."""
    create(tmp_path)
    place = str(tmp_path / "log")

    def train(rank: int, links: Links, steps: int, restore: bool) -> dict[str, Any]:
        model = Ranker()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        log = open_log(place, partitions=PARTITIONS)
        with open_tables(rank, WORLD) as tables:
            publisher = publisher_of(log, "m", tables, links.dense)
            output = RankedOutput(
                tables, links.dense, store=Store.open(tmp_path / "store"),
                policy=POLICIES["2d"](), checkpoint=Every(steps=10), publisher=publisher,
                publish=Every(steps=4), model=model, optimizer=optimizer,
            )  # fmt: skip
            restored = output.restore() if restore else None
            publisher.begin_continue(restored.position if restored else None)
            last = restored.step if restored else 0
            with output, resume(rank, links, model, optimizer, tables, output, last, steps) as loop:
                loop.run()
            log.close()
            return read_state(tables, model)

    tables = _native.Tables.create(str(tmp_path / "served.pool"), durability="process")
    instance = tables.create_instance("m", "m@0", PARTITIONS)
    for spec in TABLES:
        tables.create_table(
            spec.name, instance=instance.id, dim=spec.dim, dtype="f32", capacity=20_000,
            feed="delta",
        )  # fmt: skip
    open_log(place, partitions=PARTITIONS).close()
    # Step 20 has a checkpoint and a version of the log; the second training ends at step 24.
    in_threads(WORLD, lambda rank, links: train(rank, links, 20, False))
    trained = in_threads(WORLD, lambda rank, links: train(rank, links, 24, True))
    log = open_log(place, partitions=PARTITIONS)
    ingest = Ingest(log, NativeInstanceTables(tables, "m"), dead_letters=NoDeadLetters())
    ingest.start()
    assert ingest.wait_for(6, 60), ingest.status().as_json()
    ingest.stop()
    log.close()
    for spec in TABLES:
        rows = merge_ranks(trained, spec.name)
        keys = np.array(sorted(rows), np.uint64)
        out = np.empty((len(keys), spec.dim), np.float32)
        native = tables.find("m@0", spec.name)
        assert native.pull(keys, out) == len(keys)
        assert sorted(native.keys().tolist()) == keys.tolist()
        assert np.array_equal(out, np.stack([rows[int(k)][: spec.dim] for k in keys]))
    tables.close()


def test_a_rank_whose_store_fails_is_named_and_no_rank_hangs(tmp_path: Path) -> None:
    create(tmp_path)
    failed: list[int] = []

    def broken(output: RankedOutput, tables: ShardedTables) -> None:
        if tables.rank != 1:
            return
        checkpointer = output._checkpointer
        assert checkpointer is not None
        share = checkpointer.share

        def sometimes(version: int, *more: Any, **options: Any) -> Any:
            if version in (5, 10):
                failed.append(version)
                raise IoError("the disk is full")
            return share(version, *more, **options)

        checkpointer.share = sometimes  # type: ignore[method-assign]

    with pytest.raises(Unavailable, match=r"step 5: no checkpoint .* rank 1: .* disk is full"):
        in_threads(WORLD, lambda r, n: work(tmp_path, r, n, steps=20, changed=broken))
    assert failed == [5]
    failed.clear()
    # With patience, training continues; rows that were not written then are in the next version.
    results = in_threads(
        WORLD, lambda r, n: work(tmp_path, r, n, steps=15, changed=broken, patience=2)
    )
    assert failed == [5, 10]
    store = Store.open(tmp_path / "store")
    assert [version.version for version in store.state.versions()] == [15]
    rows = store.restore(15)
    for spec in TABLES:
        held = {key for result in results for key in result[spec.name]}
        assert held == set(rows[spec.name].keys.tolist())


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    store = create(tmp_path)
    for given in ({}, {"steps": 1, "seconds": 1.0}, {"steps": 0}):
        with pytest.raises(InvalidArgument):
            Every(**given)
    with open_tables(0, 1) as tables:
        with pytest.raises(InvalidArgument, match="need both a store and a policy"):
            RankedOutput(tables, Links.alone().dense, checkpoint=Every(steps=1))
        with pytest.raises(InvalidArgument, match="needs a publisher"):
            RankedOutput(tables, Links.alone().dense, publish=Every(steps=1))
        with (
            RankedOutput(
                tables, Links.alone().dense, store=store, policy=POLICIES["full"]()
            ) as output,
            pytest.raises(FailedPrecondition, match="has no version: nothing to restore"),
        ):
            output.restore()


def test_a_rank_publishes_only_its_own_partitions(tmp_path: Path) -> None:
    log = open_log(str(tmp_path / "log"), partitions=PARTITIONS)
    with closing(log), open_tables(1, 2) as tables:
        publisher = publisher_of(log, "m", tables, Links.alone().dense)
        publisher.begin_continue(None)
        keys = np.arange(100, dtype=np.uint64)
        mine = tables.owns(keys)
        assert 0 < mine.sum() < 100
        rows = np.ones((100, 8), np.float32)
        publisher.publish("item", keys[mine], rows[mine])
        assert publisher.counted() == {"item": int(mine.sum())}
        with pytest.raises(InvalidArgument, match="which is not one of this publisher's"):
            publisher.publish("item", keys, rows)
        # None of those rows was written, and the run continues.
        assert publisher.counted() == {"item": int(mine.sum())}
        assert publisher.commit() == 1


class OnGpu:
    """A model's parameter on a simulated GPU."""

    device = torch.device("cuda:1")

    def parameters(self) -> list[OnGpu]:
        return [self]


def test_random_numbers_of_a_gpu_continue_too(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.arange(16, dtype=torch.uint8)
    held: dict[Any, Any] = {}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: {OnGpu.device: gpu}[device])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, on: held.update({on: state}))
    before = torch.get_rng_state()
    state = ranks._get_random_state(OnGpu())
    torch.manual_seed(3)
    ranks._set_random_state(state, OnGpu())
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(held[OnGpu.device], gpu)
    ranks._set_random_state(ranks._get_random_state(None), OnGpu())  # saved by a rank without a GPU
    assert len(held) == 1
