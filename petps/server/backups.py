"""Backups of a serving pool: on request, and by the schedule of [backup]. petps/pool/BACKUP.md."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from petps import _native
from petps.config import Config
from petps.errors import FailedPrecondition, NotFound, PetpsError, Unavailable
from petps.log import ERROR, WARNING, Line

if TYPE_CHECKING:
    from petps.pool.backup_info import ProgressFacts
    from petps.pool.export import Bar
    from petps.server.ingest_part import IngestPart

__all__ = ["Backups"]

# How long ingest may take to end its batch. Longer: a table is full, or the log does not answer.
HOLD_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 300.0  # after a failure, unless the next backup is due sooner
# States of a partition of which nothing is applied that its progress does not cover.
SETTLED: Final = ("following", "passing", "unreachable", "starting")


class Backups:
    """Writes backups, one at a time; with [backup] store, in a thread until close().

    ingest: returns the running ingest, or None.
    """

    def __init__(
        self,
        config: Config,
        tables: _native.Tables,
        log: Callable[[str], None],
        *,
        ingest: Callable[[], IngestPart | None],
    ) -> None:
        self._config, self._tables, self._log, self._ingest = config.backup, tables, log, ingest
        self._store = config.backup_store()
        self._model = config.backup.model or config.model.name
        self._one = threading.Lock()  # held while a backup is written
        self._stopping = threading.Event()
        self._changed = threading.Event()  # the schedule has changed, or the server stops
        self._last: dict[str, Any] | None = None
        self._newest_at: float | None = None  # of the store, as the schedule has found it
        self._error: str | None = None
        self._failures = self._written = 0
        self._thread: threading.Thread | None = None
        if self._store is not None:
            self._thread = threading.Thread(
                target=self._run_schedule, args=(self._store,), name="petps-backup",
                daemon=True,
            )  # fmt: skip
            self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return plain values for the status: of the schedule, or without one, of any backup."""
        last = self._last
        return {
            "store": self._store,
            "every_seconds": self._config.every_seconds() if self._store else 0,
            "running": self._one.locked(),
            "last": last,
            "newest_at": self._newest_at if last is None else last["finished_at"],
            "error": self._error,
            "warnings": [] if last is None else last["warnings"],
            "failures": self._failures,
            "written": self._written,
        }

    def configure(self, config: Config) -> None:
        """Use this ``every`` and ``keep`` from now on."""
        if config.backup != self._config:
            self._config = config.backup
            self._changed.set()

    def close(self) -> None:
        """Stop. A backup in progress is cancelled; the next one makes up for it."""
        self._stopping.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join()

    def run(
        self,
        store: str,
        model: str | None,
        *,
        full: bool = False,
        bar: Bar | None = None,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> dict[str, Any]:
        """Write a backup, and return facts about it. Raise the errors of Pool.back_up().

        Raise FailedPrecondition if another one is being written.
        """
        from petps.pool import Pool
        from petps.pool.backup import back_up
        from petps.pool.export import no_bar

        if not self._one.acquire(blocking=False):
            raise FailedPrecondition("another backup is being written: wait until it has ended")
        try:
            _native.lower_priority()
            instance = Pool(self._tables, is_borrowed=True).backed_up(model)
            positions = _positions_of(store)
            report = back_up(
                self._tables, instance, store,
                full=full, hold=self._hold, bar=bar or no_bar,
                goes_on=lambda: goes_on() and not self._stopping.is_set(),
            )  # fmt: skip
            if (warning := self._check_log(positions)) is not None:
                report["warnings"].append(warning)
            if self._store in (None, store):
                self._last = report | {"finished_at": time.time()}
                self._error = None
                self._written += 1
            return report
        finally:
            self._one.release()

    @contextlib.contextmanager
    def _hold(self, goes_on: Callable[[], bool]) -> Iterator[Callable[[], None]]:
        ingest = self._ingest()
        with nullcontext() if ingest is None else ingest.ingest.held(HOLD_SECONDS, goes_on):
            self._check_is(ingest)
            if ingest is not None:
                _check_applied(ingest)
            yield partial(self._check_is, ingest)

    def _check_is(self, ingest: IngestPart | None) -> None:
        if self._ingest() is not ingest:
            raise Unavailable("the shard map changed during the backup: back up again")

    def _check_log(self, positions: list[ProgressFacts]) -> str | None:
        """Return a warning if the log has lost what follows the backup before the last one."""
        from petps.pool.restore import LogCheck

        ingest = self._ingest()
        if ingest is None or not positions:
            return None
        try:
            return LogCheck.of(ingest.log, positions).warning
        except PetpsError as error:
            return f"whether the log still follows the backup before is not known: {error}"

    # ---- the schedule

    def _run_schedule(self, store: str) -> None:
        logged, wait = "", 0.0
        while not self._stopping.is_set():
            if wait > 0 and self._changed.wait(wait):
                self._changed.clear()
                wait = 0.0
                continue
            every = self._config.every_seconds()
            try:
                wait = self._seconds_to_next(store, every)
                if wait > 0:
                    continue
                report = self.run(store, self._model)
                report["warnings"] += self._drop_old(store)
                wait, logged = every, ""
                text = (
                    f"backup {report['version']} of {report['instance']} ({report['kind']}, "
                    f"{report['rows_written']} rows, {report['bytes']} bytes) in "
                    f"{report['seconds']:.1f} s to {report['store']}"
                )
                version = report["version"]
                self._log(Line(text, "backup_written", version=version, store=report["store"]))
                for warning in report["warnings"]:
                    text = f"backup {version}: {warning}"
                    self._log(Line(text, "backup_warning", WARNING, version=version))
            except Exception as error:  # report any error, but continue to serve
                if self._stopping.is_set():
                    return
                self._failures += 1
                self._error = f"{type(error).__name__}: {error}"
                if str(error) != logged:
                    logged = str(error)
                    self._log(Line(f"no backup was made: {error}", "backup_failed", ERROR))
                wait = min(every, RETRY_SECONDS)

    def _seconds_to_next(self, store: str, every: int) -> float:
        """Return how long the newest backup is young enough; 0: there is none."""
        from petps.checkpoint import Store
        from petps.pool.restore import find_backup

        try:
            newest = find_backup(Store.open(store))
        except PetpsError:  # none yet; or the backup fails too, and is counted
            return 0.0
        self._newest_at = newest.created_ns / 1e9
        age = time.time() - self._newest_at
        return max(0.0, every - age) if age >= 0 else 0.0  # else a clock was ahead

    def _drop_old(self, store: str) -> list[str]:
        """Drop the backups that `keep` does not name. Return why that failed, in a list."""
        if self._config.keep is None:
            return []
        from petps.checkpoint import Store
        from petps.checkpoint.retention import Retention

        try:
            opened = Store.open(store)
            retention = Retention.parse(self._config.keep)
            opened.drop_all_but(retention.choose(opened.state.versions(), time.time_ns()))
        except PetpsError as error:
            return [f"old backups were not deleted: {error}"]
        return []


def _check_applied(ingest: IngestPart) -> None:
    """Raise FailedPrecondition if rows of a partition are not those of its progress."""
    for partition in ingest.health():
        if partition.state not in SETTLED:
            raise FailedPrecondition(
                f"partition {partition.partition} is {partition.state} ({partition.reason}), so "
                "its rows are not those of one position of the log: back up once `petps status` "
                "shows that it follows"
            )


def _positions_of(store: str) -> list[ProgressFacts]:
    from petps.pool.restore import progress_of

    try:
        return list(progress_of(store))
    except NotFound:
        return []
