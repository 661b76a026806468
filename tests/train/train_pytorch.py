"""PyTorch's embeddings in real training: what is tracked, gathered, checkpointed and restored.

Run by `make test-train`, in an environment that has PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from petps.checkpoint import POLICIES, Column, Store, Table
from petps.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from petps.train import Every, Links, LoneTables, RankedOutput, TrainerOutput, open_store
from petps.train.pytorch import TorchTable, track_module
from petps.train.tracker import Tracker

SEED, ROWS, DIM = 3, 300, 4


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.bags = torch.nn.EmbeddingBag(ROWS, DIM, sparse=sparse)
        self.inner = torch.nn.ModuleDict({"goods": torch.nn.Embedding(ROWS, DIM, sparse=sparse)})
        self.frozen = torch.nn.Embedding.from_pretrained(torch.ones(5, DIM))
        self.dense = torch.nn.Linear(2 * DIM, 1)

    def forward(self, bags: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        right = self.inner["goods"](items).sum(dim=1) + self.frozen(items[:, 0] % 5)
        both = torch.cat([self.bags(bags), right], dim=1)
        actual: torch.Tensor = self.dense(both)
        return actual


class Trainer:
    """A trainer in which everything random depends on the seed and the step."""

    def __init__(self, tracker: Tracker, kind: Any = torch.optim.Adagrad, **options: Any) -> None:
        torch.manual_seed(SEED)
        self.model = Model(options.pop("sparse", True))
        embeddings = [self.model.bags.weight, self.model.inner["goods"].weight]
        self.optimizer = kind(embeddings, lr=0.1, **options)
        columns = ("sum",) if kind is torch.optim.Adagrad else ()
        self.tables = track_module(
            tracker, self.model, optimizer=self.optimizer, columns=columns, prefix="tower"
        )
        self.step = 0

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        random = np.random.default_rng((SEED, self.step))
        shape = (8, 3)
        return tuple(torch.from_numpy(random.integers(0, ROWS, shape)) for _ in range(2))

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            self.optimizer.zero_grad()
            self.model(*self.batch()).square().mean().backward()
            self.optimizer.step()

    def rows(self) -> dict[str, np.ndarray]:
        return {table.name: table.gather(table.keys()).columns["row"] for table in self.tables}


def touched(tracker: Tracker, table: str) -> list[int]:
    with tracker.read("a") as reading:
        ids: list[int] = reading.ids(table).tolist()
        reading.acknowledge()
    return ids


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adagrad, {}),
        (torch.optim.SGD, {}),
        (torch.optim.SparseAdam, {}),
        (torch.optim.Adagrad, {"sparse": False}),
    ],
)
def test_every_changed_row_is_tracked(kind: Any, options: dict[str, Any]) -> None:
    tracker = Tracker(tenants=["a"])
    trainer = Trainer(tracker, kind, **options)
    assert [table.name for table in trainer.tables] == ["tower.bags", "tower.inner.goods"]
    for _ in range(20):
        before = trainer.rows()
        trainer.train(2)
        after = trainer.rows()
        with tracker.read("a") as reading:
            actual = {name: reading.ids(name).tolist() for name in after}
            reading.acknowledge()
        for name in after:
            changed = np.flatnonzero((before[name] != after[name]).any(axis=1))
            assert len(changed) > 0
            assert set(changed.tolist()) <= set(actual[name])
            assert len(actual[name]) <= 48


def test_only_lookups_in_training_are_tracked() -> None:
    tracker = Tracker(tenants=["a"])
    trainer = Trainer(tracker)
    trainer.train()
    assert touched(tracker, "tower.bags") == sorted(set(trainer.batch()[0].ravel().tolist()))
    trainer.model.eval()
    trainer.model(*trainer.batch())
    trainer.optimizer.step()
    assert touched(tracker, "tower.bags") == []
    trainer.model.train()
    trainer.model.bags(input=torch.tensor([[7]]))
    trainer.optimizer.step()
    assert touched(tracker, "tower.bags") == [7]


def test_a_reading_within_a_step_loses_nothing() -> None:
    """Between forward and step the row is still the old one, so its id must not be acknowledged."""
    tracker = Tracker(tenants=["a"])
    trainer = Trainer(tracker)
    loss = trainer.model(*trainer.batch()).square().mean()
    assert touched(tracker, "tower.bags") == []
    loss.backward()
    trainer.optimizer.step()
    assert touched(tracker, "tower.bags") == sorted(set(trainer.batch()[0].ravel().tolist()))


def test_a_restored_trainer_continues(tmp_path: Path) -> None:
    names = ("tower.bags", "tower.inner.goods")
    tables = [Table(name, (Column("row", "f32", DIM), Column("sum", "f32", DIM))) for name in names]
    store = Store.create(tmp_path / "store", "m", tables)

    def begun() -> tuple[Trainer, TrainerOutput]:
        tracker = Tracker()
        trainer = Trainer(tracker)
        policy = POLICIES["consecutive"]()
        return trainer, TrainerOutput(tracker, trainer.tables, store=store, policy=policy)

    trainer, output = begun()
    dense = {}
    for version in range(1, 6):
        trainer.train(3)
        info = output.checkpoint(version)
        assert info.rows == 2 * ROWS if version == 1 else info.rows < ROWS
        expected = trainer.rows()
        for name, rows in store.restore(version).items():
            np.testing.assert_array_equal(rows.columns["row"].view(np.float32), expected[name])
        dense[version] = {
            name: value.clone() for name, value in trainer.model.dense.state_dict().items()
        }
    expected_sums = trainer.tables[0].gather(trainer.tables[0].keys()).columns["sum"]

    again, output = begun()
    output.restore(5)
    again.model.dense.load_state_dict(dense[5])
    again.step = trainer.step
    found_sums = again.tables[0].gather(again.tables[0].keys()).columns["sum"]
    np.testing.assert_array_equal(found_sums, expected_sums)
    assert found_sums.any()
    for one_trainer in (trainer, again):
        one_trainer.train(10)
    for name, expected_rows in trainer.rows().items():
        np.testing.assert_array_equal(again.rows()[name], expected_rows)
    output.checkpoint(6)
    restored = store.restore(6)[names[0]].columns["row"].view(np.float32)
    np.testing.assert_array_equal(restored, trainer.rows()[names[0]])


def test_a_loop_of_its_own_continues_from_versions_behind_it(tmp_path: Path) -> None:
    def run(folder: Path, steps: int) -> tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Restore, train up to a step, and return where that began, the rows and dense weights."""
        tracker = Tracker()
        trainer = Trainer(tracker)
        dense = trainer.model.dense
        optimizer = torch.optim.Adam(dense.parameters(), lr=0.1)
        tables, links = LoneTables(tracker, trainer.tables), Links.alone()
        store = open_store(folder / "store", "m", tables, links, quantising=None)
        with RankedOutput(
            tables, links, store=store, policy=POLICIES["consecutive"](),
            checkpoint=Every(steps=4), model=dense, optimizer=optimizer,
        ) as output:  # fmt: skip
            first = trainer.step = output.restore().step
            while trainer.step < steps:
                trainer.train()
                optimizer.step()
                optimizer.zero_grad()
                output.after(trainer.step)
                output.wait()
        weights = {name: value.numpy().copy() for name, value in dense.state_dict().items()}
        return first, trainer.rows(), weights

    _, *whole = run(tmp_path / "whole", 20)
    run(tmp_path / "cut", 11)
    first, *again = run(tmp_path / "cut", 20)
    assert first == 8
    for expected, actual in zip(whole, again, strict=True):
        for name, values in expected.items():
            np.testing.assert_array_equal(actual[name], values)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"sparse": False}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"weight_decay": 0.1, "sparse": False}),
    ],
)
def test_optimizers_that_change_rows_nobody_looked_up_are_refused(
    kind: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument, match="changes rows that nobody looked up"):
        Trainer(Tracker(), kind, **options)


def test_a_shared_weight_is_one_table_and_max_norm_is_tracked_in_evaluation() -> None:
    tracker = Tracker(tenants=["a"])
    model = torch.nn.Module()
    model.first = torch.nn.Embedding(10, DIM, max_norm=0.1)
    model.second = torch.nn.Embedding(10, DIM)
    model.second.weight = model.first.weight
    (table,) = track_module(tracker, model)
    assert table.name == "first"
    model.second(torch.tensor([3]))
    model.eval()
    model.second(torch.tensor([4]))
    model.first(torch.tensor([5]))  # rescaled by max_norm
    assert touched(tracker, "first") == [3, 5]


def test_bad_input_is_named() -> None:
    tracker = Tracker()
    with pytest.raises(InvalidArgument, match=r"has no nn.Embedding"):
        track_module(tracker, torch.nn.Linear(2, 2))
    bag = torch.nn.EmbeddingBag(10, DIM, sparse=True)
    other = torch.nn.Linear(2, 2)
    with pytest.raises(InvalidArgument, match="does not train its weight"):
        track_module(tracker, bag, optimizer=torch.optim.SGD(other.parameters(), lr=1))
    (table,) = track_module(tracker, bag)
    assert table.name == "embedding"
    with pytest.raises(AlreadyExists, match="name it by its owner"):
        track_module(tracker, bag)
    with pytest.raises(NotFound, match="no place for key 10"):
        table.gather(np.array([10], np.uint64))
    with pytest.raises(InvalidArgument, match="all 10 rows must be loaded, got 5"):
        table.load_pieces([(table.keys()[:5], {"row": np.zeros((5, DIM), np.float32)})])
    with pytest.raises(InvalidArgument, match="need an optimizer"):
        TorchTable(tracker, "t", bag.weight, columns=["sum"])
    adam = torch.optim.SparseAdam(bag.parameters())
    moments = TorchTable(Tracker(), "t", bag.weight, optimizer=adam, columns=["exp_avg"])
    ones = np.ones((10, DIM), np.float32)
    moments.load_pieces([(moments.keys(), {"row": ones, "exp_avg": 2 * ones})])
    bag.weight.grad = torch.sparse_coo_tensor([[3]], torch.zeros(1, DIM), (10, DIM))
    adam.step()  # its state is whole, as if the optimizer had created it
    bag.weight.grad = None
    assert (moments.gather(np.array([2], np.uint64)).columns["exp_avg"] == 2).all()
    wrong = TorchTable(
        Tracker(),
        "t",
        bag.weight,
        optimizer=torch.optim.SparseAdam(bag.parameters()),
        columns=["sum"],
    )
    with pytest.raises(InvalidArgument, match="keeps no 'sum' for its weight"):
        wrong.load_pieces([(wrong.keys(), {"row": ones, "sum": ones})])
    adagrad = torch.optim.Adagrad(bag.parameters())
    with pytest.raises(InvalidArgument, match="keeps no 'summ' for its weight, but 'step', 'sum'"):
        TorchTable(tracker, "t", bag.weight, optimizer=adagrad, columns=["summ"])
    with pytest.raises(InvalidArgument, match=r"must be of floats \[n, dim\]"):
        TorchTable(tracker, "t", torch.ones(3))
    shard = TorchTable(tracker, "shard", torch.zeros(4, 2), first_key=100)
    assert shard.keys().tolist() == [100, 101, 102, 103]
    with pytest.raises(NotFound, match="no place for key 99"):
        shard.ids_of(np.array([99], np.uint64))
    tracker.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        bag(torch.tensor([[1]]))
