"""Versions of tables that several ranks hold: shares of the store's version, and the log's.

Owns:        RankedOutput (a hook of Pipeline), Every, Restored, publisher_of(), store_tables().
Never does:  train; know a policy, or which log it is.
Called by:   trainers, demo.
Invariants:  a version exists in the store once every rank has written its share, and in the log
             once the log has acknowledged every rank's rows. A rank that fails still meets
             the others, so that none waits for it. What a rank read of the tracker is
             acknowledged only once the version exists.
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
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from petps.checkpoint import Checkpointer, Column, Policy, Store, Table
from petps.checkpoint.checkpointer import Next
from petps.checkpoint.published import Published
from petps.checkpoint.state import Version
from petps.delta import DeltaLog, TableSchema
from petps.errors import FailedPrecondition, InvalidArgument, PetpsError, Unavailable
from petps.publish import Position, Publisher
from petps.train.link import Link
from petps.train.output import PUBLISH, Late, Sent
from petps.train.pipeline import Boundary
from petps.train.pytorch import torch_module
from petps.train.sharded import ShardedTables
from petps.train.source import TrackedSource
from petps.train.stages import works_ahead
from petps.train.table import Floats, Keys

__all__ = ["Every", "RankedOutput", "Restored", "publisher_of", "store_tables"]

_log = logging.getLogger("petps.train")
# Parts of a version besides those of TrainerOutput. The names of a rank's own parts end in it.
DENSE: Final = "petps.dense"
READER: Final = "petps.reader"
RANDOM: Final = "petps.random"
ADMISSION: Final = "petps.admission"


@dataclass(frozen=True, slots=True)
class Every:
    """A schedule: something is due after every ``steps`` steps, or once ``seconds`` have passed."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise InvalidArgument("every so many steps, or seconds: one of the two")
        if (self.steps or self.seconds or 0) <= 0:
            raise InvalidArgument(f"every {self.steps or self.seconds}: not positive")

    def due(self, step: int, since_s: float) -> bool:
        """Return whether it is due after ``step``, ``since_s`` seconds after the last time."""
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
            table.name,
            tuple(Column(name, "f32", width) for name, width in table.columns.items()),
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
    sent = list(schemas or (TableSchema(t.name, "f32", t.spec.dim) for t in tables))

    def publisher(run: int | None, own: range | None) -> Publisher:
        return Publisher(log, model, tables.partitions, tables=sent, run=run, own=own)

    with _Together(link, "the log's run was not begun"):
        own_run = publisher(None, None).run if link.rank == 0 else 0
    run = int(_gather_bytes(link, str(own_run).encode())[0])
    # No rank begins before all have read the state of the log.
    with _Together(link, "the log's run was not begun"):
        return publisher(run, tables.owned())


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
            raise InvalidArgument("checkpoints need a store and a policy")
        if publish is not None and publisher is None:
            raise InvalidArgument("to publish needs a publisher")
        self._tables, self._link = tables, link
        self._store = store
        self._every = {"checkpoint": checkpoint, PUBLISH: publish}
        self._last = dict.fromkeys(self._every, time.monotonic())
        self.publisher = publisher
        self._model, self._optimizer, self._dense = model, optimizer, dense
        self._patience, self._failures = patience, 0
        self._behind = ThreadPoolExecutor(1, "petps-train-arrange", works_ahead)
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
        return self._link.rank == 0 and any(self._due(step).values())

    def act(self, boundary: Boundary) -> None:
        """See Hook. Raises on all ranks what writing raised; then nothing is forgotten."""
        plan = self._agree(boundary.step)
        reading = self._tables.tracker.read(PUBLISH) if self.publisher is not None else None
        sent = None
        if plan.publish and reading is not None and self.publisher is not None:
            tables = {table.name: table for table in self._tables}
            sent = Sent(tables, self.publisher, reading, boundary.step)
        log = _Log(self._link, self.publisher, sent, plan)
        failure: PetpsError | None = None
        try:
            if plan.next is not None:
                self._share(boundary, plan, log, reading)
            else:
                log.commit()
        except PetpsError as error:
            failure = error
            log.try_commit()  # the failure of the store's version does not affect the log's
        except BaseException as error:
            failure = Unavailable(f"{type(error).__name__}: {error}")
            raise
        finally:
            log.end(failure)
            committed = self._commit(boundary.step, plan, failure)
            if reading is not None:
                if log.committed and not log.failed:
                    reading.acknowledge()
                else:
                    reading.abandon()
        if log.failed:
            raise Unavailable(f"step {boundary.step}: the log's version failed: {log.failed}")
        self._judge(boundary.step, plan, committed)

    def _due(self, step: int) -> dict[str, bool]:
        now = time.monotonic()
        return {
            what: every is not None and every.due(step, now - self._last[what])
            for what, every in self._every.items()
        }

    def _agree(self, step: int) -> _Plan:
        """Agree on what is due and how it is written: rank 0 decides and sends it to all."""
        body = b""
        if self._link.rank == 0:
            due = self._due(step)
            next_version: Next | str | None = None
            if due["checkpoint"] and self._checkpointer is not None:
                try:
                    self._wait_arranged()
                    next_version = self._checkpointer.next()
                except PetpsError as error:
                    next_version = f"{type(error).__name__}: {error}"
            version = 0 if self.publisher is None else self.publisher.version + 1
            dense = self._dense(step) if self._dense is not None and due[PUBLISH] else None
            # pickle is safe here: the bytes come from our own ranks.
            body = pickle.dumps(_Plan(due[PUBLISH], next_version, version, dense))
            for what, is_due in due.items():
                if is_due:
                    self._last[what] = time.monotonic()
        plan: _Plan = pickle.loads(_gather_bytes(self._link, body)[0])
        return plan

    def _share(self, boundary: Boundary, plan: _Plan, log: _Log, reading: Any) -> None:
        if isinstance(plan.next, str):
            raise FailedPrecondition(f"rank 0 could not begin a version: {plan.next}")
        assert plan.next is not None
        assert self._source is not None
        assert self._checkpointer is not None
        self._source.also = log.sent.take if log.sent is not None else None
        self._source.begin()
        try:
            self._checkpointer.share(
                boundary.step, plan.next, self._link.rank, self._link.world,
                Late(lambda: self._parts(boundary, log, reading)), replace_own=True,
            )  # fmt: skip
        finally:
            self._source.also = None

    def _parts(self, boundary: Boundary, log: _Log, reading: Any) -> Mapping[str, bytes]:
        """Commit the log's version, then return the parts. The store calls it after the rows."""
        log.try_commit()
        rank = self._link.rank
        parts = {
            f"{READER}.{rank}": boundary.reader,
            f"{RANDOM}.{rank}": _random_state(self._model),
        }
        for table in self._tables:
            if table.spec.threshold > 1:
                parts[f"{ADMISSION}.{table.name}.{rank}"] = table.admission.saved()
        if rank == 0 and self._model is not None:
            parts[DENSE] = _dense_state(self._model, self._optimizer)
        if self.publisher is not None and not log.failed:
            owed = {} if log.sent is not None else {
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
        failed = _first(_gather_bytes(self._link, _encode_error(failure)))
        if failed is None:
            error: PetpsError | None = None
            if self._link.rank == 0:
                try:
                    self._checkpointer.commit(step)
                except PetpsError as raised:
                    error = raised
            failed = _first(_gather_bytes(self._link, _encode_error(error))[:1])
        if failed is not None:
            self._source.cancelled()
            return Unavailable(f"step {step}: no checkpoint was written: {failed}")
        versions = self._store.refresh().line_of(step).versions
        self._source.committed(next(entry for entry in versions if entry.version == step))
        if self._link.rank == 0:
            self._arranging = self._behind.submit(self._checkpointer.arrange)
        return None

    def _judge(self, step: int, plan: _Plan, failed: PetpsError | None) -> None:
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
        """Wait for the arranging. It changes no version, so a failure is only logged."""
        if self._arranging is not None:
            try:
                self._arranging.result()
            except PetpsError as error:
                _log.warning("[train] arranging the store failed: %s", error)
            self._arranging = None

    def close(self) -> None:
        """Wait for the work in the background."""
        self._wait_arranged()
        self._behind.shutdown()

    def __enter__(self) -> RankedOutput:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- back to a version

    def restore(self, version: int | None = None) -> Restored:
        """Load the store's newest version: this rank's rows, and the dense part.

        All ranks call it; their number may differ from when the version was written. Rows and
        counts go to the ranks that own them now. A loader's state and random numbers go only to
        the same rank. Raises FailedPrecondition (not the newest: roll back first),
        DataLoss, and on the other ranks Unavailable, which names the rank that failed; then
        all call it again.
        """
        if self._store is None:
            raise FailedPrecondition("the output has no store: there is nothing to restore from")
        with _Together(self._link, "no version was restored"):
            newest = self._newest(self._store, version)
        with _Together(self._link, "no version was restored"):
            if self._link.rank == 0:
                self._store.count_restore()
        with _Together(self._link, "no version was restored"):
            return self._restore(self._store, newest)

    @staticmethod
    def _newest(store: Store, version: int | None) -> Version:
        versions = store.refresh().versions()
        if not versions or (version is not None and versions[-1].version != version):
            raise FailedPrecondition(
                f"{store.name} has {'no version' if not versions else 'newer versions'}: "
                f"{'nothing to restore' if not versions else 'roll back first'}"
            )
        return versions[-1]

    def _restore(self, store: Store, newest: Version) -> Restored:
        assert self._source is not None
        store.refresh()
        for table in self._tables:
            table.load_pieces(self._own_pieces(store, newest.version, table.name))
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

    def _own_pieces(
        self, store: Store, version: int, table: str
    ) -> Iterator[tuple[Keys, Mapping[str, Floats]]]:
        columns = store.tables_of(version)[table].columns
        for rows in store.pieces(table, version):
            is_own = self._tables.owns(rows.keys)
            values = {
                column.name: column.values(rows.columns[column.name][is_own]) for column in columns
            }
            yield rows.keys[is_own], values
            del rows  # free this piece before the next one is made

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
    next: Next | str | None
    version: int
    dense: str | None


class _Log:
    """The log's version of a boundary: each rank commits once the log has all ranks' rows."""

    def __init__(
        self, link: Link, publisher: Publisher | None, sent: Sent | None, plan: _Plan
    ) -> None:
        self.sent = sent
        self.committed = False
        self.failed = ""
        self._link = link
        self._publisher = publisher
        self._plan = plan
        self._met = not plan.publish

    def commit(self) -> None:
        """Publish, meet the other ranks and commit. Raise what this rank's publisher raised."""
        if self.sent is None or self._publisher is None or self._met:
            return
        error: PetpsError | None = None
        try:
            self.sent.finish()
            self._publisher.flush()
        except PetpsError as raised:
            error = raised
        counts = self.meet(error)
        if error is not None:
            raise error
        if not self.failed:
            names = sorted({name for count in counts for name in count})
            everywhere = {name: sum(count.get(name, 0) for count in counts) for name in names}
            self._publisher.commit(
                self._plan.version, dense=self._plan.dense, everywhere=everywhere
            )
            self.committed = True

    def try_commit(self) -> None:
        """Commit, but keep an error: the checkpoint continues without the log."""
        try:
            self.commit()
        except PetpsError as error:
            self.failed = self.failed or f"{type(error).__name__}: {error}"

    def end(self, error: PetpsError | None) -> None:
        """Meet the others if this was not done yet, and learn whether all have committed."""
        if not self._plan.publish:
            return
        self.meet(error)
        self.failed = _first(_gather_bytes(self._link, self.failed.encode())) or ""

    def meet(self, error: PetpsError | None) -> list[dict[str, int]]:
        """Tell the others once whether this rank failed; return the rows each has published.

        The result has, for each rank, a count by table. It is empty if this was done before.
        """
        if self._met:
            return []
        self._met = True
        counted = {} if self._publisher is None or error else self._publisher.counted()
        bodies = _gather_bytes(
            self._link,
            json.dumps({"error": _encode_error_text(error), "counted": counted}).encode(),
        )
        answers = [json.loads(body) for body in bodies]
        for rank, answer in enumerate(answers):
            if answer["error"]:
                self.failed = self.failed or f"rank {rank}: {answer['error']}"
        return [answer["counted"] for answer in answers]


class _Together:
    """A block that fails on all ranks if it fails on one: each raises on leaving the block."""

    def __init__(self, link: Link, what: str) -> None:
        self._link = link
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        failure = "" if kind is None else f"{kind.__name__}: {error}"
        failed = _first(_gather_bytes(self._link, failure.encode()))
        if failed is not None and kind is None:
            raise Unavailable(f"{self._what}: {failed}")


def _encode_error_text(error: PetpsError | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _encode_error(error: PetpsError | None) -> bytes:
    return _encode_error_text(error).encode()


def _first(answers: list[bytes]) -> str | None:
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


def _random_state(model: Any) -> bytes:
    """Return the random state of the host, followed by that of the model's GPU if it has one."""
    torch = torch_module()
    states, gpu = [torch.get_rng_state()], _gpu_of(model)
    if gpu is not None:
        states.append(torch.cuda.get_rng_state(gpu))
    return b"".join(values.numpy().tobytes() for values in states)


def _set_random_state(state: bytes, model: Any) -> None:
    torch = torch_module()
    host, gpu = torch.get_rng_state().numel(), _gpu_of(model)
    states = torch.from_numpy(np.frombuffer(state, np.uint8).copy())
    torch.set_rng_state(states[:host])
    if gpu is not None and len(states) > host:
        torch.cuda.set_rng_state(states[host:], gpu)


def _gpu_of(model: Any) -> Any:
    devices = [] if model is None else [value.device for value in model.parameters()]
    return next((device for device in devices if device.type == "cuda"), None)


def _dense_state(model: Any, optimizer: Any) -> bytes:
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
