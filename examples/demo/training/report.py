"""The results of the demo with --train: plain values, as --json prints them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from examples.demo.report import Comparison
from examples.demo.traffic import Latency

__all__ = [
    "Checkpoints",
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
    """The score of held-out samples by served rows, during training.

    version: the log's version of ``step``. life: the number of earlier starts of the trainer.
    equal: whether the trainer's own rows of that version give the same scores, bit by bit; None:
    the server already had newer rows. Losses are mean logarithmic losses, in nats; training_loss:
    of the steps since the last version.
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
    """The scores of the last version, by rows pulled from the server and by the trainer's pools.

    logits_equal: whether all held-out samples have equal logits, bit by bit.
    """

    version: int
    samples: int
    log_loss: float
    auc_trainer: float
    auc_served: float
    logits_equal: bool


@dataclass(frozen=True, slots=True)
class Fresh:
    """The time from the end of a step with a version to the first pull that returns the version.

    In milliseconds, over versions published while nothing was down, None without such a version;
    worst_ms: over all versions.
    message_p50_ms, message_p99_ms: the server's own figures up to the first kill, from the
    publishing of a message until its rows were servable.
    """

    versions: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    worst_ms: float
    message_p50_ms: float | None
    message_p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Stages:
    """Times of the steps of one rank, in milliseconds: means of a step and of its stages.

    exposed_share: training waited during this share of the time in which rows and gradients
    crossed. lookup_stall_ms: the wait for retrieved rows.
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
class Checkpoints:
    """The numbers that show how the store's versions were written and kept in order.

    Staged: steps_behind, the steps trained while a version of the store was being written;
    copy_share, the share of the training time in which training waited for copies, of the store's
    and of the log's versions; behind_s, the mean from a copy until the store's version existed.
    Quantised: row_dtype, as which rows are stored; stored_bytes of all versions, with keys and
    filters, and exact_bytes of the same keys, rows and state as float32, without filters.
    Clustered: dedup_given and dedup_clustered, the dedup ratios of all batches of all ranks.
    Compacted: ids_dropped, repeated ids. Merged: merges seen; resets, the bases after the first.
    Purged: versions deleted. Kept: versions still in the store at the end, of which ``compared``
    were compared with the trainer's rows; problems: what is wrong with them.
    """

    versions: int
    steps_behind: int
    copy_share: float
    behind_s: float
    row_dtype: str
    stored_bytes: int
    exact_bytes: int
    dedup_given: float
    dedup_clustered: float
    ids_dropped: int
    merges: int
    resets: int
    purged: int
    kept: int
    compared: int
    rows_compared: int
    problems: list[str]

    @property
    def complaints(self) -> list[str]:
        """Return what did not happen, and what is wrong with a version that the store kept."""
        has_happened = {
            "no step was trained while a version was written: not staged": self.steps_behind > 0,
            f"rows are stored as {self.row_dtype}, in {self.stored_bytes:,} bytes instead of "
            f"{self.exact_bytes:,}: not quantised": self.row_dtype != "f32"
            and 0 < self.stored_bytes < self.exact_bytes,
            "micro-batches have as many keys as before: not clustered": 0
            < self.dedup_clustered
            < self.dedup_given,
            "no repeated id was dropped: not compacted": self.ids_dropped > 0,
            "the store has no merged chunk: not merged": self.merges > 0,
            "the store has every version: not purged": self.purged > 0,
            "no version that the store kept was compared": self.rows_compared > 0,
        }
        complaints = [complaint for complaint, happened in has_happened.items() if not happened]
        return [*complaints, *(f"the store: {problem}" for problem in self.problems)]


@dataclass(frozen=True, slots=True)
class TrainerBack:
    """kill -9 of the trainer at ``step``, and the new run from step ``restored`` on. In seconds.

    unlearnt: the number of versions of the log that the new run does not have. to_first_step:
    from the kill; open and restore are parts of it: reopening the ranks' pools, and rolling them
    back to the version. to_served: from the kill to the first pull that returns a version of the
    new run. catch_ups: the number of partitions that the server made equal to the version of the
    store with which the new run begins.
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
    """All results. The demo fills them in as it runs."""

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
    checkpoints: Checkpoints | None = None
    final: FinalScores | None = None
    comparison: Comparison | None = None
    seconds: float = 0.0

    @property
    def compared(self) -> int:
        """The number of versions scored both ways during training."""
        return sum(version.equal is not None for version in self.scored)

    @property
    def complaints(self) -> list[str]:
        """The failures. If there are none, the demo has shown what it claims."""
        complaints = []
        if self.trainer_back is None:
            complaints.append("the trainer was not killed")
        if self.server_back is None:
            complaints.append("the server was not killed")
        complaints += [
            f"version {scored.version}: served rows score otherwise than the trainer's"
            for scored in self.scored
            if scored.equal is False
        ]
        if self.compared == 0:
            complaints.append("no version was compared during training")
        if self.checkpoints is None:
            complaints.append("the store was not checked")
        else:
            complaints += self.checkpoints.complaints
        if self.final is None or self.comparison is None:
            return [*complaints, "the last version was not compared"]
        if self.comparison.wrong:
            complaints.append(self.comparison.complaint)
        if self.comparison.rows_equal == 0:
            complaints.append("no row was compared")
        if not self.final.logits_equal or self.final.auc_trainer != self.final.auc_served:
            complaints.append(
                f"AUC by trainer rows {self.final.auc_trainer!r}, by served rows "
                f"{self.final.auc_served!r}: scores differ"
            )
        return complaints

    @property
    def passed(self) -> bool:
        """Whether nothing failed; see complaints."""
        return not self.complaints

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"passed": self.passed, "complaints": self.complaints}
