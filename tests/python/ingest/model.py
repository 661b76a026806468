"""Slow, obvious tables: dicts of bytes, as a model to compare ingest's results with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from petps.delta import Message, TableSchema
from petps.errors import IoError, PetpsError
from petps.server.ingest import InstanceTable, Progress
from petps.server.ingest.protocols import Clock, Commit, Stamps

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

ALWAYS = 1 << 30
"""Value of a table's ``fail_next``: applies fail until a test sets it to 0."""


@dataclass
class Report:
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    absent: int = 0
    refused: int = 0


class MemoryTable:
    def __init__(self, schema: TableSchema, capacity: int = 1 << 30) -> None:
        self._schema = schema
        self.capacity = capacity
        self.rows: dict[int, bytes] = {}
        self.stamps: dict[int, int] = {}
        self.clocks: dict[int, Clock] = {}
        self.applies = 0
        self.fail_next = 0
        self.failure: type[PetpsError] = IoError

    @property
    def schema(self) -> TableSchema:
        return self._schema

    def has_room(self) -> bool:
        return len(self.rows) < self.capacity

    def holds(self, keys: Keys) -> Mask:
        return np.array([key in self.rows for key in keys.tolist()], np.bool_)

    def apply(
        self, keys: Keys, rows: Rows | None, deleted: Mask | None, stamp: int | Stamps
    ) -> Report:
        if self.fail_next:
            if self.fail_next < ALWAYS:  # otherwise another thread resets it
                self.fail_next -= 1
            raise self.failure("no space left on device: free some space")
        assert keys.dtype == np.uint64
        assert keys.flags.c_contiguous
        assert keys.flags.aligned
        stamps = np.broadcast_to(stamp, keys.shape)
        assert stamps.max(initial=0) < 1 << 32
        if rows is None:
            assert deleted is not None
            assert deleted.all()
        else:
            assert rows.dtype == np.uint8
            assert rows.flags.c_contiguous
            assert rows.shape == (len(keys), self._schema.row_bytes)
        self.applies += 1
        report = Report()
        for at, key in enumerate(keys.tolist()):
            if deleted is not None and deleted[at]:
                if self.rows.pop(key, None) is None:
                    report.absent += 1
                else:
                    report.deleted += 1
            elif key not in self.rows and len(self.rows) >= self.capacity:
                report.refused += 1
            else:
                assert rows is not None
                if key in self.rows:
                    report.updated += 1
                else:
                    report.inserted += 1
                self.rows[key] = rows[at].tobytes()
                self.stamps[key] = int(stamps[at])
        return report

    def adopt_clock(self, partition: int, clock: Clock) -> None:
        self.clocks[partition] = clock

    def all_keys(self) -> Iterator[Keys]:
        keys = np.array(sorted(self.rows), dtype=np.uint64)
        yield from np.array_split(keys, 3)


class MemoryTables:
    def __init__(
        self,
        schemas: list[TableSchema],
        partitions: int,
        model: str = "m",
        name: str = "m@1",
    ) -> None:
        self._model = model
        self.name = name
        self.frozen = False
        self._partitions = partitions
        self.by_name = {schema.name: MemoryTable(schema) for schema in schemas}
        self.recorded: dict[int, Progress] = {}
        self.history: list[Progress] = []
        self.commits: list[Commit] = []

    @property
    def model(self) -> str:
        return self._model

    @property
    def partitions(self) -> int:
        return self._partitions

    def is_live(self) -> bool:
        return not self.frozen

    def tables(self) -> dict[str, InstanceTable]:
        return dict(self.by_name)

    def pushed_tables(self) -> set[str]:
        return set()

    def progress(self, partition: int) -> Progress | None:
        return self.recorded.get(partition)

    def record_progress(self, progress: Sequence[Progress], commits: Sequence[Commit] = ()) -> None:
        assert len({entry.partition for entry in progress}) == len(progress)
        self.recorded.update({entry.partition: entry for entry in progress})
        self.history += progress
        self.commits += commits

    def rows(self) -> dict[str, dict[int, bytes]]:
        return {name: table.rows for name, table in self.by_name.items()}


@dataclass
class Letters:
    letters: list[tuple[int, int, str]] = field(default_factory=list)

    def add(self, partition: int, offset: int, reason: str, message: Message | None) -> None:
        del message
        self.letters.append((partition, offset, reason))
