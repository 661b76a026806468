"""Pulls through petps_client from a real server: rows, masks, the caller's arrays, errors."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import petps_client
import pytest

from petps import _native
from tests.python.petps_client.served import DIM, DTYPES, ROWS, Served, shown_rows
from tests.python.waiting import wait_until
from tests.seed import SEED


def random_keys(n: int, salt: int = 0) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(SEED + salt).integers(0, ROWS + 400, n, dtype=np.uint64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 499, 500, 501, 3000, 70_000])
def test_a_pull_returns_rows_and_mask(client: petps_client.Client, dtype: str, n: int) -> None:
    keys = random_keys(n, n)
    rows, mask = client.pull(dtype, keys, return_mask=True)
    assert rows.dtype == np.float32
    assert rows.shape == (n, DIM)
    np.testing.assert_array_equal(rows, shown_rows(dtype, keys), err_msg=f"seed {SEED}")
    np.testing.assert_array_equal(mask, keys < ROWS)
    assert mask.dtype == np.bool_


@pytest.mark.parametrize("dedup", [True, False, None])
def test_repeated_keys_have_the_same_row(client: petps_client.Client, dedup: bool | None) -> None:
    keys = np.array([5, 5, ROWS + 1, 7, 5, ROWS + 1], np.uint64)
    answer = client.pull_answer("bf16", keys, dedup=dedup)
    np.testing.assert_array_equal(answer.rows, shown_rows("bf16", keys))
    assert answer.found == 4
    assert answer.applied_version == 0


def test_out_is_filled_in_place(client: petps_client.Client) -> None:
    keys = random_keys(800)
    whole = np.full((802, DIM), 77, np.float32)
    out = whole[1:-1]
    mask = np.zeros(800, np.bool_)
    assert client.pull("f32", keys, out, mask=mask) is out
    np.testing.assert_array_equal(out, shown_rows("f32", keys))
    np.testing.assert_array_equal(mask, keys < ROWS)
    assert (whole[0] == 77).all()
    assert (whole[-1] == 77).all()
    rows, same = client.pull("f32", keys, out, mask=mask, return_mask=True)
    assert rows is out
    assert same is mask


def test_stored_rows_are_pulled_unchanged(client: petps_client.Client) -> None:
    keys = np.arange(100, dtype=np.uint64)
    for dtype in DTYPES:
        rows = client.pull(dtype, keys, dtype="stored")
        assert rows.dtype == np.uint8
        np.testing.assert_array_equal(
            _native.decode_rows(dtype, DIM, rows), shown_rows(dtype, keys)
        )
        out = np.zeros_like(rows)
        assert client.pull(dtype, keys, out, dtype="stored") is out
        np.testing.assert_array_equal(out, rows)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.zeros((3, DIM * 2), np.float32)[:, ::2], "C-contiguous"),
        (np.zeros((3, DIM), np.float64), r"expected float32\[n, dim\], got float64\[3, 12\]"),
        (np.zeros((2, DIM), np.float32), "another length than the 3 keys"),
        (np.zeros((3, DIM + 1), np.float32), r"dim 12"),
        (np.zeros(3 * DIM, np.float32), r"got float32\[36\]"),
        (np.asfortranarray(np.zeros((3, DIM), np.float32)), "numpy.ascontiguousarray"),
        (np.broadcast_to(np.zeros(DIM, np.float32), (3, DIM)), "out"),
        ([[0.0] * DIM] * 3, "expected a numpy array"),
    ],
)
def test_wrong_out_is_named(client: petps_client.Client, out: Any, message: str) -> None:
    with pytest.raises(petps_client.InvalidArgument, match=message):
        client.pull("f32", [1, 2, 3], out)


def test_read_only_out_and_wrong_mask_are_named(client: petps_client.Client) -> None:
    out = np.zeros((2, DIM), np.float32)
    out.flags.writeable = False
    with pytest.raises(petps_client.InvalidArgument, match="out: the array is read-only"):
        client.pull("f32", [1, 2], out)
    with pytest.raises(petps_client.InvalidArgument, match=r"mask: expected bool\[n\], got uint8"):
        client.pull("f32", [1, 2], mask=np.zeros(2, np.uint8))
    with pytest.raises(petps_client.InvalidArgument, match=r"mask: .* another length"):
        client.pull("f32", [1, 2], mask=np.zeros(3, np.bool_))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([1.5], "whole number"),
        ([-1], r"keys\[0\] is -1, but keys are unsigned.*signed_keys=True"),
        ([1 << 64], "outside 0"),
        (np.array([-3]), r"keys\[0\] is -3"),
        (np.array([1.0]), "expected integers"),
        (np.zeros((2, 2), np.uint64), r"shape \(2, 2\)"),
        (["a"], "whole number"),
    ],
)
def test_wrong_keys_are_named(client: petps_client.Client, keys: Any, message: str) -> None:
    with pytest.raises(petps_client.InvalidArgument, match=message):
        client.pull("f32", keys)


def test_all_kinds_of_integer_keys_are_accepted(client: petps_client.Client) -> None:
    expected = shown_rows("f32", np.array([3, 1], np.uint64))
    kinds: list[npt.ArrayLike] = [
        [3, 1],
        (3, 1),
        np.array([3, 1], np.int32),
        np.array([3, 9, 1, 9], np.uint64)[::2],
    ]
    for keys in kinds:
        np.testing.assert_array_equal(client.pull("f32", keys), expected)
    assert not client.pull("f32", [2**64 - 1, 3], return_mask=True)[1][0]


def test_pull_many_returns_the_rows_of_all_tables(client: petps_client.Client) -> None:
    keys_by_table = {dtype: random_keys(700 + i, i) for i, dtype in enumerate(DTYPES)}
    out = np.zeros((len(keys_by_table["f16"]), DIM), np.float32)
    pulled = client.pull_many(keys_by_table, out={"f16": out}, return_mask=True)
    assert pulled["f16"][0] is out
    for dtype, keys in keys_by_table.items():
        rows, mask = pulled[dtype]
        np.testing.assert_array_equal(rows, shown_rows(dtype, keys))
        np.testing.assert_array_equal(mask, keys < ROWS)
    assert client.pull_many({}) == {}
    with pytest.raises(petps_client.InvalidArgument, match=r"\['users'\]"):
        client.pull_many({"f32": [1]}, out={"users": out})


def test_a_pull_after_a_switch_returns_rows_of_the_new_dim(
    client: petps_client.Client, served: Served
) -> None:
    """The client has described an instance that was dropped, and the new one has another dim."""
    client.pull("f32", [1])
    new = served.tables.create_instance("ranking", "ranking@2", 2).id
    for table, dim in (("f32", 2 * DIM), ("int8", 3)):
        served.tables.create_table(
            table, instance=new, dim=dim, dtype="f32", capacity=100, feed="push"
        )
    served.tables.set_alias("ranking", new)
    served.tables.drop_instance(served.tables.resolve("ranking@1").id)
    answer = client.pull_many_answer({"f32": [1, 2], "int8": [3]})
    assert answer.instance == "ranking@2"
    assert answer.rows["f32"].shape == (2, 2 * DIM)
    assert answer.rows["int8"].shape == (1, 3)
    with pytest.raises(petps_client.InvalidArgument, match="the array has"):
        client.pull("f32", [1], np.empty((1, DIM), np.float32))


def test_the_error_of_an_unknown_table_lists_the_known_tables(
    client: petps_client.Client,
) -> None:
    with pytest.raises(petps_client.NotFound, match=r"'nope'.*known: bf16, clicks, f16, f32, int8"):
        client.pull("nope", [1])


def test_wrong_urls_and_options_of_connect_are_named(served: Served) -> None:
    with pytest.raises(petps_client.NotFound, match="known: ranking"):
        petps_client.connect(f"petps://{served.address}/other")
    with pytest.raises(petps_client.InvalidArgument, match="must start with petps://"):
        petps_client.connect("http://x")
    with pytest.raises(petps_client.InvalidArgument, match="keys_per_request"):
        petps_client.connect(served.url, keys_per_request=0)
    with pytest.raises(petps_client.InvalidArgument, match="deadline_ms is -1"):
        petps_client.connect(served.url, deadline_ms=-1)


def test_a_server_without_the_minimum_version_is_stale(client: petps_client.Client) -> None:
    with pytest.raises(petps_client.Stale):
        client.pull("f32", [1], min_version=99)
    with pytest.raises(petps_client.Stale):
        client.pull("f32", [1], min_version=99, wait_ms=5)
    with pytest.raises(petps_client.Stale):
        client.pull_many({"f32": [1]}, min_version=99, wait_ms=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wait_ms": -1}, "wait_ms is -1"),
        ({"deadline_ms": 0}, "deadline_ms is 0"),
        ({"min_version": -1}, "min_version is -1"),
        ({"dtype": "f64"}, "'f64'"),
    ],
)
def test_wrong_options_are_named(
    client: petps_client.Client, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(petps_client.InvalidArgument, match=message):
        client.pull("f32", [1], **options)


def test_a_pull_waits_for_its_version(client: petps_client.Client, served: Served) -> None:
    def record() -> None:
        while served.stats()["waits_for_version"] == 0:
            time.sleep(0.001)
        for partition in range(2):
            served.tables.record_progress(
                _native.Progress(
                    instance=served.tables.instances()[0].id,
                    partition=partition,
                    run=1,
                    seq=1,
                    offset=0,
                    version=7,
                    state="following",
                    target=0,
                )
            )

    thread = threading.Thread(target=record)
    thread.start()
    answer = client.pull_answer("f32", [1], min_version=7, wait_ms=20_000, deadline_ms=30_000)
    thread.join()
    assert (answer.found, answer.applied_version) == (1, 7)


def test_tables_and_servers_are_described(client: petps_client.Client, served: Served) -> None:
    int8 = client.describe("int8")
    assert (int8.dim, int8.dtype, int8.row_bytes, int8.model) == (DIM, "int8", 20, "ranking")
    assert {table.name for table in client.tables()} == {*DTYPES, "clicks", "small"}
    assert client.status()["port"] == served.port
    assert client.status(0)["port"] == served.port
    with pytest.raises(petps_client.InvalidArgument, match=r"outside 0\.\.0"):
        client.status(1)


def test_asynchronous_calls_run_at_the_same_time(client: petps_client.Client) -> None:
    keys = random_keys(1200)

    async def call_all() -> None:
        pulls = await asyncio.gather(*(client.pull_async(dtype, keys) for dtype in DTYPES))
        for dtype, rows in zip(DTYPES, pulls, strict=True):
            np.testing.assert_array_equal(rows, shown_rows(dtype, keys))
        answer = await client.pull_answer_async("f32", keys)
        assert answer.found == int((keys < ROWS).sum())
        assert set(await client.pull_many_async({"f32": keys})) == {"f32"}
        report = await client.push_async("f32", [1], pulls[0][:1])
        assert report.updated == 1
        with pytest.raises(petps_client.NotFound):
            await client.pull_async("nope", keys)

    asyncio.run(call_all())


def test_threads_share_a_client(client: petps_client.Client) -> None:
    def pull_repeatedly(salt: int) -> None:
        for number in range(20):
            keys = random_keys(900, salt * 100 + number)
            dtype = DTYPES[(salt + number) % 4]
            np.testing.assert_array_equal(client.pull(dtype, keys), shown_rows(dtype, keys))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(pull_repeatedly, range(8)))


def test_a_waiting_call_releases_the_gil() -> None:
    # The server never replies. While one thread waits for it, this thread must run.
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        ThreadPoolExecutor(1) as thread,
    ):
        url = f"petps://127.0.0.1:{silent.getsockname()[1]}/ranking"
        waiting = thread.submit(petps_client.connect, url, deadline_ms=5_000)
        rounds = 0
        while not waiting.done():
            rounds += 1
            time.sleep(0.01)
        assert rounds > 10
        error = waiting.exception()
    assert isinstance(error, petps_client.DeadlineExceeded)
    assert isinstance(error, TimeoutError)
    assert "5000 ms" in str(error)


def test_a_pull_fails_while_the_server_is_down_and_succeeds_after_its_restart(
    served: Served,
) -> None:
    with petps_client.connect(served.url, deadline_ms=5000) as client:
        keys = random_keys(600)
        client.pull("f32", keys)
        served.stop()

        def refused() -> petps_client.Unavailable | None:
            try:
                client.pull("f32", keys, deadline_ms=200)
            except petps_client.DeadlineExceeded:  # it cut the last attempt short
                return None
            except petps_client.Unavailable as error:
                return error
            raise AssertionError("the pull succeeded")

        error = wait_until(refused)
        assert served.address in str(error)
        assert error.code == "UNAVAILABLE"
        assert isinstance(error, ConnectionError)
        later = threading.Timer(0.2, served.start)
        later.start()
        rows = client.pull("f32", keys, deadline_ms=60_000)
        np.testing.assert_array_equal(rows, shown_rows("f32", keys))
        later.join()


def test_a_closed_client_refuses_calls(served: Served) -> None:
    client = petps_client.connect(served.url)
    client.close()
    client.close()
    with pytest.raises(petps_client.FailedPrecondition, match="closed"):
        client.pull("f32", [1])
    with pytest.raises(petps_client.FailedPrecondition, match="closed"):
        asyncio.run(client.pull_async("f32", [1]))


def test_hot_sets_reach_the_server(served: Served) -> None:
    with petps_client.connect(served.url, hot_sample_every=1) as client:
        for _ in range(5):
            client.pull("f32", [1, 2, 3])
        client.send_hot_sets()
    assert served.stats()["hot_sets"] == 1


def test_a_mask_must_come_with_the_mask_of_unavailable_keys(
    served: Served, client: petps_client.Client
) -> None:
    with pytest.raises(petps_client.InvalidArgument, match="must come with a mask"):
        client.pull("f32", [1], return_mask=True, on_unavailable="default")
    with pytest.raises(petps_client.InvalidArgument, match="must come with a mask"):
        client.pull_many({"f32": [1]}, return_mask=True, on_unavailable="default")
    unavailable = np.ones(2, np.bool_)
    _, mask = client.pull(
        "f32", [1, ROWS], return_mask=True, unavailable=unavailable, on_unavailable="default"
    )
    assert mask.tolist() == [True, False]
    assert unavailable.tolist() == [False, False]
    assert client.pull("f32", [1], on_unavailable="default").shape == (1, DIM)
    for wrong in ("zeros", 1):
        options: Any = {"on_unavailable": wrong}
        with pytest.raises(petps_client.InvalidArgument, match="'error' or 'default'"):
            client.pull("f32", [1], **options)
    with pytest.raises(petps_client.InvalidArgument, match="got 'zeros'"):
        petps_client.connect(served.url + "?on_unavailable=zeros")
    with pytest.raises(petps_client.InvalidArgument, match="the option 'deadline=1' is unknown"):
        petps_client.connect(served.url + "?deadline=1")
