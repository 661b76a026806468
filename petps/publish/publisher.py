"""The publisher: a trainer's side of a delta log. See petps/publish/__init__.py."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from petps_client.arrays import as_keys

from petps.delta import (
    MAX_MESSAGE_BYTES,
    BaseBody,
    CommitBody,
    ContinueBody,
    DeltaError,
    DeltaLog,
    Kind,
    Position,
    Record,
    RecordHeader,
    RowsBody,
    TableCount,
    TableSchema,
    encode_record,
    read_header,
)
from petps.delta.chunk import slices
from petps.delta.record import Body
from petps.delta.schema import MAX_NAME_BYTES, check_instance, check_name, partition_of
from petps.errors import FailedPrecondition, InvalidArgument

__all__ = ["Position", "Publisher"]

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
# Rows and bytes handled at a time; they bound the memory of a publish() of any size.
BLOCK_ROWS: Final = 1 << 18
BLOCK_BYTES: Final = 64 << 20
FINITE_VALUES: Final = 1 << 18  # checked at a time, so that they stay in the cache
MIN_CHUNK_BYTES: Final = 16 << 10


class Publisher:
    """Writer of a trainer's changed rows to a delta log, in order and with an exactly-once effect.

    A run begins with begin_base() or begin_continue(). Then call publish() any number of times, and
    commit() when the published rows make a version. ``run`` must be above every earlier run of the
    model; None: the clock's milliseconds, or one more than the newest run in the log if that is
    higher. ``publisher_id`` tells apart two trainers that took the same run. Memory is bounded by
    one block (BLOCK_ROWS, BLOCK_BYTES) and one chunk. Threads: calls are serialised.

    An error of the log reaches the caller and ends the run, because it is unknown which records
    since the last commit are in the log. Continue with a new Publisher and a base or a continue
    marker.

    own: the partitions that this publisher writes, if several workers publish one run (None: all).
    Each worker has its own partitions. All take the same ``run`` and begin it in the same way. They
    commit() behind a barrier, before which each has called flush(), with the counted() of all.
    """

    def __init__(
        self,
        log: DeltaLog,
        model: str,
        partitions: int | None = None,
        *,
        tables: Mapping[str, TableSchema] | Sequence[TableSchema],
        run: int | None = None,
        publisher_id: str | None = None,
        chunk_bytes: int = MAX_MESSAGE_BYTES,
        allow_not_finite: bool = False,
        own: Iterable[int] | None = None,
    ) -> None:
        check_name("model", model)
        if partitions is not None and partitions != log.partitions:
            raise InvalidArgument(
                f"{log.name} has {log.partitions} partitions, not {partitions}: "
                "the number is fixed for ever"
            )
        if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_MESSAGE_BYTES:
            raise InvalidArgument(
                f"chunk_bytes {chunk_bytes} is outside {MIN_CHUNK_BYTES}..{MAX_MESSAGE_BYTES}"
            )
        schemas = tables.values() if isinstance(tables, Mapping) else tables
        self._log = log
        self._model = model
        self._tables = {schema.name: schema for schema in schemas}
        self._chunk_bytes = chunk_bytes
        # Reused for the rows of each chunk: fresh memory each time costs as much as the copy.
        self._row_buffer = np.empty(chunk_bytes, np.uint8)
        self._allow_not_finite = allow_not_finite
        self._publisher = publisher_id or uuid.uuid4().hex
        if len(self._publisher.encode()) > MAX_NAME_BYTES:
            raise InvalidArgument(f"publisher_id is longer than {MAX_NAME_BYTES} bytes")
        last_run, last_version, self._is_emptied = _newest(log)
        self._run = max(time.time_ns() // 1_000_000, last_run + 1) if run is None else run
        if not last_run < self._run < 1 << 64:
            raise InvalidArgument(
                f"run {self._run} is not above run {last_run} in {log.name}: every server would "
                "reject it as an older one; leave run out, or take a higher one"
            )
        self._version = last_version
        self._step = 0
        self._seqs = [0] * log.partitions
        self._counts: dict[str, list[int]] = {}
        self._own = list(range(log.partitions)) if own is None else sorted(set(own))
        if not self._own or not 0 <= self._own[0] <= self._own[-1] < log.partitions:
            raise InvalidArgument(
                f"own partitions {self._own} are not among 0..{log.partitions - 1} of {log.name}"
            )
        self._instance: str | None = None
        self._has_begun = False
        self._failed = ""
        self._mutex = threading.Lock()

    @property
    def run(self) -> int:
        """Return this run's number."""
        return self._run

    @property
    def publisher_id(self) -> str:
        """Return this publisher's id."""
        return self._publisher

    @property
    def version(self) -> int:
        """Return the last version committed; before this run's first commit, the log's last one."""
        return self._version

    def position(self) -> Position:
        """Return what to save beside the trainer's state, for begin_continue() of the next run."""
        with self._mutex:
            return Position(self._run, tuple(self._seqs), self._version, self._instance)

    def begin_base(
        self,
        location: str,
        *,
        version: int | None = None,
        step: int = 0,
        instance: str | None = None,
    ) -> None:
        """Begin the run: servers become equal to the base at ``location``, then follow the run.

        ``instance`` (``model@name``): servers load the base into new tables of that instance,
        beside those that they serve, and then switch to it. None: into the tables of the earlier
        runs. ``version`` is the base's, above every version in the log (None: one more than the
        last). This holds for a base of an older state too, because no server has served it before.
        """
        with self._mutex:
            if self._has_begun:
                raise FailedPrecondition(f"run {self._run} has begun; use base() within a run")
            if instance is not None:
                check_instance(self._model, instance)
            if version is None:
                self._check_known("begin_base() a version above all that servers may hold")
                version = self._version + 1
            self._check_version(version)
            self._step = step
            self._write_base(location, version, instance)
            self._instance = instance

    def base(self, location: str) -> None:
        """Record, within a run, that the base at ``location`` holds everything published so far."""
        with self._mutex:
            self._check_begun()
            self._write_base(location, self._version, None)

    def _write_base(self, location: str, version: int, instance: str | None) -> None:
        if not location:
            raise InvalidArgument("a base needs a location: the folder that holds its manifest")
        body = BaseBody(location=location, instance=instance)
        with self._end_run_on_error():
            for partition in self._own:
                self._send(partition, Kind.BASE, body, version=version)
            self._log.flush()
        self._version = version
        self._has_begun = True

    def begin_continue(self, position: Position | None) -> None:
        """Begin the run at ``position``, which was saved with the state that the trainer restored.

        None: the trainer's state is what the servers' tables were loaded with, and no delta.
        Servers that applied more than the position, or less, mark themselves stale.
        """
        partitions = self._log.partitions
        if position is None:
            self._check_known("begin_continue() the position saved with the trainer's state")
            position = Position(0, (0,) * partitions, self._version)
        if len(position.seqs) != partitions:
            raise InvalidArgument(
                f"the position has {len(position.seqs)} partitions, {self._log.name} {partitions}"
            )
        if position.run >= self._run:
            raise InvalidArgument(f"run {self._run} cannot continue run {position.run}")
        with self._mutex:
            if self._has_begun:
                raise FailedPrecondition(f"run {self._run} has begun already")
            with self._end_run_on_error():
                for partition in self._own:
                    last_seq = position.seqs[partition]
                    body = ContinueBody(previous_run=position.run, last_seq=last_seq)
                    self._send(partition, Kind.CONTINUE, body)
                self._log.flush()
            self._version = max(self._version, position.version)
            self._instance = position.instance
            self._has_begun = True

    def publish(
        self,
        table: str,
        keys: npt.ArrayLike,
        rows: npt.NDArray[np.float32] | Rows | None,
        deleted: npt.ArrayLike | None = None,
        *,
        step: int | None = None,
    ) -> int:
        """Append rows and deletions of one table; return the number of messages.

        keys: integers[n] of 0 to 2**64 - 1. rows: float32[n, dim], or uint8[n, row_bytes] as
        stored, or None if all keys are deletions. deleted: bool[n]; the rows of deleted keys are
        ignored. If a key occurs several times, its last row counts. The rows are durable and
        visible after commit().
        """
        with self._mutex:
            self._check_begun()
            schema = self._schema(table)
            checked = self._check(schema, keys, rows, deleted)
            self._check_own(schema, checked[0])
            if step is not None:
                self._step = step
            messages = 0
            with self._end_run_on_error():
                for part in _blocks(*checked):
                    messages += self._publish_block(schema, *part)
            return messages

    def flush(self) -> None:
        """Wait until the log has acknowledged everything published."""
        with self._mutex:
            self._check_begun()
            with self._end_run_on_error():
                self._log.flush()

    def counted(self) -> dict[str, int]:
        """Return the rows published since the last commit, by table."""
        with self._mutex:
            return {name: sum(counts) for name, counts in self._counts.items()}

    def commit(
        self,
        version: int | None = None,
        step: int | None = None,
        dense: str | None = None,
        *,
        everywhere: Mapping[str, int] | None = None,
    ) -> int:
        """Make the published rows a version, in this publisher's partitions; return the version.

        Durable on return. ``version`` grows over all runs of a model (None: one more than the
        last). ``dense`` says where the version's dense weights are. ``everywhere``: rows by table
        that all workers published (None: this publisher is the only one).
        """
        with self._mutex:
            self._check_begun()
            version = self._version + 1 if version is None else version
            self._check_version(version)
            if step is not None:
                self._step = step
            with self._end_run_on_error():
                # Rows first: a log must never hold a commit without its rows.
                self._log.flush()
                totals = everywhere
                if totals is None:
                    totals = {name: sum(counts) for name, counts in self._counts.items()}
                no_counts = [0] * self._log.partitions
                for partition in self._own:
                    tables = {
                        name: TableCount(
                            here=self._counts.get(name, no_counts)[partition], everywhere=total
                        )
                        for name, total in totals.items()
                    }
                    body = CommitBody(tables=tables, dense=dense)
                    self._send(partition, Kind.COMMIT, body, version=version)
                self._log.flush()
            self._counts = {}
            self._version = version
            return version

    def _schema(self, table: str) -> TableSchema:
        schema = self._tables.get(table)
        if schema is None:
            raise InvalidArgument(
                f"the publisher of model {self._model} has no table {table!r}; "
                f"it has: {', '.join(sorted(self._tables)) or 'none'}"
            )
        return schema

    def _check(
        self,
        schema: TableSchema,
        keys: npt.ArrayLike,
        rows: npt.NDArray[Any] | None,
        deleted: npt.ArrayLike | None,
    ) -> tuple[Keys, npt.NDArray[Any] | None, Mask | None, TableSchema]:
        checked_keys = _check_keys(schema, keys)
        n = checked_keys.shape[0]
        mask = None if deleted is None else np.asarray(deleted)
        if mask is not None and (mask.dtype != np.bool_ or mask.shape != (n,)):
            raise InvalidArgument(
                f"table {schema.name}: deleted is {mask.dtype}{list(mask.shape)}, "
                f"expected bool[{n}]"
            )
        if rows is None:
            if mask is None or not mask.all():
                raise InvalidArgument(
                    f"table {schema.name}: rows are missing; only deletions need none"
                )
            return checked_keys, None, mask, schema
        rows = np.asarray(rows)
        is_stored = rows.dtype == np.uint8
        width = schema.row_bytes if is_stored else schema.dim
        if rows.shape != (n, width):
            raise InvalidArgument(
                f"table {schema.name}: rows have shape {rows.shape}, expected ({n}, {width})"
            )
        if not is_stored and rows.dtype != np.float32:
            raise InvalidArgument(
                f"table {schema.name}: rows are {rows.dtype}; "
                "give float32 values or uint8 stored rows"
            )
        if not is_stored and not self._allow_not_finite:
            _check_finite(schema, checked_keys, rows, mask)
        return checked_keys, rows, mask, schema

    def _check_own(self, schema: TableSchema, keys: Keys) -> None:
        if len(self._own) == self._log.partitions:
            return
        partitions = partition_of(keys, self._log.partitions)
        others = np.flatnonzero(~np.isin(partitions, self._own))
        if len(others):
            raise InvalidArgument(
                f"table {schema.name}: key {keys[others[0]]} is of partition "
                f"{partitions[others[0]]}, which is another worker's: publish the keys of this "
                "worker's own partitions"
            )

    def _publish_block(
        self, schema: TableSchema, keys: Keys, rows: Rows, deleted: Mask | None
    ) -> int:
        # uint16 holds MAX_PARTITIONS, and numpy sorts it by radix.
        partitions = partition_of(keys, self._log.partitions).astype(np.uint16)
        order = np.argsort(partitions, kind="stable")
        bounds = np.searchsorted(partitions[order], np.arange(self._log.partitions + 1))
        rows = np.ascontiguousarray(rows)
        counts = self._counts.setdefault(schema.name, [0] * self._log.partitions)
        messages = 0
        for partition in self._own:
            positions = order[bounds[partition] : bounds[partition + 1]]
            for part in slices(len(positions), schema.row_bytes, self._chunk_bytes):
                index = positions[part]
                mask = None if deleted is None else deleted[index]
                buffer = self._row_buffer[: len(index) * schema.row_bytes]
                out = buffer.reshape(len(index), schema.row_bytes)
                np.take(rows, index, axis=0, out=out, mode="clip")  # "raise" would buffer `out`
                body = RowsBody(keys[index], out, mask)
                self._send(partition, Kind.ROWS, body, schema=schema)
                counts[partition] += len(index)
                messages += 1
        return messages

    def _send(
        self,
        partition: int,
        kind: Kind,
        body: Body,
        *,
        version: int | None = None,
        schema: TableSchema | None = None,
    ) -> None:
        header = RecordHeader(
            model=self._model,
            kind=kind,
            run=self._run,
            publisher=self._publisher,
            step=self._step,
            seq=self._seqs[partition] + 1,
            version=self._version + 1 if version is None else version,
            time_ns=time.time_ns(),
            partition=partition,
            partitions=self._log.partitions,
            table=schema.name if schema else "",
            dtype=schema.dtype if schema else "",
            dim=schema.dim if schema else 0,
        )
        self._log.publish(partition, encode_record(Record(header, body)))
        self._seqs[partition] += 1

    def _check_version(self, version: int) -> None:
        if not self._version < version < 1 << 64:
            raise InvalidArgument(
                f"version {version} is not above {self._version}: versions grow over all runs"
            )

    def _check_known(self, remedy: str) -> None:
        if self._is_emptied:
            raise FailedPrecondition(
                f"{self._log.name} holds no message of ours any more (retention), so the last "
                f"version is not known: give {remedy}"
            )

    def _check_begun(self) -> None:
        if self._failed:
            raise FailedPrecondition(
                f"run {self._run} ended with an error ({self._failed}): begin a new run with a new "
                "Publisher and a base or a continue marker"
            )
        if not self._has_begun:
            raise FailedPrecondition("begin the run first: begin_base() or begin_continue()")

    def _end_run_on_error(self) -> _EndRunOnError:
        return _EndRunOnError(self)

    def fail(self, reason: str) -> None:
        """End the run: every later call raises FailedPrecondition with the reason."""
        self._failed = reason


class _EndRunOnError:
    """A block in which any error ends the run: its seqs may or may not be in the log."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            self._publisher.fail(f"{kind.__name__}: {error}")


def _newest(log: DeltaLog) -> tuple[int, int, bool]:
    """Return (highest run, highest version taken, emptied) from the log's last messages.

    emptied: the log once had messages, and none of ours is left.
    """
    run = version = 0
    for message in log.last_messages(range(log.partitions)).values():
        try:
            header = read_header(message)
        except DeltaError:
            continue  # not a message of ours; ingest reports it
        run = max(run, header.run)
        complete = header.kind in (Kind.COMMIT, Kind.BASE)
        version = max(version, header.version if complete else header.version - 1)
    emptied = run == 0 and any(log.end_offsets(range(log.partitions)).values())
    return run, version, emptied


def _check_keys(schema: TableSchema, keys: npt.ArrayLike) -> Keys:
    try:
        return as_keys(keys)
    except InvalidArgument as error:
        raise InvalidArgument(f"table {schema.name}: {error}") from None


def _check_finite(
    schema: TableSchema, keys: Keys, rows: npt.NDArray[np.float32], deleted: Mask | None
) -> None:
    step = max(1, FINITE_VALUES // schema.dim)
    for start in range(0, len(keys), step):
        values = np.isfinite(rows[start : start + step])
        if values.all():
            continue
        finite = values.all(axis=1)
        if deleted is not None:
            finite |= deleted[start : start + step]
        if not finite.all():
            position = start + int(np.argmin(finite))
            raise InvalidArgument(
                f"table {schema.name}: the row of key {keys[position]} (row {position}) holds NaN "
                "or infinity; fix the trainer, or allow them with allow_not_finite=True"
            )


def _blocks(
    keys: Keys, rows: npt.NDArray[Any] | None, deleted: Mask | None, schema: TableSchema
) -> Iterator[tuple[Keys, Rows, Mask | None]]:
    """Yield blocks of stored rows, with the last row of each key, in the order given."""
    newest = _last_positions(keys)
    n = len(keys) if newest is None else len(newest)
    step = max(1, min(BLOCK_ROWS, BLOCK_BYTES // schema.row_bytes))
    for start in range(0, n, step):
        stop = min(n, start + step)
        index = slice(start, stop) if newest is None else newest[start:stop]
        if rows is None:
            stored = np.zeros((stop - start, schema.row_bytes), np.uint8)
        elif rows.dtype == np.uint8:
            stored = rows[index]
        else:
            stored = schema.encode(rows[index])
        yield keys[index], stored, None if deleted is None else deleted[index]


def _last_positions(keys: Keys) -> npt.NDArray[np.intp] | None:
    """Return the positions of each key's last occurrence, ascending; None if no key repeats."""
    ordered = np.sort(keys)
    if not (ordered[1:] == ordered[:-1]).any():
        return None
    _, first_from_end = np.unique(keys[::-1], return_index=True)
    return np.sort(len(keys) - 1 - first_from_end)
