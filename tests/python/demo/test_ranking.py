"""The hit rates count correctly, and use no access that is to be predicted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from examples.demo.ranking import HISTORY, Hits, K, Ranker

OBJECTS = 400
SEED = 77


def rows_of(objects: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return rows in which object i is near i + 1 (mod OBJECTS) and far from all others."""
    rows = np.zeros((len(objects), 3), np.float32)
    angle = 2 * np.pi * objects / OBJECTS
    rows[:, 1], rows[:, 2] = 9 * np.cos(angle), 9 * np.sin(angle)
    return rows


def test_good_rows_hit_and_popularity_does_not() -> None:
    accesses = np.tile(np.arange(OBJECTS, dtype=np.int64), 6)
    hits = Ranker(accesses, OBJECTS, rows_of, SEED).predict(1200, 2400, count=300)
    assert hits.asked == 300
    assert hits.rows == 300
    assert hits.popularity < 150  # all are equally popular, so it predicts the first K


def test_rows_without_vectors_predict_by_popularity() -> None:
    random = np.random.default_rng(SEED)
    accesses = np.minimum(random.geometric(0.02, 4000) - 1, OBJECTS - 1).astype(np.int64)
    counts = np.bincount(accesses[:2000], minlength=OBJECTS)

    def popularity(objects: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        rows = np.zeros((len(objects), 3), np.float32)
        rows[:, 0] = counts[objects]
        return rows

    hits = Ranker(accesses, OBJECTS, popularity, SEED).predict(2000, 4000, count=500)
    # A tie at rank K is a hit of the rows: they do not rank an equal object above the target.
    assert hits.popularity <= hits.rows <= hits.popularity + 25
    assert 0 < hits.popularity < hits.asked


def test_new_objects_never_hit() -> None:
    accesses = np.concatenate([np.zeros(100), np.arange(1, 101)]).astype(np.int64)
    hits = Ranker(accesses, OBJECTS, rows_of, SEED).predict(100, 200, count=100)
    assert hits == Hits(100, 0, 0)


def test_a_prediction_does_not_use_the_predicted_access() -> None:
    """The rows read are those of earlier accesses and of candidates before ``begin``."""
    random = np.random.default_rng(SEED)
    accesses = random.integers(0, 50, 300)
    accesses[200:] = np.arange(50, 150)  # each new object occurs once
    read: list[set[int]] = []

    def record_and_read(objects: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        read.append(set(objects.tolist()))
        return rows_of(objects)

    Ranker(accesses, OBJECTS, record_and_read, SEED).predict(200, 300, count=1)
    candidates, history = read
    assert candidates == set(accesses[:200].tolist())
    newest = max(max(history), 49)
    position = 200 + (newest - 50) + 1  # the newest object read is right before this position
    assert history <= set(accesses[position - HISTORY : position].tolist())


def test_hits_add_up() -> None:
    assert Hits(1, 2, 3) + Hits(10, 20, 30) == Hits(11, 22, 33)
    assert K == 50
