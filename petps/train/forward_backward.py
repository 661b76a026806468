"""The forward and backward passes of a batch, and when its rows and gradients cross.

Owns:        ForwardBackward.
Never does:  update anything.
Called by:   pipeline.py.
Invariants:  all ranks begin the transfers of a batch in the same order.
Threads:     the trainer's thread; in modes that overlap transfers, also the link's.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from petps.errors import InvalidArgument
from petps.train.dense_sums import DenseSums
from petps.train.lookup import BatchWork
from petps.train.options import Resources
from petps.train.pytorch import torch_module
from petps.train.streams import Handoff, Lane
from petps.train.totals import Totals
from petps.train.window import Lookup, Window

__all__ = ["ForwardBackward"]


class ForwardBackward:
    """The passes of ``model`` over the micro-batches of one batch.

    link_thread: runs the transfers; None: the trainer's thread does, when it needs their results.
    """

    def __init__(
        self,
        model: Any,
        resources: Resources,
        link_thread: ThreadPoolExecutor | None,
        work: BatchWork,
        dense: DenseSums,
    ) -> None:
        self._torch = torch_module()
        self._model = model
        self._resources = resources
        self._link_thread = link_thread
        self._work = work
        self._dense = dense
        layout, lanes = resources.layout, resources.lanes
        self._layout, self._lanes, self._timeline = layout, lanes, resources.timeline
        self.window = Window(work, layout, resources.links.rows)
        """After run(), its gradients are the sums over all ranks."""
        self.totals = Totals(lanes.compute, lambda *row: work.name_row(layout, *row))
        """After run(), the loss of all micro-batches of this rank."""
        self._waits: list[tuple[Any, Any]] = []  # pairs of moments of the trainer's lane
        self._crossings: list[tuple[Any, Any]] = []  # pairs of moments of the link's lane

    def run(self) -> None:
        """Run all micro-batches forward and backward; send each row's gradient to its owner.

        Dense gradients begin to cross in the last backward pass.
        """
        lane, window, overlaps = self._lanes.compute, self.window, self._link_thread is not None
        micros = range(len(self._work.parts))
        fresh = lane.hand("fresh", [*self._work.buffer.slots, *window.tensors])

        def begin_rows(micro: int) -> Callable[[], Any]:
            return self._begin("rows", window.send_rows, fresh, micro)

        self._dense.begin(self._work.number)
        rows_ahead = [begin_rows(micro) for micro in micros] if overlaps else []
        returns = []
        for micro in micros:
            rows = self._wait(rows_ahead[micro] if overlaps else begin_rows(micro), micro)
            if micro == micros[-1]:
                self._dense.begin_last_pass()
            with self._timeline.span("compute", "dense", self._work.number, micro):
                loss, gradients = self._run_micro_batch(micro, rows)
                self.totals.add(loss, gradients)
            if micro == micros[-1]:
                self._dense.end_last_pass()
            ready = lane.hand("gradients", gradients)
            returns.append(self._begin("sums", window.take_gradients, ready, micro, gradients))
            if not overlaps:
                self._wait(returns[-1], micro)
        if overlaps:
            for micro, transfer in enumerate(returns):
                self._wait(transfer, micro)

    def exposed_seconds(self) -> float:
        """Return how long the trainer waited for transfers."""
        return _sum_seconds(self._lanes.compute, self._waits)

    def crossing_seconds(self) -> float:
        """Return how long the transfers took."""
        return _sum_seconds(self._lanes.link, self._crossings)

    def _begin(
        self, point: str, call: Callable[..., Any], ready: Handoff | None, micro: int, *values: Any
    ) -> Callable[[], Any]:
        """Begin a transfer; without a link thread, _wait() runs it. Return a call for its result.

        point: the name of the handoff of the result (PIPELINE.md).
        """

        def transfer() -> Any:
            link = self._lanes.link
            with self._timeline.span("link", call.__name__, self._work.number, micro), link.use():
                link.take(ready)
                begin = link.now()
                tensors = call(micro, *values)
                self._crossings.append((begin, link.now()))
                return tensors, link.hand(point, tensors)

        return transfer if self._link_thread is None else self._link_thread.submit(transfer).result

    def _wait(self, transfer: Callable[[], Any], micro: int) -> Any:
        """Wait for a transfer; return its result. Raise what it raised."""
        lane = self._lanes.compute
        begin = lane.now()
        with self._timeline.span("compute", "wait", self._work.number, micro):
            tensors, handoff = transfer()
            lane.take(handoff)
        self._waits.append((begin, lane.now()))
        return tensors

    def _run_micro_batch(self, micro: int, rows: list[Any]) -> tuple[Any, list[Any]]:
        """Return the micro-batch's share of the loss, and its gradients by block."""
        work, part, layout = self._work, self._work.parts[micro], self._layout
        leaves = [block.detach().requires_grad_(True) for block in rows]
        if part.samples == 0:
            zeros = [self._torch.zeros_like(block) for block in leaves]
            return self._torch.zeros((), device=self._resources.options.device), zeros
        lookups = {}
        for feature, (inverse, offsets) in work.inputs[micro].items():
            block = layout.block_of[layout.table_of(feature)]
            lookups[feature] = Lookup(leaves[block], inverse, offsets)
        loss = self._model(lookups, part)
        if not self._torch.is_tensor(loss) or loss.numel() != 1 or not loss.requires_grad:
            raise InvalidArgument(
                f"the model returned {_describe_loss(loss)} for micro-batch {micro} of step "
                f"{work.number}: it must return the mean loss of the samples, one value with a "
                "gradient"
            )
        loss = loss.reshape(()) * (part.samples / sum(work.owned.samples))
        loss.backward()
        gradients = [
            self._torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves
        ]
        return loss, gradients


def _sum_seconds(lane: Lane, spans: list[tuple[Any, Any]]) -> float:
    return sum(lane.seconds(begin, end) for begin, end in spans)


def _describe_loss(loss: Any) -> str:
    if not hasattr(loss, "requires_grad"):
        return f"a {type(loss).__name__}"
    without = "" if loss.requires_grad else " without a gradient"
    return f"a tensor of shape {list(loss.shape)}{without}"
