"""Exchanges between workers.

There is one contract and three implementations: torch.distributed, one worker alone, and a link
that is slow on purpose.

Owns:        Link, GroupLink, LoneLink, SlowLink, Turns, Links.
Never does:  know keys or rows.
Called by:   routing.py, pipeline.py; bench (SlowLink).
Invariants:  all workers make the same calls on a link in the same order; a call returns within
             the group's timeout, or raises an error that says what to look at.
Threads:     one thread for each link.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

from petps import _native
from petps.errors import DeadlineExceeded, Unavailable
from petps.train.pytorch import torch_module

__all__ = ["GroupLink", "Link", "Links", "LoneLink", "SlowLink", "Turns"]

TIMEOUT_SECONDS: Final = 60.0


class Link(Protocol):
    """Collective calls, which all workers make."""

    rank: int
    world: int

    def all_to_all(self, send: Any, sends: Sequence[int], receives: Sequence[int]) -> Any:
        """Send a part of ``send`` to each rank; return the parts received, in the order of ranks.

        send: tensor[sum(sends)], for rank 0, then 1, ... Returns tensor[sum(receives)].
        """

    def all_gather(self, values: Any) -> list[Any]:
        """Return the tensors of all ranks; all have one shape."""

    def all_reduce(self, values: Any) -> Any:
        """Return the sum over all ranks, added in whatever order is fastest."""


class LoneLink:
    """The link of one worker alone."""

    rank = 0
    world = 1

    def all_to_all(self, send: Any, sends: Sequence[int], receives: Sequence[int]) -> Any:
        """See Link."""
        del sends, receives
        return send

    def all_gather(self, values: Any) -> list[Any]:
        """See Link."""
        return [values]

    def all_reduce(self, values: Any) -> Any:
        """See Link."""
        return values


class GroupLink:
    """A link over a process group of torch.distributed. device: where the group's tensors are.

    NCCL's calls are queued on the current stream, and fail where the host waits for that stream.
    If a peer does not answer, NCCL's watchdog ends the process after the group's timeout.
    """

    def __init__(
        self, group: Any, timeout_s: float = TIMEOUT_SECONDS, *, device: str = "cpu"
    ) -> None:
        self._distributed = torch_module().distributed
        self._torch = torch_module()
        self._group = group
        self._timeout_s = timeout_s
        self._device = device
        self.rank: int = self._distributed.get_rank(group)
        self.world: int = self._distributed.get_world_size(group)

    def all_to_all(self, send: Any, sends: Sequence[int], receives: Sequence[int]) -> Any:
        """See Link."""
        received = self._torch.empty(sum(receives), dtype=send.dtype, device=send.device)
        self._call(
            self._distributed.all_to_all_single,
            received, send, list(receives), list(sends), group=self._group,
        )  # fmt: skip
        return received

    def all_gather(self, values: Any) -> list[Any]:
        """See Link."""
        there = values.to(self._device)  # workers exchange control messages from host memory
        gathered = [self._torch.empty_like(there) for _ in range(self.world)]
        self._call(self._distributed.all_gather, gathered, there, group=self._group)
        return [each.to(values.device) for each in gathered]

    def all_reduce(self, values: Any) -> Any:
        """See Link."""
        summed = values.clone()
        self._call(self._distributed.all_reduce, summed, group=self._group)
        return summed

    def _call(self, collective: Any, *arguments: Any, group: Any, **options: Any) -> None:
        began = time.monotonic()
        try:
            collective(*arguments, group=group, **options)
        except RuntimeError as error:
            where = f"worker {self.rank} of {self.world}"
            reason = str(error).strip().splitlines()[0][:200] if str(error) else "no reason"
            if time.monotonic() - began >= 0.9 * self._timeout_s:
                raise DeadlineExceeded(
                    f"{where}: a peer did not answer within {self._timeout_s:g} s ({reason}): it "
                    "hangs or is slow; look at the other workers, or give Links a longer timeout_s"
                ) from error
            raise Unavailable(
                f"{where}: a peer is gone ({reason}): restart the workers from the last version"
            ) from error


class Turns:
    """The transfer schedule of one worker's network, which carries one transfer at a time."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._free = 0.0

    def taken(self, seconds: float) -> float:
        """Reserve ``seconds`` for a transfer that is requested now; return when it will end."""
        with self._mutex:
            self._free = max(self._free, time.monotonic()) + seconds
            return self._free


class SlowLink:
    """A network to measure by: one transfer at a time, each taking latency + bytes / bandwidth.

    This time counts from when the worker asks for the transfer, and the real transfer runs within
    it. A transfer that takes longer, for example because a peer is late, completes when it really
    does. turns: one object for all links of a worker.
    """

    def __init__(
        self, link: Link, turns: Turns, *, latency_s: float, bytes_per_second: float
    ) -> None:
        self._link = link
        self._turns = turns
        self._latency_s = latency_s
        self._bytes_per_second = bytes_per_second
        self.rank = link.rank
        self.world = link.world
        self.bytes = 0
        """The sum over transfers of bytes sent or bytes received, whichever is more."""

    def all_to_all(self, send: Any, sends: Sequence[int], receives: Sequence[int]) -> Any:
        """See Link."""
        out = sum(count for peer, count in enumerate(sends) if peer != self.rank)
        come = sum(count for peer, count in enumerate(receives) if peer != self.rank)
        with self._transfer(max(out, come) * send.element_size()):
            return self._link.all_to_all(send, sends, receives)

    def all_gather(self, values: Any) -> list[Any]:
        """See Link."""
        with self._transfer(values.numel() * values.element_size()):
            return self._link.all_gather(values)

    def all_reduce(self, values: Any) -> Any:
        """See Link."""
        with self._transfer(values.numel() * values.element_size()):
            return self._link.all_reduce(values)

    @contextmanager
    def _transfer(self, size: int) -> Iterator[None]:
        """Delay a transfer. Holds no lock during it; otherwise two workers deadlock."""
        self.bytes += size
        end = self._turns.taken(self._latency_s + size / self._bytes_per_second)
        yield
        time.sleep(max(0.0, end - time.monotonic()))


@dataclass(frozen=True, slots=True)
class Links:
    """One link for each kind of exchange that can be in flight at the same time."""

    keys: Link
    rows: Link
    dense: Link

    @staticmethod
    def alone() -> Links:
        """Return the links of one worker alone."""
        return Links(LoneLink(), LoneLink(), LoneLink())

    @staticmethod
    def of_processes(timeout_s: float = TIMEOUT_SECONDS, *, device: str = "cpu") -> Links:
        """Return links over torch.distributed, which is initialised; all workers call it together.

        Keys cross over gloo. Rows and dense gradients do too, or over NCCL on a GPU. device: this
        worker's own device as PyTorch names it ("cuda:1"). From then on the calling thread uses
        short time slices (native/base/turns.h).
        """
        distributed = torch_module().distributed
        # A step waits for the calling thread and for gloo's threads, which inherit its slices.
        _native.set_time_slice(short=True)
        timeout = timedelta(seconds=timeout_s)

        def link(on: str) -> GroupLink:
            backend = "gloo" if on == "cpu" else "nccl"
            group = distributed.new_group(backend=backend, timeout=timeout)
            return GroupLink(group, timeout_s, device=on)

        return Links(link("cpu"), link(device), link(device))
