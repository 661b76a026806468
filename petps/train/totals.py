"""The totals of a step over all ranks: loss, dense gradients, and whether all are finite.

Owns:        Totals.
Never does:  apply anything.
Called by:   pipeline.py.
Invariants:  if a value of one rank is not finite, all ranks raise; nothing is read from the
             device before the whole step is queued on it.
Threads:     the trainer's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from petps.errors import InvalidArgument
from petps.train.dense_sums import DenseSums, sum_over
from petps.train.link import Link
from petps.train.pytorch import torch_module
from petps.train.rows import are_finite
from petps.train.streams import Lane

__all__ = ["Totals"]


class Totals:
    """The totals of one step. name_row(micro, block, row): the row in words, for errors."""

    def __init__(self, lane: Lane, name_row: Callable[[int, int, int], str]) -> None:
        self._torch = torch_module()
        self._lane = lane
        self._name_row = name_row
        self._losses: list[Any] = []
        self._finite: list[list[Any]] = []  # by micro-batch and block: bool[u]

    def add(self, loss: Any, gradients: Sequence[Any]) -> None:
        """Add a micro-batch: its loss, and its gradients by block float32[u, dim]."""
        self._losses.append(loss.detach().double())
        self._finite.append([are_finite(block) for block in gradients])

    def sum_over_ranks(
        self,
        number: int,
        parameters: Sequence[Any],
        dense: DenseSums,
        wants: Sequence[bool],
        link: Link,
        *,
        deterministic: bool,
    ) -> tuple[float, list[bool]]:
        """Sum the loss and, in place, the dense gradients of step ``number`` over all ranks.

        dense: has begun the sums of the parameters in buckets.

        Returns the loss, and for each of ``wants`` whether any rank has it set. Raises
        InvalidArgument on all ranks if a value of one is not finite.
        """
        torch, lane = self._torch, self._lane
        own = [dense.gradient(index) for index in range(len(parameters))]
        losses = torch.stack(self._losses)
        checks = [torch.isfinite(losses).all()]
        checks += [rows.all() for blocks in self._finite for rows in blocks]
        checks += [torch.isfinite(values).all() for values in own]
        flags = np.zeros(1 + len(wants) + link.world, np.float32)
        flags[1 : 1 + len(wants)] = wants
        tail = lane.copy_in(flags)
        tail[0] = losses.sum()
        tail[1 + len(wants) + link.rank] = ~torch.stack(checks).all()
        sums = dict(dense.take())  # first, because it uses the same link
        flat = torch.cat([*(own[index] for index in dense.rest), tail])
        flat = sum_over(link, flat, deterministic=deterministic)
        flags = lane.copy_out("totals", [flat[len(flat) - len(flags) :]])[0].tolist()
        bad_ranks = [rank for rank, flag in enumerate(flags[1 + len(wants) :]) if flag]
        if bad_ranks:
            bad = self._name_bad_value(own, parameters) if link.rank in bad_ranks else ""
            raise InvalidArgument(
                f"step {number}: {bad or f'a value on rank {bad_ranks[0]}'} is not finite; nothing "
                f"of this step was applied (ranks {', '.join(map(str, bad_ranks))}): lower the "
                "learning rate, or look at that batch"
            )
        at = 0
        for index in dense.rest:
            sums[index] = flat[at : at + parameters[index].numel()]
            at += parameters[index].numel()
        for index, parameter in enumerate(parameters):
            gradient = sums[index].view_as(parameter)
            parameter.grad = gradient.to(parameter.dtype, copy=True)
        return flags[0], [bool(flag) for flag in flags[1 : 1 + len(wants)]]

    def _name_bad_value(self, own: Sequence[Any], parameters: Sequence[Any]) -> str:
        """Return this rank's first value that is not finite, in words."""
        for micro, (loss, blocks) in enumerate(zip(self._losses, self._finite, strict=True)):
            if not np.isfinite(float(loss)):
                return f"the loss of micro-batch {micro}, {float(loss)},"
            for block, is_finite in enumerate(blocks):
                if not bool(is_finite.all()):
                    row = int(self._torch.nonzero(~is_finite)[0])
                    return f"the gradient of {self._name_row(micro, block, row)}"
        for parameter, gradient in zip(parameters, own, strict=True):
            if not bool(self._torch.isfinite(gradient).all()):
                return f"the gradient of a dense parameter of shape {list(parameter.shape)}"
        return ""
