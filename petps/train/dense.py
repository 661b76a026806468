"""The state of a trainer beside its rows: dense weights, their optimizer, random numbers.

Owns:        copy_dense(), encode_dense(), load_dense(), get_random_state(), set_random_state().
Never does:  open files.
Called by:   ranks.py.
Invariants:  what is encoded later has the values of when it was copied.
Threads:     any.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np

from petps.train.pytorch import torch_module

__all__ = ["copy_dense", "encode_dense", "get_random_state", "load_dense", "set_random_state"]


def copy_dense(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return copies of the states of a model and of its optimizer (or None)."""
    states = {"model": copy.deepcopy(model.state_dict())}
    if optimizer is not None:
        states["optimizer"] = copy.deepcopy(optimizer.state_dict())
    return states


def encode_dense(states: dict[str, Any]) -> bytes:
    """Return the states of copy_dense() as bytes."""
    out = io.BytesIO()
    torch_module().save(states, out)
    return out.getvalue()


def load_dense(body: bytes, model: Any, optimizer: Any) -> None:
    """Load what encode_dense() returned."""
    states = torch_module().load(io.BytesIO(body), map_location="cpu", weights_only=True)
    model.load_state_dict(states["model"])
    if optimizer is not None:
        optimizer.load_state_dict(states["optimizer"])


def get_random_state(model: Any) -> bytes:
    """Return the random state of the host, followed by that of the model's GPU if it has one."""
    torch = torch_module()
    states, gpu = [torch.get_rng_state()], _find_gpu(model)
    if gpu is not None:
        states.append(torch.cuda.get_rng_state(gpu))
    return b"".join(values.numpy().tobytes() for values in states)


def set_random_state(state: bytes, model: Any) -> None:
    """Set what get_random_state() returned."""
    torch = torch_module()
    host, gpu = torch.get_rng_state().numel(), _find_gpu(model)
    states = torch.from_numpy(np.frombuffer(state, np.uint8).copy())
    torch.set_rng_state(states[:host])
    if gpu is not None and len(states) > host:
        torch.cuda.set_rng_state(states[host:], gpu)


def _find_gpu(model: Any) -> Any:
    devices = [] if model is None else [value.device for value in model.parameters()]
    return next((device for device in devices if device.type == "cuda"), None)
