"""Which rows a training removes, and after which steps (REMOVAL.md).

Owns:        Removal, the rules of a table; Selection, which applies them; find_lowest().
Never does:  read or delete rows; talk to other ranks.
Called by:   sharded.py; trainers (Removal).
Invariants:  whether a row is removed depends only on the step, the rows, and the steps that used
             them; not on the order of rows, their pieces, or the rank that holds them.
Threads:     one for each Selection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from petps.errors import InvalidArgument
from petps.train.mix import mix

__all__ = [
    "LAST_USE",
    "RULES",
    "STEPS_MAX",
    "USES",
    "Removal",
    "Selection",
    "SumOverRanks",
    "find_lowest",
]

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Steps = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]
SumOverRanks = Callable[[Counts], Counts]
LAST_USE: Final = "last_use"  # the column of a store with the step that used a row last
USES: Final = "uses"  # the column of a slot with the number of times that batches used the row
SCORES: Final = (LAST_USE, USES)
RULES: Final = ("steps_to_live", "l2_below", "keep_rows")
# Ages are compared as int32, so that steps may wrap around at 2^32.
STEPS_MAX: Final = (1 << 31) - 1
KEEP_ROWS_MAX: Final = (1 << 63) - 1  # rows are counted as int64
DIGITS: Final = 256


@dataclass(frozen=True, slots=True)
class Removal:
    """The rules by which a table loses rows. A row goes if one of the given rules says so.

    A batch uses the rows of all its keys. A key whose row was removed is a new key when it comes
    again.

    Args:
        steps_to_live: Remove a row that no batch has used for this many steps.
        l2_below: Remove a row whose L2 norm is below this. Optimizer state does not count.
        keep_rows: Keep at most this many rows on all ranks together, those with the highest score.
        score: The score of a row. 'last_use': the step that used it last (LRU). 'uses': how often
            batches used it (LFU); of equals, the one that was used last counts more.
        every: Apply the rules after each step whose number is a multiple of this. None: after the
            steps in which a version of the store is due, RankedOutput(checkpoint=Every(steps=N)).

    Raises:
        InvalidArgument: A value is out of its range, or no rule is given.
    """

    steps_to_live: int | None = None
    l2_below: float | None = None
    keep_rows: int | None = None
    score: Literal["last_use", "uses"] = "last_use"
    every: int | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, rule) is None for rule in RULES):
            *first, last = RULES
            raise InvalidArgument(f"Removal needs a rule: give {', '.join(first)} or {last}")
        limits = {"steps_to_live": STEPS_MAX, "keep_rows": KEEP_ROWS_MAX, "every": STEPS_MAX}
        for name, limit in limits.items():
            value = getattr(self, name)
            if value is not None and not (_is_integer(value) and 1 <= value <= limit):
                raise InvalidArgument(
                    f"Removal: {name} must be an integer from 1 to {limit}, got {value!r}"
                )
        norm: Any = self.l2_below
        if norm is not None and not (_is_number(norm) and 0 < norm < math.inf):
            raise InvalidArgument(f"Removal: l2_below must be a number above 0, got {norm!r}")
        if self.score not in SCORES:
            raise InvalidArgument(
                f"Removal: score must be {SCORES[0]!r} or {SCORES[1]!r}, got {self.score!r}"
            )
        if self.score != LAST_USE and self.keep_rows is None:
            raise InvalidArgument(
                f"Removal: score {self.score!r} chooses the rows of keep_rows: give keep_rows too"
            )

    @property
    def needs_last_use(self) -> bool:
        """Whether a rule needs the step that used a row last."""
        return self.steps_to_live is not None or self.keep_rows is not None

    @property
    def needs_uses(self) -> bool:
        """Whether a rule needs to know how often batches used a row."""
        return self.score == USES


class Selection:
    """The rows of a table that go after a step. Add all rows, then call finish().

    removed: the number of rows of this rank by rule. A row that two rules remove counts for the
    first one, in the order of RULES. Memory: 62 bytes for each row that keep_rows may remove, in
    finish(), and 16 for each other removed row.
    """

    def __init__(self, removal: Removal, step: int) -> None:
        self.removed = dict.fromkeys(RULES, 0)
        self._removal = removal
        self._step = np.uint32(step & 0xFFFFFFFF)
        self._gone: list[Keys] = [np.empty(0, np.uint64)]
        self._kept: list[Keys] = [np.empty(0, np.uint64)]
        self._uses: list[Steps] = [np.empty(0, np.uint32)]
        self._last: list[Steps] = [np.empty(0, np.uint32)]

    def add(self, keys: Keys, rows: Floats, last_use: Steps, uses: Floats | None) -> None:
        """Add rows.

        rows: float32[n, dim]. last_use: uint32[n], the low 32 bits of steps. uses: float32[n], not
        negative, or None if no rule needs them.
        """
        # A step ahead of this one is of an earlier training, whose rows a pool still has. Such a
        # row counts as used now.
        age = np.maximum((self._step - last_use).view(np.int32), 0)
        is_gone = np.zeros(len(keys), np.bool_)
        if self._removal.steps_to_live is not None:
            is_gone |= age >= self._removal.steps_to_live
            self.removed["steps_to_live"] += int(is_gone.sum())
        if self._removal.l2_below is not None:
            is_short = ~is_gone & (_norms(rows) < self._removal.l2_below)
            self.removed["l2_below"] += int(is_short.sum())
            is_gone |= is_short
        self._gone.append(keys[is_gone])
        if self._removal.keep_rows is None:
            return
        self._kept.append(keys[~is_gone])
        self._last.append(~age[~is_gone].view(np.uint32))  # the greater, the later
        if uses is not None:
            # Floats that are not negative have the order of their bits.
            self._uses.append(np.ascontiguousarray(uses[~is_gone]).view(np.uint32))

    def finish(self, sum_over_ranks: SumOverRanks) -> Keys:
        """Return this rank's keys whose rows go, uint64[n]. With keep_rows, all ranks call it.

        sum_over_ranks: returns the sums over all ranks of int64[n].
        """
        if self._removal.keep_rows is not None:
            keys, last = np.concatenate(self._kept), np.concatenate(self._last)
            total = int(sum_over_ranks(np.array([len(keys)], np.int64))[0])
            words: list[npt.NDArray[Any]] = [last, mix(keys)]
            if self._removal.needs_uses:
                words.insert(0, np.concatenate(self._uses))
            is_low = find_lowest(words, total - self._removal.keep_rows, sum_over_ranks)
            self.removed["keep_rows"] += int(is_low.sum())
            self._gone.append(keys[is_low])
        return np.sort(np.concatenate(self._gone))


def find_lowest(
    words: Sequence[npt.NDArray[Any]], count: int, sum_over_ranks: SumOverRanks
) -> Mask:
    """Return bool[n]: which rows of this rank are among the ``count`` lowest rows of all ranks.

    It is a radix selection: all ranks exchange 256 counts for each byte, until it is decided.

    Args:
        words: Unsigned integers[n] that are compared in this order. No two rows have the same.
        count: The same on all ranks, and at most the number of rows. None is low if it is below 1.
        sum_over_ranks: Returns the sums over all ranks of int64[256].
    """
    is_low = np.zeros(len(words[0]), np.bool_)
    if count < 1:
        return is_low
    undecided = np.arange(len(words[0]))
    for word in words:
        for shift in range(8 * word.dtype.itemsize - 8, -1, -8):
            digits = ((word[undecided] >> word.dtype.type(shift)) & word.dtype.type(255)).astype(
                np.int64
            )
            totals = sum_over_ranks(np.bincount(digits, minlength=DIGITS))
            ends = np.cumsum(totals)
            bound = int(np.searchsorted(ends, count))  # the digit of the last low row
            is_low[undecided[digits < bound]] = True
            undecided = undecided[digits == bound]
            count -= int(ends[bound] - totals[bound])
            if count == totals[bound]:
                is_low[undecided] = True
                return is_low
    raise AssertionError("two rows have the same words")


def _norms(rows: Floats) -> npt.NDArray[np.float64]:
    """Return float64[n]: the L2 norm of each row.

    Adds column by column, because numpy's own sum of a row adds in an order that depends on the
    number of rows, and pieces differ between ranks.
    """
    sums = np.zeros(len(rows), np.float64)
    for column in np.ascontiguousarray(rows.T):
        sums += np.square(column, dtype=np.float64)
    return np.sqrt(sums)


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or isinstance(value, float | np.floating)
