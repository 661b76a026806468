"""What a load by a Ray cluster reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Report", "TableReport"]


@dataclass(frozen=True, slots=True)
class TableReport:
    """The counts of one table. ``keys``: distinct ones, of which the base has one row each."""

    table: str
    files: int
    rows: int
    keys: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a load."""

    store: str
    model: str
    version: int
    partitions: int
    tables: tuple[TableReport, ...]
    read_seconds: float
    write_seconds: float
    left: int
    """Files with spills that could not be removed."""

    @property
    def rows(self) -> int:
        """Return the number of rows that were read."""
        return sum(table.rows for table in self.tables)

    @property
    def seconds(self) -> float:
        """Return the seconds of reading and writing."""
        return self.read_seconds + self.write_seconds

    @property
    def rows_per_second(self) -> float:
        """Return the rows a second, from the first read to the commit."""
        return self.rows / max(self.seconds, 1e-9)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            **asdict(self),
            "tables": [asdict(table) for table in self.tables],
            "rows": self.rows,
            "seconds": round(self.seconds, 3),
            "read_seconds": round(self.read_seconds, 3),
            "write_seconds": round(self.write_seconds, 3),
            "rows_per_second": round(self.rows_per_second, 1),
        }
