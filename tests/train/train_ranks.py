"""Versions that several ranks write: equal bit by bit to those of an uninterrupted training.

Run by `make test-train`. Ranks are threads (rank_threads.py); train_processes.py has processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from petps import _native
from petps.checkpoint import POLICIES, BaseFolder, Quantising, Store
from petps.checkpoint.policy import TwoD
from petps.checkpoint.served import ServedVersions
from petps.delta import TableSchema, open_log
from petps.errors import (
    FailedPrecondition,
    InvalidArgument,
    IoError,
    ResourceExhausted,
    Unavailable,
)
from petps.server.ingest import Ingest
from petps.server.ingest.native_tables import NativeInstanceTables
from petps.train import behind, dense
from petps.train.link import Links
from petps.train.optimizer import Adam
from petps.train.options import Mode, PipelineOptions
from petps.train.pipeline import Boundary, Hook, Pipeline
from petps.train.ranks import RankedOutput
from petps.train.removal import Removal
from petps.train.runs import publisher_of
from petps.train.schedule import Every
from petps.train.sharded import ShardedTables
from petps.train.stores import store_tables
from tests.train.rank_threads import (
    FEATURES,
    InStep,
    Loader,
    Ranker,
    in_threads,
    read_slots,
    specs_with,
)

SEED, WORLD, PARTITIONS = 5, 2, 8
CHUNK_BYTES = 1 << 16  # a version has several chunks
# Most steps that remove rows are not those of a version.
REMOVALS = {
    "item": Removal(keep_rows=150, score="uses", every=4),
    "user": Removal(steps_to_live=6, every=4),
}
TABLES = [replace(spec, removal=REMOVALS.get(spec.name)) for spec in specs_with(threshold=2)]
SERVED_SCHEMAS = {spec.name: TableSchema(spec.name, "f32", spec.dim) for spec in TABLES}
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
    output: Hook,
    last: int,
    steps: int,
    mode: Mode = "nested",
    device: str = "cpu",
    more_hooks: Sequence[Hook] = (),
) -> Pipeline:
    """Return a pipeline that trains the steps after ``last``, up to ``steps``."""
    return Pipeline(
        model, tables, iter(Loader(SEED, rank, steps, first=last + 1)), optimizer=optimizer,
        links=links, features=FEATURES, hooks=[output, *more_hooks],
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
    give_up_after: float = 600.0,
    in_step: bool = True,
    more_hooks: Sequence[Hook] = (),
) -> dict[str, Any]:
    """Train a rank up to ``steps``, from the store's newest version if ``restore``.

    in_step: each version ends before the next step.
    """
    model = Ranker()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with open_tables(rank, links.rows.world, folder / f"{rank}.pool" if pools else None) as tables:
        store = Store.open(folder / "store")
        output = RankedOutput(
            tables, links, store=store, policy=POLICIES[policy](),
            checkpoint=checkpoint or Every(steps=5), model=model, optimizer=optimizer,
            give_up_after=give_up_after, chunk_bytes=CHUNK_BYTES,
        )  # fmt: skip
        first = 0
        if restore:
            restored = output.restore()
            first = restored.step
            assert restored.reader == (b"%d" % first if first else b"")
        if changed is not None:
            changed(output, tables)
        hook = InStep(output) if in_step else output
        with (
            output,
            resume(
                rank, links, model, optimizer, tables, hook, first, steps, mode,
                more_hooks=more_hooks,
            ) as loop,
        ):  # fmt: skip
            loop.run()
        return read_state(tables, model)


def create(folder: Path, quantising: Quantising | None = None) -> Store:
    with open_tables(0, 1) as tables:
        return Store.create(folder / "store", "m", store_tables(tables), quantising)


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
            WORLD,
            lambda r, n: work(folder, r, n, steps=23, pools=pools, restore=True),  # noqa: B023
        )
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
            tables, links, store=Store.open(tmp_path / "store"), policy=POLICIES[policy](),
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


@pytest.mark.parametrize("steps", [20, 18], ids=["of the version", "ahead of it"])
@pytest.mark.parametrize("quantising", [None, Quantising(1)], ids=["exact", "quantised"])
def test_a_server_has_the_trained_rows(
    tmp_path: Path, quantising: Quantising | None, steps: int
) -> None:
    """Two ranks publish one run, each its own partitions, and a new run after a restart.

    The rows of the second run are rounded if the store is quantised. A server that is ahead of the
    version has rows that the second run has not.
    """
    store = create(tmp_path, quantising)
    place = str(tmp_path / "log")

    def train(rank: int, links: Links, steps: int) -> tuple[dict[str, Any], int]:
        model = Ranker()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        log = open_log(place, partitions=PARTITIONS)
        with open_tables(rank, WORLD) as tables:
            publisher = publisher_of(log, "m", tables, links.dense)
            output = RankedOutput(
                tables, links, store=Store.open(tmp_path / "store"),
                policy=TwoD(resets=False), checkpoint=Every(steps=10), publisher=publisher,
                publish=Every(steps=4), model=model, optimizer=optimizer, chunk_bytes=CHUNK_BYTES,
                bases=tmp_path / "bases" if quantising else None,
            )  # fmt: skip
            restored = output.restore()
            output.begin_run(restored)
            last = restored.step
            hook = InStep(output)
            with output, resume(rank, links, model, optimizer, tables, hook, last, steps) as loop:
                loop.run()
            log.close()
            return read_state(tables, model), publisher.version

    open_log(place, partitions=PARTITIONS).close()
    in_threads(WORLD, lambda rank, links: train(rank, links, steps))
    results = in_threads(WORLD, lambda rank, links: train(rank, links, 30))
    trained, version = [state for state, _ in results], results[0][1]
    source = ServedVersions(
        str(tmp_path / "store"), BaseFolder(tmp_path / "bases"), lambda: SERVED_SCHEMAS
    )
    check_served(tmp_path / "served.pool", place, version, trained, source)
    # What the log is owed is not in the store's next version.
    rows = sum(len(result[spec.name]) for result in trained for spec in TABLES)
    assert [version.version for version in store.refresh().versions()] == [10, 20, 30]
    assert store.state.version(30).kind == "delta"
    assert store.state.version(30).rows < 0.9 * rows


def check_served(
    pool: Path,
    place: str,
    version: int,
    trained: list[dict[str, Any]],
    bases: ServedVersions | None = None,
) -> None:
    """Follow a log from its start up to a version, and compare all rows with those of the ranks."""
    tables = _native.Tables.create(str(pool), durability="process")
    instance = tables.create_instance("m", "m@0", PARTITIONS)
    for spec in TABLES:
        tables.create_table(
            spec.name, instance=instance.id, dim=spec.dim, dtype="f32", capacity=20_000,
            feed="delta",
        )  # fmt: skip
    log = open_log(place, partitions=PARTITIONS)
    ingest = Ingest(
        log, NativeInstanceTables(tables, "m"), dead_letters=NoDeadLetters(), bases=bases
    )
    ingest.start()
    assert ingest.wait_for(version, 60), ingest.status().as_json()
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


def test_rows_of_a_training_without_a_version_are_erased(tmp_path: Path) -> None:
    """A training that was killed before its first version left rows in its pools."""
    create(tmp_path)
    never = Every(steps=1000)
    reference = in_threads(WORLD, lambda r, n: work(tmp_path, r, n, steps=8, checkpoint=never))

    def train(steps: int) -> list[dict[str, Any]]:
        options: dict[str, Any] = {"steps": steps, "checkpoint": never, "pools": True}
        return in_threads(WORLD, lambda r, n: work(tmp_path, r, n, restore=True, **options))

    train(6)
    check_same(reference, train(8))


def failing_at(steps: Sequence[int], seen: list[int]) -> Callable[..., None]:
    """Let rank 1's share fail at these steps, as on a full disk, as often as they are given."""
    left = list(steps)

    def broken(output: RankedOutput, tables: ShardedTables) -> None:
        if tables.rank != 1:
            return
        staged = output._staged
        assert staged is not None
        share = staged.share

        def sometimes(version: int, *more: Any, **options: Any) -> Any:
            seen.append(version)
            if version in left:
                left.remove(version)
                raise IoError("the disk is full")
            return share(version, *more, **options)

        staged.share = sometimes  # type: ignore[method-assign]

    return broken


def test_a_rank_whose_store_fails_is_named_and_no_rank_hangs(tmp_path: Path) -> None:
    create(tmp_path)
    seen: list[int] = []
    broken = failing_at([5], seen)
    with pytest.raises(Unavailable, match=r"step 5: no checkpoint .* rank 1: .* disk is full"):
        in_threads(
            WORLD, lambda r, n: work(tmp_path, r, n, steps=20, changed=broken, give_up_after=0)
        )
    assert seen == [5]
    assert Store.open(tmp_path / "store").state.versions() == []
    # The share that the other rank had written is gone.
    for name in ("shares", "data", "parts", "lines"):
        assert list((tmp_path / "store" / name).iterdir()) == [], name


def test_a_version_that_failed_is_tried_again_with_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behind, "PAUSE_SECONDS_MAX", 0.0)
    create(tmp_path)
    seen: list[int] = []
    broken = failing_at([5, 6, 10], seen)
    results = in_threads(WORLD, lambda r, n: work(tmp_path, r, n, steps=15, changed=broken))
    assert seen == [5, 6, 7, 10, 11, 15]
    store = Store.open(tmp_path / "store")
    assert [version.version for version in store.state.versions()] == [7, 11, 15]
    assert store.verify() == []
    check_store(store, 15, results)


def test_the_last_version_is_tried_again_before_training_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behind, "FIRST_PAUSE_SECONDS", 0.05)
    create(tmp_path)
    seen: list[int] = []
    broken = failing_at([15, 15], seen)
    results = in_threads(WORLD, lambda r, n: work(tmp_path, r, n, steps=15, changed=broken))
    assert seen == [5, 10, 15, 15, 15]
    store = Store.open(tmp_path / "store")
    assert [version.version for version in store.state.versions()] == [5, 10, 15]
    check_store(store, 15, results)


class Reached:
    """A hook that opens a gate after a step."""

    def __init__(self, step: int) -> None:
        self.step, self.gate = step, threading.Event()

    def wants(self, step: int) -> bool:
        if step >= self.step:
            self.gate.set()
        return False

    def act(self, boundary: Boundary) -> None:
        raise AssertionError

    def end(self, boundary: Boundary) -> None:
        pass


@pytest.mark.parametrize("held_rank", [0, 1])
def test_training_goes_on_while_a_version_is_written(tmp_path: Path, held_rank: int) -> None:
    """The upload of one rank's share waits for step 12. The versions due until then become one."""
    create(tmp_path)
    reached = Reached(12)

    def hold(output: RankedOutput, tables: ShardedTables) -> None:
        if tables.rank != held_rank:
            return
        assert output._store is not None
        files = output._store.files
        write = files.write

        def held(path: str, pieces: Any) -> None:
            if path.startswith("data/"):
                assert reached.gate.wait(60)
            write(path, pieces)

        files.write = held  # type: ignore[method-assign]

    def train(rank: int, links: Links) -> dict[str, Any]:
        return work(
            tmp_path, rank, links, steps=20, changed=hold, in_step=False,
            more_hooks=[reached],
        )  # fmt: skip

    results = in_threads(WORLD, train)
    store = Store.open(tmp_path / "store")
    versions = [version.version for version in store.state.versions()]
    assert versions[0] == 5
    assert 12 <= versions[1] <= 20
    assert versions[-1] == 20
    assert store.verify() == []
    check_store(store, 20, results)
    # Version 5 was written while later steps were trained, and has the rows of step 5.
    whole = tmp_path / "whole"
    create(whole)
    check_store(store, 5, in_threads(WORLD, lambda r, n: work(whole, r, n, steps=5)))


def check_store(store: Store, version: int, results: list[dict[str, Any]]) -> None:
    """Compare all rows of a version, with their optimizer state, with those of the ranks."""
    stored = store.restore(version)
    for spec in TABLES:
        held, rows = merge_ranks(results, spec.name), stored[spec.name]
        assert sorted(held) == rows.keys.tolist()
        columns = store.tables_of(version)[spec.name].columns
        stored_columns = [(column, rows.columns[column.name]) for column in columns]
        values = [given if c.dtype == "u32" else c.values(given) for c, given in stored_columns]
        slots = np.concatenate(values, axis=1)
        assert np.array_equal(slots, np.stack([held[key] for key in rows.keys.tolist()]))


class FullLog:
    """A log without space for some appends."""

    def __init__(self, log: Any, times: int) -> None:
        self._log, self.left = log, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def publish(self, partition: int, message: Any) -> None:
        if self.left:
            self.left -= 1
            raise ResourceExhausted("no space left")
        self._log.publish(partition, message)


def test_a_log_without_space_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "FIRST_PAUSE_SECONDS", 0.001)
    log = open_log(str(tmp_path / "log"), partitions=PARTITIONS)
    with closing(log), open_tables(0, 1) as tables:
        full: Any = FullLog(log, times=3)
        publisher = publisher_of(full, "m", tables, Links.alone().dense)
        publisher.begin_continue(None)
        assert full.left == 0
        full.left = 2
        publisher.publish("item", np.arange(5, dtype=np.uint64), np.ones((5, 8), np.float32))
        assert publisher.commit() == 1
        impatient = publisher_of(full, "m", tables, Links.alone().dense, give_up_after=0)
        full.left = 1
        with pytest.raises(ResourceExhausted, match="no space left"):
            impatient.begin_continue(publisher.position())
        assert impatient.has_failed


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    store = create(tmp_path)
    for given in ({}, {"steps": 1, "seconds": 1.0}, {"steps": 0}):
        with pytest.raises(InvalidArgument):
            Every(**given)
    with open_tables(0, 1) as tables:
        with pytest.raises(InvalidArgument, match="need both a store and a policy"):
            RankedOutput(tables, Links.alone(), checkpoint=Every(steps=1))
        with pytest.raises(InvalidArgument, match="needs a publisher"):
            RankedOutput(tables, Links.alone(), publish=Every(steps=1))
        with (
            RankedOutput(tables, Links.alone(), store=store, policy=POLICIES["full"]()) as output,
            pytest.raises(FailedPrecondition, match="has no version: nothing to restore"),
        ):
            output.restore(5)


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
    state = dense.get_random_state(OnGpu())
    torch.manual_seed(3)
    dense.set_random_state(state, OnGpu())
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(held[OnGpu.device], gpu)
    dense.set_random_state(dense.get_random_state(None), OnGpu())  # saved by a rank without a GPU
    assert len(held) == 1
