"""What a version has beside rows, and how a training continues from a version.

Owns:        Parts (loader, random numbers, admission counts, dense weights), Restored,
             find_newest(), load_rows(), find_owed().
Never does:  write a version; talk to other ranks.
Called by:   ranks.py.
Invariants:  rows, counts and owed keys go to the rank that owns them now.
Threads:     the pipeline's caller.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

from petps.checkpoint import Store
from petps.checkpoint.published import Published
from petps.checkpoint.state import Version
from petps.errors import FailedPrecondition
from petps.publish import Position
from petps.train.dense import encode_dense, get_random_state, load_dense, set_random_state
from petps.train.lone import Tables
from petps.train.output import has_exact_rows, read_pieces
from petps.train.stamps import Stamps
from petps.train.table import Keys

__all__ = ["DENSE", "Parts", "Restored", "find_newest", "find_owed", "load_rows"]

# Parts of a version besides those of TrainerOutput. The names of a rank's own parts end in it.
DENSE: Final = "petps.dense"
READER: Final = "petps.reader"
RANDOM: Final = "petps.random"
ADMISSION: Final = "petps.admission"


@dataclass(frozen=True, slots=True)
class Restored:
    """The state from which a training continues.

    step: the last one trained. reader: the state of this rank's loader after it. position: in the
    log, or None if nothing was published or the log failed. is_exact: whether the rows have the
    bits that they had at that step; a quantised version rounds them.
    """

    step: int
    reader: bytes
    position: Position | None
    is_exact: bool = True


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a rank: copied at a step, or loaded."""

    rank: int
    model: Any
    optimizer: Any

    def copy(self, tables: Tables, reader: bytes) -> dict[str, bytes]:
        """Return the parts of this rank as they are now, except the dense part."""
        parts = {f"{READER}.{self.rank}": reader}
        if "torch" in sys.modules:  # a trainer that uses PyTorch has imported it
            parts[f"{RANDOM}.{self.rank}"] = get_random_state(self.model)
        for name, body in tables.save_counts().items():
            parts[f"{ADMISSION}.{name}.{self.rank}"] = body
        return parts

    @staticmethod
    def encode(dense: dict[str, Any]) -> dict[str, bytes]:
        """Return the dense part; dense: of copy_dense()."""
        return {DENSE: encode_dense(dense)}

    def load(self, store: Store, newest: Version) -> Restored:
        """Load the dense part and this rank's parts, except counts, which load_rows() loads."""
        if self.model is not None:
            load_dense(store.part(newest.version, DENSE), self.model, self.optimizer)
        own = {name: f"{name}.{self.rank}" for name in (READER, RANDOM)}
        if own[RANDOM] in newest.parts:
            set_random_state(store.part(newest.version, own[RANDOM]), self.model)
        reader = b""
        if own[READER] in newest.parts:
            reader = store.part(newest.version, own[READER])
        position = _find_position(store, newest)
        return Restored(newest.version, reader, position, has_exact_rows(store, newest.version))


def find_newest(store: Store, version: int | None) -> Version | None:
    """Return the store's newest version, or None. Raise FailedPrecondition if it is another one."""
    versions = store.refresh().versions()
    newest = versions[-1] if versions else None
    if version is not None and (newest is None or newest.version != version):
        state = (
            "no version: nothing to restore"
            if newest is None
            else f"versions up to {newest.version}: roll back first"
        )
        raise FailedPrecondition(f"{store.name} has {state}")
    return newest


def load_rows(store: Store, newest: Version, tables: Tables, stamps: Stamps) -> None:
    """Load the rows, their stamps and the admission counts that this rank owns now."""
    store.refresh()
    stamps.begin_load(store, newest.version)
    for table in tables:
        pieces = read_pieces(store, newest.version, table.name, tables.owns)
        table.load_pieces(stamps.load(table.name, pieces))
        counts = [
            store.part(newest.version, name)
            for name in newest.parts
            if name.rpartition(".")[0] == f"{ADMISSION}.{table.name}"  # names may have dots too
        ]
        tables.load_counts(table.name, counts)


def find_owed(store: Store, newest: Version, tables: Tables) -> dict[str, Keys]:
    """Return the ids of this rank that the publishers owed when the version was written."""
    published = Published.of(store, newest.version)
    owed = {} if published is None else published.owed
    return {
        table.name: table.ids_of(keys[tables.owns(keys)])
        for table in tables
        if (keys := owed.get(table.name)) is not None
    }


def _find_position(store: Store, newest: Version) -> Position | None:
    """Return the position that the ranks of a version together had in the log."""
    rank_count = sum(name.startswith(f"{READER}.") for name in newest.parts)
    if len(Published.positions(newest)) != rank_count:
        return None  # the log failed on some rank, so servers need a base
    published = Published.of(store, newest.version)
    return None if published is None else published.position
