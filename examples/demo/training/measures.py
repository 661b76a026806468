"""Losses, stages, freshness and outages, from the ranks' reports and the client's pulls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from examples.demo.traffic import Sample
from examples.demo.training.ranks import RankReport
from examples.demo.training.report import Checkpoints, Fresh, Stages
from examples.demo.training.task import DIM
from examples.demo.training.upkeep import History, Kept

__all__ = [
    "Outage",
    "Reports",
    "Served",
    "Version",
    "checkpoints_of",
    "fresh_of",
    "served_of",
    "stages_of",
]

# Bytes of a key, its row and its optimizer state (one value), as float32.
EXACT_BYTES: Final = 8 + 4 * (DIM + 1)


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the log. begin: the end of its step."""

    version: int
    step: int
    life: int
    begin: float
    training_loss: float


@dataclass(frozen=True, slots=True)
class Outage:
    """A kill at ``step``. Its effect lasts from ``begin`` to ``end`` (time.monotonic())."""

    what: str
    step: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Served:
    """The time until a version was served, in milliseconds. down: whether an outage delayed it."""

    version: Version
    fresh_ms: float
    down: bool


@dataclass(slots=True)
class Reports:
    """All reports of the ranks. ``step``: the last step of the newest life."""

    steps: list[RankReport] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    stored: list[RankReport] = field(default_factory=list)
    stages: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    ended: int = 0
    step: int = 0
    _losses: list[float] = field(default_factory=list)
    _life: int = 0

    def add(self, event: RankReport) -> None:
        """Add a report."""
        fields = event.fields
        if event.life != self._life:
            self._life = event.life
            self._losses.clear()
        if event.kind == "ready":
            self.step = fields["restored"]
        elif event.kind == "step":
            self.steps.append(event)
            self.step = fields["number"]
            self._losses.append(fields["loss"])
        elif event.kind == "stages":
            self.stages[event.life, event.rank] = fields
        elif event.kind == "stored":
            self.stored.append(event)
        elif event.kind == "ended":
            self.ended += 1
        elif event.kind == "version":
            # The mean over the steps reported since the version before.
            loss = float(np.mean(self._losses)) if self._losses else float("nan")
            self._losses.clear()
            version = Version(
                fields["version"],
                fields["step"],
                event.life,
                fields["begin"],
                loss,
            )
            self.versions.append(version)

    def version_of(self, step: int) -> Version | None:
        """Return the newest version of that step, or None."""
        return next((version for version in self.versions[::-1] if version.step == step), None)


def stages_of(reports: Reports, samples_per_step: int) -> Stages:
    """Compute the stages over all lives and ranks."""
    steps = [event.fields for event in reports.steps]
    seconds = np.array([step["seconds"] for step in steps])
    staged_steps = sum(stages["steps"] for stages in reports.stages.values())
    totals: defaultdict[str, float] = defaultdict(float)
    for stages in reports.stages.values():
        for name, total in stages["seconds"].items():
            totals[name] += total

    def mean_ms(name: str) -> float:
        return round(1e3 * float(np.mean([step[name] for step in steps])), 3)

    crossing = sum(step["crossing"] for step in steps)
    exposed = sum(step["exposed"] for step in steps)
    return Stages(
        steps=len(steps),
        step_p50_ms=round(1e3 * float(np.median(seconds)), 3),
        step_mean_ms=mean_ms("seconds"),
        samples_per_second=round(samples_per_step / float(np.mean(seconds)), 1),
        lookup_stall_ms=mean_ms("lookup_stall"),
        exposed_ms=mean_ms("exposed"),
        crossing_ms=mean_ms("crossing"),
        exposed_share=round(exposed / crossing, 4) if crossing else 0.0,
        stages_ms={
            name: round(1e3 * total / max(1, staged_steps), 3) for name, total in totals.items()
        },
    )


def checkpoints_of(reports: Reports, history: History, kept: Kept) -> Checkpoints:
    """Compute how the store's versions were written and kept in order."""
    stages = reports.stages.values()
    copied = sum(rank_stages["seconds"].get("copy", 0.0) for rank_stages in stages)
    trained = sum(event.fields["seconds"] for event in reports.steps)
    ranks = max(1, len({rank for _, rank in reports.stages}))
    ratios = [rank_stages["dedup"] for rank_stages in stages]
    given, clustered = np.mean(ratios, axis=0) if ratios else (0.0, 0.0)
    versions = history.versions.values()
    dtypes = sorted({version.row_dtype for version in versions})
    return Checkpoints(
        versions=len(reports.stored),
        steps_behind=sum(_steps_during(reports, event) for event in reports.stored),
        copy_share=round(copied / ranks / trained, 4) if trained else 0.0,
        behind_s=round(
            float(np.mean([event.at - event.fields["begin"] for event in reports.stored] or [0])), 3
        ),
        row_dtype="f32" if "f32" in dtypes else ", ".join(dtypes),
        stored_bytes=sum(version.bytes for version in versions),
        exact_bytes=sum(version.rows for version in versions) * EXACT_BYTES,
        dedup_given=round(float(given), 3),
        dedup_clustered=round(float(clustered), 3),
        ids_dropped=sum(rank_stages["compacted"] for rank_stages in stages),
        merges=len(history.merges),
        resets=history.resets,
        purged=len(history.purged),
        kept=kept.versions,
        compared=kept.compared,
        rows_compared=kept.rows,
        problems=kept.problems,
    )


def _steps_during(reports: Reports, stored: RankReport) -> int:
    """Return the number of steps that ended between the copy of a version and its commit."""
    return sum(
        step.life == stored.life
        and step.fields["number"] > stored.fields["step"]
        and step.at < stored.at
        for step in reports.steps
    )


def served_of(
    versions: Sequence[Version], samples: Sequence[Sample], outages: Sequence[Outage]
) -> list[Served]:
    """Find, for each version, the end of the client's first pull of it or of a newer one."""
    newest = np.maximum.accumulate([0, *(sample.version for sample in samples)])[1:]
    served = []
    for version in versions:
        first = int(np.searchsorted(newest, version.version))
        if first == len(newest):
            continue  # not served yet
        end = samples[first].end
        down = any(version.begin < outage.end and end > outage.begin for outage in outages)
        served.append(Served(version, 1e3 * (end - version.begin), down))
    return served


def fresh_of(served: Sequence[Served], messages: dict[str, Any]) -> Fresh:
    """Compute the freshness. messages: the server's own figures."""
    undelayed = [version.fresh_ms for version in served if not version.down]

    def percentile_of(share: int) -> float | None:
        return round(float(np.percentile(undelayed, share)), 2) if undelayed else None

    return Fresh(
        versions=len(undelayed),
        p50_ms=percentile_of(50),
        p90_ms=percentile_of(90),
        p99_ms=percentile_of(99),
        worst_ms=round(max((version.fresh_ms for version in served), default=0.0), 2),
        message_p50_ms=messages["p50_ms"],
        message_p99_ms=messages["p99_ms"],
    )
