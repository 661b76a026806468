"""How a pipeline trains, and what its parts share.

Owns:        PipelineOptions, Mode, MODES; Resources.
Never does:  start threads.
Called by:   trainers; pipeline.py, lookup.py, forward_backward.py, write_back.py.
Threads:     values only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from petps.errors import InvalidArgument
from petps.train.batch import Batch, divide
from petps.train.link import Links
from petps.train.routing import Layout
from petps.train.sharded import ShardedTables
from petps.train.streams import Lanes
from petps.train.timeline import Timeline

__all__ = ["AUTO", "MODES", "Mode", "PipelineOptions", "Resources"]

Mode = Literal["nested", "dual", "frozen", "synchronous"]
MODES: Final = ("nested", "dual", "frozen", "synchronous")
AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How a pipeline trains. All ranks have the same options.

    Args:
        micro_batches: into how many parts divide() of batch.py cuts a batch.
        mode: 'synchronous' overlaps nothing; 'dual' overlaps the lookup with training (NestPipe
            IV); 'frozen' overlaps transfers with computation inside a batch (V); 'nested' does
            both.
        arrange: orders a batch's samples before they are cut into micro-batches, for example
            ByKeys; None: the given order. 'auto' clusters batches while measured steps are shorter
            with it, if several ranks have several micro-batches and bits need not be equal.
        first_step: the number of the next batch, for example after a restored version.
        steps: the number of steps to train, or None for all that the loaders have.
        deterministic: whether to sum in a fixed order, so that runs are bit-equal.
        device: where the model is and rows are trained. On a GPU, training uses the stream that is
            current where the pipeline is called.

    Raises:
        InvalidArgument: The mode, micro_batches or arrange is wrong.
    """

    micro_batches: int = 1
    mode: Mode = "nested"
    arrange: Callable[[Batch], Batch] | Literal["auto"] | None = "auto"
    first_step: int = 1
    steps: int | None = None
    deterministic: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidArgument(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        divide(0, self.micro_batches)  # raise now, not in the first batch
        if not (self.arrange is None or self.arrange == AUTO or callable(self.arrange)):
            raise InvalidArgument(
                f"arrange must be {AUTO!r}, None or a function of a batch, got {self.arrange!r}"
            )

    @property
    def runs_ahead(self) -> bool:
        """Whether the next batches are looked up while a batch is trained."""
        return self.mode in ("nested", "dual")

    @property
    def overlaps_transfers(self) -> bool:
        """Whether rows and gradients cross while micro-batches are computed."""
        return self.mode in ("nested", "frozen")


@dataclass(frozen=True, slots=True)
class Resources:
    """The options, tables, links and lanes that all parts of a pipeline share.

    arrange: what options.arrange means in this pipeline.
    """

    options: PipelineOptions
    arrange: Callable[[Batch], Batch] | None
    tables: ShardedTables
    layout: Layout
    links: Links
    lanes: Lanes
    timeline: Timeline

    @property
    def thread_name(self) -> str:
        """The prefix of the names of all threads of the pipeline."""
        return f"petps-train-{self.tables.rank}"
