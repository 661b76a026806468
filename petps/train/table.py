"""Tables that a trainer holds: the contract, and numpy arrays.

Owns:        TrainedTable, Gathered, ArrayTable, widths_of().
Never does:  open files or logs.
Called by:   source.py, output.py, stores.py, behind.py; ArrayTable by trainers.
Threads:     one at a time, between two steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from petps.errors import FailedPrecondition, InvalidArgument, NotFound
from petps.train.tracker import Tracker

__all__ = ["ROW", "ArrayTable", "Gathered", "TrainedTable", "check_columns", "widths_of"]

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
ROW: Final = "row"


@dataclass(frozen=True, slots=True)
class Gathered:
    """Gathered rows.

    columns: by name float32[n, dim], "row" and optimizer state, and the stored bytes uint8[n, 4] of
    a column of uint32. deleted: bool[n], or None. last_steps: uint32[n], the low 32 bits of the
    step that wrote each row last, if the table knows it.
    """

    columns: Mapping[str, npt.NDArray[Any]]
    deleted: Mask | None = None
    last_steps: npt.NDArray[np.uint32] | None = None


class TrainedTable(Protocol):
    """Trained rows, tracked under ``name``. Tracked ids and keys have the same order."""

    @property
    def name(self) -> str:
        """The table's name in tracker, store and log."""

    def keys(self) -> Keys:
        """Return uint64[n], ascending: the keys of all rows that exist."""

    def keys_of(self, ids: npt.NDArray[np.uint64]) -> Keys:
        """Return the keys of tracked ids."""

    def ids_of(self, keys: Keys) -> npt.NDArray[np.uint64]:
        """Return the ids of keys. Raise NotFound for a key that has no place in the table."""

    def gather(self, keys: Keys) -> Gathered:
        """Return copies of these keys' rows as they are now."""

    def load_pieces(self, pieces: Iterable[tuple[Keys, Mapping[str, npt.NDArray[Any]]]]) -> None:
        """Replace all rows of the table by these, in the table's own memory, a piece at a time.

        Pieces: uint64[m], ascending from piece to piece, and the columns as gather() has them.
        Raises NotFound for a key without a place, InvalidArgument, and what the pieces raise; then
        rows are mixed.
        """


class ArrayTable:
    """A numpy trainer's table. Lookups and updates are tracked in training, but not in evaluation.

    rows: float32[n, dim], the trainer's own array. columns: optimizer state by name, float32[n]
    or [n, d]. keys: uint64[n], ascending; None: the row numbers. present: bool[n], which rows
    exist; None: all, and none can be deleted. Ids are row numbers. The constructor adds the table
    to the tracker. A trainer may also write to the arrays directly, in rows that it looked up in
    the same step.
    """

    def __init__(
        self,
        tracker: Tracker,
        name: str,
        rows: Floats,
        *,
        columns: Mapping[str, Floats] | None = None,
        keys: Keys | None = None,
        present: Mask | None = None,
    ) -> None:
        columns_given = {ROW: rows, **(columns or {})}
        if columns and ROW in columns:
            raise InvalidArgument(f"table {name}: a column {ROW!r} is the rows themselves")
        self._columns = {
            column: _as_rows(name, column, values, len(rows))
            for column, values in columns_given.items()
        }
        if keys is not None:
            if keys.dtype != np.uint64 or keys.shape != (len(rows),):
                raise InvalidArgument(
                    f"table {name}: keys must be uint64[{len(rows)}], got "
                    f"{keys.dtype}{list(keys.shape)}"
                )
            if not (keys[1:] > keys[:-1]).all():
                raise InvalidArgument(f"table {name}: keys must be ascending and distinct")
        if present is not None and (present.dtype != np.bool_ or present.shape != (len(rows),)):
            raise InvalidArgument(
                f"table {name}: present must be bool[{len(rows)}], got "
                f"{present.dtype}{list(present.shape)}"
            )
        self._tracker = tracker
        self._name = name
        self._keys = keys
        self._present = present
        self.training = True
        """Whether lookups are tracked; train() and evaluate() change it."""
        tracker.add_table(name, len(rows))

    @property
    def name(self) -> str:
        """See TrainedTable."""
        return self._name

    def train(self, training: bool = True) -> None:
        """Enter training, or evaluation if ``training`` is false."""
        self.training = training

    def evaluate(self) -> None:
        """Enter evaluation; the same as train(False)."""
        self.train(False)

    def lookup(self, ids: npt.ArrayLike) -> Floats:
        """Return copies of rows, float32[..., dim]; track the ids in training."""
        positions = self._find_positions(ids)
        if self.training:
            self._tracker.track(self._name, positions)
        return self._columns[ROW][positions]

    def update(self, ids: npt.ArrayLike, rows: npt.ArrayLike, **columns: npt.ArrayLike) -> None:
        """Write and track rows, and any further columns. The rows exist from then on.

        Raises FailedPrecondition in evaluation, InvalidArgument; then nothing is written.
        """
        self._check_training("update")
        positions = self._find_positions(ids).ravel()
        values: dict[str, npt.NDArray[Any]] = {}
        for name, column in {ROW: rows, **columns}.items():
            if name not in self._columns:
                raise InvalidArgument(f"table {self._name} has no column {name!r}")
            width = self._columns[name].shape[1]
            try:
                values[name] = np.asarray(column, np.float32).reshape(len(positions), width)
            except ValueError as error:
                raise InvalidArgument(
                    f"table {self._name}: {name} has shape {np.shape(column)}, "
                    f"expected ({len(positions)}, {width})"
                ) from error
        for name, column in values.items():
            self._columns[name][positions] = column
        if self._present is not None:
            self._present[positions] = True
        self._tracker.track(self._name, positions)

    def delete(self, ids: npt.ArrayLike) -> None:
        """Delete rows until they are updated again. Raise FailedPrecondition in evaluation."""
        self._check_training("delete")
        if self._present is None:
            raise FailedPrecondition(
                f"table {self._name}: rows can be deleted only if the table was made with 'present'"
            )
        positions = self._find_positions(ids).ravel()
        self._present[positions] = False
        self._tracker.track(self._name, positions)

    def keys(self) -> Keys:
        """See TrainedTable."""
        ids = np.arange(len(self._columns[ROW]), dtype=np.uint64)
        return self.keys_of(ids if self._present is None else ids[self._present])

    def keys_of(self, ids: npt.NDArray[np.uint64]) -> Keys:
        """See TrainedTable."""
        return ids if self._keys is None else self._keys[ids.astype(np.intp)]

    def ids_of(self, keys: Keys) -> npt.NDArray[np.uint64]:
        """See TrainedTable."""
        count = len(self._columns[ROW])
        if self._keys is None:
            ids, known = keys, keys < np.uint64(count)
        else:
            ids = np.searchsorted(self._keys, keys).astype(np.uint64)
            known = ids < np.uint64(count)
            known[known] = self._keys[ids[known].astype(np.intp)] == keys[known]
        if not known.all():
            raise NotFound(f"table {self._name} has no place for key {keys[~known][0]}")
        return ids

    def gather(self, keys: Keys) -> Gathered:
        """See TrainedTable."""
        ids = self.ids_of(keys).astype(np.intp)
        columns = {name: values[ids] for name, values in self._columns.items()}
        if self._present is None or self._present[ids].all():
            return Gathered(columns)
        return Gathered(columns, ~self._present[ids])

    def load_pieces(self, pieces: Iterable[tuple[Keys, Mapping[str, Floats]]]) -> None:
        """See TrainedTable; the memory is the trainer's own arrays."""
        count = 0
        if self._present is not None:
            self._present[:] = False
        for keys, columns in pieces:
            ids = self.ids_of(keys).astype(np.intp)
            check_columns(self._name, self._columns, columns)
            for name, values in columns.items():
                self._columns[name][ids] = values
            if self._present is not None:
                self._present[ids] = True
            count += len(ids)
        if self._present is None and count != len(self._columns[ROW]):
            raise InvalidArgument(
                f"table {self._name}: all {len(self._columns[ROW])} rows must be loaded, got "
                f"{count}: make the table with 'present' if some rows may be missing"
            )

    def _find_positions(self, ids: npt.ArrayLike) -> npt.NDArray[np.intp]:
        """Return ids as positions. Raise InvalidArgument if one is not a row number."""
        positions = np.asarray(ids)
        if positions.size == 0:
            return positions.astype(np.intp)
        count = len(self._columns[ROW])
        if positions.dtype.kind not in "iu" or positions.min() < 0 or positions.max() >= count:
            raise InvalidArgument(
                f"table {self._name}: ids must be row numbers, 0 to {count - 1}, got "
                f"{positions.dtype} {sorted(positions.ravel().tolist())[0]} and others"
            )
        return positions.astype(np.intp)

    def _check_training(self, call: str) -> None:
        if not self.training:
            raise FailedPrecondition(
                f"table {self._name} is in evaluation: call train() before {call}()"
            )


def widths_of(table: TrainedTable) -> dict[str, int]:
    """Return the columns of a table: the values in a row, by name."""
    columns = table.gather(np.empty(0, np.uint64)).columns
    return {name: values.shape[1] for name, values in columns.items()}


def check_columns(table: str, expected: Collection[str], given: Collection[str]) -> None:
    """Raise InvalidArgument unless a piece has exactly the columns of its table."""
    if set(given) != set(expected):
        raise InvalidArgument(f"table {table} has columns {sorted(expected)}, got {sorted(given)}")


def _as_rows(table: str, name: str, values: Floats, count: int) -> Floats:
    """Return a view [n, d] of the values."""
    if not isinstance(values, np.ndarray) or values.dtype != np.float32:
        raise InvalidArgument(f"table {table}: column {name} is not a float32 array")
    if values.ndim not in (1, 2) or len(values) != count or (name == ROW and values.ndim != 2):
        raise InvalidArgument(
            f"table {table}: column {name} has shape {values.shape}, expected ({count}, dim)"
        )
    return values.reshape(count, -1) if values.ndim == 2 else values[:, None]
