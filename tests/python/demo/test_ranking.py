"""The hit rates: what they count, and that they use no access to be predicted."""

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
    hits = Ranker(accesses, OBJECTS, rows_of, SEED).ask(1200, 2400, places=300)
    assert hits.asked == 300
    assert hits.rows == 300
    assert hits.popularity < 150  # all are equally popular, so it predicts the first K


def test_rows_that_say_nothing_leave_popularity() -> None:
    random = np.random.default_rng(SEED)
    accesses = np.minimum(random.geometric(0.02, 4000) - 1, OBJECTS - 1).astype(np.int64)
    counts = np.bincount(accesses[:2000], minlength=OBJECTS)

    def popularity(objects: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        rows = np.zeros((len(objects), 3), np.float32)
        rows[:, 0] = counts[objects]
        return rows

    hits = Ranker(accesses, OBJECTS, popularity, SEED).ask(2000, 4000, places=500)
    # A tie at the last place counts for the rows: they do not rank an equal one above the target.
    assert hits.popularity <= hits.rows <= hits.popularity + 25
    assert 0 < hits.popularity < hits.asked


def test_new_objects_never_hit() -> None:
    accesses = np.concatenate([np.zeros(100), np.arange(1, 101)]).astype(np.int64)
    hits = Ranker(accesses, OBJECTS, rows_of, SEED).ask(100, 200, places=100)
    assert hits == Hits(100, 0, 0)


def test_what_is_asked_about_is_not_known() -> None:
    """The rows read are those of earlier accesses and of candidates before ``begin``."""
    random = np.random.default_rng(SEED)
    accesses = random.integers(0, 50, 300)
    accesses[200:] = np.arange(50, 150)  # each new object occurs once
    asked: list[set[int]] = []

    def spy(objects: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        asked.append(set(objects.tolist()))
        return rows_of(objects)

    Ranker(accesses, OBJECTS, spy, SEED).ask(200, 300, places=1)
    candidates, history = asked
    assert candidates == set(accesses[:200].tolist())
    newest = max(max(history), 49)
    place = 200 + (newest - 50) + 1  # the newest object read is right before the place
    assert history <= set(accesses[place - HISTORY : place].tolist())


def test_hits_add_up() -> None:
    assert Hits(1, 2, 3) + Hits(10, 20, 30) == Hits(11, 22, 33)
    assert K == 50
