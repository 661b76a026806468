"""A device operation on keys: the common keys of two buffers.

Owns:        intersection, as Triton kernels and as a CPU path of the same contract.
Never does:  know tables by name; move rows between memories; import triton before a device (or
             Triton's interpreter, TRITON_INTERPRET=1) has work to do.
Called by:   buffer.py.
Invariants:  a result depends only on the input, not on the order in which blocks run; common keys
             are ascending.
Threads:     as in PyTorch: kernels are queued on the current stream; the host waits for the sizes
             of results.

Keys are int64 that hold the bits of unsigned 64-bit keys, so "ascending" is by unsigned value.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from petps.errors import InvalidArgument
from petps.train.pytorch import torch_module

__all__ = ["intersection"]

Path = Literal["cpu", "triton"]
# The device counts places in 32 bits.
VALUES_MAX: Final = (1 << 31) - 1


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
