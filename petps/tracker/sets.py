"""Sets of ids of one table: as they came, as bits, or in a file. TRACKER.md, "Two stores".

Owns:        Touched, IdSet, BitSet; distinct(), union(), the choice between the two.
Never does:  know segments or tenants; lock.
Called by:   tracker.py, spill.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from petps.tracker.unique import jagged_unique

__all__ = [
    "BitSet",
    "IdSet",
    "Keep",
    "Touched",
    "TouchedSet",
    "distinct",
    "smaller",
    "union",
    "whole",
]

Ids = npt.NDArray[np.uint64]
State = npt.NDArray[Any]
Keep = Literal["first", "last"]
# Bits are widened to bytes this many at a time.
BLOCK_BYTES: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class Touched:
    """ids: uint64[n]; state: [n, ...], what was given with each, or None."""

    ids: Ids
    state: State | None = None

    @property
    def nbytes(self) -> int:
        """Of both."""
        return self.ids.nbytes + (0 if self.state is None else self.state.nbytes)

    def read_only(self) -> Touched:
        """Views that can't be written."""
        ids = self.ids.view()
        ids.flags.writeable = False
        state = None if self.state is None else self.state.view()
        if state is not None:
            state.flags.writeable = False
        return Touched(ids, state)


class TouchedSet(Protocol):
    """What was touched of one table within one segment."""

    @property
    def resident_bytes(self) -> int:
        """Memory that it holds."""

    def parts(self) -> Iterator[Touched]:
        """Its ids, oldest first; one may stand in several parts."""


class IdSet:
    """Ids as they came, 8 bytes each, and their states. replace() makes the first part distinct."""

    def __init__(self, first: Touched | None = None) -> None:
        self._parts = [] if first is None else [first]
        self.distinct = 0 if first is None else len(first.ids)
        """Ids in the first part, if that is distinct."""
        self.appended = 0
        """Ids behind it."""

    @property
    def resident_bytes(self) -> int:
        """See TouchedSet."""
        return sum(part.nbytes for part in self._parts)

    def add(self, touched: Touched) -> None:
        """Appends; the arrays are the set's from now on."""
        self._parts.append(touched)
        self.appended += len(touched.ids)

    def parts(self) -> Iterator[Touched]:
        """See TouchedSet."""
        return iter(list(self._parts))

    def replace(self, count: int, touched: Touched) -> None:
        """The first ``count`` parts are ``touched``, distinct."""
        self._parts[:count] = [touched]
        self.distinct = len(touched.ids)
        self.appended = sum(len(part.ids) for part in self._parts[1:])


class BitSet:
    """A bit for each of a table's rows; holds no state."""

    def __init__(self, rows: int, bits: npt.NDArray[np.uint8] | None = None) -> None:
        self.rows = rows
        self.bits = np.zeros(bit_bytes(rows), np.uint8) if bits is None else bits

    @property
    def resident_bytes(self) -> int:
        """See TouchedSet."""
        return self.bits.nbytes

    def add(self, touched: Touched) -> None:
        """Marks the ids."""
        places = (touched.ids >> np.uint64(3)).astype(np.intp)
        masks = np.left_shift(1, (touched.ids & np.uint64(7)).astype(np.uint8), dtype=np.uint8)
        np.bitwise_or.at(self.bits, places, masks)

    def absorb(self, other: TouchedSet) -> None:
        """Marks what another has."""
        if isinstance(other, BitSet):
            np.bitwise_or(self.bits, other.bits, out=self.bits)
            return
        for part in other.parts():
            self.add(part)

    def parts(self) -> Iterator[Touched]:
        """See TouchedSet: ascending over all parts."""
        for start in range(0, len(self.bits), BLOCK_BYTES):
            block = self.bits[start : start + BLOCK_BYTES]
            places = np.flatnonzero(np.unpackbits(block, bitorder="little"))
            yield Touched(places.astype(np.uint64) + np.uint64(8 * start))


def bit_bytes(rows: int) -> int:
    """Of a BitSet."""
    return (rows + 7) // 8


def distinct(
    tables: Mapping[str, Sequence[Touched]], keep: Keep, order: Literal["any", "ascending"]
) -> dict[str, Touched]:
    """Each table's distinct ids, in one pass over all; of an id's states the first or the last."""
    parts = [part for each in tables.values() for part in each]
    if not parts:
        return {name: Touched(np.empty(0, np.uint64)) for name in tables}
    sizes = [sum(len(part.ids) for part in each) for each in tables.values()]
    offsets = np.cumsum([0, *sizes]).astype(np.uint64)
    values = parts[0].ids if len(parts) == 1 else np.concatenate([part.ids for part in parts])
    stateful = any(part.state is not None for part in parts)
    found = jagged_unique(values, offsets, order=order, inverse=stateful)
    out: dict[str, Touched] = {}
    for number, (name, each) in enumerate(tables.items()):
        ids = found.table(number).astype(np.uint64)  # a copy: no table keeps the others' memory
        state = None
        if each and each[0].state is not None and found.inverse is not None:
            places = found.inverse[int(offsets[number]) : int(offsets[number + 1])]
            given = np.concatenate([part.state for part in each if part.state is not None])
            state = np.empty((len(ids), *given.shape[1:]), given.dtype)
            if keep == "first":
                places, given = places[::-1], given[::-1]
            state[places] = given  # of places that repeat the last one counts
        out[name] = Touched(ids, state)
    return out


def union(sets: Sequence[TouchedSet], rows: int | None, keep: Keep) -> IdSet | BitSet:
    """One set of all, given oldest first: compact, ascending. Takes nothing of what it is given."""
    if rows is not None and any(isinstance(each, BitSet) for each in sets):
        bits = BitSet(rows)
        for each in sets:
            bits.absorb(each)
        return bits
    parts = [part for each in sets for part in each.parts()]
    return smaller(distinct({"": parts}, keep, "ascending")[""], rows)


def smaller(touched: Touched, rows: int | None) -> IdSet | BitSet:
    """A set of distinct ids: bits where one for each row takes less than 8 bytes for each id."""
    if rows is None or touched.state is not None or 8 * len(touched.ids) <= bit_bytes(rows):
        return IdSet(touched)
    bits = BitSet(rows)
    bits.add(touched)
    return bits


def whole(found: TouchedSet) -> Touched:
    """All of a compact set as one."""
    parts = list(found.parts())
    if len(parts) == 1:
        return parts[0]
    return Touched(np.concatenate([part.ids for part in parts] or [np.empty(0, np.uint64)]))
