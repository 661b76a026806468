"""Distinct ids of many tables, against numpy."""

from __future__ import annotations

import threading
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from petps.errors import InvalidArgument
from petps.train.tracker import jagged_unique

SEED = 20263


@st.composite
def jagged(draw: st.DrawFn) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Draw values uint64[n] and offsets uint64[tables + 1]."""
    identifier = st.one_of(st.integers(0, 30), st.integers(0, 2**64 - 1), st.just(2**64 - 1))
    tables = draw(st.lists(st.lists(identifier, max_size=60), max_size=12))
    values = np.array([i for table in tables for i in table], dtype=np.uint64)
    offsets = np.cumsum([0, *map(len, tables)]).astype(np.uint64)
    return values, offsets


@given(jagged(), st.sampled_from(["any", "ascending"]), st.booleans(), st.booleans())
def test_equals_numpy(
    given_: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]],
    order: Literal["any", "ascending"],
    inverse: bool,
    counts: bool,
) -> None:
    values, offsets = given_
    unique = jagged_unique(values, offsets, order=order, inverse=inverse, counts=counts)
    assert (unique.inverse is not None) == inverse
    assert (unique.counts is not None) == counts
    for t in range(len(offsets) - 1):
        part = values[offsets[t] : offsets[t + 1]]
        ids = unique.table(t)
        expected, numbers = np.unique(part, return_counts=True)
        places = np.argsort(ids)
        np.testing.assert_array_equal(ids[places], expected)
        if order == "ascending":
            np.testing.assert_array_equal(ids, expected)
        if unique.inverse is not None:
            np.testing.assert_array_equal(ids[unique.inverse[offsets[t] : offsets[t + 1]]], part)
        if unique.counts is not None:
            here = unique.counts[unique.offsets[t] : unique.offsets[t + 1]]
            np.testing.assert_array_equal(here[places], numbers)


@pytest.mark.parametrize("order", ["any", "ascending"])
def test_a_large_table_of_signed_ids(order: Literal["any", "ascending"]) -> None:
    print(f"seed {SEED}")
    values = np.random.default_rng(SEED).integers(0, 200_000, 300_000)
    unique = jagged_unique(values, np.array([0, 100, 300_000]), order=order)
    assert unique.ids.dtype == np.int64
    np.testing.assert_array_equal(np.sort(unique.table(0)), np.unique(values[:100]))
    np.testing.assert_array_equal(np.sort(unique.table(1)), np.unique(values[100:]))


def test_results_stay_valid_after_the_call() -> None:
    """The native side owns the memory: many results stay valid while others are freed."""
    values = np.arange(1000, dtype=np.uint64)
    kept = [jagged_unique(values + i, np.array([0, 1000]), order="ascending") for i in range(50)]
    for i, unique in enumerate(kept):
        np.testing.assert_array_equal(unique.ids, values + i)


def test_parallel_calls_return_the_same() -> None:
    """Parallel calls return the same as one call alone (TSan checks the native part)."""
    values = np.random.default_rng(SEED).integers(0, 100_000, 200_000)
    offsets = np.array([0, 200_000])
    expected = jagged_unique(values, offsets).ids
    unique: list[Any] = []
    threads = [
        threading.Thread(target=lambda: unique.append(jagged_unique(values, offsets).ids))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(unique) == 4
    for ids in unique:
        np.testing.assert_array_equal(ids, expected)


def test_bad_input_is_named() -> None:
    values = np.arange(9)
    for offsets, message in (
        ([], r"offsets is empty: it must have tables \+ 1 elements"),
        ([1, 9], r"offsets\[0\] is 1, but the first table begins at 0"),
        ([0, 4, 3, 9], r"offsets\[2\] is 3, below the 4 before it"),
        ([0, 8], r"offsets\[1\] is 8, but the last table ends with the 9 values"),
        ([0, -1, 9], r"offsets\[1\] must be at least 0, got -1"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            jagged_unique(values, np.array(offsets, dtype=np.int64))
    with pytest.raises(InvalidArgument, match=r"values\[3\] must be at least 0, got -5"):
        jagged_unique(np.array([1, 2, 3, -5]), np.array([0, 4]))
    with pytest.raises(InvalidArgument, match=r"values: expected uint64\[n\], got float64\[2\]"):
        jagged_unique(np.zeros(2), np.array([0, 2]))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"order must be .*, got 'down'"):
        jagged_unique(values, np.array([0, 9]), order="down")  # type: ignore[arg-type]
