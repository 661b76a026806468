"""Sums of what workers reported and the client saw: losses, stages, freshness, outages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from examples.demo.traffic import Sample
from examples.demo.training.report import Fresh, Stages
from examples.demo.training.workers import WorkerReport

__all__ = ["Outage", "Reports", "Served", "Version", "fresh_of", "served_of", "stages_of"]


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the log. stored: it is in the store too. begin: when its step had ended."""

    version: int
    step: int
    life: int
    stored: bool
    begin: float
    training_loss: float


@dataclass(frozen=True, slots=True)
class Outage:
    """A kill at ``step``, whose effect lasts from ``begin`` to ``end`` (time.monotonic())."""

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
    """All reports of the workers. ``step``: the last one trained, in the newest life."""

    steps: list[WorkerReport] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    stages: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    ended: int = 0
    step: int = 0
    _losses: list[float] = field(default_factory=list)
    _life: int = 0

    def take(self, event: WorkerReport) -> None:
        """Add a report."""
        if event.life != self._life:
            self._life = event.life
            self._losses.clear()
        if event.what == "ready":
            self.step = event.more["restored"]
        elif event.what == "step":
            self.steps.append(event)
            self.step = event.more["number"]
            self._losses.append(event.more["loss"])
        elif event.what == "stages":
            self.stages[event.life, event.rank] = event.more
        elif event.what == "ended":
            self.ended += 1
        elif event.what == "version":
            more = event.more
            # The step that ends with this version reports itself only after the version.
            loss = float(np.mean(self._losses)) if self._losses else float("nan")
            self._losses.clear()
            version = Version(
                more["version"], more["step"], event.life, more["stored"], more["begin"], loss
            )
            self.versions.append(version)


def stages_of(reports: Reports, samples_a_step: int) -> Stages:
    """Compute the stages over all lives and workers."""
    more = [event.more for event in reports.steps]
    seconds = np.array([each["seconds"] for each in more])
    steps = sum(each["steps"] for each in reports.stages.values())
    totals: dict[str, float] = {}
    for each in reports.stages.values():
        for name, total in each["seconds"].items():
            totals[name] = totals.get(name, 0.0) + total

    def mean_ms(name: str) -> float:
        return round(1e3 * float(np.mean([each[name] for each in more])), 3)

    crossing = sum(each["crossing"] for each in more)
    exposed = sum(each["exposed"] for each in more)
    return Stages(
        steps=len(more),
        step_p50_ms=round(1e3 * float(np.median(seconds)), 3),
        step_mean_ms=mean_ms("seconds"),
        samples_per_second=round(samples_a_step / float(np.mean(seconds)), 1),
        lookup_stall_ms=mean_ms("lookup_stall"),
        exposed_ms=mean_ms("exposed"),
        crossing_ms=mean_ms("crossing"),
        exposed_share=round(exposed / crossing, 4) if crossing else 0.0,
        stages_ms={name: round(1e3 * total / max(1, steps), 3) for name, total in totals.items()},
    )


def served_of(
    versions: Sequence[Version], samples: Sequence[Sample], outages: Sequence[Outage]
) -> list[Served]:
    """Find, for each version, the end of the client's first pull of it or of a newer one."""
    newest = np.maximum.accumulate([0, *(sample.version for sample in samples)])[1:]
    found = []
    for version in versions:
        at = int(np.searchsorted(newest, version.version))
        if at == len(newest):
            continue  # the last one; the course waits for it separately
        end = samples[at].end
        down = any(version.begin < each.end and end > each.begin for each in outages)
        found.append(Served(version, 1e3 * (end - version.begin), down))
    return found


def fresh_of(served: Sequence[Served], messages: dict[str, Any]) -> Fresh:
    """Compute the freshness. messages: the server's own figures."""
    quiet = [each.fresh_ms for each in served if not each.down]
    p50, p90, p99 = np.percentile(quiet or [0.0], (50, 90, 99))
    return Fresh(
        versions=len(quiet),
        p50_ms=round(float(p50), 2),
        p90_ms=round(float(p90), 2),
        p99_ms=round(float(p99), 2),
        worst_ms=round(max((each.fresh_ms for each in served), default=0.0), 2),
        message_p50_ms=messages["p50_ms"],
        message_p99_ms=messages["p99_ms"],
    )
