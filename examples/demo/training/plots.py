"""The plots of the demo with --train, as SVG, and a page that shows them all."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from examples.demo.training.measures import Heard, Outage, Served
from examples.demo.training.report import TrainingReport
from examples.demo.training.task import WORLD
from petps.errors import IoError
from petps.train.timeline import COLORS

__all__ = ["Facts", "bars", "curves", "make_folder", "write_plots"]

WIDTH: Final = 900
HEIGHT: Final = 360
LEFT: Final = 80
RIGHT: Final = 190  # room for the names of the lines
TOP: Final = 40
BOTTOM: Final = 50
SMOOTHED: Final = 10  # steps averaged in one point of the training loss

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that is drawn."""

    report: TrainingReport
    heard: Heard
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
    training = [_training_loss(facts.heard, life) for life in (0, 1)]
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
    drawn = {
        "loss": curves("Loss", "step", "mean logarithmic loss, nats", loss, marks),
        "auc": curves("AUC of held-out samples", "step", "AUC", auc, marks),
        "freshness": curves(
            "Freshness: from the end of a step until its version is served", "step",
            "milliseconds", fresh, marks, dots=True, logarithmic=True,
        ),
        "stages": bars("A step by stage, mean of a worker", "ms", _stages(facts.report)),
    }  # fmt: skip
    for name, text in drawn.items():
        (folder / f"{name}.svg").write_text(text)
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
    (folder / "index.html").write_text(_page(facts.report, [*drawn, "timeline"]))


def _training_loss(heard: Heard, life: int) -> Points:
    """Return the loss averaged over each SMOOTHED steps."""
    steps = [said.more for said in heard.steps if said.life == life]
    parts = [steps[at : at + SMOOTHED] for at in range(0, len(steps), SMOOTHED)]
    return [(part[-1]["number"], sum(each["loss"] for each in part) / len(part)) for part in parts]


def _stages(report: TrainingReport) -> Mapping[str, float]:
    if report.stages is None:
        return {}
    stages = report.stages
    return {"whole step": stages.step_mean_ms, "exposed": stages.exposed_ms, **stages.stages_ms}


def curves(
    title: str,
    x_name: str,
    y_name: str,
    lines: Mapping[str, Sequence[Points]],
    marks: Sequence[tuple[float, str]],
    *,
    dots: bool = False,
    logarithmic: bool = False,
) -> str:
    """Draw lines or dots as an SVG, one colour for each name. marks: vertical lines with a word."""
    points = [point for each in lines.values() for part in each for point in part]
    xs = [x for x, _ in points] or [0.0]
    ys = [y for _, y in points if not logarithmic or y > 0] or [1.0]
    low, high = (math.log10(min(ys)), math.log10(max(ys))) if logarithmic else (min(ys), max(ys))
    span = (high - low) or 1.0
    low, high = low - 0.05 * span, high + 0.05 * span
    x_low, x_high = min(0.0, *xs), max(*xs, 1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        value = math.log10(max(y, 1e-9)) if logarithmic else y
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    out = _opened(title, HEIGHT)
    for shown in _decades(low, high) if logarithmic else _ticks(low, high):
        _, y = place(0, shown)
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        out.append(_text(LEFT - 6, y + 4, f"{shown:.4g}", "end"))
    for value in _ticks(x_low, x_high):
        x, _ = place(value, 1)
        out.append(_text(x, HEIGHT - BOTTOM + 16, f"{value:g}", "middle"))
    out.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_name, "middle"))
    out.append(
        f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_name)}</text>"
    )
    for at, what in marks:
        x, _ = place(at, 1)
        out.append(
            f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#b00" stroke-dasharray="4 3"/>'
        )
        right = x > (LEFT + WIDTH - RIGHT) / 2  # keeps the word inside the plot
        out.append(_text(x - 4 if right else x + 4, TOP + 10, what, "end" if right else "start",
                         "#b00"))  # fmt: skip
    for number, (name, parts) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        for part in parts:
            placed = [place(x, y) for x, y in part]
            if not dots and placed:
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
                out.append(
                    f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>'
                )
            for (x, y), (step, value) in zip(placed, part, strict=True):
                out.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}">'
                    f"<title>{escape(name)}: {value:.6g} at {step:g}</title></circle>"
                )
        y = TOP + 10 + 18 * number
        out.append(f'<rect x="{WIDTH - RIGHT + 12}" y="{y - 9}" width="10" height="10" '
                   f'fill="{color}"/>')  # fmt: skip
        out.append(_text(WIDTH - RIGHT + 28, y, name, "start"))
    return "\n".join([*out, "</svg>"])


def bars(title: str, unit: str, values: Mapping[str, float]) -> str:
    """Draw an SVG with a bar for each value."""
    height = TOP + 24 * len(values) + 16
    scale = (WIDTH - LEFT - RIGHT) / max(1e-9, max(values.values(), default=1.0))
    out = _opened(title, height)
    for number, (name, value) in enumerate(values.items()):
        y = TOP + 24 * number
        color = COLORS[number % len(COLORS)]
        out.append(_text(LEFT + 24, y + 13, name, "end"))
        out.append(
            f'<rect x="{LEFT + 30}" y="{y}" width="{max(value * scale, 0.5):.1f}" height="18" '
            f'fill="{color}"/>'
        )
        out.append(_text(LEFT + 36 + value * scale, y + 13, f"{value:.2f} {unit}", "start"))
    return "\n".join([*out, "</svg>"])


def _opened(title: str, height: int) -> list[str]:
    size = f'width="{WIDTH}" height="{height}"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]


def _text(x: float, y: float, text: str, anchor: str, color: str = "#333") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return some round values from low to high."""
    raw = (high - low) / 8
    size = 10 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next((size * each for each in (1, 2, 5, 10) if size * each >= raw), size)
    first = math.ceil(low / step)
    return [round(number * step, 10) for number in range(first, math.floor(high / step) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times each power of ten, between 10**low and 10**high."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    values = [each * 10.0**power for power in powers for each in (1, 2, 5)]
    return [value for value in values if low <= math.log10(value) <= high]


def _page(report: TrainingReport, names: Sequence[str]) -> str:
    """Return one page with all plots, which loads nothing from other sites."""
    said = (
        f"A DLRM on {report.ratings:,} {report.data}, trained by {report.workers} workers, served "
        f"and scored while it was trained. {'Passed' if report.passed else 'FAILED'}."
    )
    images = "\n".join(f'<p><img src="{name}.svg" alt="{name}"></p>' for name in names)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>petps demo --train</title>\n'
        f"<body><h1>petps demo --train</h1><p>{escape(said)} All figures: "
        '<a href="report.json">report.json</a>; <a href="timeline.json">timeline.json</a> opens '
        "in chrome://tracing or Perfetto.</p>\n"
        f"{images}\n<p>The last one: four steps of worker 0, and what ran ahead of later ones "
        "meanwhile; a row for each thread, a color for each batch.</p></body></html>\n"
    )
