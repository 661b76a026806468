"""A small DLRM continues from quantised versions of a store, as in bench.checkpoint.loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.checkpoint.loss import Task, half_interval_95, resumed
from examples.demo.dlrm import ROW_OPTIMIZERS, Shape, area_under_curve, log_loss
from examples.demo.ratings import draw_clicks
from petps.checkpoint import Quantising
from petps.errors import InvalidArgument

SEED = 7
SHAPES = {
    "adagrad": Shape(dim=8, batch=128),
    "adam": Shape(dim=8, batch=128, row_optimizer="adam", row_learning_rate=0.01),
}


@pytest.fixture(scope="module", name="task", params=ROW_OPTIMIZERS)
def fixture_task(request: pytest.FixtureRequest) -> Task:
    return Task.of(draw_clicks(8_000, SEED, ids=500), SHAPES[request.param])


def weights(training: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in training.model.state_dict().items()}


def test_training_lowers_the_loss(task: Task) -> None:
    training = task.begin(SEED)
    labels = task.held_out.labels.numpy()
    before = task.loss(training)
    training.train(training.steps)
    after = training.score(task.held_out)
    share = labels.mean()
    constant = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    assert log_loss(after, labels) < min(before, constant) - 0.01
    assert area_under_curve(after, labels) > 0.6


def test_auc_and_log_loss_match_their_definitions() -> None:
    logits = np.array([0.0, 2.0, 2.0, -1.0])
    labels = np.array([0, 1, 0, 0], np.float32)
    pairs = [(a > b) + (a == b) / 2 for a in logits[labels == 1] for b in logits[labels == 0]]
    assert area_under_curve(logits, labels) == pytest.approx(np.mean(pairs))
    chance = 1 / (1 + np.exp(-logits))
    expected = -np.mean(np.log(np.where(labels == 1, chance, 1 - chance)))
    assert log_loss(logits, labels) == pytest.approx(expected)


@pytest.mark.parametrize("labels", [np.zeros(3, np.float32), np.ones(3, np.float32)])
def test_one_label_alone_has_no_area_under_the_curve(labels: np.ndarray) -> None:
    with pytest.raises(InvalidArgument, match="both labels"):
        area_under_curve(np.array([0.0, 1.0, 2.0]), labels)


def test_unquantised_restores_change_nothing(task: Task, tmp_path: Path) -> None:
    whole = task.begin(SEED)
    whole.train(whole.steps)
    training, store = resumed(task, SEED, 3, tmp_path / "store", None)
    assert store.state.restores == 3
    expected = weights(whole)
    for name, actual in weights(training).items():
        np.testing.assert_array_equal(actual, expected[name], name)


def test_every_stored_column_changes_what_a_resumed_training_learns(
    task: Task, tmp_path: Path
) -> None:
    whole = task.begin(SEED)
    whole.train(whole.steps)
    expected = whole.score(task.held_out)
    for column in whole.stored_as({})[0].columns:
        rounded = {column.name: "asymmetric8"}
        training, _ = resumed(task, SEED, 1, tmp_path / column.name, None, rounded)
        assert not np.array_equal(training.score(task.held_out), expected), column.name


@pytest.mark.parametrize(("bits", "restores"), [(2, 1), (3, 3), (4, 4)])
def test_quantised_restores_change_the_loss_little(
    task: Task, tmp_path: Path, bits: int, restores: int
) -> None:
    training, store = resumed(task, SEED, restores, tmp_path / "store", Quantising(restores))
    assert store.state.restores == restores
    for table in store.tables_of().values():
        dtypes = [column.dtype for column in table.columns]
        second_moment = ["f32"] if task.shape.row_optimizer == "adam" else []
        assert dtypes == [f"adaptive{bits}", "asymmetric8", *second_moment]
    whole = task.begin(SEED)
    whole.train(whole.steps)
    assert not np.array_equal(training.score(task.held_out), whole.score(task.held_out))
    assert task.loss(training) == pytest.approx(task.loss(whole), abs=0.02)


def test_a_version_restored_more_often_than_expected_has_8_bits(task: Task, tmp_path: Path) -> None:
    _, store = resumed(task, SEED, 3, tmp_path / "store", Quantising(1))
    kinds = {
        version.version: (version.kind, next(iter(lineage.tables.values())).columns[0].dtype)
        for lineage in store.state.lineages
        for version in lineage.versions
    }
    assert kinds[1] == ("base", "adaptive2")
    assert kinds[2][1] == "adaptive2"
    assert kinds[3] == ("base", "asymmetric8")


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.7062), (20, 2.0930)])
def test_the_interval_of_a_mean_is_students(count: int, quantile: float) -> None:
    values = np.arange(count, dtype=np.float64)
    expected = quantile * values.std(ddof=1) / np.sqrt(count)
    assert half_interval_95(values.tolist()) == pytest.approx(expected, rel=1e-4)


def test_forget_erases_all_weights(task: Task) -> None:
    training = task.begin(SEED)
    training.forget()
    assert np.isnan(training.score(task.held_out)).all()


def test_an_unknown_key_is_named(task: Task) -> None:
    with pytest.raises(InvalidArgument, match=r"field field0: key \d+ is unknown"):
        task.vocabulary.encode(draw_clicks(3_000, SEED, ids=900))
