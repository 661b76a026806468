"""Quantised lineages: bits by expected restores, parameters by sampling, the fallback to 8 bits.

The rows of a quantised version equal what petps.codec makes of the replay's rows with the
parameters that the lineage records. Does not cover: errors by bits (bench, codec.l2), staging.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from petps.checkpoint import (
    POLICIES,
    Checkpointer,
    Column,
    Policy,
    Quantising,
    Store,
    Table,
)
from petps.checkpoint.chunk import Bytes, Floats, Keys, Mask
from petps.checkpoint.quantise import sample_keys
from petps.codec import choose_parameters, default_quantisation, sample_rows
from petps.errors import InvalidArgument, IoError, NotFound
from tests.python.checkpoint.memory import MemoryFiles

DIM = 16
ITEMS = Table("items", (Column("row", "f32", DIM), Column("moment", "f32", DIM)))
VERSIONS = 6
KEYS = 1500


class Trainer:
    """A Source of float32 or, if ``whole``, stored bytes: every version changes some rows."""

    def __init__(self, seed: int = 0, *, whole: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.whole = whole
        self.values = {
            "row": rng.standard_normal((KEYS, DIM), np.float32),
            "moment": rng.random((KEYS, DIM), np.float32),
        }
        self.changed = np.zeros(KEYS, np.int64)

    def step(self, version: int) -> None:
        keys = np.random.default_rng(version).choice(KEYS, KEYS // 4, replace=False)
        for values in self.values.values():
            values[keys] *= np.float32(1.01)
        self.changed[keys] = version

    def keys(self, table: str, since: int | None) -> Keys:
        del table
        chosen = self.changed >= 0 if since is None else self.changed > since
        return np.flatnonzero(chosen).astype(np.uint64)

    def rows(self, table: str, keys: Keys) -> tuple[Mapping[str, Floats | Bytes], Mask | None]:
        del table
        taken = {name: values[keys.astype(np.int64)] for name, values in self.values.items()}
        if self.whole:
            return {name: rows.view(np.uint8) for name, rows in taken.items()}, None
        return taken, None


def dtypes(store: Store, version: int | None = None) -> list[str]:
    return [column.dtype for column in store.tables_of(version)["items"].columns]


def check(store: Store, version: int, trainer: Trainer) -> None:
    """Assert that the version is the trainer's rows, quantised once as the lineage records."""
    found = store.restore(version)["items"]
    assert found.keys.tolist() == list(range(KEYS))
    for column in store.tables_of(version)["items"].columns:
        floats = trainer.values[column.name]
        expected = column.stored(floats)
        np.testing.assert_array_equal(found.columns[column.name], expected)
        steps = 255 if column.dtype.endswith("8") else 3
        bound = np.ptp(floats, axis=1).max() / steps * 2
        assert np.abs(column.values(expected) - floats).max() <= bound


@pytest.mark.parametrize(
    ("expected", "row"),
    [(0, 2), (1, 2), (1.5, 3), (3, 3), (4, 4), (20, 4), (20.5, 8), (1000, 8)],
)
def test_bits_follow_the_expected_restores(expected: float, row: int) -> None:
    store = Store.create(MemoryFiles(), "m", [ITEMS], Quantising(expected))
    trainer = Trainer()
    Checkpointer(store, POLICIES["full"](), trainer).write(1)
    method = "asymmetric" if row == 8 else "adaptive"
    assert dtypes(store) == [f"{method}{row}", "asymmetric8"], "state has 8 bits"
    check(store, 1, trainer)


@pytest.mark.parametrize("policy", [kind() for kind in POLICIES.values()], ids=sorted(POLICIES))
@pytest.mark.parametrize("whole", [False, True])
def test_every_policy_quantises_each_row_once(policy: Policy, whole: bool) -> None:
    store = Store.create(MemoryFiles(), "m", [ITEMS], Quantising(3))
    trainer = Trainer(whole=whole)
    writer = Checkpointer(store, policy, trainer, chunk_bytes=1 << 14)
    for version in range(1, VERSIONS + 1):
        trainer.step(version)
        writer.write(version)
        check(store, version, trainer)
        writer.arrange()
        check(store, version, trainer)
    assert store.verify() == []


def test_parameters_are_chosen_by_sampling_and_recorded(tmp_path: Path) -> None:
    found = []
    for seed, folder in ((7, "a"), (7, "b"), (8, "c")):
        store = Store.create(tmp_path / folder, "m", [ITEMS], Quantising(3, seed=seed))
        trainer = Trainer()
        Checkpointer(store, POLICIES["full"](), trainer).write(1)
        rows = trainer.values["row"]
        chosen = choose_parameters(rows[sample_rows(len(rows), seed)], 3)
        assert chosen != default_quantisation(3), "or nothing was chosen"
        opened = Store.open(tmp_path / folder)
        assert opened.state.quantising == Quantising(3, seed=seed)
        column = opened.tables_of(1)["items"].columns[0]
        assert column.quantisation == replace(chosen, seed=seed)
        found.append(column.quantisation)
    assert found[0] == found[1]


def test_keys_in_pieces_give_the_same_sample() -> None:
    keys = np.arange(0, 9000, 3, dtype=np.uint64)
    pieces = np.split(keys, [0, 1, 700, 2999])
    expected = keys[sample_rows(len(keys), 5)]
    assert len(expected) == 1000
    np.testing.assert_array_equal(sample_keys(lambda: pieces, 5), expected)
    assert len(sample_keys(list, 5)) == 0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_more_restores_than_expected_fall_back_to_8_bits(tmp_path: Path, name: str) -> None:
    """The next version is a base of 8 bits; versions written before read as they were."""
    folder = tmp_path / "store"
    store = Store.create(folder, "m", [ITEMS], Quantising(1))
    trainer = Trainer()
    was = {}
    for version in range(1, VERSIONS + 1):
        if version in (3, 5):  # the training resumes in a process that opens the store
            store = Store.open(folder)
            for rows in store.resume().values():
                assert len(rows) == KEYS
            assert Store.open(folder).state.restores == (version - 1) // 2
        trainer.step(version)
        entry = Checkpointer(store, POLICIES[name](), trainer).write(version)
        was[version] = store.restore(version)["items"]
        assert dtypes(store)[0] == ("adaptive2" if version < 5 else "asymmetric8")
        if version == 5:
            assert entry.kind == "base"
        check(store, version, trainer)
    opened = Store.open(folder)
    for version, rows in was.items():
        found = opened.restore(version)["items"]
        for column, values in rows.columns.items():
            np.testing.assert_array_equal(found.columns[column], values)
    assert dtypes(opened, 4) == ["adaptive2", "asymmetric8"]
    assert opened.verify() == []


def test_a_restore_without_resume_is_not_counted(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", "m", [ITEMS], Quantising(1))
    with pytest.raises(NotFound, match="no version yet"):
        store.resume()
    Checkpointer(store, POLICIES["full"](), Trainer()).write(1)
    with pytest.raises(NotFound, match="no version 2"):
        store.resume(2)
    store.restore()
    assert Store.open(tmp_path / "store").state.restores == 0


def test_a_failed_count_changes_nothing() -> None:
    files = MemoryFiles()
    store = Store.create(files, "m", [ITEMS], Quantising(1))
    Checkpointer(store, POLICIES["full"](), Trainer()).write(1)
    files.fail_every = 1
    with pytest.raises(IoError):
        store.resume()
    files.fail_every = 0
    assert (store.state.restores, Store.open(files).state.restores) == (0, 0)
    store.resume()
    assert Store.open(files).state.restores == 1


def test_optimizer_state_has_fewer_bits_only_on_request() -> None:
    for asked, found in ((None, "asymmetric8"), (8, "asymmetric8"), (4, "adaptive4")):
        store = Store.create(MemoryFiles(), "m", [ITEMS], Quantising(1, state_bits=asked))
        trainer = Trainer()
        Checkpointer(store, POLICIES["full"](), trainer).write(1)
        assert dtypes(store) == ["adaptive2", found]
        check(store, 1, trainer)


@pytest.mark.parametrize(("asked", "found"), [(None, "f32"), (8, "asymmetric8")])
def test_adams_second_moment_is_whole_unless_asked_otherwise(asked: int | None, found: str) -> None:
    names = ("row", "mean", "variance", "exp_avg", "exp_avg_sq")
    table = Table("items", tuple(Column(name, "f32", 64) for name in names))
    keys = np.arange(2000, dtype=np.uint64)
    values = np.random.default_rng(1).random((2000, 64), np.float32)

    class Adam:
        def keys(self, table: str, since: int | None) -> Keys:
            return keys

        def rows(self, table: str, keys: Keys) -> tuple[Mapping[str, Floats], Mask | None]:
            return {name: values[: len(keys)] for name in names}, None

    store = Store.create(MemoryFiles(), "m", [table], Quantising(1, state_bits=asked))
    Checkpointer(store, POLICIES["full"](), Adam()).write(1)
    assert [column.dtype for column in store.tables_of()["items"].columns] == [
        "adaptive2", "asymmetric8", found, "asymmetric8", found,
    ]  # fmt: skip
    if found == "f32":
        kept = store.restore()["items"].columns["variance"].view(np.float32)
        np.testing.assert_array_equal(kept, values)


def test_bits_come_from_the_time_of_a_training_and_of_its_failures() -> None:
    assert Quantising.for_training(24, 24) == Quantising(1)
    assert Quantising.for_training(72, 24).bits(0) == 3
    assert Quantising.for_training(480, 24).bits(0) == 4
    assert Quantising.for_training(500, 24).bits(0) == 8
    for hours, between in ((0, 1), (1, 0), (-1, 1), (float("nan"), 1), (1, float("inf"))):
        with pytest.raises(InvalidArgument, match="must be a number above 0"):
            Quantising.for_training(hours, between)


def test_a_column_that_would_not_get_smaller_is_not_quantised(tmp_path: Path) -> None:
    """One f32 value for each key takes 4 bytes, but 9 when quantised; int8 is quantised already."""
    tables = [
        Table("a", (Column("row", "f16", 64), Column("count", "f32", 1))),
        Table.of("b", 64, "int8"),
    ]
    store = Store.create(tmp_path / "store", "m", tables, Quantising(20))

    class Empty(Trainer):
        def keys(self, table: str, since: int | None) -> Keys:
            return np.empty(0, np.uint64)

        def rows(self, table: str, keys: Keys) -> tuple[Mapping[str, Bytes], Mask | None]:
            raise AssertionError(f"{table} has no rows, yet {len(keys)} are asked for")

    Checkpointer(store, POLICIES["full"](), Empty()).write(1)
    a, b = (Store.open(tmp_path / "store").tables_of()[name] for name in "ab")
    assert [column.dtype for column in a.columns] == ["adaptive4", "f32"]
    assert a.columns[0].quantisation == default_quantisation(4), "no rows to choose by"
    assert b == tables[1]


def test_expect_takes_effect_at_the_next_base(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", "m", [ITEMS])
    trainer = Trainer()
    Checkpointer(store, POLICIES["full"](), trainer).write(1)
    assert dtypes(store) == ["f32", "f32"]
    store.expect(Quantising(20))
    Checkpointer(Store.open(tmp_path / "store"), POLICIES["full"](), trainer).write(2)
    opened = Store.open(tmp_path / "store")
    assert (dtypes(opened, 1), dtypes(opened, 2)) == (
        ["f32", "f32"],
        ["adaptive4", "asymmetric8"],
    )
    check(opened, 1, trainer)
    check(opened, 2, trainer)


def test_bad_input_is_named(tmp_path: Path) -> None:
    for restores in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument, match="restores"):
            Quantising(restores)
    with pytest.raises(InvalidArgument, match="bits must be 2, 3, 4 or 8, got 5"):
        Quantising(1, state_bits=5)
    with pytest.raises(InvalidArgument, match="seed -1 is negative"):
        Quantising(1, seed=-1)
    with pytest.raises(InvalidArgument, match=r"unknown dtype 'clever4'; known: .*adaptive4"):
        Column("row", "clever4", 4)
    store = Store.create(tmp_path / "store", "m", [ITEMS], Quantising(3))
    bad = Trainer()
    bad.values["moment"][77, 3] = np.nan
    writer = Checkpointer(store, POLICIES["consecutive"](), bad)
    with pytest.raises(InvalidArgument, match=r"column moment.* has a value that is not finite"):
        writer.write(1)
    bad.values["moment"][77, 3] = 0
    writer.write(1)
    bad.step(2)
    bad.values["row"][bad.keys("items", 1).astype(np.int64)[5], 3] = np.inf
    with pytest.raises(InvalidArgument, match="column row: row 5 has a value that is not finite"):
        writer.write(2)
    assert [entry.version for entry in Store.open(tmp_path / "store").state.versions()] == [1]
    narrow = Trainer()
    narrow.values["row"] = narrow.values["row"][:, :3].copy()
    with pytest.raises(InvalidArgument, match=rf"\(n, {DIM}\)"):
        Checkpointer(store, POLICIES["full"](), narrow).write(2)
    assert store.verify() == []
