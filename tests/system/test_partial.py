"""Clients of all kinds while a shard is killed, stopped (SIGSTOP) or back: on_unavailable."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import petps_client
import pytest

import petps
from petps import _native
from petps.cli.app import EXIT_CODES
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


def pull_by_command(_: petps_client.Client, *, url: str) -> Result:
    command = [*servers.PETPS, "pull", url, "items", "--json", *map(str, KEYS)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=servers.WAIT_SECONDS, check=False
    )
    if done.returncode in (EXIT_CODES["UNAVAILABLE"], EXIT_CODES["DEADLINE_EXCEEDED"]):
        raise petps_client.Unavailable(done.stderr)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = report["rows"]
    assert [row["key"] for row in rows] == KEYS.tolist()
    unavailable = np.array([row["unavailable"] for row in rows])
    assert report["unavailable"] == unavailable.sum()
    values = np.array([row["row"] for row in rows], np.float32)
    return Result(values, np.array([row["found"] for row in rows]), unavailable)


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


def check_pull(pull: Pull, client: petps_client.Client, is_down: Mask) -> None:
    """Check a pull that leaves out only what a shard that is down has.

    A call waits half a second for a shard, so on a busy machine it may leave out a living one.
    """

    def answer() -> Result | None:
        try:
            result = pull(client)
        except (petps_client.Unavailable, petps_client.DeadlineExceeded):  # every shard was late
            return None
        return None if (result.unavailable & ~is_down).any() else result

    result = wait_until("the living shards answer", answer)
    assert result is not None
    check(result, is_down)


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
            check_pull(pull, client, nobody)

        with stopped(fleet.servers[1]):
            for pull in ALL_PULLS:
                check_pull(pull, client, IS_DEAD)
            with pytest.raises((petps_client.Unavailable, petps_client.DeadlineExceeded)):
                client.pull("items", KEYS, on_unavailable="error", deadline_ms=300)
        check_pull(pull_answer, client, nobody)
        fleet.servers[1].kill()
        for pull in ALL_PULLS:
            check_pull(pull, client, IS_DEAD)
        check_pull(partial(pull_by_command, url=url), client, IS_DEAD)
        counts = client.pull_counts()
        assert counts["unavailable_keys"] >= counts["partial_pulls"] > 0
        fleet.servers[1].restart()
        for pull in ALL_PULLS:
            check_pull(pull, client, nobody)
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
            check_pull(pull, client, IS_DEAD)
