"""A link that is slow on purpose: a simulated network over any other link."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from petps.train.link import Link

__all__ = ["LinkSchedule", "SlowLink"]


class LinkSchedule:
    """The transfer schedule of one rank's network, which carries one transfer at a time."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._free = 0.0

    def reserve(self, seconds: float) -> float:
        """Reserve ``seconds`` for a transfer that is requested now; return when it will end."""
        with self._mutex:
            self._free = max(self._free, time.monotonic()) + seconds
            return self._free


class SlowLink:
    """A network to measure by: one transfer at a time, each taking latency + bytes / bandwidth.

    This time counts from when the rank asks for the transfer, and the real transfer runs within
    it. A transfer that takes longer, for example because a peer is late, completes when it really
    does. schedule: one object for all links of a rank.
    """

    def __init__(
        self, link: Link, schedule: LinkSchedule, *, latency_s: float, bytes_per_second: float
    ) -> None:
        self._link = link
        self._schedule = schedule
        self._latency_s = latency_s
        self._bytes_per_second = bytes_per_second
        self.rank = link.rank
        self.world = link.world
        self.bytes = 0
        """The sum over transfers of bytes sent or bytes received, whichever is more."""

    def all_to_all(self, send: Any, sends: Sequence[int], receives: Sequence[int]) -> Any:
        """See Link."""
        count_sent = sum(count for peer, count in enumerate(sends) if peer != self.rank)
        count_received = sum(count for peer, count in enumerate(receives) if peer != self.rank)
        with self._transfer(max(count_sent, count_received) * send.element_size()):
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
        """Delay a transfer. Holds no lock during it; otherwise two ranks deadlock."""
        self.bytes += size
        end = self._schedule.reserve(self._latency_s + size / self._bytes_per_second)
        yield
        time.sleep(max(0.0, end - time.monotonic()))
