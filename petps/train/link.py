"""Exchanges between ranks.

One contract has two implementations: torch.distributed, and one rank alone.

Owns:        Link, GroupLink, LoneLink, Links.
Never does:  know keys or rows.
Called by:   routing.py, window.py, totals.py, pipeline.py, ranks.py.
Invariants:  all ranks make the same calls on a link in the same order; a call returns within
             the group's timeout, or raises an error that says what to look at.
Threads:     one thread for each link.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Final, Protocol

from petps import _native
from petps.errors import DeadlineExceeded, Unavailable
from petps.train.pytorch import torch_module

__all__ = ["GroupLink", "Link", "Links", "LoneLink"]

TIMEOUT_SECONDS: Final = 60.0
# On the links behind the training, ranks wait for the one whose version takes longest. A peer that
# is gone is noticed at once, and one that hangs by the other links.
BEHIND_TIMEOUT_SECONDS: Final = 24 * 3600.0


class Link(Protocol):
    """Collective calls, which all ranks make."""

    rank: int
    world: int

    def all_to_all(self, send: Any, sends: Sequence[int], receives: Sequence[int]) -> Any:
        """Send a part of ``send`` to each rank; return the parts received, in the order of ranks.

        send: tensor[sum(sends)], for rank 0, then 1, ... Returns tensor[sum(receives)].
        """

    def all_gather(self, values: Any) -> list[Any]:
        """Return the tensors of all ranks; all have one shape."""

    def all_reduce(self, values: Any) -> Any:
        """Return the sum over all ranks, added in any order."""


class LoneLink:
    """The link of one rank alone."""

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
    If a peer does not answer, NCCL's watchdog terminates the process after the group's timeout.
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
        own = values.to(self._device)  # ranks exchange control messages from host memory
        tensors = [self._torch.empty_like(own) for _ in range(self.world)]
        self._call(self._distributed.all_gather, tensors, own, group=self._group)
        return [tensor.to(values.device) for tensor in tensors]

    def all_reduce(self, values: Any) -> Any:
        """See Link."""
        total = values.clone()
        self._call(self._distributed.all_reduce, total, group=self._group)
        return total

    def _call(self, collective: Any, *arguments: Any, group: Any, **options: Any) -> None:
        began = time.monotonic()
        try:
            collective(*arguments, group=group, **options)
        except RuntimeError as error:
            where = f"rank {self.rank} of {self.world}"
            reason = str(error).strip().splitlines()[0][:200] if str(error) else "no reason"
            if time.monotonic() - began >= 0.9 * self._timeout_s:
                raise DeadlineExceeded(
                    f"{where}: a peer did not answer within {self._timeout_s:g} s ({reason}): it "
                    "hangs or is slow; look at the other ranks, or give Links a longer timeout_s"
                ) from error
            raise Unavailable(
                f"{where}: a peer is gone ({reason}): restart the ranks from the last version"
            ) from error


@dataclass(frozen=True, slots=True)
class Links:
    """One link for each kind of exchange that can be in flight at the same time.

    store, log: for versions that are written behind the training.
    """

    keys: Link
    rows: Link
    dense: Link
    store: Link
    log: Link

    @staticmethod
    def alone() -> Links:
        """Return the links of one rank alone."""
        return Links(*(LoneLink() for _ in fields(Links)))

    @staticmethod
    def of_processes(timeout_s: float = TIMEOUT_SECONDS, *, device: str = "cpu") -> Links:
        """Return links over torch.distributed, which is initialised; all ranks call it together.

        Keys cross over gloo. Rows and dense gradients do too, or over NCCL on a GPU. device: this
        rank's own device as PyTorch names it ("cuda:1"). From then on the calling thread uses
        short time slices (native/base/time_slice.h).
        """
        distributed = torch_module().distributed
        # A step waits for the calling thread and for gloo's threads, which inherit its slices.
        _native.set_time_slice(short=True)

        def link(on: str, limit_s: float = timeout_s) -> GroupLink:
            backend = "gloo" if on == "cpu" else "nccl"
            group = distributed.new_group(backend=backend, timeout=timedelta(seconds=limit_s))
            return GroupLink(group, limit_s, device=on)

        behind = [link("cpu", BEHIND_TIMEOUT_SECONDS) for _ in range(2)]
        return Links(link("cpu"), link(device), link(device), *behind)
