"""Admission by a counting Bloom filter: never too late, in bounded memory, on any ranks alike."""

from __future__ import annotations

import io

import numpy as np
import pytest

from petps.delta.schema import partition_of
from petps.errors import DataLoss, FailedPrecondition, InvalidArgument
from petps.train.admission import HASHES, Admission, FilterAdmission
from petps.train.mix import mix
from petps.train.optimizer import Sgd
from petps.train.sharded import ShardedTables, TableSpec
from tests.seed import SEED

PARTITIONS = 8


def filters(world: int, threshold: int, filter_bytes: int) -> list[FilterAdmission]:
    """Return the filter of each rank."""
    bounds = [-(-rank * PARTITIONS // world) for rank in range(world + 1)]
    return [
        FilterAdmission(threshold, filter_bytes, PARTITIONS, range(bounds[r], bounds[r + 1]))
        for r in range(world)
    ]


def owners(world: int, keys: np.ndarray) -> np.ndarray:
    return partition_of(keys, PARTITIONS).astype(np.int64) * world // PARTITIONS


def count(
    ranks: list[FilterAdmission], batch: int, keys: np.ndarray, seen: np.ndarray
) -> np.ndarray:
    """Let each rank count its own keys; return which keys are admitted."""
    admitted = np.zeros(len(keys), np.bool_)
    owner = owners(len(ranks), keys)
    for rank, admission in enumerate(ranks):
        own = owner == rank
        admitted[own] = admission.count(batch, keys[own], seen[own])
    return admitted


class Model:
    """A slow and obvious counting Bloom filter, with one dictionary for all partitions."""

    def __init__(self, threshold: int, width: int) -> None:
        self.threshold, self.width = threshold, width
        self.counters: dict[tuple[int, int], int] = {}

    def count(self, keys: np.ndarray, seen: np.ndarray) -> list[bool]:
        raised, admitted = dict(self.counters), []
        for key, times in zip(keys, seen.tolist(), strict=True):
            partition = int(partition_of(np.array([key]), PARTITIONS)[0])
            salts = [int(mix(np.array([n], np.uint64))[0]) for n in range(1, HASHES + 1)]
            hashes = [int(mix(np.array([int(key) ^ salt], np.uint64))[0]) for salt in salts]
            places = [(partition, hashed % self.width) for hashed in hashes]
            after = min(self.counters.get(place, 0) for place in places) + times
            for place in places:
                raised[place] = max(raised.get(place, 0), min(after, self.threshold))
            admitted.append(after >= self.threshold)
        self.counters = raised
        return admitted


@pytest.mark.parametrize("threshold", [2, 5, 300])
def test_a_filter_equals_the_model_and_never_counts_too_little(threshold: int) -> None:
    """1, 2 and 4 ranks; batches counted ahead; counters saved and loaded by other ranks."""
    random = np.random.default_rng((SEED, threshold))
    itemsize = 1 if threshold < 256 else 2
    filter_bytes = 64 * PARTITIONS * itemsize  # so few counters that keys collide
    model = Model(threshold, 64)
    trainings = {world: filters(world, threshold, filter_bytes) for world in (1, 2, 4)}
    exact: dict[int, int] = {}
    too_early = 0
    for batch in range(1, 40):
        keys = np.unique(random.integers(0, 300, int(random.integers(0, 40)))).astype(np.uint64)
        seen = random.integers(1, max(2, threshold // 2), len(keys))
        expected = model.count(keys, seen)
        for key, times in zip(keys.tolist(), seen.tolist(), strict=True):
            exact[key] = exact.get(key, 0) + times
        is_due = [exact[key] >= threshold for key in keys.tolist()]
        assert all(admitted for admitted, due in zip(expected, is_due, strict=True) if due)
        too_early += sum(expected) - sum(is_due)
        for ranks in trainings.values():
            assert count(ranks, batch, keys, seen).tolist() == expected
            if batch % 3 == 0:  # up to two batches are counted ahead
                for admission in ranks:
                    admission.commit(batch - int(random.integers(0, 3)))
        if batch % 9 == 0:
            for ranks in trainings.values():
                for admission in ranks:
                    admission.commit(batch)
            bodies = [admission.save() for admission in trainings[4]]
            world = int(random.integers(1, 6))
            trainings[4] = filters(world, threshold, filter_bytes)
            for admission in trainings[4]:
                admission.load(bodies)
    assert too_early > 0, "no keys collided"


def test_memory_is_bounded_and_the_estimate_is_true() -> None:
    """A million keys occur once; then the estimate is the share of new keys that come too early."""
    filter_bytes = 1 << 20
    (admission,) = filters(1, 2, filter_bytes)
    assert admission.estimate_false() == 0
    random = np.random.default_rng((SEED, 7))
    for batch in range(1, 6):
        keys = np.unique(random.integers(0, 1 << 63, 40_000).astype(np.uint64))
        admission.count(batch, keys, np.ones(len(keys), int))
        admission.commit(batch)
    assert admission._counters.nbytes <= filter_bytes
    assert len(admission.save()) < filter_bytes + 1024
    estimate = admission.estimate_false()
    new = np.unique(random.integers(1 << 63, 1 << 64, 100_000, dtype=np.uint64))
    rate = admission.count(9, new, np.ones(len(new), int)).mean()
    assert 0.01 < rate < 0.2
    assert estimate == pytest.approx(rate, rel=0.1)


def test_counts_ahead_are_held_apart() -> None:
    (admission,) = filters(1, 3, 4096)
    key, once = np.array([5], np.uint64), np.ones(1, int)
    for batch in (1, 2):
        assert not admission.count(batch, key, once).any()
    admission.commit(1)
    (saved,) = filters(1, 3, 4096)
    saved.load([admission.save()])  # a version has no counts of a batch that was only read ahead
    assert not saved.count(2, key, once).any()
    with pytest.raises(FailedPrecondition, match="batch 2 must be above 2"):
        admission.count(2, key, once)
    admission.forget_ahead()
    assert not admission.count(2, key, once).any()
    assert admission.count(3, key, once).all()


def test_other_counts_are_refused() -> None:
    (admission,) = filters(1, 3, 4096)
    key = np.array([5], np.uint64)
    admission.count(1, key, np.array([2]))
    admission.commit(1)
    exact = Admission(3)
    with pytest.raises(InvalidArgument, match=r"another kind \(counts, keys\): give the table"):
        admission.load([exact.save()])
    with pytest.raises(InvalidArgument, match=r"another kind \(counters, of\)"):
        exact.load([admission.save()])
    (larger,) = filters(1, 3, 8192)
    text = r"filter of 8 partitions, 512 counters a partition, 3 threshold, .* 1024 counters"
    with pytest.raises(InvalidArgument, match=text):
        larger.load([admission.save()])
    for threshold, size, partitions in ((50, 4096, 8), (3, 2048, 4)):
        other = FilterAdmission(threshold, size, partitions, range(partitions))
        with pytest.raises(InvalidArgument, match="partitions, threshold and filter_bytes"):
            other.load([admission.save()])
    cut = admission.save()
    with pytest.raises(DataLoss, match="cannot be read"):
        admission.load([cut[:-30]])
    with pytest.raises(DataLoss, match="cannot be read"):
        admission.load([b"none"])
    assert admission.count(2, key, np.array([1])).all()  # nothing has changed


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidArgument, match="filter_bytes needs a threshold of at least 2"):
        TableSpec("t", 2, 9, filter_bytes=1 << 20)
    with pytest.raises(InvalidArgument, match="filter_bytes must be at least 4096 with 64 part"):
        ShardedTables(None, [TableSpec("t", 2, 9, threshold=2, filter_bytes=4095)], Sgd(1))


def test_the_format_of_saved_counters_stays() -> None:
    """Versions outlive a release: the bytes that this one writes, by their arrays."""
    ranks = filters(2, 3, 64 * PARTITIONS)
    keys = np.arange(6, dtype=np.uint64)
    count(ranks, 1, keys, np.full(6, 2))
    for admission in ranks:
        admission.commit(1)
    places = []
    for admission in ranks:
        with np.load(io.BytesIO(admission.save()), allow_pickle=False) as arrays:
            assert sorted(arrays.files) == ["counters", "of"]
            counters, (first, *facts) = arrays["counters"], arrays["of"].tolist()
            assert facts == [PARTITIONS, 64, 3]
            assert counters.dtype == np.uint8
            assert counters.shape == (4, 64)
            rows, columns = np.nonzero(counters)
            assert (counters[rows, columns] == 2).all()
            places += [(first + r, c) for r, c in zip(rows.tolist(), columns.tolist(), strict=True)]
    assert places[:4] == GOLDEN_PLACES


GOLDEN_PLACES = [(0, 17), (0, 35), (0, 41), (0, 60)]
