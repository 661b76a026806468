"""Clients of all kinds while a shard is killed, stopped (SIGSTOP) or back: on_unavailable."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import petps_client
import pytest

import petps
from petps import _native
from tests.system import servers
from tests.system.servers import PARTITIONS, Fleet, Server, wait_until

pytestmark = pytest.mark.system

DIM = 4
KEYS = np.arange(400, dtype=np.uint64)
IS_MISSING = KEYS % 7 == 0
IS_DEAD = _native.partition_of(KEYS, PARTITIONS) >= 4
DEFAULT = [0.5, -1.0, 2.0, 8.0]
ROWS = (KEYS[:, None] + np.arange(DIM)).astype(np.float32)
Mask = npt.NDArray[np.bool_]


class Result(NamedTuple):
    """The result of a pull of KEYS, by any kind of call."""

    rows: Any
    mask: Mask | None
    unavailable: Mask


def pull_answer(client: petps_client.Client, **options: Any) -> Result:
    answer = client.pull_answer("items", KEYS, **options)
    assert answer.found == answer.mask.sum()
    return Result(answer.rows, answer.mask, answer.unavailable)


def pull_async(client: petps_client.Client, **options: Any) -> Result:
    answer = asyncio.run(client.pull_answer_async("items", KEYS, **options))
    return Result(answer.rows, answer.mask, answer.unavailable)


def pull_into(client: petps_client.Client, **options: Any) -> Result:
    rows = np.full((len(KEYS), DIM), np.nan, np.float32)
    mask, unavailable = np.empty(len(KEYS), np.bool_), np.empty(len(KEYS), np.bool_)
    out = client.pull("items", KEYS, rows, mask=mask, unavailable=unavailable, **options)
    assert out is rows
    return Result(rows, mask, unavailable)


def pull_stored(client: petps_client.Client, **options: Any) -> Result:
    answer = client.pull_answer("items", KEYS, dtype="stored", **options)
    return Result(answer.rows.view(np.float32), answer.mask, answer.unavailable)


def pull_many(client: petps_client.Client, **options: Any) -> Result:
    answer = client.pull_many_answer({"items": KEYS, "other": KEYS[:3]}, **options)
    assert (answer.unavailable["other"] == answer.unavailable["items"][:3]).all()
    return Result(answer.rows["items"], answer.masks["items"], answer.unavailable["items"])


def pull_many_async(client: petps_client.Client, **options: Any) -> Result:
    answer = asyncio.run(client.pull_many_answer_async({"items": KEYS}, **options))
    return Result(answer.rows["items"], answer.masks["items"], answer.unavailable["items"])


def pull_by_puller(client: petps_client.Client, **options: Any) -> Result:
    puller = petps_client.Puller(client, ["items"], **options)
    pulled = puller.pull({"items": KEYS})
    places = pulled.places["items"]
    return Result(pulled.rows["items"][places], None, pulled.unavailable["items"][places])


Pull = Callable[..., Result]
ALL_PULLS: list[Pull] = [
    *(pull_answer, pull_async, pull_into, pull_stored, pull_many, pull_many_async, pull_by_puller)
]


def check(result: Result, is_unavailable: Mask) -> None:
    """Check every row and both masks."""
    np.testing.assert_array_equal(result.unavailable, is_unavailable)
    is_found = ~IS_MISSING & ~is_unavailable
    if result.mask is not None:
        np.testing.assert_array_equal(result.mask, is_found)
    expected = np.where(is_found[:, None], ROWS, np.array(DEFAULT, np.float32))
    np.testing.assert_array_equal(result.rows, expected)


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Keep a server from running during the block, with all its connections open."""
    server.child.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{server.child.pid}/task")
    try:
        wait_until(
            "all threads are stopped",
            lambda: all(
                task.read_text().rpartition(")")[2].split()[0] == "T"
                for task in tasks.glob("*/stat")
            ),
        )
        yield
    finally:
        server.child.send_signal(signal.SIGCONT)


@pytest.fixture
def fleet(serve: Callable[..., Server], tmp_path: Path) -> Fleet:
    """Two shards, each with its part of the rows."""
    pools = [tmp_path / f"server{number}" / "pool" for number in range(2)]
    for path in pools:
        path.parent.mkdir()
        with petps.create(path, durability="process") as pool:
            pool.create_table("items", dim=DIM, capacity=1000, default=DEFAULT)
            pool.create_table("other", dim=DIM, capacity=1000)
    fleet = Fleet(serve, tmp_path, pools, "")
    fleet.own(["0-3"], ["4-7"])
    with servers.connect(fleet.url(0)) as client:
        client.push("items", KEYS[~IS_MISSING], ROWS[~IS_MISSING])
    return fleet


def test_every_kind_of_pull_leaves_out_a_shard_that_is_down(fleet: Fleet) -> None:
    """A shard is stopped, goes on, is killed, and is started again, under one client."""
    nobody = np.zeros(len(KEYS), np.bool_)
    url = fleet.url(0) + "?on_unavailable=default"
    with petps_client.connect(url) as client:
        for pull in ALL_PULLS:
            check(pull(client), nobody)

        def is_back() -> bool:
            return not pull_answer(client).unavailable.any()

        with stopped(fleet.servers[1]):
            for pull in ALL_PULLS:
                check(pull(client), IS_DEAD)
            with pytest.raises((petps_client.Unavailable, petps_client.DeadlineExceeded)):
                client.pull("items", KEYS, on_unavailable="error", deadline_ms=300)
        wait_until("the shard goes on", is_back)
        fleet.servers[1].kill()
        for pull in ALL_PULLS:
            check(pull(client), IS_DEAD)
        report = json.loads(servers.petps("pull", url, "items", "--json", *KEYS))
        assert report["unavailable"] == IS_DEAD.sum()
        assert [row["unavailable"] for row in report["rows"]] == IS_DEAD.tolist()
        counts = client.pull_counts()
        assert counts["unavailable_keys"] >= counts["partial_pulls"] > 0
        fleet.servers[1].restart()
        wait_until("the shard is back", is_back)
        for pull in ALL_PULLS:
            check(pull(client), nobody)
        for server in fleet.servers:
            server.kill()
        with pytest.raises(petps_client.Unavailable, match="no server of the model answers"):
            client.pull("items", KEYS)


def test_a_client_connects_while_a_shard_is_stopped(fleet: Fleet) -> None:
    with (
        stopped(fleet.servers[1]),
        petps_client.connect(fleet.url(0), on_unavailable="default") as client,
    ):
        for pull in ALL_PULLS:
            check(pull(client), IS_DEAD)
