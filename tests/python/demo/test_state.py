"""The comparison at the end and the check of rows during the kill detect each kind of error."""

from __future__ import annotations

import numpy as np
import pytest

from examples.demo.kill import share_of_new
from examples.demo.report import Comparison
from examples.demo.state import State, bits, compare
from petps.errors import DataLoss


def state() -> State:
    """Return four rows and two missing keys."""
    rows = np.arange(24, dtype=np.float32).reshape(6, 4) + 1
    present = np.array([True, True, True, True, False, False])
    return State(rows, present)


def pulled() -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and the mask that a correct server returns."""
    expected = state()
    rows = np.where(expected.present[:, None], expected.rows, np.float32(0))
    return rows, expected.present.copy()


def test_correct_rows_are_equal() -> None:
    rows, mask = pulled()
    result = compare(state(), rows, mask)
    assert result == Comparison(6, rows_equal=4, missing_as_they_should=2)
    assert result.wrong == 0
    assert (result + result).rows_equal == 8


def test_one_different_bit_is_detected() -> None:
    rows, mask = pulled()
    bits(rows)[2, 3] ^= 1
    result = compare(state(), rows, mask)
    assert (result.rows_different, result.wrong) == (1, 1)


def test_another_sign_of_zero_is_detected() -> None:
    rows, mask = pulled()
    expected = state()
    expected.rows[1, 1] = 0.0
    rows[1, 1] = -0.0
    assert compare(expected, rows, mask).rows_different == 1


def test_equal_bits_of_a_nan_are_equal() -> None:
    rows, mask = pulled()
    expected = state()
    expected.rows[0, 0] = rows[0, 0] = np.nan
    assert compare(expected, rows, mask).wrong == 0


def test_a_lost_row_is_detected() -> None:
    rows, mask = pulled()
    mask[0] = False
    assert compare(state(), rows, mask).rows_lost == 1
    assert compare(state(), rows, mask).wrong == 1


@pytest.mark.parametrize("is_found", [True, False])
def test_a_row_that_should_be_missing_is_detected(is_found: bool) -> None:
    rows, mask = pulled()
    rows[5, 0] = 3
    mask[5] = is_found
    assert compare(state(), rows, mask).rows_undead == 1
    assert compare(state(), rows, mask).wrong == 1


def test_share_of_new_counts_new_rows_and_refuses_torn_ones() -> None:
    before, after = np.zeros((4, 2), np.float32), np.ones((4, 2), np.float32)
    mixed = before.copy()
    mixed[1] = 1
    assert share_of_new(mixed, before, after) == 0.25
    mixed[2, 0] = 1  # half of the old row, half of the new row
    with pytest.raises(DataLoss, match="1 of 4 rows are neither"):
        share_of_new(mixed, before, after)
