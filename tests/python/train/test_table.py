"""ArrayTable: what it tracks, and what it refuses."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from petps.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from petps.train import ArrayTable
from petps.train.tracker import Tracker

KEYS = np.array([5, 7, 2**63], np.uint64)


def make_table(**options: Any) -> tuple[Tracker, ArrayTable]:
    tracker = Tracker(tenants=["a"])
    return tracker, ArrayTable(tracker, "t", np.ones((3, 2), np.float32), **options)


def touched(tracker: Tracker) -> list[int]:
    with tracker.read("a") as reading:
        ids: list[int] = reading.ids("t").tolist()
        reading.acknowledge()
    return ids


def test_training_is_tracked_and_evaluation_is_not() -> None:
    tracker, table = make_table()
    assert table.lookup([[0, 1], [1, 1]]).shape == (2, 2, 2)
    assert touched(tracker) == [0, 1]
    table.evaluate()
    table.lookup([2])
    assert touched(tracker) == []
    with pytest.raises(FailedPrecondition, match=r"call train\(\) before update"):
        table.update([2], np.ones((1, 2)))
    table.train()
    table.update([2], [[3, 4]])
    assert touched(tracker) == [2]
    assert table.gather(np.array([2], np.uint64)).columns["row"].tolist() == [[3, 4]]


def test_keys_and_deletions() -> None:
    tracker, table = make_table(keys=KEYS, present=np.array([True, True, False]))
    assert table.keys().tolist() == [5, 7]
    table.delete([0])
    table.update([2], [[1, 2]])
    assert touched(tracker) == [0, 2]
    assert table.keys().tolist() == [7, 2**63]
    deleted = table.gather(KEYS).deleted
    assert deleted is not None
    assert deleted.tolist() == [True, False, False]
    table.load_pieces([(KEYS[:1], {"row": np.zeros((1, 2), np.float32)})])
    assert table.keys().tolist() == [5]
    for key in (6, 2**64 - 1):
        with pytest.raises(NotFound, match=f"no place for key {key}"):
            table.ids_of(np.array([5, key], np.uint64))


def test_bad_input_is_named() -> None:
    tracker, table = make_table(columns={"sum": np.zeros(3, np.float32)})
    for ids in ([3], [-1], [0.5], ["a"]):
        with pytest.raises(InvalidArgument, match="row numbers, 0 to 2"):
            table.lookup(ids)
    with pytest.raises(InvalidArgument, match=r"row has shape \(1, 3\), expected \(1, 2\)"):
        table.update([1], np.ones((1, 3)))
    with pytest.raises(InvalidArgument, match="no column 'sun'"):
        table.update([1], np.ones((1, 2)), sun=[1])
    with pytest.raises(FailedPrecondition, match="only if the table was made with 'present'"):
        table.delete([1])
    none = {"row": np.ones((0, 2), np.float32), "sum": np.ones((0, 1), np.float32)}
    with pytest.raises(InvalidArgument, match="make the table with 'present'"):
        table.load_pieces([(KEYS[:0], none)])
    with pytest.raises(InvalidArgument, match="has columns"):
        table.load_pieces([(KEYS[:0], {"row": np.ones((0, 2), np.float32)})])
    assert touched(tracker) == []
    rows = np.ones((3, 2), np.float32)
    with pytest.raises(AlreadyExists, match="name it by its owner"):
        ArrayTable(tracker, "t", rows)
    for options, expected in (
        ({"keys": KEYS[::-1]}, "ascend"),
        ({"keys": KEYS[:2]}, r"keys must be uint64\[3\], got uint64\[2\]"),
        ({"present": KEYS}, r"present must be bool\[3\], got uint64"),
        ({"columns": {"row": rows}}, "rows themselves"),
        ({"columns": {"sum": rows[:2]}}, r"sum has shape \(2, 2\)"),
        ({"columns": {"sum": np.ones(3)}}, "not a float32"),
    ):
        with pytest.raises(InvalidArgument, match=expected):
            ArrayTable(tracker, "other", rows, **options)


def test_without_pytorch_the_error_names_the_package() -> None:
    """These suites run without PyTorch; tests/train has the tests that need it."""
    from petps.train import pytorch, torchrec

    if importlib.util.find_spec("torch") is not None:
        pytest.skip("PyTorch is here")
    with pytest.raises(FailedPrecondition, match=r"pip install petps\[torch\]"):
        pytorch.track_module(Tracker(), None)
    with pytest.raises(InvalidArgument, match="is no DistributedModelParallel"):
        torchrec.TorchRecIds(Tracker(), None)
