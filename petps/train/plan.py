"""What rank 0 decides at a boundary of a training, and sends to all ranks.

Owns:        Plan.
Never does:  decide.
Called by:   ranks.py.
Threads:     values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from petps.checkpoint.checkpointer import Decision
from petps.checkpoint.state_files import describe_tables
from petps.train.message import (
    Fields,
    decode,
    encode,
    list_of,
    object_of,
    or_none,
    read_bool,
    read_int,
    read_table_map,
    read_text,
)

__all__ = ["Plan"]

_DECISION: Final = object_of(
    {"kind": read_text, "since": or_none(read_int), "tables": read_table_map}
)
_FIELDS: Final[Fields] = {
    "ended": list_of(read_text),
    "failure": read_text,
    "publish": read_bool,
    "version": read_int,
    "next": or_none(_DECISION),
    "is_due": read_bool,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a boundary, which all ranks execute.

    ended: the kinds whose versions have ended. failure: why training stops, or "". publish: whether
    the log's ``version`` begins. next: how the store's version is written, or None if none begins.
    is_due: whether anything is still due then.
    """

    ended: tuple[str, ...]
    failure: str
    publish: bool
    version: int
    next: Decision | None
    is_due: bool

    def encode(self) -> bytes:
        """Return the plan as JSON."""
        values = {
            "ended": self.ended,
            "failure": self.failure,
            "publish": self.publish,
            "version": self.version,
            "is_due": self.is_due,
        }
        decision = self.next and {
            "kind": self.next.kind,
            "since": self.next.since,
            "tables": describe_tables(self.next.tables),
        }
        return encode(values | {"next": decision})

    @staticmethod
    def decode(text: bytes) -> Plan:
        """Return the plan that encode() returned on rank 0. Raise FailedPrecondition."""
        values = decode(text, 0, _FIELDS)
        decision, ended = values.pop("next"), tuple(values.pop("ended"))
        next_version = None if decision is None else Decision(**decision)
        return Plan(ended=ended, next=next_version, **values)
