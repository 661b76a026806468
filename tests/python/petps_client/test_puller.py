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


class Server:
    """A fake client. Each row holds its key, instance, time of the pull and version."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.number, self.version = 1, 1
        self.calls: list[dict[str, int]] = []
        self.lock = threading.Lock()
        self.fails = False
        self.dims: dict[str, int] = {}
        """Dims of tables whose rows are longer than describe() says."""

    def describe(self, table: str) -> petps_client.Table:
        return petps_client.Table(table, "m", "m@1", "f32", 4, 16, True, 1, 1)

    def pull_many_answer(
        self, keys: Mapping[str, Any], *, min_version: int, **options: Any
    ) -> ManyAnswer:
        with self.lock:
            if self.fails:
                raise petps_client.Unavailable("no server answers")
            assert min_version <= self.version
            self.calls.append({table: len(each) for table, each in keys.items()})
            rows = {}
            for table, each in keys.items():
                assert len(np.unique(each)) == len(each)
                row = [self.number, self.clock.now, self.version]
                found = np.c_[each, np.tile(row, (len(each), 1))].astype(np.float32)
                rows[table] = np.pad(found, ((0, 0), (0, self.dims.get(table, 4) - 4)))
            return ManyAnswer(rows, {}, 0, self.version, f"m@{self.number}")


def puller_of(server: Any, **options: Any) -> petps_client.Puller:
    return petps_client.Puller(server, ["a", "b"], clock=server.clock, **options)


@pytest.mark.parametrize("cache_bytes", [0, 2_000, 100_000])
def test_bounds_hold_whatever_happens(cache_bytes: int) -> None:
    """Pull at random, partly prefetched, while rows change, the alias moves and time passes."""
    random = np.random.default_rng((SEED, cache_bytes))
    clock = Clock()
    server = Server(clock)
    puller = puller_of(server, cache_bytes=cache_bytes, staleness_ms=3000)
    ahead: list[dict[str, Any]] = []
    for _ in range(500):
        clock.now += float(random.integers(0, 3))
        with server.lock:
            server.version += int(random.integers(0, 2))
            server.number += int(random.random() < 0.1)
            puller.min_version = max(0, server.version - int(random.integers(0, 3)))
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
        seen = []
        for table, each in keys.items():
            rows = pulled.rows[table][pulled.places[table]]
            assert rows.shape == (len(each), 4)
            np.testing.assert_array_equal(rows[:, 0], each)
            seen.append(rows)
        rows = np.concatenate(seen)
        if len(rows) == 0:
            continue
        assert len(set(rows[:, 1])) == 1, f"two instances, seed {SEED}"
        assert pulled.instance == f"m@{int(rows[0, 1])}"
        assert clock.now - rows[:, 2].min() <= 3, f"too old, seed {SEED}"
        assert pulled.asked <= rows[:, 2].min()
        assert rows[:, 3].min() >= puller.min_version, f"seed {SEED}"
        assert rows[:, 3].min() >= pulled.applied_version


def test_what_is_cached_is_not_asked_for() -> None:
    clock = Clock()
    server = Server(clock)
    puller = puller_of(server, cache_bytes=100_000, staleness_ms=1000)
    puller.pull({"a": [1, 2, 2, 3], "b": [1]})
    puller.pull({"a": [2, 3, 4], "b": [1]})
    puller.pull({"a": [4, 1], "b": [1]})
    clock.now += 1  # exactly at the limit of staleness
    puller.pull({"a": [1]})
    assert server.calls == [{"a": 3, "b": 1}, {"a": 1}]
    clock.now += 0.001
    puller.pull({"a": [1, 4], "b": [5]})
    assert server.calls[2:] == [{"a": 2, "b": 1}]
    server.version = 2
    puller.min_version = 2
    puller.pull({"a": [1]})
    assert server.calls[3:] == [{"a": 1}]


def test_rows_of_two_instances_never_stand_together() -> None:
    server = Server(Clock())
    puller = puller_of(server, cache_bytes=100_000, staleness_ms=1000)
    puller.pull({"a": [1, 2, 3]})
    server.number = 2
    assert puller.pull({"a": [1, 2]}).instance == "m@1"  # all rows cached, within staleness
    pulled = puller.pull({"a": [1, 2, 4], "b": []})
    assert pulled.rows["a"][:, 1].tolist() == [2, 2, 2]
    assert pulled.rows["b"].shape == (0, 4)
    assert server.calls[1:] == [{"a": 1}, {"a": 3, "b": 0}]
    assert puller.pull({"a": [1, 2, 4]}).instance == "m@2"
    assert len(server.calls) == 3


def test_a_late_prefetch_does_not_take_the_cache_back_to_the_instance_before() -> None:
    clock = Clock()
    let_go, held = threading.Event(), threading.Event()

    class Late(Server):
        def pull_many_answer(self, keys: Mapping[str, Any], **options: Any) -> ManyAnswer:
            answer = super().pull_many_answer(keys, **options)
            if threading.current_thread() is not threading.main_thread():
                held.set()
                assert let_go.wait(60)
            return answer

    server = Late(clock)
    puller = puller_of(server, cache_bytes=100_000, staleness_ms=60_000)
    puller.prefetch({"a": [1, 3]})
    assert held.wait(60)
    clock.now, server.number = 2.0, 2
    assert puller.pull({"a": [2]}).instance == "m@2"
    let_go.set()
    assert puller._prefetches[0].pulled.result().instance == "m@1"  # requested before the switch
    clock.now = 3.0
    assert puller.pull({"a": [2]}).instance == "m@2"
    assert len(server.calls) == 2  # still cached
    assert puller.pull({"a": [1]}).instance == "m@2"


def test_an_instance_of_another_dim_that_describe_does_not_know_yet() -> None:
    """describe() uses the last catalogue, which may be older than the instance of the reply."""
    server = Server(Clock())
    puller = puller_of(server, cache_bytes=100_000, staleness_ms=1000)
    puller.pull({"a": [1, 2, 3], "b": [1]})
    server.number, server.dims = 2, {"a": 6, "b": 8}
    for keys in ([4, 5], [4, 5, 6], [5, 6]):
        pulled = puller.pull({"a": keys})
        assert pulled.rows["a"].shape == (len(keys), 6)
        assert pulled.rows["a"][:, 1].tolist() == [2] * len(keys)
    assert server.calls[1:] == [{"a": 2}, {"a": 1}]
    for _ in range(2):  # no row of b was pulled yet when the instance began
        pulled = puller.pull({"a": [4], "b": [7, 8]})
        assert pulled.rows["a"].shape == (1, 6)
        assert pulled.rows["b"].shape == (2, 8)


def test_the_next_pull_takes_what_was_prefetched() -> None:
    server = Server(Clock())
    puller = puller_of(server)
    keys = np.array([5, 6, 5], np.uint64)
    puller.prefetch({"a": keys})
    keys[:] = 9  # like a loader that reuses its buffer
    pulled = puller.pull({"a": [5, 6, 5]})
    assert pulled.rows["a"][pulled.places["a"], 0].tolist() == [5, 6, 5]
    assert len(server.calls) == 1
    puller.pull({"a": [5, 6, 5]})  # a prefetch is used once only
    assert len(server.calls) == 2
    puller.prefetch({"a": [1]})
    puller.prefetch({"a": [2]})
    puller.pull({"a": [3]})  # another batch in between is pulled, and drops no prefetch
    puller.pull({"a": [1]})
    puller.pull({"a": [2]})
    assert len(server.calls) == 5
    puller.prefetch({"a": [1]})
    puller.pull({"a": [1], "b": [1]})
    assert server.calls[-1] == {"a": 1, "b": 1}


def test_a_prefetch_that_is_too_old_is_pulled_anew() -> None:
    clock = Clock()
    server = Server(clock)
    puller = puller_of(server, staleness_ms=500)
    puller.prefetch({"a": [1]})
    while not server.calls:
        pass
    clock.now += 0.6
    assert puller.pull({"a": [1]}).rows["a"][0, 2] == np.float32(clock.now)
    puller.prefetch({"a": [1]})
    while len(server.calls) < 3:
        pass
    server.version = puller.min_version = 2
    assert puller.pull({"a": [1]}).applied_version == 2


def test_a_prefetch_that_fails_is_asked_for_again() -> None:
    server = Server(Clock())
    puller = puller_of(server)
    server.fails = True
    puller.prefetch({"a": [1]})
    with pytest.raises(petps_client.Unavailable, match="no server answers"):
        puller.pull({"a": [1]})
    puller.prefetch({"a": [1]})
    puller._prefetches[0].pulled.exception()  # wait until it has failed, before the server is back
    server.fails = False
    assert puller.pull({"a": [1]}).rows["a"][0, 0] == 1


def test_wrong_options_and_keys_are_named(client: petps_client.Client) -> None:
    with pytest.raises(petps_client.NotFound, match="tabel"):
        petps_client.Puller(client, ["tabel"])
    with pytest.raises(petps_client.InvalidArgument, match="needs staleness_ms"):
        petps_client.Puller(client, ["f32"], cache_bytes=1000)
    with pytest.raises(petps_client.InvalidArgument, match="too small for 1 tables: it takes 672"):
        petps_client.Puller(client, ["f32"], cache_bytes=100, staleness_ms=1)
    with pytest.raises(petps_client.InvalidArgument, match="expected 0 or more"):
        petps_client.Puller(client, ["f32"], staleness_ms=-1)
    puller = petps_client.Puller(client, ["f32"])
    with pytest.raises(petps_client.InvalidArgument, match=r"\['f16'\] are none of this puller's"):
        puller.pull({"f16": [1]})
    for call in (puller.pull, puller.prefetch):
        with pytest.raises(petps_client.InvalidArgument, match="expected integers"):
            call({"f32": np.zeros(2)})


def test_from_a_server(served: Served, client: petps_client.Client) -> None:
    keys = np.random.default_rng(SEED).integers(0, ROWS + 200, 3000).astype(np.uint64)
    cached: dict[str, Any] = {"cache_bytes": 200_000, "staleness_ms": 60_000}
    for options in ({}, cached):
        puller = petps_client.Puller(client, ["f32", "int8"], **options)
        for _ in range(2):
            pulled = puller.pull({"f32": keys, "int8": keys[:100]})
            for table, each in (("f32", keys), ("int8", keys[:100])):
                rows = pulled.rows[table][pulled.places[table]]
                np.testing.assert_array_equal(rows, shown_rows(table, each))
            assert pulled.instance == "ranking@1"
    # The model's next version has other rows, and another dim in table int8. The puller must notice
    # the switch of the alias.
    new = served.tables.create_instance("ranking", "ranking@2", 2).id
    for table, dim in (("f32", DIM), ("int8", 2)):
        made = served.tables.create_table(
            table, instance=new, dim=dim, dtype="f32", capacity=5000, feed="push"
        )
        made.apply(
            np.arange(ROWS, dtype=np.uint64),
            _native.encode_rows(
                "f32", rows_of(np.arange(ROWS, dtype=np.uint64), 3)[:, :dim].copy()
            ),
        )
    client.switch_alias("ranking", "ranking@2")
    with petps_client.connect(f"petps://{served.address}/ranking@1") as pinned:
        assert pinned.pull_answer("f32", [1]).instance == "ranking@1"
    client.tables()
    puller.pull({"f32": [ROWS + 1000]})
    pulled = puller.pull({"f32": [3, 4], "int8": [3]})
    assert pulled.instance == "ranking@2"
    np.testing.assert_array_equal(pulled.rows["f32"], rows_of(np.array([3, 4], np.uint64), 3))
    assert pulled.rows["int8"].shape == (1, 2)


def test_without_torch_the_error_says_what_to_install() -> None:
    """Import the module in a separate process, in which torch cannot be found."""
    program = "import sys; sys.modules['torch'] = None; import petps_client.torch"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "petps_client.torch needs PyTorch" in done.stderr
    assert "pip install petps[torch]" in done.stderr
