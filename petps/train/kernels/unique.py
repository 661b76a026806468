"""jagged_unique on a device (DECK 4.1): by partitioned hashing, and by radix sort.

By hash: the kernels divide the keys into partitions by their hash, so that a partition's cells
stay in the cache. Each partition has twice as many cells as keys. A cell holds the place of one
value with its key, so no key value is needed to mark a free cell. Each value claims a free cell
by compare-and-swap, or finds the cell of its key by linear probing. Then an atomic minimum finds
the least place of each key. The order of the result follows from that minimum, not from which
value came first.

By radix: a stable sort of places by the digits of their keys, least significant first, then by
those of the table's number. The first place of each run of equal keys is the key's first
occurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import triton
import triton.language as tl

from petps.train.kernels.rank import BLOCK, grid_of, number_flags
from petps.train.pytorch import torch_module

__all__ = ["find_distinct"]

# Keys in a partition: their cells (8 bytes, twice as many) are a small part of a level-2 cache.
PARTITION_KEYS: Final = 1 << 15
PARTITIONS_MAX: Final = 1 << 12
DIGIT_BITS: Final = 4
# The number of places that a program sorts: each takes a register for each digit.
SORT_BLOCK: Final = 256

Tensors = tuple[Any, Any, Any]
# The values in the order of the flags, and a call that fills the inverse.
Flagged = tuple[Any, Callable[[Any, Any, Any], None]]


@triton.jit
def _hash(key, table):
    """Apply splitmix64's finaliser to the key and the table."""
    mixed = (key ^ (table * -7046029254386353131)).to(tl.uint64, bitcast=True)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


@triton.jit
def _deal(values, tables, parts, counts, n, partitions: tl.constexpr, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    there = at < n
    key = tl.load(values + at, mask=there, other=0)
    table = tl.load(tables + at, mask=there, other=0)
    part = ((_hash(key, table) >> 32) & (partitions - 1)).to(tl.int64)
    tl.store(parts + at, part, mask=there)
    tl.atomic_add(counts + part, tl.full([size], 1, tl.int64), mask=there)


@triton.jit
def _gather_partition(parts, cursors, order, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    there = at < n
    part = tl.load(parts + at, mask=there, other=0)
    place = tl.atomic_add(cursors + part, tl.full([size], 1, tl.int64), mask=there)
    tl.store(order + place, at.to(tl.int64), mask=there)


@triton.jit
def _claim(
    values,
    tables,
    parts,
    order,
    begins,
    counts,
    cells,
    first,
    cell_of,
    n,
    dummy,
    size: tl.constexpr,
):
    at = tl.program_id(0) * size + tl.arange(0, size)
    there = at < n
    place = tl.load(order + at, mask=there, other=0)
    key = tl.load(values + place, mask=there, other=0)
    table = tl.load(tables + place, mask=there, other=0)
    part = tl.load(parts + place, mask=there, other=0)
    begin = 2 * tl.load(begins + part, mask=there, other=0)
    room = 2 * tl.load(counts + part, mask=there, other=1)
    low = (_hash(key, table) & 0xFFFFFFFF).to(tl.int64)
    step = (low * room) >> 32
    own_cell = tl.full([size], 0, tl.int64)
    free = tl.full([size], -1, tl.int64)
    searches = there
    while tl.max(searches.to(tl.int32), axis=0) > 0:
        # A value that has found its cell reads the last cell instead, which is never free.
        cell = tl.where(searches, begin + step, dummy)
        seen = tl.atomic_cas(cells + cell, free, place)
        is_claimed = searches & (seen == -1)
        is_taken = searches & (seen != -1)
        same = tl.load(values + seen, mask=is_taken, other=0) == key
        same = same & (tl.load(tables + seen, mask=is_taken, other=0) == table)
        is_done = is_claimed | (is_taken & same)
        own_cell = tl.where(is_done, cell, own_cell)
        searches = searches & (is_done == 0)
        step = tl.where(step + 1 == room, 0, step + 1)
    tl.atomic_min(first + own_cell, place, mask=there)
    tl.store(cell_of + place, own_cell, mask=there)


@triton.jit
def _flag_first(first, cell_of, flags, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    there = at < n
    cell = tl.load(cell_of + at, mask=there, other=0)
    is_first = tl.load(first + cell, mask=there, other=-1) == at
    tl.store(flags + at, is_first.to(tl.int32), mask=there)


@triton.jit
def _pick(values, numbers, flags, out, n, size: tl.constexpr):
    """Set out[numbers[i]] = values[i] where flags[i] is set."""
    at = tl.program_id(0) * size + tl.arange(0, size)
    there = at < n
    flag = tl.load(flags + at, mask=there, other=0)
    number = tl.load(numbers + at, mask=there, other=0)
    value = tl.load(values + at, mask=there, other=0)
    tl.store(out + number, value, mask=there & (flag != 0))


@triton.jit
def _invert_hash(first, cell_of, numbers, tables, ends, inverse, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    there = at < n
    cell = tl.load(cell_of + at, mask=there, other=0)
    place = tl.load(first + cell, mask=there, other=0)
    number = tl.load(numbers + place, mask=there, other=0)
    table = tl.load(tables + at, mask=there, other=0)
    tl.store(inverse + at, number - tl.load(ends + table, mask=there, other=0), mask=there)


@triton.jit
def _digits(source, order, counts, shift, n, blocks, size: tl.constexpr, radix: tl.constexpr):
    block = tl.program_id(0)
    at = block * size + tl.arange(0, size)
    place = tl.load(order + at, mask=at < n, other=0)
    value = tl.load(source + place, mask=at < n, other=0)
    digit = tl.where(at < n, (value >> shift) & (radix - 1), radix)
    digits = tl.arange(0, radix)
    of_digit = (digit[:, None] == digits[None, :]).to(tl.int32)
    tl.store(counts + digits * blocks + block, tl.sum(of_digit, axis=0))


@triton.jit
def _scatter(source, order, begins, out, shift, n, blocks, size: tl.constexpr, radix: tl.constexpr):
    block = tl.program_id(0)
    at = block * size + tl.arange(0, size)
    place = tl.load(order + at, mask=at < n, other=0)
    value = tl.load(source + place, mask=at < n, other=0)
    digit = tl.where(at < n, (value >> shift) & (radix - 1), radix)
    of_digit = (digit[:, None] == tl.arange(0, radix)[None, :]).to(tl.int32)
    before = tl.sum(of_digit * (tl.cumsum(of_digit, axis=0) - of_digit), axis=1)
    begin = tl.load(begins + digit * blocks + block, mask=at < n, other=0)
    tl.store(out + begin + before, place, mask=at < n)


@triton.jit
def _flag_heads(values, tables, order, flags, sorted_values, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    there = at < n
    place = tl.load(order + at, mask=there, other=0)
    before = tl.load(order + at - 1, mask=there & (at > 0), other=0)
    key = tl.load(values + place, mask=there, other=0)
    differs = key != tl.load(values + before, mask=there, other=0)
    table = tl.load(tables + place, mask=there, other=0)
    differs = differs | (table != tl.load(tables + before, mask=there, other=0))
    tl.store(flags + at, (differs | (at == 0)).to(tl.int32), mask=there)
    tl.store(sorted_values + at, key, mask=there)


@triton.jit
def _invert_radix(order, numbers, flags, tables, ends, inverse, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    there = at < n
    place = tl.load(order + at, mask=there, other=0)
    number = tl.load(numbers + at, mask=there, other=0)
    number = number + tl.load(flags + at, mask=there, other=0) - 1
    table = tl.load(tables + place, mask=there, other=0)
    tl.store(inverse + place, number - tl.load(ends + table, mask=there, other=0), mask=there)


def find_distinct(values: Any, offsets: Any, variant: str) -> Tensors:
    """Return (keys, offsets, inverse) as petps.train.kernels.jagged_unique does, of any values."""
    torch = torch_module()
    n, device = len(values), values.device
    grid = grid_of(n)
    tables = _number_tables(offsets, n)
    flags = torch.empty(n, dtype=torch.int32, device=device)
    flag = _flag_by_hash if variant == "hash" else _flag_by_radix
    flagged_values, invert = flag(values, tables, len(offsets) - 1, flags)
    numbers = number_flags(flags)
    ends = numbers[offsets]
    keys = torch.empty(int(numbers[n]), dtype=torch.int64, device=device)
    _pick[grid](flagged_values, numbers, flags, keys, n, size=BLOCK)
    inverse = torch.empty_like(values)
    invert(numbers, ends, inverse)
    return keys, ends, inverse


def _flag_by_hash(values: Any, tables: Any, table_count: int, flags: Any) -> Flagged:
    """Flag the first place of each key of a table."""
    del table_count
    torch = torch_module()
    n, device = len(values), values.device
    grid = grid_of(n)
    partitions = min(PARTITIONS_MAX, triton.next_power_of_2(triton.cdiv(n, PARTITION_KEYS)))
    parts = torch.empty(n, dtype=torch.int64, device=device)
    counts = torch.zeros(partitions, dtype=torch.int64, device=device)
    _deal[grid](values, tables, parts, counts, n, partitions=partitions, size=BLOCK)
    begins = torch.cumsum(counts, 0) - counts
    order = torch.empty_like(parts)
    _gather_partition[grid](parts, begins.clone(), order, n, size=BLOCK)
    cells = torch.full((2 * n + 1,), -1, dtype=torch.int64, device=device)
    cells[2 * n :] = 0
    first = torch.full_like(cells, n)
    cell_of = torch.empty_like(parts)
    _claim[grid](
        values, tables, parts, order, begins, counts, cells, first, cell_of, n, 2 * n, size=BLOCK
    )
    _flag_first[grid](first, cell_of, flags, n, size=BLOCK)

    def invert(numbers: Any, ends: Any, inverse: Any) -> None:
        _invert_hash[grid](first, cell_of, numbers, tables, ends, inverse, n, size=BLOCK)

    return values, invert


def _flag_by_radix(values: Any, tables: Any, table_count: int, flags: Any) -> Flagged:
    """Sort the values of each table as unsigned numbers; flag the first of each run."""
    torch = torch_module()
    n = len(values)
    grid = grid_of(n)
    order = torch.arange(n, dtype=torch.int64, device=values.device)
    key_bits = 64 if bool((values < 0).any()) else int(values.max()).bit_length()
    # The sort keeps the range of each table's values.
    for source, bits in ((values, key_bits), (tables, (table_count - 1).bit_length())):
        for shift in range(0, bits, DIGIT_BITS):
            order = _sort_by_digit(source, order, shift)
    sorted_values = torch.empty_like(values)
    _flag_heads[grid](values, tables, order, flags, sorted_values, n, size=BLOCK)

    def invert(numbers: Any, ends: Any, inverse: Any) -> None:
        _invert_radix[grid](order, numbers, flags, tables, ends, inverse, n, size=BLOCK)

    return sorted_values, invert


def _sort_by_digit(source: Any, order: Any, shift: int) -> Any:
    """Return order int64[n], stably sorted by one digit of source[order]."""
    torch = torch_module()
    n, radix = len(order), 1 << DIGIT_BITS
    grid = (triton.cdiv(n, SORT_BLOCK),)
    counts = torch.empty(radix * grid[0], dtype=torch.int64, device=order.device)
    _digits[grid](source, order, counts, shift, n, grid[0], size=SORT_BLOCK, radix=radix)
    begins = torch.cumsum(counts, 0) - counts
    out = torch.empty_like(order)
    _scatter[grid](source, order, begins, out, shift, n, grid[0], size=SORT_BLOCK, radix=radix)
    return out


def _number_tables(offsets: Any, n: int) -> Any:
    """Return int64[n]: the number of each value's table."""
    torch = torch_module()
    numbers = torch.arange(len(offsets) - 1, dtype=torch.int64, device=offsets.device)
    return torch.repeat_interleave(numbers, offsets[1:] - offsets[:-1], output_size=n)
