"""Checkpoints and log from one gather of the rows that a trainer touched.

Owns:        TrainerOutput.
Never does:  know a policy, or which log it is.
Called by:   trainers.
Invariants:  a tenant acknowledges what it read only after the version with those rows is
             committed.
Threads:     one, between two steps; any thread may call cancel().
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from petps.checkpoint import Checkpointer, Policy, Store
from petps.checkpoint.published import Published
from petps.checkpoint.state import Version
from petps.errors import FailedPrecondition, InvalidArgument, PetpsError
from petps.publish import Position, Publisher
from petps.train.source import CHECKPOINT, TrackedSource
from petps.train.table import ROW, Gathered, Keys, TrainedTable
from petps.train.tracker import Reading, Tracker

__all__ = ["PUBLISH", "Late", "Sent", "TrainerOutput"]

PUBLISH: Final = "publish"
# The number of rows gathered at a time when only the log needs them.
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
        self._publishes = publisher is not None  # whether touched ids are owed to a log
        if (store is None) != (policy is None):
            raise InvalidArgument("checkpoints need a store and a policy")
        self._store = store
        self._source: TrackedSource | None = None
        self._checkpointer: Checkpointer | None = None
        if store is not None and policy is not None:
            missing = set(store.state.tables) ^ set(self._tables)
            if missing:
                raise InvalidArgument(
                    f"table {min(missing)} is not both the trainer's and {store.name}'s"
                )
            self._source = TrackedSource(tracker, self._tables.values(), tenant=CHECKPOINT)
            self._checkpointer = Checkpointer(store, policy, self._source)
        if self._publishes:
            tracker.add_tenant(PUBLISH)

    def publish(self, *, step: int | None = None, dense: str | None = None) -> int:
        """Publish the rows touched since the last call as a version of the log; return its number.

        Raises as Publisher does; then nothing is forgotten.
        """
        with self._tracker.read(PUBLISH) as reading:
            sent = Sent(self._tables, self._the_publisher(), reading, step)
            version = sent.commit(dense)
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
        source, checkpointer = self._the_checkpoints()
        reading = self._tracker.read(PUBLISH) if self._publishes else None
        if publish and reading is None:
            raise FailedPrecondition("the output has no publisher")
        sent = None
        if publish and reading is not None:
            sent = Sent(self._tables, self._the_publisher(), reading, step)
            source.also = sent.take
        source.begin()
        try:
            late = Late(lambda: self._parts(parts, reading, sent, dense))
            written = checkpointer.write(version, late)
            source.committed(written)
        except PetpsError:
            if sent is not None:
                sent.try_commit(dense)
            raise
        finally:
            source.also = None
            source.cancelled()
            if sent is not None and sent.version is not None:
                sent.reading.acknowledge()
            elif reading is not None:
                reading.abandon()
        if sent is not None and sent.failed is not None:
            raise sent.failed
        return written

    def arrange(self) -> None:
        """See Checkpointer."""
        self._the_checkpoints()[1].arrange()

    def cancel(self) -> None:
        """See Checkpointer."""
        self._the_checkpoints()[1].cancel()

    def restore(self, version: int) -> Position | None:
        """Load the store's newest version into the tables, and continue from there.

        Keys that the publisher owed when the version was written are owed again. Returns the
        publisher's position at that time, for begin_continue(), or None if there is none; then
        its run begins with a base.

        Rows and optimizer state are read piece by piece into the tables' own memory; the extra
        memory is what Store.pieces() says. Raises as Store.pieces(), Store.count_restore() and
        TrackedSource.resume() do; then rows are mixed, and the caller must call it again.
        """
        source, _ = self._the_checkpoints()
        assert self._store is not None
        newest = self._store.state.versions()
        if not newest or newest[-1].version != version:
            raise FailedPrecondition(
                f"version {version} is not the newest of {self._store.name}: roll back to it first"
            )
        for name, table in self._tables.items():
            table.load_pieces(_pieces(self._store, version, name))
        position, owed = self._owed(self._store, version) if self._publishes else (None, {})
        source.resume(self._store, version)
        if self._publishes:
            # Only now: a restore that failed is called again, and the ids that resume() tracked
            # belong to checkpoints alone.
            if PUBLISH in self._tracker.tenants:
                self._tracker.remove_tenant(PUBLISH)
            self._tracker.add_tenant(PUBLISH)
        for name, ids in owed.items():
            self._tracker.track(name, ids)
        self._store.count_restore()  # training has not begun yet, and failures are not counted
        return position

    def _owed(
        self, store: Store, version: int
    ) -> tuple[Position | None, dict[str, npt.NDArray[np.uint64]]]:
        """Return the publisher's position, and its owed ids as the tables now number them."""
        published = Published.of(store, version)
        if published is None:
            return None, {}
        return published.position, {
            name: self._tables[name].ids_of(keys) for name, keys in published.owed.items()
        }

    def _parts(
        self,
        parts: Mapping[str, bytes] | None,
        reading: Reading | None,
        sent: Sent | None,
        dense: str | None,
    ) -> Mapping[str, bytes]:
        """Commit the log's version, then return the parts. The store calls it after the rows."""
        if sent is not None:
            sent.try_commit(dense)
        own_parts = dict(parts or {})
        publisher = self.publisher
        if reading is None or publisher is None or (sent is not None and sent.failed is not None):
            return own_parts
        owed = (
            {}
            if sent is not None
            else {name: table.keys_of(reading.ids(name)) for name, table in self._tables.items()}
        )
        return {**own_parts, **Published(publisher.position(), owed).parts()}

    def _the_publisher(self) -> Publisher:
        if self.publisher is None:
            raise FailedPrecondition("the output has no publisher")
        return self.publisher

    def _the_checkpoints(self) -> tuple[TrackedSource, Checkpointer]:
        if self._source is None or self._checkpointer is None:
            raise FailedPrecondition("the output has no store: it only publishes")
        return self._source, self._checkpointer


def _pieces(
    store: Store, version: int, table: str
) -> Iterator[tuple[Keys, dict[str, npt.NDArray[np.float32]]]]:
    columns = store.tables_of(version)[table].columns
    for rows in store.pieces(table, version):
        yield (
            rows.keys,
            {column.name: column.values(rows.columns[column.name]) for column in columns},
        )
        del rows  # free this piece before the next one is made


class Sent:
    """A reading's rows on their way to the log: those gathered for a checkpoint, then the rest."""

    def __init__(
        self,
        tables: Mapping[str, TrainedTable],
        publisher: Publisher,
        reading: Reading,
        step: int | None,
    ) -> None:
        self.reading = reading
        self.version: int | None = None
        self.failed: PetpsError | None = None
        self._tables = tables
        self._publisher = publisher
        self._step = step
        self._due: dict[str, tuple[Keys, npt.NDArray[np.bool_]]] = {}  # by table: keys, done

    def take(self, table: str, keys: Keys, gathered: Gathered) -> None:
        """Publish those rows that the log needs. Keep an error: a checkpoint can continue."""
        if self.failed is not None:
            return
        due, done = self._of(table)
        places = np.searchsorted(due, keys)
        places[places == len(due)] = 0
        chosen = (due[places] == keys) & ~done[places] if len(due) else keys < 0
        if not chosen.any():
            return
        deleted = None if gathered.deleted is None else gathered.deleted[chosen]
        rows = gathered.columns[ROW][chosen]
        try:
            self._publisher.publish(table, keys[chosen], rows, deleted, step=self._step)
        except PetpsError as error:
            self.failed = error
            return
        done[places[chosen]] = True

    def finish(self) -> None:
        """Gather and publish the rest of the rows."""
        for name, table in self._tables.items():
            due, done = self._of(name)
            rest = due[~done]
            for start in range(0, len(rest), GATHER_ROWS):
                keys = rest[start : start + GATHER_ROWS]
                self.take(name, keys, table.gather(keys))
            self._due.pop(name)
        if self.failed is not None:
            raise self.failed

    def commit(self, dense: str | None) -> int:
        """Publish the rest, and commit. Return the version."""
        self.finish()
        self.version = self._publisher.commit(step=self._step, dense=dense)
        return self.version

    def try_commit(self, dense: str | None) -> None:
        """Commit unless that was done or failed before. Keep an error instead of raising it."""
        if self.version is None and self.failed is None:
            try:
                self.commit(dense)
            except PetpsError as error:
                self.failed = error

    def _of(self, table: str) -> tuple[Keys, npt.NDArray[np.bool_]]:
        if table not in self._due:
            keys = self._tables[table].keys_of(self.reading.ids(table))
            self._due[table] = (keys, np.zeros(len(keys), np.bool_))
        return self._due[table]


class Late(Mapping[str, bytes]):
    """Parts that are made at first use: the store reads them after it has written the rows."""

    def __init__(self, make: Callable[[], Mapping[str, bytes]]) -> None:
        self._make = make
        self._made: Mapping[str, bytes] | None = None

    @property
    def _parts(self) -> Mapping[str, bytes]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __getitem__(self, name: str) -> bytes:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
