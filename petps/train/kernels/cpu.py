"""The contracts of the kernels on a CPU, by native code and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np

from petps import _native
from petps.train.pytorch import torch_module

__all__ = ["intersection"]


def intersection(first: Any, second: Any) -> tuple[Any, Any]:
    """Do the same as petps.train.kernels.intersection."""
    torch = torch_module()
    keys = [tensor.numpy().view(np.uint64) for tensor in (first, second)]
    in_first, in_second = _native.common_keys(*keys)
    return torch.from_numpy(in_first), torch.from_numpy(in_second)
