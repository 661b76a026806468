"""A training loop that is wrong on purpose: the baseline "stale" of figures and tests.

Its results differ from those of the synchronous loop. So it shows what freshening costs, and that
a test of equal results can see rows that lack an update.
"""

from __future__ import annotations

from typing import Literal, cast

from petps.train.lookup import BatchWork
from petps.train.options import Mode
from petps.train.pipeline import Pipeline
from petps.train.window import Window

__all__ = ["BaselineMode", "UnfreshenedPipeline", "pipeline_of"]

BaselineMode = Mode | Literal["stale"]


class UnfreshenedPipeline(Pipeline):
    """A pipeline that reads the rows of a batch without the update of the batch before."""

    def _freshen(self, work: BatchWork) -> None:
        """Do nothing before the forward pass."""

    def _update(self, work: BatchWork, window: Window) -> None:
        super()._freshen(work)  # otherwise the update of the batch before would be lost
        super()._update(work, window)


def pipeline_of(mode: str) -> tuple[type[Pipeline], Mode]:
    """Return the class and the mode of a loop; "stale" is "nested" without freshening."""
    if mode == "stale":
        return UnfreshenedPipeline, "nested"
    return Pipeline, cast(Mode, mode)
