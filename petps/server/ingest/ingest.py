"""Ingest: the threads that follow a delta log and keep the tables of a model up to date."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Final

from petps.delta import DeltaLog, Subscription
from petps.errors import FailedPrecondition, InvalidArgument, PetpsError
from petps.server.ingest.applier import Applier, InlineApplier, ThreadApplier
from petps.server.ingest.dense import DenseNames
from petps.server.ingest.follow import Follower
from petps.server.ingest.instances import SingleInstance
from petps.server.ingest.lag import Lag
from petps.server.ingest.partition import BaseMarker, PartitionState
from petps.server.ingest.protocols import BaseSource, DeadLetters, Instances, InstanceTables
from petps.server.ingest.status import Freshness, IngestStatus, Mode, PartitionHealth, freshness_of

__all__ = ["Ingest"]

_log = logging.getLogger("petps.server.ingest")

POLL_SECONDS: Final = 0.1  # how soon stop() and pause() are noticed
PACE_CREDIT_SECONDS: Final = 0.1  # of unused rate; a longer pause is not made up for
POLL_BYTES: Final = 8 << 20  # read, and so held, in one poll
ROWS_MAX: Final = 16384  # rows of one apply: enough to amortise its drains, few enough for pulls
RETRY_FIRST_SECONDS: Final = 0.1
RETRY_LAST_SECONDS: Final = 5.0
NICENESS: Final = 10  # of 19
STALE_SECONDS: Final = 1.0  # between searches for a base
LOOK_SECONDS: Final = 1.0  # between requests for the log's end; the precision of a lag


class _Stopped(Exception):
    """Signal that stop() was called while an action was being repeated."""


class _Left(Exception):
    """Signal that a followed instance was frozen or dropped: the owners must be looked up again."""


class Ingest:
    """The threads that follow ``log`` from the store's progress on: read, order, apply, record.

    ``partitions`` are the owned ones, by default all. ``bases`` finds bases to catch up to after a
    gap. ``instances`` chooses the instance that each partition feeds; by default all feed
    ``store``. ``dense`` keeps the locations of the versions' dense weights. ``rows_per_second``
    limits the rate so that pulls keep their latency (None: no limit).

    status() reports errors of the pool or of the log; they are retried at growing intervals.
    Threads: any thread may call every method.
    """

    def __init__(
        self,
        log: DeltaLog,
        store: InstanceTables,
        *,
        dead_letters: DeadLetters,
        bases: BaseSource | None = None,
        instances: Instances | None = None,
        dense: DenseNames | None = None,
        partitions: Sequence[int] | None = None,
        rows_per_second: float | None = None,
        rows_max: int = ROWS_MAX,
        poll_bytes: int = POLL_BYTES,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        if log.partitions != store.partitions:
            raise InvalidArgument(
                f"{log.name} has {log.partitions} partitions, model {store.model} "
                f"{store.partitions}: the number is fixed for ever"
            )
        if rows_per_second is not None and rows_per_second <= 0:
            raise InvalidArgument(f"rows_per_second {rows_per_second}: above 0, or None")
        if rows_max < 1 or poll_bytes < 1:
            raise InvalidArgument("rows_max and poll_bytes are at least 1")
        self._log = log
        self._store = store
        self._dead_letters = dead_letters
        self._bases = bases
        self._instances = instances or SingleInstance(store)
        self._dense = dense or DenseNames()
        self._partitions = sorted(set(range(log.partitions) if partitions is None else partitions))
        self._rows_per_second = rows_per_second
        self._rows_max = rows_max
        self._poll_bytes = poll_bytes
        self._stale_seconds = stale_seconds
        self._states: dict[int, PartitionState] = {}
        self._followers: dict[str, Follower] = {}  # by instance
        self._owners: dict[int, Follower] = {}  # by partition
        # Whether all partitions feed one instance that has been reported as complete.
        self._whole = False
        self._lag = Lag()
        self._nice = False  # see _yield_to_pulls()
        self._reached = threading.Event()  # the log's end was reached; see wait_for_end()
        self._reading = False  # the last poll had events, and the end has not been reached yet
        self._looked = threading.Event()  # ends the thread that requests the log's end
        self._looker: threading.Thread | None = None
        self._applier: Applier = InlineApplier()
        self._held: set[int] = set()  # paused partitions, because they catch up
        self._troubles_lock = threading.Lock()  # over the next two: several threads report
        self._troubles: dict[str, str] = {}  # unresolved errors, by place
        self._errors = 0
        self._not_before = 0.0  # the rate limit's clock
        self._stop = threading.Event()
        self._run = threading.Event()
        self._run.set()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the threads."""
        if self._thread is not None:
            raise FailedPrecondition("ingest has been started already")
        self._stop.clear()
        self._nice = False
        self._reached.clear()  # stop() set it
        self._thread = threading.Thread(target=self._main, name="petps-ingest", daemon=True)
        self._thread.start()
        self._looked = threading.Event()  # a new one: an old thread may still wait for the log
        self._looker = threading.Thread(
            target=self._look, args=(self._looked,), name="petps-ingest-end", daemon=True
        )
        self._looker.start()

    def stop(self, timeout: float | None = None) -> bool:
        """End the thread after the running apply. Return False if it runs beyond ``timeout``.

        Progress covers what was applied; start() continues from there.
        """
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                return False
            self._thread = None
        looker, self._looker = self._looker, None
        if looker is not None:  # not joined: it is a daemon, and may wait for the log
            self._looked.set()
            self._reached.set()
        return True

    def pause(self) -> None:
        """Stop reading, after handling what was read. Pulls continue. See resume()."""
        self._run.clear()

    def resume(self) -> None:
        """Undo pause()."""
        self._run.set()

    def set_rate(self, rows_per_second: float | None) -> None:
        """Change the rate limit; None removes it."""
        if rows_per_second is not None and rows_per_second <= 0:
            raise InvalidArgument(f"rows_per_second {rows_per_second}: above 0, or None")
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
        self._reached.wait(timeout)
        return self._nice

    def version(self) -> int:
        """Return the highest version that is complete in all owned partitions."""
        states = list(self._states.values())
        return min((state.recorded.version for state in states), default=0)

    def health(self) -> list[PartitionHealth]:
        """Return each partition's health: is it followed, and its lag. Never waits for the log."""
        states = self._known_states()
        return [self._health(state) for state in states]

    def _known_states(self) -> list[PartitionState]:
        """Return the states of all partitions; before reading begins, from the pool's progress."""
        states = dict(self._states)
        for partition in self._partitions:
            if partition not in states:
                recorded = self._instances.owner(partition).progress(partition)
                states[partition] = PartitionState.of(partition, recorded, 0)
        return list(states.values())

    def _health(self, state: PartitionState) -> PartitionHealth:
        owner = self._owners.get(state.partition)
        instance = (owner.store if owner else self._instances.owner(state.partition)).instance
        found = state.health(instance, self._lag.of(state.partition, state.recorded.offset))
        if found.state not in (Mode.FOLLOWING.value, "passing"):
            return found
        troubles = self._troubles
        if owner is None:
            reason = troubles.get("follow", "its log is not read yet")
            return replace(found, state="starting", reason=reason)
        if "apply" in troubles:
            return replace(found, state="blocked", reason=troubles["apply"])
        if away := troubles.get("follow") or troubles.get("end"):
            return replace(found, state="unreachable", reason=away)
        return found

    def _look(self, ended: threading.Event) -> None:
        """Request the log's end about every second, independently of status().

        The first request waits until ingest has reached the end, LOOK_SECONDS at most: after a
        restart, reading the log comes first.
        """
        self._reached.wait(LOOK_SECONDS)
        while not ended.is_set():
            self._ask_for_ends(list(self._states.values()))
            ended.wait(LOOK_SECONDS)

    def _ask_for_ends(self, states: Sequence[PartitionState]) -> None:
        asked_at = time.monotonic()
        try:
            ends = self._log.end_offsets([state.partition for state in states])
        except PetpsError as error:
            self._report("end", str(error))
            return
        except Exception as error:  # it must be reported, and must not end this thread
            self._report("end", f"{type(error).__name__}: {error}")
            return
        self._overcome("end")
        applied = {state.partition: state.recorded.offset for state in states}
        self._lag.note(ends, applied, asked_at)

    def status(self) -> IngestStatus:
        """Return a snapshot of everything. Requests the log's end."""
        states = self._known_states()
        self._ask_for_ends(states)
        followers = list(self._followers.values())
        thread = self._thread
        version, dense = max((each.dense for each in followers), default=(0, None), key=_version)
        refused: dict[str, int] = {}
        for state in states:
            if state.full is not None and state.full.table:
                refused[state.full.table] = refused.get(state.full.table, 0) + state.full.rows
        applied = min((state.recorded.version for state in states), default=0)
        return IngestStatus(
            running=thread is not None and thread.is_alive(),
            paused=not self._run.is_set(),
            model=self._store.model,
            log=self._log.name,
            error="; ".join(dict.fromkeys(self._troubles.values())),
            errors=self._errors,
            rows=sum(state.rows for state in states),
            records=sum(state.records for state in states),
            refused=refused,
            version=applied,
            dense=dense if version == applied else None,
            freshness=freshness_of(*(s.samples for s in states)) if states else Freshness(),
            partitions=[
                state.status(self._lag.end(state.partition), self._health(state))
                for state in states
            ],
        )

    def _main(self) -> None:
        wait = RETRY_FIRST_SECONDS
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._follow()
            except _Stopped:
                return
            except _Left:
                _log.info("[ingest] an instance was frozen or dropped: going on without it")
                self._overcome("apply")
            except Exception as error:  # any error must be reported, and must not end ingest
                if time.monotonic() - began > RETRY_LAST_SECONDS:
                    wait = RETRY_FIRST_SECONDS
                _log.error(
                    "[ingest] %s; going on from the recorded progress in %.1f s",
                    error,
                    wait,
                    exc_info=not isinstance(error, PetpsError),
                )
                self._report("follow", f"{type(error).__name__}: {error}")
                self._stop.wait(wait)
                wait = min(2 * wait, RETRY_LAST_SECONDS)

    def _follow(self) -> None:
        """Follow the log from the recorded progress on, until stop()."""
        with ExitStack() as stack:
            applier = self._applier = ThreadApplier()
            self._nice = False  # the applying thread is a new one
            stack.callback(applier.close)
            stack.callback(self._close_followers)
            self._load_states()
            self._held.clear()
            positions = {p: state.offset for p, state in self._states.items()}
            subscription = self._log.subscribe(positions)
            stack.callback(subscription.close)
            look = time.monotonic()
            while not self._stop.is_set():
                if not self._run.wait(POLL_SECONDS):
                    continue
                self._check_live()
                self._poll(subscription)
                if time.monotonic() >= look:
                    for follower in list(self._followers.values()):
                        follower.retry_stale()
                    look = time.monotonic() + self._stale_seconds
                self._catch_up(subscription)
                self._retry_full(subscription)

    def _retry_full(self, subscription: Subscription) -> None:
        for follower in list(self._followers.values()):
            for partition, offset in follower.retry_full().items():
                subscription.seek(partition, offset)

    def _close_followers(self) -> None:
        for follower in self._followers.values():
            follower.close()

    def _load_states(self) -> None:
        """Create states and followers from the recorded progress; counters and samples go on."""
        starts = self._log.start_offsets(self._partitions)
        states: dict[int, PartitionState] = {}
        stores: dict[str, InstanceTables] = {}
        by_instance: dict[str, dict[int, PartitionState]] = {}
        for partition in self._partitions:
            store = self._instances.owner(partition)
            store = stores.setdefault(store.instance, store)
            state = self._state(partition, store, starts[partition])
            states[partition] = by_instance.setdefault(store.instance, {})[partition] = state
        followers = {name: self._follower(stores[name], of) for name, of in by_instance.items()}
        self._followers = followers
        self._owners = {p: each for each in followers.values() for p in each.partitions}
        self._states = states
        self._whole = False

    def _state(self, partition: int, store: InstanceTables, start: int) -> PartitionState:
        state = PartitionState.of(partition, store.progress(partition), start)
        earlier = self._states.get(partition)
        if state.recorded.standing.needs_base:
            self._lag.forget(partition)
        if earlier is not None:
            state.take_counters(earlier)
        return state

    def _follower(self, store: InstanceTables, states: dict[int, PartitionState]) -> Follower:
        follower = Follower(
            store,
            self._bases,
            self._dead_letters,
            states,
            rows_max=self._rows_max,
            pace=self._pace,
            until_done=self._until_done,
            applier=self._applier,
            hand_over=self._hand_over,
        )
        follower.dense = self._dense.of(store.instance)
        return follower

    def _hand_over(self, state: PartitionState, marker: BaseMarker, offset: int) -> bool:
        """Give a partition to the follower of the marker's instance, and create it if necessary.

        See Follower.
        """
        if self._bases is None or marker.instance is None:
            raise PetpsError("no checkpoint folder is configured to read it from")
        partition = state.partition
        base = self._bases.open(marker.location)
        store = self._instances.begin(marker.instance, base, marker.header.run)
        if store is None:
            return False
        follower = self._followers.get(store.instance) or self._follower(store, {})
        heir = self._state(partition, store, offset)
        self._followers[store.instance] = self._owners[partition] = follower
        self._states[partition] = heir
        self._whole = False
        follower.adopt(heir, marker, offset)
        return True

    def _check_live(self) -> None:
        """Raise _Left if an instance was frozen or dropped. Report an instance that is complete."""
        for name, follower in list(self._followers.items()):
            if not follower.partitions:
                del self._followers[name]
            elif not follower.store.live():
                raise _Left
        if not self._whole and len(self._followers) == 1:
            states = self._states.values()
            if all(
                state.following and state.full is None and not state.recorded.standing.needs_base
                for state in states
            ):
                self._whole = True
                self._instances.complete(next(iter(self._followers.values())).store)

    def _poll(self, subscription: Subscription) -> None:
        busy = any(follower.catching_up for follower in self._followers.values())
        at_once = busy or self._reading
        events = subscription.poll(
            max_bytes=self._poll_bytes, timeout=0.0 if at_once else POLL_SECONDS
        )
        self._reading = bool(events) and not self._nice
        self._overcome("follow")
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
            self._dense.note(follower.store.instance, follower.dense)
        subscription.observe({p: state.recorded.offset for p, state in self._states.items()})

    def _yield_to_pulls(self) -> None:
        """Lower the priority of this thread and of the applying one, so that pulls come first.

        Do so only once the log's end is reached: after a restart the newest version comes first.
        """
        if not self._nice:
            self._nice = True
            self._reached.set()
            _be_nice()
            self._applier.submit(_be_nice)

    def _catch_up(self, subscription: Subscription) -> None:
        """Run one catch-up step of each follower, between two polls."""
        for follower in list(self._followers.values()):
            for partition in set(follower.catching_up) - self._held:
                subscription.pause(partition)
                self._held.add(partition)
            for partition, offset in follower.step().items():
                if offset is not None:
                    subscription.seek(partition, offset)
                subscription.resume(partition)
                self._held.discard(partition)
            self._dense.note(follower.store.instance, follower.dense)

    def _until_done(self, action: Callable[[], None]) -> None:
        """Repeat an action of the pool until it succeeds. Raises _Stopped if stop() comes first."""
        wait = RETRY_FIRST_SECONDS
        while True:
            try:
                action()
                self._overcome("apply")
                return
            except PetpsError as error:
                if not all(each.store.live() for each in list(self._followers.values())):
                    raise _Left from error
                self._report("apply", f"apply: {error}")
                _log.error("[ingest] apply failed, trying again in %.1f s: %s", wait, error)
            if self._stop.wait(wait):
                raise _Stopped
            wait = min(2 * wait, RETRY_LAST_SECONDS)

    def _report(self, where: str, error: str) -> None:
        with self._troubles_lock:
            # A new dict, because status() reads it without the lock.
            self._troubles = {**self._troubles, where: error}
            self._errors += 1
        self._reached.set()  # wake wait_for_end(): the end may never be reached

    def _overcome(self, where: str) -> None:
        with self._troubles_lock:
            if where in self._troubles:
                self._troubles = {w: text for w, text in self._troubles.items() if w != where}

    def _pace(self, rows: int) -> None:
        """Wait as the rate limit requires after ``rows``. Raises _Stopped if stop() comes first."""
        rate = self._rows_per_second
        if rate is None:
            return
        now = time.monotonic()
        # The time of the work itself counts as waiting; otherwise the rate is never reached.
        self._not_before = max(now - PACE_CREDIT_SECONDS, self._not_before) + rows / rate
        while now < self._not_before:
            if self._stop.wait(min(POLL_SECONDS, self._not_before - now)):
                raise _Stopped
            now = time.monotonic()


def _be_nice() -> None:
    own = threading.get_native_id()
    with suppress(OSError):  # without the permission, ingest runs at its old priority
        niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, own))
        os.setpriority(os.PRIO_PROCESS, own, niceness)


def _version(dense: tuple[int, str | None]) -> int:
    return dense[0]
