"""The results of a demo: plain values, as --json prints them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from examples.demo.traffic import Latency

__all__ = ["Comparison", "Freshness", "Group", "Report", "Restart"]


@dataclass(frozen=True, slots=True)
class Group:
    """Some consecutive deltas: one line of the table. Rates are shares of 0 to 1."""

    accesses: int
    version: int
    rows: int
    deleted: int
    freshness_p50_ms: float
    asked: int
    hits: int
    popularity_hits: int

    @property
    def hit_rate(self) -> float:
        """The hit rate of the prediction by served rows."""
        return self.hits / self.asked if self.asked else 0.0

    @property
    def popularity_rate(self) -> float:
        """The hit rate of the baseline."""
        return self.popularity_hits / self.asked if self.asked else 0.0


@dataclass(frozen=True, slots=True)
class Freshness:
    """The time from the call that publishes a delta to the end of the first pull that shows it."""

    versions: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Restart:
    """The kill -9 in the middle of a delta, and the restart. Times are in milliseconds."""

    delta_rows: int
    share_visible: float
    version_before: int
    exec_to_first_correct_pull_ms: float
    open_to_first_correct_pull_ms: float
    open_ms: float
    client_waited_ms: float
    client_failures: int
    caught_up_ms: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A pull of every key of the trace, compared with the trainer's state. ``wrong`` must be 0."""

    keys: int = 0
    rows_equal: int = 0
    missing_as_they_should: int = 0
    rows_different: int = 0
    rows_lost: int = 0
    rows_undead: int = 0

    def __add__(self, other: Comparison) -> Comparison:
        counts, more = asdict(self), asdict(other)
        return Comparison(**{name: counts[name] + more[name] for name in counts})

    @property
    def wrong(self) -> int:
        """The number of keys whose pulled row differs from the trainer's state."""
        return self.keys - self.rows_equal - self.missing_as_they_should

    @property
    def complaint(self) -> str:
        """The number of wrong keys, by kind."""
        return (
            f"{self.wrong:,} keys are wrong: {self.rows_different:,} rows differ, "
            f"{self.rows_lost:,} are lost, {self.rows_undead:,} should be missing and are not"
        )


@dataclass(slots=True)
class Report:
    """All results. The demo fills them in as it runs."""

    trace: str
    accesses: int
    base_accesses: int
    dim: int
    k: int
    medium: str = ""
    durability: str = ""
    log: str = ""
    processors: int = 0
    base_rows: int = 0
    rows: int = 0
    deltas: int = 0
    rows_published: int = 0
    rows_deleted: int = 0
    pulls: int = 0
    pulls_per_second: float = 0.0
    pull_idle: Latency | None = None
    pull_during_apply: Latency | None = None
    freshness: Freshness | None = None
    restart: Restart | None = None
    groups: list[Group] = field(default_factory=list)
    comparison: Comparison | None = None
    seconds: float = 0.0

    @property
    def predictions(self) -> int:
        """The number of accesses predicted."""
        return sum(group.asked for group in self.groups)

    @property
    def hit_rate(self) -> float:
        """The hit rate of the prediction by served rows, over all groups."""
        return sum(group.hits for group in self.groups) / max(1, self.predictions)

    @property
    def popularity_rate(self) -> float:
        """The hit rate of the baseline, over all groups."""
        return sum(group.popularity_hits for group in self.groups) / max(1, self.predictions)

    @property
    def passed(self) -> bool:
        """Whether every row equals the trainer's bit by bit, and every other key is missing."""
        return self.comparison is not None and self.comparison.wrong == 0

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {
            "asked": self.predictions,
            "hit_rate": self.hit_rate,
            "popularity_rate": self.popularity_rate,
            "passed": self.passed,
        }
