"""The trials that decide whether batches are clustered, with invented step times.

Does not cover: the pipeline that measures steps (tests/train/train_where_pays.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from petps.train import Batch, Ragged, where_pays
from petps.train.where_pays import BLOCK, BLOCKS, FIRST_TRIAL, INTERVAL, WherePays

MICRO_BATCHES = 2
TRIAL = BLOCK * BLOCKS


def batch_of(keys: list[int]) -> Batch:
    return Batch({"item": Ragged.single(np.array(keys, np.uint64))})


MIXED = batch_of([1, 2] * 8)  # clustered: one key in each micro-batch
APART = batch_of(list(range(16)))  # no two samples share a key


class Training:
    """Batches arranged and trained, with ``ahead`` batches arranged before each step."""

    def __init__(self, ahead: int = 3) -> None:
        self.arrange = WherePays(MICRO_BATCHES)
        self.ahead = ahead
        self.number = 0
        self.clustered: list[bool] = []

    def train(
        self, steps: int, seconds_of: Callable[[bool, int], float], batch: Batch = MIXED
    ) -> list[bool]:
        """Return which of the steps had clustered batches."""
        last = self.number + steps
        while self.number < last:
            while len(self.clustered) <= self.number + self.ahead:
                self.clustered.append(self.arrange(batch) is not batch)
            self.number += 1
            is_clustered = self.clustered[self.number - 1]
            self.arrange.after(self.number, seconds_of(is_clustered, self.number))
        return self.clustered[last - steps : last]


def faster(is_clustered: bool, step: int) -> float:
    """A step in 50 takes ten times as long, and some vary by a few per cent."""
    return (0.9 if is_clustered else 1.0) * (10 if step % 50 == 0 else 1 + step % 7 / 200)


def slower(is_clustered: bool, step: int) -> float:
    return 1.1 if is_clustered else 1.0


def test_a_trial_has_blocks_of_both_kinds() -> None:
    clustered = Training().train(FIRST_TRIAL + TRIAL, slower)
    assert not any(clustered[:FIRST_TRIAL])
    blocks = np.array(clustered[FIRST_TRIAL:]).reshape(BLOCKS, BLOCK)
    assert blocks.all(axis=1).tolist() == [False, True, False, True]
    assert blocks.any(axis=1).tolist() == [False, True, False, True]


def test_batches_are_clustered_if_steps_are_shorter() -> None:
    training = Training()
    training.train(FIRST_TRIAL + TRIAL, faster)
    assert [training.arrange.pays] == [True]
    training.train(training.ahead, faster)  # arranged before the decision
    assert all(training.train(INTERVAL - TRIAL, faster))
    training.train(2 * TRIAL, slower)  # the next trial
    assert [training.arrange.pays] == [False]
    assert not any(training.train(100, slower))


def test_equal_steps_are_no_reason_to_cluster() -> None:
    training = Training()
    training.train(FIRST_TRIAL + TRIAL, lambda is_clustered, step: 1.0)
    assert not training.arrange.pays


def test_trials_become_rare_while_clustering_does_not_pay() -> None:
    training = Training()
    clustered = training.train(16 * INTERVAL, slower)
    begins = [
        number
        for number in range(1, len(clustered))
        if clustered[number] and not any(clustered[max(0, number - 2 * BLOCK) : number])
    ]
    gaps = np.diff(begins).tolist()
    assert gaps[0] == INTERVAL + TRIAL - 1
    assert all(later >= 1.9 * earlier for earlier, later in itertools.pairwise(gaps))
    training.train(where_pays.INTERVAL_MAX * 3, slower)
    assert training.arrange._interval == where_pays.INTERVAL_MAX


def test_a_trial_ends_at_once_if_no_keys_are_shared() -> None:
    training = Training(ahead=0)
    assert not any(training.train(INTERVAL, faster, APART))
    assert not training.arrange.pays
    assert training.arrange._trial >= FIRST_TRIAL + BLOCK + INTERVAL


def test_steps_are_numbered_from_the_first_one() -> None:
    arrange = WherePays(MICRO_BATCHES, first=101)
    clustered = [arrange(MIXED) is not MIXED for _ in range(FIRST_TRIAL + 2 * BLOCK)]
    assert clustered == [False] * (FIRST_TRIAL + BLOCK) + [True] * BLOCK
