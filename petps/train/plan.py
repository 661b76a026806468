"""What rank 0 decides at a boundary of a training, and sends to all ranks.

Owns:        Plan.
Never does:  decide.
Called by:   ranks.py.
Threads:     values only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from petps.checkpoint.checkpointer import Decision
from petps.checkpoint.state_files import describe_tables, read_tables

__all__ = ["Plan"]


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
        return json.dumps(values | {"next": decision}).encode()

    @staticmethod
    def decode(text: bytes) -> Plan:
        """Return the plan that encode() returned as JSON."""
        values = json.loads(text)
        decision = values.pop("next")
        ended = tuple(values.pop("ended"))
        if decision is not None:
            decision = Decision(**decision | {"tables": read_tables(decision["tables"])})
        return Plan(ended=ended, next=decision, **values)
