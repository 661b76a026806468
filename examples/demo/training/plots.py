"""The plots of the demo with --train, as SVG, and a page that shows them all."""

from __future__ import annotations

import json
import math
import tempfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Final

from examples.demo.training.measures import Outage, Reports, Served
from examples.demo.training.report import TrainingReport
from examples.demo.training.task import WORLD, timeline_of
from examples.demo.training.upkeep import MERGE, PURGE, TENDING, WORK, History, read_tended
from petps.checkpoint.store import BASE
from petps.errors import IoError
from petps.train.timeline import Span, Timeline, new_figure, save_figure

__all__ = [
    "Facts",
    "draw_bars",
    "draw_curves",
    "draw_timeline",
    "draw_versions",
    "make_folder",
    "write_plots",
]

STEPS_PER_POINT: Final = 10  # of the training loss
# Stages that are not part of each step, or are short: they have rows of their own in the picture.
OWN_ROWS: Final = ("arrange", "compact", "copy", *WORK.values())

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Facts:
    """The contents of the plots."""

    report: TrainingReport
    reports: Reports
    served: Sequence[Served]
    outages: Sequence[Outage]
    history: History


def make_folder(folder: Path) -> None:
    """Create the folder and check that it is writable, before any long work. Raise IoError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise IoError(f"{folder}: {error.strerror}: give another folder by --plots") from error


def write_plots(folder: Path, work: Path, facts: Facts) -> None:
    """Write the plots to ``folder``; the time lines come from the work folder."""
    marks = [(outage.step, outage.what) for outage in facts.outages]
    scored = facts.report.scored
    lives = [
        [version for version in scored if version.life == life]
        for life in sorted({version.life for version in scored})
    ]
    loss: dict[str, Sequence[Points]] = {
        "training": [_training_loss(facts.reports, life) for life in (0, 1)],
        "held out, served rows": [
            [(version.step, version.log_loss) for version in life] for life in lives
        ],
    }
    auc: dict[str, Sequence[Points]] = {
        "held out, served rows": [
            [(version.step, version.auc) for version in life] for life in lives
        ]
    }

    def fresh_points(down: bool) -> Points:
        return [
            (served.version.step, served.fresh_ms) for served in facts.served if served.down == down
        ]

    fresh: dict[str, Sequence[Points]] = {
        "while all ran": [fresh_points(down=False)],
        "while one was down": [fresh_points(down=True)],
    }
    draw_curves(folder / "loss.svg", "Loss", "mean logarithmic loss, nats", loss, marks)
    draw_curves(folder / "auc.svg", "AUC of held-out samples", "AUC", auc, marks)
    draw_curves(
        folder / "freshness.svg",
        "Freshness: from the end of a step until its version is served",
        "milliseconds",
        fresh,
        marks,
        dots=True,
        logarithmic=True,
    )
    draw_bars(folder / "stages.svg", "A step by stage, mean of a rank", "ms", _stages(facts.report))
    draw_versions(folder / "versions.svg", facts.history, facts.outages)
    timelines = [work / timeline_of(rank) for rank in range(WORLD)]
    if all(timeline.exists() for timeline in timelines):
        draw_timeline(folder, [Timeline.read(path) for path in timelines], read_tended(work))
    (folder / "report.json").write_text(json.dumps(facts.report.as_json(), indent=2))
    (folder / "index.html").write_text(_page(facts.report))


def _training_loss(reports: Reports, life: int) -> Points:
    """Return one point for each STEPS_PER_POINT steps: the last step, and their mean loss."""
    steps = [event.fields for event in reports.steps if event.life == life]
    parts = [steps[at : at + STEPS_PER_POINT] for at in range(0, len(steps), STEPS_PER_POINT)]
    return [(part[-1]["number"], sum(step["loss"] for step in part) / len(part)) for part in parts]


def _stages(report: TrainingReport) -> Mapping[str, float]:
    if report.stages is None:
        return {}
    stages = report.stages
    return {"whole step": stages.step_mean_ms, "exposed": stages.exposed_ms, **stages.stages_ms}


def draw_curves(
    path: Path,
    title: str,
    y_name: str,
    lines: Mapping[str, Sequence[Points]],
    marks: Sequence[tuple[float, str]],
    *,
    dots: bool = False,
    logarithmic: bool = False,
) -> None:
    """Draw lines or dots over the steps as an SVG, one colour for each name.

    marks: vertical lines with a word.
    """
    figure = new_figure(3.6)
    axes = figure.subplots()
    axes.set(title=title, xlabel="step", ylabel=y_name)
    points = [point for parts in lines.values() for part in parts for point in part]
    if logarithmic and any(value > 0 for _, value in points):
        axes.set_yscale("log")
    for number, (name, parts) in enumerate(lines.items()):
        for part in parts:
            steps, values = [step for step, _ in part], [value for _, value in part]
            style = "." if dots else ".-"
            axes.plot(steps, values, style, color=f"C{number}", label=name)
            name = f"_{name}"  # the legend leaves out names that begin with _
    for step, word in marks:
        axes.axvline(step, color="red", linestyle="--")
        place = ("data", "axes fraction")
        axes.annotate(word, (step, 0.97), xycoords=place, color="red", rotation=90, ha="right",
                      va="top")  # fmt: skip
    axes.grid(axis="y")
    figure.legend(loc="outside right upper")
    save_figure(figure, path)


def draw_bars(path: Path, title: str, unit: str, values: Mapping[str, float]) -> None:
    """Draw an SVG with a bar for each value."""
    figure = new_figure(1 + 0.3 * len(values))
    axes = figure.subplots()
    axes.set(title=title, xlabel=unit)
    axes.bar_label(axes.barh(list(values), list(values.values())), fmt=f"%.2f {unit}", padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.12)  # room for the labels of the bars
    save_figure(figure, path)


def draw_versions(path: Path, history: History, outages: Sequence[Outage]) -> None:
    """Draw an SVG of the store over time: a bar for each version, a mark for each merge.

    A bar begins when the version is written, and ends when it is purged.
    """
    versions = sorted(history.versions.values(), key=lambda version: version.begin)
    ends = [version.end or version.begin for version in versions]
    merges = list(history.merges.values())
    begin = min((version.begin for version in versions), default=0.0)
    end = max([*ends, *(merge.at for merge in merges), begin]) + 1
    names = list(dict.fromkeys(str(version.version) for version in versions))
    figure = new_figure(1.5 + 0.25 * len(names))
    axes = figure.subplots()
    axes.set(title="Versions of the store", xlabel="seconds", ylabel="version (its step)")
    for color, label, chosen in (
        ("C0", "base", [version for version in versions if version.kind == BASE]),
        ("C1", "delta", [version for version in versions if version.kind != BASE]),
    ):
        axes.barh(
            [names.index(str(version.version)) for version in chosen],
            [(version.end or end) - version.begin for version in chosen],
            left=[version.begin - begin for version in chosen],
            color=color,
            label=f"{label}, until it is purged",
        )
    rows = [names.index(str(merge.last)) for merge in merges if str(merge.last) in names]
    times = [merge.at - begin for merge in merges if str(merge.last) in names]
    axes.plot(times, rows, "kD", label="deltas up to this version are merged")
    for outage in outages:
        axes.axvline(outage.begin - begin, color="red", linestyle="--")
        axes.annotate(outage.what, (outage.begin - begin, 0.97), color="red", rotation=90,
                      xycoords=("data", "axes fraction"), ha="right", va="top")  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    figure.legend(loc="outside right upper")
    save_figure(figure, path)


def draw_timeline(folder: Path, ranks: Sequence[Timeline], tended: Sequence[Span]) -> None:
    """Draw an SVG of rank 0 and of the process that tends; write a trace of all processes.

    Both show the shortest time that has a whole version of the store, a merge, a purge, and a batch
    that is arranged: batches are prepared ahead, so a short time may have none.
    """
    begin, end = _choose_window(ranks[0].spans(), tended)
    timelines = [rank.between(begin, end) for rank in ranks]
    beside, drawn = Timeline(keep=True), timelines[0].between(begin, end)
    dense = sorted((span.begin, span.batch) for span in drawn.spans() if span.stage == "dense")
    for span in tended:
        if span.end >= begin and span.begin <= end:
            place = max(0, bisect_right(dense, (span.begin, 0)) - 1)
            batch = dense[place][1] if dense else 0  # the one that was trained: its colour
            beside.add(replace(span, batch=batch))
            drawn.add(replace(span, batch=batch))
    events = [event for rank, part in enumerate(timelines) for event in part.events(rank)]
    events += beside.events(WORLD, TENDING)
    (folder / "timeline.json").write_text(json.dumps({"traceEvents": events}))
    drawn.draw(folder / "timeline.svg", batches=None, own_rows=OWN_ROWS)


def _choose_window(spans: Sequence[Span], tended: Sequence[Span]) -> tuple[float, float]:
    windows = []
    for stored in (span for span in spans if span.stage == "store"):
        begin, end = stored.begin, stored.end
        for stage, part in ((MERGE, tended), (PURGE, tended), ("arrange", spans)):
            others = [(min(begin, span.begin), max(end, span.end))
                      for span in part if span.stage == stage]  # fmt: skip
            begin, end = min(others, key=_length, default=(begin, end))
        windows.append((begin, end))
    return min(windows, key=_length, default=(-math.inf, math.inf))


def _length(window: tuple[float, float]) -> float:
    return window[1] - window[0]


def _page(report: TrainingReport) -> str:
    """Return one page with all plots, which loads nothing from other sites."""
    summary = (
        f"A DLRM on {report.ratings:,} {report.data}, trained by {report.workers} processes, and "
        f"served and scored during training. {'Passed' if report.passed else 'FAILED'}."
    )
    names = ("loss", "auc", "freshness", "stages", "versions", "timeline")
    images = "\n".join(f'<p><img src="{name}.svg" alt="{name}"></p>' for name in names)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>petps demo --train</title>\n'
        f"<body><h1>petps demo --train</h1><p>{escape(summary)} All figures: "
        '<a href="report.json">report.json</a>; <a href="timeline.json">timeline.json</a> opens '
        "in chrome://tracing or Perfetto.</p>\n"
        f"{images}\n<p>The last plot shows the steps of rank 0 while a version is written, merged "
        "and purged: a row for each thread, a color for each batch. Training waits for a copy; log "
        "and store follow behind it, and the store's rows are quantised. Each batch is clustered "
        "(arrange), and repeated ids are dropped now and then (compact). Merge and purge run in a "
        "process beside the training. The plot above shows all versions and merges.</p>"
        "</body></html>\n"
    )
