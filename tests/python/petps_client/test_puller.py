"""Puller: each key once, all tables in one call, prefetch, and a cache with bounds."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import petps_client
import pytest
from petps_client.client import ManyAnswer

from petps import _native
from tests.python.petps_client.served import DIM, ROWS, Served, rows_of, shown_rows
from tests.seed import SEED


class Clock:
    """A clock in seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


class FakeClient:
    """A client without servers. Each row holds its key, instance, time of the pull and version."""

    signed_keys = False

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.number, self.version = 1, 1
        self.calls: list[dict[str, int]] = []
        self.lock = threading.Lock()
        self.fails = False
        self.dead_from = 1 << 64
        """Keys from this one on are unavailable."""
        self.dims: dict[str, int] = {}
        """Dims of tables whose rows are longer than describe() says."""

    def describe(self, table: str) -> petps_client.Table:
        return petps_client.Table(table, "m", "m@1", "f32", 4, 16, True, 1, 1)

    def pull_many_answer(
        self, keys: Mapping[str, Any], *, min_version: int, **options: Any
    ) -> ManyAnswer:
        with self.lock:
            if self.fails:
                raise petps_client.Unavailable("no server is reachable")
            assert min_version <= self.version
            self.calls.append({table: len(table_keys) for table, table_keys in keys.items()})
            rows, unavailable = {}, {}
            for table, table_keys in keys.items():
                unavailable[table] = np.array(
                    [int(key) >= self.dead_from for key in table_keys], np.bool_
                )
                assert len(np.unique(table_keys)) == len(table_keys)
                shared = [self.number, self.clock.now, self.version]
                values = np.c_[table_keys, np.tile(shared, (len(table_keys), 1))]
                padding = self.dims.get(table, 4) - 4
                rows[table] = np.pad(values.astype(np.float32), ((0, 0), (0, padding)))
                rows[table][unavailable[table]] = 0
            return ManyAnswer(rows, {}, 0, self.version, f"m@{self.number}", unavailable)


def make_puller(client: Any, **options: Any) -> petps_client.Puller:
    return petps_client.Puller(client, ["a", "b"], clock=client.clock, **options)


@pytest.mark.parametrize("cache_bytes", [0, 2_000, 100_000])
def test_pulled_rows_are_recent_and_of_one_instance(cache_bytes: int) -> None:
    """Pull at random, partly prefetched, while rows change, the alias moves and time passes."""
    random = np.random.default_rng((SEED, cache_bytes))
    clock = Clock()
    fake = FakeClient(clock)
    puller = make_puller(fake, cache_bytes=cache_bytes, staleness_ms=3000)
    ahead: list[dict[str, Any]] = []
    for _ in range(500):
        clock.now += float(random.integers(0, 3))
        with fake.lock:
            fake.version += int(random.integers(0, 2))
            fake.number += int(random.random() < 0.1)
            puller.min_version = max(0, fake.version - int(random.integers(0, 3)))
        keys = {
            table: random.zipf(1.3, random.integers(0, 40)).astype(np.uint64) % 100
            for table in (["a", "b"] if random.random() < 0.8 else ["b"])
        }
        if random.random() < 0.4:
            puller.prefetch(keys)
            ahead.append(keys)
            continue
        if ahead and random.random() < 0.8:
            keys = ahead.pop(0)
        pulled = puller.pull(keys)
        assert pulled.rows.keys() == keys.keys()
        rows_by_table = []
        for table, table_keys in keys.items():
            rows = pulled.rows[table][pulled.places[table]]
            assert rows.shape == (len(table_keys), 4)
            np.testing.assert_array_equal(rows[:, 0], table_keys)
            rows_by_table.append(rows)
        rows = np.concatenate(rows_by_table)
        if len(rows) == 0:
            continue
        assert len(set(rows[:, 1])) == 1, f"two instances, seed {SEED}"
        assert pulled.instance == f"m@{int(rows[0, 1])}"
        assert clock.now - rows[:, 2].min() <= 3, f"too old, seed {SEED}"
        assert pulled.asked <= rows[:, 2].min()
        assert rows[:, 3].min() >= puller.min_version, f"seed {SEED}"
        assert rows[:, 3].min() >= pulled.applied_version


def test_cached_rows_are_not_requested() -> None:
    clock = Clock()
    fake = FakeClient(clock)
    puller = make_puller(fake, cache_bytes=100_000, staleness_ms=1000)
    puller.pull({"a": [1, 2, 2, 3], "b": [1]})
    puller.pull({"a": [2, 3, 4], "b": [1]})
    puller.pull({"a": [4, 1], "b": [1]})
    clock.now += 1  # exactly at the limit of staleness
    puller.pull({"a": [1]})
    assert fake.calls == [{"a": 3, "b": 1}, {"a": 1}]
    clock.now += 0.001
    puller.pull({"a": [1, 4], "b": [5]})
    assert fake.calls[2:] == [{"a": 2, "b": 1}]
    fake.version = 2
    puller.min_version = 2
    puller.pull({"a": [1]})
    assert fake.calls[3:] == [{"a": 1}]


def test_a_result_never_mixes_rows_of_two_instances() -> None:
    fake = FakeClient(Clock())
    puller = make_puller(fake, cache_bytes=100_000, staleness_ms=1000)
    puller.pull({"a": [1, 2, 3]})
    fake.number = 2
    assert puller.pull({"a": [1, 2]}).instance == "m@1"  # all rows cached, within staleness
    pulled = puller.pull({"a": [1, 2, 4], "b": []})
    assert pulled.rows["a"][:, 1].tolist() == [2, 2, 2]
    assert pulled.rows["b"].shape == (0, 4)
    assert fake.calls[1:] == [{"a": 1}, {"a": 3, "b": 0}]
    assert puller.pull({"a": [1, 2, 4]}).instance == "m@2"
    assert len(fake.calls) == 3


def test_a_late_prefetch_does_not_return_the_cache_to_an_older_instance() -> None:
    clock = Clock()
    is_released, is_held = threading.Event(), threading.Event()

    class LateClient(FakeClient):
        def pull_many_answer(self, keys: Mapping[str, Any], **options: Any) -> ManyAnswer:
            answer = super().pull_many_answer(keys, **options)
            if threading.current_thread() is not threading.main_thread():
                is_held.set()
                assert is_released.wait(60)
            return answer

    fake = LateClient(clock)
    puller = make_puller(fake, cache_bytes=100_000, staleness_ms=60_000)
    puller.prefetch({"a": [1, 3]})
    assert is_held.wait(60)
    clock.now, fake.number = 2.0, 2
    assert puller.pull({"a": [2]}).instance == "m@2"
    is_released.set()
    assert puller._prefetches[0].pulled.result().instance == "m@1"  # requested before the switch
    clock.now = 3.0
    assert puller.pull({"a": [2]}).instance == "m@2"
    assert len(fake.calls) == 2  # still cached
    assert puller.pull({"a": [1]}).instance == "m@2"


def test_rows_have_another_dim_than_describe_returns() -> None:
    """describe() uses the last catalogue, which may be older than the instance of the reply."""
    fake = FakeClient(Clock())
    puller = make_puller(fake, cache_bytes=100_000, staleness_ms=1000)
    puller.pull({"a": [1, 2, 3], "b": [1]})
    fake.number, fake.dims = 2, {"a": 6, "b": 8}
    for keys in ([4, 5], [4, 5, 6], [5, 6]):
        pulled = puller.pull({"a": keys})
        assert pulled.rows["a"].shape == (len(keys), 6)
        assert pulled.rows["a"][:, 1].tolist() == [2] * len(keys)
    assert fake.calls[1:] == [{"a": 2}, {"a": 1}]
    for _ in range(2):  # no row of b was pulled yet when the instance began
        pulled = puller.pull({"a": [4], "b": [7, 8]})
        assert pulled.rows["a"].shape == (1, 6)
        assert pulled.rows["b"].shape == (2, 8)


def test_the_next_pull_of_the_same_keys_takes_the_prefetched_rows() -> None:
    fake = FakeClient(Clock())
    puller = make_puller(fake)
    keys = np.array([5, 6, 5], np.uint64)
    puller.prefetch({"a": keys})
    keys[:] = 9  # like a loader that reuses its buffer
    pulled = puller.pull({"a": [5, 6, 5]})
    assert pulled.rows["a"][pulled.places["a"], 0].tolist() == [5, 6, 5]
    assert len(fake.calls) == 1
    puller.pull({"a": [5, 6, 5]})  # a prefetch is used once only
    assert len(fake.calls) == 2
    puller.prefetch({"a": [1]})
    puller.prefetch({"a": [2]})
    puller.pull({"a": [3]})  # another batch in between is pulled, and drops no prefetch
    puller.pull({"a": [1]})
    puller.pull({"a": [2]})
    assert len(fake.calls) == 5
    puller.prefetch({"a": [1]})
    puller.pull({"a": [1], "b": [1]})
    assert fake.calls[-1] == {"a": 1, "b": 1}


def test_a_prefetch_that_is_too_old_is_pulled_again() -> None:
    clock = Clock()
    fake = FakeClient(clock)
    puller = make_puller(fake, staleness_ms=500)
    puller.prefetch({"a": [1]})
    while not fake.calls:
        pass
    clock.now += 0.6
    assert puller.pull({"a": [1]}).rows["a"][0, 2] == np.float32(clock.now)
    puller.prefetch({"a": [1]})
    while len(fake.calls) < 3:
        pass
    fake.version = puller.min_version = 2
    assert puller.pull({"a": [1]}).applied_version == 2


def test_a_failed_prefetch_is_pulled_again() -> None:
    fake = FakeClient(Clock())
    puller = make_puller(fake)
    fake.fails = True
    puller.prefetch({"a": [1]})
    with pytest.raises(petps_client.Unavailable, match="no server is reachable"):
        puller.pull({"a": [1]})
    puller.prefetch({"a": [1]})
    puller._prefetches[0].pulled.exception()  # wait until it has failed, before the fake recovers
    fake.fails = False
    assert puller.pull({"a": [1]}).rows["a"][0, 0] == 1


def test_wrong_options_and_keys_are_named(client: petps_client.Client) -> None:
    with pytest.raises(petps_client.NotFound, match="tabel"):
        petps_client.Puller(client, ["tabel"])
    with pytest.raises(petps_client.InvalidArgument, match="needs staleness_ms"):
        petps_client.Puller(client, ["f32"], cache_bytes=1000)
    with pytest.raises(petps_client.InvalidArgument, match="cache_bytes must be at least 672"):
        petps_client.Puller(client, ["f32"], cache_bytes=100, staleness_ms=1)
    with pytest.raises(petps_client.InvalidArgument, match="expected 0 or more"):
        petps_client.Puller(client, ["f32"], staleness_ms=-1)
    puller = petps_client.Puller(client, ["f32"])
    with pytest.raises(petps_client.InvalidArgument, match=r"does not have tables \['f16'\]"):
        puller.pull({"f16": [1]})
    for call in (puller.pull, puller.prefetch):
        with pytest.raises(petps_client.InvalidArgument, match="expected integers"):
            call({"f32": np.zeros(2)})


def test_a_puller_follows_the_alias_of_a_server(
    served: Served, client: petps_client.Client
) -> None:
    keys = np.random.default_rng(SEED).integers(0, ROWS + 200, 3000).astype(np.uint64)
    cached: dict[str, Any] = {"cache_bytes": 200_000, "staleness_ms": 60_000}
    for options in ({}, cached):
        puller = petps_client.Puller(client, ["f32", "int8"], **options)
        for _ in range(2):
            pulled = puller.pull({"f32": keys, "int8": keys[:100]})
            for table, table_keys in (("f32", keys), ("int8", keys[:100])):
                rows = pulled.rows[table][pulled.places[table]]
                np.testing.assert_array_equal(rows, shown_rows(table, table_keys))
            assert pulled.instance == "ranking@1"
    # The model's next version has other rows, and another dim in table int8. The puller must notice
    # the switch of the alias.
    new = served.tables.create_instance("ranking", "ranking@2", 2).id
    all_keys = np.arange(ROWS, dtype=np.uint64)
    for name, dim in (("f32", DIM), ("int8", 2)):
        new_table = served.tables.create_table(
            name, instance=new, dim=dim, dtype="f32", capacity=5000, feed="push"
        )
        new_table.apply(all_keys, _native.encode_rows("f32", rows_of(all_keys, 3)[:, :dim].copy()))
    served.tables.set_alias("ranking", new)
    with petps_client.connect(f"petps://{served.address}/ranking@1") as pinned:
        assert pinned.pull_answer("f32", [1]).instance == "ranking@1"
    client.tables()
    puller.pull({"f32": [ROWS + 1000]})
    pulled = puller.pull({"f32": [3, 4], "int8": [3]})
    assert pulled.instance == "ranking@2"
    np.testing.assert_array_equal(pulled.rows["f32"], rows_of(np.array([3, 4], np.uint64), 3))
    assert pulled.rows["int8"].shape == (1, 2)


def test_without_torch_the_error_says_how_to_install_it() -> None:
    """Import the module in a separate process, in which torch cannot be found."""
    program = "import sys; sys.modules['torch'] = None; import petps_client.torch"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert process.returncode != 0
    assert "petps_client.torch needs PyTorch" in process.stderr
    assert "pip install petps[torch]" in process.stderr


def test_default_rows_of_unavailable_keys_are_marked_and_not_cached() -> None:
    fake = FakeClient(Clock())
    puller = make_puller(fake, cache_bytes=100_000, staleness_ms=60_000, on_unavailable="default")
    puller.pull({"a": [1, 12]})
    fake.dead_from = 10
    pulled = puller.pull({"a": [1, 2, 12, 13], "b": [11]})
    assert pulled.unavailable["a"].tolist() == [False, False, False, True]  # 12 is in the cache
    assert pulled.unavailable["b"].tolist() == [True]
    assert pulled.rows["a"][:, 0].tolist() == [1, 2, 12, 0]
    assert pulled.applied_version == 1
    fake.dead_from = 1 << 64
    pulled = puller.pull({"a": [1, 2, 12, 13], "b": [11]})
    assert not any(mask.any() for mask in pulled.unavailable.values())
    assert pulled.rows["a"][:, 0].tolist() == [1, 2, 12, 13]
    assert fake.calls[-1] == {"a": 1, "b": 1}  # only what was unavailable
