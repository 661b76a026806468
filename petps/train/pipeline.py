"""The training loop over sharded tables. Its four modes differ in what overlaps (PIPELINE.md).

Owns:        Pipeline, Step; Hook and Boundary, what happens between two steps.
Never does:  open files, write checkpoints (hooks do), read data.
Called by:   trainers, demo, bench.
Invariants:  a batch is trained with rows that have all updates before it; no rank applies any
             part of a batch unless its gradients are finite on all ranks.
Threads:     the caller's thread trains; the stages (lookup.py), the link (forward_backward.py)
             and the write-back (write_back.py) have threads of their own, and on a GPU streams.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from petps.errors import FailedPrecondition, InvalidArgument
from petps.train.batch import Batch
from petps.train.dense_sums import DenseSums
from petps.train.forward_backward import ForwardBackward
from petps.train.link import Links
from petps.train.lookup import BatchWork, LookupStages
from petps.train.options import AUTO, PipelineOptions, Resources
from petps.train.pytorch import torch_module
from petps.train.routing import Layout
from petps.train.sharded import ShardedTables
from petps.train.streams import Lanes
from petps.train.timeline import Timeline
from petps.train.where_pays import WherePays
from petps.train.window import Window
from petps.train.write_back import WriteBack

__all__ = ["Boundary", "Hook", "Pipeline", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one batch.

    loss: mean over the samples of all ranks. Seconds are those of this rank. lookup_stall:
    the wait for the batch's rows and for their write-back. exposed: the wait for rows and
    gradients to cross. crossing: the duration of these transfers. hooks: the wait for hooks, and
    for the removal of rows.
    """

    number: int
    samples: int
    loss: float
    seconds: float
    lookup_stall: float
    exposed: float
    crossing: float
    hooks: float


@dataclass(frozen=True, slots=True)
class Boundary:
    """The moment after ``step``, when its rows are in the pools and its removals are done.

    reader: the loader's state.
    """

    step: int
    reader: bytes


class Hook(Protocol):
    """An action between two steps, at the same step on all ranks."""

    def wants(self, step: int) -> bool:
        """Return whether to act after this step. Called on each rank; one True is enough."""

    def act(self, boundary: Boundary) -> None:
        """Act. Called on all ranks; the next batch waits until it returns."""

    def end(self, boundary: Boundary) -> None:
        """Finish: the loaders have ended, and ``boundary`` is after the last step. On all ranks."""


class Pipeline:
    """The training of ``model`` on the batches of ``loader``. Iterate over it, or call run().

    Args:
        model: model(lookups, batch) returns the mean loss of the samples of ``batch``, a
            micro-batch; lookups: a Lookup for each feature.
        optimizer: a torch optimizer of the dense parameters.
        links: the links to the other ranks, or None for one rank alone.
        features: maps a feature to the table of its keys, if that has another name.

    Raises:
        InvalidArgument: a gradient is not finite; no part of that step was applied. Or it is not
            known after which steps a table removes rows.
        Unavailable, DeadlineExceeded: a peer failed. After either error the pipeline has ended.
    """

    def __init__(
        self,
        model: Any,
        tables: ShardedTables,
        loader: Iterator[Batch],
        *,
        optimizer: Any = None,
        options: PipelineOptions | None = None,
        links: Links | None = None,
        features: Mapping[str, str] | None = None,
        hooks: Sequence[Hook] = (),
        timeline: Timeline | None = None,
    ) -> None:
        options, links = options or PipelineOptions(), links or Links.alone()
        if (links.rows.rank, links.rows.world) != (tables.rank, tables.world):
            raise InvalidArgument(
                f"links and tables must be of the same rank and world, got rank {links.rows.rank} "
                f"of {links.rows.world} and rank {tables.rank} of {tables.world}"
            )
        tables.begin_removal(options.first_step)
        layout = Layout(tables, features)
        for table in tables:
            table.admission.forget_ahead()  # counts of batches that an earlier loop only read ahead
        self._lanes = Lanes.of(
            torch_module().device(options.device),
            ahead=options.runs_ahead,
            overlaps=options.overlaps_transfers,
        )
        self.timeline = timeline or Timeline()
        self._where_pays: WherePays | None = None
        arrange = options.arrange
        if arrange == AUTO:
            can_pay = tables.world > 1 and options.micro_batches > 1 and not options.deterministic
            if can_pay:
                self._where_pays = WherePays(
                    options.micro_batches, features=features, first=options.first_step
                )
            arrange = self._where_pays
        self._resources = Resources(
            options, arrange, tables, layout, links, self._lanes, self.timeline
        )
        self._model = model
        self._parameters = [value for value in model.parameters() if value.requires_grad]
        self._optimizer = optimizer
        self._hooks = list(hooks)
        self._last: Boundary | None = None
        self._write_back = WriteBack(self._resources)
        self._lookup = LookupStages(iter(loader), self._resources, self._write_back)
        self._link_thread = (
            ThreadPoolExecutor(1, f"{self._resources.thread_name}-link")
            if options.overlaps_transfers
            else None
        )
        self._dense = DenseSums(self._parameters, self._resources, self._link_thread)
        self._end_reason = ""

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is not None:
            self._end("an error left its block")
        self.close()

    def __iter__(self) -> Iterator[Step]:
        while (step := self.step()) is not None:
            yield step

    def run(self) -> list[Step]:
        """Train all steps to the end."""
        return list(self)

    def step(self) -> Step | None:
        """Train the next batch. Return None if there is none; then all rows are in the pool."""
        if self._end_reason:
            raise FailedPrecondition(f"the pipeline has ended: {self._end_reason}")
        began = time.monotonic()
        try:
            with self._lanes.compute.use():
                work = self._lookup.next()
                if work is None:
                    self._write_back.wait(self._lookup.number)
                    self._end_hooks()
                    return None
                return self._train_batch(work, began)
        except BaseException as error:
            self._end(f"{type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        """Stop the threads, on all ranks after the same step, with all trained rows in the pool.

        Raises the error of a stage or of a write-back, once, if no step has raised it.
        """
        is_complete = not self._end_reason
        try:
            if is_complete:
                self._lookup.drain()
                self._write_back.close()
                self._write_back.check()
        except BaseException as error:
            is_complete = False
            self._end(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._end("it was closed")
            self._dense.close()
            self._write_back.close()  # a removal may wait for peers, up to the link's timeout
            if self._link_thread is not None:
                self._link_thread.shutdown(wait=is_complete, cancel_futures=not is_complete)

    def _end(self, reason: str) -> None:
        """Train no further batch. Later calls report the first reason."""
        self._end_reason = self._end_reason or reason
        self._lookup.stop()
        self._write_back.stop_waits(self._end_reason)

    def _train_batch(self, work: BatchWork, began: float) -> Step:
        lane, resources = self._lanes.compute, self._resources
        work_taken = lane.now()
        for handoff in work.handoffs:
            lane.take(handoff)
        self._freshen(work)
        freshened_s, freshened = time.monotonic(), lane.now()

        for parameter in self._parameters:
            parameter.grad = None
        passes = ForwardBackward(self._model, resources, self._link_thread, work, self._dense)
        passes.run()
        with self.timeline.span("compute", "reduce", work.number):
            wants = [hook.wants(work.number) for hook in self._hooks]
            loss, actions = passes.totals.sum_over_ranks(
                work.number, self._parameters, self._dense, wants, resources.links.dense,
                deterministic=resources.options.deterministic,
            )  # fmt: skip
        self._update(work, passes.window)

        write_began = time.monotonic()
        self._write_back.start(work.buffer, lane.hand("updated", work.buffer.slots))
        lookup_stall = time.monotonic() - write_began
        lookup_stall += max(freshened_s - began, lane.seconds(work_taken, freshened))
        hooks_began = time.monotonic()
        self._last = Boundary(work.number, work.reader)
        if any(actions) or resources.tables.removes_at(work.number):
            self._write_back.wait(work.number)
            for hook, acts in zip(self._hooks, actions, strict=True):
                if acts:
                    hook.act(self._last)
        ended = time.monotonic()
        if self._where_pays is not None:
            self._where_pays.after(work.number, hooks_began - began)
        return Step(
            number=work.number,
            samples=sum(work.owned.samples),
            loss=loss,
            seconds=ended - began,
            lookup_stall=lookup_stall,
            exposed=passes.exposed_seconds(),
            crossing=passes.crossing_seconds(),
            hooks=ended - hooks_began,
        )

    def _end_hooks(self) -> None:
        """Let the hooks finish, once."""
        boundary, self._last = self._last, None
        if boundary is not None:
            for hook in self._hooks:
                hook.end(boundary)

    def _freshen(self, work: BatchWork) -> None:
        """Take over the update of the batch before, for the rows that both batches have."""
        if work.shared is not None:
            with self.timeline.span("compute", "freshen", work.number):
                work.buffer.freshen(work.shared)

    def _update(self, work: BatchWork, window: Window) -> None:
        """Apply the gradients of all ranks to the rows and to the dense parameters."""
        with self.timeline.span("compute", "update", work.number):
            work.buffer.update(window.gradients, self._resources.tables.optimizer)
            if self._optimizer is not None:
                self._optimizer.step()
