"""The log contract: the operations that publish and ingest use on a delta log of any kind.

Owns:        the Protocols DeltaLog and Subscription, and the events that a subscription returns.
Never does:  read the content of a message.
Called by:   publish (publish, flush) and ingest (subscribe). tests/python/delta has the suite that
             every log must pass.
Invariants:  A partition's messages are read in the order in which they were published. Once flush()
             has returned for a message, every subscription reads it, until retention removes it;
             then the subscription reports Lost. Offsets of a partition grow. positions() returns
             where reading continues.
Threads:     Several threads may use a DeltaLog; a Subscription belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from petps.delta.headers import Message

__all__ = ["Damage", "Delivery", "DeltaLog", "Event", "Lost", "Subscription"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message. After it, reading continues at ``next_offset``."""

    partition: int
    offset: int
    next_offset: int
    message: Message


@dataclass(frozen=True, slots=True)
class Damage:
    """A range that the log could not read: from ``offset`` to before ``next_offset``."""

    partition: int
    offset: int
    next_offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A requested position outside the log: retention removed it, or the log was replaced.

    The partition delivers nothing until seek(). ``start`` and ``end`` are the log's bounds now.
    """

    partition: int
    offset: int
    start: int
    end: int

    @property
    def reason(self) -> str:
        """Return one sentence for status and logs."""
        if self.offset < self.start:
            return (
                f"offsets {self.offset} to {self.start - 1} are gone from the log: retention "
                "removed them before they were applied; keep the log "
                "longer than a server may be away"
            )
        return (
            f"the log ends at offset {self.end}, but the next offset to read is {self.offset}: "
            "the log was replaced or lost its end"
        )


Event = Delivery | Damage | Lost


class Subscription(Protocol):
    """Reader of given partitions, each from a given offset on."""

    def poll(self, *, max_bytes: int, timeout: float) -> list[Event]:
        """Return events of about ``max_bytes``; wait up to ``timeout`` seconds for the first."""

    def seek(self, partition: int, offset: int) -> None:
        """Make the event at ``offset`` (or Lost) the next one of the partition."""

    def positions(self) -> dict[int, int]:
        """Return the offset of the next event, by partition."""

    def pause(self, partition: int) -> None:
        """Deliver no events of this partition until resume()."""

    def resume(self, partition: int) -> None:
        """Undo pause()."""

    def observe(self, positions: Mapping[int, int]) -> None:
        """Report the reader's positions to the log's own tools. Reading does not depend on it."""

    def close(self) -> None:
        """Release what the subscription holds."""


class DeltaLog(Protocol):
    """A log of ``partitions`` ordered partitions."""

    @property
    def name(self) -> str:
        """Return the name for messages: the kind of the log and its location."""

    @property
    def partitions(self) -> int:
        """Return P, the number of partitions, which is fixed when the log is created."""

    def publish(self, partition: int, message: Message) -> None:
        """Append a message. May block (backpressure). Durable only after flush().

        Raises PetpsError.
        """

    def flush(self) -> None:
        """Wait until every published message is durable. Raise if any of them is not."""

    def subscribe(self, positions: Mapping[int, int]) -> Subscription:
        """Return a reader of these partitions from these offsets on."""

    def start_offsets(self, partitions: Sequence[int]) -> dict[int, int]:
        """Return the offset of the oldest retained message, by partition."""

    def end_offsets(self, partitions: Sequence[int]) -> dict[int, int]:
        """Return the offset that the next message will take, by partition."""

    def last_messages(self, partitions: Sequence[int]) -> dict[int, Message]:
        """Return the newest whole message by partition; a partition without one is left out."""

    def close(self) -> None:
        """Flush, then release locks and files."""
