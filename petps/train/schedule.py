"""When versions are due.

Owns:        Every.
Never does:  read a clock.
Called by:   ranks.py; trainers.
Threads:     values only.
"""

from __future__ import annotations

from dataclasses import dataclass

from petps.errors import InvalidArgument

__all__ = ["Every"]


@dataclass(frozen=True, slots=True)
class Every:
    """A schedule: due after every ``steps`` steps, or once ``seconds`` have passed."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise InvalidArgument(f"Every needs either steps or seconds, got {self}")
        if (self.steps or self.seconds or 0) <= 0:
            raise InvalidArgument(f"Every needs a value above 0, got {self}")

    def is_due(self, step: int, since_s: float) -> bool:
        """Return whether it is due after ``step``; ``since_s``: seconds since it was due last."""
        if self.steps is not None:
            return step % self.steps == 0
        return since_s >= (self.seconds or 0)
