"""Pool: an open pool, with the catalogue, rows and upkeep. petps/pool/__init__.py has the rules."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.delta.schema import check_instance
from petps.errors import FailedPrecondition, InvalidArgument, PetpsError
from petps.pool.arrays import (
    MAX_ROWS_PER_APPLY,
    as_encoded,
    as_stored,
    check_decoded,
    check_refused,
)
from petps.pool.reader import (
    DEFAULT_MODEL,
    Form,
    Keys,
    Mask,
    PoolReader,
    Rows,
    TableInfo,
    empty_rows,
)

if TYPE_CHECKING:
    from petps.pool.export import Bar
from petps_client.arrays import as_keys

__all__ = ["MAX_ROWS_PER_APPLY", "Pool", "PushReport"]

DEFAULT_PARTITIONS: Final = 8


@dataclass(slots=True)
class PushReport:
    """Result of a push, in rows. ``refused``: new keys that a full table refused."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    absent: int = 0
    refused: int = 0
    superseded: int = 0

    def add(self, report: _native.ApplyReport) -> None:
        """Add one batch's report."""
        for name, value in report.as_dict().items():
            setattr(self, name, getattr(self, name) + value)

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)


def _close_quietly(native: _native.Tables) -> None:
    """Close a pool at the exit of the process. If that fails, the next open recovers the pool."""
    with contextlib.suppress(PetpsError):
        native.close()


class Pool(PoolReader):
    """An open pool, usable as a context manager. It is closed at the latest when the process exits.

    Threads: any thread may call any method; pulls and pushes run without the GIL.
    """

    def __init__(self, native: _native.Tables, *, is_borrowed: bool = False) -> None:
        """is_borrowed: somebody else closes ``native``."""
        self._native: _native.Tables = native
        self._finalizer = None if is_borrowed else weakref.finalize(self, _close_quietly, native)

    @staticmethod
    def create(
        path: str | PathLike[str] | None = None, *, durability: str = "power", replace: bool = False
    ) -> Pool:
        """See petps.create."""
        if durability not in ("power", "process"):
            raise InvalidArgument(
                f"durability '{durability}' is unknown; write 'power' or 'process'"
            )
        kind = cast(Literal["power", "process"], durability)
        name = "" if path is None else fspath(path)
        return Pool(_native.Tables.create(name, durability=kind, replace=replace))

    @staticmethod
    def discard(path: str | PathLike[str]) -> None:
        """Undo create() of a pool that no process has open."""
        _native.Tables.discard(fspath(path))

    @staticmethod
    def open(path: str | PathLike[str], *, read_only: bool = False) -> Pool:
        """See petps.open."""
        if not fspath(path):
            raise InvalidArgument("path must name a pool, got an empty path")
        return Pool(_native.Tables.open(fspath(path), read_only=read_only))

    @property
    def native(self) -> _native.Tables:
        """Return the native tables, for other rooms of petps (server, ingest, checkpoint)."""
        return self._native

    def close(self) -> None:
        """Close cleanly, after calls in progress. Raises FailedPrecondition while a server runs."""
        self._native.close()
        if self._finalizer is not None:
            self._finalizer.detach()

    def __repr__(self) -> str:
        if self.closed:
            return "<petps.Pool closed>"
        return f"<petps.Pool {self._native.info().path or 'in memory'}>"

    # ---- catalogue

    def create_model(self, name: str = DEFAULT_MODEL, partitions: int = DEFAULT_PARTITIONS) -> str:
        """Create a model with its first instance, and return that one's name (``model@0``)."""
        return self._native.create_instance(name, f"{name}@0", partitions).name

    def create_instance(self, name: str) -> str:
        """Create an instance ``model@...`` with empty copies of the tables of the current one.

        After an error, such as a full disk, there is no such instance.
        """
        model = name.partition("@")[0]
        current = self._native.resolve(model)
        check_instance(model, name)
        instance = self._native.create_instance(model, name, current.partitions)
        try:
            self._copy_tables(current, instance)
        except BaseException:
            with contextlib.suppress(PetpsError):
                self._native.drop_instance(instance.id)
            raise
        return instance.name

    def _copy_tables(
        self, current: _native.InstanceRecord, instance: _native.InstanceRecord
    ) -> None:
        for table in self._native.tables():
            record = table.record
            if record.instance == current.id:
                self._native.create_table(
                    table.name,
                    instance=instance.id,
                    dim=record.dim,
                    dtype=record.dtype,
                    capacity=record.capacity,
                    feed=cast(Literal["push", "delta"], record.feed),
                    default_row=table.default_row(),
                    expire_after=record.expire_after,
                )

    def switch_alias(self, alias: str, instance: str) -> None:
        """Make ``alias`` refer to ``instance``, for all tables at once. Durable on return.

        The instance that it referred to before is frozen. Raises FailedPrecondition if the
        instance's base is not loaded yet.
        """
        self._native.set_alias(alias, self._native.resolve(instance).id)

    def drop_instance(self, instance: str) -> None:
        """Remove an instance and its tables; their space is reused.

        Raises FailedPrecondition while an alias (or the plain model name) refers to it.
        """
        self._native.drop_instance(self._native.resolve(instance).id)

    def drop_table(self, table: str, *, model: str | None = None) -> None:
        """Remove a table that pushes feed; its space is reused.

        Raises FailedPrecondition for a table that deltas feed, because the log goes on with its
        rows.
        """
        self._native.drop_table(self.table(table, model).record.id)

    def create_table(
        self,
        name: str,
        *,
        dim: int,
        capacity: int,
        dtype: str = "f32",
        default: float | npt.ArrayLike = 0.0,
        feed: Literal["push", "delta"] = "push",
        model: str | None = None,
        expire_after: int = 0,
    ) -> TableInfo:
        """Create a table of ``model``; create the model if the pool has none at all.

        Args:
            name: The table's name.
            dim: Values in a row.
            capacity: Rows that the table can hold.
            dtype: 'f32', 'f16', 'bf16' or 'int8'.
            default: Row of a missing key: a number or float[dim].
            feed: Source of its rows: pushes or a delta log.
            model: A model, instance or alias; None selects the only model, or else 'default'.
            expire_after: See set_expiry().
        """
        if model is None and not self._native.instances():
            self.create_model()
        instance = self._instance(model)
        stored = _native.encode_rows(dtype, _default_row(default, dim, name))
        table = self._native.create_table(
            name,
            instance=instance.id,
            dim=dim,
            dtype=dtype,
            capacity=capacity,
            feed=feed,
            default_row=stored[0] if np.any(np.asarray(default)) else None,
            expire_after=expire_after,
        )
        return self._info(table)

    def set_expiry(self, table: str, seconds: int, *, model: str | None = None) -> None:
        """Let the rows of a table expire, or never more. Durable on return.

        A row that was not written for ``seconds`` is deleted while a server has the pool. Time is
        that of the log's commits, in tables that deltas feed, else the server's
        (native/table/EXPIRY.md). Rows that are in the table already count as written at the next
        commit, if rows never expired before.

        Args:
            table: The table's name.
            seconds: The age at which a row expires; 0: never. At most 100 years.
            model: A model, instance or alias; None selects the only model, or else 'default'.

        Raises:
            InvalidArgument: More than 100 years.
            FailedPrecondition: The pool was made by a release before 0.2, in whose format rows
                cannot expire.
        """
        self._native.set_expiry(self.table(table, model).record.id, seconds)

    def grow(
        self,
        table: str,
        capacity: int,
        *,
        model: str | None = None,
        paced: bool = True,
        progress: Callable[[int, int], bool] = lambda copied, buckets: True,
    ) -> None:
        """Give a table more capacity. Pulls and writes go on; durable on return.

        While it runs, the pool has two indexes of the table. Rows stay where they are.

        Args:
            table: The table's name.
            capacity: Rows, more than the table has now.
            model: A model, instance or alias; None selects the only model, or else 'default'.
            paced: Leave most of the time to pulls and writes.
            progress: Receives the index buckets copied and the buckets in all; False gives up.

        Raises:
            InvalidArgument: The capacity is not more than now.
            ResourceExhausted: The disk has no room for it.
            FailedPrecondition: The table grows already, a reader still uses the index that it had
                before it grew last, or ``progress`` gave up. The table is as it was.
        """
        self._native.grow(
            self.table(table, model).record.id, capacity, paced=paced, progress=progress
        )

    def shrink(self, progress: Callable[[int, int], bool] = lambda done, free: True) -> int:
        """Give the disk blocks of the pool's free space back to the file system.

        Free are the extents of dropped tables and the indexes that tables had before they grew. The
        pool's file keeps its length, with holes; pulls and writes go on. A hole gets blocks again
        before it is used, so a full disk is an error then and not a lost page.

        Args:
            progress: Receives the bytes done and all free bytes; False ends it.

        Returns:
            The bytes of free space that have no blocks now.

        Raises:
            Unimplemented: The file system or the medium cannot do that (ext2, device-DAX).
            FailedPrecondition: A network card keeps the pool's pages (rdma), the pool is open
                read-only, or a process may still read what was free before the last restart.
        """
        return self._native.shrink(progress)

    def models(self) -> list[str]:
        """Return the names of all models."""
        return sorted({instance.model for instance in self._native.instances()})

    def tables(self, model: str | None = None) -> list[TableInfo]:
        """Return all tables, or those of one model, instance or alias."""
        selected = None if model is None else self._native.resolve(model).id
        return [
            self._info(table)
            for table in self._native.tables()
            if selected in (None, table.record.instance)
        ]

    def table(self, name: str, model: str | None = None) -> _native.Table:
        """Return the native table ``name`` of ``model``. NotFound lists the existing tables."""
        return self._native.find(self._instance(model).name, name)

    def _instance(self, model: str | None) -> _native.InstanceRecord:
        return self._native.resolve(self._model(model))

    def _info(self, table: _native.Table) -> TableInfo:
        record = table.record
        names = {instance.id: instance.name for instance in self._native.instances()}
        return TableInfo.of(record, names[record.instance])

    # ---- rows

    def _pull(
        self,
        model: str | None,
        tables: Sequence[str],
        keys: Sequence[Keys],
        masks: Sequence[Mask | None],
        out: Rows | None = None,
        dtype: Form = "f32",
    ) -> list[Rows]:
        instance = self._instance(model).name
        results: list[Rows] = []
        for name, table_keys, mask in zip(tables, keys, masks, strict=True):
            table = self._native.find(instance, name)
            rows = empty_rows(table, table_keys.shape[0], dtype) if out is None else out
            table.pull(table_keys, rows, mask)
            results.append(rows)
        return results

    def push(
        self,
        table: str,
        keys: npt.ArrayLike,
        rows: npt.ArrayLike,
        *,
        dtype: Form = "f32",
        allow_not_finite: bool = False,
        model: str | None = None,
    ) -> PushReport:
        """Write full rows. Durable on return. The last row of a repeated key wins.

        Args:
            table: The table's name.
            keys: integers[n].
            rows: floats[n, dim], which are encoded to the table's dtype; with dtype="stored"
                uint8[n, row_bytes].
            dtype: Form of ``rows``.
            allow_not_finite: Accept rows with a NaN or infinity.
            model: A model, instance or alias; None selects the only model, or else 'default'.

        Raises:
            ResourceExhausted: The table or the disk is full. A full table updates the keys that it
                has and refuses new ones; see the error's ``report``.
            FailedPrecondition: Deltas write the table.
        """
        native = self.table(table, model)
        _check_feed(native)
        return self._write(native, keys, rows, allow_not_finite, stored=dtype == "stored")

    def load(
        self,
        table: str,
        keys: npt.ArrayLike,
        rows: npt.ArrayLike,
        *,
        model: str | None = None,
        allow_not_finite: bool = False,
    ) -> PushReport:
        """Write rows as push() does, also to a delta-fed table that has applied no delta yet."""
        native = self.table(table, model)
        if native.record.feed == "delta" and any(
            progress.instance == native.record.instance for progress in self._native.all_progress()
        ):
            raise FailedPrecondition(
                f"table '{table}' has applied deltas already, so only its log may write it: "
                "publish to the log (petps publish) instead"
            )
        return self._write(native, keys, rows, allow_not_finite)

    def _write(
        self,
        native: _native.Table,
        keys: npt.ArrayLike,
        rows: npt.ArrayLike,
        allow_not_finite: bool,
        *,
        stored: bool = False,
    ) -> PushReport:
        key_array = as_keys(keys)
        dtype, dim, name = native.dtype, native.dim, native.name
        if stored:
            encoded = as_stored(rows, len(key_array), native.row_bytes, name)
            if not allow_not_finite:
                check_decoded(key_array, encoded, dtype, dim, name)
        else:
            encoded = as_encoded(
                key_array, rows, dtype, dim, name, allow_not_finite=allow_not_finite
            )
        report = PushReport()
        for at in range(0, len(key_array), MAX_ROWS_PER_APPLY):
            part = slice(at, at + MAX_ROWS_PER_APPLY)
            report.add(native.apply(key_array[part], encoded[part]))
        check_refused(native, report)
        return report

    def erase(self, table: str, keys: npt.ArrayLike, *, model: str | None = None) -> PushReport:
        """Delete keys. Durable on return. Missing keys are counted and are no error."""
        native = self.table(table, model)
        _check_feed(native)
        key_array = as_keys(keys)
        report = PushReport()
        for at in range(0, len(key_array), MAX_ROWS_PER_APPLY):
            report.add(native.apply(key_array[at : at + MAX_ROWS_PER_APPLY], None))
        return report

    def scan(self, table: str, *, model: str | None = None) -> Iterator[tuple[Keys, Rows]]:
        """Yield all rows in pages: keys uint64[n], rows float32[n, dim].

        The scan may or may not yield rows that are written during it.
        """
        native = self.table(table, model)
        with native.scan() as pages:
            for keys, stored in pages:
                yield keys, _native.decode_rows(native.dtype, native.dim, stored)

    # ---- upkeep

    def verify(self, goes_on: Callable[[], bool] | None = None) -> _native.VerifyReport:
        """Read everything and check it. Slow; may run beside pulls and pushes.

        goes_on: Called at most every 50 ms; False ends it, and the report is incomplete.
        """
        return self._native.verify(goes_on)

    def tables_to_scrub(self, table: str, model: str | None) -> list[_native.Table]:
        """Return the named table of a model; if ``table`` is empty, all tables.

        All tables of the model, or of the pool if ``model`` is None.
        """
        if table:
            return [self.table(table, model)]
        wanted = None if model is None else self._instance(model).id
        return [own for own in self._native.tables() if wanted in (None, own.record.instance)]

    def scrub(
        self,
        table: str = "",
        *,
        model: str | None = None,
        paced: bool = False,
        progress: Callable[[str, int, int], bool] = lambda table, done, buckets: True,
        log: Callable[[str], None] = lambda line: None,
    ) -> list[dict[str, Any]]:
        """Compare all rows with their checksums, and remove those that are damaged.

        The removed keys are listed in POOL.damage; a server of the pool restores them if it can
        (native/table/SCRUB.md).

        Args:
            table: The table; by default all tables of the model.
            model: A model, instance or alias; None selects all.
            paced: A server keeps to its limit; a pool that no server has is read at full speed.
            progress: Receives the table, its buckets done and its buckets; False ends the pass.
            log: Receives a line for each of the first damaged rows.

        Returns:
            A report for each table: rows, damaged, removed, default_row_damaged, missing.

        Raises:
            FailedPrecondition: The pool is a device, which has no place for POOL.damage: serve it.
            IoError: POOL.damage cannot be written. The damaged rows stay.
        """
        from petps.pool.scrub import scrub_tables

        return scrub_tables(
            self._native, self.tables_to_scrub(table, model), progress=progress, log=log
        )

    def export(
        self, folder: str | PathLike[str], *, model: str | None = None, bar: Bar | None = None
    ) -> dict[str, Any]:
        """Write every row of a model as a base (`petps export`), and return facts about it.

        The folder must hold no base yet. ``bar`` receives the progress, table by table.
        """
        # Imported late: pulls and pushes need no Arrow.
        from petps.pool.export import write_base

        instance = self._instance(model)
        if bar is None:
            return write_base(self._native, instance, folder)
        return write_base(self._native, instance, folder, bar=bar)

    def back_up(
        self,
        store: str | PathLike[str],
        *,
        model: str | None = None,
        full: bool = False,
        bar: Bar | None = None,
    ) -> dict[str, Any]:
        """Write a version of a model to a checkpoint store (`petps backup`): BACKUP.md.

        Args:
            store: A folder, or any URL that fsspec knows; made if there is none.
            model: A model, instance or alias; None selects the only model.
            full: Write all rows, even if an increment would do.
            bar: Receives the progress, table by table.

        Returns:
            Facts about the version.

        Raises:
            InvalidArgument: The pool has several models, and none is given.
            FailedPrecondition: A partition's rows are a mixture, or the store is of something else.
            IoError: The store cannot be read or written.
        """
        from petps.pool.backup import back_up
        from petps.pool.export import no_bar

        instance = self.backed_up(model)
        return back_up(self._native, instance, fspath(store), full=full, bar=bar or no_bar)

    def backed_up(self, model: str | None) -> _native.InstanceRecord:
        """Return the instance that back_up() writes. Raises InvalidArgument, NotFound."""
        models = self.models()
        if model is None and len(models) > 1:
            raise InvalidArgument(
                f"the pool has {len(models)} models ({', '.join(models)}): name one (--model), and "
                "give each a store of its own"
            )
        return self._instance(model)

    def status(self) -> dict[str, Any]:
        """Return what `petps status` shows, in the form of the server's status text."""
        info = self._native.info().as_dict()
        info["bytes"] = info.pop("size_bytes")
        info["walked"] = self._native.walked()
        progress = self._native.all_progress()
        instances = [
            record.as_dict()
            | {
                "applied_version": self._native.applied_version(record.id),
                "run": max((p.run for p in progress if p.instance == record.id), default=0),
            }
            for record in self._native.instances()
        ]
        tables = [
            table.record.as_dict() | table.status().as_dict() for table in self._native.tables()
        ]
        from petps.pool.damage import damage_status

        return {
            "pool": info,
            "scrub": damage_status(self._native),
            "instances": instances,
            "aliases": self._native.aliases(),
            "previous_of_aliases": self._native.previous_of_aliases(),
            "tables": tables,
        }


def _default_row(default: float | npt.ArrayLike, dim: int, table: str) -> Rows:
    if not 1 <= dim <= 4096:
        raise InvalidArgument(f"table '{table}': dim {dim} is outside 1..4096")
    row = np.asarray(default, dtype=np.float32)
    if row.ndim == 0:
        row = np.full(dim, row, np.float32)
    if row.shape != (dim,):
        raise InvalidArgument(
            f"table '{table}': default has shape {row.shape}, expected one number or ({dim},)"
        )
    if not np.isfinite(row).all():
        raise InvalidArgument(f"table '{table}': default has a NaN or infinity")
    return np.ascontiguousarray(row.reshape(1, dim))


def _check_feed(table: _native.Table) -> None:
    if table.record.feed == "delta":
        raise FailedPrecondition(
            f"only deltas write table '{table.name}': publish to its log (petps publish) instead"
        )
