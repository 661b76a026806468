"""Removals by rules: against a slow model, whatever the number of ranks and however often restored.

Does not cover the pipeline, whose batches are looked up ahead (tests/train/train_removal.py does).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from petps.checkpoint import Column, Store, Table
from petps.errors import InvalidArgument
from petps.train.optimizer import RowwiseAdagrad, Sgd
from petps.train.output import check_stored
from petps.train.removal import LAST_USE, Removal, find_lowest
from petps.train.restored import load_rows
from petps.train.sharded import ShardedTables, TableSpec
from petps.train.stores import store_tables
from petps.train.tracker import Tracker
from tests.seed import SEED

DIM, PARTITIONS, KEYS = 5, 16, 60
WAIT_SECONDS = 60.0
FILTER_BYTES = PARTITIONS * 4096  # enough that no two of KEYS keys share all of their counters


class Ranks:
    """Sums over ranks that are threads."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world)
        self._given: list[Any] = [None] * world

    def run(self, work: Callable[[int, Callable[[Any], Any]], Any]) -> list[Any]:
        """Call work(rank, sum_over_ranks) in a thread for each rank; return the results."""
        results: list[Any] = [None] * len(self._given)
        errors: list[BaseException] = []

        def run_rank(rank: int) -> None:
            try:
                results[rank] = work(rank, lambda counts: self._sum(rank, counts))
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=run_rank, args=(r,)) for r in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive(), "a rank hangs"
        if errors:
            raise errors[0]
        return results

    def _sum(self, rank: int, counts: Any) -> Any:
        self._given[rank] = counts
        self._barrier.wait(WAIT_SECONDS)
        total = sum(self._given)
        self._barrier.wait(WAIT_SECONDS)
        return total


@pytest.mark.parametrize("world", [1, 3])
def test_the_lowest_rows_are_those_of_a_sort(world: int) -> None:
    random = np.random.default_rng((SEED, world))
    for _ in range(60):
        count = int(random.integers(0, 400))
        few = random.integers(0, 3, count).astype(np.uint32)  # many are equal
        more = random.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
        words: list[Any] = [few, more, random.permutation(count).astype(np.uint64)]
        rank_of = random.integers(0, world, count)
        wanted = int(random.integers(-1, count + 1))
        order = np.lexsort(words[::-1])
        expected = np.zeros(count, np.bool_)
        expected[order[: max(0, wanted)]] = True

        def work(rank: int, sum_over_ranks: Any) -> Any:
            own = rank_of == rank  # noqa: B023
            return find_lowest([word[own] for word in words], wanted, sum_over_ranks)  # noqa: B023

        for rank, is_low in enumerate(Ranks(world).run(work)):
            assert np.array_equal(is_low, expected[rank_of == rank]), (count, wanted)


class Model:
    """The slow and obvious training: dictionaries, one key after the other."""

    def __init__(self, spec: TableSpec, initial: Callable[[int], np.ndarray]) -> None:
        self.spec, self._initial = spec, initial
        self.rows: dict[int, np.ndarray] = {}
        self.last_use: dict[int, int] = {}
        self.uses: dict[int, int] = {}
        self.counts: dict[int, int] = {}

    def step(self, step: int, keys: Sequence[int], seen: Sequence[int]) -> None:
        for key, times in zip(keys, seen, strict=True):
            if key not in self.rows:
                self.counts[key] = self.counts.get(key, 0) + times
                if self.counts[key] < self.spec.threshold:
                    continue
                if self.spec.filter_bytes is None:  # a filter cannot forget a key
                    del self.counts[key]
                self.rows[key], self.uses[key] = self._initial(key), 0
            self.rows[key] = train(self.rows[key], key, step)
            self.last_use[key] = step
            self.uses[key] += times

    def remove(self, step: int) -> list[int]:
        """Drop and return the keys that one of the first two rules removes."""
        rules = self.spec.removal
        assert rules is not None
        gone = []
        for key, row in self.rows.items():
            norm = sum(float(value) ** 2 for value in row) ** 0.5
            unused_for = step - self.last_use[key]
            is_old = rules.steps_to_live is not None and unused_for >= rules.steps_to_live
            if is_old or (rules.l2_below is not None and norm < rules.l2_below):
                gone.append(key)
        self.drop(gone)
        return gone

    def score(self, key: int) -> tuple[int, ...]:
        assert self.spec.removal is not None
        last_use = self.last_use[key]
        return (self.uses[key], last_use) if self.spec.removal.needs_uses else (last_use,)

    def drop(self, keys: Sequence[int]) -> None:
        for key in keys:
            del self.rows[key], self.last_use[key], self.uses[key]


def train(row: Any, key: Any, step: int) -> Any:
    """Return the next value of rows: some grow, some shrink."""
    factor = 0.7 + 0.6 * ((np.asarray(key) * 7 + step * 3) % 10) / 10
    return row * factor.astype(np.float32)[..., None] if np.ndim(key) else row * np.float32(factor)


class Trained:
    """The tables of all ranks, trained without a pipeline."""

    def __init__(self, spec: TableSpec, world: int) -> None:
        self.world = world
        self.trackers = [Tracker() for _ in range(world)]
        self.shards = [
            ShardedTables(
                None, [spec], Sgd(0.1), rank=rank, world=world, partitions=PARTITIONS, seed=SEED,
                tracker=tracker,
            )
            for rank, tracker in enumerate(self.trackers)
        ]  # fmt: skip
        for tracker in self.trackers:
            tracker.add_tenant("test")

    def step(self, step: int, keys: np.ndarray, seen: np.ndarray) -> None:
        for shard in self.shards:
            own = shard.owns(keys)
            table = shard["t"]
            retrieved = table.retrieve(step, keys[own], seen[own])
            slots = retrieved.slots[retrieved.live]
            slots[:, :DIM] = train(slots[:, :DIM], keys[own][retrieved.live], step)
            if table.has_uses:
                slots[:, -1] += seen[own][retrieved.live]
            table.write_back(step, keys[own][retrieved.live], slots)

    def remove(self, step: int) -> None:
        Ranks(self.world).run(lambda rank, sums: self.shards[rank].remove(step, sums))

    def rows(self) -> dict[int, tuple[bytes, int]]:
        """Return the slot of each key, and the step of its last use if the table keeps it."""
        result = {}
        for shard in self.shards:
            keys = shard["t"].keys()
            columns = shard["t"].gather(keys).columns
            last = columns.get(LAST_USE)
            slots = np.concatenate([v for n, v in columns.items() if n != LAST_USE], axis=1)
            for at, key in enumerate(keys.tolist()):
                step = 0 if last is None else int(last[at].copy().view(np.uint32)[0])
                result[key] = (slots[at].tobytes(), step)
        return result

    def read_tracked(self) -> set[int]:
        """Return the keys that were tracked since the last call."""
        keys: set[int] = set()
        for tracker in self.trackers:
            with tracker.read("test") as reading:
                keys |= set(reading.ids("t").tolist())
                reading.acknowledge()
        return keys

    def restored(self, spec: TableSpec, world: int) -> Trained:
        """Return a training of other ranks that continues from a version of this one."""
        saved = [shard["t"].gather(shard["t"].keys()).columns for shard in self.shards]
        keys = np.concatenate([shard["t"].keys() for shard in self.shards])
        order = np.argsort(keys)
        columns = {name: np.concatenate([own[name] for own in saved])[order] for name in saved[0]}
        counts = [shard.save_counts() for shard in self.shards]
        bodies = [body for own in counts for body in own.values()]
        other = Trained(spec, world)
        for shard in other.shards:
            own = shard.owns(keys[order])
            shard["t"].load_pieces([(keys[order][own], {n: v[own] for n, v in columns.items()})])
            if bodies:
                shard.load_counts("t", bodies)
        self.close()
        return other

    def close(self) -> None:
        for shard in self.shards:
            shard.close()


RULES = {
    "steps_to_live": Removal(steps_to_live=4, every=1),
    "l2_below": Removal(l2_below=0.06, every=3),
    "last_use": Removal(keep_rows=20, every=2),
    "uses": Removal(keep_rows=20, score="uses", every=2),
    "all": Removal(steps_to_live=9, l2_below=0.03, keep_rows=25, score="uses", every=4),
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("threshold", "filter_bytes"), [(1, None), (3, None), (3, FILTER_BYTES)])
def test_rows_are_those_of_the_model(rules: str, threshold: int, filter_bytes: int | None) -> None:
    """Trainings of 1, 2 and 4 ranks, one of which is restored into other ranks again and again."""
    random = np.random.default_rng((SEED, threshold, len(rules), filter_bytes or 0))
    removal = RULES[rules]
    assert removal.every is not None
    spec = TableSpec("t", DIM, 500, threshold=threshold, filter_bytes=filter_bytes, removal=removal)
    with ShardedTables(None, [TableSpec("t", DIM, 500)], Sgd(0.1), seed=SEED) as fresh:
        every_key = np.arange(KEYS, dtype=np.uint64)
        first = fresh["t"].retrieve(1, every_key, np.ones(KEYS, int)).slots.copy()
    model = Model(spec, lambda key: first[key].copy())
    trainings = [Trained(spec, world) for world in (1, 2, 4)]
    removed_count = 0
    with ExitStack() as ending:
        ending.callback(lambda: close_all(trainings))
        for step in range(1, 50):
            places = KEYS * random.random(int(random.integers(0, 14))) ** 2  # some keys are hot
            keys = np.unique(places.astype(np.uint64))
            seen = random.integers(1, 4, len(keys))
            model.step(step, keys.tolist(), seen.tolist())
            for training in trainings:
                training.step(step, keys, seen)
            if step % removal.every == 0:
                removed_count += check_removal(step, model, trainings)
            check_rows(model, trainings, removal)
            if step % 7 == 0:
                trainings[2] = trainings[2].restored(spec, int(random.integers(1, 5)))
    assert removed_count > 5, "the test removes too little"


def close_all(trainings: list[Trained]) -> None:
    for training in trainings:
        training.close()


def check_removal(step: int, model: Model, trainings: list[Trained]) -> int:
    """Let all remove rows; compare, and return how many went."""
    before = set(model.rows)
    for training in trainings:
        training.read_tracked()
        training.remove(step)
    gone = set(model.remove(step))
    left = [set(training.rows()) for training in trainings]
    assert left[0] == left[1] == left[2], "which rows go depends on the number of ranks"
    lowest = before - left[0] - gone
    removal = model.spec.removal
    assert removal is not None
    if removal.keep_rows is not None:
        # Of equal scores, a hash of the key decides. So compare the scores, not the keys.
        scores = sorted(map(model.score, model.rows))
        excess = max(0, len(scores) - removal.keep_rows)
        assert sorted(map(model.score, lowest)) == scores[:excess]
        model.drop(sorted(lowest))
    assert set(model.rows) == left[0]
    for training in trainings:
        assert training.read_tracked() == before - left[0], "the next version lacks a deletion"
    return len(before - left[0])


def check_rows(model: Model, trainings: list[Trained], removal: Removal) -> None:
    expected = {}
    for key, row in model.rows.items():
        uses = [model.uses[key]] if removal.needs_uses else []
        slot = np.concatenate([row, np.array(uses, np.float32)])
        expected[key] = (slot.tobytes(), model.last_use[key] if removal.needs_last_use else 0)
    for training in trainings:
        assert training.rows() == expected


def opened(removal: Removal, threshold: int = 1) -> ShardedTables:
    spec = TableSpec("t", DIM, 500, threshold=threshold, removal=removal)
    return ShardedTables(None, [spec], Sgd(0.1))


def alone(counts: Any) -> Any:
    return counts


def test_a_load_restores_the_steps_of_the_last_use_also_of_equal_rows() -> None:
    keys = np.arange(10, dtype=np.uint64)
    with opened(Removal(steps_to_live=5, every=1)) as tables:
        table = tables["t"]
        rows = np.ones((10, DIM), np.float32)
        table.write_back(3, keys, rows)
        saved = {name: values.copy() for name, values in table.gather(keys).columns.items()}
        table.write_back(6, keys[:5], rows[:5])  # the rows do not change
        table.load_pieces([(keys, saved)])
        tables.remove(7, alone)
        assert len(table.keys()) == 10
        table.write_back(7, keys[8:], rows[8:])
        tables.remove(8, alone)
        assert table.keys().tolist() == [8, 9]
        with pytest.raises(InvalidArgument, match=r"columns \['last_use', 'row'\], got \['row'\]"):
            table.load_pieces([(keys, {"row": rows})])


def test_rows_of_later_steps_count_as_used_now() -> None:
    """A pool may have rows of an earlier training, whose steps have greater numbers."""
    keys = np.arange(6, dtype=np.uint64)
    with opened(Removal(steps_to_live=5, every=1)) as tables:
        tables["t"].write_back(100, keys[:3], np.ones((3, DIM), np.float32))
        tables["t"].write_back(1, keys[3:], np.ones((3, DIM), np.float32))
        tables.remove(10, alone)
        assert tables["t"].keys().tolist() == [0, 1, 2]
        tables.remove(105, alone)
        assert len(tables["t"].keys()) == 0
        last = (1 << 32) - 2  # the stamp has 32 bits, and steps go on
        tables["t"].write_back(last, keys, np.ones((6, DIM), np.float32))
        tables.remove(last + 4, alone)
        assert len(tables["t"].keys()) == 6
        tables.remove(last + 5, alone)
        assert len(tables["t"].keys()) == 0


def test_the_status_counts_rows_by_rule() -> None:
    keys = np.arange(10, dtype=np.uint64)
    rows = np.full((10, DIM), 1, np.float32)
    rows[3] = 0.1
    rows[0] = 0.1
    with opened(Removal(steps_to_live=5, l2_below=0.3, keep_rows=6, every=1)) as tables:
        tables["t"].write_back(1, keys[:2], rows[:2])
        tables["t"].write_back(6, keys[2:], rows[2:])
        tables.remove(6, alone)
        (status,) = tables.status()
    assert status.rows == 6
    assert status.removed == {"steps_to_live": 2, "l2_below": 1, "keep_rows": 1}
    assert status.false_admission is None


def test_a_removed_key_counts_from_zero_again() -> None:
    key = np.array([5], np.uint64)
    with opened(Removal(steps_to_live=2, every=1), threshold=3) as tables:
        table = tables["t"]

        def occurs(step: int, times: int) -> bool:
            retrieved = table.retrieve(step, key, np.array([times]))
            table.write_back(step, key[retrieved.live], retrieved.slots[retrieved.live])
            return bool(retrieved.live[0])

        assert not occurs(1, 2)
        assert occurs(2, 1)
        tables.remove(4, alone)
        assert not occurs(5, 2)
        assert occurs(6, 1)


def test_uses_of_a_new_row_are_none_whatever_the_optimizer() -> None:
    spec = TableSpec("t", DIM, 500, removal=Removal(keep_rows=9, score="uses", every=1))
    keys = np.arange(4, dtype=np.uint64)
    with ShardedTables(None, [spec], RowwiseAdagrad(0.1, initial_sum=0.25)) as tables:
        slots = tables["t"].retrieve(1, keys, np.ones(4, int)).slots
        assert slots[:, DIM:].tolist() == [[0.25, 0]] * 4


class NamedUses(Sgd):
    def columns(self, dim: int) -> dict[str, int]:
        return {"uses": 1}


def test_bad_arguments_are_named() -> None:
    integer = "must be an integer from 1 to 2147483647, got"
    rules: list[tuple[dict[str, Any], str]] = [
        ({}, "needs a rule: give steps_to_live, l2_below or keep_rows"),
        ({"every": 3}, "needs a rule"),
        ({"steps_to_live": 0}, f"steps_to_live {integer} 0"),
        ({"steps_to_live": 1 << 31}, f"steps_to_live {integer} 2147483648"),
        ({"keep_rows": "x"}, "keep_rows must be an integer from 1 to 9223372036854775807, got 'x'"),
        ({"keep_rows": True}, "keep_rows must be an integer .*, got True"),
        ({"keep_rows": 1, "every": 0}, f"every {integer} 0"),
        ({"l2_below": True}, "l2_below must be a number above 0, got True"),
        ({"l2_below": 0}, "l2_below must be a number above 0, got 0"),
        ({"l2_below": float("nan")}, "l2_below must be a number above 0, got nan"),
        ({"keep_rows": 1, "score": "lru"}, "score must be 'last_use' or 'uses', got 'lru'"),
        ({"l2_below": 1, "score": "uses"}, "score 'uses' .*: give keep_rows too"),
    ]
    for given, message in rules:
        with pytest.raises(InvalidArgument, match=message):
            Removal(**given)
    with (
        opened(Removal(l2_below=1)) as tables,
        pytest.raises(InvalidArgument, match=r"table t: it is not known .* Removal\(every=N\)"),
    ):
        tables.begin_removal(1)
    with pytest.raises(InvalidArgument, match="the optimizer has a column 'uses'"):
        ShardedTables(None, [TableSpec("t", 2, 9)], NamedUses(1))


def test_removals_without_steps_follow_the_versions_of_the_store() -> None:
    with opened(Removal(l2_below=1)) as tables:
        assert not any(tables.removes_at(step) for step in range(20))
        tables.expect_versions(4)
        tables.begin_removal(1)
        tables.expect_versions(None)  # of a second output, for the log
        assert [step for step in range(1, 13) if tables.removes_at(step)] == [4, 8, 12]
    with opened(Removal(l2_below=1, every=5)) as tables:
        tables.expect_versions(4)
        assert [step for step in range(1, 13) if tables.removes_at(step)] == [5, 10]


def test_rows_of_an_earlier_training_do_not_outlive_those_in_use() -> None:
    """It had a count of steps of its own, and has left rows of its step 1000."""
    old, new = np.arange(4, dtype=np.uint64), np.arange(10, 14, dtype=np.uint64)
    with opened(Removal(keep_rows=4, every=1)) as tables:
        table = tables["t"]
        table.write_back(1000, old, np.ones((4, DIM), np.float32))
        tables.begin_removal(1)
        for step in range(1, 4):
            table.write_back(step, new, np.ones((4, DIM), np.float32))
        tables.remove(3, alone)
        assert table.keys().tolist() == new.tolist()
        rows = table.gather(new)
        assert rows.columns[LAST_USE].view(np.uint32).ravel().tolist() == [3] * 4


@pytest.mark.parametrize("filter_bytes", [None, FILTER_BYTES])
def test_an_erased_table_counts_from_zero(filter_bytes: int | None) -> None:
    spec = TableSpec("t", DIM, 500, threshold=3, filter_bytes=filter_bytes)
    key = np.array([5], np.uint64)
    with ShardedTables(None, [spec], Sgd(0.1), partitions=PARTITIONS) as tables:
        table = tables["t"]
        assert not table.retrieve(1, key, np.array([2])).live[0]
        table.admission.commit(1)
        tables.erase()
        assert not table.retrieve(1, key, np.array([2])).live[0]


def test_steps_may_be_numpy_integers() -> None:
    key = np.array([5], np.uint64)
    three, seven, tenth = np.array([3]), np.array([7]), np.array([0.1], np.float32)
    numbers: list[Any] = [three[0], tenth[0], seven[0]]
    with opened(Removal(steps_to_live=numbers[0], l2_below=numbers[1])) as tables:
        tables["t"].write_back(numbers[2], key, np.ones((1, DIM), np.float32))
        assert tables["t"].gather(key).columns[LAST_USE].view(np.uint32).tolist() == [[7]]


def test_counts_go_to_the_table_of_their_name() -> None:
    """Names of tables may have dots, as the names of parts have."""
    names = ["a", "a.b", "a.1"]
    bodies = {name: f"{name} of rank".encode() for name in names}
    loaded: dict[str, list[bytes]] = {}

    class StoreOfParts:
        def refresh(self) -> None:
            pass

        def part(self, version: int, name: str) -> bytes:
            table = name.removeprefix("petps.admission.").rpartition(".")[0]
            return bodies[table]

    class Tables:
        owns = None

        def __iter__(self) -> Iterator[Any]:
            return iter([SimpleNamespace(name=n, load_pieces=lambda pieces: None) for n in names])

        def load_counts(self, table: str, given: list[bytes]) -> None:
            loaded[table] = given

    parts = {f"petps.admission.{name}.{rank}": None for name in names for rank in range(2)}
    newest: Any = SimpleNamespace(version=3, parts=parts)
    store: Any = StoreOfParts()
    tables: Any = Tables()
    stamps: Any = SimpleNamespace(begin_load=lambda *_: None, load=lambda _, pieces: pieces)
    load_rows(store, newest, tables, stamps)
    assert loaded == {name: [bodies[name]] * 2 for name in names}


def test_a_store_and_its_removals_belong_together(tmp_path: Path) -> None:
    with opened(Removal(steps_to_live=5, every=1)) as tables:
        with_use = Store.create(tmp_path / "with", "m", store_tables(tables))
    with opened(Removal(l2_below=0.1, every=1)) as tables:
        without = Store.create(tmp_path / "without", "m", store_tables(tables))
        with pytest.raises(InvalidArgument, match="steps_to_live=2147483647 removes nothing"):
            check_stored(with_use, tables)
        check_stored(without, tables)
    with opened(Removal(keep_rows=5, every=1)) as tables:
        check_stored(with_use, tables)
        with pytest.raises(InvalidArgument, match="leave out that rule, or begin a new training"):
            check_stored(without, tables)
    other = Store.create(tmp_path / "other", "m", [Table("u", (Column("row", "f32", DIM),))])
    with (
        opened(Removal(l2_below=0.1, every=1)) as tables,
        pytest.raises(InvalidArgument, match="has no table 't'; it has: u"),
    ):
        check_stored(other, tables)


def test_a_full_filter_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    removal = Removal(steps_to_live=1, every=1)
    spec = TableSpec("t", DIM, 5000, threshold=2, filter_bytes=64 * PARTITIONS, removal=removal)
    keys = np.arange(4000, dtype=np.uint64)
    with ShardedTables(None, [spec], Sgd(0.1), partitions=PARTITIONS) as tables:
        tables["t"].retrieve(1, keys, np.full(4000, 2))
        tables["t"].admission.commit(1)
        tables.remove(1, alone)
    assert "the filter admits 100 % of new keys at once" in caplog.text
