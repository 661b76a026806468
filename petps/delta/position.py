"""A publisher's position in a log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Position"]


@dataclass(frozen=True, slots=True)
class Position:
    """A publisher's position. A trainer saves it with its state, and resumes from it.

    ``seqs[p]`` is the last seq written to partition p in ``run``; ``version`` is the last committed
    version. ``instance`` is the instance of the model (``model@name``) that the run feeds; None
    means the instance that the run before fed.
    """

    run: int
    seqs: tuple[int, ...]
    version: int
    instance: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a checkpoint's metadata."""
        return {
            "run": self.run,
            "seqs": list(self.seqs),
            "version": self.version,
            **({} if self.instance is None else {"instance": self.instance}),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Position:
        """Return the position that as_json() wrote."""
        return Position(
            int(values["run"]),
            tuple(values["seqs"]),
            int(values["version"]),
            values.get("instance"),
        )
