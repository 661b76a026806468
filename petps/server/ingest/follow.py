"""Follower: applies the order rule to each event of the log, and stops partitions at gaps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from petps.delta import (
    BaseBody,
    CommitBody,
    ContinueBody,
    Damage,
    Delivery,
    DeltaError,
    Event,
    Kind,
    Lost,
    Message,
    Record,
    RecordHeader,
    RowsBody,
    TableSchema,
    decode_record,
    read_header,
)
from petps.delta.record import check_place
from petps.errors import PetpsError
from petps.log import log_event
from petps.server.ingest.applier import Applier
from petps.server.ingest.catch_ups import CatchUps
from petps.server.ingest.full import is_due, is_over
from petps.server.ingest.order import Decision, Outcome, count_problem, decide
from petps.server.ingest.partition import BaseMarker, PartitionState
from petps.server.ingest.protocols import (
    BaseSource,
    DeadLetters,
    InstanceTable,
    InstanceTables,
    Standing,
)
from petps.server.ingest.status import Mode
from petps.server.ingest.trace import TraceSink, VersionTrace, publisher_of
from petps.server.ingest.window import Merger, Window

__all__ = ["Follower"]

_log = logging.getLogger("petps.server.ingest")


class Follower:
    """Follower of all partitions that feed one instance. It has no thread and no log.

    take() handles an event. If it returns an offset, the caller must read the partition again from
    that offset, and drop the other events that it has read of the partition. flush() starts to
    apply the records taken, and settle() waits until they are applied and their progress is
    recorded. take() and search_bases() queue catch-ups, and advance_catch_up() runs a step of the
    first. ``retry_until_done`` repeats an action until the pool accepts it, so that no record taken
    is ever dropped.
    """

    def __init__(
        self,
        instance: InstanceTables,
        bases: BaseSource | None,
        dead_letters: DeadLetters,
        states: dict[int, PartitionState],
        *,
        rows_max: int,
        pace: Callable[[int], None],
        retry_until_done: Callable[[Callable[[], None]], None],
        applier: Applier,
        hand_over: Callable[[PartitionState, BaseMarker, int], bool] = lambda *_: False,
        trace: TraceSink | None = None,
    ) -> None:
        """``hand_over`` gives a partition to the follower of the instance that the marker names.

        The run that begins at the given offset feeds that instance. If ``hand_over`` returns False,
        the run feeds no instance here, and the follower skips it. ``trace`` takes the span of each
        version whose publisher sampled it.
        """
        self._hand_over = hand_over
        self._trace = trace
        self._applier = applier
        self._retry_until_done = retry_until_done
        self._instance = instance
        self._dead_letters = dead_letters
        self._states = states
        self._rows_max = rows_max
        self._pace = pace
        self._tables: dict[str, InstanceTable] = dict(instance.tables())
        self._window = Window()
        self._merger = Merger(rows_max)
        self.dense: tuple[int, str | None] = (0, None)
        self._catch_ups = CatchUps(
            instance,
            bases,
            tables=lambda: self._tables,
            rows_max=rows_max,
            pace=pace,
            settle=self.settle,
            note_dense=self._note_dense,
        )

    def take(self, event: Event) -> int | None:
        """Handle one event. Return the offset to read its partition from again, or None."""
        state = self._states[event.partition]
        if state.mode is Mode.CATCHING_UP:
            return None  # the caller reads the event again after the catch-up
        if state.refused is not None and state.is_following:
            return None  # stop_refused() handles the refusal first; then the caller reads it again
        if isinstance(event, Lost):
            return self._handle_loss(state, event)
        if isinstance(event, Damage):
            self._handle_damage(state, event, f"log-damaged: {event.reason}", None)
            return None
        try:
            header = read_header(event.message)
            check_place(
                header,
                model=self._instance.model,
                partition=event.partition,
                partitions=self._instance.partitions,
            )
            if header.run <= state.passed_run:
                self._skip_foreign(state, event, header)
                return None
            record = None if header.kind is Kind.ROWS else self._decode(event, header)
            marker = record.body if record and isinstance(record.body, ContinueBody) else None
            decision = decide(state.applied, header, marker)
            if not state.is_following:
                return self._take_stopped(state, event, header, record, decision)
            if decision.outcome in (Outcome.APPLY, Outcome.NEW_RUN):
                self._accept(state, event, record or self._decode(event, header), decision)
            else:
                self._decline(state, event, decision)
        except DeltaError as error:
            self._handle_damage(state, event, str(error), event.message)
        return None

    @property
    def instance(self) -> InstanceTables:
        """Return the instance that the partitions feed."""
        return self._instance

    @property
    def partitions(self) -> list[int]:
        """Return the partitions that feed the instance."""
        return list(self._states)

    def _skip_foreign(self, state: PartitionState, event: Delivery, header: RecordHeader) -> None:
        """Skip a record of the run that feeds another instance, or of an older run."""
        if header.run < state.passed_run:
            state.count("zombies")
        if state.is_following:
            self._skip(state, event)

    def _leave(self, state: PartitionState, offset: int, marker: BaseMarker) -> None:
        """Hand the partition over: the run that begins at ``offset`` feeds another instance."""
        self.settle()
        try:
            is_handed_over = self._hand_over(state, marker, offset)
        except PetpsError as error:
            reason = f"base {marker.location} of {marker.instance}: {error}"
            if reason != state.reason:
                _log_partition(state, "incomplete", "is incomplete", reason)
            if state.is_following:
                state.stop_at_gap(reason, offset=offset, resume_offset=offset)
            else:
                resume_offset = state.resume_offset
                state.stop(Mode.INCOMPLETE, reason, offset=offset, resume_offset=resume_offset)
            state.wait_for(marker)
            return
        if is_handed_over:
            del self._states[state.partition]
            return
        if state.standing.needs_base:  # wait for a base; then read the run again, and skip it
            state.wait_for(None)
            return
        state.pass_over(marker.header.run, marker.next_offset)
        self._window.touch(state)

    @property
    def catching_up(self) -> list[int]:
        """Return the partitions of running and queued catch-ups. take() drops their events."""
        return self._catch_ups.partitions

    def advance_catch_up(self) -> dict[int, int | None]:
        """Run a step of the first catch-up. At its end, return {partition: offset to continue at}.

        An offset None means the current reading position.
        """
        if not self._catch_ups.partitions:
            return {}
        self._applier.wait()  # because a table takes one batch at a time
        return self._catch_ups.advance()

    def close(self) -> None:
        """End all catch-ups unfinished. See CatchUps.close."""
        self._catch_ups.close()

    def adopt(self, state: PartitionState, marker: BaseMarker, offset: int) -> None:
        """Take a partition over from another instance: load the base, then follow the run."""
        self._states[state.partition] = state
        self._load_base(state, offset, marker)

    def _decode(self, event: Delivery, header: RecordHeader) -> Record:
        return decode_record(
            event.message,
            model=self._instance.model,
            partition=event.partition,
            partitions=self._instance.partitions,
            schema_of=self._schema_of,
            header=header,
        )

    def _schema_of(self, name: str) -> TableSchema | None:
        if name not in self._tables:  # it may have been created since the tables were read
            self._tables = dict(self._instance.tables())
        table = self._tables.get(name)
        return None if table is None else table.schema

    def _accept(
        self, state: PartitionState, event: Delivery, record: Record, decision: Decision
    ) -> None:
        header, body = record.header, record.body
        if decision.outcome is Outcome.NEW_RUN:
            if isinstance(body, BaseBody):
                marker = BaseMarker(header, body.location, event.next_offset, body.instance)
                if body.instance in (None, self._instance.name):
                    self._load_base(state, event.offset, marker)
                else:
                    self._leave(state, event.offset, marker)
                return
            state.begin_version()
        if isinstance(body, CommitBody) and (problem := count_problem(state.counts, header, body)):
            self._halt(state, event, Standing.ROWS_MISSING, header.version, problem)
            return
        state.follow()
        state.advance(header, event.next_offset)
        if isinstance(body, RowsBody):
            self._window.add(state, header, body)
            state.count_rows(header.table, len(body.keys))
        elif isinstance(body, CommitBody):
            self._trace_version(state, event, header)
            state.complete_version(header.version)
            self._window.commit(state, header)
            self._note_dense(header.version, body.dense)
        self._window.touch(state)
        # Retry refused rows one record at a time, so that the partition stops directly before the
        # first record that has no room, and completes every version before it.
        if self._window.rows >= self._rows_max or state.full is not None:
            self.flush()

    def _trace_version(self, state: PartitionState, event: Delivery, header: RecordHeader) -> None:
        parent = None if self._trace is None else publisher_of(event.message)
        if parent is None:
            return
        rows = None if state.counts is None else sum(state.counts.values())
        begun_ns = state.begun_ns or time.monotonic_ns()  # a version without rows here
        self._window.trace(
            state,
            VersionTrace(parent, state.partition, header.version, rows, header.time_ns, begun_ns),
        )

    def _decline(self, state: PartitionState, event: Delivery, decision: Decision) -> None:
        if decision.outcome is Outcome.DUPLICATE:
            state.count("duplicates")
            self._skip(state, event)
        elif decision.outcome is Outcome.ZOMBIE:
            if state.zombies == 0:
                _log.warning(
                    "[ingest] partition %d: %s: rejected", state.partition, decision.reason,
                    extra=log_event("zombie_rejected", partition=state.partition),
                )  # fmt: skip
            state.count("zombies")
            self._skip(state, event)
        elif decision.outcome is Outcome.CONFLICT:
            self._halt(state, event, Standing.CONFLICT, 0, decision.reason)
        else:
            self._stop_at_gap(
                state, decision.reason, offset=event.offset, resume_offset=event.offset
            )

    def _skip(self, state: PartitionState, event: Delivery) -> None:
        """Move past a record, and record that: it is no lag, and a restart does not read it."""
        state.skip_to(event.next_offset)
        self._window.touch(state)

    def _halt(
        self, state: PartitionState, event: Delivery, standing: Standing, target: int, reason: str
    ) -> None:
        """Stop, and record the reason, because reading again after a restart would not find it."""
        self.settle()
        if state.refused is not None:
            return  # the caller reads the refused rows again first, and then this event
        state.stop_until_base(standing, target, reason, event.offset)
        self._window.touch(state)
        self.settle()
        _log_partition(state, "stopped", "stopped", reason)

    def _stop_at_gap(
        self, state: PartitionState, reason: str, *, offset: int, resume_offset: int
    ) -> None:
        self.settle()
        if state.refused is not None:
            return  # as in _halt()
        state.stop_at_gap(reason, offset=offset, resume_offset=resume_offset)
        _log_partition(state, "incomplete", "is incomplete", reason)

    def _handle_damage(
        self, state: PartitionState, event: Delivery | Damage, reason: str, message: Message | None
    ) -> None:
        """Write a dead letter and report a gap. Later messages may show that no seq is missing."""
        state.count("dead_letters")
        self._dead_letters.add(event.partition, event.offset, reason, message)
        if state.is_following:
            where = f"message at offset {event.offset} refused: {reason}"
            self._stop_at_gap(state, where, offset=event.offset, resume_offset=event.next_offset)

    def _handle_loss(self, state: PartitionState, event: Lost) -> int:
        start = min(event.start, event.end)
        if state.is_following:
            self._stop_at_gap(state, event.reason, offset=event.offset, resume_offset=start)
        state.resume_at(start)
        return start

    def _take_stopped(
        self,
        state: PartitionState,
        event: Delivery,
        header: RecordHeader,
        record: Record | None,
        decision: Decision,
    ) -> int | None:
        """Handle an event of a stopped partition.

        The next seq, a run that may begin here, or a base ends the stop.
        """
        body = record.body if record else None
        if decision.outcome is Outcome.NEW_RUN and not (
            state.standing.needs_base and header.kind is Kind.CONTINUE
        ):
            assert record is not None
            self._accept(state, event, record, decision)
            return None
        if decision.outcome is Outcome.ZOMBIE:
            state.count("zombies")
        is_next = decision.outcome is Outcome.APPLY and state.refused is None
        if is_next and not state.standing.needs_base:
            resume_offset = state.resume_offset
            record = record or self._decode(event, header)
            self._accept(state, event, record, decision)
            if not state.is_following or resume_offset >= event.offset:
                return None
            # The missing record arrived late: read again the records that were skipped before it.
            state.skip_to(resume_offset)
            return resume_offset
        # A base that begins a new run was accepted above. After a power loss, the base that began
        # the current run ends the stop too.
        may_end_stop = not header.begins_run or state.standing is Standing.LOST_POWER
        is_ours = isinstance(body, BaseBody) and body.instance in (None, self._instance.name)
        if isinstance(body, BaseBody) and is_ours and may_end_stop:
            marker = BaseMarker(header, body.location, event.next_offset, body.instance)
            if state.is_repaired_by(header.run, header.seq):
                self._catch_ups.add_for_marker(state, marker, offset_if_failed=marker.next_offset)
        return None

    def _load_base(self, state: PartitionState, offset: int, marker: BaseMarker) -> None:
        """Queue a catch-up to the marker's base, with which the run begins at ``offset``."""
        self.settle()
        # If the catch-up fails, the partition stays stopped here, and the base is retried.
        state.stop(Mode.INCOMPLETE, state.reason, offset=offset, resume_offset=offset)
        state.wait_for(marker)
        is_queued = self._catch_ups.add_for_marker(
            state, marker, is_new_gap_if_failed=True, offset_if_failed=marker.next_offset
        )
        if not is_queued:
            self._catch_ups.fail(state, state.reason, is_new_gap=True)

    def stop_refused(self) -> None:
        """Stop the partitions whose rows could not be stored."""
        for state in self._states.values():
            refusal = state.refused
            if refusal is None or not state.is_following:
                continue
            self._applier.wait()  # the apply in flight skips the rows of this partition
            self._window.forget(state)
            if state.full is None:
                _log_partition(state, "stopped", "stopped", refusal.reason)
            state.stop_full(refusal)

    def retry_full(self) -> dict[int, int]:
        """Return {partition: offset to continue at} for partitions whose rows may have room now."""
        offsets: dict[int, int] = {}
        for state in self._states.values():
            if is_over(state):
                state.forget_refusal()
                _log.info(
                    "[ingest] partition %d continues: its rows have room", state.partition,
                    extra=log_event("partition_continues", partition=state.partition),
                )  # fmt: skip
            elif is_due(state, self._tables):
                self.settle()
                state.try_again()
                offsets[state.partition] = state.offset
        return offsets

    def search_bases(self) -> None:
        """Search for bases that end the stops of partitions, and queue catch-ups to them."""
        stopped = [
            state
            for state in self._states.values()
            if not state.is_following and state.mode is not Mode.CATCHING_UP
        ]
        if not stopped or not self._catch_ups.has_bases:
            return
        searching: list[PartitionState] = []
        for state in stopped:
            if state.mode is Mode.FULL and time.monotonic() < state.retry_at:
                continue
            marker = state.marker
            if marker is not None and marker.instance not in (None, self._instance.name):
                self._leave(state, state.offset, marker)
                continue
            if marker is not None:
                self._catch_ups.add_for_marker(state, marker)
                continue
            searching.append(state)
        self._catch_ups.search(searching)

    def _note_dense(self, version: int, dense: str | None) -> None:
        if version >= self.dense[0]:
            self.dense = (version, dense)

    def flush(self) -> None:
        """Start to apply the records taken, and to record their progress."""
        if not self._window:
            return
        window, self._window = self._window, Window()
        window.seal()
        self._applier.submit(lambda: self._apply(window))

    def settle(self) -> None:
        """Wait until the records taken are applied, and their progress is recorded.

        Then stop the partitions whose rows could not be stored.
        """
        self.flush()
        self._applier.wait()
        self.stop_refused()

    def _apply(self, window: Window) -> None:
        self._retry_until_done(lambda: self._apply_window(window))
        self._pace(window.rows)

    def _apply_window(self, window: Window) -> None:
        """Apply and record a window. A retry is safe, because applying is idempotent."""
        window.apply(self._tables, self._merger, self._instance.partitions)
        window.record(self._instance)
        if self._trace is not None:
            for trace in window.traces():
                self._trace(trace.end(self._instance.name))


def _log_partition(state: PartitionState, name: str, what: str, reason: str) -> None:
    """Write that a partition does not follow the log any more, and why."""
    _log.error(
        "[ingest] partition %d %s: %s", state.partition, what, reason,
        extra=log_event(
            f"partition_{name}", partition=state.partition, version=state.recorded.version,
            offset=state.offset, reason=reason,
        ),
    )  # fmt: skip
