"""One training loop over sharded tables, in five modes that differ in what overlaps: PIPELINE.md.

Owns:        Pipeline, Step, MODES.
Never does:  open files, write checkpoints (hooks do), read data.
Called by:   trainers, demo, bench.
Invariants:  but in mode "stale", a batch is trained with rows that have all updates before it;
             nothing of a batch is applied on any worker unless its gradients are finite on all.
Threads:     the caller's; stages, link and write-back have their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import numpy as np

from petps.errors import FailedPrecondition, InvalidArgument
from petps.train.batch import Batch
from petps.train.buffer import Buffer, Shared, shared_rows
from petps.train.link import Links
from petps.train.pytorch import torch_module
from petps.train.routing import Asked, Layout, Owned, ask, exchange
from petps.train.sharded import ShardedTables
from petps.train.stages import Chain
from petps.train.timeline import Timeline
from petps.train.window import Lookup, Window

__all__ = ["MODES", "Boundary", "Hook", "Mode", "Pipeline", "Step"]

Mode = Literal["nested", "dual", "frozen", "synchronous", "stale"]
MODES: Final = ("nested", "dual", "frozen", "synchronous", "stale")
# How many batches beyond the one that is trained have their keys exchanged: the same on all
# workers, so that all can end together (Pipeline.close).
ROUTED_AHEAD: Final = 2


@dataclass(frozen=True, slots=True)
class Step:
    """What a batch did. loss: mean over the samples of all workers. Seconds: of this worker.

    lookup_stall: spent waiting for the batch's rows to be there, and to be written back; exposed:
    waiting for rows and gradients to cross; crossing: that these transfers took.
    """

    number: int
    samples: int
    loss: float
    seconds: float
    lookup_stall: float
    exposed: float
    crossing: float


@dataclass(frozen=True, slots=True)
class Boundary:
    """Between two steps: all rows of ``step`` are in the pools; reader: the loader's state."""

    step: int
    reader: bytes


class Hook(Protocol):
    """What is done between steps, on all workers at the same one."""

    def wants(self, step: int) -> bool:
        """Asked after each step on each worker; one that says yes is enough."""

    def act(self, boundary: Boundary) -> None:
        """Called on all workers; the next batch waits."""


@dataclass(eq=False, slots=True)
class _Work:
    """A batch on its way."""

    number: int
    parts: list[Batch]
    reader: bytes
    ended: bool
    asked: Asked | None = None
    owned: Owned | None = None
    buffer: Buffer | None = None
    shared: Shared | None = None
    tensors: list[dict[str, tuple[Any, Any]]] = field(default_factory=list)


class Pipeline:
    """Trains ``model`` on the batches of ``loader``; iterate over it, or call run().

    model(lookups, batch) -> the mean loss of the batch's samples: lookups are Lookup by feature,
    batch a micro-batch. ``optimizer``: torch's, of the dense parameters. mode: 'synchronous'
    overlaps nothing; 'dual' the way to the rows with training (NestPipe IV); 'frozen' transfers
    with computation inside a batch (V); 'nested' both; 'stale' as 'nested' without freshening: the
    baseline that is wrong. steps: train so many, else all that the loaders have. first_step: of the
    next batch, behind a restored version. arrange: puts a batch's samples in the order in which
    micro-batches are cut (clustering). deterministic: sums in a fixed order (bit-equal runs).

    Errors: InvalidArgument (a gradient that is not finite: nothing of that step was applied),
    Unavailable, DeadlineExceeded (a peer); then the pipeline has ended.
    """

    def __init__(
        self,
        model: Any,
        tables: ShardedTables,
        loader: Iterator[Batch],
        *,
        micro_batches: int = 1,
        mode: Mode = "nested",
        optimizer: Any = None,
        links: Links | None = None,
        features: Mapping[str, str] | None = None,
        arrange: Callable[[Batch], Batch] | None = None,
        hooks: Sequence[Hook] = (),
        steps: int | None = None,
        first_step: int = 1,
        deterministic: bool = False,
        device: str = "cpu",
        timeline: Timeline | None = None,
    ) -> None:
        if mode not in MODES:
            raise InvalidArgument(f"mode {mode!r} is unknown; there are: {', '.join(MODES)}")
        if micro_batches < 1:
            raise InvalidArgument(f"micro_batches {micro_batches} is below 1")
        self._torch = torch_module()
        self._model = model
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._optimizer = optimizer
        self._tables = tables
        self._loader = iter(loader)
        self._micros = micro_batches
        self._mode: Mode = mode
        self._links = links or Links.alone()
        if (self._links.rows.rank, self._links.rows.world) != (tables.rank, tables.world):
            raise InvalidArgument(
                f"the links are worker {self._links.rows.rank}'s of {self._links.rows.world}, the "
                f"tables {tables.rank}'s of {tables.world}"
            )
        self._layout = Layout(tables, features)
        for table in tables:
            table.admission.forget_ahead()  # what a loop before this one has only read ahead
        self._arrange = arrange
        self._hooks = list(hooks)
        self._deterministic = deterministic
        self._device = self._torch.device(device)
        self.timeline = timeline or Timeline()
        self._next_number = first_step
        self._last = None if steps is None else first_step + steps - 1
        self._reading = first_step
        self._reader = b""  # the loader's state behind its last batch
        self._ended = threading.Event()
        self._broken = ""
        self._active: Buffer | None = None
        self._retrieved: Buffer | None = None
        self._written = first_step - 1
        self._write_error: BaseException | None = None
        self._writing = threading.Condition()
        self._allowed = threading.Semaphore(0)
        self._crossing = 0.0
        ahead = mode in ("nested", "dual", "stale")
        overlaps = mode in ("nested", "frozen", "stale")
        name = f"petps-train-{tables.rank}"
        self._wire = ThreadPoolExecutor(1, f"{name}-link") if overlaps else None
        self._writer = ThreadPoolExecutor(1, f"{name}-write-back") if ahead else None
        self._chain: Chain | None = None
        self._chain_name = name
        self._ahead = ahead

    # ---- the caller's thread

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is not None:
            self._broken = self._broken or "its block was left by an error"
        self.close()

    def __iter__(self) -> Iterator[Step]:
        while (step := self.step()) is not None:
            yield step

    def run(self) -> list[Step]:
        """All steps, to the end."""
        return list(self)

    def step(self) -> Step | None:
        """Trains the next batch; None when there is none: then all rows are in the pool."""
        if self._broken:
            raise FailedPrecondition(f"the pipeline has ended: {self._broken}")
        began = time.monotonic()
        try:
            work = self._next_work()
            if work is None:
                self._wait_written(self._next_number - 1)
                return None
            return self._trained(work, began)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    def close(self) -> None:
        """Ends the threads, on all workers after the same step; rows trained are in the pool.

        Raises, once, what a stage or a write-back raised that no step has said.
        """
        chain, self._chain = self._chain, None
        whole = not self._broken
        try:
            if chain is not None and whole:
                # Peers may have begun to exchange the keys of this many batches: so do we.
                limit = self._next_number - 1 + ROUTED_AHEAD
                self._last = limit if self._last is None else min(self._last, limit)
                self._allowed.release()
                chain.drain()
            if self._writer is not None:
                self._writer.shutdown()  # waits for the pool alone, never for a peer
            if self._write_error is not None and whole:
                raise self._write_error
        except BaseException as error:
            whole = False
            self._broken = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._broken = self._broken or "it was closed"
            if chain is not None:
                chain.give_up()
                self._allowed.release()
            for pool in (self._wire, self._writer):
                if pool is not None:
                    pool.shutdown(wait=whole, cancel_futures=not whole)

    def _next_work(self) -> _Work | None:
        if self._ahead:
            if self._chain is None:
                stages = [
                    ("to-device", self._to_device),
                    ("route", self._route),
                    ("retrieve", self._retrieve),
                ]
                self._reading = self._next_number
                for _ in range(ROUTED_AHEAD):
                    self._allowed.release()
                self._chain = Chain(self._prefetch, stages, self._chain_name)
            self._allowed.release()
            work: _Work | None = self._chain.next()
        else:
            self._reading = self._next_number
            work = self._prefetch()
            for stage in (self._to_device, self._route, self._retrieve):
                if work is not None:
                    work = stage(work)
        if work is not None:
            self._next_number = work.number + 1
        return work

    def _trained(self, work: _Work, began: float) -> Step:
        assert work.buffer is not None
        assert work.asked is not None
        assert work.owned is not None
        number, older, self._active = work.number, self._active, work.buffer
        if self._mode != "stale":
            self._freshen(work, older)
        stalled = time.monotonic() - began
        window = Window(work.asked, work.buffer, self._layout, self._links.rows)
        samples = sum(work.owned.samples)
        self._crossing = 0.0
        loss, exposed, bad = self._computed(work, window, samples)
        totals = self._reduced(loss, number, bad)
        if self._mode == "stale":
            self._freshen(work, older)  # else the batch before would be undone
        with self.timeline.span("compute", "update", number):
            work.buffer.update(window.gradients, self._tables.optimizer)
            if self._optimizer is not None:
                self._optimizer.step()
        begin = time.monotonic()
        self._write_back(work.buffer)
        stalled += time.monotonic() - begin
        wanted = [hook for hook, asked in zip(self._hooks, totals[1:], strict=True) if asked]
        if wanted:
            self._wait_written(number)
            for hook in wanted:
                hook.act(Boundary(number, work.reader))
        return Step(
            number=number,
            samples=samples,
            loss=totals[0],
            seconds=time.monotonic() - began,
            lookup_stall=stalled,
            exposed=exposed,
            crossing=self._crossing,
        )

    def _freshen(self, work: _Work, older: Buffer | None) -> None:
        if work.buffer is not None and older is not None and work.shared is not None:
            with self.timeline.span("compute", "freshen", work.number):
                work.buffer.freshen(older, work.shared)

    def _computed(self, work: _Work, window: Window, samples: int) -> tuple[float, float, str]:
        """Of all micro-batches, forward and backward: loss, seconds exposed, what is not finite."""
        for parameter in self._parameters:
            parameter.grad = None
        micros = range(len(work.parts))
        exposed = loss = 0.0
        bad = ""
        early = [self._cross(work, window.send_rows, each) for each in micros] if self._wire else []
        returned = []
        for micro in micros:
            crossing = early[micro] if early else self._cross(work, window.send_rows, micro)
            rows, waited = self._awaited(work, crossing, micro)
            exposed += waited
            with self.timeline.span("compute", "dense", work.number, micro):
                value, gradients = self._micro_batch(work, micro, rows, samples)
                loss += value
                bad = bad or self._not_finite(work, micro, value, gradients)
            back = self._cross(work, window.take_gradients, micro, gradients)
            returned.append(back)
            if not self._wire:
                exposed += self._awaited(work, back, micro)[1]
        if self._wire:
            for micro, back in enumerate(returned):
                exposed += self._awaited(work, back, micro)[1]
        return loss, exposed, bad

    def _cross(
        self, work: _Work, transfer: Callable[..., Any], micro: int, *more: Any
    ) -> Callable[[], Any]:
        """Begins a transfer, or does so once it is waited for."""

        def timed() -> Any:
            begin = time.monotonic()
            with self.timeline.span("link", transfer.__name__, work.number, micro):
                found = transfer(micro, *more)
            self._crossing += time.monotonic() - begin
            return found

        if self._wire is None:
            return timed
        future: Future[Any] = self._wire.submit(timed)
        return future.result

    def _awaited(self, work: _Work, crossing: Callable[[], Any], micro: int) -> tuple[Any, float]:
        begin = time.monotonic()
        with self.timeline.span("compute", "wait", work.number, micro):
            found = crossing()
        return found, time.monotonic() - begin

    def _micro_batch(
        self, work: _Work, micro: int, rows: list[Any], samples: int
    ) -> tuple[float, list[Any]]:
        part = work.parts[micro]
        leaves = [block.detach().requires_grad_(True) for block in rows]
        if part.samples == 0:
            return 0.0, [self._torch.zeros_like(block) for block in leaves]
        lookups = {}
        for feature, (inverse, offsets) in work.tensors[micro].items():
            block = self._layout.block_of[self._layout.table_of(feature)]
            lookups[feature] = Lookup(leaves[block], inverse, offsets)
        loss = self._model(lookups, part)
        if not self._torch.is_tensor(loss) or loss.numel() != 1 or not loss.requires_grad:
            raise InvalidArgument(
                f"the model gave {_said(loss)} for micro-batch {micro} of step {work.number}: "
                "expected the mean loss of its samples, one value that has a gradient"
            )
        loss = loss.reshape(()) * (part.samples / samples)
        loss.backward()
        gradients = [
            self._torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves
        ]
        return float(loss.detach()), gradients

    def _not_finite(self, work: _Work, micro: int, loss: float, gradients: Sequence[Any]) -> str:
        """What is wrong with this micro-batch; empty: nothing."""
        if not np.isfinite(loss):
            return f"the loss of micro-batch {micro} is {loss}"
        for block, gradient in enumerate(gradients):
            finite = self._torch.isfinite(gradient).all(dim=1)
            if not bool(finite.all()):
                row = int(self._torch.nonzero(~finite)[0])
                return f"the gradient of {self._key_of(work, micro, block, row)}"
        return ""

    def _key_of(self, work: _Work, micro: int, block: int, row: int) -> str:
        for feature, (inverse, _) in work.tensors[micro].items():
            table = self._layout.table_of(feature)
            if self._layout.block_of[table] == block:
                where = (inverse == row).nonzero()
                if len(where):
                    key = work.parts[micro].keys[feature].keys[int(where[0])]
                    return f"table {self._layout.names[table]}, key {key}"
        return f"row {row}"

    def _reduced(self, loss: float, number: int, bad: str) -> list[float]:
        """Sums dense gradients, loss and wishes over the workers; [loss, wishes of the hooks].

        Raises InvalidArgument on all of them if a gradient of one is not finite.
        """
        torch, link = self._torch, self._links.dense
        sums = [
            torch.zeros(each.numel(), device=each.device) if each.grad is None
            else each.grad.reshape(-1)
            for each in self._parameters
        ]  # fmt: skip
        for parameter, gradient in zip(self._parameters, sums, strict=True):
            if not bad and not bool(torch.isfinite(gradient).all()):
                bad = f"the gradient of a dense parameter of shape {list(parameter.shape)}"
        told = torch.zeros(1 + len(self._hooks) + link.world, device=self._device)
        told[0] = loss
        for position, hook in enumerate(self._hooks):
            told[1 + position] = float(hook.wants(number))
        told[1 + len(self._hooks) + link.rank] = float(bool(bad))
        flat = torch.nan_to_num(torch.cat([*sums, told])) if bad else torch.cat([*sums, told])
        with self.timeline.span("compute", "reduce", number):
            if self._deterministic:
                gathered = link.all_gather(flat)
                flat = gathered[0].clone()
                for each in gathered[1:]:
                    flat += each
            else:
                flat = link.all_reduce(flat)
        tail = flat[len(flat) - len(told) :].tolist()
        wrong = [rank for rank, flag in enumerate(tail[1 + len(self._hooks) :]) if flag]
        if wrong:
            raise InvalidArgument(
                f"step {number}: {bad or f'a value on worker {wrong[0]}'} is not finite; nothing "
                f"of this step was applied (workers {', '.join(map(str, wrong))}): lower the "
                "learning rate, or look at that batch"
            )
        at = 0
        for parameter in self._parameters:
            mine = flat[at : at + parameter.numel()].view_as(parameter)
            parameter.grad = mine.to(parameter.dtype, copy=True)
            at += parameter.numel()
        return tail[: 1 + len(self._hooks)]  # type: ignore[no-any-return]

    # ---- write-back

    def _write_back(self, buffer: Buffer) -> None:
        if self._writer is None:
            self._written_back(buffer)
            if self._write_error is not None:
                raise self._write_error
        else:
            self._writer.submit(self._written_back, buffer)

    def _written_back(self, buffer: Buffer) -> None:
        error: BaseException | None = None
        try:
            with self.timeline.span("write-back", "write-back", buffer.batch):
                buffer.write_back(self._tables)
        except BaseException as failed:
            error = failed
        with self._writing:
            self._written = buffer.batch
            self._write_error = self._write_error or error
            self._writing.notify_all()

    def _wait_written(self, number: int) -> None:
        """Until the rows of batch ``number`` are in the pool. Raises what writing them raised."""
        with self._writing:
            while self._written < number and self._write_error is None:
                if not self._writing.wait(timeout=1.0) and self._broken:
                    raise FailedPrecondition(f"the pipeline has ended: {self._broken}")
            if self._write_error is not None:
                raise self._write_error

    # ---- stages

    def _prefetch(self) -> _Work | None:
        number = self._reading
        if (self._last is not None and number > self._last) or self._ended.is_set():
            return None
        self._reading += 1
        with self.timeline.span("prefetch", "prefetch", number):
            batch = next(self._loader, None)
            if batch is None:  # others may have more: this worker goes on with nothing
                return _Work(number, [Batch({})] * self._micros, self._reader, True)
            self._reader = batch.reader
            if self._arrange is not None:
                batch = self._arrange(batch)
            return _Work(number, list(batch.parts(self._micros)), batch.reader, False)

    def _to_device(self, work: _Work) -> _Work:
        with self.timeline.span("to-device", "to-device", work.number):
            if self._device.type != "cpu":
                work.parts = [
                    Batch(part.keys, {n: v.to(self._device) for n, v in part.dense.items()})
                    for part in work.parts
                ]
        return work

    def _route(self, work: _Work) -> _Work | None:
        if self._ahead:
            self._allowed.acquire()
            if self._broken or (self._last is not None and work.number > self._last):
                return None
        with self.timeline.span("route", "route", work.number):
            work.asked = ask(work.parts, self._tables, self._layout)
            samples = sum(part.samples for part in work.parts)
            work.owned = exchange(work.asked, samples, work.ended, self._layout, self._links.keys)
            if work.owned.ended:
                self._ended.set()
                return None
            from_numpy = self._torch.from_numpy
            work.tensors = [
                {
                    feature: (
                        from_numpy(inverse).to(self._device),
                        from_numpy(part.keys[feature].offsets).to(self._device),
                    )
                    for feature, inverse in inverses.items()
                }
                for part, inverses in zip(work.parts, work.asked.inverse, strict=True)
            ]
        return work

    def _retrieve(self, work: _Work) -> _Work:
        assert work.owned is not None
        # A key of this batch and of the one before the last is in neither buffer's intersection.
        self._wait_written(work.number - (2 if self._ahead else 1))
        with self.timeline.span("retrieve", "retrieve", work.number):
            older, self._retrieved = (
                self._retrieved,
                Buffer.retrieve(work.number, work.owned, self._tables, self._layout, self._device),
            )
            work.buffer = self._retrieved
            if self._ahead and older is not None:
                work.shared = shared_rows(older, work.buffer, self._layout, self._device)
        return work


def _said(loss: Any) -> str:
    """What a model gave, in words."""
    if not hasattr(loss, "requires_grad"):
        return f"a {type(loss).__name__}"
    without = "" if loss.requires_grad else " without a gradient"
    return f"a tensor of shape {list(loss.shape)}{without}"
