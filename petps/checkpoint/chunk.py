"""Rows of one table in a store, and their encoding as the bytes of a chunk. STORE.md.

Owns:        Column, Table, Rows, lay_over(), encode(), view(), decode(), Bloom, hash_keys().
Never does:  read or write files; know versions.
Called by:   the other files of the room; trainers and the CLI for Column, Table and Rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.codec import BITS, METHODS, Quantisation, default_quantisation
from petps.delta.arrow import KEY, ROW, decode_columns, encode_columns, locate_columns, view_columns
from petps.delta.errors import DeltaError
from petps.delta.schema import DTYPES, MAX_DIM, check_name
from petps.errors import DataLoss, InvalidArgument

__all__ = [
    "ROW",
    "STAMP",
    "Bloom",
    "Column",
    "Floats",
    "Hashes",
    "Keys",
    "Rows",
    "Stamps",
    "Table",
    "are_consecutive",
    "decode",
    "encode",
    "find_layout",
    "hash_keys",
    "lay_over",
    "view",
]

Keys = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Stamps = npt.NDArray[np.uint32]
Hashes = tuple[Keys, Keys]  # two hashes of each key

# By dtype: the parameters of a quantised column that is given without parameters.
QUANTISED: Final = {
    f"{method}{bits}": replace(default_quantisation(bits), method=method)
    for method in METHODS
    for bits in BITS
}
# Numbers that are no values of a row: kept as they are, never converted or quantised.
RAW: Final = {"u32": 4}  # bytes by dtype
STAMP: Final = "stamp"  # the column of a base's rows that expire: the low 32 bits of their versions
BLOOM_BITS_PER_KEY: Final = 10
BLOOM_PROBES: Final = 7
BLOOM_KEYS: Final = 1 << 14  # keys that are hashed at a time


@dataclass(frozen=True, slots=True)
class Column:
    """A column with ``dim`` values a key, stored as ``dtype``.

    dtype: one of petps.delta.schema.DTYPES, method and bits of petps.codec ("adaptive4"), or "u32",
    of which only the bytes are given.
    quantisation: the parameters with which rows are quantised; decoding needs no parameters.
    """

    name: str
    dtype: str
    dim: int
    quantisation: Quantisation | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_name("column", self.name)
        if self.dtype not in (*DTYPES, *QUANTISED, *RAW):
            dtypes = ", ".join((*DTYPES, *QUANTISED, *RAW))
            raise InvalidArgument(
                f"column {self.name}: unknown dtype {self.dtype!r}; known: {dtypes}"
            )
        quantisation = self.quantisation
        if quantisation is not None and f"{quantisation.method}{quantisation.bits}" != self.dtype:
            raise InvalidArgument(f"column {self.name}: {quantisation} does not make {self.dtype}")
        if not 1 <= self.dim <= MAX_DIM:
            raise InvalidArgument(
                f"column {self.name}: dim must be from 1 to {MAX_DIM}, got {self.dim}"
            )

    @property
    def width(self) -> int:
        """Return the number of bytes for each key."""
        if self.dtype in QUANTISED:
            return QUANTISED[self.dtype].row_bytes(self.dim)
        if self.dtype in RAW:
            return RAW[self.dtype] * self.dim
        return _native.row_bytes(self.dtype, self.dim)

    def stored(self, values: Floats | Bytes) -> Bytes:
        """Return uint8[n, width]: encode float32[n, dim], or pass stored uint8[n, width] on."""
        expected = self.width if values.dtype == np.uint8 else self.dim
        if values.ndim != 2 or values.shape[1] != expected:
            raise InvalidArgument(
                f"column {self.name}: values of shape {values.shape}, expected (n, {expected})"
            )
        if values.dtype == np.uint8:
            return np.ascontiguousarray(values)
        if self.dtype in RAW:
            raise InvalidArgument(
                f"column {self.name}: {self.dtype} is given as uint8[n, {self.width}], not as "
                f"{values.dtype}"
            )
        floats = np.ascontiguousarray(values, np.float32)
        if not np.isfinite(floats).all():
            row = int(np.flatnonzero(~np.isfinite(floats).all(axis=1))[0])
            raise InvalidArgument(f"column {self.name}: row {row} has a value that is not finite")
        if self.dtype in QUANTISED:
            return (self.quantisation or QUANTISED[self.dtype]).quantise(floats)
        if self.dtype == "f32":
            return floats.view(np.uint8).reshape(len(floats), self.width)
        return _native.encode_rows(self.dtype, floats)

    def values(self, stored: Bytes) -> Floats:
        """Decode uint8[n, width] to float32[n, dim]."""
        if self.dtype in RAW:
            raise InvalidArgument(f"column {self.name}: {self.dtype} has no float values")
        if self.dtype in QUANTISED:
            return QUANTISED[self.dtype].dequantise(np.ascontiguousarray(stored), self.dim)
        return _native.decode_rows(self.dtype, self.dim, np.ascontiguousarray(stored))


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a store: the column ``row``, and columns of optimizer state beside it."""

    name: str
    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        check_name("table", self.name)
        names = [column.name for column in self.columns]
        if not names or names[0] != ROW or len(set(names)) != len(names):
            raise InvalidArgument(
                f"table {self.name}: the columns {names} must begin with {ROW!r}, each once"
            )
        if KEY in names:
            raise InvalidArgument(
                f"table {self.name}: no column may be named {KEY!r}, as a chunk's keys are"
            )

    @classmethod
    def of(cls, name: str, dim: int, dtype: str = "f32") -> Table:
        """Return a table with the column ``row`` only."""
        return cls(name, (Column(ROW, dtype, dim),))

    @property
    def width(self) -> int:
        """Return the number of bytes for each key, without the key itself."""
        return sum(column.width for column in self.columns)


@dataclass(frozen=True, slots=True)
class Rows:
    """Stored rows of one table: keys uint64[n], ascending, each once; ``columns`` uint8[n, width].

    deleted: bool[n], True for keys that were deleted; None: no key was.
    """

    keys: Keys
    columns: Mapping[str, Bytes]
    deleted: Mask | None = None

    @classmethod
    def of(
        cls,
        table: Table,
        keys: npt.ArrayLike,
        columns: Mapping[str, Floats | Bytes],
        deleted: Mask | None = None,
    ) -> Rows:
        """Encode and sort rows. Raise InvalidArgument for a repeated key or a wrong shape."""
        key_array = np.asarray(keys)
        if key_array.dtype != np.uint64:
            if key_array.dtype.kind not in "iu" or (key_array.size and key_array.min() < 0):
                raise InvalidArgument(f"table {table.name}: keys must be whole and not negative")
            key_array = key_array.astype(np.uint64)
        if set(columns) != {column.name for column in table.columns}:
            raise InvalidArgument(
                f"table {table.name} has columns {[column.name for column in table.columns]}, "
                f"given are {sorted(columns)}"
            )
        # The values of a deleted row do not matter and may not even be finite.
        if deleted is not None and deleted.any():
            columns = {name: _blank_deleted(values, deleted) for name, values in columns.items()}
        stored = {column.name: column.stored(columns[column.name]) for column in table.columns}
        for name, values in stored.items():
            if key_array.ndim != 1 or len(values) != len(key_array):
                raise InvalidArgument(
                    f"table {table.name}: {len(values)} rows of {name} for keys of shape "
                    f"{key_array.shape}"
                )
        if deleted is not None and deleted.shape != key_array.shape:
            raise InvalidArgument(f"table {table.name}: deleted has shape {deleted.shape}")
        rows = cls(key_array, stored, deleted if deleted is not None and deleted.any() else None)
        if len(key_array) > 1 and not (key_array[1:] > key_array[:-1]).all():
            rows = rows.at(np.argsort(key_array, kind="stable"))
            if not (rows.keys[1:] > rows.keys[:-1]).all():
                raise InvalidArgument(f"table {table.name}: a key appears twice")
        return rows

    def at(self, chosen: npt.NDArray[np.intp] | Mask) -> Rows:
        """Return the rows that ``chosen`` selects: positions, or bool[n]."""
        deleted = None if self.deleted is None else self.deleted[chosen]
        return Rows(
            self.keys[chosen],
            {name: values[chosen] for name, values in self.columns.items()},
            deleted if deleted is not None and deleted.any() else None,
        )

    def between(self, start: int, stop: int | None) -> Rows:
        """Return the rows with ``start`` <= key < ``stop`` (None: no upper bound)."""
        first = int(np.searchsorted(self.keys, np.uint64(start)))
        last = len(self) if stop is None else int(np.searchsorted(self.keys, np.uint64(stop)))
        part = slice(first, last)
        return Rows(
            self.keys[part],
            {name: values[part] for name, values in self.columns.items()},
            None if self.deleted is None else self.deleted[part],
        )

    def equals(self, other: Rows) -> bool:
        """Return whether keys, columns and deletions are equal."""
        none = np.zeros(len(self), np.bool_)
        mine, theirs = (none if rows.deleted is None else rows.deleted for rows in (self, other))
        return (
            np.array_equal(self.keys, other.keys)
            and np.array_equal(mine, theirs)
            and self.columns.keys() == other.columns.keys()
            and all(
                np.array_equal(self.columns[name], other.columns[name]) for name in self.columns
            )
        )

    def __len__(self) -> int:
        return len(self.keys)


def _blank_deleted(values: Floats | Bytes, deleted: Mask) -> Floats | Bytes:
    if values.ndim != 2 or deleted.shape != values.shape[:1]:
        return values  # Rows.of reports the wrong shape
    blank_values: Floats | Bytes = np.where(deleted[:, None], values.dtype.type(0), values)
    return blank_values


def lay_over(table: Table, layers: list[Rows], *, keep_deleted: bool) -> Rows:
    """Return the newest row of each key, ascending by key.

    layers: The rows of several chunks, oldest first.
    keep_deleted: Keep deletions in the result, because an older chunk that is not among the layers
    may have a row of the key; otherwise leave deleted keys out.
    """
    if len(layers) == 1 and (keep_deleted or layers[0].deleted is None):
        return layers[0]
    keys = np.concatenate([rows.keys for rows in layers] or [np.empty(0, np.uint64)])
    # A stable sort keeps the order of the layers, so the newest of equal keys is last.
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_newest = np.ones(len(keys), np.bool_)
    is_newest[:-1] = ordered[1:] != ordered[:-1]
    chosen = order[is_newest]
    newest_keys = ordered[is_newest]
    deleted: Mask | None = None
    if any(rows.deleted is not None for rows in layers):
        deletions = np.concatenate(
            [
                np.zeros(len(rows), np.bool_) if rows.deleted is None else rows.deleted
                for rows in layers
            ]
        )
        deleted = deletions[chosen]
        if not keep_deleted:
            chosen, newest_keys, deleted = chosen[~deleted], newest_keys[~deleted], None
    columns: dict[str, Bytes] = {}
    # Copy layer by layer to the final places, so that all rows are in memory only once more.
    starts = np.cumsum([0, *(len(rows) for rows in layers)])
    layer_of = np.searchsorted(starts, chosen, side="right") - 1
    by_layer = np.argsort(layer_of, kind="stable")
    bounds = np.searchsorted(layer_of[by_layer], np.arange(len(layers) + 1))
    for column in table.columns:
        out = np.empty((len(chosen), column.width), np.uint8)
        for number, rows in enumerate(layers):
            places = by_layer[bounds[number] : bounds[number + 1]]
            if len(places):
                out[places] = rows.columns[column.name][chosen[places] - starts[number]]
        columns[column.name] = out
    return Rows(newest_keys, columns, deleted if deleted is not None and deleted.any() else None)


def encode(table: Table, rows: Rows, into: memoryview | None = None) -> memoryview:
    """Return the bytes of a chunk: the body of a ``rows`` message, with all columns of the table.

    Leave the keys out if they ascend by one. into: write the bytes there.
    """
    columns = {column.name: rows.columns[column.name] for column in table.columns}
    keyed = not are_consecutive(rows.keys)
    return encode_columns(rows.keys, columns, rows.deleted, keyed=keyed, into=into)


def are_consecutive(keys: Keys) -> bool:
    """Return whether ascending, distinct ``keys`` have no gap, so that first and count suffice."""
    return len(keys) > 0 and int(keys[-1]) - int(keys[0]) == len(keys) - 1


def find_layout(table: Table, body: memoryview) -> tuple[int, ...]:
    """Return the offsets of the columns in the bytes that encode() returned."""
    return locate_columns(body, [column.name for column in table.columns])


def view(
    table: Table, body: memoryview, rows: int, layout: tuple[int, ...], first_key: int
) -> Rows:
    """Return a chunk's rows as views of ``body``.

    The caller has verified the checksum of ``body``, so ``layout`` describes it.
    """
    widths = {column.name: column.width for column in table.columns}
    return Rows(*view_columns(body, rows, widths, layout, first_key))


def decode(
    table: Table, body: bytes | memoryview, where: str, first_key: int | None = None
) -> Rows:
    """Parse a chunk with Arrow, which checks all of it. Raise DataLoss that names ``where``.

    first_key: the first key, if the chunk leaves its keys out.
    """
    widths = {column.name: column.width for column in table.columns}
    try:
        return Rows(*decode_columns(body, widths, first_key))
    except DeltaError as error:
        raise DataLoss(f"{where}: {error}") from error


class Bloom:
    """A bloom filter over the keys of a chunk: uint64[words], a power of two of bits."""

    def __init__(self, words: npt.NDArray[np.uint64]) -> None:
        self._bits = np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_)

    @staticmethod
    def make(keys: Keys) -> bytes:
        """Return the bytes of a filter over ``keys``."""
        count = 64
        while count < BLOOM_BITS_PER_KEY * len(keys):
            count *= 2
        bits = np.zeros(count, np.bool_)
        # Hash the keys in blocks, so that the hashes take little memory.
        for start in range(0, len(keys), BLOOM_KEYS):
            for places in _find_bits(hash_keys(keys[start : start + BLOOM_KEYS]), count):
                bits[places] = True
        return np.packbits(bits, bitorder="little").tobytes()

    @classmethod
    def read(cls, body: memoryview) -> Bloom:
        """Read a filter from the bytes that make() returned."""
        return cls(np.frombuffer(body, np.uint64))

    def hits(self, hashes: Hashes) -> int:
        """Return how many of the keys hashed by hash_keys() the filter may hold."""
        is_hit = np.ones(len(hashes[0]), np.bool_)
        for places in _find_bits(hashes, len(self._bits)):
            is_hit &= self._bits[places]
        return int(np.count_nonzero(is_hit))


def hash_keys(keys: Keys) -> Hashes:
    """Return two hashes of each key for filters of any size: the halves of one 64-bit hash."""
    hashes = keys * np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(0xD6E8FEB86659FD93)
    hashes ^= hashes >> np.uint64(32)
    return hashes & np.uint64(0xFFFFFFFF), (hashes >> np.uint64(32)) | np.uint64(1)


def _find_bits(hashes: Hashes, count: int) -> list[npt.NDArray[np.uint64]]:
    first, second = hashes
    mask = np.uint64(count - 1)
    return [(first + np.uint64(i) * second) & mask for i in range(BLOOM_PROBES)]
