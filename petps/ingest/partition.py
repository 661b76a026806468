"""One partition as ingest sees it: where it stands, how it stands, what it has counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from petps.delta import RecordHeader
from petps.ingest.order import Applied
from petps.ingest.status import Mode, PartitionHealth, PartitionStatus, Samples, freshness_of
from petps.ingest.store import Progress, Standing

__all__ = ["BaseMarker", "PartitionState", "Refusal"]

COUNTERS: Final = (
    "records",
    "rows",
    "duplicates",
    "gaps",
    "zombies",
    "conflicts",
    "dead_letters",
    "catch_ups",
    "refusals",
    "samples",
)


# Why a partition stands still after a restart, by its standing.
_RECORDED_REASONS: Final = {
    Standing.CATCHING_UP: "the catch-up to version {0.target} was broken off",
    Standing.INCOMPLETE: "rows that the commit of version {0.target} counts never came: the "
    "publisher lost some; only a base mends it",
    Standing.CONFLICT: "two publishers wrote run {0.run}: stop one of them and begin a new run "
    "with a base",
    Standing.LOST_POWER: "the machine lost power while the pool had durability 'process': rows may "
    "be older than what was applied; waiting for a base (in the store, or published anew)",
}


@dataclass(frozen=True, slots=True)
class BaseMarker:
    """A base record that the stream holds: it may be caught up to, and read on from behind it."""

    header: RecordHeader
    location: str
    next_offset: int
    instance: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Rows of a partition that could not be stored. ``until``: {run, seq} of the last of them.

    ``table``: whose rows; ``rows``: how many.
    """

    reason: str
    table: str
    rows: int
    until: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class PartitionState:
    """Belongs to ingest's thread; status reads it without a lock, field by field.

    run, seq, version, offset: after everything taken so far, applied or still in the window.
    ``recorded`` is what the pool knows. ``offset`` is where reading would go on after a restart.
    """

    partition: int
    recorded: Progress
    run: int = 0
    seq: int = 0
    version: int = 0
    offset: int = 0
    publisher: int = 0  # see order.mark_of
    mode: Mode = Mode.FOLLOWING
    reason: str = ""
    search: str = ""  # stopped: why no base is found
    standing: Standing = Standing.FOLLOWING
    target: int = 0  # see Standing
    # Stopped: where to read again once the missing seq is there.
    resume_offset: int = 0
    marker: BaseMarker | None = None
    # Stopped: bases that could not be caught up to since all were tried.
    tried: set[str] = field(default_factory=set)
    # Set by the applier, cleared by the reader while nothing is being applied: until then no row
    # and no progress of this partition is written.
    refused: Refusal | None = None
    # Rows that are still to be stored; None once progress has passed them.
    full: Refusal | None = None
    retry_at: float = 0.0  # when the reader tries them again, by time.monotonic()
    retry_wait: float = 0.0
    # Rows by table since the last commit; None while it is not known where that version began.
    counts: dict[str, int] | None = None
    records: int = 0
    rows: int = 0
    duplicates: int = 0
    gaps: int = 0
    zombies: int = 0
    conflicts: int = 0
    dead_letters: int = 0
    catch_ups: int = 0
    refusals: int = 0
    samples: Samples = field(default_factory=Samples)

    @staticmethod
    def of(partition: int, recorded: Progress | None, start: int) -> PartitionState:
        """From what the pool remembers, or else from the log's first message, at ``start``."""
        progress = recorded or Progress(partition, offset=start)
        state = PartitionState(
            partition,
            progress,
            run=progress.run,
            seq=progress.seq,
            version=progress.version,
            offset=progress.offset,
            publisher=progress.publisher,
            standing=progress.standing,
            target=progress.target,
            resume_offset=progress.offset,
        )
        if progress.standing.needs_base:
            conflict = progress.standing is Standing.CONFLICT
            state.mode = Mode.CONFLICT if conflict else Mode.STALE
            state.reason = _RECORDED_REASONS[progress.standing].format(progress)
        return state

    @property
    def following(self) -> bool:
        """Records are applied as they come."""
        return self.mode is Mode.FOLLOWING

    @property
    def passing(self) -> int:
        """The run that feeds another instance, passed over here; 0: none."""
        return self.target if self.standing is Standing.PASSING else 0

    @property
    def applied(self) -> Applied:
        """For the order rule."""
        return Applied(self.run, self.seq, self.publisher)

    def progress(self) -> Progress:
        """What to record once everything taken is applied."""
        return Progress(
            self.partition,
            self.run,
            self.seq,
            self.offset,
            self.version,
            self.standing,
            self.target,
            self.publisher,
        )

    def mended_by(self, run: int, seq: int) -> bool:
        """Whether a base that holds everything up to {run, seq} ends a stop."""
        if self.standing is Standing.CONFLICT:
            return run > self.run  # within the run it is not known whose rows a base holds
        if self.standing is Standing.LOST_POWER:  # any is better than rows of unknown age
            return run >= self.target and (run, seq) > (0, 0)
        applied = (self.recorded.run, self.recorded.seq)
        return (run, seq) > applied or ((run, seq) == applied and self.standing.needs_base)

    def stop(self, mode: Mode, reason: str, *, offset: int, resume_offset: int) -> None:
        """Nothing more is applied until the reason is gone. A restart reads on at ``offset``."""
        self.mode = mode
        self.reason = reason
        self.refused = None
        self.offset = offset
        self.resume_offset = resume_offset
        self.counts = None

    def go_back(self) -> None:
        """Forgets what was taken and not recorded: reading goes on behind what is recorded."""
        recorded = self.recorded
        self.run, self.seq, self.version = recorded.run, recorded.seq, recorded.version
        self.publisher = recorded.publisher
        self.standing, self.target = recorded.standing, recorded.target
        self.offset = self.resume_offset = recorded.offset
        self.counts = None

    def take_counters(self, earlier: PartitionState) -> None:
        """Goes on counting where the state before an error stood."""
        for name in COUNTERS:
            setattr(self, name, getattr(earlier, name))

    def follow(self) -> None:
        """The reason to stop is gone."""
        self.mode = Mode.FOLLOWING
        self.reason = self.search = ""
        self.refused = None
        self.standing = Standing.FOLLOWING
        self.target = 0
        self.marker = None

    def pass_over(self, run: int, offset: int) -> None:
        """``run`` feeds another instance; reading goes on at ``offset``."""
        self.follow()
        self.standing = Standing.PASSING
        self.target = run
        self.offset = offset

    def health(self, instance: str, lag_seconds: float | None) -> PartitionHealth:
        """Its own state; what is wrong with the log or with the pool is the caller's to say."""
        full = self.full
        if full is not None and self.mode in (Mode.FOLLOWING, Mode.FULL):
            state, reason = Mode.FULL.value, full.reason
        elif self.passing and self.following:
            state, reason = "passing", self.reason
        else:
            state, reason = self.mode.value, self.reason
        reason = "; ".join(text for text in (reason, self.search) if text)
        return PartitionHealth(self.partition, instance, state, reason, lag_seconds)

    def status(self, end: int, health: PartitionHealth) -> PartitionStatus:
        """A snapshot; ``end`` is the log's end offset."""
        recorded = self.recorded
        lag = health.lag_seconds
        return PartitionStatus(
            partition=self.partition,
            instance=health.instance,
            state=health.state,
            reason=health.reason,
            run=recorded.run,
            seq=recorded.seq,
            offset=recorded.offset,
            version=recorded.version,
            lag_records=max(0, end - recorded.offset),
            lag_seconds=None if lag is None else round(lag, 3),
            records=self.records,
            rows=self.rows,
            duplicates=self.duplicates,
            gaps=self.gaps,
            zombies=self.zombies,
            conflicts=self.conflicts,
            dead_letters=self.dead_letters,
            catch_ups=self.catch_ups,
            refusals=self.refusals,
            freshness=freshness_of(self.samples),
        )
