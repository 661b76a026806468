"""The model: its gradient, its arithmetic, expiry, and the role of the seed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from examples.demo.model import (
    Settings,
    SkipGram,
    compute_gradient,
    compute_pair_loss,
    sum_by_key,
)

SEED = 20_11
SMALL = Settings(dim=5, window=3, pairs=2, negatives=3, shared_negatives=16, batch=20)


def stream(count: int, objects: int, seed: int = SEED) -> npt.NDArray[np.int64]:
    """Return accesses with a few frequent objects."""
    random = np.random.default_rng(seed)
    return np.minimum(random.geometric(0.15, count) - 1, objects - 1).astype(np.int64)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_gradient_is_the_slope_of_the_loss(seed: int) -> None:
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    vectors = random.standard_normal((7, 4))
    centres = random.integers(0, 7, 9)
    targets = random.integers(0, 7, 9)
    noise = random.integers(0, 7, 6)
    gradient = compute_gradient(vectors.astype(np.float32), centres, targets, noise, 4)
    full = np.zeros_like(vectors)
    full[gradient.keys] = gradient.values
    step = 1e-5
    for row in range(7):
        for column in range(4):
            losses = []
            for offset in (-step, step):
                moved = vectors.copy()
                moved[row, column] += offset
                losses.append(compute_pair_loss(moved, centres, targets, noise, 4))
            below, above = losses
            assert full[row, column] == pytest.approx((above - below) / (2 * step), abs=2e-4)


def test_sum_by_key_adds_the_values_of_each_key() -> None:
    random = np.random.default_rng(SEED)
    keys = random.integers(0, 6, 40)
    values = random.standard_normal((40, 3)).astype(np.float32)
    expected = np.zeros((6, 3), np.float32)
    np.add.at(expected, keys, values)
    sums = sum_by_key(keys, values)
    assert sums.keys.tolist() == sorted(set(keys.tolist()))
    np.testing.assert_allclose(sums.values, expected[sums.keys], rtol=1e-5, atol=1e-6)


def test_the_seed_determines_the_rows() -> None:
    accesses = stream(400, 30)
    rows = []
    for seed in (5, 5, 6):
        model = SkipGram(30, SMALL, seed)
        model.learn(accesses, 0, 400)
        rows.append(model.rows.copy())
    assert rows[0].tobytes() == rows[1].tobytes()
    assert rows[0].tobytes() != rows[2].tobytes()


def test_learning_lowers_the_loss() -> None:
    accesses = np.tile(np.arange(8, dtype=np.int64), 200)  # the next access is certain
    model = SkipGram(8, SMALL, SEED)
    random = np.random.default_rng(SEED)
    places = np.arange(3, 200)
    pairs = accesses[places - random.integers(1, 4, len(places))], accesses[places]
    noise = np.arange(8)
    losses = []
    for begin in range(0, 1600, 400):
        losses.append(compute_pair_loss(model.rows[:, 1:].astype(np.float64), *pairs, noise, 3))
        model.learn(accesses, begin, begin + 400)
    assert losses[-1] < 0.9 * losses[0]


def test_later_accesses_do_not_change_the_rows() -> None:
    accesses = stream(400, 30)
    other = accesses.copy()
    other[200:] = 29 - other[200:]
    models = [SkipGram(30, SMALL, SEED) for _ in range(2)]
    models[0].learn(accesses, 0, 200)
    models[1].learn(other, 0, 200)
    assert models[0].rows.tobytes() == models[1].rows.tobytes()


def test_value_0_is_the_logarithm_of_the_count() -> None:
    accesses = stream(400, 30)
    model = SkipGram(30, SMALL, SEED)
    model.learn(accesses, 0, 250)
    model.learn(accesses, 250, 400)
    counts = np.bincount(accesses, minlength=30)
    assert (model.present == (counts > 0)).all()
    np.testing.assert_allclose(model.rows[model.present, 0], np.log(counts[counts > 0]), rtol=1e-6)


def test_every_row_that_differs_is_marked_as_changed() -> None:
    accesses = stream(2000, 200)
    model = SkipGram(200, SMALL, SEED)
    before, there = model.rows.copy(), model.present.copy()
    for begin in range(0, 2000, 100):
        model.learn(accesses, begin, begin + 100)
        model.expire(begin + 100, idle=150, count_max=2, limit=3)
        differs = (before != model.rows).any(axis=1) | (there != model.present)
        changed = model.take_changed()
        assert set(np.flatnonzero(differs)) <= set(changed.tolist())
        assert model.take_changed().size == 0
        before, there = model.rows.copy(), model.present.copy()


def test_an_expired_object_starts_again_from_its_first_row() -> None:
    accesses = np.array([7, *[1, 2, 3] * 40, 7], np.int64)
    fresh = SkipGram(9, SMALL, SEED)
    model = SkipGram(9, SMALL, SEED)
    model.learn(accesses, 0, 121)
    assert not model.present[8]
    assert model.expire(121, idle=50, count_max=1, limit=10) == 1
    assert np.flatnonzero(model.present).tolist() == [1, 2, 3]
    assert model.rows[7].tobytes() == fresh.rows[7].tobytes()
    model.learn(accesses, 121, 122)
    assert model.present[7]
    assert model.rows[7, 0] == 0.0  # accessed once


def test_expiry_deletes_the_objects_unused_for_longest_up_to_the_limit() -> None:
    accesses = np.concatenate([np.arange(10), np.full(30, 11)]).astype(np.int64)
    model = SkipGram(12, SMALL, SEED)
    model.learn(accesses, 0, 40)
    assert model.expire(40, idle=5, count_max=1, limit=4) == 4
    assert np.flatnonzero(model.present).tolist() == [4, 5, 6, 7, 8, 9, 11]


def test_a_sweep_changes_every_row() -> None:
    model = SkipGram(30, SMALL, SEED)
    model.learn(stream(400, 30), 0, 400)
    model.take_changed()
    before = model.rows.copy()
    model.sweep()
    assert (model.take_changed() == np.flatnonzero(model.present)).all()
    assert (before[model.present, 1:] != model.rows[model.present, 1:]).any(axis=1).all()
    assert (before[~model.present] == model.rows[~model.present]).all()
