"""Arrays are checked and never converted. The error names the argument and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from petps import _native
from petps.errors import InvalidArgument

KEYS = np.arange(4, dtype=np.uint64)


@pytest.fixture
def table() -> Iterator[_native.Table]:
    tables = _native.Tables.create("")
    instance = tables.create_instance("m", "m@0", 1)
    yield tables.create_table("t", instance=instance.id, dim=3, dtype="f32", capacity=100)
    tables.close()


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def out(n: int, width: int, dtype: type[Any] = np.float32) -> np.ndarray[Any, Any]:
    return np.zeros((n, width), dtype)


BAD: list[tuple[str, Callable[[Any], object], str]] = [
    ("list", lambda t: t.pull([1], out(1, 3)), "keys: expected a numpy array"),
    ("signed", lambda t: t.pull(KEYS.astype(np.int64), None), r"expected uint64\[n\], got int64"),
    ("matrix", lambda t: t.pull(KEYS.reshape(2, 2), None), r"keys: .*got uint64\[2, 2\]"),
    ("strided", lambda t: t.pull(KEYS[::2], None), "keys: .*strided view"),
    ("no out", lambda t: t.pull(KEYS, None), "out: expected a numpy array"),
    ("doubles", lambda t: t.pull(KEYS, out(4, 3, np.float64)), r"out: .*got float64\[4, 3\]"),
    ("short", lambda t: t.pull(KEYS, out(3, 3)), r"out: expected float32\[4, 3\]"),
    ("wide", lambda t: t.pull(KEYS, out(4, 4)), r"out: .*got float32\[4, 4\]"),
    ("stored", lambda t: t.pull(KEYS, out(4, 11, np.uint8)), r"out: expected uint8\[4, 12\]"),
    ("fixed", lambda t: t.pull(KEYS, read_only(out(4, 3))), "out: .*read-only"),
    ("mask", lambda t: t.pull(KEYS, out(4, 3), np.zeros(3, bool)), r"mask: expected bool\[4\]"),
    ("mask dtype", lambda t: t.pull(KEYS, out(4, 3), np.zeros(4, np.uint8)), "mask: .*uint8"),
    ("rows", lambda t: t.apply(KEYS, out(4, 3)), r"rows: expected uint8"),
    ("row bytes", lambda t: t.apply(KEYS, out(4, 8, np.uint8)), r"table 't': .*uint8\[4, 12\]"),
    ("few rows", lambda t: t.apply(KEYS, out(3, 12, np.uint8)), r"got uint8\[3, 12\]"),
    ("no rows", lambda t: t.apply(KEYS, None, np.zeros(4, bool)), "does not mark every key"),
]


@pytest.mark.parametrize(
    ("call", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_an_invalid_array_is_refused(
    table: _native.Table, call: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call(table)
    assert table.status().rows == 0


def test_an_unaligned_array_is_refused(table: _native.Table) -> None:
    unaligned = np.frombuffer(bytearray(33), np.uint8)[1:].view(np.uint64)
    with pytest.raises(InvalidArgument, match="aligned"):
        table.pull(unaligned, np.zeros((4, 3), np.float32))


def test_empty_arrays_are_accepted(table: _native.Table) -> None:
    none = np.empty(0, np.uint64)
    assert table.pull(none, np.empty((0, 3), np.float32), np.empty(0, bool)) == 0
    assert table.apply(none, np.empty((0, 12), np.uint8)).inserted == 0
    assert table.apply(none, None).deleted == 0
