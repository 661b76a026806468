"""TorchRec's own trackers, of both generations, on a sharded model that is trained on the CPU.

Run by `make test-train`. The last test runs the others with a TorchRec of the first generation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
import torchrec
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.model_tracker import types
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from petps.checkpoint import POLICIES, Column, Store, Table
from petps.errors import FailedPrecondition, InvalidArgument
from petps.train import TrainerOutput
from petps.train.torchrec import TorchRecIds, _local_rows
from petps.train.tracker import Tracker

ROOT = Path(__file__).resolve().parents[2]
OLD = ROOT / ".venv-train/old-torchrec"
PATHS = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
FIRST = not hasattr(types, "DeltaTrackerConfig")
ROWS, DIM, SEED = 100, 4, 11
TABLES = {"users": ["viewer"], "goods": ["seen", "bought"]}


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Tower(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, tables: dict[str, list[str]]) -> None:
        super().__init__()
        self.bags = torchrec.EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=features
                )
                for name, features in tables.items()
            ],
        )

        self.dense = torch.nn.Linear(3 * DIM, 1)  # TorchRec's tracker needs a dense part

    def forward(self, features: Any) -> Any:
        return self.dense(self.bags(features).values()).square().mean()


class Two(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, first: dict[str, list[str]], second: dict[str, list[str]]) -> None:
        super().__init__()
        self.first, self.second = Tower(first), Tower(second)


def sharded(
    module: Any, consumers: list[str] | None, mode: str = "ID_ONLY", *, ranks: int = 1
) -> Any:
    """Shard by tables on one rank, by rows over several."""
    sparse = [weight for name, weight in module.named_parameters() if "embedding_bags" in name]
    apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, sparse, {"lr": 0.1})
    sharder = EmbeddingBagCollectionSharder()
    plans = {
        path: construct_module_sharding_plan(
            collection,
            {
                table.name: table_wise(rank=0) if ranks == 1 else row_wise()
                for table in collection.embedding_bag_configs()
            },
            sharder=sharder,
            local_size=ranks,
            world_size=ranks,
            device_type="cpu",
        )
        for path, collection in module.named_modules()
        if isinstance(collection, torchrec.EmbeddingBagCollection)
    }
    plan, sharders = ShardingPlan(plan=plans), [sharder]
    given = {"module": module, "device": torch.device("cpu"), "plan": plan, "sharders": sharders}
    if consumers is None:
        return DistributedModelParallel(**given)
    mode = getattr(types.TrackingMode, mode)
    if FIRST:
        config = types.ModelTrackerConfig(tracking_mode=mode, consumers=consumers)
        return DistributedModelParallel(**given, model_tracker_config=config)
    model = DistributedModelParallel(**given)
    model.init_torchrec_delta_tracker(
        types.DeltaTrackerConfig(tracking_mode=mode, consumers=consumers)
    )
    return model


class Trainer:
    def __init__(
        self, tracker: Tracker, consumers: list[str] | None = None, **options: Any
    ) -> None:
        torch.manual_seed(SEED)
        self.model = sharded(Tower(TABLES), consumers or ["petps"], **options)
        self.ids = TorchRecIds(tracker, self.model, columns=["momentum1"])
        self.step = 0

    def train(self, steps: int = 1, features: dict[str, list[int]] | None = None) -> None:
        for _ in range(steps):
            self.step += 1
            self.model(kjt(features or batch(self.step))).backward()
            self.ids.drain()

    def rows(self) -> dict[str, np.ndarray]:
        return {
            name: table.gather(table.keys()).columns["row"]
            for name, table in self.ids.tables.items()
        }


def batch(step: int) -> dict[str, list[int]]:
    random = np.random.default_rng((SEED, step))
    names = ("viewer", "seen", "bought")
    return {name: random.integers(0, ROWS, 4).tolist() for name in names}


def kjt(features: dict[str, list[int]]) -> Any:
    """Return a batch of two samples with half of the ids each."""
    lengths = [n for ids in features.values() for n in (len(ids) // 2, len(ids) - len(ids) // 2)]
    return torchrec.KeyedJaggedTensor(
        keys=list(features),
        values=torch.tensor([id for ids in features.values() for id in ids], dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
    )


USERS, GOODS = "bags.embedding_bags.users", "bags.embedding_bags.goods"


def touched(tracker: Tracker, tenant: str = "a") -> dict[str, list[int]]:
    with tracker.read(tenant) as reading:
        actual = {name: reading.ids(name).tolist() for name in (USERS, GOODS)}
        reading.acknowledge()
    return actual


def test_what_training_looked_up_is_tracked_and_evaluation_is_not() -> None:
    tracker = Tracker(tenants=["a"])
    trainer = Trainer(tracker)
    assert set(trainer.ids.tables) == {USERS, GOODS}
    for _ in range(5):
        before = trainer.rows()
        trainer.train(2)
        expected = [batch(step) for step in (trainer.step - 1, trainer.step)]
        actual = touched(tracker)
        assert actual[USERS] == sorted({key for b in expected for key in b["viewer"]})
        goods = {key for b in expected for key in (*b["seen"], *b["bought"])}
        assert actual[GOODS] == sorted(goods)
        for name, rows in trainer.rows().items():
            changed = np.flatnonzero((rows != before[name]).any(axis=1))
            assert len(changed) > 0
            assert set(changed.tolist()) <= set(actual[name])
    trainer.model.eval()
    trainer.model(kjt(batch(99)))
    trainer.ids.drain()
    assert touched(tracker) == {USERS: [], GOODS: []}


def test_intervals_and_tables_without_lookups_are_empty() -> None:
    tracker = Tracker(tenants=["a"])
    trainer = Trainer(tracker, ["petps", "slow"])
    assert trainer.ids.drain() == 0
    trainer.train(1, {"viewer": [1, 2], "seen": [], "bought": []})
    assert trainer.ids.drain() == 0  # TorchRec's own read raises here
    assert touched(tracker) == {USERS: [1, 2], GOODS: []}
    trainer.train(1, {"viewer": [], "seen": [3], "bought": [4, 4]})
    assert touched(tracker) == {USERS: [], GOODS: [3, 4]}
    theirs = trainer.ids._theirs  # the other consumer has lost nothing
    read = theirs.get_delta_ids if FIRST else theirs.get_unique_ids
    actual = {name: sorted(ids.tolist()) for name, ids in read("slow").items()}
    assert actual == {USERS: [1, 2], GOODS: [3, 4]}


def test_a_lookup_after_a_reading_within_a_step_is_not_lost() -> None:
    tracker = Tracker(tenants=["a"])
    trainer = Trainer(tracker)
    trainer.train(1, {"viewer": [1], "seen": [1], "bought": [1]})
    inner = trainer.model.module  # bypasses DistributedModelParallel.forward, which counts steps
    inner(kjt({"viewer": [7], "seen": [8], "bought": [9]})).backward()
    trainer.ids.drain()
    assert touched(tracker) == {USERS: [1, 7], GOODS: [1, 8, 9]}


def test_a_restored_trainer_continues(tmp_path: Path) -> None:
    columns = (Column("row", "f32", DIM), Column("momentum1", "f32", 1))
    store = Store.create(tmp_path, "m", [Table(name, columns) for name in (USERS, GOODS)])

    def begun() -> tuple[Trainer, TrainerOutput]:
        tracker = Tracker()
        trainer = Trainer(tracker)
        tables = list(trainer.ids.tables.values())
        return trainer, TrainerOutput(
            tracker, tables, store=store, policy=POLICIES["consecutive"]()
        )

    trainer, output = begun()
    for version in range(1, 5):
        trainer.train(2)
        info = output.checkpoint(version)
        assert (info.rows == 2 * ROWS) == (version == 1)
        for name, rows in store.restore(version).items():
            actual = rows.columns["row"].view(np.float32)
            np.testing.assert_array_equal(actual, trainer.rows()[name])
    again, output = begun()
    output.restore(4)
    again.step = trainer.step
    for one_trainer in (trainer, again):
        one_trainer.train(5)
    for name, expected in trainer.rows().items():  # these depend on the optimizer's state too
        np.testing.assert_array_equal(again.rows()[name], expected)


def test_unusable_models_are_named() -> None:
    tracker = Tracker()
    with pytest.raises(InvalidArgument, match="is no DistributedModelParallel"):
        TorchRecIds(tracker, torch.nn.Linear(1, 1))
    with pytest.raises(FailedPrecondition, match="is not turned on"):
        TorchRecIds(tracker, sharded(Tower(TABLES), None))
    with pytest.raises(InvalidArgument, match="no consumer 'petps'; it has: other"):
        TorchRecIds(tracker, sharded(Tower(TABLES), ["other"]))
    if not FIRST:
        with pytest.raises(InvalidArgument, match="in mode MOMENTUM_LAST"):
            TorchRecIds(tracker, sharded(Tower(TABLES), ["petps"], "MOMENTUM_LAST"))
    twice = sharded(Two({"users": ["a"]}, {"users": ["b"]}), ["petps"])
    with pytest.raises(InvalidArgument, match=r"table users is in first.bags and in second"):
        TorchRecIds(tracker, twice)
    twice = sharded(Two({"users": ["a"]}, {"goods": ["a"]}), ["petps"])
    with pytest.raises(InvalidArgument, match="feature a is in"):
        TorchRecIds(tracker, twice)
    assert tracker.tables == {}


RANK = """
import os, sys, torch
from petps.train.tracker import Tracker
from petps.train.torchrec import TorchRecIds
from tests.train import train_torchrec as own
file, rank = sys.argv[1], int(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
tracker = Tracker(tenants=["a"])
model = own.sharded(own.Tower(own.TABLES), ["petps"], ranks=2)
ids = TorchRecIds(tracker, model)
for step in range(3):
    model(own.kjt(own.batch(2 * step + rank))).backward()
    ids.drain()
table = ids.tables[own.USERS]
with tracker.read("a") as reading:
    print("KEYS", len(table.keys()), *table.keys_of(reading.ids(own.USERS)).tolist(), flush=True)
torch.distributed.barrier()  # the other rank may still need this one
os._exit(0)  # once in many runs PyTorch ended the interpreter with a thread that was not joined
"""


def test_each_of_two_ranks_tracks_its_own_rows(tmp_path: Path) -> None:
    """Each rank has half of the rows, and the ids that any rank looked up of them, as keys."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(tmp_path / "store"), str(rank)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*PATHS, str(ROOT)])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    actual: list[list[int]] = []
    try:
        for process in ranks:
            out, error = process.communicate(timeout=450)
            assert process.returncode == 0, error[-4000:]
            (line,) = [line for line in out.splitlines() if line.startswith("KEYS ")]
            actual.append([int(word) for word in line.split()[1:]])
    finally:
        for process in ranks:
            process.kill()
    expected = sorted({key for step in range(6) for key in batch(step)["viewer"]})
    assert [numbers[0] for numbers in actual] == [ROWS // 2, ROWS // 2]
    assert actual[0][1:] == [key for key in expected if key < ROWS // 2]
    assert actual[1][1:] == [key for key in expected if key >= ROWS // 2]


def shard(offsets: list[int], sizes: list[int]) -> Any:
    metadata = SimpleNamespace(shard_offsets=offsets, shard_sizes=sizes)
    return SimpleNamespace(metadata=metadata, tensor=torch.zeros(*sizes))


def test_local_rows_are_numbered_within_the_table() -> None:
    """Two ranks of a table by rows; with sharding by columns, no rank has a whole row."""

    def whole(*shards: Any) -> Any:
        return SimpleNamespace(local_shards=lambda: list(shards), size=lambda: (16, 4))

    tensor, first = _local_rows("t", whole(shard([8, 0], [8, 4])))
    assert (tuple(tensor.shape), first) == ((8, 4), 8)
    with pytest.raises(InvalidArgument, match="sharded by columns"):
        _local_rows("t", whole(shard([0, 2], [16, 2])))
    for shards in ((), (shard([0, 0], [4, 4]), shard([8, 0], [4, 4]))):
        with pytest.raises(InvalidArgument, match=f"one shard on this rank, got {len(shards)}"):
            _local_rows("t", whole(*shards))
    with pytest.raises(InvalidArgument, match="not in the model's state"):
        _local_rows("t", None)


@pytest.mark.skipif(FIRST, reason="this is the first generation")
def test_the_first_generation_passes_these_tests() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", __file__],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(OLD), *PATHS])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "7 passed, 1 skipped" in done.stdout
