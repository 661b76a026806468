"""The trials that decide whether batches are clustered, with invented step times.

Does not cover: the pipeline that measures steps (tests/train/train_where_pays.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from petps.train import Batch, ByKeys, Ragged, where_pays
from petps.train.where_pays import (
    BLOCK,
    BLOCKS,
    FIRST_TRIAL,
    JUDGED,
    LOSS_STEPS,
    SETTLING,
    WherePays,
)

MICRO_BATCHES = 2
TRIAL = BLOCK * BLOCKS
INTERVAL = 600  # instead of 4,096
AHEAD = 7  # as a nested pipeline has


def batch_of(keys: list[int]) -> Batch:
    return Batch({"item": Ragged.single(np.array(keys, np.uint64))})


MIXED = batch_of([1, 2] * 8)  # clustered: one key in each micro-batch
APART = batch_of(list(range(16)))  # no two samples share a key


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where_pays, "INTERVAL", INTERVAL)


class Training:
    """Batches arranged and trained, with ``ahead`` batches arranged before each step.

    seconds_of(trained, arranged, step): whether the trained batch is clustered, and whether the
    one that is arranged during the step is.
    """

    def __init__(self, ahead: int = AHEAD) -> None:
        self.arrange = WherePays(MICRO_BATCHES)
        self.ahead = ahead
        self.number = 0
        self.clustered: list[bool] = []

    def train(
        self, steps: int, seconds_of: Callable[[bool, bool, int], float], batch: Batch = MIXED
    ) -> list[bool]:
        """Return which of the steps had clustered batches."""
        last = self.number + steps
        while self.number < last:
            while len(self.clustered) <= self.number + self.ahead:
                self.clustered.append(self.arrange(batch) is not batch)
            self.number += 1
            trained, arranged = self.clustered[self.number - 1], self.clustered[-1]
            self.arrange.after(self.number, seconds_of(trained, arranged, self.number))
        return self.clustered[last - steps : last]


def faster(trained: bool, arranged: bool, step: int) -> float:
    """A step in 50 takes ten times as long, and some vary by a few per cent."""
    return (0.9 if trained else 1.0) * (10 if step % 50 == 0 else 1 + step % 7 / 200)


def slower(trained: bool, arranged: bool, step: int) -> float:
    return 1.1 if trained else 1.0


def costly(trained: bool, arranged: bool, step: int) -> float:
    """Clustering saves nothing, and takes the processor of the step in which it happens."""
    return 1.5 if arranged else 1.0


def worth_its_cost(trained: bool, arranged: bool, step: int) -> float:
    return (0.6 if trained else 1.0) + (0.2 if arranged else 0.0)


def not_worth_its_cost(trained: bool, arranged: bool, step: int) -> float:
    return (0.9 if trained else 1.0) + (0.2 if arranged else 0.0)


def test_a_trial_has_blocks_of_both_kinds() -> None:
    clustered = Training().train(FIRST_TRIAL + TRIAL, slower)
    assert not any(clustered[:FIRST_TRIAL])
    blocks = np.array(clustered[FIRST_TRIAL:]).reshape(BLOCKS, BLOCK)
    assert blocks.all(axis=1).tolist() == [False, True, False, True]
    assert blocks.any(axis=1).tolist() == [False, True, False, True]


@pytest.mark.parametrize("ahead", [0, 1, AHEAD, 12])
@pytest.mark.parametrize(
    ("seconds_of", "pays"),
    [
        (faster, True),
        (slower, False),
        (costly, False),
        (worth_its_cost, True),
        (not_worth_its_cost, False),
        (lambda trained, arranged, step: 1.0, False),
    ],
)
def test_a_trial_measures_all_that_clustering_costs(
    ahead: int, seconds_of: Callable[[bool, bool, int], float], pays: bool
) -> None:
    training = Training(ahead)
    training.train(FIRST_TRIAL + TRIAL, seconds_of)
    assert training.arrange.pays == pays


@pytest.mark.parametrize("ahead", [0, 1, AHEAD])
@pytest.mark.parametrize("factor", [2, 8, 100])
def test_a_trial_that_loses_much_ends_early(ahead: int, factor: float) -> None:
    """Clustering takes so much of the processor that each step is a multiple of one without."""
    times: list[float] = []

    def very_costly(trained: bool, arranged: bool, step: int) -> float:
        times.append(float(factor) if arranged else 1.0)
        return times[-1]

    training = Training(ahead)
    training.train(FIRST_TRIAL + TRIAL, very_costly)
    assert not training.arrange.pays
    lost = sum(times) - len(times)
    assert lost <= LOSS_STEPS + 3 * (factor - 1)


def test_a_trial_goes_on_after_a_pause_of_something_else() -> None:
    training = Training()

    def paused(trained: bool, arranged: bool, step: int) -> float:
        if step == FIRST_TRIAL + BLOCK + SETTLING + 2:
            return 40.0
        return 0.9 if trained else 1.0

    training.train(FIRST_TRIAL + TRIAL, paused)
    assert training.arrange.pays


def test_what_the_last_trial_has_shown_is_done_until_the_next() -> None:
    training = Training()
    training.train(FIRST_TRIAL + TRIAL, faster)
    training.train(training.ahead, faster)  # arranged before the decision
    assert all(training.train(INTERVAL - 2 * training.ahead, faster))
    training.train(2 * TRIAL, slower)  # the next trial
    assert not training.arrange.pays
    assert not any(training.train(100, slower))


@pytest.mark.parametrize(("seconds_of", "batch"), [(slower, MIXED), (faster, MIXED)])
def test_all_ranks_try_at_the_same_steps(
    seconds_of: Callable[[bool, bool, int], float], batch: Batch
) -> None:
    """Intervals between trials grow, and do not depend on what a trial has found."""
    training = Training()
    trials = [training.arrange._trial]
    while training.number < 12 * INTERVAL:
        training.train(100, seconds_of, APART if len(trials) == 2 else batch)
        if training.arrange._trial != trials[-1]:
            trials.append(training.arrange._trial)
    expected = [FIRST_TRIAL + 1]
    for number in range(len(trials) - 1):
        expected.append(expected[-1] + TRIAL + INTERVAL * 2**number)
    assert trials == expected
    assert len(trials) == 4


def test_trials_do_not_become_rarer_than_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where_pays, "INTERVAL_MAX", 2 * INTERVAL)
    training = Training()
    trials = {training.arrange._trial}
    while training.number < 12 * INTERVAL:
        training.train(100, slower)
        trials.add(training.arrange._trial)
    gaps = [later - earlier - TRIAL for earlier, later in itertools.pairwise(sorted(trials))]
    assert gaps[0] == INTERVAL
    assert set(gaps[1:]) == {2 * INTERVAL}


def test_a_trial_ends_early_if_no_keys_are_shared() -> None:
    training = Training()
    clustered = training.train(INTERVAL, faster, APART)
    assert sum(clustered) == JUDGED
    assert not training.arrange.pays


def test_steps_are_numbered_from_the_first_one() -> None:
    arrange = WherePays(MICRO_BATCHES, first=101)
    clustered = [arrange(MIXED) is not MIXED for _ in range(FIRST_TRIAL + 2 * BLOCK)]
    assert clustered == [False] * (FIRST_TRIAL + BLOCK) + [True] * BLOCK


def test_a_batch_without_keys_keeps_its_samples() -> None:
    batch = Batch({}, {"label": np.zeros(8)})
    arrange = WherePays(MICRO_BATCHES)
    assert all(arrange(batch) is batch for _ in range(FIRST_TRIAL + 2 * BLOCK))
    assert ByKeys(MICRO_BATCHES)(batch) is batch
