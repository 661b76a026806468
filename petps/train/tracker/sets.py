"""Sets of ids of one table, as ids or as bits. TRACKER.md, "Two stores".

Owns:        Touched, IdSet, BitSet; find_distinct(), join(), shrink(), concatenate().
Never does:  know segments or tenants; lock.
Called by:   tracker.py, spill.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from petps.train.tracker.unique import jagged_unique

__all__ = [
    "BitSet",
    "IdSet",
    "Keep",
    "Touched",
    "TouchedSet",
    "concatenate",
    "find_distinct",
    "join",
    "shrink",
]

Ids = npt.NDArray[np.uint64]
State = npt.NDArray[Any]
Keep = Literal["first", "last"]
# Bytes of bits that are expanded at a time.
BLOCK_BYTES: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class Touched:
    """Touched ids. ids: uint64[n]. state: [n, ...], the state given with each id, or None."""

    ids: Ids
    state: State | None = None

    @property
    def nbytes(self) -> int:
        """Return the size of ids and state in bytes."""
        return self.ids.nbytes + (0 if self.state is None else self.state.nbytes)

    def read_only(self) -> Touched:
        """Return read-only views."""
        ids, state = self.ids.view(), None if self.state is None else self.state.view()
        for array in (ids, state):
            if array is not None:
                array.flags.writeable = False
        return Touched(ids, state)


class TouchedSet(Protocol):
    """The ids of one table that were touched within one segment."""

    @property
    def resident_bytes(self) -> int:
        """Return the memory that the set holds."""

    def parts(self) -> Iterator[Touched]:
        """Yield the ids, oldest first; several parts may have the same id."""


class IdSet:
    """Ids in the order of arrival, 8 bytes each, with states. replace() makes them distinct."""

    def __init__(self, first: Touched | None = None) -> None:
        self._parts = [] if first is None else [first]
        self.distinct = 0 if first is None else len(first.ids)
        """Ids in the first part, if it is distinct."""
        self.appended = 0
        """Ids in the parts after the first one."""

    @property
    def resident_bytes(self) -> int:
        """See TouchedSet."""
        return sum(part.nbytes for part in self._parts)

    def add(self, touched: Touched) -> None:
        """Append ids. The set owns the arrays from now on."""
        self._parts.append(touched)
        self.appended += len(touched.ids)

    def parts(self) -> Iterator[Touched]:
        """See TouchedSet."""
        return iter(list(self._parts))

    def replace(self, count: int, touched: Touched) -> None:
        """Replace the first ``count`` parts by ``touched``, which is distinct."""
        self._parts[:count] = [touched]
        self.distinct = len(touched.ids)
        self.appended = sum(len(part.ids) for part in self._parts[1:])


class BitSet:
    """A bit for each of a table's rows, without state."""

    def __init__(self, rows: int, bits: npt.NDArray[np.uint8] | None = None) -> None:
        self.rows = rows
        self.bits = np.zeros(bit_bytes(rows), np.uint8) if bits is None else bits

    @property
    def resident_bytes(self) -> int:
        """See TouchedSet."""
        return self.bits.nbytes

    def add(self, touched: Touched) -> None:
        """Set the bits of the ids."""
        places = (touched.ids >> np.uint64(3)).astype(np.intp)
        masks = np.left_shift(1, (touched.ids & np.uint64(7)).astype(np.uint8), dtype=np.uint8)
        np.bitwise_or.at(self.bits, places, masks)

    def absorb(self, other: TouchedSet) -> None:
        """Set the bits of another set's ids."""
        if isinstance(other, BitSet):
            np.bitwise_or(self.bits, other.bits, out=self.bits)
            return
        for part in other.parts():
            self.add(part)

    def parts(self) -> Iterator[Touched]:
        """Yield the ids, ascending over all parts. See TouchedSet."""
        for start in range(0, len(self.bits), BLOCK_BYTES):
            block = self.bits[start : start + BLOCK_BYTES]
            places = np.flatnonzero(np.unpackbits(block, bitorder="little"))
            yield Touched(places.astype(np.uint64) + np.uint64(8 * start))


def bit_bytes(rows: int) -> int:
    """Return the size of a BitSet in bytes."""
    return (rows + 7) // 8


def find_distinct(
    tables: Mapping[str, Sequence[Touched]], keep: Keep, order: Literal["any", "ascending"]
) -> dict[str, Touched]:
    """Return each table's distinct ids, in one pass over all tables.

    keep: which state of an id counts, the first or the last.
    """
    parts = [part for table_parts in tables.values() for part in table_parts]
    if not parts:
        return {name: Touched(np.empty(0, np.uint64)) for name in tables}
    sizes = [sum(len(part.ids) for part in table_parts) for table_parts in tables.values()]
    offsets = np.cumsum([0, *sizes]).astype(np.uint64)
    values = parts[0].ids if len(parts) == 1 else np.concatenate([part.ids for part in parts])
    has_state = any(part.state is not None for part in parts)
    unique = jagged_unique(values, offsets, order=order, inverse=has_state)
    out: dict[str, Touched] = {}
    for number, (name, table_parts) in enumerate(tables.items()):
        ids = unique.table(number).astype(np.uint64)  # a copy: a view would keep all tables' memory
        state = None
        if table_parts and table_parts[0].state is not None and unique.inverse is not None:
            places = unique.inverse[int(offsets[number]) : int(offsets[number + 1])]
            states = np.concatenate([part.state for part in table_parts if part.state is not None])
            state = np.empty((len(ids), *states.shape[1:]), states.dtype)
            if keep == "first":
                places, states = places[::-1], states[::-1]
            state[places] = states  # numpy keeps the last value of a repeated place
        out[name] = Touched(ids, state)
    return out


def join(sets: Sequence[TouchedSet], rows: int | None, keep: Keep) -> IdSet | BitSet:
    """Return one compact, ascending set of all ``sets``, oldest first. Leave those unchanged."""
    if rows is not None and any(isinstance(touched_set, BitSet) for touched_set in sets):
        bits = BitSet(rows)
        for touched_set in sets:
            bits.absorb(touched_set)
        return bits
    parts = [part for touched_set in sets for part in touched_set.parts()]
    return shrink(find_distinct({"": parts}, keep, "ascending")[""], rows)


def shrink(touched: Touched, rows: int | None) -> IdSet | BitSet:
    """Return distinct ids as a BitSet if that is smaller than an IdSet, otherwise as an IdSet."""
    if rows is None or touched.state is not None or 8 * len(touched.ids) <= bit_bytes(rows):
        return IdSet(touched)
    bits = BitSet(rows)
    bits.add(touched)
    return bits


def concatenate(touched_set: TouchedSet) -> Touched:
    """Return all ids of a compact set as one array."""
    parts = list(touched_set.parts())
    if len(parts) == 1:
        return parts[0]
    return Touched(np.concatenate([part.ids for part in parts] or [np.empty(0, np.uint64)]))
