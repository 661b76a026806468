"""Where a publisher stands in a log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Position"]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a publisher stands: what a trainer saves beside its state, to go on from it.

    ``seqs[p]`` is the last seq written to partition p in ``run``; ``version`` the last committed.
    ``instance``: which one of the model the run feeds (``model@name``); None: whichever is fed.
    """

    run: int
    seqs: tuple[int, ...]
    version: int
    instance: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint's metadata."""
        return {
            "run": self.run,
            "seqs": list(self.seqs),
            "version": self.version,
            **({} if self.instance is None else {"instance": self.instance}),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Position:
        """The inverse of as_json."""
        return Position(
            int(values["run"]),
            tuple(values["seqs"]),
            int(values["version"]),
            values.get("instance"),
        )
