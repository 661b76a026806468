"""Exchanges between workers: the contract, torch.distributed, one worker alone, a link that is slow
on purpose.

Owns:        Link, GroupLink, LoneLink, SlowLink, Turns, Links.
Never does:  know keys or rows.
Called by:   routing.py, pipeline.py; bench (SlowLink).
Invariants:  all workers make the same calls on a link in the same order; a call ends within the
             group's timeout, with an error that says what to look at.
Threads:     one thread a link.
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
    """Collective calls of all workers."""

    rank: int
    world: int

    def all_to_all(self, send: Any, sends: Sequence[int], receives: Sequence[int]) -> Any:
        """send: tensor[sum(sends)], for rank 0, then 1, ... -> tensor[sum(receives)], from each."""

    def all_gather(self, values: Any) -> list[Any]:
        """The tensors of all ranks, of one shape."""

    def all_reduce(self, values: Any) -> Any:
        """Their sum, in whatever order is quickest."""


class LoneLink:
    """One worker."""

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
    """A process group of torch.distributed; device: whose tensors it takes.

    NCCL's calls are queued on the current stream, and fail where the host waits for that; a peer
    that does not answer then ends the process, by NCCL's watchdog, after the group's timeout.
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
        there = values.to(self._device)  # what workers say to each other is on the host
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
    """Of one worker's network, which has one transfer at a time."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._free = 0.0

    def taken(self, seconds: float) -> float:
        """When a transfer of so many seconds ends, that is asked for now."""
        with self._mutex:
            self._free = max(self._free, time.monotonic()) + seconds
            return self._free


class SlowLink:
    """Completes one transfer at a time, after latency + bytes / bandwidth: a network to measure by.

    That is reckoned from when this worker asks for it, and the real transfer goes on meanwhile; one
    that takes longer, as for a peer that is late, completes when it does. turns: one for all links
    of a worker.
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
        """That went to others, or came from them, whichever is more."""

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
        """Holds nothing meanwhile: two workers would wait for each other's turns."""
        self.bytes += size
        end = self._turns.taken(self._latency_s + size / self._bytes_per_second)
        yield
        time.sleep(max(0.0, end - time.monotonic()))


@dataclass(frozen=True, slots=True)
class Links:
    """A link each for what is under way at the same time."""

    keys: Link
    rows: Link
    dense: Link

    @staticmethod
    def alone() -> Links:
        """Of one worker."""
        return Links(LoneLink(), LoneLink(), LoneLink())

    @staticmethod
    def of_processes(timeout_s: float = TIMEOUT_SECONDS, *, device: str = "cpu") -> Links:
        """Of torch.distributed, which is initialised; all workers call this together.

        Keys go over gloo; rows and dense gradients too, on a GPU over NCCL. device: as PyTorch
        names it, this worker's own ("cuda:1"). The calling thread takes short turns from then on
        (native/base/turns.h).
        """
        distributed = torch_module().distributed
        # A step waits for the calling thread, and for gloo's, which are its heirs.
        _native.take_turns(short=True)
        timeout = timedelta(seconds=timeout_s)

        def link(on: str) -> GroupLink:
            backend = "gloo" if on == "cpu" else "nccl"
            group = distributed.new_group(backend=backend, timeout=timeout)
            return GroupLink(group, timeout_s, device=on)

        return Links(link("cpu"), link(device), link(device))
