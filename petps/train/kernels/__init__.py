"""Device operations on keys: distinct keys, common keys.

Owns:        jagged_unique (partitioned hashing, radix sort) and intersection; each as Triton
             kernels and as a CPU path of the same contract.
Never does:  know tables by name; move rows between memories; import triton before a device (or
             Triton's interpreter, TRITON_INTERPRET=1) has work to do.
Called by:   buffer.py (intersection); trainers with a device.
Invariants:  a result depends only on the input, not on the order in which blocks run. Distinct
             keys are in the order of their first occurrence by hashing and ascending by radix
             sort; common keys are ascending.
Threads:     as in PyTorch: kernels are queued on the current stream; the host waits for the sizes
             of results.

Keys are int64 that hold the bits of unsigned 64-bit keys, so "ascending" is by unsigned value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from petps.errors import InvalidArgument
from petps.train.pytorch import torch_module

__all__ = ["Distinct", "intersection", "jagged_unique"]

Path = Literal["cpu", "triton"]
# The device counts places in 32 bits.
VALUES_MAX: Final = (1 << 31) - 1


@dataclass(frozen=True)
class Distinct:
    """The distinct keys of each table."""

    keys: Any
    """int64[u]: the keys of table 0, then of table 1, and so on."""
    offsets: Any
    """int64[tables + 1]: table t has keys[offsets[t]:offsets[t + 1]]."""
    inverse: Any
    """int64[n]: values[i] of table t is keys[offsets[t] + inverse[i]]."""


def jagged_unique(
    values: Any,
    offsets: Any,
    *,
    variant: Literal["hash", "radix"] = "hash",
    path: Path | None = None,
) -> Distinct:
    """Find the distinct keys of each table: values int64[n], offsets int64[tables + 1] into them.

    variant: "hash" returns each table's keys in the order of their first occurrence, "radix"
    ascending. path: None chooses by the device of values.

    Raises InvalidArgument, which names what is wrong with values or offsets.
    """
    _check_integers(values=values, offsets=offsets)
    _check_offsets(offsets, len(values))
    if variant not in ("hash", "radix"):
        raise InvalidArgument(f"variant must be 'hash' or 'radix', got {variant!r}")
    if _choose_path(values, path) == "cpu":
        from petps.train.kernels import cpu

        return cpu.jagged_unique(values, offsets, variant)
    if len(values) == 0:
        return Distinct(values.clone(), offsets.clone(), values.clone())
    from petps.train.kernels import unique

    return Distinct(*unique.find_distinct(values.contiguous(), offsets.contiguous(), variant))


def intersection(first: Any, second: Any, *, path: Path | None = None) -> tuple[Any, Any]:
    """Return the positions of the common keys: int64[m] into first, int64[m] into second.

    first, second: int64[n], ascending, distinct. The common keys are ascending too.
    """
    _check_integers(first=first, second=second)
    if _choose_path(first, path) == "cpu":
        from petps.train.kernels import cpu

        return cpu.intersection(first, second)
    if len(first) == 0 or len(second) == 0:
        return first[:0].clone(), first[:0].clone()
    from petps.train.kernels import intersect

    return intersect.intersection(first.contiguous(), second.contiguous())


def _choose_path(tensor: Any, path: Path | None) -> Path:
    if path not in (None, "cpu", "triton"):
        raise InvalidArgument(f"path must be 'cpu', 'triton' or None, got {path!r}")
    return path or ("triton" if tensor.is_cuda else "cpu")


def _check_integers(**tensors: Any) -> None:
    torch = torch_module()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int64 or tensor.ndim != 1:
            kind = type(tensor).__name__
            if isinstance(tensor, torch.Tensor):
                kind = f"{tensor.dtype}{list(tensor.shape)}"
            raise InvalidArgument(
                f"{name} must be a tensor int64[n] (uint64 keys by .view(torch.int64)), got {kind}"
            )
        if len(tensor) > VALUES_MAX:
            raise InvalidArgument(f"{name} may have {VALUES_MAX} values, got {len(tensor)}")


def _check_offsets(offsets: Any, count: int) -> None:
    host = offsets.detach().cpu()
    if len(host) == 0 or int(host[0]) != 0 or int(host[-1]) != count:
        ends = host[[0, -1]].tolist() if len(host) else "none"
        raise InvalidArgument(f"offsets must begin at 0 and end at {count}, got {ends}")
    falls = (host[1:] < host[:-1]).nonzero()
    if len(falls) > 0:
        at = int(falls[0]) + 1
        raise InvalidArgument(f"offsets[{at}] must not be less than offsets[{at - 1}]")
