"""Lanes: on a GPU, each stage queues its work on a stream of its own.

An event orders whatever one lane hands to another (PIPELINE.md lists the points). On a CPU a lane
does nothing.

Owns:        Lane, Lanes, Handoff; Device, the operations needed from a GPU.
Never does:  wait for a whole device; decide what a stage does.
Called by:   pipeline.py, lookup.py, forward_backward.py, write_back.py, buffer.py, totals.py.
Invariants:  a lane's work runs after the work that produced the tensors that it takes; PyTorch
             reuses the memory of such a tensor only after the lane's work; the host waits for a
             device only where it reads.
Threads:     a lane belongs to one thread; a Handoff passes from thread to thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from petps.train.pytorch import torch_module

__all__ = ["Device", "Handoff", "Lane", "Lanes", "device_of"]


class Device(Protocol):
    """Streams and events as CUDA has them, and host memory for copies to and from a device."""

    def stream(self) -> Any:
        """Return a new stream."""

    def current(self) -> Any:
        """Return the current stream of the calling thread."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue the calling thread's work in the block on this stream."""

    def record(self, stream: Any) -> Any:
        """Return an event that occurs once the work queued on the stream so far is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """Make the work queued on the stream from now on wait for the event."""

    def wait_on_host(self, event: Any) -> None:
        """Block the calling thread until the event has occurred."""

    def keep(self, tensor: Any, stream: Any) -> None:
        """Keep the tensor's memory until the work queued on the stream so far is done."""

    def allocate_pinned(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return an uninitialised host tensor; its memory is reused only after its copies."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two events; waits for the later one."""


class _Cuda:
    """CUDA as a Device. PyTorch owns the pinned memory and itself tracks the copies that use it."""

    def __init__(self, device: Any) -> None:
        self._torch = torch_module()
        self._cuda = self._torch.cuda
        self._device = device

    def stream(self) -> Any:
        return self._cuda.Stream(self._device)

    def current(self) -> Any:
        return self._cuda.current_stream(self._device)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return self._cuda.stream(stream)  # type: ignore[no-any-return]

    def record(self, stream: Any) -> Any:
        event = self._cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def wait_on_host(self, event: Any) -> None:
        event.synchronize()

    def keep(self, tensor: Any, stream: Any) -> None:
        tensor.record_stream(stream)

    def allocate_pinned(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3  # type: ignore[no-any-return]


def device_of(device: Any) -> Device | None:
    """Return the streams of this device, or None if petps uses none on it."""
    return _Cuda(device) if device.type == "cuda" else None


@dataclass(frozen=True, eq=False, slots=True)
class Handoff:
    """Results that one lane hands to others, and the event when they are ready.

    name: the point's name in PIPELINE.md.
    """

    name: str
    lane: Lane
    event: Any
    tensors: tuple[Any, ...]


class Lane:
    """A queue for the work of a stage. This class, for a CPU, runs the work when it is called."""

    def __init__(self, device: Any) -> None:
        self._torch = torch_module()
        self._device = device

    def use(self) -> AbstractContextManager[Any]:
        """Queue the work of the block on this lane."""
        return _NOTHING

    def hand(self, name: str, tensors: Iterable[Any]) -> Handoff | None:
        """Hand the tensors to other lanes, once this lane's work so far is done."""
        del name, tensors
        return None

    def take(self, handoff: Handoff | None) -> None:
        """Make this lane's work from here on wait for the tensors of a handoff."""
        del handoff

    def allocate(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return an uninitialised host tensor, to be filled and passed to copy_in()."""
        return self._torch.empty(tuple(shape), dtype=dtype)

    def pin(self, host: Any) -> Any:
        """Return a copy of a host tensor in pinned memory; any thread may call it.

        On a CPU, return the tensor itself.
        """
        return host

    def copy_in(self, host: Any) -> Any:
        """Copy a host tensor or array to the device; on a CPU, return the tensor itself.

        The caller must not write to ``host`` afterwards.
        """
        tensor = self._torch.from_numpy(host) if isinstance(host, np.ndarray) else host
        return tensor.to(self._device)

    def copy_out(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """Copy device tensors to numpy arrays on the host. Wait for this lane only."""
        del name
        return [tensor.cpu().numpy() for tensor in tensors]

    def now(self) -> Any:
        """Return the current moment of this lane's work, for seconds()."""
        return time.monotonic()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two moments of this lane; waits for the later one."""
        return end - begin  # type: ignore[no-any-return]


class _StreamLane(Lane):
    """A lane on a device's stream. stream: None uses the thread's current stream each time."""

    def __init__(self, torch_device: Any, device: Device, stream: Any) -> None:
        super().__init__(torch_device)
        self._on = device
        self._own = stream

    @property
    def _stream(self) -> Any:
        return self._on.current() if self._own is None else self._own

    def use(self) -> AbstractContextManager[Any]:
        return self._on.use(self._stream)

    def hand(self, name: str, tensors: Iterable[Any]) -> Handoff | None:
        return Handoff(name, self, self._on.record(self._stream), tuple(tensors))

    def take(self, handoff: Handoff | None) -> None:
        if handoff is None or handoff.lane is self:
            return
        stream = self._stream
        self._on.wait(stream, handoff.event)
        for tensor in handoff.tensors:
            self._on.keep(tensor, stream)

    def allocate(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._on.allocate_pinned(shape, dtype)

    def pin(self, host: Any) -> Any:
        if host.is_pinned():
            return host
        pinned = self._on.allocate_pinned(host.shape, host.dtype)
        pinned.copy_(host)
        return pinned

    def copy_in(self, host: Any) -> Any:
        tensor = self._torch.from_numpy(host) if isinstance(host, np.ndarray) else host
        return self.pin(tensor).to(self._device, non_blocking=True)

    def copy_out(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        del name
        hosts = [self._on.allocate_pinned(tensor.shape, tensor.dtype) for tensor in tensors]
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._on.wait_on_host(self._on.record(self._stream))
        return [host.numpy() for host in hosts]

    def now(self) -> Any:
        return self._on.record(self._stream)

    def seconds(self, begin: Any, end: Any) -> float:
        return self._on.seconds(begin, end)


_NOTHING: Final = nullcontext()


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes by stage.

    compute is the stream that is current where the pipeline is called: the caller made the model
    on it and continues to use it. Stages that overlap nothing use that stream too.
    """

    compute: Lane
    to_device: Lane
    exchange: Lane
    retrieve: Lane
    link: Lane
    write_back: Lane

    @staticmethod
    def of(torch_device: Any, *, ahead: bool, overlaps: bool) -> Lanes:
        """Return the lanes for a device.

        ahead: stages before and after training have their own lanes. overlaps: the link has one.
        """
        device = device_of(torch_device)
        if device is None:
            compute = Lane(torch_device)
            return Lanes(*[compute] * 6)
        compute = _StreamLane(torch_device, device, None)

        def make(is_own: bool) -> Lane:
            return _StreamLane(torch_device, device, device.stream()) if is_own else compute

        return Lanes(compute, make(ahead), make(ahead), make(ahead), make(overlaps), make(ahead))
