"""What `petps demo --train` found out: plain values, as --json prints them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from petps.demo.report import Comparison
from petps.demo.traffic import Latency

__all__ = [
    "FinalScores",
    "Fresh",
    "Scored",
    "ServerBack",
    "Stages",
    "TrainerBack",
    "TrainingReport",
]


@dataclass(frozen=True, slots=True)
class Scored:
    """Held-out samples by served rows, while training goes on.

    version: the log's, of ``step``; life: how often the trainer was started before. equal: whether
    the trainer's own rows of that version give the same scores, bit by bit; None: by then more was
    served than that version. Losses: mean logarithmic loss, in nats; training_loss: since the last
    version.
    """

    step: int
    version: int
    life: int
    training_loss: float
    log_loss: float
    auc: float
    equal: bool | None


@dataclass(frozen=True, slots=True)
class FinalScores:
    """The last version: scores by rows pulled from the server and by those in the trainer's pools.

    logits_equal: of every held-out sample, bit by bit.
    """

    version: int
    samples: int
    log_loss: float
    auc_trainer: float
    auc_served: float
    logits_equal: bool


@dataclass(frozen=True, slots=True)
class Fresh:
    """From the end of a step whose version is published to the first pull that is served it.

    Milliseconds. Of versions published while nothing was down; worst_ms: of all others too.
    message_p50_ms, message_p99_ms: the server's own figure, from a message's publishing to its rows
    being servable, until the first kill.
    """

    versions: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    worst_ms: float
    message_p50_ms: float | None
    message_p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Stages:
    """Of ``steps`` steps of a worker, milliseconds: means of a step, and of each of its stages.

    exposed_share: of the time that rows and gradients took to cross, how much was waited for.
    lookup_stall_ms: waited for rows to be there.
    """

    steps: int
    step_p50_ms: float
    step_mean_ms: float
    samples_per_second: float
    lookup_stall_ms: float
    exposed_ms: float
    crossing_ms: float
    exposed_share: float
    stages_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class TrainerBack:
    """kill -9 of the trainer's workers at ``step``, and the new run from ``restored`` on. Seconds.

    unlearnt: versions of the log that the new run does not have. to_first_step: from the kill;
    of it open and restore: the workers' pools reopened, rolled back to the version. to_served: from
    the kill to the first pull that is served a version of the new run. catch_ups: partitions that
    the server made equal to a version of the store because of it.
    """

    step: int
    restored: int
    unlearnt: int
    to_first_step: float
    open: float
    restore: float
    to_served: float = 0.0
    catch_ups: int = 0


@dataclass(frozen=True, slots=True)
class ServerBack:
    """kill -9 of the server at ``step``, and its restart. Milliseconds.

    caught_up_ms: from exec until the newest version published by then was served.
    """

    step: int
    version_before: int
    exec_to_first_pull_ms: float
    open_to_first_pull_ms: float
    open_ms: float
    client_waited_ms: float
    client_failures: int
    caught_up_ms: float


@dataclass(slots=True)
class TrainingReport:
    """Everything. Filled as the demo goes on."""

    data: str
    ratings: int
    trained: int
    held_out: int
    fields: list[str]
    keys: int
    dim: int
    workers: int
    batch: int
    steps: int
    log: str
    processors: int
    plots: str
    medium: str = ""
    durability: str = ""
    rows: int = 0
    versions: int = 0
    scored: list[Scored] = field(default_factory=list)
    trainer_back: TrainerBack | None = None
    server_back: ServerBack | None = None
    freshness: Fresh | None = None
    pull: Latency | None = None
    stages: Stages | None = None
    final: FinalScores | None = None
    comparison: Comparison | None = None
    seconds: float = 0.0

    @property
    def compared(self) -> int:
        """Versions scored both ways while training went on."""
        return sum(each.equal is not None for each in self.scored)

    @property
    def complaints(self) -> list[str]:
        """What went wrong; none: the demo has shown what it says."""
        found = []
        if self.trainer_back is None:
            found.append("the trainer was not killed")
        if self.server_back is None:
            found.append("the server was not killed")
        for each in self.scored:
            if each.equal is False:
                found.append(f"version {each.version}: served rows score otherwise than trained")
        if self.compared == 0:
            found.append("no version was compared while training went on")
        if self.final is None or self.comparison is None:
            found.append("nothing was compared")
            return found
        if self.comparison.wrong:
            found.append(
                f"{self.comparison.wrong:,} keys are wrong: {self.comparison.rows_different:,} "
                f"rows differ, {self.comparison.rows_lost:,} are lost, "
                f"{self.comparison.rows_undead:,} should be missing and are not"
            )
        if self.comparison.rows_equal == 0:
            found.append("no row was compared")
        if not self.final.logits_equal or self.final.auc_trainer != self.final.auc_served:
            found.append(
                f"AUC by trainer rows {self.final.auc_trainer!r}, by served rows "
                f"{self.final.auc_served!r}: scores differ"
            )
        return found

    @property
    def passed(self) -> bool:
        """Both killed and back, every row and every score equal."""
        return not self.complaints

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"passed": self.passed, "complaints": self.complaints}
