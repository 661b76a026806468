"""The publisher: a trainer's side of a delta log."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from petps.delta.arrow import slices
from petps.delta.record import Body
from petps.delta.schema import MAX_NAME_BYTES, check_instance, check_name, partition_of
from petps.errors import FailedPrecondition, InvalidArgument
from petps.publish.trace import NO_SPAN, PublishSpan, publish_span

__all__ = ["Position", "Publisher"]

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
# Rows and bytes handled at a time; they bound the memory of a publish() of any size.
BLOCK_ROWS: Final = 1 << 18
BLOCK_BYTES: Final = 64 << 20
FINITE_VALUES: Final = 1 << 18  # values checked at a time, so that they stay in the cache
MIN_CHUNK_BYTES: Final = 16 << 10


class Publisher:
    """Writer of a trainer's changed rows to a delta log, in order and with an exactly-once effect.

    A run begins with begin_base() or begin_continue(). Then call publish() any number of times, and
    commit() when the published rows make a version. Memory is bounded by one block (BLOCK_ROWS,
    BLOCK_BYTES) and one message. Threads: calls are serialised.

    An error of the log reaches the caller and ends the run, because it is unknown which records
    since the last commit are in the log. Continue with a new Publisher and a base or a continue
    marker.

    Several ranks may publish one run. Each rank has a Publisher for its own partitions (``own``).
    All ranks use the same ``run`` and begin it in the same way. To commit, each rank calls flush().
    After a barrier, each rank calls commit() with the sums of counted() over all ranks.

    Args:
        log: The log to write.
        model: The model's name.
        partitions: P of the model, to check that the log has it; None skips the check.
        tables: The schemas of the tables, as a sequence or by name.
        run: The run's number, above every earlier run of the model. None selects the clock's
            milliseconds, or one more than the newest run in the log if that is higher.
        publisher_id: An id that distinguishes two trainers that took the same run.
        chunk_bytes: Upper limit of the bytes of a message.
        allow_not_finite: Accept rows with NaN or infinity.
        own: The partitions that this publisher writes; None selects all.
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
                "the number can never change"
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
        # Reused for the rows of each message, because fresh memory costs as much as the copy.
        self._row_buffer = np.empty(chunk_bytes, np.uint8)
        self._allow_not_finite = allow_not_finite
        self._publisher = publisher_id or uuid.uuid4().hex
        if len(self._publisher.encode()) > MAX_NAME_BYTES:
            raise InvalidArgument(f"publisher_id is longer than {MAX_NAME_BYTES} bytes")
        last_run, last_version, self._is_emptied = _read_end(log)
        self._run = max(time.time_ns() // 1_000_000, last_run + 1) if run is None else run
        if not last_run < self._run < 1 << 64:
            raise InvalidArgument(
                f"run {self._run} is not above run {last_run} in {log.name}: every server would "
                "reject it as an older run; leave run out, or use a higher number"
            )
        self._version = last_version
        self._step = 0
        self._seqs = [0] * log.partitions
        self._counts: dict[str, list[int]] = {}
        self._begun_ns = 0  # when the first rows of the next version were published; 0: none were
        self._own = list(range(log.partitions)) if own is None else sorted(set(own))
        if not self._own or not 0 <= self._own[0] <= self._own[-1] < log.partitions:
            raise InvalidArgument(
                f"own must be partitions from 0 to {log.partitions - 1}, got {self._own}"
            )
        self._instance: str | None = None
        self._has_begun = False
        self._failed = ""
        self._committed_ns = 0
        self._rewritten_at = 0
        self._mutex = threading.Lock()

    @property
    def model(self) -> str:
        """Return the model's name."""
        return self._model

    @property
    def schemas(self) -> list[TableSchema]:
        """Return the schemas of the tables, as published."""
        return list(self._tables.values())

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
        """Return the last committed version, of this run or else of the log."""
        return self._version

    @property
    def committed_ns(self) -> int:
        """Return the time that this publisher's last commit shows; 0 before the first one."""
        return self._committed_ns

    @property
    def rewritten_at(self) -> int:
        """Return the version of the base that began the run, if it gave all rows this version.

        0: the run began with a base whose rows have stamps, or with a continue marker.
        """
        return self._rewritten_at

    @property
    def log(self) -> DeltaLog:
        """Return the log that is written."""
        return self._log

    @property
    def has_failed(self) -> bool:
        """Return whether an error of the log has ended the run."""
        return bool(self._failed)

    def position(self) -> Position:
        """Return the position to save with the trainer's state, for the next begin_continue()."""
        with self._mutex:
            return Position(self._run, tuple(self._seqs), self._version, self._instance)

    def begin_base(
        self,
        location: str,
        *,
        version: int | None = None,
        step: int = 0,
        instance: str | None = None,
        stamped: bool = False,
    ) -> None:
        """Begin the run with a base: servers make their tables equal to it, then follow the run.

        Args:
            location: The folder of the base.
            version: The version of the base, above every version in the log, even if the base holds
                an older state. None selects one more than the last version.
            step: The trainer's step.
            instance: An instance (``model@name``). Servers load the base into new tables of that
                instance, beside the tables that they serve, and then switch to it. None selects the
                tables that the earlier runs fed.
            stamped: Whether the rows of the base have the versions that wrote them
                (petps/checkpoint/FORMAT.md). Otherwise servers give all rows the base's version.
        """
        with self._mutex:
            if self._has_begun:
                raise FailedPrecondition(
                    f"run {self._run} has begun already; use base() within a run"
                )
            if instance is not None:
                check_instance(self._model, instance)
            if version is None:
                self._check_known("begin_base() a version above all versions that servers may hold")
                version = self._version + 1
            self._check_version(version)
            self._step = step
            self._write_base(location, version, instance)
            self._instance = instance
            self._rewritten_at = 0 if stamped else version

    def base(self, location: str) -> None:
        """Write a marker: the base at ``location`` holds everything that the run has published."""
        with self._mutex:
            self._check_begun()
            self._write_base(location, self._version, None)

    def _write_base(self, location: str, version: int, instance: str | None) -> None:
        if not location:
            raise InvalidArgument("a base needs a location: the path of its folder")
        body = BaseBody(location=location, instance=instance)
        with self._end_run_on_error():
            for partition in self._own:
                self._send(partition, Kind.BASE, body, version=version)
            self._log.flush()
        self._version = version
        self._has_begun = True

    def begin_continue(self, position: Position | None) -> None:
        """Begin the run at ``position``, which was saved with the state that the trainer restored.

        None: the trainer's state is that with which the servers' tables were loaded, before any
        delta. Partitions of a server that applied more than the position, or less, stop as
        incomplete and wait for a base.
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

        The rows are durable and visible after commit(). The last row of a repeated key wins.

        Args:
            table: The table's name.
            keys: integers[n] from 0 to 2**64 - 1.
            rows: float32[n, dim], or uint8[n, row_bytes] as stored, or None to delete all keys.
            deleted: bool[n], the keys to delete; their rows are ignored.
            step: The trainer's step.
        """
        with self._mutex:
            self._check_begun()
            schema = self._schema(table)
            arrays = self._check_arrays(schema, keys, rows, deleted)
            self._check_own(schema, arrays[0])
            if step is not None:
                self._step = step
            self._begun_ns = self._begun_ns or time.time_ns()
            messages = 0
            with self._end_run_on_error():
                for block in _split_blocks(schema, *arrays):
                    messages += self._publish_block(schema, *block)
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
            return self._totals()

    def _totals(self) -> dict[str, int]:
        return {name: sum(counts) for name, counts in self._counts.items()}

    def commit(
        self,
        version: int | None = None,
        step: int | None = None,
        dense: str | None = None,
        *,
        everywhere: Mapping[str, int] | None = None,
        time_ns: int | None = None,
    ) -> int:
        """Make the published rows a version, in this publisher's partitions; return the version.

        Durable on return.

        Args:
            version: The version, which grows over all runs of a model. None selects one more than
                the last.
            step: The trainer's step.
            dense: The location of the version's dense weights.
            everywhere: The number of rows that all ranks published, by table; None if this
                publisher is the only one.
            time_ns: The time that the commit shows. None selects the clock's, once the rows are
                durable. If several ranks publish, give all the same.
        """
        with self._mutex:
            self._check_begun()
            version = self._version + 1 if version is None else version
            self._check_version(version)
            if step is not None:
                self._step = step
            with (
                publish_span(self._model, version, self._begun_ns) as span,
                self._end_run_on_error(),
            ):
                # Rows first: a log must never hold a commit without its rows.
                self._log.flush()
                totals = self._totals() if everywhere is None else everywhere
                no_counts = [0] * self._log.partitions
                # The same in all partitions, so that their event times agree.
                shown_ns = time.time_ns() if time_ns is None else time_ns
                for partition in self._own:
                    tables = {
                        name: TableCount(
                            here=self._counts.get(name, no_counts)[partition], everywhere=total
                        )
                        for name, total in totals.items()
                    }
                    body = CommitBody(tables=tables, dense=dense)
                    self._send(
                        partition,
                        Kind.COMMIT,
                        body,
                        version=version,
                        span=span,
                        time_ns=shown_ns,
                    )
                self._log.flush()
                span.note_rows(self._totals(), len(self._own))
            self._counts = {}
            self._begun_ns = 0
            self._committed_ns = shown_ns
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

    def _check_arrays(
        self,
        schema: TableSchema,
        keys: npt.ArrayLike,
        rows: npt.NDArray[Any] | None,
        deleted: npt.ArrayLike | None,
    ) -> tuple[Keys, npt.NDArray[Any] | None, Mask | None]:
        try:
            key_array = as_keys(keys)
        except InvalidArgument as error:
            raise InvalidArgument(f"table {schema.name}: {error}") from None
        n = len(key_array)
        mask = None if deleted is None else np.asarray(deleted)
        if mask is not None and (mask.dtype != np.bool_ or mask.shape != (n,)):
            raise InvalidArgument(
                f"table {schema.name}: deleted is {mask.dtype}{list(mask.shape)}, "
                f"expected bool[{n}]"
            )
        if rows is None:
            if mask is None or not mask.all():
                raise InvalidArgument(
                    f"table {schema.name}: rows are missing; only deletions need no rows"
                )
            return key_array, None, mask
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
            _check_finite(schema, key_array, rows, mask)
        return key_array, rows, mask

    def _check_own(self, schema: TableSchema, keys: Keys) -> None:
        if len(self._own) == self._log.partitions:
            return
        partitions = partition_of(keys, self._log.partitions)
        others = np.flatnonzero(~np.isin(partitions, self._own))
        if len(others):
            raise InvalidArgument(
                f"table {schema.name}: key {keys[others[0]]} belongs to partition "
                f"{partitions[others[0]]}, which is not one of this publisher's own partitions: "
                "publish it from the rank that owns the partition"
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
        span: PublishSpan = NO_SPAN,
        time_ns: int | None = None,
    ) -> None:
        header = RecordHeader(
            model=self._model,
            kind=kind,
            run=self._run,
            publisher=self._publisher,
            step=self._step,
            seq=self._seqs[partition] + 1,
            version=self._version + 1 if version is None else version,
            time_ns=time.time_ns() if time_ns is None else time_ns,
            partition=partition,
            partitions=self._log.partitions,
            table=schema.name if schema else "",
            dtype=schema.dtype if schema else "",
            dim=schema.dim if schema else 0,
        )
        self._log.publish(partition, span.carried_by(encode_record(Record(header, body))))
        self._seqs[partition] += 1

    def _check_version(self, version: int) -> None:
        if not self._version < version < 1 << 64:
            raise InvalidArgument(
                f"version {version} is not above version {self._version}: versions must grow over "
                "all runs"
            )

    def _check_known(self, remedy: str) -> None:
        if self._is_emptied:
            raise FailedPrecondition(
                f"retention removed all messages of petps from {self._log.name}, so the last "
                f"version is unknown: give {remedy}"
            )

    def _check_begun(self) -> None:
        if self._failed:
            raise FailedPrecondition(
                f"run {self._run} ended with an error ({self._failed}): begin a new run with a new "
                "Publisher and a base or a continue marker"
            )
        if not self._has_begun:
            raise FailedPrecondition("begin the run first: begin_base() or begin_continue()")

    @contextmanager
    def _end_run_on_error(self) -> Iterator[None]:
        """End the run on any error: the seqs of the block may or may not be in the log."""
        try:
            yield
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}"
            raise


def _read_end(log: DeltaLog) -> tuple[int, int, bool]:
    """Return (highest run, highest complete version, is emptied) from the log's last messages.

    A log is emptied if it once had messages, and no message of petps is left.
    """
    run = version = 0
    for message in log.last_messages(range(log.partitions)).values():
        try:
            header = read_header(message)
        except DeltaError:
            continue  # not a message of petps; ingest reports it
        run = max(run, header.run)
        is_complete = header.kind in (Kind.COMMIT, Kind.BASE)
        version = max(version, header.version if is_complete else header.version - 1)
    is_emptied = run == 0 and any(log.end_offsets(range(log.partitions)).values())
    return run, version, is_emptied


def _check_finite(
    schema: TableSchema, keys: Keys, rows: npt.NDArray[np.float32], deleted: Mask | None
) -> None:
    step = max(1, FINITE_VALUES // schema.dim)
    for start in range(0, len(keys), step):
        is_finite = np.isfinite(rows[start : start + step])
        if is_finite.all():
            continue
        is_valid = is_finite.all(axis=1)
        if deleted is not None:
            is_valid |= deleted[start : start + step]
        if not is_valid.all():
            position = start + int(np.argmin(is_valid))
            raise InvalidArgument(
                f"table {schema.name}: the row of key {keys[position]} (row {position}) has a NaN "
                "or infinity; fix the trainer, or allow such rows with allow_not_finite=True"
            )


def _split_blocks(
    schema: TableSchema, keys: Keys, rows: npt.NDArray[Any] | None, deleted: Mask | None
) -> Iterator[tuple[Keys, Rows, Mask | None]]:
    """Yield blocks of stored rows, with only the last row of each key, in the given order."""
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
