"""The store in order: the process that merges and purges, what it did, and a check of what it kept.

Owns:        TendingProcess (`petps checkpoint tend`), read_tended() (what it did, and when),
             History (the store's versions and merges over time), check_kept().
Never does:  change the store; import torch.
Called by:   course.py; plots.py draws the history.
Invariants:  a version counts as purged only if the store listed it, or its lineage recorded it,
             and no longer lists it.
Threads:     the main thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from examples.demo.processes import Child
from examples.demo.state import bits
from examples.demo.training.snapshots import Trained
from examples.demo.training.task import POLICY
from petps.checkpoint import Column, Store
from petps.checkpoint.store import BASE
from petps.errors import NotFound, PetpsError
from petps.train.timeline import Span

__all__ = [
    "MERGE",
    "PURGE",
    "TENDING",
    "WORK",
    "History",
    "Kept",
    "Merge",
    "StoredVersion",
    "TendingProcess",
    "check_kept",
    "read_tended",
]

KEEP: Final = "all=10s"  # a few versions: the demo writes one every second or few
ROUND_SECONDS: Final = 0.5
OBSERVE_SECONDS: Final = 0.2
OUTPUT: Final = "tend.txt"
TENDING: Final = "tend"
# What the process reports, by the names of the time line.
MERGE: Final = "merge"
PURGE: Final = "purge"
WORK: Final = {"arrange": MERGE, "base": "base", "verify": "verify", "purge": PURGE}


class TendingProcess(Child):
    """`petps checkpoint tend`: it merges and purges the store while the trainer writes it."""

    def __init__(self, folder: Path, store: Path) -> None:
        super().__init__("process that tends the store", folder / OUTPUT)
        self._store = store

    def start(self) -> None:
        """Start the process without waiting. The store must exist."""
        options = {"--policy": POLICY, "--keep": KEEP, "--every": ROUND_SECONDS}
        arguments = [str(part) for option in options.items() for part in option]
        command = ["-m", "petps.cli", "checkpoint", "tend", str(self._store), *arguments, "--json"]
        self.spawn(command, pipes=False)


def read_tended(folder: Path) -> list[Span]:
    """Return the spans of what the process did, on the clock of time.monotonic()."""
    offset = time.time() - time.monotonic()
    spans = []
    for line in (folder / OUTPUT).read_text().splitlines(keepends=True):
        if not line.startswith("{") or not line.endswith("\n"):
            continue  # a note, for example that it tries again, or half of a line
        for work, span in json.loads(line)["spans"].items():
            begin = span["begin"] - offset
            stage = WORK[work]
            spans.append(Span(TENDING, stage, 0, begin, begin + span["seconds"]))
    return spans


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version of the store, listed from ``begin`` to ``end`` (time.monotonic()).

    end: None while it is listed. row_bytes: of a row and its optimizer state, as stored.
    """

    version: int
    kind: str
    rows: int
    bytes: int
    row_dtype: str
    begin: float
    end: float | None = None


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge into a chunk of ``layer`` that holds deltas up to version ``last``."""

    last: int
    layer: int
    at: float


@dataclass(slots=True)
class History:
    """The versions and merges of the store over time, as observe() saw them."""

    path: Path
    versions: dict[tuple[int, int], StoredVersion] = field(default_factory=dict)
    """By number and time of creation, because a number is used again after a rollback."""
    merges: dict[tuple[int, int], Merge] = field(default_factory=dict)
    bases: set[int] = field(default_factory=set)
    _written: set[int] = field(default_factory=set)
    _store: Store | None = None
    _next: float = 0.0

    def observe(self, *, at_once: bool = False) -> bool:
        """Read the store's state; return whether it was read. at_once: even if read just now."""
        now = time.monotonic()
        if now < self._next and not at_once:
            return False
        self._next = now + OBSERVE_SECONDS
        try:
            self._store = self._store or Store.open(self.path)
        except NotFound:  # no trainer has created it yet
            return False
        state = self._store.refresh()
        listed = {(entry.version, entry.created_ns) for entry in state.versions()}
        for key, version in self.versions.items():
            if key not in listed and version.end is None:
                self.versions[key] = replace(version, end=now)
        wall = time.time_ns()
        for lineage in state.lineages:
            self.bases.add(lineage.base_version)
            self._written |= {record[0] for record in lineage.history}
            dtype = next(iter(lineage.tables.values())).columns[0].dtype
            for entry in lineage.versions:
                key = (entry.version, entry.created_ns)
                begin = now - (wall - entry.created_ns) / 1e9
                self.versions.setdefault(
                    key,
                    StoredVersion(entry.version, entry.kind, entry.rows, entry.bytes, dtype, begin),
                )
            for chunk in lineage.chunks:
                if chunk.layer > 1:
                    merge = Merge(chunk.first, chunk.layer, now)
                    self.merges.setdefault((chunk.first, chunk.layer), merge)
        return True

    @property
    def listed(self) -> set[int]:
        """Return the versions that the store listed when it was read last."""
        return {entry.version for entry in self.versions.values() if entry.end is None}

    @property
    def purged(self) -> set[int]:
        """Return the versions that the store no longer lists."""
        known = self._written | {entry.version for entry in self.versions.values()}
        return known - self.listed

    @property
    def resets(self) -> int:
        """Return the number of bases after the first."""
        return max(0, len(self.bases) - 1)

    @property
    def first_base(self) -> StoredVersion | None:
        """Return the first base that was seen."""
        bases = [entry for entry in self.versions.values() if entry.kind == BASE]
        return min(bases, key=lambda entry: entry.begin, default=None)


@dataclass(slots=True)
class Kept:
    """The check of the versions that the store still has.

    rows: compared with the trainer's rows of that step, in ``compared`` of the ``versions``.
    """

    versions: int = 0
    compared: int = 0
    rows: int = 0
    problems: list[str] = field(default_factory=list)


def check_kept(store: Store, read_trained: Callable[[int], Mapping[str, Trained] | None]) -> Kept:
    """Restore every version, and compare its rows with the trainer's, bit by bit.

    A stored value must be the trainer's, as the store's column rounds it. A row that the trainer
    restored and has not changed since is not rounded twice: the trainer has the stored value.

    Args:
        read_trained: Returns the trainer's rows of a version by table; None if it has no snapshot.
    """
    kept = Kept(problems=store.verify())
    for entry in store.state.versions():
        kept.versions += 1
        trained = read_trained(entry.version)
        kept.compared += trained is not None
        for table in store.state.tables:
            try:
                restored = _restore(store, table, entry.version)
            except PetpsError as error:
                kept.problems.append(f"version {entry.version} does not restore: {error}")
                continue
            if trained is None:
                continue
            kept.rows += len(restored.keys)
            wrong = _count_wrong(
                store.tables_of(entry.version)[table].columns, restored, trained[table]
            )
            if wrong:
                kept.problems.append(
                    f"version {entry.version}: {wrong:,} rows of table {table} are not "
                    "the trainer's"
                )
    return kept


def _restore(store: Store, table: str, version: int) -> Trained:
    """Return the rows of a version as a restore decodes them."""
    columns = store.tables_of(version)[table].columns
    keys = [np.empty(0, np.uint64)]
    values = {column.name: [np.empty((0, column.dim), np.float32)] for column in columns}
    for piece in store.pieces(table, version):
        keys.append(piece.keys)
        for column in columns:
            values[column.name].append(column.values(piece.columns[column.name]))
    return Trained(
        np.concatenate(keys), {name: np.concatenate(parts) for name, parts in values.items()}
    )


def _count_wrong(columns: tuple[Column, ...], restored: Trained, trained: Trained) -> int:
    """Return how many keys of either side are missing on the other, or have a wrong row."""
    both, here, there = np.intersect1d(
        restored.keys, trained.keys, assume_unique=True, return_indices=True
    )
    is_right: npt.NDArray[np.bool_] = np.ones(len(both), np.bool_)
    for column in columns:
        values, exact = restored.columns[column.name][here], trained.columns[column.name][there]
        rounded = column.values(column.stored(exact))
        is_right &= _are_equal(values, rounded) | _are_equal(values, exact)
    unmatched = len(restored.keys) + len(trained.keys) - 2 * len(both)
    return unmatched + int(np.count_nonzero(~is_right))


def _are_equal(
    left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]
) -> npt.NDArray[np.bool_]:
    equal: npt.NDArray[np.bool_] = (bits(left) == bits(right)).all(axis=1)
    return equal
