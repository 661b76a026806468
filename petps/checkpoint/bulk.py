"""A base that several processes write at the same time, from spills. FORMAT.md, "Spills".

Owns:        NewBase, PartPlan, plan_parts(), write_part().
Never does:  read sources; know Ray.
Called by:   petps.cli.bulk, and its workers.
Invariants:  one state makes the base exist, once all its parts are whole. A failed or repeated part
             leaves only files that no state names; commit() and discard() remove them. The chunks
             do not depend on how rows were divided into spills and parts.
Threads:     write_part() may run anywhere; the others belong to one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from petps.checkpoint.bundle import NewChunk, divide, write_bundle
from petps.checkpoint.chunk import Table
from petps.checkpoint.files import Files, LocalFiles, open_files
from petps.checkpoint.old_base import MANIFEST
from petps.checkpoint.published import BASE_PART, BaseInfo
from petps.checkpoint.spills import Spill, merge_spills, record_bytes
from petps.checkpoint.state import OPEN, Chunk, Lineage, Part, Version
from petps.checkpoint.state_files import new_name
from petps.checkpoint.store import BASE, Store
from petps.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    IoError,
    NotFound,
    PetpsError,
    Unavailable,
)

__all__ = ["NewBase", "PartPlan", "plan_parts", "write_part"]

VERSION: Final = 1  # of a store whose base holds no version of a log
# Rows of a part: what a worker that dies has to write again. A partition is never divided.
PART_BYTES: Final = 128 << 20
FOLDERS: Final = ("data", "parts")


@dataclass(frozen=True, slots=True)
class PartPlan:
    """A part: neighbouring partitions of a table. It can be pickled for another machine.

    files: The files of the store, pickled as their address and options.
    prefix: How the names of the load's files begin.
    rows: In the spills; a key counts once in each spill that has it.
    """

    files: Files
    prefix: str
    table: Table
    start: int
    stop: int
    spills: tuple[Spill, ...]
    rows: int

    def __str__(self) -> str:
        last = "" if self.stop - self.start == 1 else f" to {self.stop - 1}"
        return f"partition {self.start}{last} of table {self.table.name}"


def plan_parts(
    files: Files, prefix: str, table: Table, spills: Sequence[Spill], partitions: int
) -> list[PartPlan]:
    """Divide the partitions of a table into parts of at least PART_BYTES, in their order.

    spills: Each has all partitions. A later spill has the later rows.
    """
    rows = np.zeros(partitions, np.int64)
    for spill in spills:
        rows += np.diff(spill.bounds)
    plans: list[PartPlan] = []
    start = 0
    for stop in range(1, partitions + 1):
        count = int(rows[start:stop].sum())
        if count * record_bytes(table) >= PART_BYTES or stop == partitions:
            own = tuple(spill.of(start, stop) for spill in spills)
            plans.append(PartPlan(files, prefix, table, start, stop, own, count))
            start = stop
    return plans


def write_part(plan: PartPlan) -> list[Chunk]:
    """Write the bundle of a part durably, and return its chunks. Raise DataLoss, IoError."""

    def new_chunks() -> Iterator[NewChunk]:
        for partition in range(plan.start, plan.stop):
            pieces = merge_spills(plan.files, plan.table, plan.spills, partition)
            for rows in divide(plan.table, pieces):
                yield plan.table.name, rows, VERSION, OPEN, 0

    tables = {plan.table.name: plan.table}
    return write_bundle(plan.files, tables, new_chunks(), prefix=plan.prefix)


class NewBase:
    """A base that does not exist before commit(). All its files begin with ``prefix``."""

    def __init__(
        self, url: str | Path | Files, model: str, tables: Sequence[Table], partitions: int
    ) -> None:
        """Check that the folder is new. Raise AlreadyExists, InvalidArgument, IoError."""
        self.files = open_files(url) if isinstance(url, str | Path) else url
        self.model = model
        self.partitions = partitions
        self.prefix = f"{new_name()}-"
        self.left = 0  # spills that commit() could not remove
        self._start = time.monotonic()
        self._info = BaseInfo(instance=model, version=0, partitions=partitions)
        self._store = Store.create(self.files, model, tables, commit_empty=False)
        if isinstance(self.files, LocalFiles) and (Path(self.files.name) / MANIFEST).exists():
            raise AlreadyExists(f"{self.files.name} holds a base already: name a new folder")

    def check_is_shared(self, spill: Spill) -> None:
        """Raise FailedPrecondition if this process does not see what a worker has written."""
        try:
            self.files.size(spill.file)
        except NotFound:
            raise FailedPrecondition(
                f"a worker wrote {spill.file} into {self.files.name}, and this machine does not "
                "see it: name an object store, or a folder that all machines share"
            ) from None

    def commit(self, chunks_by_table: Mapping[str, Sequence[Sequence[Chunk]]]) -> Version:
        """Make the base exist, and remove the spills. Return the entry of its version.

        chunks_by_table: The chunks of each part, in the order of partitions.

        Raise DataLoss if a bundle is gone or cut; raise FailedPrecondition if another process has
        written a base here meanwhile; raise IoError, Unavailable (no answer: the base may exist).
        """
        chunks = tuple(chain.from_iterable(chain.from_iterable(chunks_by_table.values())))
        self._check_bundles(chunks)
        body = self._info.to_json()
        part = Part(f"parts/{self.prefix}{new_name()}", len(body), xxhash.xxh3_64_hexdigest(body))
        self.files.write(part.file, [body])
        entry = Version(
            VERSION,
            BASE,
            time.time_ns(),
            time.monotonic() - self._start,
            sum(chunk.rows for chunk in chunks),
            sum(chunk.length + chunk.bloom_length for chunk in chunks),
            parts={BASE_PART: part},
        )
        history = ((VERSION, BASE, entry.bytes, entry.seconds),)
        lineage = Lineage("", VERSION, (entry,), chunks, self._store.state.tables, history)
        try:
            self._store.add(lineage, self._store.state, is_first=True)
        except IoError as error:
            if not self._store.may_have_committed:
                raise
            raise Unavailable(
                f"{error}; the base may exist nevertheless: look with `petps checkpoint list`, and "
                "if there is none, remove the folder and load again"
            ) from error
        self.left = self._remove_all_but({part.file, *(chunk.file for chunk in chunks)})
        return entry

    def discard(self) -> None:
        """Remove all files of this load that no state names, unless the base may exist.

        A file that cannot be removed stays until purge.
        """
        if self._store.may_have_committed:
            return
        try:
            named_paths = set(self._store.refresh().files())
        except NotFound:
            named_paths = set()
        except PetpsError:
            return
        self._remove_all_but(named_paths)

    def _check_bundles(self, chunks: Sequence[Chunk]) -> None:
        ends: dict[str, int] = {}
        for chunk in chunks:
            end = chunk.bloom_offset + chunk.bloom_length
            ends[chunk.file] = max(end, ends.get(chunk.file, 0))
        for path, end in ends.items():
            try:
                is_whole = self.files.size(path) >= end
            except NotFound:
                is_whole = False
            if not is_whole:
                raise DataLoss(f"{self.files.name}/{path} is gone or cut: load again")

    def _remove_all_but(self, paths: set[str]) -> int:
        """Remove spills, and what workers that died or repeated a part have left.

        Return how many files could not be removed; at least one if a folder cannot be listed.
        """
        left = 0
        for folder in FOLDERS:
            try:
                names = list(self.files.list(folder))
            except PetpsError:
                left += 1
                continue
            for name in names:
                path = f"{folder}/{name}"
                if name.startswith(self.prefix) and path not in paths:
                    try:
                        self.files.remove(path)
                    except PetpsError:
                        left += 1
        return left
