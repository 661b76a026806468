"""The state of one partition in ingest: its place in the stream, its mode, its counters."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from petps.delta import RecordHeader
from petps.server.ingest.order import Applied, mark_of
from petps.server.ingest.protocols import Progress, Standing
from petps.server.ingest.status import Mode, PartitionHealth, PartitionStatus, Samples, freshness_of

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
)

FIRST_RETRY_SECONDS: Final = 0.1
LAST_RETRY_SECONDS: Final = 10.0

# Reason why a partition is stopped after a restart, by its standing.
_RECORDED_REASONS: Final = {
    Standing.CATCHING_UP: "the catch-up to version {0.target} was interrupted",
    Standing.ROWS_MISSING: "rows that the commit of version {0.target} counts are missing: the "
    "publisher lost some; only a base repairs this",
    Standing.CONFLICT: "two publishers wrote run {0.run}: stop one of them and begin a new run "
    "with a base",
    Standing.LOST_POWER: "the machine lost power while the pool had durability 'process': rows may "
    "be older than the applied version; waiting for a base, from the store or the publisher",
}


@dataclass(frozen=True, slots=True)
class BaseMarker:
    """A base record in the stream. After a catch-up to its base, reading continues after it."""

    header: RecordHeader
    location: str
    next_offset: int
    instance: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Rows of a partition that could not be stored: their table and their number.

    ``until`` is {run, seq} of the last of them.
    """

    reason: str
    table: str
    rows: int
    until: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class PartitionState:
    """State of a partition. The reading thread owns it.

    The applying thread writes only ``refused``, ``recorded`` and the counters of applied rows.
    Status reads the fields without a lock.

    ``mode`` is the state in memory, ``standing`` the state in the pool. A gap changes only the
    mode, because reading the log after a restart finds it again. A reason to stop that would not be
    found again also changes the standing.

    run, seq, version and offset cover every record taken, whether it is applied or still in the
    window. ``recorded`` is the progress in the pool. After a restart, reading continues at
    ``offset``.
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
    search_error: str = ""  # while stopped: why the search for a base fails
    standing: Standing = Standing.FOLLOWING
    target: int = 0  # see Standing
    # While stopped: the offset to read from again once the missing seq has arrived.
    resume_offset: int = 0
    # While stopped: the marker whose base ends the stop; None: any base may.
    marker: BaseMarker | None = None
    # While stopped: the bases that failed since all bases were last tried.
    tried: set[str] = field(default_factory=set)
    # Set by the applying thread, and cleared by the reading thread while no apply runs. While it is
    # set, no row and no progress of this partition is written.
    refused: Refusal | None = None
    # Rows that still have to be stored; None once progress has passed them.
    full: Refusal | None = None
    retry_at: float = 0.0  # when to retry them, by time.monotonic()
    retry_wait: float = 0.0
    # Rows by table since the last commit; None if some of them may not have been counted.
    counts: dict[str, int] | None = None
    begun_ns: int = 0  # when the first rows since then were read, by time.monotonic_ns(); 0: none
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
    version_time_ns: int = 0  # when the last recorded commit was published; 0: none yet

    @staticmethod
    def of(partition: int, recorded: Progress | None, start: int) -> PartitionState:
        """Return a state that continues from ``recorded``; if None, from offset ``start``."""
        if recorded is not None and recorded.is_blank:  # the partition was removed from this pool
            recorded = None
        progress = recorded or Progress(partition, offset=start)
        state = PartitionState(partition, progress)
        state.go_back()
        if progress.standing.needs_base:
            is_conflict = progress.standing is Standing.CONFLICT
            state.mode = Mode.CONFLICT if is_conflict else Mode.INCOMPLETE
            state.reason = _RECORDED_REASONS[progress.standing].format(progress)
        return state

    @property
    def is_following(self) -> bool:
        """Return whether the partition applies records."""
        return self.mode is Mode.FOLLOWING

    @property
    def has_applied(self) -> bool:
        """Return whether the pool has applied a message here, or a base, also one of run 0."""
        return self.recorded.run > 0 or self.recorded.version > 0

    @property
    def is_unread(self) -> bool:
        """Return whether the partition waits for its first message."""
        is_waiting = self.is_following and self.recorded.standing is Standing.FOLLOWING
        return is_waiting and not self.has_applied

    @property
    def is_loaded(self) -> bool:
        """Return whether the pool has the rows of the instance, and nothing stops the log's."""
        is_stored = self.has_applied and not self.recorded.standing.needs_base
        return is_stored and self.is_following and self.full is None

    @property
    def passed_run(self) -> int:
        """Return the run that feeds another instance and that ingest skips here; 0 if none."""
        return self.target if self.standing is Standing.PASSING else 0

    @property
    def applied(self) -> Applied:
        """Return the last message taken (applied, or still in the window), for the order rule."""
        return Applied(self.run, self.seq, self.publisher)

    def progress(self) -> Progress:
        """Return the progress to record once everything taken is applied."""
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

    def is_repaired_by(self, run: int, seq: int) -> bool:
        """Return whether a base that holds everything up to {run, seq} ends the stop."""
        if self.standing is Standing.CONFLICT:
            return run > self.run  # a base within the run may hold rows of either publisher
        if self.standing is Standing.LOST_POWER:  # any base is better than rows of unknown age
            return run >= self.target and (run, seq) > (0, 0)
        applied = (self.recorded.run, self.recorded.seq)
        return (run, seq) > applied or ((run, seq) == applied and self.standing.needs_base)

    def count(self, counter: str) -> None:
        """Add 1 to one of COUNTERS."""
        assert counter in COUNTERS
        setattr(self, counter, getattr(self, counter) + 1)

    # ---- transitions: a record was taken

    def advance(self, header: RecordHeader, next_offset: int) -> None:
        """Move past the record of this header; reading continues at ``next_offset``."""
        self.run, self.seq, self.publisher = header.run, header.seq, mark_of(header.publisher)
        self.offset = next_offset

    def skip_to(self, offset: int) -> None:
        """Continue at ``offset``, later or earlier than now."""
        self.offset = offset

    def begin_version(self) -> None:
        """Begin to count the rows of a version."""
        self.counts = {}
        self.begun_ns = 0

    def count_rows(self, table: str, rows: int) -> None:
        """Count rows of the current version, if its beginning is known."""
        if self.begun_ns == 0:
            self.begun_ns = time.monotonic_ns()
        if self.counts is not None:
            self.counts[table] = self.counts.get(table, 0) + rows

    def complete_version(self, version: int) -> None:
        """Set the last complete version, and begin the next one."""
        self.version = max(self.version, version)
        self.begin_version()

    def record(self, progress: Progress) -> None:
        """Set the progress that the pool has recorded."""
        self.recorded = progress

    def refuse(self, refusal: Refusal) -> None:
        """Set the rows that could not be stored. The applying thread calls this."""
        self.refused = refusal

    def count_applied(self, rows: int, freshness_ms: float) -> None:
        """Count a record of rows that was applied and recorded."""
        self.samples.add(freshness_ms)
        self.records += 1
        self.rows += rows

    def count_commit(self, time_ns: int) -> None:
        """Note when a commit was published that is recorded now."""
        self.version_time_ns = time_ns

    # ---- transitions: stop

    def explain(self, reason: str) -> None:
        """Set the reason for the stop."""
        self.reason = reason

    def explain_search(self, error: str) -> None:
        """Set why the search for a base fails; an empty text if it does not fail."""
        self.search_error = error

    def stop(self, mode: Mode, reason: str, *, offset: int, resume_offset: int) -> None:
        """Stop applying. A restart continues at ``offset``."""
        self.mode = mode
        self.reason = reason
        self.refused = None
        self.offset = offset
        self.resume_offset = resume_offset
        self.counts = None
        self.begun_ns = 0

    def stop_at_gap(self, reason: str, *, offset: int, resume_offset: int) -> None:
        """Stop because a message is missing in the log."""
        self.count("gaps")
        self.stop(Mode.INCOMPLETE, reason, offset=offset, resume_offset=resume_offset)

    def stop_until_base(self, standing: Standing, target: int, reason: str, offset: int) -> None:
        """Stop for a reason that the pool records. Only a base ends the stop."""
        is_conflict = standing is Standing.CONFLICT
        self.count("conflicts" if is_conflict else "gaps")
        mode = Mode.CONFLICT if is_conflict else Mode.INCOMPLETE
        self.stop(mode, reason, offset=offset, resume_offset=offset)
        self.standing, self.target = standing, target

    def resume_at(self, offset: int) -> None:
        """Set the offset to read from again once the missing seq has arrived."""
        self.resume_offset = offset

    def wait_for(self, marker: BaseMarker | None) -> None:
        """Wait for the base of a marker, or if None, for any base."""
        self.marker = marker

    # ---- transitions: rows without room

    def stop_full(self, refusal: Refusal) -> None:
        """Stop a following partition. Retry at once, and then at growing intervals."""
        if self.full is None:
            self.retry_at = self.retry_wait = 0.0
        else:
            self.wait_longer()
        self.go_back()
        self.mode = Mode.FULL
        self.reason = ""
        self.count("refusals")
        self.full = refusal

    def wait_longer(self) -> None:
        """Postpone the next retry by twice the last wait."""
        self.retry_wait = min(max(FIRST_RETRY_SECONDS, 2 * self.retry_wait), LAST_RETRY_SECONDS)
        self.retry_at = time.monotonic() + self.retry_wait

    def try_again(self) -> None:
        """Follow again from the recorded progress. No row of the partition may be in flight."""
        self.refused = None
        self.mode = Mode.FOLLOWING

    def forget_refusal(self) -> None:
        """Clear the refusal after progress has passed the rows that had no room."""
        self.full = None

    # ---- transitions: catch-up

    def begin_catch_up(self) -> None:
        """Apply no record until the catch-up ends."""
        self.mode = Mode.CATCHING_UP
        self.refused = None

    def end_catch_up(self, after: Progress, *, begins_run: bool) -> None:
        """Follow from the progress of the base.

        begins_run: the base begins a run, so all rows of the next version follow it.
        """
        self.recorded = after
        self.go_back()
        self.counts = {} if begins_run else None
        self.count("catch_ups")
        self.full = None
        self.tried.clear()
        self.follow()

    def fail_catch_up(self, recorded: Progress | None, reason: str, *, is_new_gap: bool) -> None:
        """Stop with the recorded progress. If ``is_new_gap``, count a gap."""
        if is_new_gap:
            self.count("gaps")
        self.recorded = recorded or self.recorded
        self.standing, self.target = self.recorded.standing, self.recorded.target
        self.mode = Mode.INCOMPLETE
        self.reason = reason

    def wait_for_room(self, refusal: Refusal) -> None:
        """Wait, after fail_catch_up(), to retry a base for which the tables have no room."""
        self.mode = Mode.FULL
        self.count("refusals")
        self.full = refusal
        self.wait_longer()

    def go_back(self) -> None:
        """Go back to the recorded progress, and forget the records taken after it."""
        recorded = self.recorded
        self.run, self.seq, self.version = recorded.run, recorded.seq, recorded.version
        self.publisher = recorded.publisher
        self.standing, self.target = recorded.standing, recorded.target
        self.offset = self.resume_offset = recorded.offset
        self.counts = None
        self.begun_ns = 0

    def take_counters(self, earlier: PartitionState) -> None:
        """Copy the counters of ``earlier``, the state of this partition before an error."""
        for name in (*COUNTERS, "samples", "version_time_ns"):
            setattr(self, name, getattr(earlier, name))

    def follow(self) -> None:
        """Follow, and clear the reason for a stop."""
        if not self.is_following:  # no apply of a stopped partition is in flight
            self.refused = None
        self.mode = Mode.FOLLOWING
        self.reason = self.search_error = ""
        self.standing = Standing.FOLLOWING
        self.target = 0
        self.marker = None

    def pass_over(self, run: int, offset: int) -> None:
        """Skip ``run``, which feeds another instance; reading continues at ``offset``."""
        self.follow()
        self.standing = Standing.PASSING
        self.target = run
        self.offset = offset

    def health(self, instance: str, lag_seconds: float | None) -> PartitionHealth:
        """Return the partition's own health, to which the caller adds errors of log and pool."""
        full = self.full
        if full is not None and self.mode in (Mode.FOLLOWING, Mode.FULL):
            state, reason = Mode.FULL.value, full.reason
        elif self.passed_run and self.is_following:
            state, reason = "passing", self.reason
        else:
            state, reason = self.mode.value, self.reason
        reason = "; ".join(text for text in (reason, self.search_error) if text)
        return PartitionHealth(self.partition, instance, state, reason, lag_seconds)

    def status(self, end: int | None, health: PartitionHealth) -> PartitionStatus:
        """Return a snapshot; ``end`` is the log's end offset; None: it is not known."""
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
            version_time=self.version_time_ns / 1e9 if self.version_time_ns else None,
            lag_records=None if end is None else max(0, end - recorded.offset),
            lag_seconds=None if lag is None else round(lag, 3),
            **{name: getattr(self, name) for name in COUNTERS},
            freshness=freshness_of(self.samples),
        )
