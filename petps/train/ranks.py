"""Versions of tables that several ranks hold: shares of the store's version, and the log's.

Owns:        RankedOutput (a hook of Pipeline), Every, Restored, publisher_of(), store_tables().
Never does:  train; know a policy, or the kind of the log.
Called by:   trainers, demo.
Invariants:  a version exists in the store once every rank has written its share, and in the log
             once the log has acknowledged every rank's rows. A rank that fails still meets
             the others, so that none waits for it. A rank acknowledges what it read of the
             tracker only once the version exists.
Threads:     the pipeline's caller; arranging the store in the background has its own.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from petps.checkpoint import Checkpointer, Column, Policy, Store, Table
from petps.checkpoint.checkpointer import Decision
from petps.checkpoint.published import Published
from petps.checkpoint.state import Version
from petps.delta import DeltaLog, TableSchema
from petps.errors import FailedPrecondition, InvalidArgument, PetpsError, Unavailable
from petps.publish import Position, Publisher
from petps.train.link import Link
from petps.train.output import PUBLISH, LazyParts, LogRows, read_pieces
from petps.train.pipeline import Boundary
from petps.train.pytorch import torch_module
from petps.train.sharded import ShardedTables
from petps.train.source import TrackedSource
from petps.train.stages import give_way

__all__ = ["Every", "RankedOutput", "Restored", "publisher_of", "store_tables"]

_log = logging.getLogger("petps.train")
# Parts of a version besides those of TrainerOutput. The names of a rank's own parts end in it.
DENSE: Final = "petps.dense"
READER: Final = "petps.reader"
RANDOM: Final = "petps.random"
ADMISSION: Final = "petps.admission"


@dataclass(frozen=True, slots=True)
class Every:
    """A schedule: due after every ``steps`` steps, or once ``seconds`` have passed."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise InvalidArgument(f"Every needs either steps or seconds, got {self}")
        if (self.steps or self.seconds or 0) <= 0:
            raise InvalidArgument(f"Every needs a value above 0, got {self}")

    def is_due(self, step: int, since_s: float) -> bool:
        """Return whether it is due after ``step``; ``since_s``: seconds since it was due last."""
        if self.steps is not None:
            return step % self.steps == 0
        return since_s >= (self.seconds or 0)


@dataclass(frozen=True, slots=True)
class Restored:
    """The state from which a training continues.

    step: the last one trained. reader: the state of this rank's loader after it. position: for
    Publisher.begin_continue(), or None if nothing was published.
    """

    step: int
    reader: bytes
    position: Position | None


def store_tables(tables: ShardedTables) -> list[Table]:
    """Return the tables for Store.create(): the row, and the optimizer's columns."""
    return [
        Table(
            table.name, tuple(Column(name, "f32", width) for name, width in table.columns.items())
        )
        for table in tables
    ]


def publisher_of(
    log: DeltaLog,
    model: str,
    tables: ShardedTables,
    link: Link,
    *,
    schemas: Iterable[TableSchema] | None = None,
) -> Publisher:
    """Make this rank's publisher, for the run that rank 0 chooses.

    All ranks call this; afterwards each one begins the run. schemas: what to publish; None:
    float32 rows of all tables. Raises as Publisher does, or Unavailable, which names the rank
    whose publisher could not be made.
    """
    published = list(schemas or (TableSchema(t.name, "f32", t.spec.dim) for t in tables))

    def make(run: int | None, own: range | None) -> Publisher:
        return Publisher(log, model, tables.partitions, tables=published, run=run, own=own)

    with _fail_together(link, "the log's run was not begun"):
        own_run = make(None, None).run if link.rank == 0 else 0
    run = int(_gather_bytes(link, str(own_run).encode())[0])
    # No rank begins before all have read the state of the log.
    with _fail_together(link, "the log's run was not begun"):
        return make(run, tables.owned_partitions())


class RankedOutput:
    """A writer of all ranks' rows to a checkpoint store, to a log, or to both with one gather.

    Every rank has one, with the same arguments except its own ``tables``, ``link``, a handle of
    the same store, and a publisher_of() the same run, which has begun. The number of a version is
    its step. model, optimizer: the dense part of a version, taken from rank 0. patience: how
    many checkpoints in a row may fail (each is logged) before training stops with the error.
    """

    def __init__(
        self,
        tables: ShardedTables,
        link: Link,
        *,
        store: Store | None = None,
        policy: Policy | None = None,
        checkpoint: Every | None = None,
        publisher: Publisher | None = None,
        publish: Every | None = None,
        model: Any = None,
        optimizer: Any = None,
        dense: Callable[[int], str] | None = None,
        patience: int = 0,
    ) -> None:
        if (store is None) != (policy is None) or (checkpoint is not None and store is None):
            raise InvalidArgument("checkpoints need both a store and a policy")
        if publish is not None and publisher is None:
            raise InvalidArgument("publish needs a publisher")
        self._tables, self._link = tables, link
        self._store = store
        self._schedules = {"checkpoint": checkpoint, PUBLISH: publish}
        self._last_times = dict.fromkeys(self._schedules, time.monotonic())
        self.publisher = publisher
        self._model, self._optimizer, self._dense = model, optimizer, dense
        self._patience, self._failures = patience, 0
        self._background = ThreadPoolExecutor(1, "petps-train-arrange", give_way)
        self._arranging: Future[None] | None = None
        self._source: TrackedSource | None = None
        self._checkpointer: Checkpointer | None = None
        if store is not None and policy is not None:
            self._source = TrackedSource(
                tables.tracker, list(tables), owns=lambda _, keys: tables.owns(keys)
            )
            self._checkpointer = Checkpointer(store, policy, self._source)
        if publisher is not None:
            tables.tracker.add_tenant(PUBLISH)

    # ---- as a hook

    def wants(self, step: int) -> bool:
        """See Hook. Only rank 0's clock counts."""
        return self._link.rank == 0 and any(self._find_due(step).values())

    def act(self, boundary: Boundary) -> None:
        """See Hook. Raises on all ranks what writing raised; then nothing is forgotten."""
        plan = self._agree(boundary.step)
        reading = self._tables.tracker.read(PUBLISH) if self.publisher is not None else None
        rows = None
        if plan.publish and reading is not None and self.publisher is not None:
            tables = {table.name: table for table in self._tables}
            rows = LogRows(tables, self.publisher, reading, boundary.step)
        log = _LogVersion(self._link, self.publisher, rows, plan)
        failure: PetpsError | None = None
        try:
            if plan.next is not None:
                self._share(boundary, plan, log, reading)
            else:
                log.commit()
        except PetpsError as error:
            failure = error
            log.try_commit()  # the log's version does not need the store's
        except BaseException as error:
            failure = Unavailable(_describe(error))
            raise
        finally:
            log.end(failure)
            failed = self._commit(boundary.step, plan, failure)
            if reading is not None:
                if log.has_committed and not log.failure:
                    reading.acknowledge()
                else:
                    reading.abandon()
        if log.failure:
            raise Unavailable(f"step {boundary.step}: the log's version failed: {log.failure}")
        self._count_failure(boundary.step, plan, failed)

    def _find_due(self, step: int) -> dict[str, bool]:
        now = time.monotonic()
        return {
            kind: schedule is not None and schedule.is_due(step, now - self._last_times[kind])
            for kind, schedule in self._schedules.items()
        }

    def _agree(self, step: int) -> _Plan:
        """Agree on what is due and how it is written: rank 0 decides and sends it to all."""
        body = b""
        if self._link.rank == 0:
            due = self._find_due(step)
            next_version: Decision | str | None = None
            if due["checkpoint"] and self._checkpointer is not None:
                try:
                    self._wait_arranged()
                    next_version = self._checkpointer.next()
                except PetpsError as error:
                    next_version = _describe(error)
            version = 0 if self.publisher is None else self.publisher.version + 1
            dense = self._dense(step) if self._dense is not None and due[PUBLISH] else None
            # pickle is safe here: the bytes come from our own ranks.
            body = pickle.dumps(_Plan(due[PUBLISH], next_version, version, dense))
            for kind, is_due in due.items():
                if is_due:
                    self._last_times[kind] = time.monotonic()
        plan: _Plan = pickle.loads(_gather_bytes(self._link, body)[0])
        return plan

    def _share(self, boundary: Boundary, plan: _Plan, log: _LogVersion, reading: Any) -> None:
        if isinstance(plan.next, str):
            raise FailedPrecondition(f"rank 0 could not begin a version: {plan.next}")
        assert plan.next is not None
        assert self._source is not None
        assert self._checkpointer is not None
        self._source.on_gathered = log.rows.take if log.rows is not None else None
        self._source.begin()
        try:
            self._checkpointer.share(
                boundary.step, plan.next, self._link.rank, self._link.world,
                LazyParts(lambda: self._parts(boundary, log, reading)), replace_own=True,
            )  # fmt: skip
        finally:
            self._source.on_gathered = None

    def _parts(self, boundary: Boundary, log: _LogVersion, reading: Any) -> Mapping[str, bytes]:
        """Commit the log's version, then return the parts. The store calls it after the rows."""
        log.try_commit()
        rank = self._link.rank
        parts = {
            f"{READER}.{rank}": boundary.reader,
            f"{RANDOM}.{rank}": _get_random_state(self._model),
        }
        for table in self._tables:
            if table.spec.threshold > 1:
                parts[f"{ADMISSION}.{table.name}.{rank}"] = table.admission.save()
        if rank == 0 and self._model is not None:
            parts[DENSE] = _save_dense(self._model, self._optimizer)
        if self.publisher is not None and not log.failure:
            owed = {} if log.rows is not None else {
                table.name: reading.ids(table.name) for table in self._tables
            }  # fmt: skip
            parts |= Published(self.publisher.position(), owed).parts(rank)
        return parts

    def _commit(self, step: int, plan: _Plan, failure: PetpsError | None) -> PetpsError | None:
        """Commit the store's version on rank 0, once all ranks have written their shares.

        Returns the failure, the same on all ranks, or None.
        """
        if plan.next is None:
            return None
        assert self._source is not None
        assert self._checkpointer is not None
        assert self._store is not None
        failed = _find_failure(_gather_bytes(self._link, _describe(failure).encode()))
        if failed is None:
            error: PetpsError | None = None
            if self._link.rank == 0:
                try:
                    self._checkpointer.commit(step)
                except PetpsError as raised:
                    error = raised
            failed = _find_failure(_gather_bytes(self._link, _describe(error).encode())[:1])
        if failed is not None:
            self._source.abandon()
            return Unavailable(f"step {step}: no checkpoint was written: {failed}")
        versions = self._store.refresh().lineage_of(step).versions
        self._source.acknowledge(next(entry for entry in versions if entry.version == step))
        if self._link.rank == 0:
            self._arranging = self._background.submit(self._checkpointer.arrange)
        return None

    def _count_failure(self, step: int, plan: _Plan, failed: PetpsError | None) -> None:
        if plan.next is None:
            return
        if failed is None:
            self._failures = 0
            return
        self._failures += 1
        if self._failures > self._patience:
            raise failed
        _log.warning("[train] %s (%d in a row)", failed, self._failures)

    def _wait_arranged(self) -> None:
        """Wait until the store is arranged. That changes no version, so only log a failure."""
        if self._arranging is not None:
            try:
                self._arranging.result()
            except PetpsError as error:
                _log.warning("[train] arranging the store failed: %s", error)
            self._arranging = None

    def close(self) -> None:
        """Wait for the background work."""
        self._wait_arranged()
        self._background.shutdown()

    def __enter__(self) -> RankedOutput:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- restoring a version

    def restore(self, version: int | None = None) -> Restored:
        """Load the store's newest version: this rank's rows, and the dense part.

        All ranks call it; their number may differ from when the version was written. Rows and
        counts go to the ranks that own them now. A loader's state and random numbers go only to
        the same rank. Raises FailedPrecondition (not the newest: roll back first),
        DataLoss, and on the other ranks Unavailable, which names the rank that failed; then
        all call it again.
        """
        if self._store is None:
            raise FailedPrecondition("RankedOutput has no store to restore from: give it one")
        with _fail_together(self._link, "no version was restored"):
            newest = self._newest(self._store, version)
        with _fail_together(self._link, "no version was restored"):
            if self._link.rank == 0:
                self._store.count_restore()
        with _fail_together(self._link, "no version was restored"):
            return self._restore(self._store, newest)

    @staticmethod
    def _newest(store: Store, version: int | None) -> Version:
        versions = store.refresh().versions()
        if not versions or (version is not None and versions[-1].version != version):
            state = (
                f"versions up to {versions[-1].version}: roll back first"
                if versions
                else ("no version: nothing to restore")
            )
            raise FailedPrecondition(f"{store.name} has {state}")
        return versions[-1]

    def _restore(self, store: Store, newest: Version) -> Restored:
        assert self._source is not None
        store.refresh()
        for table in self._tables:
            table.load_pieces(read_pieces(store, newest.version, table.name, self._tables.owns))
            counts = [
                store.part(newest.version, name)
                for name in newest.parts
                if name.startswith(f"{ADMISSION}.{table.name}.")
            ]
            table.admission.load(counts, self._tables.owns)
        self._source.resume(store, newest.version)
        self._owe_again(store, newest.version)
        if self._model is not None:
            _load_dense(store.part(newest.version, DENSE), self._model, self._optimizer)
        own = {name: f"{name}.{self._link.rank}" for name in (READER, RANDOM)}
        if own[RANDOM] in newest.parts:
            _set_random_state(store.part(newest.version, own[RANDOM]), self._model)
        reader = b""
        if own[READER] in newest.parts:
            reader = store.part(newest.version, own[READER])
        return Restored(newest.version, reader, self._position(store, newest.version))

    def _owe_again(self, store: Store, version: int) -> None:
        tracker = self._tables.tracker
        if PUBLISH in tracker.tenants:
            tracker.remove_tenant(PUBLISH)
        if self.publisher is None:
            return
        tracker.add_tenant(PUBLISH)
        published = Published.of(store, version)
        for table, keys in ({} if published is None else published.owed).items():
            tracker.track(table, keys[self._tables.owns(keys)])

    def _position(self, store: Store, version: int) -> Position | None:
        """Return the position that the ranks of that version together had in the log."""
        entry = store.state.version(version)
        rank_count = sum(name.startswith(f"{READER}.") for name in entry.parts)
        if len(Published.positions(entry)) != rank_count:
            return None  # the log failed on some rank, so servers need a base
        published = Published.of(store, version)
        return None if published is None else published.position


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan of a boundary, which rank 0 makes and all ranks execute.

    publish: whether the log's ``version`` is due. next: how the store's version is written, or
    why it cannot be, or None if none is due. dense: the location of the version's dense part.
    """

    publish: bool
    next: Decision | str | None
    version: int
    dense: str | None


class _LogVersion:
    """The log's version of a boundary: each rank commits once the log has all ranks' rows."""

    def __init__(
        self, link: Link, publisher: Publisher | None, rows: LogRows | None, plan: _Plan
    ) -> None:
        self.rows = rows
        self.has_committed = False
        self.failure = ""
        self._link = link
        self._publisher = publisher
        self._plan = plan
        self._has_met = not plan.publish

    def commit(self) -> None:
        """Publish, meet the other ranks and commit. Raise what this rank's publisher raised."""
        if self.rows is None or self._publisher is None or self._has_met:
            return
        error: PetpsError | None = None
        try:
            self.rows.finish()
            self._publisher.flush()
        except PetpsError as raised:
            error = raised
        counts = self.meet(error)
        if error is not None:
            raise error
        if not self.failure:
            names = sorted({name for count in counts for name in count})
            everywhere = {name: sum(count.get(name, 0) for count in counts) for name in names}
            self._publisher.commit(
                self._plan.version, dense=self._plan.dense, everywhere=everywhere
            )
            self.has_committed = True

    def try_commit(self) -> None:
        """Commit, but keep an error: the checkpoint continues without the log."""
        try:
            self.commit()
        except PetpsError as error:
            self.failure = self.failure or _describe(error)

    def end(self, error: PetpsError | None) -> None:
        """Meet the others if this was not done yet, and learn whether all have committed."""
        if not self._plan.publish:
            return
        self.meet(error)
        self.failure = _find_failure(_gather_bytes(self._link, self.failure.encode())) or ""

    def meet(self, error: PetpsError | None) -> list[dict[str, int]]:
        """Tell the others once whether this rank failed; return the rows each has published.

        The result has, for each rank, a count by table. It is empty if this was done before.
        """
        if self._has_met:
            return []
        self._has_met = True
        counted = {} if self._publisher is None or error else self._publisher.counted()
        bodies = _gather_bytes(
            self._link, json.dumps({"error": _describe(error), "counted": counted}).encode()
        )
        answers = [json.loads(body) for body in bodies]
        for rank, answer in enumerate(answers):
            if answer["error"]:
                self.failure = self.failure or f"rank {rank}: {answer['error']}"
        return [answer["counted"] for answer in answers]


@contextmanager
def _fail_together(link: Link, consequence: str) -> Iterator[None]:
    """If the block raises on any rank, raise on every rank on leaving it."""
    try:
        yield
    except BaseException as error:
        _gather_bytes(link, _describe(error).encode())
        raise
    failure = _find_failure(_gather_bytes(link, b""))
    if failure is not None:
        raise Unavailable(f"{consequence}: {failure}")


def _describe(error: BaseException | None) -> str:
    """Return an error as text, or an empty string for None."""
    return "" if error is None else f"{type(error).__name__}: {error}"


def _find_failure(answers: list[bytes]) -> str | None:
    for rank, answer in enumerate(answers):
        if answer:
            return f"rank {rank}: {answer.decode()}"
    return None


def _gather_bytes(link: Link, body: bytes) -> list[bytes]:
    """Return the bytes of every rank, in the order of ranks, to every rank."""
    torch = torch_module()
    lengths = [int(length) for length in link.all_gather(torch.tensor([len(body)]))]
    padded = np.zeros(max(1, *lengths), np.uint8)
    padded[: len(body)] = np.frombuffer(body, np.uint8)
    bodies = link.all_gather(torch.from_numpy(padded))
    return [values.numpy().tobytes()[:n] for values, n in zip(bodies, lengths, strict=True)]


def _get_random_state(model: Any) -> bytes:
    """Return the random state of the host, followed by that of the model's GPU if it has one."""
    torch = torch_module()
    states, gpu = [torch.get_rng_state()], _find_gpu(model)
    if gpu is not None:
        states.append(torch.cuda.get_rng_state(gpu))
    return b"".join(values.numpy().tobytes() for values in states)


def _set_random_state(state: bytes, model: Any) -> None:
    torch = torch_module()
    host, gpu = torch.get_rng_state().numel(), _find_gpu(model)
    states = torch.from_numpy(np.frombuffer(state, np.uint8).copy())
    torch.set_rng_state(states[:host])
    if gpu is not None and len(states) > host:
        torch.cuda.set_rng_state(states[host:], gpu)


def _find_gpu(model: Any) -> Any:
    devices = [] if model is None else [value.device for value in model.parameters()]
    return next((device for device in devices if device.type == "cuda"), None)


def _save_dense(model: Any, optimizer: Any) -> bytes:
    out = io.BytesIO()
    states = {"model": model.state_dict()}
    if optimizer is not None:
        states["optimizer"] = optimizer.state_dict()
    torch_module().save(states, out)
    return out.getvalue()


def _load_dense(body: bytes, model: Any, optimizer: Any) -> None:
    states = torch_module().load(io.BytesIO(body), map_location="cpu", weights_only=True)
    model.load_state_dict(states["model"])
    if optimizer is not None:
        optimizer.load_state_dict(states["optimizer"])
