"""Samples grouped by their keys: always a permutation, never worse, better where possible."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from petps.errors import InvalidArgument
from petps.train import Batch, Ragged
from petps.train.batch import divide
from petps.train.clustering import ByKeys, cluster, dedup_ratio
from tests.seed import SEED


def ragged(samples: list[list[int]]) -> Ragged:
    lengths = [len(sample) for sample in samples]
    keys = np.array([key for sample in samples for key in sample], np.uint64)
    return Ragged(keys, np.cumsum([0, *lengths]).astype(np.int64))


def slow_ratio(batch: dict[str, list[list[int]]], bounds: Any, order: Any) -> float:
    """Compute the ratio by sets of (feature, key)."""
    rows = [
        {(name, key) for name, samples in batch.items() for key in samples[sample]}
        for sample in order
    ]
    every = set().union(*rows)
    parts = [set().union(*rows[a:b]) for a, b in itertools.pairwise(bounds)]
    return sum(map(len, parts)) / len(every) if every else 1.0


def sessions(random: Any, hot: int) -> dict[str, Ragged]:
    """Return 512 samples of 32 sessions in a random order.

    A sample has 10 of its session's 20 keys, and 2 of its own. hot: keys that all samples have.
    """
    session = random.integers(0, 32, 512)
    clicked = [
        [1000 * number + key for key in random.choice(20, 10, replace=False)]
        + random.integers(10**6, 10**9, 2).tolist()
        + [100_000 + key for key in range(hot)]
        for number in session
    ]
    return {"clicked": ragged(clicked), "user": Ragged.single(session.astype(np.uint64))}


samples_of_keys = some.lists(
    some.tuples(*[some.lists(some.integers(0, 12), max_size=4)] * 2), max_size=30
)


@given(samples_of_keys, some.integers(1, 9), some.integers(0, 3))
def test_the_order_is_a_permutation_without_more_distinct_keys(
    batch: list[tuple[list[int], list[int]]], micro_batches: int, seed: int
) -> None:
    lists = {"a": [ids[0] for ids in batch], "b": [ids[1] for ids in batch]}
    keys = {name: ragged(samples) for name, samples in lists.items()}
    clustering = cluster(keys, micro_batches, seed=seed)
    assert sorted(clustering.order.tolist()) == list(range(len(batch)))
    sizes = np.diff(clustering.bounds)
    assert len(sizes) == micro_batches
    assert sizes.sum() == len(batch)
    assert clustering.bounds.tolist() == divide(len(batch), micro_batches)
    for begin, end in itertools.pairwise(clustering.bounds):
        assert (np.diff(clustering.order[begin:end]) > 0).all()
    assert clustering.after <= clustering.before
    given_order = np.arange(len(batch))
    for order, total in ((given_order, clustering.before), (clustering.order, clustering.after)):
        wanted = slow_ratio(lists, clustering.bounds, order)
        assert dedup_ratio(keys, micro_batches, order) == pytest.approx(wanted)
        assert total / max(1, clustering.distinct) == pytest.approx(
            wanted if clustering.distinct else 0
        )
    again = cluster(keys, micro_batches, seed=seed)
    assert again.order.tolist() == clustering.order.tolist()


@pytest.mark.parametrize("hot", [0, 1, 100])
@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_samples_of_a_session_are_grouped(micro_batches: int, hot: int) -> None:
    """Keys of every sample are in each micro-batch in any case; they do not hide the others."""
    keys = sessions(np.random.default_rng((SEED, micro_batches)), hot)
    clustering = cluster(keys, micro_batches)
    before, after = (
        (total - hot * micro_batches) / (clustering.distinct - hot)
        for total in (clustering.before, clustering.after)
    )
    assert before > 1.25
    # Even a perfect cut repeats the keys of the sessions that it divides.
    assert after - 1 < 0.25 * (before - 1), f"{before:.3f} -> {after:.3f}, seed {SEED}"


def test_grouped_samples_keep_their_order() -> None:
    keys = {"a": ragged([[part] for part, size in enumerate([4, 8, 8, 4]) for _ in range(size)])}
    clustering = cluster(keys, 4)
    assert clustering.order.tolist() == list(range(24))
    assert (clustering.before, clustering.after, clustering.distinct) == (4, 4, 4)


def test_a_key_of_two_tables_counts_as_two() -> None:
    samples = ragged([[1], [2], [1], [2]])
    keys = {"clicked": samples, "bought": samples}
    clustering = cluster(keys, 2)
    assert (clustering.distinct, clustering.before, clustering.after) == (4, 8, 4)
    shared = cluster(keys, 2, features={"clicked": "items", "bought": "items"})
    assert (shared.distinct, shared.before, shared.after) == (2, 4, 2)


def test_batches_are_arranged_for_a_pipeline() -> None:
    random = np.random.default_rng(SEED)
    arrange = ByKeys(4)
    totals = np.zeros(3)
    for _ in range(3):
        keys = sessions(random, 1)
        labels = np.arange(512)
        batch = Batch(keys, {"label": labels}, b"where")
        done = arrange(batch)
        clustering = cluster(keys, 4)
        assert done.reader == b"where"
        assert done.dense["label"].tolist() == clustering.order.tolist()
        own = keys["user"].keys[clustering.order]
        assert done.keys["user"].keys.tolist() == own.tolist()
        totals += (clustering.distinct, clustering.before, clustering.after)
        counted = sum(
            len(np.unique(part.keys[name].keys)) for part in done.parts(4) for name in keys
        )
        assert counted == clustering.after
    before, after = arrange.ratios
    assert before == pytest.approx(totals[1] / totals[0])
    assert after == pytest.approx(totals[2] / totals[0])


def test_wrong_input_is_named() -> None:
    keys = {"a": ragged([[1], [2]]), "b": ragged([[1]])}
    with pytest.raises(InvalidArgument, match=r"the same number of samples, got .'a': 2, 'b': 1."):
        cluster(keys, 2)
    with pytest.raises(InvalidArgument, match="micro_batches must be at least 1, got 0"):
        cluster({"a": keys["a"]}, 0)
    with pytest.raises(InvalidArgument, match="no permutation of the 2 samples"):
        dedup_ratio({"a": keys["a"]}, 2, np.array([0, 0]))
    assert dedup_ratio({}, 2) == 1.0
    assert cluster({}, 2).order.tolist() == []
