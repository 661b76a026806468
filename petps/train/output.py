"""Checkpoints and log from one gather of the rows that a trainer touched.

Owns:        TrainerOutput, LogRows; LazyParts, check_followed(), has_exact_rows(), owe(),
             read_pieces() and track_again(), which ranks.py and restored.py use too.
Never does:  know a policy, or the kind of the log.
Called by:   trainers.
Invariants:  a tenant acknowledges what it read only after the version with those rows is
             committed.
Threads:     one, between two steps; any thread may call cancel().
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps.checkpoint import Checkpointer, Policy, Store
from petps.checkpoint.chunk import RAW
from petps.checkpoint.published import Published
from petps.checkpoint.state import Version
from petps.errors import FailedPrecondition, InvalidArgument, PetpsError
from petps.publish import Position, Publisher
from petps.train.removal import LAST_USE, STEPS_MAX, USES
from petps.train.source import CHECKPOINT, TrackedSource
from petps.train.stamps import Stamps
from petps.train.table import ROW, Gathered, Keys, Mask, TrainedTable
from petps.train.tracker import Reading, Tracker

__all__ = [
    "PUBLISH",
    "LazyParts",
    "TrainerOutput",
    "check_followed",
    "check_stored",
    "has_exact_rows",
    "owe",
    "read_pieces",
    "track_again",
]

PUBLISH: Final = "publish"
Ids = npt.NDArray[np.uint64]
# How many rows are gathered at a time if only the log needs them.
GATHER_ROWS: Final = 1 << 16


class TrainerOutput:
    """A writer of trained tables to a checkpoint store, to a log, or to both with one gather.

    The store's tables and the publisher's are ``tables``, by name. The store's columns are those
    that the tables gather. The caller may replace ``publisher``, for example after an error of
    the log. The constructor adds the tenants "checkpoint" and "publish" to the tracker as needed.
    """

    def __init__(
        self,
        tracker: Tracker,
        tables: Iterable[TrainedTable],
        *,
        store: Store | None = None,
        policy: Policy | None = None,
        publisher: Publisher | None = None,
    ) -> None:
        self._tracker = tracker
        self._tables = {table.name: table for table in tables}
        self.publisher = publisher
        self._owes_log = publisher is not None
        self._stamps = Stamps(tracker, self._tables.values(), store)
        if (store is None) != (policy is None):
            raise InvalidArgument("give both a store and a policy, or neither")
        self._store = store
        self._follows: int | None = None  # see check_followed()
        self._source: TrackedSource | None = None
        self._checkpointer: Checkpointer | None = None
        if store is not None and policy is not None:
            missing = set(store.state.tables) ^ set(self._tables)
            if missing:
                raise InvalidArgument(
                    f"the trainer and store {store.name} must have the same tables: table "
                    f"{min(missing)} is in one of them only"
                )
            check_stored(store, self._tables.values())
            self._source = TrackedSource(
                tracker, self._tables.values(), tenant=CHECKPOINT, stamps=self._stamps
            )
            self._checkpointer = Checkpointer(store, policy, self._source)
        if self._owes_log:
            tracker.add_tenant(PUBLISH)

    def publish(self, *, step: int | None = None, dense: str | None = None) -> int:
        """Publish the rows touched since the last call as a version of the log; return its number.

        Raises as Publisher does; then nothing is forgotten.
        """
        with self._tracker.read(PUBLISH) as reading:
            log_rows = self._make_log_rows(reading, step)
            version = log_rows.commit(dense)
            reading.acknowledge()
        return version

    def checkpoint(
        self,
        version: int,
        parts: Mapping[str, bytes] | None = None,
        *,
        publish: bool = False,
        step: int | None = None,
        dense: str | None = None,
    ) -> Version:
        """Write a version of the store and, with ``publish``, of the log; gather each row once.

        One of the two may fail alone: the other is finished, then the error is raised. Raises as
        Checkpointer.write and Publisher do; then nothing is forgotten.
        """
        source, checkpointer = self._require_checkpoints()
        reading = self._tracker.read(PUBLISH) if self._owes_log else None
        if publish and reading is None:
            raise FailedPrecondition("TrainerOutput has no publisher: give it one")
        log_rows = None
        if publish and reading is not None:
            log_rows = self._make_log_rows(reading, step)
            source.on_gathered = log_rows.take
        elif self.publisher is not None:
            self._stamps.raise_floor(self.publisher.rewritten_at)
        assert self._store is not None
        check_followed(self._store, self._follows)
        source.begin()
        try:
            lazy_parts = LazyParts(lambda: self._make_parts(parts, reading, log_rows, dense))
            written = checkpointer.write(version, lazy_parts)
            source.acknowledge(written)
            self._follows = written.created_ns
        except PetpsError:
            if log_rows is not None:
                log_rows.try_commit(dense)
            raise
        finally:
            source.on_gathered = None
            source.abandon(version if self._store.may_have_committed else None)
            if log_rows is not None and log_rows.version is not None:
                log_rows.reading.acknowledge()
            elif reading is not None:
                reading.abandon()
        if log_rows is not None and log_rows.error is not None:
            raise log_rows.error
        return written

    def arrange(self) -> None:
        """Do the store's work that a trainer need not wait for; see Checkpointer.arrange()."""
        self._require_checkpoints()[1].arrange()

    def cancel(self) -> None:
        """Cancel a checkpoint in progress; see Checkpointer.cancel()."""
        self._require_checkpoints()[1].cancel()

    def restore(self, version: int) -> Position | None:
        """Load the store's newest version into the tables, and continue from there.

        Keys that the publisher owed when the version was written are owed again; all keys if the
        version is quantised, because the log has other rows. Returns the publisher's position at
        that time, for begin_continue(), or None if there is none; then its run begins with a base.

        Rows and optimizer state are read piece by piece into the tables' own memory; the extra
        memory is what Store.pieces() says. Raises as Store.pieces(), Store.count_restore() and
        TrackedSource.resume() do. After an error the tables hold rows of two versions, and the
        caller must call restore() again.
        """
        source, _ = self._require_checkpoints()
        assert self._store is not None
        newest = self._store.state.versions()
        if not newest or newest[-1].version != version:
            raise FailedPrecondition(
                f"version {version} is not the newest of {self._store.name}: roll back to it first"
            )
        self._stamps.begin_load(self._store, version)
        for name, table in self._tables.items():
            table.load_pieces(self._stamps.load(name, read_pieces(self._store, version, name)))
        position, owed = self._find_owed(self._store, version) if self._owes_log else (None, None)
        track_again(
            source,
            self._store,
            version,
            self._tracker,
            owed,
            lambda: {name: table.ids_of(table.keys()) for name, table in self._tables.items()},
        )
        self._store.count_restore(version)  # last, so that a restore that fails is not counted
        self._follows = newest[-1].created_ns
        if not has_exact_rows(self._store, version):
            self._stamps.owe_all()
        return position

    def _find_owed(
        self, store: Store, version: int
    ) -> tuple[Position | None, dict[str, npt.NDArray[np.uint64]]]:
        """Return the publisher's position, and its owed ids as the tables now number them."""
        published = Published.of(store, version)
        if published is None:
            return None, {}
        return published.position, {
            name: self._tables[name].ids_of(keys) for name, keys in published.owed.items()
        }

    def _make_parts(
        self,
        parts: Mapping[str, bytes] | None,
        reading: Reading | None,
        log_rows: LogRows | None,
        dense: str | None,
    ) -> Mapping[str, bytes]:
        """Commit the log's version, then return the parts. The store calls it after the rows."""
        if log_rows is not None:
            log_rows.try_commit(dense)
        own_parts = dict(parts or {})
        publisher = self.publisher
        if reading is None or publisher is None or (log_rows and log_rows.error):
            return {**own_parts, **self._stamps.parts()}
        owed = (
            {}
            if log_rows is not None
            else {name: table.keys_of(reading.ids(name)) for name, table in self._tables.items()}
        )
        published = Published(publisher.position(), owed).parts()
        return {**own_parts, **self._stamps.parts(), **published}

    def _make_log_rows(self, reading: Reading, step: int | None) -> LogRows:
        return LogRows(self._tables, self._require_publisher(), reading, step, self._stamps)

    def _require_publisher(self) -> Publisher:
        if self.publisher is None:
            raise FailedPrecondition("TrainerOutput has no publisher: give it one")
        return self.publisher

    def _require_checkpoints(self) -> tuple[TrackedSource, Checkpointer]:
        if self._source is None or self._checkpointer is None:
            raise FailedPrecondition("TrainerOutput has no store: give it a store and a policy")
        return self._source, self._checkpointer


def check_followed(store: Store, follows: int | None) -> None:
    """Raise FailedPrecondition if another trainer's version is the store's newest.

    follows: created_ns of the one that this trainer wrote or restored last; 0: there was none;
    None: unknown. A later one of its own, whose commit had no answer, is right too.
    """
    newest = store.state.versions()[-1:]
    found = newest[0].created_ns if newest else 0
    if follows not in (None, found) and (not newest or store.appeared != newest[0].version):
        raise FailedPrecondition(
            f"{store.name}: the newest version, {newest[0].version if newest else 'none'}, is not "
            "this training's: make sure that no other one writes the store, then restore from it"
        )


def check_stored(store: Store, tables: Iterable[TrainedTable]) -> None:
    """Raise InvalidArgument if the store has other columns than the removals of a table need."""
    for table in tables:
        stored = store.state.tables.get(table.name)
        if stored is None:
            known = ", ".join(store.state.tables)
            raise InvalidArgument(f"{store.name} has no table {table.name!r}; it has: {known}")
        needed = table.gather(np.empty(0, np.uint64)).columns.keys() & {LAST_USE, USES}
        columns = {column.name for column in stored.columns} & {LAST_USE, USES}
        if needed - columns:
            raise InvalidArgument(
                f"{store.name} was created without column {min(needed - columns)!r} of table "
                f"{table.name}, which its removal needs: leave out that rule, or begin a new "
                "training in a new store, without the rows of this one"
            )
        if columns - needed:
            raise InvalidArgument(
                f"{store.name} was created with column {min(columns - needed)!r} of table "
                f"{table.name}, which its removal does not need: keep the rule and the score that "
                f"it had; steps_to_live={STEPS_MAX} removes nothing"
            )


def has_exact_rows(store: Store, version: int) -> bool:
    """Return whether a version has the very bits of the trainer's rows."""
    return all(
        column.dtype == "f32"
        for table in store.tables_of(version).values()
        for column in table.columns
        if column.name == ROW
    )


def track_again(
    source: TrackedSource,
    store: Store,
    version: int,
    tracker: Tracker,
    owed: Mapping[str, Ids] | None,
    find_all: Callable[[], Mapping[str, Ids]],
) -> None:
    """Track what changes since a version that the tables hold now, and what the log is owed.

    owed: by table, the ids that the publisher owed when the version was written; None: there is no
    log. find_all: returns all ids by table. They are owed if the version does not have the very
    bits of the rows, because the log has other rows then.
    """
    if owed is None or has_exact_rows(store, version):
        # First: a resume that fails is called again, and the ids that it tracks belong to
        # checkpoints only.
        source.resume(store, version)
        if owed is not None:
            owe(tracker, owed)
        return
    owe(tracker, find_all())  # before resume(), because all ids belong to the log only
    source.resume(store, version)


def owe(tracker: Tracker, owed: Mapping[str, Ids]) -> None:
    """Let the log owe these ids, and no others."""
    if PUBLISH in tracker.tenants:
        tracker.remove_tenant(PUBLISH)
    tracker.add_tenant(PUBLISH)
    for name, ids in owed.items():
        tracker.track(name, ids)


def read_pieces(
    store: Store, version: int, table: str, owns: Callable[[Keys], Mask] | None = None
) -> Iterator[tuple[Keys, dict[str, npt.NDArray[Any]]]]:
    """Yield the pieces of a version for load_pieces(), of the keys that ``owns`` accepts."""
    columns = store.tables_of(version)[table].columns
    for rows in store.pieces(table, version):
        chosen = slice(None) if owns is None else owns(rows.keys)
        stored = {column: rows.columns[column.name][chosen] for column in columns}
        values: dict[str, npt.NDArray[Any]] = {
            column.name: given if column.dtype in RAW else column.values(given)
            for column, given in stored.items()
        }
        yield rows.keys[chosen], values
        del rows, stored, values  # free this piece before the next one is made


class LogRows:
    """The rows of a reading that the log needs: those gathered for a checkpoint, then the rest."""

    def __init__(
        self,
        tables: Mapping[str, TrainedTable],
        publisher: Publisher,
        reading: Reading,
        step: int | None,
        stamps: Stamps,
    ) -> None:
        self.reading = reading
        self.version: int | None = None
        self.error: PetpsError | None = None
        self._tables = tables
        self._publisher = publisher
        self._step = step
        self._stamps = stamps
        self._next_version = publisher.version + 1
        stamps.mark(self._next_version, publisher.rewritten_at)
        self._due: dict[
            str, tuple[Keys, npt.NDArray[np.bool_]]
        ] = {}  # by table: keys, whether published

    def take(self, table: str, keys: Keys, gathered: Gathered) -> None:
        """Publish those rows that the log needs. Keep an error: a checkpoint can continue."""
        if self.error is not None:
            return
        due, is_published = self._find_due(table)
        places = np.searchsorted(due, keys)
        places[places == len(due)] = 0
        chosen = (due[places] == keys) & ~is_published[places] if len(due) else keys < 0
        if not chosen.any():
            return
        deleted = None if gathered.deleted is None else gathered.deleted[chosen]
        rows = gathered.columns[ROW][chosen]
        try:
            self._publisher.publish(table, keys[chosen], rows, deleted, step=self._step)
        except PetpsError as error:
            self.error = error
            return
        is_published[places[chosen]] = True

    def finish(self) -> None:
        """Gather and publish the rest of the rows."""
        for name, table in self._tables.items():
            due, is_published = self._find_due(name)
            rest = due[~is_published]
            for start in range(0, len(rest), GATHER_ROWS):
                keys = rest[start : start + GATHER_ROWS]
                self.take(name, keys, table.gather(keys))
            self._due.pop(name)
        if self.error is not None:
            raise self.error

    def commit(self, dense: str | None) -> int:
        """Publish the rest, and commit. Return the version."""
        self.finish()
        self.version = self._publisher.commit(self._next_version, self._step, dense)
        self._stamps.commit(self.version, self._publisher.committed_ns)
        return self.version

    def try_commit(self, dense: str | None) -> None:
        """Commit unless that was done or failed before. Keep an error instead of raising it."""
        if self.version is None and self.error is None:
            try:
                self.commit(dense)
            except PetpsError as error:
                self.error = error

    def _find_due(self, table: str) -> tuple[Keys, npt.NDArray[np.bool_]]:
        if table not in self._due:
            ids = self.reading.ids(table)
            self._stamps.mark_rows(table, ids)
            keys = self._tables[table].keys_of(ids)
            self._due[table] = (keys, np.zeros(len(keys), np.bool_))
        return self._due[table]


class LazyParts(Mapping[str, bytes]):
    """Parts that the first use computes: the store reads them after it has written the rows."""

    def __init__(self, make: Callable[[], Mapping[str, bytes]]) -> None:
        self._make = make
        self._computed_parts: Mapping[str, bytes] | None = None

    @property
    def _parts(self) -> Mapping[str, bytes]:
        # Not a cached_property: before Python 3.12 that has one lock for all objects, and ranks
        # that are threads of one process meet each other in make().
        if self._computed_parts is None:
            self._computed_parts = self._make()
        return self._computed_parts

    def __getitem__(self, name: str) -> bytes:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
