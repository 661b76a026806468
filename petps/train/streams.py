"""Lanes: on a GPU each stage queues its work on a stream of its own; what passes from lane to lane
carries the event that orders it (PIPELINE.md has the points). On a CPU a lane does nothing.

Owns:        Lane, Lanes, Handed; Device, what a GPU is asked for.
Never does:  wait for a whole device; decide what a stage does.
Called by:   pipeline.py, buffer.py, totals.py.
Invariants:  work on a lane comes after what it was handed, and memory of what it was handed is used
             again only after that work; the host waits for a device only where it reads.
Threads:     a lane is one thread's; Handed goes from thread to thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from petps.train.pytorch import torch_module

__all__ = ["Device", "Handed", "Lane", "Lanes", "device_of"]


class Device(Protocol):
    """Streams and events as CUDA has them; host memory that a device copies from and to."""

    def stream(self) -> Any:
        """A new one."""

    def current(self) -> Any:
        """The calling thread's."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """What the thread queues in the block goes to this stream."""

    def record(self, stream: Any) -> Any:
        """An event: what is queued on the stream so far has been done."""

    def wait(self, stream: Any, event: Any) -> None:
        """What is queued on the stream from here on comes after the event."""

    def wait_on_host(self, event: Any) -> None:
        """The calling thread waits."""

    def keep(self, tensor: Any, stream: Any) -> None:
        """The tensor's memory is used again only after what is queued on the stream now."""

    def pinned(self, shape: Sequence[int], dtype: Any) -> Any:
        """A host tensor, of anything; its memory is used again only after copies from or to it."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two events; waits for the later."""


class _Cuda:
    """See Device. Pinned memory is PyTorch's, which itself notes the copies that use it."""

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

    def pinned(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3  # type: ignore[no-any-return]


def device_of(device: Any) -> Device | None:
    """None: it has no streams that are ours."""
    return _Cuda(device) if device.type == "cuda" else None


@dataclass(frozen=True, eq=False, slots=True)
class Handed:
    """What one lane has made for others, and when it is there. name: of the point, PIPELINE.md."""

    name: str
    lane: Lane
    event: Any
    tensors: tuple[Any, ...]


class Lane:
    """Where a stage's work is queued: in the calling thread, as it is called (a CPU)."""

    def __init__(self, device: Any) -> None:
        self._torch = torch_module()
        self._device = device

    def use(self) -> AbstractContextManager[Any]:
        """What is queued in the block is queued on this lane."""
        return _NOTHING

    def hand(self, name: str, tensors: Iterable[Any]) -> Handed | None:
        """What this lane has made of them so far is for others."""
        del name, tensors
        return None

    def take(self, handed: Handed | None) -> None:
        """This lane's work from here on may use what was handed."""
        del handed

    def staged(self, shape: Sequence[int], dtype: Any) -> Any:
        """A host tensor of anything, to be filled and given to copied()."""
        return self._torch.empty(tuple(shape), dtype=dtype)

    def pinned(self, host: Any) -> Any:
        """A host tensor's copy that copied() need not stage; in any thread. On a CPU itself."""
        return host

    def copied(self, host: Any) -> Any:
        """A host tensor or array on the device; on a CPU itself. It is not written to any more."""
        tensor = self._torch.from_numpy(host) if isinstance(host, np.ndarray) else host
        return tensor.to(self._device)

    def arrays(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """Device tensors as numpy arrays of the host: waits for them, and for no other lane."""
        del name
        return [each.cpu().numpy() for each in tensors]

    def now(self) -> Any:
        """A moment of this lane's work, for seconds()."""
        return time.monotonic()

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments of this lane; waits for the later."""
        return end - begin  # type: ignore[no-any-return]


class _StreamLane(Lane):
    """On a device's stream; None: the calling thread's current one, at each use()."""

    def __init__(self, torch_device: Any, device: Device, stream: Any) -> None:
        super().__init__(torch_device)
        self._on = device
        self._own = stream

    @property
    def _stream(self) -> Any:
        return self._on.current() if self._own is None else self._own

    def use(self) -> AbstractContextManager[Any]:
        return self._on.use(self._stream)

    def hand(self, name: str, tensors: Iterable[Any]) -> Handed | None:
        return Handed(name, self, self._on.record(self._stream), tuple(tensors))

    def take(self, handed: Handed | None) -> None:
        if handed is None or handed.lane is self:
            return
        stream = self._stream
        self._on.wait(stream, handed.event)
        for each in handed.tensors:
            self._on.keep(each, stream)

    def staged(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._on.pinned(shape, dtype)

    def pinned(self, host: Any) -> Any:
        if host.is_pinned():
            return host
        staged = self._on.pinned(host.shape, host.dtype)
        staged.copy_(host)
        return staged

    def copied(self, host: Any) -> Any:
        tensor = self._torch.from_numpy(host) if isinstance(host, np.ndarray) else host
        return self.pinned(tensor).to(self._device, non_blocking=True)

    def arrays(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        del name
        hosts = [self._on.pinned(each.shape, each.dtype) for each in tensors]
        for host, each in zip(hosts, tensors, strict=True):
            host.copy_(each, non_blocking=True)
        self._on.wait_on_host(self._on.record(self._stream))
        return [each.numpy() for each in hosts]

    def now(self) -> Any:
        return self._on.record(self._stream)

    def seconds(self, begin: Any, end: Any) -> float:
        return self._on.seconds(begin, end)


_NOTHING: Final = nullcontext()


@dataclass(frozen=True, slots=True)
class Lanes:
    """By stage. compute: the stream that is current where the pipeline is called, on which the
    caller has made the model and goes on to use it; so are those of stages that overlap nothing.
    """

    compute: Lane
    to_device: Lane
    exchange: Lane
    retrieve: Lane
    link: Lane
    write_back: Lane

    @staticmethod
    def of(torch_device: Any, *, ahead: bool, overlaps: bool) -> Lanes:
        """ahead: stages before and behind training have lanes of their own; overlaps: the link."""
        device = device_of(torch_device)
        if device is None:
            compute = Lane(torch_device)
            return Lanes(*[compute] * 6)
        compute = _StreamLane(torch_device, device, None)

        def own(wanted: bool) -> Lane:
            return _StreamLane(torch_device, device, device.stream()) if wanted else compute

        return Lanes(compute, own(ahead), own(ahead), own(ahead), own(overlaps), own(ahead))
