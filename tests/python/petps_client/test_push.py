"""Pushes through petps_client against a real server."""

from __future__ import annotations

from typing import Any

import numpy as np
import petps_client
import pytest

from petps import _native
from tests.python.petps_client.served import DIM, DTYPES, ROWS, rows_of, shown_rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pull_returns_pushed_rows(client: petps_client.Client, dtype: str) -> None:
    keys = np.arange(ROWS - 700, ROWS + 700, dtype=np.uint64)
    report = client.push(dtype, keys, rows_of(keys, 5))
    assert report == petps_client.PushReport(
        inserted=700, updated=700, deleted=0, absent=0, refused=0
    )
    stored = _native.encode_rows(dtype, rows_of(keys, 5))
    np.testing.assert_array_equal(client.pull(dtype, keys), _native.decode_rows(dtype, DIM, stored))
    assert client.erase(dtype, keys[:10]).deleted == 10
    assert client.erase(dtype, keys[:10]).absent == 10
    assert not client.pull(dtype, keys[:10], return_mask=True)[1].any()


def test_stored_rows_are_pushed_unchanged(client: petps_client.Client) -> None:
    keys = np.arange(10, dtype=np.uint64)
    stored = _native.encode_rows("int8", rows_of(keys, 9))
    client.push("int8", keys, stored, dtype="stored")
    np.testing.assert_array_equal(client.pull("int8", keys, dtype="stored"), stored)
    with pytest.raises(petps_client.InvalidArgument, match="need 200 bytes as stored, not 190"):
        client.push("int8", keys, np.ascontiguousarray(stored[:, 1:]), dtype="stored")


def test_float64_and_lists_are_accepted(client: petps_client.Client) -> None:
    row = np.linspace(-1, 1, DIM)
    client.push("f32", [7], [row.tolist()])
    np.testing.assert_array_equal(client.pull("f32", [7])[0], row.astype(np.float32))
    assert client.push("f32", [], np.empty((0, DIM))).inserted == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((2, DIM + 1), np.float32), "rows have dim 13, the table has 12"),
        (np.zeros((1, DIM), np.float32), "another length than the 2 keys"),
        (np.zeros((2, DIM), np.int64), "rows are int64, expected floats"),
        (np.zeros(2 * DIM, np.float32), r"expected float32\[n, dim\]"),
        (np.full((2, DIM), np.nan, np.float32), r"row 0 \(key 4\) holds a NaN"),
        (np.full((2, DIM), 1e300), r"row 0 \(key 4\) holds a NaN or infinity"),
    ],
)
def test_wrong_rows_are_named(client: petps_client.Client, rows: Any, message: str) -> None:
    before = client.pull("f32", [4, 5])
    with pytest.raises(petps_client.InvalidArgument, match=message):
        client.push("f32", [4, 5], rows)
    np.testing.assert_array_equal(client.pull("f32", [4, 5]), before)


def test_rows_out_of_the_dtypes_range_are_refused(client: petps_client.Client) -> None:
    with pytest.raises(
        petps_client.InvalidArgument, match=r"row 1 .*becomes NaN or infinite as f16"
    ):
        client.push("f16", [4, 5], [[1.0] * DIM, [1e6] * DIM])
    client.push("f16", [4, 5], [[1.0] * DIM, [1e6] * DIM], allow_not_finite=True)
    assert np.isinf(client.pull("f16", [5])).all()


def test_a_full_table_reports_the_refused_rows(client: petps_client.Client) -> None:
    keys = np.arange(200, dtype=np.uint64)
    with pytest.raises(petps_client.ResourceExhausted, match="'small' is full") as caught:
        client.push("small", keys, np.ones((200, 2), np.float32))
    report = caught.value.report
    assert isinstance(report, petps_client.PushReport)
    assert report.inserted >= 64
    assert report.inserted + report.refused == 200
    assert client.pull("small", keys, return_mask=True)[1].sum() == report.inserted


def test_a_delta_fed_table_refuses_a_push(client: petps_client.Client) -> None:
    with pytest.raises(petps_client.FailedPrecondition, match="fed by deltas"):
        client.push("clicks", [1], np.zeros((1, 4), np.float32))
    assert not client.describe("clicks").takes_pushes


def test_the_last_row_of_a_repeated_key_wins(client: petps_client.Client) -> None:
    keys = np.array([3, 3, 3], np.uint64)
    rows = rows_of(np.array([10, 11, 12], np.uint64))
    client.push("f32", keys, rows)
    np.testing.assert_array_equal(client.pull("f32", [3])[0], rows[2])
    np.testing.assert_array_equal(
        client.pull("f32", [4]), shown_rows("f32", np.array([4], np.uint64))
    )
