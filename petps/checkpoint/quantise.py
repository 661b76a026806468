"""How a line's rows are quantised: bits by restores, parameters by sampled rows (Check-N-Run 5.2).

Owns:        Quantising (what is wanted), stored_tables() (what comes of it), unquantised().
Never does:  quantise rows (petps.codec does), count restores (the store's state does).
Called by:   checkpointer.py, staging.py, state.py, cli.
Invariants:  the same rows, ``Quantising`` and number of restores give the same tables. Optimizer
             state has at least 8 bits unless asked for less. What would not get smaller, and what
             is quantised already (int8, adaptive4, ...), stays as it is.
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
    "has_too_few_bits",
    "sampled_keys",
    "stored_tables",
    "told",
    "unquantised",
]

# Dtypes that are made smaller; the others are quantised already.
WHOLE: Final = ("f32", "f16", "bf16")

# Of a table and a seed the keys that parameters are chosen by (sampled_keys()), and their columns.
Sample = Callable[[str, int], tuple[Keys, Mapping[str, Floats | Bytes]]]


@dataclass(frozen=True, slots=True)
class Quantising:
    """What a store's lines are quantised for.

    expected_restores: how often the training will resume from a checkpoint: up to 1, 3 and 20 allow
    2, 3 and 4 bits, more needs 8. Once it has resumed more often than that, lines have 8 bits.
    seed: which rows are sampled. state_bits: of optimizer state; None: 8, or what the rows have
    where that is more.
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
        """Of rows, once the training has resumed so often."""
        return bits_for_restores(self.expected_restores, restores)


def stored_tables(
    tables: Mapping[str, Table], quantising: Quantising | None, restores: int, sample: Sample
) -> dict[str, Table]:
    """The tables as a new line stores them; ``tables`` are the trainer's own.

    Raises InvalidArgument that names table, column and key of a sampled row that is not finite.
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
    """Whether a line's rows, quantised from the trainer's ``tables``, now need more bits."""
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
    """A trainer's columns as ``Rows.of(stored, ...)`` takes them.

    What is uint8[n, width] of the trainer's ``own`` dtype becomes float32[n, dim] where ``stored``
    has another.
    """
    out = dict(columns)
    for column, kept in zip(own.columns, stored.columns, strict=True):
        given = out.get(column.name)
        if given is not None and given.dtype == np.uint8 and column.dtype != kept.dtype:
            out[column.name] = column.values(column.stored(given))
    return out


def told(tables: Mapping[str, Table]) -> list[str]:
    """How columns are quantised, in words, one for each that is."""
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
    """Of ascending keys, given in pieces and read twice, those that choose_parameters() sees."""
    chosen = sample_rows(sum(len(piece) for piece in pieces()), seed)
    out, start = [], 0
    for piece in pieces():
        first, end = np.searchsorted(chosen, [start, start + len(piece)])
        out.append(piece[chosen[first:end] - start])
        start += len(piece)
    return np.concatenate(out or [np.empty(0, np.uint64)])
