"""Device operations on keys and rows: distinct keys, common keys, pooled rows.

Owns:        jagged_unique (partitioned hashing, radix sort), intersection, pooled_lookup; each as
             Triton kernels and as a CPU path of the same contract.
Never does:  know tables by name; move rows between memories; import triton before a device (or
             Triton's interpreter, TRITON_INTERPRET=1) has work to do.
Called by:   buffer.py (intersection); trainers with a device.
Invariants:  a result depends only on the input, not on the order in which blocks run. Distinct
             keys are in the order of their first occurrence by hashing and ascending by radix
             sort; common keys are ascending; a bag is summed in the order of its places.
Threads:     as in PyTorch: kernels are queued on the current stream; the host waits for the sizes
             of results.

Keys are int64 that hold the bits of unsigned 64-bit keys, so "ascending" is by unsigned value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from petps.errors import InvalidArgument
from petps.train.pytorch import torch_module

__all__ = ["Distinct", "intersection", "jagged_unique", "pooled_lookup"]

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
        raise InvalidArgument(f"variant {variant!r} is unknown: use 'hash' or 'radix'")
    if _path_of(values, path) == "cpu":
        from petps.train.kernels import cpu

        return cpu.jagged_unique(values, offsets, variant)
    if len(values) == 0:
        return Distinct(values.clone(), offsets.clone(), values.clone())
    from petps.train.kernels import unique

    find = unique.by_hash if variant == "hash" else unique.by_radix
    return Distinct(*find(values.contiguous(), offsets.contiguous()))


def intersection(one: Any, other: Any, *, path: Path | None = None) -> tuple[Any, Any]:
    """Return the positions of the common keys: (int64[m] into one, int64[m] into the other).

    one, other: int64[n], ascending, distinct. The common keys are ascending too.
    """
    _check_integers(one=one, other=other)
    if _path_of(one, path) == "cpu":
        from petps.train.kernels import cpu

        return cpu.intersection(one, other)
    if len(one) == 0 or len(other) == 0:
        return one[:0].clone(), one[:0].clone()
    from petps.train.kernels import intersect

    return intersect.intersection(one.contiguous(), other.contiguous())


def pooled_lookup(
    rows: Any,
    places: Any,
    offsets: Any,
    *,
    mode: Literal["sum", "mean"] = "sum",
    weights: Any = None,
    path: Path | None = None,
) -> Any:
    """Add up the rows of each bag: float32[bags, dim].

    rows: float32[r, dim]. places: int64[n] or int32[n], the rows to add. offsets: int64[bags + 1]
    into places; an empty bag gives zeros. weights: float32[n], only for "sum". The results of the
    two paths may differ by rounding.
    """
    torch = torch_module()
    if isinstance(places, torch.Tensor) and places.dtype == torch.int32:
        places = places.long()
    _check_integers(places=places, offsets=offsets)
    _check_offsets(offsets, len(places))
    if rows.ndim != 2 or rows.dtype != torch.float32:
        raise InvalidArgument(f"rows are {rows.dtype}{list(rows.shape)}, expected float32[r, dim]")
    if mode not in ("sum", "mean"):
        raise InvalidArgument(f"mode {mode!r} is unknown: use 'sum' or 'mean'")
    if weights is not None and (weights.shape != places.shape or weights.dtype != torch.float32):
        raise InvalidArgument(
            f"weights are {weights.dtype}{list(weights.shape)}, expected float32[{len(places)}]"
        )
    if weights is not None and mode != "sum":
        raise InvalidArgument("weights go with mode 'sum'")
    if len(places) > 0 and not 0 <= int(places.min()) <= int(places.max()) < len(rows):
        raise InvalidArgument(
            f"places go from {int(places.min())} to {int(places.max())}, but "
            f"there are {len(rows)} rows"
        )
    if _path_of(rows, path) == "cpu":
        from petps.train.kernels import cpu

        return cpu.pooled_lookup(rows, places, offsets, mode, weights)
    from petps.train.kernels import pooled

    return pooled.pooled_lookup(rows.contiguous(), places, offsets, mode, weights)


def _path_of(tensor: Any, path: Path | None) -> Path:
    if path not in (None, "cpu", "triton"):
        raise InvalidArgument(f"path {path!r} is unknown: use 'cpu' or 'triton'")
    return path or ("triton" if tensor.is_cuda else "cpu")


def _check_integers(**tensors: Any) -> None:
    torch = torch_module()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int64 or tensor.ndim != 1:
            kind = type(tensor).__name__
            if isinstance(tensor, torch.Tensor):
                kind = f"{tensor.dtype}{list(tensor.shape)}"
            raise InvalidArgument(
                f"{name}: {kind}, expected a tensor int64[n] (uint64 keys by .view(torch.int64))"
            )
        if len(tensor) > VALUES_MAX:
            raise InvalidArgument(f"{name}: {len(tensor)} numbers, at most {VALUES_MAX}")


def _check_offsets(offsets: Any, count: int) -> None:
    host = offsets.detach().cpu()
    if len(host) == 0 or int(host[0]) != 0 or int(host[-1]) != count:
        raise InvalidArgument(f"offsets go from 0 to the {count} there are, these do not")
    falls = (host[1:] < host[:-1]).nonzero()
    if len(falls) > 0:
        raise InvalidArgument(f"offsets[{int(falls[0]) + 1}] is less than the one before")
