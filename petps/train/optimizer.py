"""Optimizers of embedding rows: how a gradient changes a slot (the row, then its optimizer state).

Owns:        Optimizer, Sgd, RowwiseAdagrad, Adam, SparseAdam.
Never does:  change dense parameters (a torch optimizer does); import torch.
Called by:   sharded.py (the width of a slot), buffer.py (apply).
Invariants:  a row's next value depends only on its slot, its gradient and the number of the step,
             so a training that restores the slots continues bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from petps.errors import InvalidArgument

__all__ = ["Adam", "Optimizer", "RowwiseAdagrad", "Sgd", "SparseAdam"]


class Optimizer(Protocol):
    """An optimizer of embedding rows. By default it keeps no state."""

    def columns(self, dim: int) -> Mapping[str, int]:
        """Return the columns after the row in a slot: widths in float32, by name, in order."""
        del dim
        return {}

    def initial(self, dim: int) -> float:
        """Return the value that fills the state of a new row."""
        del dim
        return 0.0

    def apply(self, slots: Any, gradients: Any, step: int) -> None:
        """Update slots float32[n, dim + state] in place with gradients float32[n, dim]; tensors.

        step: the number of the training step, from 1.
        """


@dataclass(frozen=True, slots=True)
class Sgd(Optimizer):
    """Plain gradient descent: row -= lr * gradient."""

    lr: float

    def __post_init__(self) -> None:
        _check_positive("lr", self.lr)

    def apply(self, slots: Any, gradients: Any, step: int) -> None:
        """See Optimizer."""
        del step
        slots.sub_(gradients, alpha=self.lr)


@dataclass(frozen=True, slots=True)
class RowwiseAdagrad(Optimizer):
    """Row-wise Adagrad: one sum a row of the mean squared gradient.

    It computes the same as FBGEMM's EXACT_ROWWISE_ADAGRAD.
    """

    lr: float
    eps: float = 1e-8
    initial_sum: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("lr", self.lr)
        _check_positive("eps", self.eps)

    def columns(self, dim: int) -> Mapping[str, int]:
        """See Optimizer."""
        del dim
        return {"sum": 1}

    def initial(self, dim: int) -> float:
        """See Optimizer."""
        del dim
        return self.initial_sum

    def apply(self, slots: Any, gradients: Any, step: int) -> None:
        """See Optimizer."""
        del step
        dim = gradients.shape[1]
        total = slots[:, dim:]
        total.add_(gradients.square().mean(dim=1, keepdim=True))
        slots[:, :dim].sub_(gradients / (total.sqrt() + self.eps), alpha=self.lr)


@dataclass(frozen=True, slots=True)
class _AdamSettings(Optimizer):
    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check_positive("lr", self.lr)
        _check_positive("eps", self.eps)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise InvalidArgument(f"{name} must be at least 0 and below 1, got {beta}")


@dataclass(frozen=True, slots=True)
class Adam(_AdamSettings):
    """Lazy Adam: each row has moments and a count of steps, and counts only its own steps."""

    def columns(self, dim: int) -> Mapping[str, int]:
        """See Optimizer."""
        return {"mean": dim, "variance": dim, "steps": 1}

    def apply(self, slots: Any, gradients: Any, step: int) -> None:
        """See Optimizer."""
        del step
        dim = gradients.shape[1]
        mean, variance, steps = slots[:, dim : 2 * dim], slots[:, 2 * dim : 3 * dim], slots[:, -1:]
        steps.add_(1)
        # Each operation rounds. PyTorch's fused ones (alpha=, addcmul_) do not, for some layouts.
        mean.mul_(self.beta1).add_(gradients * (1 - self.beta1))
        variance.mul_(self.beta2).add_(gradients.square().mul_(1 - self.beta2))
        # In float64: 1 - 0.999**1 has five digits in float32.
        first, second = (
            (1 - beta ** steps.double()).to(slots.dtype) for beta in (self.beta1, self.beta2)
        )
        change = mean / first / ((variance / second).sqrt() + self.eps)
        slots[:, :dim].sub_(change.mul_(self.lr))


@dataclass(frozen=True, slots=True)
class SparseAdam(_AdamSettings):
    """Adam whose rows change only in the steps that look them up, with one count of steps for all.

    It computes the same as torch.optim.SparseAdam. The count is the number of the training step
    (PipelineOptions.first_step), so a restored training continues with it.
    """

    def columns(self, dim: int) -> Mapping[str, int]:
        """See Optimizer."""
        return {"mean": dim, "variance": dim}

    def apply(self, slots: Any, gradients: Any, step: int) -> None:
        """See Optimizer."""
        dim = gradients.shape[1]
        mean, variance = slots[:, dim : 2 * dim], slots[:, 2 * dim :]
        mean.add_(gradients.sub(mean).mul_(1 - self.beta1))
        variance.add_(gradients.square().sub_(variance).mul_(1 - self.beta2))
        size = self.lr * math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)
        slots[:, :dim].add_(-size * (mean / variance.sqrt().add_(self.eps)))


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise InvalidArgument(f"{name} must be above 0, got {value}")
