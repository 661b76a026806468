"""Dense gradients, summed over the ranks in buckets while the last backward pass goes on.

A parameter's gradient is final in the backward pass of a step's last micro-batch. Buckets hold
parameters in reverse order, because a backward pass reaches the last ones first. What fills no
bucket is summed with the step's totals (totals.py).

Owns:        DenseSums, sum_over().
Never does:  change a gradient; judge whether it is finite.
Called by:   pipeline.py, forward_backward.py, totals.py.
Invariants:  all ranks sum the same buckets in the same order, before the last gradients of rows;
             a bucket's contents depend only on the model, so every mode gives the same bits.
Threads:     the trainer's thread; PyTorch may call the hooks from one of its own; transfers run on
             the link's thread in modes that overlap them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from petps.train.link import Link
from petps.train.options import Resources
from petps.train.pytorch import torch_module

__all__ = ["BUCKET_BYTES", "DenseSums", "sum_over"]

# Less costs a transfer's fixed time more often; more begins the first transfer later. A typical
# dense layer of 512 x 512 float32 fills one.
BUCKET_BYTES: Final = 1 << 20


class DenseSums:
    """The sums of ``parameters`` over all ranks, of one step after another. Call close().

    link_thread: runs the transfers; None: take() does.
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        resources: Resources,
        link_thread: ThreadPoolExecutor | None,
    ) -> None:
        self._torch = torch_module()
        self._parameters = list(parameters)
        self._resources = resources
        self._link = resources.links.dense
        self._link_thread = link_thread
        is_alone = self._link.world == 1
        self._buckets = [] if is_alone else _divide(self._parameters)
        in_buckets = {index for bucket in self._buckets for index in bucket}
        self.rest = [index for index in range(len(self._parameters)) if index not in in_buckets]
        """The places of the parameters that are in no bucket."""
        self._mutex = threading.Lock()
        self._number = 0
        self._is_last = False
        self._missing: list[int] = []  # by bucket: the gradients that are not final yet
        self._transfers: list[Callable[[], Any]] = []  # of the buckets that have begun
        self._hooks = []
        if link_thread is not None:
            for number, bucket in enumerate(self._buckets):
                for index in bucket:
                    hook = self._parameters[index].register_post_accumulate_grad_hook
                    self._hooks.append(hook(lambda _, number=number: self._note(number)))

    def begin(self, number: int) -> None:
        """Begin step ``number``."""
        self._number, self._transfers = number, []
        self._missing = [len(bucket) for bucket in self._buckets]

    def begin_last_pass(self) -> None:
        """Note that gradients are final once the backward pass that follows accumulates them."""
        self._is_last = True

    def end_last_pass(self) -> None:
        """Begin the buckets that are left, also those with parameters that have no gradient."""
        with self._mutex:
            self._is_last = False
            self._missing = [0] * len(self._buckets)
            self._begin_full()

    def take(self) -> Iterator[tuple[int, Any]]:
        """Yield the place and the sum, float[n], of each parameter of a bucket. Call it once."""
        lane = self._resources.lanes.compute
        for bucket, transfer in zip(self._buckets, self._transfers, strict=True):
            flat, handoff = transfer()
            lane.take(handoff)
            sizes = [self._parameters[index].numel() for index in bucket]
            yield from zip(bucket, flat.split(sizes), strict=True)

    def gradient(self, index: int) -> Any:
        """Return a parameter's gradient on this rank, float[n]; zeros if it has none."""
        parameter = self._parameters[index]
        if parameter.grad is None:
            return self._torch.zeros(parameter.numel(), device=parameter.device)
        return parameter.grad.reshape(-1)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _note(self, number: int) -> None:
        """Note that a gradient of a bucket was accumulated."""
        with self._mutex:
            if self._is_last:
                self._missing[number] -= 1
                self._begin_full()

    def _begin_full(self) -> None:
        """Begin the buckets whose gradients are final, in order, so that all ranks agree on it."""
        while len(self._transfers) < len(self._buckets):
            number = len(self._transfers)
            if self._missing[number] > 0:
                return
            bucket = self._buckets[number]
            gradients = [self.gradient(index) for index in bucket]
            ready = self._resources.lanes.compute.hand("bucket", gradients)
            self._transfers.append(self._begin(number, gradients, ready))

    def _begin(self, bucket: int, gradients: list[Any], ready: Any) -> Callable[[], Any]:
        options, lane = self._resources.options, self._resources.lanes.link

        def transfer() -> Any:
            span = self._resources.timeline.span("link", "sum_bucket", self._number, bucket)
            with span, lane.use():
                lane.take(ready)
                flat = self._torch.cat(gradients)
                flat = sum_over(self._link, flat, deterministic=options.deterministic)
                return flat, lane.hand("bucket_sums", [flat])

        return transfer if self._link_thread is None else self._link_thread.submit(transfer).result


def sum_over(link: Link, values: Any, *, deterministic: bool) -> Any:
    """Return the sum of the tensors of all ranks; deterministic: added in the order of ranks."""
    if not deterministic:
        return link.all_reduce(values)
    gathered = link.all_gather(values)
    total = gathered[0].clone()
    for part in gathered[1:]:
        total += part
    return total


def _divide(parameters: Sequence[Any]) -> list[list[int]]:
    """Return the buckets that are full: places of parameters, from the last to the first."""
    buckets: list[list[int]] = []
    bucket: list[int] = []
    size = 0
    for index in reversed(range(len(parameters))):
        bucket.append(index)
        size += parameters[index].numel() * parameters[index].element_size()
        if size >= BUCKET_BYTES:
            buckets.append(bucket)
            bucket, size = [], 0
    return buckets
