"""Quantisation of a line: bits by restores, parameters by sampled rows (Check-N-Run 5.2).

Owns:        Quantising (the request), stored_tables() (the resulting tables), unquantised().
Never does:  quantise rows (petps.codec does); count restores (the store's state does).
Called by:   checkpointer.py, staging.py, state.py, cli.
Invariants:  the same rows, ``Quantising`` and number of restores give the same tables. Optimizer
             state has at least 8 bits unless the request says fewer. A column stays as it is if it
             would not get smaller or is quantised already (int8, adaptive4, ...).
Threads:     any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from petps.checkpoint.chunk import ROW, Bytes, Column, Floats, Keys, Table
from petps.codec import (
    bits_for_restores,
    bits_for_state,
    choose_parameters,
    default_quantisation,
    sample_rows,
)
from petps.errors import InvalidArgument

__all__ = [
    "Quantising",
    "Sample",
    "describe",
    "has_too_few_bits",
    "sampled_keys",
    "stored_tables",
    "unquantised",
]

# Dtypes that may be quantised; columns of the other dtypes are quantised already.
WHOLE: Final = ("f32", "f16", "bf16")

# Takes a table and a seed. Returns the keys that parameters are chosen by (sampled_keys()), and
# the columns of their rows.
Sample = Callable[[str, int], tuple[Keys, Mapping[str, Floats | Bytes]]]


@dataclass(frozen=True, slots=True)
class Quantising:
    """The number of restores that a store's lines are quantised for.

    expected_restores: how often the training will resume from a checkpoint: up to 1, 3 and 20 allow
    2, 3 and 4 bits, more needs 8. Once it has resumed more often than that, new lines have 8 bits.
    seed: selects the sampled rows. state_bits: bits of optimizer state; None: 8, or the bits of the
    rows if they are more.
    """

    expected_restores: float
    seed: int = 0
    state_bits: int | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.expected_restores):
            raise InvalidArgument(
                f"expected restores {self.expected_restores}: a number, 0 or more; for rows as "
                "they are quantise nothing"
            )
        if self.seed < 0:
            raise InvalidArgument(f"seed {self.seed} is negative")
        bits_for_state(self.bits(0), self.state_bits)

    def bits(self, restores: int) -> int:
        """Return the bits of rows, after the training has resumed ``restores`` times."""
        return bits_for_restores(self.expected_restores, restores)


def stored_tables(
    tables: Mapping[str, Table], quantising: Quantising | None, restores: int, sample: Sample
) -> dict[str, Table]:
    """Return the tables as a new line stores them; ``tables`` are the trainer's own.

    Raise InvalidArgument with table, column and key if a sampled row is not finite.
    """
    if quantising is None:
        return dict(tables)
    bits = quantising.bits(restores)
    state_bits = bits_for_state(bits, quantising.state_bits)
    out = {}
    for name, table in tables.items():
        keys, values = sample(name, quantising.seed)
        columns = []
        for column in table.columns:
            given = values.get(column.name) if len(keys) else None
            wanted = bits if column.name == ROW else state_bits
            columns.append(_stored(table, column, wanted, quantising.seed, keys, given))
        out[name] = Table(name, tuple(columns))
    return out


def _stored(
    table: Table, column: Column, bits: int, seed: int, keys: Keys, given: Floats | Bytes | None
) -> Column:
    chosen = default_quantisation(bits)
    if column.dtype not in WHOLE or chosen.row_bytes(column.dim) >= column.width:
        return column
    if given is not None:
        if given.dtype == np.uint8:
            given = column.values(column.stored(given))
        floats = np.ascontiguousarray(given, np.float32)
        finite = np.isfinite(floats).all(axis=1)
        if not finite.all():
            key = int(keys[np.flatnonzero(~finite)[0]])
            raise InvalidArgument(
                f"table {table.name}: column {column.name} of key {key} has a value that is not "
                "finite"
            )
        chosen = choose_parameters(floats, bits)
    chosen = replace(chosen, seed=seed)
    return Column(column.name, f"{chosen.method}{bits}", column.dim, chosen)


def has_too_few_bits(
    stored: Mapping[str, Table], tables: Mapping[str, Table], quantising: Quantising, restores: int
) -> bool:
    """Return whether a line, quantised from the trainer's ``tables``, now needs more bits."""
    return any(
        kept.name == ROW
        and kept.dtype != own.dtype
        and kept.quantisation is not None
        and kept.quantisation.bits < quantising.bits(restores)
        for name, table in tables.items()
        for own, kept in zip(table.columns, stored[name].columns, strict=True)
    )


def unquantised(
    own: Table, stored: Table, columns: Mapping[str, Floats | Bytes]
) -> dict[str, Floats | Bytes]:
    """Return a trainer's columns in the form that ``Rows.of(stored, ...)`` takes.

    Decode a column uint8[n, width] of the trainer's ``own`` dtype to float32[n, dim] where
    ``stored`` has another dtype.
    """
    out = dict(columns)
    for column, kept in zip(own.columns, stored.columns, strict=True):
        given = out.get(column.name)
        if given is not None and given.dtype == np.uint8 and column.dtype != kept.dtype:
            out[column.name] = column.values(column.stored(given))
    return out


def describe(tables: Mapping[str, Table]) -> list[str]:
    """Return a description of each quantised column."""
    out = []
    for table in tables.values():
        for column in table.columns:
            chosen = column.quantisation
            if chosen is not None:
                search = f", bins {chosen.bins}, ratio {chosen.ratio:g}"
                out.append(
                    f"{table.name}.{column.name}: {column.dtype}"
                    + (search if chosen.method == "adaptive" else "")
                    + f", seed {chosen.seed}"
                )
    return out


def sampled_keys(pieces: Callable[[], Iterable[Keys]], seed: int) -> Keys:
    """Return the keys that choose_parameters() sees; the pieces ascend and are read twice."""
    chosen = sample_rows(sum(len(piece) for piece in pieces()), seed)
    out, start = [], 0
    for piece in pieces():
        first, end = np.searchsorted(chosen, [start, start + len(piece)])
        out.append(piece[chosen[first:end] - start])
        start += len(piece)
    return np.concatenate(out or [np.empty(0, np.uint64)])
