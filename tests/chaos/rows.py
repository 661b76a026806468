"""The rows of the chaos suite, which show whose they are, and what each version changed.

A row of a delta-fed table holds its key, the version that wrote it, the generation of its instance,
and columns that follow from these three. So a row of another key, a row of another instance, and a
row of two writes show themselves. What a version changes follows from the seed, so that every
process knows it without being told.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from petps.delta import TableSchema

MODEL: Final = "default"
TABLE: Final = "items"
DIM: Final = 32
KEYS: Final = 2000
PARTITIONS: Final = 16
CHANGED: Final = 250  # keys that a version writes; the first writes all
SCHEMA: Final = TableSchema(TABLE, "f32", DIM)
ALL: Final = np.arange(KEYS, dtype=np.uint64)
PUSH_MODEL: Final = "pushed"
PUSH_TABLE: Final = "pushed"

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
_PRIME: Final = 1_000_003  # below 2**24, so that float32 holds every value exactly


def rows_of(keys: Keys, versions: Numbers, generation: int) -> Rows:
    """Return rows float32[n, DIM] of keys that these versions wrote."""
    columns = np.arange(DIM, dtype=np.int64)
    rows = (
        keys.astype(np.int64)[:, None] * 7919
        + versions[:, None] * 104_729
        + columns * 31
        + generation * 15_485
    ) % _PRIME
    rows[:, 0] = keys
    rows[:, 1] = versions
    rows[:, 2] = generation
    return rows.astype(np.float32)


def read_rows(keys: Keys, rows: Rows) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
    """Return (versions, generations, whether each row is whole and of its key)."""
    versions = rows[:, 1].astype(np.int64)
    generations = rows[:, 2].astype(np.int64)
    is_whole = np.empty(len(keys), np.bool_)
    for generation in np.unique(generations):
        own = generations == generation
        expected = rows_of(keys[own], versions[own], int(generation))
        is_whole[own] = (expected == rows[own]).all(axis=1)
    return versions, generations, is_whole


@lru_cache(maxsize=4096)
def keys_of(seed: int, version: int) -> Keys:
    """Return the keys that a version writes: all in the first one."""
    if version == 1:
        return ALL
    chosen = np.random.default_rng([seed, version]).choice(KEYS, CHANGED, replace=False)
    return np.sort(chosen).astype(np.uint64)


def instance_of(generation: int) -> str:
    """Return the name of the instance of a generation."""
    return f"{MODEL}@{generation}"


def push_row(key: int, value: int) -> Rows:
    """Return the row float32[1, DIM] of a pushed value, below 2**24."""
    return rows_of(np.array([key], np.uint64), np.array([value], np.int64), 0)
