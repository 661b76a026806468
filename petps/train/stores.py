"""The checkpoint store of a training: created by rank 0, quantised by default.

Owns:        open_store(), store_tables(), QUANTISING.
Never does:  write a version; choose the bits of a lineage (petps.checkpoint does).
Called by:   trainers, demo, bench.
Invariants:  one rank creates the store; all ranks open the same one, or all of them raise.
Threads:     the pipeline's caller.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import numpy as np

from petps.checkpoint import Column, Quantising, Store, Table
from petps.errors import AlreadyExists
from petps.train.agree import fail_together
from petps.train.link import Links
from petps.train.lone import Tables
from petps.train.stamps import STAMP_COLUMN, can_keep_stamps

__all__ = ["QUANTISING", "open_store", "store_tables"]

# The default for a training whose failures are not known: ten days, and a failure every 12 hours.
# That is 20 restores: 4 bits, and 8 after the 20th resume.
# bench/README.md, "What quantised checkpoints cost", has the loss that this costs.
QUANTISING: Final = Quantising.for_training(hours=240, hours_between_failures=12)


def store_tables(tables: Tables, *, stamps: bool = False) -> list[Table]:
    """Return the tables for Store.create(): the row, the optimizer's columns, those of removals.

    stamps: Whether each row also keeps the version of the log that published it last, in the tables
    that can (stamps.py).
    """
    has_stamps = {table.name for table in tables if can_keep_stamps(tables.tracker, table)}
    return [
        Table(
            table.name,
            tuple(
                Column(name, "u32", values.shape[1] // 4)
                if values.dtype == np.uint8
                else Column(name, "f32", values.shape[1])
                for name, values in table.gather(np.empty(0, np.uint64)).columns.items()
            )
            + ((STAMP_COLUMN,) if stamps and table.name in has_stamps else ()),
        )
        for table in tables
    ]


def open_store(
    url: str | Path,
    model: str,
    tables: Tables,
    links: Links,
    *,
    quantising: Quantising | None = QUANTISING,
    stamps: bool = False,
) -> Store:
    """Return this rank's handle of the store at ``url``. Rank 0 creates it if there is none.

    All ranks call this. A store that exists keeps the columns and the quantisation that it was
    created with (Store.expect() changes the latter).

    Args:
        quantising: How often the training is expected to resume, which decides the bits of rows:
            Quantising.for_training(hours, hours_between_failures) computes it. None: store rows as
            they are, so that a training resumes with the very bits of a version.
        stamps: Keep with each row, in 4 bytes, the version of the log that published it last. Give
            True if the rows are published and expire on servers: a server that catches up to a
            version without stamps keeps its rows longer than one that follows the log. It cannot
            be added later.

    Raises:
        InvalidArgument, IoError: As Store.create(); on the other ranks Unavailable, which names the
            rank that failed.
    """
    with fail_together(links.dense, "the store was not created"):
        if links.dense.rank == 0:
            with contextlib.suppress(AlreadyExists):
                Store.create(url, model, store_tables(tables, stamps=stamps), quantising)
    with fail_together(links.dense, "the store was not opened"):
        return Store.open(url)
