"""Ingest: the threads that follow a delta log and keep the tables of a model up to date."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Final

from petps import _native
from petps.delta import DeltaLog, Subscription
from petps.errors import FailedPrecondition, InvalidArgument, PetpsError, Unavailable
from petps.log import code_of, log_event
from petps.server.ingest.applier import Applier, InlineApplier, ThreadApplier
from petps.server.ingest.dense import DenseLocations
from petps.server.ingest.emptied import EmptiedLogs
from petps.server.ingest.follow import Follower
from petps.server.ingest.hold import Hold
from petps.server.ingest.instances import SingleInstance
from petps.server.ingest.lag import Lag
from petps.server.ingest.partition import BaseMarker, PartitionState
from petps.server.ingest.protocols import BaseSource, DeadLetters, Instances, InstanceTables
from petps.server.ingest.status import (
    Freshness,
    IngestStatus,
    Mode,
    PartitionHealth,
    freshness_of,
    histogram_of,
)
from petps.server.ingest.trace import TraceSink

__all__ = ["Ingest"]

_log = logging.getLogger("petps.server.ingest")

POLL_SECONDS: Final = 0.1  # longest wait for the log, and so for stop() and pause()
PACE_CREDIT_SECONDS: Final = 0.1  # rate that was unused for at most this long may be used later
POLL_BYTES: Final = 8 << 20  # bytes read by one poll, and so held in memory
# Rows of one apply: enough to amortise its drains, and few enough for the latency of pulls.
ROWS_MAX: Final = 16384
RETRY_FIRST_SECONDS: Final = 0.1
RETRY_LAST_SECONDS: Final = 5.0
REPEAT_SECONDS: Final = 60.0  # between two log lines of the same error
SEARCH_SECONDS: Final = 1.0  # between two searches for bases
END_SECONDS: Final = 1.0  # between two requests for the log's end; the precision of a lag


class _Stopped(Exception):
    """Signal that stop() was called during a wait or a retry."""


class _Left(Exception):
    """Signal that a followed instance was frozen or dropped, so partitions need new owners."""


class Ingest:
    """The threads that follow a log from the recorded progress: read, order, apply, record.

    If the pool or the log fails, ingest retries at growing intervals, and status() reports the
    error. Threads: any thread may call every method.

    Args:
        log: The log to follow.
        instance: The tables and the progress of the model's current instance.
        dead_letters: The destination of messages that could not be decoded.
        bases: Source of bases to catch up to after a gap; None: no bases.
        instances: Choice of the instance that each partition feeds; None: all feed ``instance``.
        dense: The locations of dense weights; None keeps them in memory.
        partitions: The partitions to follow; None follows all.
        rows_per_second: Limit of the rows applied, to protect the latency of pulls; None: no limit.
        rows_max, poll_bytes: Rows of one apply, and bytes read by one poll.
        search_seconds: Seconds between two searches for bases.
        trace: Takes the span of each version that the publisher sampled; None: nothing is traced.
    """

    def __init__(
        self,
        log: DeltaLog,
        instance: InstanceTables,
        *,
        dead_letters: DeadLetters,
        bases: BaseSource | None = None,
        instances: Instances | None = None,
        dense: DenseLocations | None = None,
        partitions: Sequence[int] | None = None,
        rows_per_second: float | None = None,
        rows_max: int = ROWS_MAX,
        poll_bytes: int = POLL_BYTES,
        search_seconds: float = SEARCH_SECONDS,
        trace: TraceSink | None = None,
    ) -> None:
        if log.partitions != instance.partitions:
            raise InvalidArgument(
                f"{log.name} has {log.partitions} partitions, model {instance.model} "
                f"{instance.partitions}: the number can never change"
            )
        if rows_max < 1 or poll_bytes < 1:
            raise InvalidArgument(
                f"rows_max and poll_bytes must be at least 1, got {rows_max} and {poll_bytes}"
            )
        self._log = log
        self._instance = instance
        self._dead_letters = dead_letters
        self._bases = bases
        self._instances = instances or SingleInstance(instance)
        self._dense = dense or DenseLocations()
        self._partitions = sorted(set(range(log.partitions) if partitions is None else partitions))
        self.set_rate(rows_per_second)
        self._rows_max = rows_max
        self._poll_bytes = poll_bytes
        self._search_seconds = search_seconds
        self._trace = trace
        self._states: dict[int, PartitionState] = {}
        self._followers: dict[str, Follower] = {}  # by instance
        self._owners: dict[int, Follower] = {}  # by partition
        self._is_complete = False  # whether all partitions feed one instance, reported complete
        self._lag = Lag()
        self._emptied = EmptiedLogs(log)
        self._has_reached_end = False  # once True, at low priority: see _yield_to_pulls()
        self._has_polled = False  # whether the log has answered since the last error
        self._end_reached = threading.Event()  # see wait_for_end()
        self._is_reading = False  # the last poll had events, and the end was not reached yet
        self._end_thread_stop = threading.Event()
        self._end_thread: threading.Thread | None = None  # requests the log's end
        self._applier: Applier = InlineApplier()
        self._paused_partitions: set[int] = set()  # not read, because they catch up
        self._errors_lock = threading.Lock()  # over the next two, which several threads write
        self._errors: dict[str, str] = {}  # current errors, by operation
        self._error_count = 0
        self._not_before = 0.0  # when the rate limit allows the next apply
        self._stop = threading.Event()
        self._may_read = threading.Event()
        self._may_read.set()
        self._has_paused = False  # of the thread; it follows pause() once its poll has ended
        self._hold = Hold()
        self._rounds = 0  # see rounds()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the threads."""
        if self._thread is not None:
            raise FailedPrecondition("ingest has been started already")
        self._stop.clear()
        self._has_reached_end = False
        self._end_reached.clear()  # stop() set it
        self._thread = threading.Thread(target=self._main, name="petps-ingest", daemon=True)
        self._thread.start()
        # A new event, because an old thread may still wait for the log.
        self._end_thread_stop = threading.Event()
        self._end_thread = threading.Thread(
            target=self._request_ends_repeatedly,
            args=(self._end_thread_stop,),
            name="petps-ingest-end",
            daemon=True,
        )
        self._end_thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Stop the threads after the running apply. Return False after a timeout.

        Progress covers everything that was applied; start() continues from there.
        """
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                return False
            self._thread = None
        end_thread, self._end_thread = self._end_thread, None
        if end_thread is not None:  # not joined: it is a daemon, and may wait for the log
            self._end_thread_stop.set()
            self._end_reached.set()
        return True

    def pause(self) -> None:
        """Stop reading, after handling the events read; the status then says so. See resume()."""
        self._may_read.clear()

    def resume(self) -> None:
        """Undo pause()."""
        self._may_read.set()

    def held(
        self, timeout: float, goes_on: Callable[[], bool] = lambda: True
    ) -> AbstractContextManager[None]:
        """Apply nothing inside the context. The recorded progress then covers all applied rows.

        Wait until what was read is applied, without the limit of rows a second. Raise Unavailable
        after the timeout, in seconds, or once goes_on() returns False.
        """
        return self._hold.taken(timeout, goes_on=goes_on)

    def between_applies(self, action: Callable[[], None], timeout: float) -> bool:
        """Run ``action`` while ingest is held, so that progress covers all applied rows.

        No apply and no step of a catch-up runs meanwhile, and what was read before is applied.
        Return False if that does not begin in time, for example because the log does not answer.
        Raise the action's error.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(self._hold.taken(timeout, only_working=True))
            except Unavailable:
                return False
            action()
        return True

    def rounds(self) -> int | None:
        """Return a count that grows while the threads make progress, also while they wait.

        It stands still during one apply, and one step of a catch-up. None: ingest is stopped, or
        held by somebody else.
        """
        return None if self._thread is None or self._hold.is_held else self._rounds

    def set_rate(self, rows_per_second: float | None) -> None:
        """Change the rate limit; None removes it."""
        if rows_per_second is not None and rows_per_second <= 0:
            raise InvalidArgument(f"rows_per_second must be above 0 or None, got {rows_per_second}")
        self._rows_per_second = rows_per_second

    def wait_for(self, version: int, timeout: float) -> bool:
        """Wait until ``version`` is applied in every partition. Return False after a timeout."""
        deadline = time.monotonic() + timeout
        while self.version() < version:
            if time.monotonic() > deadline or self._stop.is_set():
                return self.version() >= version
            time.sleep(0.002)
        return True

    def wait_for_end(self, timeout: float) -> bool:
        """Wait until everything that the log held is applied. Return False after a timeout.

        Return False early if the log or the pool reports an error.
        """
        self._end_reached.wait(timeout)
        return self._has_reached_end

    def version(self) -> int:
        """Return the highest version that is complete in all owned partitions."""
        states = list(self._states.values())
        return min((state.recorded.version for state in states), default=0)

    def health(self) -> list[PartitionHealth]:
        """Return the health of each partition. Never waits for the log."""
        return [self._health(state) for state in self._known_states()]

    def _known_states(self) -> list[PartitionState]:
        """Return the states of all partitions; before reading begins, from recorded progress."""
        states = dict(self._states)
        for partition in self._partitions:
            if partition not in states:
                recorded = self._instances.owner(partition).progress(partition)
                states[partition] = PartitionState.of(partition, recorded, 0)
        return list(states.values())

    def _health(self, state: PartitionState) -> PartitionHealth:
        owner = self._owners.get(state.partition)
        instance = owner.instance if owner else self._instances.owner(state.partition)
        health = state.health(instance.name, self._lag.of(state.partition, state.recorded.offset))
        if health.state not in (Mode.FOLLOWING.value, "passing"):
            return health
        errors = self._errors
        if owner is None or (state.is_unread and state.partition in self._emptied.undecided):
            name = "unreachable" if "follow" in errors and state.recorded.offset > 0 else "starting"
            reason = errors.get("follow", "its log is not read yet")
            return replace(health, state=name, reason=reason)
        if "apply" in errors:
            return replace(health, state="blocked", reason=errors["apply"])
        if reason := errors.get("follow") or errors.get("end") or self._lag.silence():
            return replace(health, state="unreachable", reason=reason)
        return health

    def _request_ends_repeatedly(self, stop: threading.Event) -> None:
        """Request the log's end about every second, independently of status().

        The first request waits until ingest has reached the end, but at most END_SECONDS: after a
        restart, reading the log has priority.
        """
        self._end_reached.wait(END_SECONDS)
        while not stop.is_set():
            self._request_ends(list(self._states.values()))
            stop.wait(END_SECONDS)

    def _request_ends(self, states: Sequence[PartitionState]) -> None:
        requested_at = time.monotonic()
        try:
            ends = self._log.end_offsets([state.partition for state in states])
        except Exception as error:  # report any error, but continue this thread
            is_known = isinstance(error, PetpsError)
            self._report("end", str(error) if is_known else f"{type(error).__name__}: {error}")
            return
        self._clear_error("end")
        applied = {state.partition: state.recorded.offset for state in states}
        self._lag.note(ends, applied, requested_at)

    def status(self, *, request_end: bool = True) -> IngestStatus:
        """Return a snapshot of everything.

        Request the log's end first, which may wait for its brokers; without ``request_end``, use
        the one that the thread has requested within the last second.
        """
        states = self._known_states()
        if request_end:
            self._request_ends(states)
        thread = self._thread
        all_dense = [follower.dense for follower in list(self._followers.values())]
        version, dense = max(all_dense, default=(0, None), key=lambda dense: dense[0])
        refused: Counter[str] = Counter()
        for full in [state.full for state in states if state.full is not None]:
            refused[full.table] += full.rows if full.table else 0
        applied = min((state.recorded.version for state in states), default=0)
        return IngestStatus(
            running=thread is not None and thread.is_alive(),
            paused=self._has_paused,
            model=self._instance.model,
            log=self._log.name,
            log_reachable=self._lag.is_answered(),
            error="; ".join(dict.fromkeys(self._errors.values())),
            errors=self._error_count,
            rows=sum(state.rows for state in states),
            records=sum(state.records for state in states),
            refused={table: rows for table, rows in refused.items() if table},
            version=applied,
            dense=dense if version == applied else None,
            freshness=freshness_of(*(s.samples for s in states)) if states else Freshness(),
            freshness_histogram=histogram_of(*(s.samples for s in states)),
            partitions=[
                state.status(self._lag.end(state.partition), self._health(state))
                for state in states
            ],
        )

    def _main(self) -> None:
        wait = RETRY_FIRST_SECONDS
        logged, logged_at = "", 0.0
        while not self._stop.is_set():
            self._has_polled = False
            try:
                self._follow()
            except _Stopped:
                return
            except _Left:
                _log.info(
                    "[ingest] an instance was frozen or dropped: continuing without it",
                    extra=log_event("instance_left"),
                )
                self._clear_error("apply")
            except Exception as error:  # report any error, but continue ingest
                if self._has_polled:
                    wait = RETRY_FIRST_SECONDS
                report = f"{type(error).__name__}: {error}"
                now = time.monotonic()
                if report != logged or now - logged_at > REPEAT_SECONDS:
                    logged, logged_at = report, now
                    _log.error(
                        "[ingest] %s; continuing from the recorded progress in %.1f s (the same "
                        "error is logged once a minute)",
                        error, wait, exc_info=not isinstance(error, PetpsError),
                        extra=log_event("ingest_failed", retry_seconds=wait, code=code_of(error)),
                    )  # fmt: skip
                self._report("follow", report)
                self._rounds += 1
                self._stop.wait(wait)
                wait = min(2 * wait, RETRY_LAST_SECONDS)

    def _follow(self) -> None:
        """Follow the log from the recorded progress on, until stop()."""
        with ExitStack() as stack:
            self._hold.begin()
            stack.callback(self._hold.end)
            applier = self._applier = ThreadApplier()
            self._has_reached_end = False  # the applying thread is new
            stack.callback(applier.close)
            stack.callback(self._close_followers)
            self._load_states()
            self._paused_partitions.clear()
            positions = {p: state.offset for p, state in self._states.items()}
            subscription = self._log.subscribe(positions)
            stack.callback(subscription.close)
            next_search = time.monotonic()
            while not self._stop.is_set():
                self._rounds += 1
                self._hold.give_way(self._settle)
                self._has_paused = not self._may_read.is_set()
                if self._has_paused:
                    self._may_read.wait(POLL_SECONDS)
                    continue
                self._check_live()
                self._poll(subscription)
                self._has_polled = True
                if time.monotonic() >= next_search:
                    for follower in list(self._followers.values()):
                        follower.search_bases()
                    next_search = time.monotonic() + self._search_seconds
                self._catch_up(subscription)
                self._retry_full(subscription)

    def _settle(self) -> None:
        for follower in list(self._followers.values()):
            follower.settle()

    def _retry_full(self, subscription: Subscription) -> None:
        for follower in list(self._followers.values()):
            for partition, offset in follower.retry_full().items():
                subscription.seek(partition, offset)

    def _close_followers(self) -> None:
        for follower in self._followers.values():
            follower.close()

    def _load_states(self) -> None:
        """Create states and followers from the recorded progress; counters and samples continue."""
        starts = self._log.start_offsets(self._partitions)
        self._emptied.begin({} if self._bases is None else starts)
        states: dict[int, PartitionState] = {}
        instances: dict[str, InstanceTables] = {}
        by_instance: dict[str, dict[int, PartitionState]] = {}
        for partition in self._partitions:
            instance = self._instances.owner(partition)
            instance = instances.setdefault(instance.name, instance)
            state = self._load_state(partition, instance, starts[partition])
            states[partition] = by_instance.setdefault(instance.name, {})[partition] = state
        self._followers = {
            name: self._create_follower(instances[name], own) for name, own in by_instance.items()
        }
        self._owners = {
            partition: follower
            for follower in self._followers.values()
            for partition in follower.partitions
        }
        self._states = states
        self._is_complete = False

    def _load_state(self, partition: int, instance: InstanceTables, start: int) -> PartitionState:
        state = PartitionState.of(partition, instance.progress(partition), start)
        earlier = self._states.get(partition)
        if state.recorded.standing.needs_base:
            self._lag.forget(partition)
        if earlier is not None:
            state.take_counters(earlier)
        return state

    def _create_follower(
        self, instance: InstanceTables, states: dict[int, PartitionState]
    ) -> Follower:
        follower = Follower(
            instance,
            self._bases,
            self._dead_letters,
            states,
            rows_max=self._rows_max,
            pace=self._pace,
            retry_until_done=self._retry_until_done,
            applier=self._applier,
            hand_over=self._hand_over,
            trace=self._trace,
        )
        follower.dense = self._dense.of(instance.name)
        return follower

    def _hand_over(self, state: PartitionState, marker: BaseMarker, offset: int) -> bool:
        """Give a partition to the follower of the marker's instance, and create it if necessary.

        See Follower.
        """
        if self._bases is None or marker.instance is None:
            raise PetpsError("no checkpoint folder is configured to read the base from")
        partition = state.partition
        base = self._bases.open(marker.location)
        instance = self._instances.begin(marker.instance, base, marker.header.run)
        if instance is None:
            return False
        follower = self._followers.get(instance.name) or self._create_follower(instance, {})
        new_state = self._load_state(partition, instance, offset)
        self._followers[instance.name] = self._owners[partition] = follower
        self._states[partition] = new_state
        self._is_complete = False
        follower.adopt(new_state, marker, offset)
        return True

    def _check_live(self) -> None:
        """Raise _Left if an instance was frozen or dropped. Report an instance that is complete."""
        for name, follower in list(self._followers.items()):
            if not follower.partitions:
                del self._followers[name]
            elif not follower.instance.is_live():
                raise _Left
        is_loaded = all(state.is_loaded for state in self._states.values())
        if not self._is_complete and len(self._followers) == 1 and is_loaded:
            self._is_complete = True
            self._instances.complete(next(iter(self._followers.values())).instance)

    def _poll(self, subscription: Subscription) -> None:
        is_catching_up = any(follower.catching_up for follower in self._followers.values())
        timeout = 0.0 if is_catching_up or self._is_reading else POLL_SECONDS
        events = subscription.poll(max_bytes=self._poll_bytes, timeout=timeout)
        if not events:
            events = self._emptied.find(self._states, self._owners)
        self._is_reading = bool(events) and not self._has_reached_end
        self._clear_error("follow")
        read_again: set[int] = set()
        for event in events:
            if event.partition in read_again:
                continue
            offset = self._owners[event.partition].take(event)
            if offset is not None:
                subscription.seek(event.partition, offset)
                read_again.add(event.partition)
        for follower in list(self._followers.values()):
            if events:
                follower.flush()
                follower.stop_refused()
            else:
                follower.settle()
                self._yield_to_pulls()
            self._dense.set(follower.instance.name, follower.dense)
        subscription.observe({p: state.recorded.offset for p, state in self._states.items()})

    def _yield_to_pulls(self) -> None:
        """Lower the priority of this thread and of the applying thread, in favour of pulls.

        Call it once the log's end is reached: after a restart, the newest version comes first.
        """
        if not self._has_reached_end:
            self._has_reached_end = True
            self._end_reached.set()
            _native.lower_priority()
            self._applier.submit(_native.lower_priority)

    def _catch_up(self, subscription: Subscription) -> None:
        """Run one catch-up step of each follower, between two polls."""
        for follower in list(self._followers.values()):
            for partition in set(follower.catching_up) - self._paused_partitions:
                subscription.pause(partition)
                self._paused_partitions.add(partition)
            for partition, offset in follower.advance_catch_up().items():
                if offset is not None:
                    subscription.seek(partition, offset)
                subscription.resume(partition)
                self._paused_partitions.discard(partition)
            self._dense.set(follower.instance.name, follower.dense)

    def _retry_until_done(self, action: Callable[[], None]) -> None:
        """Repeat an action of the pool until it succeeds. Raises _Stopped if stop() comes first."""
        wait = RETRY_FIRST_SECONDS
        while True:
            try:
                action()
                self._clear_error("apply")
                return
            except PetpsError as error:
                if not all(
                    follower.instance.is_live() for follower in list(self._followers.values())
                ):
                    raise _Left from error
                self._report("apply", f"apply: {error}")
                _log.error(
                    "[ingest] apply failed, retrying in %.1f s: %s", wait, error,
                    extra=log_event("apply_failed", retry_seconds=wait, code=error.code),
                )  # fmt: skip
            self._rounds += 1
            if self._stop.wait(wait):
                raise _Stopped
            wait = min(2 * wait, RETRY_LAST_SECONDS)

    def _report(self, operation: str, error: str) -> None:
        with self._errors_lock:
            # Create a new dict, because status() reads it without the lock.
            self._errors = {**self._errors, operation: error}
            self._error_count += 1
        self._end_reached.set()  # wake wait_for_end(), because the end may never be reached

    def _clear_error(self, operation: str) -> None:
        with self._errors_lock:
            self._errors = {name: text for name, text in self._errors.items() if name != operation}

    def _pace(self, rows: int) -> None:
        """Wait as the rate limit requires after ``rows``. Raises _Stopped if stop() comes first."""
        rate = self._rows_per_second
        if rate is None:
            return
        now = time.monotonic()
        # The time of the apply itself counts as waiting; otherwise the rate is never reached.
        self._not_before = max(now - PACE_CREDIT_SECONDS, self._not_before) + rows / rate
        while now < self._not_before:
            self._rounds += 1
            # A new limit counts from now on. Who holds ingest waits for what was read.
            if self._rows_per_second != rate or self._hold.is_wanted:
                self._not_before = now
                return
            if self._stop.wait(min(POLL_SECONDS, self._not_before - now)):
                raise _Stopped
            now = time.monotonic()
