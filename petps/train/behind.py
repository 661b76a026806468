"""Work behind the training: one version at a time in a thread, and its outcome.

Owns:        Behind, Outcome, Written, Attempts; the work in them that needs no RankedOutput;
             LogSender and PatientLog, which bring rows to the log.
Never does:  decide what is due; make the training wait, except while rows are copied.
Called by:   ranks.py.
Invariants:  an outcome is taken once, by the trainer's thread.
Threads:     one for each work, which neither the training nor the end of the process waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from petps.checkpoint import Column, Stager, Table
from petps.checkpoint.checkpointer import Decision
from petps.checkpoint.commits import Commits
from petps.checkpoint.flight import start_thread
from petps.checkpoint.stages import copy_in_slices
from petps.checkpoint.state import Version
from petps.checkpoint.state_files import describe_tables
from petps.errors import ResourceExhausted, Unavailable
from petps.publish import Position, Publisher
from petps.train.agree import Failure, describe, meet
from petps.train.link import Link
from petps.train.lone import Tables
from petps.train.source import CHECKPOINT
from petps.train.stages import give_way
from petps.train.table import ROW, Keys, Mask, widths_of
from petps.train.tracker import Reading

__all__ = [
    "GIVE_UP_AFTER_SECONDS",
    "Attempts",
    "Behind",
    "LogSender",
    "Outcome",
    "PatientLog",
    "Written",
    "choose_tables",
    "settling",
    "shared_by_ranks",
    "wait_for_all",
]

# The pause before a failed version, or an append without space, is tried again. It doubles from the
# first to the last, which is shorter than the limit of a link.
FIRST_PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 20.0
# The default for how long a version, or an append without space, is tried again.
GIVE_UP_AFTER_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True)
class Written:
    """A version that exists now. kind: "checkpoint" (of the store) or "publish" (of the log).

    step: the step whose rows it has. version: its number, in the store the step. begin: when its
    rows were copied, in seconds of time.monotonic().
    """

    kind: str
    step: int
    version: int
    begin: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a version that was in flight.

    kind: see Written. failure: the same on all ranks, or None. error: this rank's own. entry: in
    the store. position: of the log's publisher, just after the commit. is_open: a version of the
    store that failed may exist nevertheless. commits: of the log, with this version.
    """

    kind: str
    step: int
    failure: Failure | None = None
    error: BaseException | None = None
    entry: Version | None = None
    position: Position | None = None
    is_open: bool = False
    commits: Commits | None = None

    def explain(self) -> str:
        """Return as text what failed."""
        what = (
            "no checkpoint was written" if self.kind == CHECKPOINT else "the log's version failed"
        )
        return f"step {self.step}: {what}: {'' if self.failure is None else self.failure.text}"


class Behind:
    """One kind of versions, of which one at a time is in flight."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._outcome: Future[Outcome] | None = None

    def begin(self, step: int, work: Callable[[], Outcome]) -> Future[Outcome]:
        """Do the work in a thread. The outcome before must have been taken."""
        assert self._outcome is None
        outcome: Future[Outcome] = Future()
        self._outcome = outcome

        def run() -> None:
            try:
                give_way()
                outcome.set_result(work())
            except BaseException as error:  # for example a peer that is gone
                failure = Failure(describe(error), is_final=True)
                outcome.set_result(Outcome(self._kind, step, failure, error))

        try:
            start_thread(run, f"petps-train-{self._kind}")
        except BaseException:
            self._outcome = None
            raise
        return outcome

    @property
    def is_idle(self) -> bool:
        """Return whether no version is in flight and no outcome is left."""
        return self._outcome is None

    @property
    def is_busy(self) -> bool:
        """Return whether a version is in flight."""
        return self._outcome is not None and not self._outcome.done()

    @property
    def has_outcome(self) -> bool:
        """Return whether take() would return an outcome at once."""
        return self._outcome is not None and self._outcome.done()

    @property
    def has_failed(self) -> bool:
        """Return whether take() would return a failure at once."""
        outcome = self._outcome
        return outcome is not None and outcome.done() and outcome.result().failure is not None

    def wait(self) -> None:
        """Wait until no version is in flight."""
        if self._outcome is not None:
            self._outcome.result()

    def take(self) -> Outcome | None:
        """Wait until no version is in flight; return the outcome of the last one, once."""
        outcome, self._outcome = self._outcome, None
        return None if outcome is None else outcome.result()


def choose_tables(link: Link, decision: Decision, chosen: Future[Mapping[str, Table]]) -> None:
    """Let all ranks have what rank 0's ``decision`` chooses: the result of ``chosen``, or an error.

    Raises the errors of the link, which ``chosen`` has too.
    """
    tables: dict[str, Any] = {}
    error: BaseException | None = None
    try:
        if decision.choose is not None:
            tables["tables"] = describe_tables(decision.choose())
    except BaseException as raised:
        error = raised
    try:
        failure, facts = meet(link, Failure.of(error), tables)
        if failure is not None:
            chosen.set_exception(error or Unavailable(failure.text))
        else:
            chosen.set_result(facts[0].get("tables", {}))
    except BaseException as raised:
        chosen.set_exception(raised)
        raise


def shared_by_ranks(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what all ranks give Publisher.commit(), from the facts of each rank."""
    counts = [own["counted"] for own in facts]
    names = sorted({name for count in counts for name in count})
    return {
        "dense": facts[0].get("dense"),
        "everywhere": {name: sum(count.get(name, 0) for count in counts) for name in names},
        "time_ns": facts[0]["time_ns"],
    }


@contextmanager
def settling(done: Future[None]) -> Iterator[None]:
    """Give ``done`` the end of the block. Of errors only those leave it that are no Exception."""
    try:
        yield
    except BaseException as error:
        done.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        done.set_result(None)


def wait_for_all(*waits: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Call all of them; return what the last one returned, and the first error."""
    value, error = None, None
    for wait in waits:
        try:
            value = wait()
        except BaseException as raised:
            value, error = None, error or raised
    return value, error


class Attempts:
    """The attempts to write versions of one kind: when to try again, and when to give up."""

    def __init__(self, give_up_after: float) -> None:
        self._give_up_after = give_up_after
        self._failing_since: float | None = None
        self._pause = 0.0
        self.next_at = 0.0
        """The time from which the next version may begin, in seconds of time.monotonic()."""

    def succeed(self) -> None:
        """Note that a version exists."""
        self._failing_since, self._pause = None, 0.0

    def fail(self) -> bool:
        """Note a failed version; return whether to try again."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        self._pause = min(2 * self._pause or FIRST_PAUSE_SECONDS, PAUSE_SECONDS_MAX)
        self.next_at = now + self._pause
        return now - self._failing_since < self._give_up_after


class LogSender:
    """A sender of the rows of a reading to a publisher: copied at once, published behind."""

    def __init__(self, tables: Tables, folder: Path, chunk_bytes: int) -> None:
        self._tables = {table.name: table for table in tables}
        self._reading: Reading | None = None
        columns = {
            table.name: Table(table.name, (Column(ROW, "f32", widths_of(table)[ROW]),))
            for table in tables
        }
        self._stager = Stager(
            columns, self, folder, chunk_bytes=chunk_bytes, prepare_thread=give_way
        )

    def send(self, reading: Reading, publisher: Publisher, step: int) -> None:
        """Copy the rows and return; wait() returns when the publisher has them."""

        def publish(
            table: str, keys: Keys, columns: Mapping[str, Any], deleted: Mask | None
        ) -> None:
            publisher.publish(table, keys, columns[ROW], deleted, step=step)

        self._reading = reading
        self._stager.send_to(publish)

    def wait(self) -> None:
        """Wait until the publisher has all rows. Raise the publisher's errors, IoError."""
        self._stager.wait()

    def cancel(self) -> None:
        """Stop sending: wait() raises FailedPrecondition."""
        self._stager.cancel()

    def close(self) -> None:
        """Wait, and empty the folder."""
        self._stager.close()

    def keys(self, table: str, since: int | None, at_most: int) -> Iterator[Keys]:
        """See Device."""
        del since
        assert self._reading is not None
        keys = self._tables[table].keys_of(self._reading.ids(table))
        for start in range(0, len(keys), at_most):
            yield keys[start : start + at_most]

    def copy(self, table: str, keys: Keys, out: Mapping[str, Any]) -> Mask | None:
        """See Device."""

        def copy_slice(part: Keys, target: Mapping[str, Any]) -> Mask | None:
            gathered = self._tables[table].gather(part)
            target[ROW][:] = gathered.columns[ROW]
            return gathered.deleted

        return copy_in_slices(copy_slice, keys, out)


class PatientLog:
    """A DeltaLog that repeats an append that had no space, for ``give_up_after`` seconds.

    Such an append leaves nothing behind. A log of Kafka waits for its broker by itself, for the
    option message.timeout.ms. stop_waiting() makes the waiting end at once.
    """

    def __init__(self, log: Any, give_up_after: float) -> None:
        self._log = log
        self._give_up_after = give_up_after
        self._is_over = threading.Event()

    def stop_waiting(self) -> None:
        """Raise what an append without space raises, now and from now on."""
        self._is_over.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def publish(self, partition: int, message: Any) -> None:
        """See DeltaLog."""
        deadline = time.monotonic() + self._give_up_after
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                self._log.publish(partition, message)
                return
            except ResourceExhausted:
                if time.monotonic() + pause > deadline or self._is_over.wait(pause):
                    raise
                pause = min(2 * pause, PAUSE_SECONDS_MAX)
