"""The training loop over sharded tables. Its five modes differ in what overlaps (PIPELINE.md).

Owns:        Pipeline, Step, MODES.
Never does:  open files, write checkpoints (hooks do), read data.
Called by:   trainers, demo, bench.
Invariants:  except in mode "stale", a batch is trained with rows that have all updates before it;
             no worker applies any part of a batch unless its gradients are finite on all workers.
Threads:     the caller's; the stages, the link and the write-back have their own, on a GPU with
             streams of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from petps.errors import FailedPrecondition, InvalidArgument
from petps.train.batch import Batch, cuts
from petps.train.buffer import Buffer, Shared, shared_rows
from petps.train.link import Links
from petps.train.pytorch import torch_module
from petps.train.routing import Asked, Layout, Owned, ask, exchange
from petps.train.sharded import ShardedTables
from petps.train.stages import Chain, works_ahead
from petps.train.streams import Handed, Lane, Lanes
from petps.train.timeline import Timeline
from petps.train.totals import Totals
from petps.train.window import Lookup, Window

__all__ = ["MODES", "Boundary", "Hook", "Mode", "Pipeline", "Step"]

Mode = Literal["nested", "dual", "frozen", "synchronous", "stale"]
MODES: Final = ("nested", "dual", "frozen", "synchronous", "stale")
# How many batches beyond the current one have their keys exchanged. The number is the same on all
# workers, so that all can stop after the same step (Pipeline.close). It cannot be larger:
# retrieving the third batch waits for the write-back of the first, which close() does not train.
ROUTED_AHEAD: Final = 2


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one batch.

    loss: mean over the samples of all workers. Seconds are those of this worker. lookup_stall:
    the wait for the batch's rows and for their write-back. exposed: the wait for rows and
    gradients to cross. crossing: the duration of these transfers.
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
    """The moment after ``step``, when all its rows are in the pools. reader: the loader's state."""

    step: int
    reader: bytes


class Hook(Protocol):
    """An action between two steps, at the same step on all workers."""

    def wants(self, step: int) -> bool:
        """Return whether to act after this step. Called on each worker; one True is enough."""

    def act(self, boundary: Boundary) -> None:
        """Act. Called on all workers; the next batch waits until it returns."""


_Spans = list[tuple[Any, Any]]  # pairs of moments of a lane


@dataclass(eq=False, slots=True)
class _Work:
    """A batch on its way through the stages."""

    number: int
    parts: list[Batch]
    reader: bytes
    ended: bool
    asked: Asked | None = None
    owned: Owned | None = None
    buffer: Buffer | None = None
    shared: Shared | None = None
    positions: list[list[Any]] = field(default_factory=list)
    """The positions of Owned, on the device."""
    tensors: list[dict[str, tuple[Any, Any]]] = field(default_factory=list)
    handed: list[Handed | None] = field(default_factory=list)
    """The results of stages that the training of this batch uses."""


class Pipeline:
    """The training of ``model`` on the batches of ``loader``. Iterate over it, or call run().

    Args:
        model: model(lookups, batch) returns the mean loss of the samples of ``batch``, a
            micro-batch; lookups: a Lookup for each feature.
        micro_batches: the number of parts of a batch, divided by cuts() of batch.py.
        optimizer: a torch optimizer of the dense parameters.
        mode: 'synchronous' overlaps nothing; 'dual' overlaps the lookup with training (NestPipe
            IV); 'frozen' overlaps transfers with computation inside a batch (V); 'nested' does
            both; 'stale' is 'nested' without freshening, a baseline that gives wrong results on
            purpose.
        steps: the number of steps to train, or None for all that the loaders have.
        first_step: the number of the next batch, for example after a restored version.
        arrange: orders a batch's samples before they are cut into micro-batches (clustering).
        deterministic: whether to sum in a fixed order, so that runs are bit-equal.
        device: where the model is and rows are trained. On a GPU, training uses the stream that
            is current where the pipeline is called.

    Raises:
        InvalidArgument: a gradient is not finite; no part of that step was applied.
        Unavailable, DeadlineExceeded: a peer failed. After either error the pipeline has ended.
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
        cuts(0, micro_batches)  # raises now what it would raise for the first batch
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
            table.admission.forget_ahead()  # counts of batches that an earlier loop only read ahead
        self._arrange = arrange
        self._hooks = list(hooks)
        self._deterministic = deterministic
        self._device = self._torch.device(device)
        self.timeline = timeline or Timeline()
        self._next_number = first_step
        self._last = None if steps is None else first_step + steps - 1
        self._reading = first_step
        self._reader = b""  # the loader's state after its last batch
        self._ended = threading.Event()
        self._broken = ""
        self._active: Buffer | None = None
        self._retrieved: Buffer | None = None
        self._written = first_step - 1
        self._write_error: BaseException | None = None
        self._writing = threading.Condition()
        self._allowed = threading.Semaphore(0)
        ahead = mode in ("nested", "dual", "stale")
        overlaps = mode in ("nested", "frozen", "stale")
        name = f"petps-train-{tables.rank}"
        self._wire = ThreadPoolExecutor(1, f"{name}-link") if overlaps else None
        self._writer = ThreadPoolExecutor(1, f"{name}-write-back", works_ahead) if ahead else None
        self._lanes = Lanes.of(self._device, ahead=ahead, overlaps=overlaps)
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
        """Train all steps to the end."""
        return list(self)

    def step(self) -> Step | None:
        """Train the next batch. Return None if there is none; then all rows are in the pool."""
        if self._broken:
            raise FailedPrecondition(f"the pipeline has ended: {self._broken}")
        began = time.monotonic()
        try:
            with self._lanes.compute.use():
                work = self._next_work()
                if work is None:
                    self._wait_written(self._next_number - 1)
                    return None
                return self._train_batch(work, began)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    def close(self) -> None:
        """Stop the threads, on all workers after the same step. The rows trained are in the pool.

        Raises the error of a stage or of a write-back, once, if no step has raised it.
        """
        chain, self._chain = self._chain, None
        whole = not self._broken
        try:
            if chain is not None and whole:
                # Peers may have begun to exchange the keys of these batches, so this worker must.
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
                    ("exchange", self._exchange),
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
            for stage in (self._to_device, self._route, self._exchange, self._retrieve):
                if work is not None:
                    work = stage(work)
        if work is not None:
            self._next_number = work.number + 1
        return work

    def _train_batch(self, work: _Work, began: float) -> Step:
        assert work.buffer is not None
        assert work.asked is not None
        assert work.owned is not None
        number, older, self._active = work.number, self._active, work.buffer
        lane, arrived = self._lanes.compute, self._lanes.compute.now()
        for handed in work.handed:
            lane.take(handed)
        if self._mode != "stale":
            self._freshen(work, older)
        freshened, came = time.monotonic(), lane.now()
        window = Window(work.asked, work.buffer, work.positions, self._layout, self._links.rows)
        samples = sum(work.owned.samples)
        totals = Totals(lane, lambda *row: self._name_row(work, *row))
        exposed, crossings = self._run_forward_backward(work, window, totals, samples)
        with self.timeline.span("compute", "reduce", number):
            wishes = [hook.wants(number) for hook in self._hooks]
            loss, wanted = totals.sum_over_workers(
                number, self._parameters, wishes, self._links.dense,
                deterministic=self._deterministic,
            )  # fmt: skip
        if self._mode == "stale":
            self._freshen(work, older)  # otherwise the update of the batch before would be lost
        with self.timeline.span("compute", "update", number):
            work.buffer.update(window.gradients, self._tables.optimizer)
            if self._optimizer is not None:
                self._optimizer.step()
        begin = time.monotonic()
        self._write_back(work.buffer, lane.hand("updated", work.buffer.slots))
        stalled = time.monotonic() - begin
        stalled += max(freshened - began, lane.seconds(arrived, came))
        if any(wanted):
            self._wait_written(number)
            for hook, asked in zip(self._hooks, wanted, strict=True):
                if asked:
                    hook.act(Boundary(number, work.reader))
        return Step(
            number=number,
            samples=samples,
            loss=loss,
            seconds=time.monotonic() - began,
            lookup_stall=stalled,
            exposed=_total(lane, exposed),
            crossing=_total(self._lanes.link, crossings),
        )

    def _freshen(self, work: _Work, older: Buffer | None) -> None:
        if work.buffer is not None and older is not None and work.shared is not None:
            with self.timeline.span("compute", "freshen", work.number):
                work.buffer.freshen(older, work.shared)

    def _run_forward_backward(
        self, work: _Work, window: Window, totals: Totals, samples: int
    ) -> tuple[_Spans, _Spans]:
        """Run all micro-batches forward and backward; return exposed waits and transfers."""
        assert work.buffer is not None
        lane = self._lanes.compute
        for parameter in self._parameters:
            parameter.grad = None
        micros = range(len(work.parts))
        exposed: _Spans = []
        crossings: _Spans = []

        def cross(
            transfer: Callable[..., Any], handed: Handed | None, micro: int, *more: Any
        ) -> Callable[[], Any]:
            """Begin a transfer now, or, without a link thread, when its result is waited for."""

            def crossed() -> Any:
                link = self._lanes.link
                with self.timeline.span("link", transfer.__name__, work.number, micro), link.use():
                    link.take(handed)
                    begin = link.now()
                    found = transfer(micro, *more)
                    crossings.append((begin, link.now()))
                    name = "rows" if transfer == window.send_rows else "sums"
                    return found, link.hand(name, found)

            return crossed if self._wire is None else self._wire.submit(crossed).result

        def awaited(crossing: Callable[[], Any], micro: int) -> Any:
            begin = lane.now()
            with self.timeline.span("compute", "wait", work.number, micro):
                found, handed = crossing()
                lane.take(handed)
            exposed.append((begin, lane.now()))
            return found

        fresh = lane.hand("fresh", [*work.buffer.slots, *window.tensors])
        send, take = window.send_rows, window.take_gradients
        early = [cross(send, fresh, each) for each in micros] if self._wire else []
        returned = []
        for micro in micros:
            rows = awaited(early[micro] if early else cross(send, fresh, micro), micro)
            with self.timeline.span("compute", "dense", work.number, micro):
                loss, gradients = self._micro_batch(work, micro, rows, samples)
                totals.add(loss, gradients)
            handed = lane.hand("gradients", gradients)
            returned.append(cross(take, handed, micro, gradients))
            if not self._wire:
                awaited(returned[-1], micro)
        if self._wire:
            for micro, back in enumerate(returned):
                awaited(back, micro)
        return exposed, crossings

    def _micro_batch(
        self, work: _Work, micro: int, rows: list[Any], samples: int
    ) -> tuple[Any, list[Any]]:
        part = work.parts[micro]
        leaves = [block.detach().requires_grad_(True) for block in rows]
        if part.samples == 0:
            nothing = [self._torch.zeros_like(block) for block in leaves]
            return self._torch.zeros((), device=self._device), nothing
        lookups = {}
        for feature, (inverse, offsets) in work.tensors[micro].items():
            block = self._layout.block_of[self._layout.table_of(feature)]
            lookups[feature] = Lookup(leaves[block], inverse, offsets)
        loss = self._model(lookups, part)
        if not self._torch.is_tensor(loss) or loss.numel() != 1 or not loss.requires_grad:
            raise InvalidArgument(
                f"the model gave {_describe_loss(loss)} for micro-batch {micro} of step "
                f"{work.number}: expected the mean loss of its samples, one value that has a "
                "gradient"
            )
        loss = loss.reshape(()) * (part.samples / samples)
        loss.backward()
        gradients = [
            self._torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves
        ]
        return loss, gradients

    def _name_row(self, work: _Work, micro: int, block: int, row: int) -> str:
        for feature, (inverse, _) in work.tensors[micro].items():
            table = self._layout.table_of(feature)
            if self._layout.block_of[table] == block:
                where = (inverse == row).nonzero()
                if len(where):
                    key = work.parts[micro].keys[feature].keys[int(where[0])]
                    return f"table {self._layout.names[table]}, key {key}"
        return f"row {row}"

    # ---- write-back

    def _write_back(self, buffer: Buffer, updated: Handed | None) -> None:
        if self._writer is None:
            self._written_back(buffer, updated)
            if self._write_error is not None:
                raise self._write_error
        else:
            self._writer.submit(self._written_back, buffer, updated)

    def _written_back(self, buffer: Buffer, updated: Handed | None) -> None:
        error: BaseException | None = None
        lane = self._lanes.write_back
        try:
            with self.timeline.span("write-back", "write-back", buffer.batch), lane.use():
                lane.take(updated)
                buffer.write_back(self._tables, lane)
        except BaseException as failed:
            error = failed
        with self._writing:
            self._written = buffer.batch
            self._write_error = self._write_error or error
            self._writing.notify_all()

    def _wait_written(self, number: int) -> None:
        """Wait until the rows of batch ``number`` are in the pool. Raise what writing raised."""
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
            if batch is None:  # other workers may have more: continue with empty batches
                return _Work(number, [Batch({})] * self._micros, self._reader, True)
            self._reader = batch.reader
            if self._arrange is not None:
                batch = self._arrange(batch)
            parts = list(batch.parts(self._micros))
            parts = [_with_dense(part, self._lanes.to_device.pinned) for part in parts]
            return _Work(number, parts, batch.reader, False)

    def _to_device(self, work: _Work) -> _Work:
        lane = self._lanes.to_device
        with self.timeline.span("to-device", "to-device", work.number), lane.use():
            work.parts = [_with_dense(part, lane.copied) for part in work.parts]
            dense = [each for part in work.parts for each in part.dense.values()]
            work.handed.append(lane.hand("samples", dense))
        return work

    def _route(self, work: _Work) -> _Work | None:
        if self._ahead:
            self._allowed.acquire()
            if self._broken or (self._last is not None and work.number > self._last):
                return None
        with self.timeline.span("route", "route", work.number):
            work.asked = ask(work.parts, self._tables, self._layout)
        return work

    def _exchange(self, work: _Work) -> _Work | None:
        assert work.asked is not None
        lane = self._lanes.exchange
        with self.timeline.span("exchange", "exchange", work.number), lane.use():
            samples = sum(part.samples for part in work.parts)
            work.owned = exchange(work.asked, samples, work.ended, self._layout, self._links.keys)
            if work.owned.ended:
                self._ended.set()
                return None
            work.positions = [[lane.copied(at) for at in each] for each in work.owned.positions]
            work.tensors = [
                {
                    feature: (lane.copied(inverse), lane.copied(part.keys[feature].offsets))
                    for feature, inverse in inverses.items()
                }
                for part, inverses in zip(work.parts, work.asked.inverse, strict=True)
            ]
            made = [each for part in work.tensors for both in part.values() for each in both]
            made += [at for each in work.positions for at in each]
            work.handed.append(lane.hand("keys", made))
        return work

    def _retrieve(self, work: _Work) -> _Work:
        assert work.owned is not None
        # A key that is in this batch and the one before the last, but not in the last, is in no
        # intersection: its row must be read from the pool after that batch's write-back.
        self._wait_written(work.number - (2 if self._ahead else 1))
        lane = self._lanes.retrieve
        with self.timeline.span("retrieve", "retrieve", work.number), lane.use():
            older, self._retrieved = (
                self._retrieved,
                Buffer(work.number, work.owned, self._tables, self._layout, lane),
            )
            work.buffer = self._retrieved
            made = work.buffer.tensors
            if self._ahead and older is not None:
                work.shared = shared_rows(older, work.buffer, self._layout, lane)
                made += [*work.shared.older, *work.shared.newer]
            work.handed.append(lane.hand("retrieved", made))
        return work


def _with_dense(batch: Batch, of: Callable[[Any], Any]) -> Batch:
    return Batch(batch.keys, {name: of(each) for name, each in batch.dense.items()}, batch.reader)


def _total(lane: Lane, spans: _Spans) -> float:
    return sum(lane.seconds(begin, end) for begin, end in spans)


def _describe_loss(loss: Any) -> str:
    """Describe what a model returned."""
    if not hasattr(loss, "requires_grad"):
        return f"a {type(loss).__name__}"
    without = "" if loss.requires_grad else " without a gradient"
    return f"a tensor of shape {list(loss.shape)}{without}"
