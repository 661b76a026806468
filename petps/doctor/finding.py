"""A finding of the doctor, and its level."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

__all__ = ["Finding", "Level", "fault", "note", "ok", "warning"]


class Level(str, Enum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    """Good to know; nothing needs to be done."""
    WARNING = "warning"
    """It works now, and will be slow, or will fail one day."""
    FAULT = "fault"
    """Something does not work, or acknowledged rows are at risk."""


@dataclass(frozen=True)
class Finding:
    """What a check has seen of one thing."""

    level: Level
    seen: str
    remedy: str = ""
    """What to do; empty if nothing needs to be done."""
    name: str = ""
    """The check's name; the registry sets it, and `why`."""
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields, in the order of the documentation."""
        fields = asdict(self)
        fields["level"] = self.level.value
        return {key: fields[key] for key in ("name", "level", "seen", "why", "remedy")}


def ok(seen: str) -> Finding:
    """Return a finding that nothing is wrong."""
    return Finding(Level.OK, seen)


def note(seen: str, remedy: str = "") -> Finding:
    """Return a finding that is good to know."""
    return Finding(Level.NOTE, seen, remedy)


def warning(seen: str, remedy: str) -> Finding:
    """Return a finding of something that works, but not for ever or not well."""
    return Finding(Level.WARNING, seen, remedy)


def fault(seen: str, remedy: str) -> Finding:
    """Return a finding of something that does not work."""
    return Finding(Level.FAULT, seen, remedy)
