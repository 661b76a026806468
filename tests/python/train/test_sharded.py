"""Sharded tables and admission: the keys that a rank holds, new rows, and rollback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from petps.pool import Pool
from petps.train.admission import NEWER_MAX, Admission
from petps.train.optimizer import Adam, RowwiseAdagrad, Sgd
from petps.train.sharded import ShardedTables, TableSpec

SEED = 5


def keys_of(count: int, seed: int = SEED) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.unique(random.integers(0, 1 << 64, count, dtype=np.uint64))


def ones(keys: np.ndarray) -> np.ndarray:
    return np.ones(len(keys), np.int64)


def opened(path: Path | None = None, *, threshold: int = 1, **options: Any) -> ShardedTables:
    spec = TableSpec("t", 6, 2000, initial=0.5, threshold=threshold)
    return ShardedTables(path, [spec], Adam(0.1), **options)


def test_every_key_has_the_owner_of_its_log_partition() -> None:
    keys = keys_of(5000)
    shards = [ShardedTables(None, [TableSpec("t", 4, 10)], Sgd(1), rank=r, world=3,
                             partitions=8) for r in range(3)]  # fmt: skip
    owners = shards[0].owner_of(keys)
    from petps.delta.schema import partition_of

    partitions = partition_of(keys, 8)
    owned = [shard.owned_partitions() for shard in shards]
    assert [p for partitions_of_rank in owned for p in partitions_of_rank] == list(range(8))
    for rank, own in enumerate(owned):
        assert np.array_equal(owners == rank, np.isin(partitions, list(own)))
    for shard in shards:
        shard.close()


def test_a_new_row_depends_on_seed_table_and_key_alone() -> None:
    keys = keys_of(200)
    with opened() as one, opened() as two, opened(seed=1) as other:
        all_at_once = one["t"].retrieve(1, keys, ones(keys)).slots
        for part in np.array_split(np.arange(len(keys)), 7):
            again = two["t"].retrieve(1, keys[part], ones(part)).slots
            assert np.array_equal(again, all_at_once[part])
        assert not np.isclose(other["t"].retrieve(1, keys, ones(keys)).slots, all_at_once).all()
    rows = all_at_once[:, :6]
    assert (np.abs(rows) <= 0.5).all()
    assert abs(rows.mean()) < 0.05
    assert rows.std() == pytest.approx(0.5 / 3**0.5, rel=0.1)
    assert (all_at_once[:, 6:] == 0).all()  # Adam's state
    with ShardedTables(None, [TableSpec("t", 6, 10)], RowwiseAdagrad(1, initial_sum=0.25)) as sums:
        assert (sums["t"].retrieve(1, keys[:9], ones(keys[:9])).slots[:, 6:] == 0.25).all()


def test_a_reopened_pool_has_the_rows_written_back(tmp_path: Path) -> None:
    keys = keys_of(300)
    with opened(tmp_path / "pool") as tables:
        slots = tables["t"].retrieve(1, keys, ones(keys)).slots + 1
        tables["t"].write_back(1, keys, slots)
    with opened(tmp_path / "pool") as tables:
        assert np.array_equal(tables["t"].keys(), keys)
        assert np.array_equal(tables["t"].retrieve(2, keys, ones(keys)).slots, slots)
        gathered = tables["t"].gather(np.concatenate([keys, np.array([keys[-1] - 1], np.uint64)]))
        assert list(gathered.columns) == ["row", "mean", "variance", "steps"]
        assert [column.shape[1] for column in gathered.columns.values()] == [6, 6, 6, 1]
        assert gathered.deleted is not None
        assert gathered.deleted.tolist() == [False] * len(keys) + [True]
    with pytest.raises(FailedPrecondition, match=r"created for other tables \(t: 19 values"):
        ShardedTables(tmp_path / "pool", [TableSpec("t", 6, 2000)], Sgd(1))
    for options in ({"rank": 1, "world": 2}, {"world": 2}, {"partitions": 8}):
        with pytest.raises(FailedPrecondition, match=r"belongs to train@0-of-1 with 64 partitions"):
            opened(tmp_path / "pool", **options)
    with opened(tmp_path / "pool") as tables:
        assert np.array_equal(tables["t"].keys(), keys)


def test_a_partly_created_pool_is_completed(tmp_path: Path) -> None:
    specs = [TableSpec("a", 2, 10), TableSpec("b", 2, 10)]
    Pool.create(tmp_path / "bare", durability="process").close()
    ShardedTables(tmp_path / "half", specs[:1], Sgd(1)).close()
    for name in ("bare", "half"):
        with ShardedTables(tmp_path / name, specs, Sgd(1)) as tables:
            tables["b"].write_back(1, keys_of(3), np.ones((3, 2), np.float32))
        with ShardedTables(tmp_path / name, specs, Sgd(1)) as tables:
            assert len(tables["b"].keys()) == 3


def test_a_load_rolls_back_and_erases() -> None:
    keys = keys_of(600)
    with opened() as tables:
        table = tables["t"]
        slots = table.retrieve(1, keys, ones(keys)).slots
        table.write_back(1, keys[:400], slots[:400])
        saved = table.gather(keys[:400]).columns
        table.write_back(2, keys[300:], slots[300:] * 2)  # 100 rows changed, 200 new
        applied = []
        native_apply = table._apply
        table._apply = lambda k, *more: (applied.append(len(k)), native_apply(k, *more))[1]  # type: ignore[method-assign,func-returns-value]
        table.load_pieces([(keys[:400], saved)])
        assert sum(applied) == 100  # equal rows are not written again
        assert np.array_equal(table.keys(), keys[:400])
        assert np.array_equal(table.retrieve(3, keys[:400], ones(keys[:400])).slots, slots[:400])
        with pytest.raises(InvalidArgument, match="has columns"):
            table.load_pieces([(keys[:400], {"row": saved["row"]})])
        with pytest.raises(InvalidArgument, match=r"column row has shape \(5, 6\), expected"):
            table.load_pieces([(keys[:400], {**saved, "row": saved["row"][:5]})])


def test_bad_arguments_are_named() -> None:
    with opened(threshold=1) as tables:
        with pytest.raises(NotFound, match="no table 'x'; the tables are: t"):
            tables["x"]
        keys = keys_of(2500)
        with pytest.raises(ResourceExhausted, match="table t is full: it holds 2000 rows"):
            tables["t"].write_back(1, keys, np.ones((len(keys), 19), np.float32))
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: TableSpec("a b", 4, 1), "table 'a b'"),
        (lambda: TableSpec("t", 0, 1), "dim must be from 1 to 4096, got 0"),
        (lambda: TableSpec("t", 1, 0), "capacity must be at least 1, got 0"),
        (lambda: TableSpec("t", 1, 1, threshold=0), "threshold must be at least 1, got 0"),
        (lambda: opened(rank=2, world=2), "rank 2 must be from 0 to 1"),
        (lambda: opened(world=3, partitions=2), "partitions must be at least 3, .* got 2"),
        (lambda: ShardedTables(None, [], Sgd(1)), "at least one table"),
        (lambda: Adam(0), "lr must be above 0, got 0"),
        (lambda: Adam(1, beta1=1), "beta1 must be at least 0 and below 1, got 1"),
        (lambda: Admission(0), "threshold must be at least 1, got 0"),
    ]
    for wrong, message in cases:
        with pytest.raises(InvalidArgument, match=message):
            wrong()


class Model:
    """A slow and obvious model of admission: it counts the batches in order."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self.counts: dict[int, int] = {}

    def count(self, keys: np.ndarray, seen: np.ndarray) -> list[bool]:
        admitted = []
        for key, times in zip(keys.tolist(), seen.tolist(), strict=True):
            self.counts[key] = self.counts.get(key, 0) + times
            admitted.append(self.counts[key] >= self.threshold)
        return admitted


@pytest.mark.parametrize("threshold", [1, 2, 7])
@pytest.mark.parametrize("newer_max", [3, NEWER_MAX])
def test_admission_equals_the_model(
    threshold: int, newer_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petps.train.admission.NEWER_MAX", newer_max)
    random = np.random.default_rng((SEED, threshold, newer_max))
    admission, model = Admission(threshold), Model(threshold)
    rows: set[int] = set()
    waiting: list[tuple[int, set[int]]] = []
    after: dict[int, dict[int, int]] = {}
    for batch in range(1, 120):
        keys = np.unique(random.integers(0, 60, int(random.integers(0, 12))).astype(np.uint64))
        keys = keys[np.array([int(key) not in rows for key in keys], np.bool_)]
        seen = random.integers(1, 3, len(keys))
        admitted = admission.count(batch, keys, seen)
        assert admitted.tolist() == model.count(keys, seen)
        after[batch] = {key: n for key, n in model.counts.items() if n < threshold}
        waiting.append((batch, {int(key) for key in keys[admitted]}))
        if len(waiting) > 1:  # a batch is written back while the next one is counted
            done, came = waiting.pop(0)
            rows |= came
            admission.commit(done)
            if batch % 7 == 0:  # saved counts contain no batch that was only counted ahead
                again = Admission(threshold)
                again.load([admission.save()])
                known = np.array(sorted(model.counts), np.uint64)
                missing = [threshold - after[done].get(int(key), 0) for key in known]
                assert again.count(batch, known, np.array(missing)).all()
                again.load([admission.save()], lambda every: every % np.uint64(2) == 0)
                assert not again.count(batch, known[known % 2 == 1], np.zeros(1, int)).any() or (
                    threshold == 1
                )
                if threshold > 1:
                    once_less = np.array(missing) - 1
                    again.load([admission.save()])
                    assert not again.count(batch, known, once_less).any()


def test_admission_refuses_repeated_batches_and_damaged_counts() -> None:
    admission = Admission(2)
    admission.count(4, keys_of(3), ones(keys_of(3)))
    with pytest.raises(FailedPrecondition, match="batch 4 must be above 4"):
        admission.count(4, keys_of(3), ones(keys_of(3)))
    with pytest.raises(DataLoss, match="cannot be read"):
        admission.load([b"none"])


def test_an_admitted_key_is_counted_until_its_row_is_written() -> None:
    """Batch 3 looked for the row before it was written, so it counts on; a save has no count."""
    admission, key = Admission(2), np.array([5], np.uint64)
    assert not admission.count(1, key, ones(key)).any()
    assert admission.count(2, key, ones(key)).all()
    admission.commit(1)
    admission.commit(2)
    again = Admission(2)
    again.load([admission.save()])
    assert not again.count(3, key, ones(key)).any()  # the key has a row: its count was dropped
    assert admission.count(3, key, ones(key)).all()


def test_uncommitted_counts_can_be_forgotten() -> None:
    admission, key = Admission(3), np.array([5], np.uint64)
    for batch in (1, 2):
        admission.count(batch, key, ones(key))
    admission.commit(1)
    admission.forget_ahead()
    assert not admission.count(2, key, ones(key)).any()
    assert admission.count(3, key, ones(key)).all()


def test_loading_into_a_table_full_of_later_keys_erases_them() -> None:
    with ShardedTables(None, [TableSpec("t", 2, 100)], Sgd(1)) as tables:
        table, keys = tables["t"], np.arange(300, dtype=np.uint64)
        rows = np.arange(600, dtype=np.float32).reshape(300, 2)
        table.write_back(1, keys[150:250], rows[150:250])
        pieces = [slice(0, 60), slice(140, 180)]
        table.load_pieces((keys[piece], {"row": rows[piece]}) for piece in pieces)
        kept = np.concatenate([keys[piece] for piece in pieces])
        assert np.array_equal(table.keys(), kept)
        assert np.array_equal(table.gather(kept).columns["row"], rows[kept])
        with pytest.raises(ResourceExhausted, match="table t is full"):
            table.load_pieces([(keys[:101], {"row": rows[:101]})])
