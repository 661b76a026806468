"""The plots of the demo with --train, as SVG, and a page that shows them all."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

from examples.demo.training.measures import Outage, Reports, Served
from examples.demo.training.report import TrainingReport
from examples.demo.training.task import WORLD
from petps.errors import IoError
from petps.train.timeline import new_figure, save_figure

__all__ = ["Facts", "draw_bars", "draw_curves", "make_folder", "write_plots"]

SMOOTHED: Final = 10  # steps averaged in one point of the training loss

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that is drawn."""

    report: TrainingReport
    reports: Reports
    served: Sequence[Served]
    outages: Sequence[Outage]


def make_folder(folder: Path) -> None:
    """Create the folder and check it, before any long work. Raise IoError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # the folder is writable
    except OSError as error:
        raise IoError(f"{folder}: {error.strerror}: give another folder by --plots") from error


def write_plots(folder: Path, work: Path, facts: Facts) -> None:
    """Write the plots to ``folder``; the time lines come from the work folder."""
    marks = [(each.step, each.what) for each in facts.outages]
    scored = facts.report.scored
    lives = sorted({each.life for each in scored})
    training = [_training_loss(facts.reports, life) for life in (0, 1)]
    held_out = [[(e.step, e.log_loss) for e in scored if e.life == life] for life in lives]
    loss: dict[str, Sequence[Points]] = {"training": training, "held out, served rows": held_out}
    auc: dict[str, Sequence[Points]] = {
        "held out, served rows": [
            [(each.step, each.auc) for each in scored if each.life == life] for life in lives
        ]
    }
    fresh: dict[str, Sequence[Points]] = {
        "while all ran": [[(e.version.step, e.fresh_ms) for e in facts.served if not e.down]],
        "while one was down": [[(e.version.step, e.fresh_ms) for e in facts.served if e.down]],
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
    draw_bars(
        folder / "stages.svg", "A step by stage, mean of a worker", "ms", _stages(facts.report)
    )
    lines = [work / f"timeline-{rank}" for rank in range(WORLD)]
    if all(line.with_suffix(".json").exists() for line in lines):
        events = [
            event
            for line in lines
            for event in json.loads(line.with_suffix(".json").read_text())["traceEvents"]
        ]
        (folder / "timeline.json").write_text(json.dumps({"traceEvents": events}))
        (folder / "timeline.svg").write_text(lines[0].with_suffix(".svg").read_text())
    (folder / "report.json").write_text(json.dumps(facts.report.as_json(), indent=2))
    (folder / "index.html").write_text(_page(facts.report))


def _training_loss(reports: Reports, life: int) -> Points:
    """Return the loss averaged over each SMOOTHED steps."""
    steps = [event.more for event in reports.steps if event.life == life]
    parts = [steps[at : at + SMOOTHED] for at in range(0, len(steps), SMOOTHED)]
    return [(part[-1]["number"], sum(each["loss"] for each in part) / len(part)) for part in parts]


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


def _page(report: TrainingReport) -> str:
    """Return one page with all plots, which loads nothing from other sites."""
    summary = (
        f"A DLRM on {report.ratings:,} {report.data}, trained by {report.workers} workers, served "
        f"and scored while it was trained. {'Passed' if report.passed else 'FAILED'}."
    )
    names = ("loss", "auc", "freshness", "stages", "timeline")
    images = "\n".join(f'<p><img src="{name}.svg" alt="{name}"></p>' for name in names)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>petps demo --train</title>\n'
        f"<body><h1>petps demo --train</h1><p>{escape(summary)} All figures: "
        '<a href="report.json">report.json</a>; <a href="timeline.json">timeline.json</a> opens '
        "in chrome://tracing or Perfetto.</p>\n"
        f"{images}\n<p>The last one: four steps of worker 0, and what ran ahead of later ones "
        "meanwhile; a row for each thread, a color for each batch.</p></body></html>\n"
    )
