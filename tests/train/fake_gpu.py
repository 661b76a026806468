"""A simulated device: its tensors are in host memory but say that they are on a device.

Its streams are vector clocks, and it checks every operation that PyTorch does on the tensors. Every
operation is computed at once, and correctly; the check is whether events would enforce that. Only
events order a stream's work, together with what the thread that queued it had waited for. Handing
something from thread to thread does not order it: an event must go with it. Faults:

- two streams use a storage, at least one writes, and no event orders them;
- a storage is freed while a stream other than its own may still use it (record_stream);
- the host reads pinned memory that the device may still write to;
- a copy to or from the device does not use pinned memory: it would wait.

It resembles torch.cuda's sanitizer. Kernels that PyTorch does not dispatch are recorded explicitly
(kernel()).
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = "meta"  # PyTorch's device without memory: operations that bypass this class cannot compute

Clock = dict[int, int]
# The size of these results depends on the data, so the host waits for it.
SIZED = {"aten::nonzero", "aten::masked_select", "aten::_local_scalar_dense"}
_NUMBERS = itertools.count()


@dataclass(eq=False)
class Stream:
    name: str
    clock: Clock = field(default_factory=dict)
    number: int = field(default_factory=lambda: next(_NUMBERS))


@dataclass(frozen=True)
class Use:
    stream: Stream
    time: int
    what: str

    def before(self, clock: Clock) -> bool:
        return clock.get(self.stream.number, 0) >= self.time


@dataclass(eq=False)
class Memory:
    """A storage. home: the stream on which it was allocated."""

    home: Stream
    written: Use
    read: dict[int, Use] = field(default_factory=dict)
    used: dict[int, Use] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """A tensor on the device. inner: its real memory, on the host."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, gpu: FakeGpu) -> Any:
        return _wrapper(cls, inner, DEVICE)

    def __init__(self, inner: torch.Tensor, gpu: FakeGpu) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a device tensor, outside all lanes")


class Pinned(OnDevice):
    """Host memory from and to which the device copies."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, gpu: FakeGpu) -> Any:
        return _wrapper(cls, inner, "cpu")

    def __init__(self, inner: torch.Tensor, gpu: FakeGpu) -> None:
        self.inner = inner
        self.gpu = gpu

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu = next(
            tensor.gpu for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Pinned)
        )
        return gpu.dispatched(func, args, kwargs or {})

    def is_pinned(self, *_: Any) -> bool:
        return True

    def numpy(self, **_: Any) -> Any:
        self.gpu.host_reads(self, "numpy()")
        return self.inner.numpy()


def _wrapper(cls: Any, inner: torch.Tensor, device: str) -> Any:
    return torch.Tensor._make_wrapper_subclass(
        cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
        dtype=inner.dtype, device=device,
    )  # fmt: skip


class FakeGpu:
    """A petps.train.streams.Device."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.waits: Counter[str] = Counter()
        """How often a thread waited for the device, by operation."""
        self.operations = 0
        self._memories: dict[int, Memory] = {}
        self._mutex = threading.RLock()
        self._thread = threading.local()

    # ---- Device

    def stream(self) -> Stream:
        return Stream("")

    def current(self) -> Stream:
        stack = self._stack()
        if stack:
            return stack[-1]
        if not hasattr(self._thread, "default"):
            self._thread.default = Stream(threading.current_thread().name)
        return self._thread.default  # type: ignore[no-any-return]

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        stream.name = stream.name or threading.current_thread().name
        stack = self._stack()
        stack.append(stream)
        try:
            if len(stack) == 1:
                with _Mode(self):
                    yield
            else:
                yield
        finally:
            stack.pop()

    def record(self, stream: Stream) -> Clock:
        with self._mutex:
            _join(stream.clock, self._host())
            return dict(stream.clock)

    def wait(self, stream: Stream, event: Clock) -> None:
        with self._mutex:
            if not self._is("no wait"):
                _join(stream.clock, event)

    def wait_on_host(self, event: Clock) -> None:
        if not self._is("no wait"):
            self._host_waits(event, "event")

    def keep(self, tensor: Any, stream: Stream) -> None:
        with self._mutex:
            if not self._is("no keep"):
                self._memories[_key(tensor.inner)].kept.add(stream.number)

    def allocate_pinned(self, shape: Sequence[int], dtype: Any) -> Pinned:
        return Pinned(torch.empty(tuple(shape), dtype=dtype), self)

    def seconds(self, begin: Clock, end: Clock) -> float:
        return 0.0

    # ---- for tests

    @contextmanager
    def leave_out(self, omission: str) -> Iterator[None]:
        """In the block, on this thread: 'no wait' disables waits, 'no keep' disables keep()."""
        self._thread.out = omission
        try:
            yield
        finally:
            self._thread.out = ""

    def kernel(self, name: str, call: Callable[..., Any], *given: OnDevice) -> Any:
        """Record a kernel outside PyTorch: it reads ``given``; the host waits for its size."""
        result = call(*(tensor.inner for tensor in given))
        stream = self._queued(name, given, [], tree_leaves(result))
        self._host_waits(stream.clock, name)
        return tree_map_only(torch.Tensor, lambda tensor: OnDevice(tensor, self), result)

    # ---- what the dispatch mode records

    def dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [
            tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)
        ]
        name = func._schema.name
        target = kwargs.get("device")
        target = None if target is None else torch.device(target).type
        if target == DEVICE:
            kwargs = kwargs | {"device": torch.device("cpu")}
        on = [tensor for tensor in given if type(tensor) is OnDevice]
        inner_args, inner_kwargs = tree_map_only(
            OnDevice, lambda tensor: tensor.inner, (args, kwargs)
        )
        if not on and target != DEVICE:
            for tensor in given:
                if isinstance(tensor, Pinned) and not _is_copy_into(name, args, tensor):
                    self.host_reads(tensor, name)
            result = func(*inner_args, **inner_kwargs)
            return self._as_given(result, given, None)
        is_copy = name in ("aten::copy_", "aten::_to_copy")
        for tensor in given:
            if type(tensor) is not OnDevice and tensor.dim() > 0:
                assert is_copy, f"{name} of tensors on the device and on the host"
                if not isinstance(tensor, Pinned):
                    self._fault(f"{name}: from or to host memory that is not pinned")
        if any(tensor.is_meta and type(tensor) is not OnDevice for tensor in given):
            raise AssertionError(f"{name} of a tensor that was made outside all lanes")
        result = func(*inner_args, **inner_kwargs)
        if _is_view(func):
            return self._as_given(result, given, OnDevice)
        writes = [
            tensor
            for argument, value in itertools.chain(
                zip(func._schema.arguments, args, strict=False),
                ((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs),
            )
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value)
        ]
        to_host = target == "cpu"
        new = (
            [] if to_host else [tensor for tensor in tree_leaves(result) if torch.is_tensor(tensor)]
        )
        stream = self._queued(name, [e for e in given if isinstance(e, OnDevice)], writes, new)
        if to_host or name in SIZED or (name == "aten::index" and _has_mask(args[1])):
            self._host_waits(stream.clock, name)
        return self._as_given(result, given, None if to_host else OnDevice)

    def host_reads(self, tensor: Pinned, what: str) -> None:
        with self._mutex:
            memory = self._memories.get(_key(tensor.inner))
            if memory is not None and not memory.written.before(self._host()):
                self._fault(f"the host reads by {what} what {memory.written.what} still writes")

    def _queued(
        self, name: str, given: Sequence[Any], writes: Sequence[Any], new: Sequence[Any]
    ) -> Stream:
        """Record an operation on the current stream: reads, writes, and new storages."""
        stream = self.current()
        with self._mutex:
            self.operations += 1
            _join(stream.clock, self._host())
            stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
            use = Use(stream, stream.clock[stream.number], f"{name} on {stream.name}")
            into = {_key(tensor.inner) for tensor in writes}
            for tensor in given:
                self._used(tensor.inner, use, _key(tensor.inner) in into)
            for tensor in new:
                if _key(tensor) not in self._memories:
                    self._add(tensor, Memory(stream, use))
        return stream

    def _used(self, inner: torch.Tensor, use: Use, writes: bool) -> None:
        clock, number = use.stream.clock, use.stream.number
        memory = self._memories.get(_key(inner))
        if memory is None:  # pinned memory, which the host has made
            memory = Memory(use.stream, Use(use.stream, 0, "the host"))
            self._add(inner, memory)
        if not memory.written.before(clock):
            does = "writes over" if writes else "reads"
            self._fault(f"{use.what} {does} what {memory.written.what} writes")
        memory.used[number] = use
        if not writes:
            memory.read[number] = use
            return
        for reader in memory.read.values():
            if not reader.before(clock):
                self._fault(f"{use.what} writes over what {reader.what} reads")
        memory.written, memory.read = use, {}

    def _add(self, inner: torch.Tensor, memory: Memory) -> None:
        key = _key(inner)
        self._memories[key] = memory
        pinned = memory.written.time == 0  # PyTorch frees it after its copies
        weakref.finalize(inner.untyped_storage(), self._freed, key, pinned).atexit = False

    def _freed(self, key: int, pinned: bool) -> None:
        with self._mutex:
            memory = self._memories.pop(key)
            for number, use in memory.used.items():
                # Its home may reuse it at once, so every other use must be known to be before.
                if not pinned and number not in memory.kept and not use.before(memory.home.clock):
                    self._fault(f"freed by {memory.home.name} while {use.what} may use it")

    def _as_given(self, result: Any, given: Sequence[Any], wrapped: Any) -> Any:
        """Return the given tensor for a result in place; wrap others, or return them plain."""
        same = {id(tensor.inner): tensor for tensor in given if isinstance(tensor, OnDevice)}

        def wrap(tensor: torch.Tensor) -> Any:
            return same.get(id(tensor), tensor if wrapped is None else wrapped(tensor, self))

        return tree_map_only(torch.Tensor, wrap, result)

    def _fault(self, what: str) -> None:
        with self._mutex:
            self.faults.append(what)

    def _stack(self) -> list[Stream]:
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        return self._thread.stack  # type: ignore[no-any-return]

    def _host(self) -> Clock:
        if not hasattr(self._thread, "clock"):
            self._thread.clock = {}
        return self._thread.clock  # type: ignore[no-any-return]

    def _host_waits(self, event: Clock, what: str) -> None:
        with self._mutex:
            _join(self._host(), event)
            self.waits[what] += 1

    def _is(self, out: str) -> bool:
        return getattr(self._thread, "out", "") == out


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._gpu.dispatched(func, args, kwargs or {})


def _join(clock: Clock, other: Clock) -> None:
    for number, time in other.items():
        clock[number] = max(clock.get(number, 0), time)


def _key(inner: torch.Tensor) -> int:
    return int(inner.untyped_storage()._cdata)


def _is_view(func: Any) -> bool:
    infos = [result.alias_info for result in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _is_copy_into(name: str, args: Any, tensor: Any) -> bool:
    return name == "aten::copy_" and args[0] is tensor


def _has_mask(indices: Any) -> bool:
    return any(tensor.dtype == torch.bool for tensor in tree_leaves(indices) if tensor is not None)
