"""Choose the quantisation of a lineage: bits by restores, parameters by sampled rows. STORE.md.

Owns:        Quantising (the request), choose_tables() (the resulting tables), prepare_columns().
Never does:  quantise rows (petps.codec does); count restores (the store's state does).
Called by:   checkpointer.py, staging.py, state_files.py, cli.
Invariants:  the same rows, ``Quantising`` and number of restores give the same tables. Optimizer
             state has at least 8 bits, and Adam's second moment is kept whole, unless the request
             says otherwise. A column stays as it is if it would not get smaller or is quantised
             already (int8, adaptive4, ...).
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
    "choose_tables",
    "describe",
    "has_too_few_bits",
    "prepare_columns",
    "sample_keys",
]

# Dtypes that may be quantised. Columns of all other dtypes are quantised already.
WHOLE: Final = ("f32", "f16", "bf16")

# Adam's second moment, as petps and PyTorch name it. A small one that became 0 would make the next
# step of its row as large as 1 / eps.
SECOND_MOMENTS: Final = ("variance", "exp_avg_sq")

# Takes a table and a seed. Returns the keys that parameters are chosen by (sample_keys()), and
# the columns of their rows.
Sample = Callable[[str, int], tuple[Keys, Mapping[str, Floats | Bytes]]]


@dataclass(frozen=True, slots=True)
class Quantising:
    """The number of restores that a store's lineages are quantised for.

    expected_restores: how often the training will resume from a checkpoint. 2 bits are enough for
    up to 1 restore, 3 for up to 3, and 4 for up to 20; more restores need 8 bits. Once the training
    has resumed more often than expected, new lineages have 8 bits.
    seed: selects the sampled rows. state_bits: bits of optimizer state; None: 8, or the bits of the
    rows if they are more, and Adam's second moment is kept whole.
    """

    expected_restores: float
    seed: int = 0
    state_bits: int | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.expected_restores):
            raise InvalidArgument(
                f"expected restores must be a number from 0 on, got {self.expected_restores}; to "
                "store rows as they are, do not quantise the store"
            )
        if self.seed < 0:
            raise InvalidArgument(f"seed {self.seed} is negative")
        bits_for_state(self.bits(0), self.state_bits)

    @classmethod
    def for_training(cls, hours: float, hours_between_failures: float) -> Quantising:
        """Return the quantisation for a training that takes ``hours`` (Check-N-Run 6.2.1).

        It resumes after each failure, which comes every ``hours_between_failures`` on average.
        """
        for name, value in (("hours", hours), ("hours_between_failures", hours_between_failures)):
            if not value > 0 or not math.isfinite(value):
                raise InvalidArgument(f"{name} must be a number above 0, got {value}")
        return cls(hours / hours_between_failures)

    def bits(self, restores: int) -> int:
        """Return the bits of rows, after the training has resumed ``restores`` times."""
        return bits_for_restores(self.expected_restores, restores)


def choose_tables(
    tables: Mapping[str, Table], quantising: Quantising | None, restores: int, sample: Sample
) -> dict[str, Table]:
    """Return the tables as a new lineage stores them; ``tables`` are the trainer's own.

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
            if column.name in SECOND_MOMENTS and quantising.state_bits is None:
                columns.append(column)
                continue
            column_values = values.get(column.name) if len(keys) else None
            column_bits = bits if column.name == ROW else state_bits
            columns.append(
                _choose_column(table, column, column_bits, quantising.seed, keys, column_values)
            )
        out[name] = Table(name, tuple(columns))
    return out


def _choose_column(
    table: Table, column: Column, bits: int, seed: int, keys: Keys, values: Floats | Bytes | None
) -> Column:
    quantisation = default_quantisation(bits)
    if column.dtype not in WHOLE or quantisation.row_bytes(column.dim) >= column.width:
        return column
    if values is not None:
        if values.dtype == np.uint8:
            values = column.values(column.stored(values))
        floats = np.ascontiguousarray(values, np.float32)
        finite = np.isfinite(floats).all(axis=1)
        if not finite.all():
            key = int(keys[np.flatnonzero(~finite)[0]])
            raise InvalidArgument(
                f"table {table.name}: column {column.name} of key {key} has a value that is not "
                "finite"
            )
        quantisation = choose_parameters(floats, bits)
    quantisation = replace(quantisation, seed=seed)
    return Column(column.name, f"{quantisation.method}{bits}", column.dim, quantisation)


def has_too_few_bits(
    stored: Mapping[str, Table], tables: Mapping[str, Table], quantising: Quantising, restores: int
) -> bool:
    """Return whether a lineage, quantised from the trainer's ``tables``, now needs more bits."""
    return any(
        stored_column.name == ROW
        and stored_column.dtype != column.dtype
        and stored_column.quantisation is not None
        and stored_column.quantisation.bits < quantising.bits(restores)
        for name, table in tables.items()
        for column, stored_column in zip(table.columns, stored[name].columns, strict=True)
    )


def prepare_columns(
    own: Table, stored: Table, columns: Mapping[str, Floats | Bytes]
) -> dict[str, Floats | Bytes]:
    """Return a trainer's columns in the form that ``Rows.of(stored, ...)`` takes.

    Decode a column uint8[n, width] of the trainer's ``own`` dtype to float32[n, dim] where
    ``stored`` has another dtype.
    """
    out = dict(columns)
    for column, stored_column in zip(own.columns, stored.columns, strict=True):
        values = out.get(column.name)
        if values is not None and values.dtype == np.uint8 and column.dtype != stored_column.dtype:
            out[column.name] = column.values(column.stored(values))
    return out


def describe(tables: Mapping[str, Table]) -> list[str]:
    """Return a description of each quantised column."""
    out = []
    for table in tables.values():
        for column in table.columns:
            quantisation = column.quantisation
            if quantisation is not None:
                search = f", bins {quantisation.bins}, ratio {quantisation.ratio:g}"
                out.append(
                    f"{table.name}.{column.name}: {column.dtype}"
                    + (search if quantisation.method == "adaptive" else "")
                    + f", seed {quantisation.seed}"
                )
    return out


def sample_keys(pieces: Callable[[], Iterable[Keys]], seed: int) -> Keys:
    """Return the keys of the sample for choose_parameters().

    pieces: Returns all keys, ascending in pieces; it is called twice.
    """
    positions = sample_rows(sum(len(piece) for piece in pieces()), seed)
    out, start = [], 0
    for piece in pieces():
        first, end = np.searchsorted(positions, [start, start + len(piece)])
        out.append(piece[positions[first:end] - start])
        start += len(piece)
    return np.concatenate(out or [np.empty(0, np.uint64)])
