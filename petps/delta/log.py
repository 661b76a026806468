"""The log contract: what publish and ingest may ask of a delta log, whatever carries it.

Owns:        the Protocols DeltaLog and Subscription and the events that a subscription gives.
Never does:  look into a message.
Called by:   publish (publish, flush) and ingest (subscribe). tests/python/delta has
             the suite that every log passes.
Invariants:  a partition's messages are read in the order in which they were published; a message
             that flush() returned for is read by every subscription, for ever or until retention
             says Lost; offsets of a partition grow, and positions() is where reading goes on.
Threads:     a DeltaLog may be used from several threads; a Subscription belongs to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from petps.delta.headers import Message

__all__ = ["Damage", "Delivery", "DeltaLog", "Event", "Lost", "Subscription"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message. ``next_offset`` is where reading goes on after it."""

    partition: int
    offset: int
    next_offset: int
    message: Message


@dataclass(frozen=True, slots=True)
class Damage:
    """The log could not give back what was stored from ``offset`` to before ``next_offset``."""

    partition: int
    offset: int
    next_offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The position asked for is outside the log: retention removed it, or the log was replaced.

    The partition stands still until seek(). ``start`` and ``end`` are the log's bounds now.
    """

    partition: int
    offset: int
    start: int
    end: int

    @property
    def reason(self) -> str:
        """One sentence for status and logs."""
        if self.offset < self.start:
            return (
                f"offsets {self.offset} to {self.start - 1} are gone from the log: retention "
                "removed them before they were applied; keep the log "
                "longer than a server may be away"
            )
        return (
            f"the log ends at offset {self.end}, the position to read on is {self.offset}: "
            "the log was replaced or lost its end"
        )


Event = Delivery | Damage | Lost


class Subscription(Protocol):
    """Reads given partitions from given offsets on."""

    def poll(self, *, max_bytes: int, timeout: float) -> list[Event]:
        """Events, about ``max_bytes`` of them; waits up to ``timeout`` seconds for the first."""

    def seek(self, partition: int, offset: int) -> None:
        """The next event of the partition is the one at ``offset`` (or Lost)."""

    def positions(self) -> dict[int, int]:
        """Offset of the next event, by partition."""

    def pause(self, partition: int) -> None:
        """No events of this partition until resume()."""

    def resume(self, partition: int) -> None:
        """Undoes pause()."""

    def observe(self, positions: Mapping[int, int]) -> None:
        """Tells the log's own tools where its reader stands. Nothing depends on it."""

    def close(self) -> None:
        """Gives back what the subscription holds."""


class DeltaLog(Protocol):
    """A log of ``partitions`` ordered partitions."""

    @property
    def name(self) -> str:
        """What to call it in messages: kind and place."""

    @property
    def partitions(self) -> int:
        """P, fixed when the log was made."""

    def publish(self, partition: int, message: Message) -> None:
        """Appends. May wait (back-pressure); durable only after flush(). Raises PetpsError."""

    def flush(self) -> None:
        """Returns when everything published is durable. Raises if anything was not."""

    def subscribe(self, positions: Mapping[int, int]) -> Subscription:
        """A reader of these partitions from these offsets on."""

    def start_offsets(self, partitions: Sequence[int]) -> dict[int, int]:
        """Offset of the oldest message kept, by partition."""

    def end_offsets(self, partitions: Sequence[int]) -> dict[int, int]:
        """Offset that the next message will take, by partition."""

    def last_messages(self, partitions: Sequence[int]) -> dict[int, Message]:
        """The newest whole message by partition; a partition without one is left out."""

    def close(self) -> None:
        """Flushes, and gives back locks and files."""
