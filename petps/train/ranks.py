"""Versions of tables that several ranks hold, written behind the training (PIPELINE.md).

Owns:        RankedOutput (a hook of Pipeline).
Never does:  train; know a policy, or the kind of the log.
Called by:   trainers, demo.
Invariants:  a version exists in the store once every rank has written its share, and in the log
             once the log has acknowledged every rank's rows. A rank acknowledges what it read of
             the tracker only once the version exists. All ranks begin and end the same versions
             after the same steps, as rank 0 decides.
Threads:     the pipeline's caller; a version in flight has threads of its own (behind.py).
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from petps.checkpoint import Policy, SourceDevice, StagedCheckpointer, Store, Table
from petps.checkpoint.checkpointer import Decision
from petps.checkpoint.policy import LeftToOthers
from petps.checkpoint.published import Published
from petps.checkpoint.shares import commit_shares, discard_share
from petps.checkpoint.stages import CHUNK_BYTES
from petps.checkpoint.state import Version
from petps.errors import FailedPrecondition, InvalidArgument, PetpsError, Unavailable
from petps.publish import Position, Publisher
from petps.train.agree import Failure, describe, fail_together, gather_bytes, meet
from petps.train.behind import (
    GIVE_UP_AFTER_SECONDS,
    Attempts,
    Behind,
    LogSender,
    Outcome,
    PatientLog,
    Written,
    choose_tables,
    settling,
    shared_by_ranks,
    wait_for_all,
)
from petps.train.dense import copy_dense
from petps.train.link import Links
from petps.train.lone import Tables
from petps.train.output import PUBLISH, LazyParts, check_followed, check_stored, owe, track_again
from petps.train.pipeline import Boundary
from petps.train.plan import Plan
from petps.train.restored import Parts, Restored, find_newest, find_owed, load_rows
from petps.train.runs import begin_run, check_bases
from petps.train.schedule import Every
from petps.train.source import CHECKPOINT, TrackedSource
from petps.train.stages import give_way
from petps.train.stamps import Stamps
from petps.train.timeline import Span, Timeline

__all__ = ["RankedOutput", "Restored", "Written"]

_log = logging.getLogger("petps.train")
# How often work behind the training looks whether the training ends with an error.
LEAVE_SECONDS: Final = 0.2


class RankedOutput:
    """A writer of all ranks' rows to a checkpoint store and to a log, behind the training.

    Training waits only while the rows of a version are copied. Every rank has a RankedOutput, with
    the same arguments except its own ``tables``, ``links``, a handle of the same store, and a
    publisher_of() the same run. Use ``with``, or call close(). First call restore() and, with a
    publisher, begin_run(). A loop that is not a Pipeline's calls after() after each step; it may
    have LoneTables.

    Args:
        tables: This rank's tables.
        links: The links to the other ranks.
        store: The store, of open_store().
        policy: How its versions are written.
        checkpoint: When a version of the store is due; its number is its step. With a publisher,
            each has a version of the log of the same step.
        publisher: The publisher of the log.
        publish: When a version of the log is due.
        model: The dense part of a store's version is that of rank 0.
        optimizer: The optimizer of the model, or None.
        dense: dense(step, state) stores ``state``, a copy of model.state_dict(), for a version of
            the log, and returns its location. Called on rank 0 in a thread.
        staging: A folder on a local SSD in which copied rows wait; None: a temporary folder.
        chunk_bytes: The size of each of the four buffers of the store's rows, and of the log's.
        bases: A folder that servers read, for begin_run(). A quantised store needs it.
        give_up_after: Seconds for which a version that failed is tried again, before training
            stops with the error. The next version has the rows of the failed one. After an error
            of the log itself training stops at once, because its run cannot continue.
        arrange: Whether rank 0 splits and merges behind each version; False: another process does,
            and writes the bases that are due (`petps checkpoint tend`).
        on_version: Called in a thread for each version, once it exists.
        timeline: Receives the spans "copy" (training waits), and "publish", "store" and "quantise"
            (behind it).

    Of each kind one version is in flight at a time. If it is unfinished when the next one is due,
    the next one begins after it and holds the rows of both.
    """

    def __init__(
        self,
        tables: Tables,
        links: Links,
        *,
        store: Store | None = None,
        policy: Policy | None = None,
        checkpoint: Every | None = None,
        publisher: Publisher | None = None,
        publish: Every | None = None,
        model: Any = None,
        optimizer: Any = None,
        dense: Callable[[int, Mapping[str, Any]], str] | None = None,
        staging: str | Path | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        bases: str | Path | None = None,
        give_up_after: float = GIVE_UP_AFTER_SECONDS,
        arrange: bool = True,
        on_version: Callable[[Written], None] = lambda _: None,
        timeline: Timeline | None = None,
    ) -> None:
        if (store is None) != (policy is None) or (checkpoint is not None and store is None):
            raise InvalidArgument("checkpoints need both a store and a policy")
        if publish is not None and publisher is None:
            raise InvalidArgument("publish needs a publisher")
        if dense is not None and model is None:
            raise InvalidArgument("dense needs the model whose state it stores")
        check_bases(store, publisher, bases)
        tables.expect_versions(None if checkpoint is None else checkpoint.steps)
        self._tables, self._links, self._link = tables, links, links.dense
        self._store = store
        self._schedules = {CHECKPOINT: checkpoint, PUBLISH: publish}
        self._last_times = dict.fromkeys(self._schedules, time.monotonic())
        self._due: set[str] = set()
        self._noted_step = -1
        self._last: Boundary | None = None
        self.publisher = publisher
        self._model, self._optimizer, self._dense = model, optimizer, dense
        self._arranges, self._on_version = arrange, on_version
        self._timeline = timeline or Timeline()
        self._attempts = {kind: Attempts(give_up_after) for kind in self._schedules}
        self._own_error: BaseException | None = None
        self._is_leaving = threading.Event()
        self._behind = {kind: Behind(kind) for kind in (PUBLISH, CHECKPOINT)}
        self._bases = None if bases is None else Path(bases)
        self._is_temporary = staging is None
        self._folder = Path(staging or tempfile.mkdtemp(prefix="petps-staging-"))
        folder = self._folder / f"rank-{links.dense.rank}"
        self._follows: int | None = None  # see check_followed(); of rank 0
        self._source: TrackedSource | None = None
        self._staged: StagedCheckpointer | None = None
        self._stamps = Stamps(tables.tracker, tables, store)
        if store is not None and policy is not None:
            check_stored(store, tables)
            policy = policy if arrange else LeftToOthers(policy)
            self._source = TrackedSource(
                tables.tracker, tables, owns=lambda _, keys: tables.owns(keys), stamps=self._stamps
            )  # fmt: skip
            self._staged = StagedCheckpointer(
                store, policy, SourceDevice(self._source, store.state.tables), folder / CHECKPOINT,
                chunk_bytes=chunk_bytes, prepare_thread=give_way,
            )  # fmt: skip
        self._log_sender: LogSender | None = None
        self._reading: Any = None
        if publisher is not None:
            tables.tracker.add_tenant(PUBLISH)
            self._log_sender = LogSender(tables, folder / PUBLISH, chunk_bytes)

    # ---- as a hook

    def wants(self, step: int) -> bool:
        """See Hook. Only rank 0's clock counts."""
        if self._link.rank != 0:
            return False
        self._note_due(step)
        has_failed = any(behind.has_failed for behind in self._behind.values())
        in_flight = {kind for kind, behind in self._behind.items() if behind.is_busy}
        return has_failed or bool(self._find_ready(in_flight))

    def act(self, boundary: Boundary) -> None:
        """See Hook. Begins what is due, and raises on all ranks what failed for good."""
        self._note_due(boundary.step)
        self._act(boundary)

    def end(self, boundary: Boundary) -> None:
        """See Hook. Writes what is still due; returns when no version is in flight."""
        while True:
            self.wait()
            for kind in self._due:
                time.sleep(max(0.0, self._attempts[kind].next_at - time.monotonic()))
            gather_bytes(self._links.store, b"")  # arranging may take rank 0 longer than a step
            if not self._act(boundary):
                return

    def after(self, step: int, reader: bytes = b"") -> None:
        """Begin what is due after a step of a training in one process, without a Pipeline.

        Call it between two steps. reader: the state of the loader, which restore() returns. Raises
        Unavailable if a version failed for good.
        """
        if self._link.world != 1:
            raise FailedPrecondition(
                f"after() is for one rank, got {self._link.world}: pass this output as a hook of a "
                "Pipeline, which asks all ranks"
            )
        self._last = Boundary(step, reader)
        if self.wants(step):
            self.act(self._last)

    def wait(self) -> None:
        """Wait until this rank has no version in flight."""
        for behind in self._behind.values():
            behind.wait()

    def close(self) -> None:
        """Wait for the versions in flight. Raises Unavailable if one of them failed.

        After the last step that after() was given, also write what is still due.
        """
        last, self._last = self._last, None
        if last is not None:
            self.end(last)
        self.wait()
        outcomes = self._settle(tuple(self._behind))
        self._close_stagers()
        for outcome in outcomes:
            if outcome.failure is not None:
                raise Unavailable(outcome.explain()) from outcome.error

    def __enter__(self) -> RankedOutput:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.close()
            return
        # The other ranks learn of it; this one does not wait for them.
        self._is_leaving.set()
        if self.publisher is not None and isinstance(self.publisher.log, PatientLog):
            self.publisher.log.stop_waiting()
        for sender in (self._staged, self._log_sender):
            if sender is not None:
                sender.cancel()
        try:
            self._close_stagers()
        except PetpsError as error:
            _log.warning("[train] the version in flight was given up: %s", error)

    def _close_stagers(self) -> None:
        errors: list[PetpsError] = []
        for sender in (self._staged, self._log_sender):
            try:
                if sender is not None:
                    sender.close()
            except PetpsError as error:
                errors.append(error)
        if self._is_temporary:
            shutil.rmtree(self._folder, ignore_errors=True)
        if errors:
            raise errors[0]

    # ---- what begins and ends at a boundary

    def _note_due(self, step: int) -> None:
        if self._link.rank != 0 or step == self._noted_step:
            return
        self._noted_step = step
        now = time.monotonic()
        for kind, schedule in self._schedules.items():
            if schedule is not None and schedule.is_due(step, now - self._last_times[kind]):
                self._due.add(kind)

    def _find_ready(self, in_flight: set[str]) -> set[str]:
        """Return the kinds that are due and can begin now."""
        now = time.monotonic()
        can_begin = {
            kind
            for kind, attempts in self._attempts.items()
            if kind not in in_flight and now >= attempts.next_at
        }
        ready = self._due & can_begin
        if PUBLISH not in can_begin:
            ready.discard(CHECKPOINT)
        elif CHECKPOINT in ready and self.publisher is not None:
            ready.add(PUBLISH)
        return ready

    def _act(self, boundary: Boundary) -> bool:
        """Execute rank 0's plan; return whether a version began or is due."""
        plan = self._agree(boundary.step)
        if self._link.rank != 0:
            self._settle(plan.ended)
        if plan.failure:
            raise Unavailable(plan.failure) from self._own_error
        if plan.publish or plan.next is not None:
            with self._timeline.span("compute", "copy", boundary.step):
                self._begin(boundary, plan)
        return plan.publish or plan.next is not None or plan.is_due

    def _begin(self, boundary: Boundary, plan: Plan) -> None:
        dense = None
        needs_dense = plan.next is not None or (plan.publish and self._dense is not None)
        if self._link.rank == 0 and self._model is not None and needs_dense:
            dense = copy_dense(self._model, self._optimizer)
        log_outcome = self._begin_log(boundary.step, plan, dense) if plan.publish else None
        if plan.next is not None:
            self._begin_store(boundary, plan.next, log_outcome, dense)

    def _agree(self, step: int) -> Plan:
        """Agree on what has ended and on what begins: rank 0 decides and sends it to all."""
        plan: Plan | None = None
        if self._link.rank == 0:
            ended = tuple(kind for kind, behind in self._behind.items() if behind.has_outcome)
            failure = self._judge(self._settle(ended))
            in_flight = {kind for kind, behind in self._behind.items() if not behind.is_idle}
            ready = set() if failure else self._find_ready(in_flight)
            decision: Decision | None = None
            if CHECKPOINT in ready and self._staged is not None:
                try:
                    decision = self._staged.next(refresh=False, later=True)
                except PetpsError as error:
                    failure = f"step {step}: rank 0 could not begin a version: {describe(error)}"
                    self._own_error, ready = error, set()
            version = 0 if self.publisher is None else self.publisher.version + 1
            self._due -= ready
            plan = Plan(ended, failure, PUBLISH in ready, version, decision, bool(self._due))
            for kind in ready:
                self._last_times[kind] = time.monotonic()
        sent = gather_bytes(self._link, b"" if plan is None else plan.encode())[0]
        return plan or Plan.decode(sent)  # rank 0's own has what cannot be sent

    def _settle(self, kinds: Iterable[str]) -> list[Outcome]:
        """Acknowledge what the versions of these kinds have, or give it back."""
        outcomes = []
        self._own_error = None
        for kind in kinds:
            outcome = self._behind[kind].take()
            if outcome is None:
                continue
            outcomes.append(outcome)
            self._own_error = outcome.error or self._own_error
            if kind == CHECKPOINT and self._source is not None:
                if outcome.entry is not None and outcome.failure is None:
                    self._source.acknowledge(outcome.entry)
                else:
                    self._source.abandon(outcome.step if outcome.is_open else None)
            elif kind == PUBLISH and self._reading is not None:
                if outcome.failure is None:
                    self._reading.acknowledge()
                else:
                    self._reading.abandon()
        return outcomes

    def _judge(self, outcomes: list[Outcome]) -> str:
        """Return why training stops, or "". A version that failed is due again."""
        for outcome in outcomes:
            attempts, failure = self._attempts[outcome.kind], outcome.failure
            if failure is None:
                attempts.succeed()
                continue
            if not attempts.fail() or failure.is_final:
                return outcome.explain()
            _log.warning("[train] %s; it is tried again", outcome.explain())
            self._due.add(outcome.kind)
        return ""

    # ---- a version of the log

    def _begin_log(self, step: int, plan: Plan, dense: Mapping[str, Any] | None) -> Future[Outcome]:
        assert self._log_sender is not None
        assert self.publisher is not None
        begin = time.monotonic()
        error: Exception | None = None
        self._reading = self._tables.tracker.read(PUBLISH)
        self._stamps.mark_reading(plan.version, self.publisher.rewritten_at, self._reading)
        try:
            self._log_sender.send(self._reading, self.publisher, step)
        except Exception as raised:
            error = raised
        return self._behind[PUBLISH].begin(
            step, lambda: self._finish_log(step, plan.version, begin, dense, error)
        )

    def _finish_log(
        self,
        step: int,
        version: int,
        begin: float,
        dense: Mapping[str, Any] | None,
        error: Exception | None,
    ) -> Outcome:
        """Commit the log's version on this rank, once the log has the rows of all ranks."""
        assert self._log_sender is not None
        assert self.publisher is not None
        publisher, link = self.publisher, self._links.log
        facts: dict[str, Any] = {}
        try:
            self._log_sender.wait()
            if error is None:
                publisher.flush()
                facts |= {"counted": publisher.counted(), "time_ns": time.time_ns()}
                if dense is not None and self._dense is not None:
                    facts["dense"] = self._dense(step, dense["model"])
        except Exception as raised:
            error = raised
        failure, all_facts = meet(link, self._log_failure(error), facts)
        position: Position | None = None
        if failure is None:
            try:
                publisher.commit(version, step, **shared_by_ranks(all_facts))
                position = publisher.position()
                self._stamps.commit(version, publisher.committed_ns)
            except Exception as raised:
                error = raised
            failure, _ = meet(link, self._log_failure(error))
        if failure is None:
            self._timeline.add(Span("log", "publish", step, begin, time.monotonic()))
            self._tell(Written(PUBLISH, step, version, begin))
        commits = self._stamps.commits
        return Outcome(PUBLISH, step, failure, error, position=position, commits=commits)

    def _tell(self, written: Written) -> None:
        try:
            self._on_version(written)
        except Exception:
            _log.exception("[train] on_version failed for %s", written)

    def _log_failure(self, error: Exception | None) -> Failure | None:
        """Return the failure that an error is. After an error of the log its run has ended."""
        assert self.publisher is not None
        return Failure.of(error, is_final=self.publisher.has_failed)

    # ---- a version of the store

    def _begin_store(
        self,
        boundary: Boundary,
        decision: Decision,
        log_outcome: Future[Outcome] | None,
        dense: dict[str, Any] | None,
    ) -> None:
        source, staged = self._source, self._staged
        assert source is not None
        assert staged is not None
        step, rank = boundary.step, self._link.rank
        begin = time.monotonic()
        parts = Parts(rank, self._model, self._optimizer).copy(self._tables, boundary.reader)

        def complete() -> Mapping[str, bytes]:
            """Return all parts. Called when the rows are in the store."""
            parts.update({} if dense is None else Parts.encode(dense))
            commits = None
            if log_outcome is not None:
                commits = self._add_position(parts, log_outcome).commits
            return parts if rank else parts | self._stamps.parts(commits)

        chosen: Future[Mapping[str, Table]] | None = None if decision.tables else Future()
        copied: Future[None] = Future()

        def finish() -> Outcome:
            try:
                if chosen is not None:
                    choose_tables(self._links.store, decision, chosen)
            except BaseException:
                wait_for_all(copied.result, staged.wait)
                raise
            return self._finish_store(step, begin, copied)

        source.begin()
        # Before the copy, which can wait for the stage that encodes, and that for `chosen`.
        self._behind[CHECKPOINT].begin(step, finish)
        with settling(copied):
            staged.share(
                step, decision, rank, self._link.world, LazyParts(complete), replace_own=True,
                chosen=chosen,
            )  # fmt: skip

    def _add_position(self, parts: dict[str, bytes], log_outcome: Future[Outcome]) -> Outcome:
        """Add the log's position to the parts, once its version exists; return its outcome.

        Raise Unavailable if that is tried again, and this version with it. After an error for which
        training stops, the version has no position.
        """
        while not log_outcome.done():
            if self._is_leaving.wait(LEAVE_SECONDS):
                raise Unavailable("the training ends with an error")
        outcome = log_outcome.result()
        if outcome.failure is None and outcome.position is not None:
            parts.update(Published(outcome.position, {}).parts(self._link.rank))
        elif outcome.failure is not None and not outcome.failure.is_final:
            raise Unavailable(outcome.explain())
        return outcome

    def _finish_store(self, step: int, begin: float, copied: Future[None]) -> Outcome:
        """Commit the store's version on rank 0, once all ranks have written their shares."""
        assert self._store is not None
        assert self._staged is not None
        entry: Version | None
        entry, error = wait_for_all(copied.result, self._staged.wait)
        if error is None and entry is None:
            error = FailedPrecondition("the version was cancelled")
        # Whether this version may still appear: it may have been tried before.
        facts = {"open": self._store.may_have_committed, "written": entry and entry.created_ns}
        failure, all_facts = meet(self._links.store, Failure.of(error), facts)
        if failure is None:
            if self._link.rank == 0:
                try:
                    self._store.refresh()
                    check_followed(self._store, self._follows)
                    written = [facts["written"] for facts in all_facts]
                    self._follows = commit_shares(self._store, step, written).created_ns
                except Exception as raised:
                    error = raised
            facts["open"] = self._store.may_have_committed
            failure, all_facts = meet(self._links.store, Failure.of(error), facts)
        if failure is None:
            self._timeline.add(Span("store", "store", step, begin, time.monotonic()))
            for span in self._staged.quantised:
                self._timeline.add(Span("quantise", "quantise", step, *span))
            self._tell(Written(CHECKPOINT, step, step, begin))
            if self._link.rank == 0:
                self._arrange()
        is_open = failure is not None and all_facts[0]["open"]
        if failure is not None and not is_open:
            with contextlib.suppress(PetpsError):  # else purge removes it
                discard_share(self._store, step, self._link.rank)
        return Outcome(CHECKPOINT, step, failure, error, entry=entry, is_open=is_open)

    def _arrange(self) -> None:
        """Split and merge, or only measure. That changes no version, so only log a failure."""
        assert self._staged is not None
        try:
            if self._arranges:
                self._staged.arrange()
            else:
                self._staged.measure()
        except Exception as error:
            _log.warning("[train] arranging the store failed: %s", error)

    # ---- restoring a version

    def restore(self, version: int | None = None) -> Restored:
        """Load the store's newest version: this rank's rows, and the dense part.

        If the store has none, erase all rows of pools, which a training that was killed may have
        left, and return step 0. All ranks call it; their number may differ from when the version
        was written. Rows and counts go to the ranks that own them now. A loader's state and random
        numbers go only to the same rank. Raises FailedPrecondition (not the newest: roll back
        first), DataLoss, and on the other ranks Unavailable, which names the rank that failed; then
        all call it again.
        """
        store, source = self._store, self._source
        if store is None or source is None:
            raise FailedPrecondition("RankedOutput has no store to restore from: give it one")
        self.wait()
        self._settle(tuple(self._behind))
        with fail_together(self._link, "no version was restored"):
            newest = find_newest(store, version)
        with fail_together(self._link, "no version was restored"):
            if newest is None:
                if self._link.rank == 0:
                    store.begin_empty()
                    self._follows = 0
                self._tables.erase()
                return Restored(0, b"", None)
            load_rows(store, newest, self._tables, self._stamps)
            owed = None if self.publisher is None else find_owed(store, newest, self._tables)
            track_again(
                source, store, newest.version, self._tables.tracker, owed,
                lambda: {table.name: table.ids_of(table.keys()) for table in self._tables},
            )  # fmt: skip
            parts = Parts(self._link.rank, self._model, self._optimizer)
            restored = parts.load(store, newest)
        with fail_together(self._link, "no version was restored"):
            if self._link.rank == 0:
                # Last, so that a restore that fails is not counted.
                store.count_restore(newest.version)
                self._follows = newest.created_ns
        return restored

    def begin_run(self, restored: Restored) -> None:
        """Begin the publisher's run from what restore() returned. All ranks call it.

        Servers that follow the log have the trainer's rows afterwards. If it does not continue
        where the log is, or if rows were rounded, the run begins with a base in ``bases``: this
        rank's rows, as float32. Raises as write_base() and Publisher do.
        """
        if self.publisher is None:
            raise FailedPrecondition("RankedOutput has no publisher: give it one")
        if begin_run(self.publisher, self._tables, self._link, restored, self._bases, self._stamps):
            owe(self._tables.tracker, {})  # servers have all rows from the base
        elif not restored.is_exact:
            self._stamps.owe_all()
